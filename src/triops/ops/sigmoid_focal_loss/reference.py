"""The specification of sigmoid_focal_loss, in plain torch.

With y = -x for the class of a row's target and y = x for the other classes, a value's share of the loss is
    balance * sigmoid(y)^gamma * softplus(y),    balance = alpha for the target's class, else 1 - alpha,
which needs neither the logarithm of a rounded probability nor two cases.
"""

from __future__ import annotations

from typing import Optional

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid


def sigmoid_focal_loss(
    input: Tensor, target: Tensor, weight: Optional[Tensor], gamma: float, alpha: float  # noqa: UP045
) -> Tensor:  # fmt: skip
    y, scale, _ = _terms(input, target, weight, alpha)
    return (scale * _power(y, gamma) * _softplus(y)).to(input.dtype)


def sigmoid_focal_loss_backward(
    grad_output: Tensor, input: Tensor, target: Tensor, weight: Optional[Tensor], gamma: float, alpha: float  # noqa: UP045
) -> Tensor:  # fmt: skip
    y, scale, sign = _terms(input, target, weight, alpha)
    bounded = y.clamp(max=1000)  # from here on sigmoid(-y) is 0, and 0 times infinity would be NaN
    slope = gamma * torch.sigmoid(-y) * _softplus(bounded) + torch.sigmoid(y)
    return (grad_output.to(y.dtype) * scale * sign * (_power(y, gamma) * slope)).to(input.dtype)


def _terms(input: Tensor, target: Tensor, weight: Tensor | None, alpha: float) -> tuple[Tensor, Tensor, Tensor]:
    """y, what multiplies the loss, and dy/dx; in float32 at least."""
    x = input.to(torch.promote_types(input.dtype, torch.float32))
    classes = input.shape[1]
    hit = target[:, None] == torch.arange(classes, device=input.device)
    sign = torch.ones_like(x).masked_fill(hit, -1)
    scale = torch.full_like(x, 1 - alpha).masked_fill(hit, alpha)
    if weight is not None and classes:
        background = (target < 0) | (target >= classes)
        scale = scale * weight.to(x.dtype)[target.clamp(0, classes - 1)].masked_fill(background, 1)[:, None]
    return x * sign, scale, sign


def _power(y: Tensor, gamma: float) -> Tensor:
    """sigmoid(y)^gamma; 0^0 is 1."""
    return torch.exp(gamma * logsigmoid(y).clamp(min=-1e30))


def _softplus(y: Tensor) -> Tensor:
    """log(1 + e^y); torch's own function of this name loses precision beyond a threshold."""
    return -logsigmoid(-y)
