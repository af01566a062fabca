"""deform_conv2d: a convolution whose taps read the map at learned places (deformable convolution v1 and v2)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from triops import _check, _op
from triops._dtypes import autocast, no_autocast
from triops._rois import HALVES, empty_like_format
from triops.ops.deform_conv2d import reference

MOST_STEPS = 2**20  # of stride, padding and dilation


def deform_conv2d(
    input: Tensor, offset: Tensor, weight: Tensor, bias: Tensor | None = None, stride: int | Sequence[int] = 1,
    padding: int | Sequence[int] = 0, dilation: int | Sequence[int] = 1, mask: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Deformable convolution: v2 with a mask, v1 without. Differentiable in input, offset, weight, bias and mask.

    Under tap (k, l), output pixel (i, j) reads the map bilinearly at row `i * stride - padding + k * dilation + dy`
    and column `j * stride - padding + l * dilation + dx`, times its mask. What lies off the map is 0. The number of
    groups is the channels of `input` over those of `weight`; the number G of offset groups, each for an equal part
    of the channels, follows from the channels of `offset`.

    Half types are summed in float32; float32 uses less than float32 on a GPU only where
    `torch.backends.cuda.matmul.allow_tf32` says so. Inside `torch.autocast` input, weight, bias and mask are cast to
    its dtype, and the offset stays; float64 stays, as in torch's layers.

    Args:
        input: float tensor [B, C, H, W]. Contiguous and channels_last are read as they lie.
        offset: tensor [B, 2 * G * kH * kW, OH, OW] of the input's dtype, or float32 for an input of half precision:
            coordinates are computed in float32 whatever the features are. For each group and tap dy, then dx. One
            that is not finite lies off the map.
        weight: tensor [N, C / groups, kH, kW] of the input's dtype.
        bias: tensor [N] of the input's dtype, or None.
        stride, padding, dilation: one integer or two (along y and x), at most 2**20.
        mask: tensor [B, G * kH * kW, OH, OW], of a dtype as the offset; None: all 1.

    Returns:
        Tensor [B, N, OH, OW] of the input's dtype, which lies in memory as the input does; OH is
        `(H + 2 * padding - dilation * (kH - 1) - 1) // stride + 1`, OW likewise. Empty where B, N, OH or OW is 0.

    Raises:
        ValueError, TypeError: on a wrong shape, dtype, device, stride, padding or dilation.

    One tap that reads half a pixel to the right, on a row of three pixels:

    >>> import torch, triops
    >>> row, offset = torch.tensor([[[[10.0, 20.0, 40.0]]]]), torch.zeros(1, 2, 1, 3)
    >>> offset[:, 1] = 0.5
    >>> triops.deform_conv2d(row, offset, torch.ones(1, 1, 1, 1))
    tensor([[[[15., 30., 20.]]]])
    """
    steps = _steps("deform_conv2d", stride, padding, dilation)
    if not no_autocast():
        tensors = [autocast(t) if isinstance(t, Tensor) else t for t in (input, weight, mask, bias)]
        input, weight, mask, bias = tensors  # type: ignore[assignment]
    return _forward(input, offset, weight, mask, bias, *steps)  # type: ignore[no-any-return]


