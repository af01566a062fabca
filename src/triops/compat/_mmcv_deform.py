"""Deformable convolution of `mmcv._ext`."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

import triops
from triops._rois import HALVES


def deform_conv_forward(
    input: Tensor, weight: Tensor, offset: Tensor, output: Tensor, columns: Tensor, ones: Tensor, kW: int, kH: int,
    dW: int, dH: int, padW: int, padH: int, dilationW: int, dilationH: int, group: int, deformable_group: int,
    im2col_step: int,
) -> None:  # fmt: skip
    """`im2col_step`, how many images peers take at a time, and the buffers `columns` and `ones` are not needed here."""
    steps = (dH, dW), (padH, padW), (dilationH, dilationW)
    output.copy_(_convolved(input, offset, None, weight, None, steps, group, deformable_group).view_as(output))


def deform_conv_backward_input(
    input: Tensor, offset: Tensor, gradOutput: Tensor, gradInput: Tensor, gradOffset: Tensor, weight: Tensor,
    columns: Tensor, kW: int, kH: int, dW: int, dH: int, padW: int, padH: int, dilationW: int, dilationH: int,
    group: int, deformable_group: int, im2col_step: int,
) -> None:  # fmt: skip
    steps = (dH, dW), (padH, padW), (dilationH, dilationW)
    found = _gradients(gradOutput, input, offset, None, weight, steps, group, deformable_group, of_weight=False)
    gradInput += found[0].view_as(gradInput)
    gradOffset.copy_(found[1].view_as(gradOffset))


def deform_conv_backward_parameters(
    input: Tensor, offset: Tensor, gradOutput: Tensor, gradWeight: Tensor, columns: Tensor, ones: Tensor, kW: int,
    kH: int, dW: int, dH: int, padW: int, padH: int, dilationW: int, dilationH: int, group: int,
    deformable_group: int, scale: float, im2col_step: int,
) -> None:  # fmt: skip
    steps = (dH, dW), (padH, padW), (dilationH, dilationW)
    found = _gradients(gradOutput, input, offset, None, gradWeight, steps, group, deformable_group, of_inputs=False)
    gradWeight.add_(found[3], alpha=scale)


def modulated_deform_conv_forward(
    input: Tensor, weight: Tensor, bias: Tensor, ones: Tensor, offset: Tensor, mask: Tensor, output: Tensor,
    columns: Tensor, kernel_h: int, kernel_w: int, stride_h: int, stride_w: int, pad_h: int, pad_w: int,
    dilation_h: int, dilation_w: int, group: int, deformable_group: int, with_bias: bool,
) -> None:  # fmt: skip
    steps = (stride_h, stride_w), (pad_h, pad_w), (dilation_h, dilation_w)
    shift = bias if with_bias else None
    offset, mask = (_as_read(samples, output.shape) for samples in (offset, mask))
    output.copy_(_convolved(input, offset, mask, weight, shift, steps, group, deformable_group).view_as(output))


def modulated_deform_conv_backward(
    input: Tensor, weight: Tensor, bias: Tensor, ones: Tensor, offset: Tensor, mask: Tensor, columns: Tensor,
    grad_input: Tensor, grad_weight: Tensor, grad_bias: Tensor, grad_offset: Tensor, grad_mask: Tensor,
    grad_output: Tensor, kernel_h: int, kernel_w: int, stride_h: int, stride_w: int, pad_h: int, pad_w: int,
    dilation_h: int, dilation_w: int, group: int, deformable_group: int, with_bias: bool,
) -> None:  # fmt: skip
    """As mmcv's: the gradients of input, weight and bias are added, those of offset and mask written."""
    steps = (stride_h, stride_w), (pad_h, pad_w), (dilation_h, dilation_w)
    offset, mask = (_as_read(samples, grad_output.shape) for samples in (offset, mask))
    found = _gradients(grad_output, input, offset, mask, weight, steps, group, deformable_group)
    grad_input += found[0]
    _write_as_read(grad_offset, found[1])
    _write_as_read(grad_mask, found[2])
    grad_weight += found[3]
    if with_bias:
        grad_bias += grad_output.sum((0, 2, 3)).to(grad_bias.dtype)


