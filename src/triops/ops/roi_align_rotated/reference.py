"""The specification of roi_align_rotated and its backward.

A rotated box is cut into bins along its own axes, a bin is read bilinearly at a grid of samples, and their mean is
kept. A sample lies at (xx, yy) from the centre of the box along its axes, which is

    y = (yy * cos - xx * sin) + cy        x = (yy * sin + xx * cos) + cx

on the map. A sample more than one pixel off the map is 0, and counts.

Of a map with oriented channels (`orientations` of them in a group of neighboring channels), the channels of a group are
turned with the box: linearly between the two that are nearest to its angle.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from triops._dtypes import compute_dtype
from triops._geometry.box.reference import cos_sin
from triops._rois import check_boxes, empty_in_format, empty_like_format, images_of, neighbors, samples_along

FAR = 1e30  # pixels and
MOST_ANGLE = 800_000.0  # radians from which on a box counts as not finite


def roi_align_rotated(
    input: Tensor, boxes: Tensor, pooled_height: int, pooled_width: int, spatial_scale: float, sampling_ratio: int,
    aligned: bool, clockwise: bool, orientations: int,
) -> Tensor:  # fmt: skip
    """input [N, C, H, W], boxes [K, 6] -> [K, C, PH, PW]"""
    check_boxes("roi_align_rotated", boxes, input.shape[0])
    real, channels = compute_dtype(input.dtype), input.shape[1]
    shape = (boxes.shape[0], channels, pooled_height, pooled_width)
    pooled = torch.zeros(shape, dtype=real, device=input.device)
    image, valid = images_of(boxes, input.shape[0])
    for k in range(len(boxes) if input.numel() else 0):
        found = samples_of(boxes[k], input.shape[2], input.shape[3], pooled_height, pooled_width, spatial_scale,
                           sampling_ratio, aligned, clockwise, input.dtype)  # fmt: skip
        if found is None or not valid[k]:
            continue
        pixels = input[image[k]].to(real).flatten(1)
        values = torch.zeros((channels, *found.on_map.shape), dtype=real, device=input.device)
        for pixel, weight in found.corners:
            values = values + weight * pixels[:, pixel]
        values = torch.where(found.on_map, values, 0.0)
        rows = values.new_zeros((channels, pooled_height, values.shape[2])).index_add_(1, found.rows, values)
        pooled[k] = pooled[k].index_add_(2, found.columns, rows) / found.of_a_bin
    return empty_like_format(shape, input.dtype, input).copy_(turned(pooled, boxes, orientations))


def roi_align_rotated_backward(
    grad_output: Tensor, boxes: Tensor, batch: int, height: int, width: int, spatial_scale: float, sampling_ratio: int,
    aligned: bool, clockwise: bool, orientations: int, channels_last: bool,
) -> Tensor:  # fmt: skip
    """grad_output [K, C, PH, PW], boxes [K, 6] -> gradient of the input."""
    check_boxes("roi_align_rotated_backward", boxes, batch)
    channels, pooled_height, pooled_width = grad_output.shape[1:]
    real = compute_dtype(grad_output.dtype)
    grad = torch.zeros((batch, channels, height * width), dtype=real, device=grad_output.device)
    given = turned(grad_output.to(real), boxes, orientations, back=True)
    image, valid = images_of(boxes, batch)
    for k in range(len(boxes) if grad.numel() else 0):
        found = samples_of(boxes[k], height, width, pooled_height, pooled_width, spatial_scale, sampling_ratio,
                           aligned, clockwise, grad_output.dtype)  # fmt: skip
        if found is None or not valid[k]:
            continue
        share = (given[k] / found.of_a_bin)[:, found.rows][:, :, found.columns]
        for pixel, weight in found.corners:
            part = torch.where(found.on_map, weight * share, 0.0)
            grad[image[k]].index_add_(1, pixel.flatten(), part.flatten(1))
    out = empty_in_format((batch, channels, height, width), grad_output.dtype, grad.device, channels_last)
    return out.copy_(grad.view(out.shape))


class Samples(NamedTuple):
    """Samples [rows, columns] of all bins of a box, those left out that cannot be on the map."""

    on_map: Tensor
    corners: list[tuple[Tensor, Tensor]]  # the four pixels around each of them, and their weights
    rows: Tensor  # of bins
    columns: Tensor
    of_a_bin: Tensor  # their number


def samples_of(
    box: Tensor, height: int, width: int, pooled_height: int, pooled_width: int, spatial_scale: float,
    sampling_ratio: int, aligned: bool, clockwise: bool, dtype: torch.dtype,
) -> Samples | None:  # fmt: skip
    """None for a box that is not finite: it lies off the map."""
    box = box.to(compute_dtype(dtype))
    cx, cy = box[1:3] * spatial_scale - (0.5 if aligned else 0.0)
    extent = box[3:5] * spatial_scale
    if not bool((torch.stack([cx, cy, *extent]).abs() < FAR).all() & (box[5].abs() < MOST_ANGLE)):
        return None
    if not aligned:
        extent = extent.clamp(min=1)
    cos, sin = (v.to(box.dtype) for v in cos_sin((-box[5] if clockwise else box[5]).double()))
    # The map as seen along the axes of the box: what lies outside is no sample on the map, whatever its rounding.
    corner_x, corner_y = torch.meshgrid(
        *(torch.tensor([-1, size], dtype=torch.float64) for size in (width, height)), indexing="ij"
    )
    shift_x, shift_y = corner_x - cx.double().cpu(), corner_y - cy.double().cpu()
    margin = 2 + 1e-5 * float(shift_x.abs().max() + shift_y.abs().max() + extent.abs().sum())
    axes = []
    for side, pooled, local in (
        (extent[1], pooled_height, shift_x * sin.double().cpu() + shift_y * cos.double().cpu()),
        (extent[0], pooled_width, shift_x * cos.double().cpu() - shift_y * sin.double().cpu()),
    ):
        along, count = samples_along(-side / 2, side, pooled, sampling_ratio)
        near = (along >= float(local.min()) - margin) & (along <= float(local.max()) + margin)
        axes.append((along[near], near.nonzero()[:, 0], count))
    (yy, rows, count_y), (xx, columns, count_x) = axes
    y = (yy[:, None] * cos - xx * sin) + cy
    x = (yy[:, None] * sin + xx * cos) + cx
    on_y, low_y, high_y, part_y = neighbors(y, height)
    on_x, low_x, high_x, part_x = neighbors(x, width)
    corners = [
        (row * width + column, wy * wx)
        for row, wy in ((low_y, 1 - part_y), (high_y, part_y))
        for column, wx in ((low_x, 1 - part_x), (high_x, part_x))
    ]
    return Samples(on_y & on_x, corners, rows, columns, (count_y * count_x).clamp(min=1))


def turned(pooled: Tensor, boxes: Tensor, orientations: int, back: bool = False) -> Tensor:
    """Pooled features [K, C, PH, PW] whose oriented channels are turned with the boxes; back: the transpose of that."""
    if orientations == 1:
        return pooled
    theta = boxes[:, 5].to(pooled.dtype)
    theta = torch.where(theta.abs() < MOST_ANGLE, theta, 0.0)
    steps = (theta * orientations).double() / (2 * math.pi)
    steps = steps.to(pooled.dtype)
    whole = steps.floor()
    part = (steps - whole)[:, None, None, None]
    channel = torch.arange(pooled.shape[1], device=pooled.device)
    shift = whole.long()[:, None]
    orientation = channel % orientations + (shift if back else -shift)
    box = torch.arange(len(boxes), device=pooled.device)[:, None]
    first = channel - channel % orientations
    near = pooled[box, first + orientation % orientations]
    far = pooled[box, first + (orientation + (-1 if back else 1)) % orientations]
    return (1 - part) * near + part * far
