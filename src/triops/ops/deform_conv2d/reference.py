"""The specification of deform_conv2d and deform_conv2d_backward.

Output pixel (i, j) reads the map under kernel tap (k, l) bilinearly at
`(i * stride - padding + k * dilation + dy, j * stride - padding + l * dilation + dx)`, with an offset (dy, dx) of its
own, times a mask of its own. Offset group g holds these for the g-th part of the channels: `offset[:, 2 * (g * taps +
tap)]` is dy, the channel behind it dx, `mask[:, g * taps + tap]` the mask. Pixels off the map count for nothing,
whatever their mask. What is read is multiplied with the weight as in a convolution.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from triops._dtypes import compute_dtype
from triops._rois import empty_like_format


class Sizes(NamedTuple):
    """Of one call."""

    batch: int
    channels: int
    height: int
    width: int
    outputs: int  # channels
    out_height: int
    out_width: int
    kernel_height: int
    kernel_width: int
    groups: int  # of the convolution
    offset_groups: int

    @classmethod
    def of(cls, input: Tensor, offset: Tensor, weight: Tensor) -> Sizes:
        """From tensors whose shapes fit together."""
        (batch, channels, height, width), (outputs, own, kernel_height, kernel_width) = input.shape, weight.shape
        groups = channels // own if own else 1
        offset_groups = offset.shape[1] // (2 * kernel_height * kernel_width)
        return cls(
            batch, channels, height, width, outputs, offset.shape[2], offset.shape[3], kernel_height, kernel_width,
            groups, offset_groups,
        )  # fmt: skip

    @property
    def taps(self) -> int:
        return self.kernel_height * self.kernel_width

    @property
    def pixels(self) -> int:
        """Of an output map."""
        return self.out_height * self.out_width


def deform_conv2d(
    input: Tensor, offset: Tensor, weight: Tensor, mask: Tensor | None, bias: Tensor | None, stride: list[int],
    padding: list[int], dilation: list[int],
) -> Tensor:  # fmt: skip
    """input [B, C, H, W], offset [B, 2 * G * taps, OH, OW], weight [N, C / groups, kH, kW], mask [B, G * taps, OH, OW],
    bias [N] -> [B, N, OH, OW]"""
    sizes, real = Sizes.of(input, offset, weight), compute_dtype(input.dtype)
    out = torch.zeros((sizes.batch, sizes.pixels, sizes.groups, sizes.outputs // sizes.groups), dtype=real,
                      device=input.device)  # fmt: skip
    matrices = _matrices(weight, sizes, real)
    for tap in range(sizes.taps if input.numel() else 0):  # else nothing is multiplied, not even by a weight of NaN
        columns = torch.zeros((sizes.batch, sizes.pixels, sizes.offset_groups, sizes.channels // sizes.offset_groups),
                              dtype=real, device=input.device)  # fmt: skip
        for rows, valid, wy, wx, _, _ in _corners(offset, sizes, tap, stride, padding, dilation):
            share = wy * wx if mask is None else wy * wx * _of_tap(mask, sizes, tap)
            columns += torch.where(valid, share, 0)[..., None] * _read(input, sizes, rows, valid)
        columns = columns.view(sizes.batch, sizes.pixels, sizes.groups, sizes.channels // sizes.groups)
        out += torch.einsum("bpgc,gnc->bpgn", columns, matrices[tap])
    if bias is not None:
        out += bias.to(real).view(sizes.groups, sizes.outputs // sizes.groups)
    return _as_maps(out.flatten(2), sizes.out_height, sizes.out_width, like=input)


def deform_conv2d_backward(
    grad: Tensor, input: Tensor, offset: Tensor, weight: Tensor, mask: Tensor | None, stride: list[int],
    padding: list[int], dilation: list[int], of_inputs: bool, of_weight: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """grad [B, N, OH, OW] -> gradients of input, offset, mask and weight, [0] where they are not asked for."""
    grads = empty_gradients(input, offset, weight, mask, of_inputs, of_weight)
    if grad.numel() == 0 or input.numel() == 0:  # nothing is multiplied, not even by what is not finite
        for gradient in grads:
            gradient.zero_()
        return grads
    sizes, real = Sizes.of(input, offset, weight), compute_dtype(input.dtype)
    given = grad.to(real).flatten(2).transpose(1, 2)
    given = given.reshape(sizes.batch, sizes.pixels, sizes.groups, sizes.outputs // sizes.groups)
    matrices = _matrices(weight, sizes, real)
    own = sizes.channels // sizes.offset_groups  # channels of an offset group
    grad_rows = torch.zeros((sizes.batch * sizes.height * sizes.width * sizes.offset_groups, own), dtype=real,
                            device=input.device)  # fmt: skip
    grad_offset = torch.zeros(
        (sizes.batch, sizes.offset_groups, sizes.taps, 2, sizes.pixels), dtype=real, device=input.device
    )
    grad_mask = torch.zeros_like(grad_offset[:, :, :, 0])
    grad_weight = torch.zeros_like(matrices)
    for tap in range(sizes.taps):
        back = torch.einsum("bpgn,gnc->bpgc", given, matrices[tap])
        back = back.reshape(sizes.batch, sizes.pixels, sizes.offset_groups, own)
        factor = torch.ones((), dtype=real, device=input.device) if mask is None else _of_tap(mask, sizes, tap)
        columns = torch.zeros_like(back)
        slope_y, slope_x, on_mask = (torch.zeros(back.shape[:3], dtype=real, device=back.device) for _ in range(3))
        on_map = torch.zeros_like(slope_y, dtype=torch.bool)
        for rows, valid, wy, wx, sign_y, sign_x in _corners(offset, sizes, tap, stride, padding, dilation):
            found = _read(input, sizes, rows, valid)
            product = (back * found).sum(-1)
            on_mask += torch.where(valid, wy * wx * product, 0)
            slope_y += torch.where(valid, sign_y * wx * product, 0)
            slope_x += torch.where(valid, sign_x * wy * product, 0)
            on_map = on_map | valid
            share = torch.where(valid, wy * wx * factor, 0)[..., None]
            columns += share * found
            if of_inputs:
                added = torch.where(valid[..., None], share * back, 0)
                grad_rows.index_add_(0, rows.flatten(), added.flatten(0, 2))
        grad_mask[:, :, tap] = on_mask.transpose(1, 2)
        grad_offset[:, :, tap, 0] = torch.where(on_map, slope_y * factor, 0).transpose(1, 2)
        grad_offset[:, :, tap, 1] = torch.where(on_map, slope_x * factor, 0).transpose(1, 2)
        columns = columns.view(sizes.batch, sizes.pixels, sizes.groups, sizes.channels // sizes.groups)
        grad_weight[tap] = torch.einsum("bpgn,bpgc->gnc", given, columns)
    if of_inputs:
        grads[0].copy_(grad_rows.view(sizes.batch, sizes.height, sizes.width, sizes.channels).permute(0, 3, 1, 2))
        grads[1].copy_(grad_offset.view(offset.shape))
        if mask is not None:
            grads[2].copy_(grad_mask.view(mask.shape))
    if of_weight:
        grads[3].copy_(grad_weight.permute(1, 2, 3, 0).reshape(weight.shape))
    return grads


def empty_gradients(
    input: Tensor, offset: Tensor, weight: Tensor, mask: Tensor | None, of_inputs: bool, of_weight: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Empty outputs of `deform_conv2d_backward`, each lying in memory as what it is the gradient of."""

    def like(tensor: Tensor | None, wanted: bool) -> Tensor:
        if tensor is None or not wanted:
            return input.new_empty(0)
        return empty_like_format(tensor.shape, tensor.dtype, tensor)

    return like(input, of_inputs), like(offset, of_inputs), like(mask, of_inputs), like(weight, of_weight)


