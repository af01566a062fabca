"""The specification of deform_roi_pool and its backward.

A box is cut into bins, each bin is moved by its own offset, a share of the box, and read bilinearly at a grid of
samples, whose mean is kept. Sample i of bin p lies at
`((start + gamma * extent * offset) + p * bin) + (i + 0.5) * bin / samples` along each axis. A sample more than one
pixel off the map is 0, and counts. Boxes are shifted by half a pixel, so that pixel centres lie at .5.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from triops._dtypes import compute_dtype
from triops._rois import check_boxes, empty_like_format, images_of, neighbors, samples_along


def deform_roi_pool(
    input: Tensor, boxes: Tensor, offset: Tensor | None, pooled_height: int, pooled_width: int, spatial_scale: float,
    sampling_ratio: int, gamma: float,
) -> Tensor:  # fmt: skip
    """input [N, C, H, W], boxes [K, 5], offset [K, 2, PH, PW] of (x, y) -> [K, C, PH, PW]"""
    check_boxes("deform_roi_pool", boxes, input.shape[0])
    shape = boxes.shape[0], input.shape[1], pooled_height, pooled_width
    output = empty_like_format(shape, input.dtype, input).zero_()
    image, valid = images_of(boxes, input.shape[0])
    for k in range(len(boxes) if input.numel() else 0):
        own = None if offset is None else offset[k]
        found = samples_of(boxes[k], own, pooled_height, pooled_width, spatial_scale, sampling_ratio, gamma, input)
        if found is None or not valid[k]:
            continue
        pixels = input[image[k]].to(compute_dtype(input.dtype)).flatten(1)
        values = torch.zeros((), dtype=pixels.dtype, device=input.device)
        for corner in found.corners:
            values = values + corner.weight * pixels[:, corner.pixel]
        output[k] = torch.where(found.on_map, values, 0.0).sum((3, 4)) / found.of_a_bin
    return output


def deform_roi_pool_backward(
    grad_output: Tensor, input: Tensor, boxes: Tensor, offset: Tensor | None, spatial_scale: float,
    sampling_ratio: int, gamma: float, of_input: bool, of_offset: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """grad_output [K, C, PH, PW] -> gradients of input and offset; an empty tensor for one that is not wanted."""
    check_boxes("deform_roi_pool_backward", boxes, input.shape[0])
    real, rows, columns = compute_dtype(input.dtype), grad_output.shape[2], grad_output.shape[3]
    to_input, to_offset = empty_gradients(input, offset, of_input, of_offset)
    grad = torch.zeros((*input.shape[:2], input.shape[2] * input.shape[3]), dtype=real, device=input.device)
    to_offset.zero_()
    image, valid = images_of(boxes, input.shape[0])
    for k in range(len(boxes) if input.numel() else 0):
        own = None if offset is None else offset[k]
        found = samples_of(boxes[k], own, rows, columns, spatial_scale, sampling_ratio, gamma, input)
        if found is None or not valid[k]:
            continue
        given = (grad_output[k].to(real) / found.of_a_bin)[..., None, None]
        pixels = input[image[k]].to(real).flatten(1)
        slopes = torch.zeros((2, *found.on_map.shape), dtype=real, device=input.device)
        for corner in found.corners:
            if of_input:
                share = torch.where(found.on_map, corner.weight * given, 0.0)
                grad[image[k]].index_add_(1, corner.pixel.flatten(), share.flatten(1))
            slopes += corner.slopes * (given * pixels[:, corner.pixel]).sum(0)
        if to_offset.numel():
            slopes = torch.where(found.on_map & found.moves, slopes, 0.0).sum((3, 4))
            to_offset[k] = gamma * found.extent[:, None, None] * slopes
    if of_input:
        to_input.copy_(grad.view(input.shape))
    return to_input, to_offset


class Corner(NamedTuple):
    """One of the four pixels around each sample."""

    pixel: Tensor
    weight: Tensor
    slopes: Tensor  # [2, ...]: of the weight along x and y


class Samples(NamedTuple):
    """Samples [PH, PW, rows, columns] of all bins of a box, those left out that lie off the map in every bin."""

    on_map: Tensor
    moves: Tensor  # [2, ...]: whether what is read changes along x and y; within a pixel off the map it is the border
    corners: list[Corner]
    extent: Tensor  # [2]: of the box along x and y, in pixels
    of_a_bin: Tensor  # their number, at least 1


def samples_of(
    box: Tensor, offset: Tensor | None, pooled_height: int, pooled_width: int, spatial_scale: float,
    sampling_ratio: int, gamma: float, input: Tensor,
) -> Samples | None:  # fmt: skip
    """None for a box that is not finite: it lies off the map."""
    real = compute_dtype(input.dtype)
    edges = box[1:].to(real) * spatial_scale - 0.5
    starts, extent = edges[:2], edges[2:] - edges[:2]
    if not bool((starts.isfinite() & extent.isfinite()).all()):
        return None
    axes, counts = [], []
    for axis, pooled, size in ((0, pooled_width, input.shape[3]), (1, pooled_height, input.shape[2])):
        start = starts[axis].expand(pooled_height, pooled_width)
        if offset is not None:
            start = start + gamma * extent[axis] * offset[axis].to(real)
        length = extent[axis] / torch.full_like(extent[axis], pooled)
        along, count = samples_along(torch.zeros_like(length), extent[axis], pooled, sampling_ratio)
        place = torch.arange(pooled, device=box.device).to(real)
        base = start + (place if axis == 0 else place[:, None]) * length
        position = base[..., None] + along[0]
        position = position[..., ((position >= -1) & (position <= size)).flatten(0, 1).any(0)]
        axes.append((*neighbors(position, size), (position >= 0) & (position <= size - 1)))
        counts.append(count)
    (on_x, left, right, part_x, moves_x), (on_y, top, bottom, part_y, moves_y) = axes
    corners = []
    for row, wy, sign_y in ((top, 1 - part_y, -1.0), (bottom, part_y, 1.0)):
        for column, wx, sign_x in ((left, 1 - part_x, -1.0), (right, part_x, 1.0)):
            wy_, wx_ = wy[..., :, None], wx[..., None, :]
            pixel = row[..., :, None] * input.shape[3] + column[..., None, :]
            slopes = torch.stack(torch.broadcast_tensors(sign_x * wy_, sign_y * wx_))
            corners.append(Corner(pixel, wy_ * wx_, slopes))
    on_map = on_y[..., :, None] & on_x[..., None, :]
    moves = torch.stack(torch.broadcast_tensors(moves_x[..., None, :], moves_y[..., :, None]))
    return Samples(on_map, moves, corners, extent, (counts[0] * counts[1]).clamp(min=1))


def empty_gradients(input: Tensor, offset: Tensor | None, of_input: bool, of_offset: bool) -> tuple[Tensor, Tensor]:
    """Empty outputs of `deform_roi_pool_backward`, the first lying in memory as the input does."""
    to_input = empty_like_format(input.shape, input.dtype, input) if of_input else input.new_empty(0)
    wanted = of_offset and offset is not None
    return to_input, offset.new_empty(offset.shape) if wanted else input.new_empty(0)  # type: ignore[union-attr]
