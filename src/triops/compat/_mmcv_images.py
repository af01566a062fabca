"""Filters and activations of StyleGAN in `mmcv._ext`, in plain torch. Empty tensors stand for arguments left out."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from triops._plain import images

ACTIVATIONS = dict(enumerate(images.ACTIVATIONS, 1))


def _given(tensor: Tensor) -> Tensor | None:
    return tensor if tensor.numel() else None


def bias_act(
    input: Tensor, bias: Tensor, xref: Tensor, yref: Tensor, dy: Tensor, grad: int, dim: int, act: int, alpha: float,
    gain: float, clamp: float,
) -> Tensor:  # fmt: skip
    rules = dim, ACTIVATIONS[act], alpha, gain, clamp
    if grad == 0:
        return images.bias_act(input, _given(bias), *rules)
    return images.bias_act_derivative(input, _given(xref), _given(bias), _given(yref), _given(dy), grad, *rules)


def fused_bias_leakyrelu(
    input: Tensor, bias: Tensor, empty: Tensor, act: int, grad: int, alpha: float, scale: float
) -> Tensor:
    """`empty` is the output of the forward pass where `grad` is not 0. The bias is added to gradients, too."""
    if grad == 2:
        return torch.zeros_like(input)
    value = images.plus_bias(input, _given(bias), 1)
    if ACTIVATIONS[act] == "lrelu":
        value = torch.where((empty if grad else value) > 0, value, value * alpha)
    return (value * scale).to(input.dtype)


def upfirdn2d(
    input: Tensor, filter: Tensor, upx: int, upy: int, downx: int, downy: int, padx0: int, padx1: int, pady0: int,
    pady1: int, flip: bool, gain: float,
) -> Tensor:  # fmt: skip
    return images.upfirdn2d(input, filter, (upx, upy), (downx, downy), (padx0, padx1, pady0, pady1), bool(flip), gain)


def upfirdn2d_of_mmcv_1(
    input: Tensor, kernel: Tensor, up_x: int, up_y: int, down_x: int, down_y: int, pad_x0: int, pad_x1: int,
    pad_y0: int, pad_y1: int,
) -> Tensor:  # fmt: skip
    """Images [N, H, W, C]."""
    rules = (up_x, up_y), (down_x, down_y), (pad_x0, pad_x1, pad_y0, pad_y1), False, 1.0
    return images.upfirdn2d(input.permute(0, 3, 1, 2), kernel, *rules).permute(0, 2, 3, 1).contiguous()


@functools.wraps(upfirdn2d)
def upfirdn2d_of_either(*args: Any, **kwargs: Any) -> Tensor:
    """mmcv 1 calls the same name with other parameters, its factors by keyword."""
    return (upfirdn2d_of_mmcv_1 if "up_x" in kwargs else upfirdn2d)(*args, **kwargs)


def filtered_lrelu(
    x: Tensor, fu: Tensor, fd: Tensor, b: Tensor, si: Tensor, up: int, down: int, px0: int, px1: int, py0: int,
    py1: int, sx: int, sy: int, gain: float, slope: float, clamp: float, flip_filters: bool, writeSigns: bool,
) -> tuple[Tensor, Tensor, int]:  # fmt: skip
    """-> output, signs (empty unless they are to be written), and 0: there is a kernel for every call."""
    output, signs = images.filtered_leaky_relu(
        x, fu, fd, b, _given(si), up, down, (px0, px1, py0, py1), (sx, sy), gain, slope, clamp, bool(flip_filters)
    )
    return output, signs if writeSigns else signs.new_empty(0), 0


def filtered_lrelu_act_(
    x: Tensor, si: Tensor, sx: int, sy: int, gain: float, slope: float, clamp: float, writeSigns: bool
) -> Tensor:
    """The leaky ReLU of `filtered_lrelu` alone, in place."""
    if si.numel() and not writeSigns:
        signs = images.unpack_signs(si, x.shape, (sx, sy))
        x.copy_(images.leaky_relu_by_signs(x, signs, gain, slope))
        return si.new_empty(0)
    value, signs = images.leaky_relu_signs(x, gain, slope, clamp)
    x.copy_(value)
    return images.pack_signs(signs) if writeSigns else signs.new_empty(0)


FUNCTIONS: dict[str, Callable[..., Any]] = {
    function.__name__: function
    for function in (bias_act, fused_bias_leakyrelu, upfirdn2d_of_either, filtered_lrelu, filtered_lrelu_act_)
}