def _matrices(weight: Tensor, sizes: Sizes, real: torch.dtype) -> Tensor:
    """The weight as [taps, groups, N / groups, C / groups]."""
    shape = sizes.groups, sizes.outputs // sizes.groups, sizes.channels // sizes.groups, sizes.taps
    return weight.to(real).reshape(shape).permute(3, 0, 1, 2)


def _of_tap(mask: Tensor, sizes: Sizes, tap: int) -> Tensor:
    """The mask of one tap, [B, OH * OW, G], in the dtype that it is computed in."""
    found = mask.reshape(sizes.batch, sizes.offset_groups, sizes.taps, sizes.pixels)[:, :, tap]
    return found.transpose(1, 2).to(compute_dtype(mask.dtype))


def _corners(
    offset: Tensor, sizes: Sizes, tap: int, stride: list[int], padding: list[int], dilation: list[int]
) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor, int, int]]:
    """The four pixels around each sample of a tap, as tensors [B, OH * OW, G]: rows of `_read`, whether they exist,
    the weights along y and x, and the signs of their derivatives."""
    moved = offset.to(compute_dtype(offset.dtype)).reshape(
        sizes.batch, sizes.offset_groups, sizes.taps, 2, sizes.pixels
    )
    dy, dx = moved[:, :, tap].permute(2, 0, 3, 1)
    y = torch.arange(sizes.out_height, device=offset.device) * stride[0] - padding[0]
    x = torch.arange(sizes.out_width, device=offset.device) * stride[1] - padding[1]
    y = y.repeat_interleave(sizes.out_width) + tap // sizes.kernel_width * dilation[0]
    x = x.repeat(sizes.out_height) + tap % sizes.kernel_width * dilation[1]
    at_y, at_x = y[:, None].to(dy.dtype) + dy, x[:, None].to(dx.dtype) + dx
    inside = (at_y > -1) & (at_x > -1) & (at_y < sizes.height) & (at_x < sizes.width)  # false for NaN
    at_y, at_x = torch.where(inside, at_y, 0), torch.where(inside, at_x, 0)
    top, left = at_y.floor(), at_x.floor()
    image = torch.arange(sizes.batch, device=offset.device)[:, None, None]
    group = torch.arange(sizes.offset_groups, device=offset.device)
    for row, wy, sign_y in ((top.long(), 1 - (at_y - top), -1), (top.long() + 1, at_y - top, 1)):
        for column, wx, sign_x in ((left.long(), 1 - (at_x - left), -1), (left.long() + 1, at_x - left, 1)):
            valid = inside & (row >= 0) & (row < sizes.height) & (column >= 0) & (column < sizes.width)
            pixel = (image * sizes.height + row) * sizes.width + column
            yield torch.where(valid, pixel * sizes.offset_groups + group, 0), valid, wy, wx, sign_y, sign_x


def _read(input: Tensor, sizes: Sizes, rows: Tensor, valid: Tensor) -> Tensor:
    """The channels of an offset group at a pixel, row `pixel * G + group`: [B, OH * OW, G, C / G], 0 if not valid."""
    own = sizes.channels // sizes.offset_groups
    found = input.permute(0, 2, 3, 1).reshape(sizes.batch * sizes.height * sizes.width * sizes.offset_groups, own)
    if len(found) == 0:
        return torch.zeros((*rows.shape, own), dtype=compute_dtype(input.dtype), device=input.device)
    return torch.where(valid[..., None], found[rows].to(compute_dtype(input.dtype)), 0)


def _as_maps(rows: Tensor, height: int, width: int, like: Tensor) -> Tensor:
    """rows [B, height * width, N] -> [B, N, height, width], of the dtype of `like`, lying as it does."""
    batch, _, channels = rows.shape
    out = empty_like_format((batch, channels, height, width), like.dtype, like)
    return out.copy_(rows.view(batch, height, width, channels).permute(0, 3, 1, 2))