def deform_conv2d_backward(
    grad: Tensor, input: Tensor, offset: Tensor, weight: Tensor, mask: Tensor | None,
    stride: int | Sequence[int], padding: int | Sequence[int], dilation: int | Sequence[int], of_inputs: bool = True,
    of_weight: bool = True,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of input, offset, mask and weight of `deform_conv2d`; called by autograd, and public.

    grad: [B, N, OH, OW] of the input's dtype. of_inputs, of_weight: whether the first three and the last are wanted.
    What is not, and the gradient of a mask that is None, is an empty tensor. The gradient of the bias is
    `grad.sum((0, 2, 3))`. The rest as given to the forward, errors too. The same bits on every run on a CPU, and on a
    GPU under `torch.use_deterministic_algorithms(True)`.
    """
    steps = _steps("deform_conv2d_backward", stride, padding, dilation)
    return _backward_operator(  # type: ignore[no-any-return]
        grad, input, offset, weight, mask, *steps, of_inputs, of_weight
    )


def _steps(operator: str, stride: Any, padding: Any, dilation: Any) -> list[list[int]]:
    """Each of them, one integer or two, as a list of two."""
    if type(stride) is int and type(padding) is int and type(dilation) is int:  # as most calls have them
        return [[stride, stride], [padding, padding], [dilation, dilation]]
    c, steps = _check.Checker(operator), []
    for name, value in (("stride", stride), ("padding", padding), ("dilation", dilation)):
        one = _check.as_integer(value)
        steps.append([one, one] if one is not None else c.integers(name, value))
    return steps


def _check_operands(
    c: _check.Checker, input: Tensor, offset: Tensor, weight: Tensor, mask: Tensor | None, stride: list[int],
    padding: list[int], dilation: list[int],
) -> None:  # fmt: skip
    c.shape("input", input, "B", "C", "H", "W")
    c.shape("weight", weight, "N", "C / groups", "kH", "kW")
    c.shape("offset", offset, "B", "2 * G * kH * kW", "OH", "OW")
    tensors = {"input": input, "offset": offset, "weight": weight}
    c.dtype("input", input, _check.FLOATS)
    c.same_dtype(input=input, weight=weight)
    allowed = (input.dtype, torch.float32) if input.dtype in HALVES else (input.dtype,)
    c.dtype("offset", offset, allowed)
    if mask is not None:
        c.shape("mask", mask, "B", "G * kH * kW", "OH", "OW")
        c.dtype("mask", mask, allowed)
        tensors["mask"] = mask
    c.same_device(**tensors)
    for name, steps, least in (("stride", stride, 1), ("padding", padding, 0), ("dilation", dilation, 1)):
        if len(steps) != 2:
            c.fail(f"{name} must be one integer or two (along y and x), got {len(steps)}")
        for step in steps:
            c.integer(name, step, least, MOST_STEPS)
    _check_groups(c, input.shape[1], weight, offset, mask)
    axes = ("H", "W"), input.shape[2:], weight.shape[2:], offset.shape[2:], stride, padding, dilation
    for name, size, kernel, got, step, pad, spread in zip(*axes, strict=True):
        if any(isinstance(number, torch.SymInt) for number in (size, kernel, got)):
            continue  # a look at it while tracing would become a condition
        if _check.too_many(size) or _check.too_many(got):
            c.fail(f"{name} must be at most 2**30, got {size} and {got} of the output")
        extent = spread * (kernel - 1) + 1
        if 0 < size + 2 * pad < extent and size > 0:
            c.fail(f"the kernel must fit into the padded input, got {extent} pixels for {size + 2 * pad} along {name}")
        expected = max((size + 2 * pad - extent) // step + 1, 0)
        if got != expected:
            c.fail(f"O{name} of offset must be {expected} for an input of {name} = {size}, got {got}")


def _check_groups(c: _check.Checker, channels: int, weight: Tensor, offset: Tensor, mask: Tensor | None) -> None:
    outputs, own, *kernel = weight.shape
    taps = kernel[0] * kernel[1]
    if any(isinstance(n, torch.SymInt) for n in (channels, outputs, own, taps, offset.shape[1])):
        return
    if taps == 0:
        c.fail(f"weight must have at least one tap, got {list(weight.shape)}")
    if (own == 0) != (channels == 0) or (own and channels % own):
        c.fail(f"the channels of weight, C / groups, must divide C = {channels}, got {own}")
    if own and outputs % (channels // own):
        c.fail(f"groups = {channels // own} must divide the N = {outputs} channels of the output")
    offset_groups, rest = divmod(offset.shape[1], 2 * taps)
    if rest or offset_groups == 0 or channels % offset_groups:
        c.fail(f"offset must have 2 * G * kH * kW = G * {2 * taps} channels, and G divide C = {channels}, "
               f"got {offset.shape[1]}")  # fmt: skip
    if mask is not None and mask.shape[1] * 2 != offset.shape[1]:
        c.fail(f"mask must have G * kH * kW = {offset.shape[1] // 2} channels, got {mask.shape[1]}")


def _check_forward(
    input: Tensor, offset: Tensor, weight: Tensor, mask: Tensor | None, bias: Tensor | None, stride: list[int],
    padding: list[int], dilation: list[int],
) -> None:  # fmt: skip
    c = _check.Checker("deform_conv2d")
    _check_operands(c, input, offset, weight, mask, stride, padding, dilation)
    if bias is not None:
        c.shape("bias", bias, "N")
        c.same_dtype(input=input, bias=bias)
        c.same_device(input=input, bias=bias)


def _check_backward(
    grad: Tensor, input: Tensor, offset: Tensor, weight: Tensor, mask: Tensor | None, stride: list[int],
    padding: list[int], dilation: list[int], of_inputs: bool, of_weight: bool,
) -> None:  # fmt: skip
    c = _check.Checker("deform_conv2d_backward")
    _check_operands(c, input, offset, weight, mask, stride, padding, dilation)
    c.shape("grad", grad, "B", "N", "OH", "OW")
    c.same_dtype(grad=grad, input=input)
    c.same_device(grad=grad, input=input)


def _fake_forward(
    input: Tensor, offset: Tensor, weight: Tensor, mask: Tensor | None, bias: Tensor | None, stride: list[int],
    padding: list[int], dilation: list[int],
) -> Tensor:  # fmt: skip
    return empty_like_format((input.shape[0], weight.shape[0], *offset.shape[2:]), input.dtype, input)


def _fake_backward(
    grad: Tensor, input: Tensor, offset: Tensor, weight: Tensor, mask: Tensor | None, stride: list[int],
    padding: list[int], dilation: list[int], of_inputs: bool, of_weight: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    return reference.empty_gradients(input, offset, weight, mask, of_inputs, of_weight)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    input, offset, weight, mask, _, *ctx.steps = inputs
    ctx.save_for_backward(input, offset, weight, mask)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    input, offset, weight, mask = ctx.saved_tensors
    needs = ctx.needs_input_grad
    of_inputs, of_weight = needs[0] or needs[1] or needs[3], needs[2]
    grads: list[Tensor | None] = [None] * 4
    if of_inputs or of_weight:
        grads = list(
            _backward_operator.of_backward(grad, input, offset, weight, mask, *ctx.steps, of_inputs, of_weight)
        )
    grad_input, grad_offset, grad_mask, grad_weight = grads
    return (
        grad_input if needs[0] else None, grad_offset if needs[1] else None, grad_weight if needs[2] else None,
        grad_mask if needs[3] else None, grad.sum((0, 2, 3)) if needs[4] else None, None, None, None,
    )  # fmt: skip


_backward_operator = _op.define(
    reference.deform_conv2d_backward, check=_check_backward, fake=_fake_backward, backward=_op.no_second_derivative
)
_forward = _op.define(
    reference.deform_conv2d, check=_check_forward, fake=_fake_forward, setup_context=_setup_context, backward=_backward
)

__all__ = ["deform_conv2d", "deform_conv2d_backward"]
