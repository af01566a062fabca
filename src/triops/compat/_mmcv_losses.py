"""The focal losses of `mmcv._ext`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

operators = torch.ops.triops


def _given(weight: Tensor) -> Tensor | None:
    """mmcv hands in an empty tensor where there is no weight."""
    return weight if weight.numel() else None


def sigmoid_focal_loss_forward(
    input: Tensor, target: Tensor, weight: Tensor, output: Tensor, gamma: float, alpha: float
) -> None:
    output.copy_(operators.sigmoid_focal_loss(input, target, _given(weight), gamma, alpha))


def sigmoid_focal_loss_backward(
    input: Tensor, target: Tensor, weight: Tensor, grad_input: Tensor, gamma: float, alpha: float
) -> None:
    ones = input.new_ones(()).expand_as(input)
    grad_input.copy_(operators.sigmoid_focal_loss_backward(ones, input, target, _given(weight), gamma, alpha))


def softmax_focal_loss_forward(
    input: Tensor, target: Tensor, weight: Tensor, output: Tensor, gamma: float, alpha: float
) -> None:
    """One loss a row, from probabilities, as mmcv hands them in. No network here needs it, so plain torch does."""
    p, _, scale = _target_terms(input, target, weight, alpha)
    output.copy_(-scale * (1 - p).pow(gamma) * p.log())


def softmax_focal_loss_backward(
    input: Tensor, target: Tensor, weight: Tensor, buff: Tensor, grad_input: Tensor, gamma: float, alpha: float
) -> None:
    p, hit, scale = _target_terms(input, target, weight, alpha)
    slope = gamma * (1 - p).pow(gamma - 1) * p * p.log() if gamma else 0
    buff.copy_(scale * (slope - (1 - p).pow(gamma)))
    grad_input.copy_(buff[:, None] * (hit.to(input.dtype) - input))


def _target_terms(softmax: Tensor, target: Tensor, weight: Tensor, alpha: float) -> tuple[Tensor, Tensor, Tensor]:
    """The probability of each row's target, where it stands, and what multiplies the loss: 0 without a class."""
    inside = (target >= 0) & (target < softmax.shape[1])
    label = torch.where(inside, target, 0)
    wide = softmax.to(torch.promote_types(softmax.dtype, torch.float32))
    p = wide.gather(1, label[:, None])[:, 0].clamp(min=torch.finfo(torch.float32).tiny)
    scale = alpha * inside * (weight.to(wide.dtype)[label] if weight.numel() else 1)
    return p, torch.arange(softmax.shape[1], device=target.device) == target[:, None], scale


FUNCTIONS: dict[str, Callable[..., Any]] = {
    function.__name__: function
    for function in (
        sigmoid_focal_loss_forward, sigmoid_focal_loss_backward, softmax_focal_loss_forward,
        softmax_focal_loss_backward,
    )
}  # fmt: skip
