"""The specification of roi_align_forward and roi_align_backward.

A box is cut into bins, a bin is read bilinearly at a grid of samples, and their mean or maximum is kept. Sample i of
bin p lies at `(start + p * bin) + (i + 0.5) * bin / samples` along each axis. A sample more than one pixel off the map
is 0, and counts. A bin has as many samples as it is pixels long, rounded up, where their number is adaptive.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from triops._dtypes import compute_dtype
from triops._rois import check_boxes, empty_in_format, format_of, images_of, neighbors, samples_along

LOWEST = torch.finfo(torch.float32).min  # the maximum of no samples, in every dtype
NOWHERE = -2.0  # the position of a maximum that is no sample on the map


def roi_align_forward(
    input: Tensor, boxes: Tensor, pooled_height: int, pooled_width: int, spatial_scale: float, sampling_ratio: int,
    aligned: bool, mode: str,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """input [N, C, H, W], boxes [K, 5] -> output [K, C, PH, PW]; y and x of the maxima, likewise, or [0] of a mean."""
    check_boxes("roi_align", boxes, input.shape[0])
    output, *positions = empty_outputs(input, boxes, pooled_height, pooled_width, mode)
    output.zero_()
    for position in positions:
        position.fill_(NOWHERE)
    if input.numel() == 0 or output.numel() == 0:
        return output, positions[0], positions[1]
    height, width = input.shape[2:]
    image, valid = images_of(boxes, input.shape[0])
    for k in range(len(boxes)):
        y, x, finite = axes(boxes[k], height, width, pooled_height, pooled_width, spatial_scale, sampling_ratio,
                            aligned, input.dtype)  # fmt: skip
        if not valid[k] or not finite:
            continue
        pixels = input[image[k]].to(compute_dtype(input.dtype))
        values = torch.zeros((), dtype=pixels.dtype, device=input.device)
        for number, (row, column, weight) in enumerate(corners(y, x)):
            share = weight * pixels[:, row][:, :, column]
            values = share if number == 0 else values + share
        values = torch.where(y.on_map[:, None] & x.on_map, values, 0.0)
        if mode == "avg":
            rows = values.new_zeros((len(pixels), pooled_height, len(x.bin))).index_add_(1, y.bin, values)
            total = values.new_zeros((len(pixels), pooled_height, pooled_width)).index_add_(2, x.bin, rows)
            output[k] = total / (y.samples * x.samples).clamp(min=1)
            continue
        values = torch.where(values.isnan(), LOWEST, values)  # NaN is greater than nothing
        on_map, sizes = y.on_map[:, None] & x.on_map, x.bin.bincount(minlength=pooled_width).tolist()
        first = 0
        for p, rows in enumerate(y.bin.bincount(minlength=pooled_height).tolist()):
            own = slice(first, first + rows)
            first += rows
            parts = zip(
                values[:, own].split(sizes, 2), on_map[own].split(sizes, 1), x.position.split(sizes), strict=True
            )
            for q, (part, found, xs) in enumerate(parts):
                if part[0].numel() == 0:
                    output[k, :, p, q] = LOWEST
                    continue
                best, at = part.flatten(1).max(1)  # the first of equal ones
                found = found.flatten()[at] & (best > LOWEST)
                output[k, :, p, q] = best.clamp(min=LOWEST)
                positions[0][k, :, p, q] = torch.where(found, y.position[own][at // len(xs)], NOWHERE)
                positions[1][k, :, p, q] = torch.where(found, xs[at % len(xs)], NOWHERE)
    return output, positions[0], positions[1]


def roi_align_backward(
    grad_output: Tensor, boxes: Tensor, argmax_y: Tensor, argmax_x: Tensor, batch: int, height: int, width: int,
    spatial_scale: float, sampling_ratio: int, aligned: bool, mode: str, channels_last: bool,
) -> Tensor:  # fmt: skip
    """grad_output [K, C, PH, PW], boxes [K, 5], argmax_y, argmax_x as of the forward -> gradient of the input."""
    check_boxes("roi_align_backward", boxes, batch)
    channels, pooled_height, pooled_width = grad_output.shape[1:]
    real = compute_dtype(grad_output.dtype)
    grad = torch.zeros((batch, channels, height * width), dtype=real, device=grad_output.device)
    image, valid = images_of(boxes, batch)
    if grad.numel() and grad_output.numel() and mode == "max":
        y, x = Axis.of(argmax_y.to(real), height), Axis.of(argmax_x.to(real), width)
        on_map = y.on_map & x.on_map & valid[:, None, None, None]
        plane = (image[:, None] * channels + torch.arange(channels, device=grad.device))[..., None, None]
        for row, wy in ((y.low, 1 - y.part), (y.high, y.part)):
            for column, wx in ((x.low, 1 - x.part), (x.high, x.part)):
                share = torch.where(on_map, wy * wx * grad_output.to(real), 0.0)
                grad.view(-1).index_add_(0, ((plane * height + row) * width + column).flatten(), share.flatten())
    elif grad.numel() and grad_output.numel():
        for k in range(len(boxes)):
            y, x, finite = axes(boxes[k], height, width, pooled_height, pooled_width, spatial_scale, sampling_ratio,
                                aligned, grad_output.dtype)  # fmt: skip
            if not valid[k] or not finite:
                continue
            given = grad_output[k].to(real) / (y.samples * x.samples).clamp(min=1)
            given = given[:, y.bin][:, :, x.bin]
            for row, column, weight in corners(y, x):
                share = torch.where(y.on_map[:, None] & x.on_map, weight * given, 0.0)
                grad[image[k]].index_add_(1, (row[:, None] * width + column).flatten(), share.flatten(1))
    out = empty_in_format((batch, channels, height, width), grad_output.dtype, grad.device, channels_last)
    return out.copy_(grad.view(batch, channels, height, width))


class Axis(NamedTuple):
    """Samples along one axis: of all bins of a box, or of any shape."""

    position: Tensor
    on_map: Tensor
    low: Tensor  # the two pixels around a sample, within the map
    high: Tensor
    part: Tensor  # the share of the second
    bin: Tensor
    samples: Tensor  # of a bin

    @classmethod
    def of(cls, position: Tensor, size: int) -> Axis:
        on_map, low, high, part = neighbors(position, size)
        return cls(position, on_map, low, high, part, low, part)


def axes(
    box: Tensor, height: int, width: int, pooled_height: int, pooled_width: int, spatial_scale: float,
    sampling_ratio: int, aligned: bool, dtype: torch.dtype,
) -> tuple[Axis, Axis, bool]:  # fmt: skip
    """Samples along y and x of a box, and whether it has any: one that is not finite lies off the map."""
    scaled = box.to(compute_dtype(dtype)) * spatial_scale - (0.5 if aligned else 0.0)
    found = []
    for low, high, pooled, size in ((scaled[2], scaled[4], pooled_height, height),
                                    (scaled[1], scaled[3], pooled_width, width)):  # fmt: skip
        extent = high - low
        if not bool(low.isfinite() & extent.isfinite()):
            nothing = Axis.of(low.new_empty(0), 1)
            return nothing, nothing, False
        found.append(_samples(low, extent if aligned else extent.clamp(min=1), pooled, sampling_ratio, size))
    return found[0], found[1], True


def _samples(start: Tensor, extent: Tensor, pooled: int, sampling_ratio: int, size: int) -> Axis:
    position, count = samples_along(start, extent, pooled, sampling_ratio)
    bins = torch.arange(pooled, device=start.device)
    on_map = (position >= -1) & (position <= size)
    # Samples further off the map than the first on each side change neither a mean nor a maximum nor its place.
    keep = on_map.clone()
    keep[:, 1:] |= on_map[:, :-1]
    keep[:, :-1] |= on_map[:, 1:]
    keep[:, :1] = True
    return Axis.of(position[keep], size)._replace(bin=bins[:, None].expand(keep.shape)[keep], samples=count)


def corners(y: Axis, x: Axis) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Rows, columns and weights [rows, columns] of the four pixels around each sample."""
    return [
        (row, column, wy[:, None] * wx)
        for row, wy in ((y.low, 1 - y.part), (y.high, y.part))
        for column, wx in ((x.low, 1 - x.part), (x.high, x.part))
    ]


def empty_outputs(
    input: Tensor, boxes: Tensor, pooled_height: int, pooled_width: int, mode: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Output and positions of the maxima [K, C, PH, PW], lying in memory as the input does; a mean has none."""
    shape, real = (boxes.shape[0], input.shape[1], pooled_height, pooled_width), compute_dtype(input.dtype)
    place = input.device, format_of(input) == torch.channels_last
    output = empty_in_format(shape, input.dtype, *place)
    if mode == "avg":
        return output, input.new_empty(0, dtype=real), input.new_empty(0, dtype=real)
    return output, empty_in_format(shape, real, *place), empty_in_format(shape, real, *place)
