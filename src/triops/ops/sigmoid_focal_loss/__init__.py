"""sigmoid_focal_loss: the classification loss of one-stage detectors, forward and backward."""

from __future__ import annotations

from typing import Any, Literal, get_args

import torch
from torch import Tensor

from triops import _check, _op
from triops.ops.sigmoid_focal_loss import reference

Reduction = Literal["mean", "sum", "none"]
REDUCTIONS: tuple[Reduction, ...] = get_args(Reduction)


def sigmoid_focal_loss(
    input: Tensor,
    target: Tensor,
    gamma: float = 2.0,
    alpha: float = 0.25,
    weight: Tensor | None = None,
    reduction: Reduction = "mean",
) -> Tensor:
    """Focal loss over one sigmoid per class: `-alpha (1 - p)^gamma log(p)` for the class of the target and
    `-(1 - alpha) p^gamma log(1 - p)` for every other class.

    Args:
        input: float tensor [N, C] of scores before the sigmoid. Half types are computed in float32.
        target: int64 [N]: the class of each row. Any number outside of [0, C) means background, no class at all.
        gamma: how strongly easy examples are weighted down; at least 0.
        alpha: the weight of the target's class against the others.
        weight: tensor [C] of the dtype of `input`: a row is weighted by its target's class, background by 1.
        reduction: "mean" divides the sum by N, not by N * C; "sum"; "none" gives the loss of every value.

    Returns:
        A scalar, or a tensor [N, C] for "none", of the dtype of `input`. Differentiable in `input`, once. The mean
        over no rows is NaN.

    Raises:
        ValueError, TypeError: on a wrong shape, dtype, device or parameter.

    >>> import torch, triops
    >>> scores = torch.tensor([[0.0, 3.0], [0.0, -3.0]])
    >>> triops.sigmoid_focal_loss(scores, torch.tensor([1, 2]), reduction="none")
    tensor([[1.2997e-01, 2.7321e-05],
            [1.2997e-01, 8.1962e-05]])
    """
    if not isinstance(reduction, str):
        raise TypeError(f"sigmoid_focal_loss: reduction must be a string, got {type(reduction).__name__}")
    _check.Checker("sigmoid_focal_loss").choice("reduction", reduction, REDUCTIONS)
    loss: Tensor = _sigmoid_focal_loss(input, target, weight, gamma, alpha)
    if reduction == "none":
        return loss
    total = loss.sum(dtype=torch.promote_types(loss.dtype, torch.float32))
    return (total / input.shape[0] if reduction == "mean" else total).to(loss.dtype)


def _check_forward(input: Tensor, target: Tensor, weight: Tensor | None, gamma: float, alpha: float) -> None:
    _check_terms(_check.Checker("sigmoid_focal_loss"), input, target, weight, gamma, alpha)


def _check_backward(
    grad_output: Tensor, input: Tensor, target: Tensor, weight: Tensor | None, gamma: float, alpha: float
) -> None:
    c = _check.Checker("sigmoid_focal_loss_backward")
    c.shape("grad_output", grad_output, "N", "C")
    _check_terms(c, input, target, weight, gamma, alpha)
    c.same_dtype(grad_output=grad_output, input=input)
    c.same_device(grad_output=grad_output, input=input)


def _check_terms(
    c: _check.Checker, input: Tensor, target: Tensor, weight: Tensor | None, gamma: float, alpha: float
) -> None:
    c.shape("input", input, "N", "C")
    c.shape("target", target, "N")
    c.dtype("input", input, _check.FLOATS)
    c.dtype("target", target, (torch.int64,))
    c.same_device(input=input, target=target)
    if weight is not None:
        c.shape("weight", weight, "C")
        c.same_dtype(input=input, weight=weight)
        c.same_device(input=input, weight=weight)
    c.finite("gamma", gamma)
    c.at_least("gamma", gamma, 0)
    c.finite("alpha", alpha)


def _fake_forward(input: Tensor, target: Tensor, weight: Tensor | None, gamma: float, alpha: float) -> Tensor:
    return input.new_empty(input.shape)


def _fake_backward(
    grad_output: Tensor, input: Tensor, target: Tensor, weight: Tensor | None, gamma: float, alpha: float
) -> Tensor:
    return input.new_empty(input.shape)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    input, target, weight, ctx.gamma, ctx.alpha = inputs
    ctx.save_for_backward(input, target, weight)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return _sigmoid_focal_loss_backward(grad, *ctx.saved_tensors, ctx.gamma, ctx.alpha), None, None, None, None


_sigmoid_focal_loss_backward = _op.define(
    reference.sigmoid_focal_loss_backward, check=_check_backward, fake=_fake_backward,
    backward=_op.no_second_derivative,
)  # fmt: skip
_sigmoid_focal_loss = _op.define(
    reference.sigmoid_focal_loss, check=_check_forward, fake=_fake_forward, setup_context=_setup_context,
    backward=_backward,
)  # fmt: skip

__all__ = ["sigmoid_focal_loss"]