_Steps = tuple[tuple[int, int], tuple[int, int], tuple[int, int]]


def _convolved(
    input: Tensor, offset: Tensor, mask: Tensor | None, weight: Tensor, bias: Tensor | None, steps: _Steps, group: int,
    deformable_group: int,
) -> Tensor:  # fmt: skip
    input, offset = _batched(input), _batched(offset)
    _check_groups(input, offset, weight, group, deformable_group)
    return triops.deform_conv2d(
        input, _fitting(offset, input), weight.to(input.dtype), None if bias is None else bias.to(input.dtype), *steps,
        None if mask is None else _fitting(mask, input),
    )  # fmt: skip


def _gradients(
    grad: Tensor, input: Tensor, offset: Tensor, mask: Tensor | None, weight: Tensor, steps: _Steps, group: int,
    deformable_group: int, of_inputs: bool = True, of_weight: bool = True,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    input, offset = _batched(input), _batched(offset)
    _check_groups(input, offset, weight, group, deformable_group)
    return triops.deform_conv2d_backward(
        _batched(grad).to(input.dtype), input, _fitting(offset, input), weight.to(input.dtype),
        None if mask is None else _fitting(mask, input), *steps, of_inputs, of_weight,
    )  # fmt: skip


def _as_read(samples: Tensor, output_shape: Sequence[int]) -> Tensor:
    """Offsets or masks of the output's size. mmcv does not compare sizes, but reads an image's numbers in order, as if
    they were of the output's size: DyHead gives those of a finer level, and its checkpoints were trained so."""
    height, width = output_shape[-2:]
    channels, *size = samples.shape[1:]
    if tuple(size) == (height, width) or math.prod(size) < height * width:
        return samples  # too few are refused
    return samples.flatten(1)[:, : channels * height * width].reshape(-1, channels, height, width)


def _write_as_read(grad: Tensor, found: Tensor) -> None:
    """Numbers that were not read have no gradient: they stay as given."""
    if grad.shape == found.shape:
        grad.copy_(found)
        return
    rows = grad.flatten(1).clone()
    rows[:, : found[0].numel()] = found.flatten(1)
    grad.copy_(rows.view_as(grad))


def _check_groups(input: Tensor, offset: Tensor, weight: Tensor, group: int, deformable_group: int) -> None:
    """triops finds both numbers from the shapes; a caller who names others is mistaken."""
    if weight.shape[1] * group != input.shape[1]:
        raise ValueError(
            f"deform_conv: weight must have {input.shape[1]} / {group} channels for group = {group}, "
            f"got {weight.shape[1]}"
        )
    taps = weight.shape[2] * weight.shape[3]
    if offset.shape[1] != 2 * deformable_group * taps:
        raise ValueError(
            f"deform_conv: offset must have {2 * deformable_group * taps} channels for deformable_group = "
            f"{deformable_group}, got {offset.shape[1]}"
        )


def _batched(maps: Tensor) -> Tensor:
    """mmcv takes one image [C, H, W] as a batch of one."""
    return maps[None] if maps.dim() == 3 else maps


def _fitting(samples: Tensor, input: Tensor) -> Tensor:
    """Autocast mixes dtypes; float32 offsets and masks of half features stay as they are."""
    return samples if input.dtype in HALVES and samples.dtype == torch.float32 else samples.to(input.dtype)


FUNCTIONS: dict[str, Callable[..., Any]] = {
    function.__name__: function
    for function in (
        deform_conv_forward, deform_conv_backward_input, deform_conv_backward_parameters,
        modulated_deform_conv_forward, modulated_deform_conv_backward,
    )
}  # fmt: skip
