"""prroi_pool on GPU: a program takes a block of bins of one box and a block of channels (see `_gpu.rois`).

Each bin begins with its own first pixel. The gradient of the map is added up by atomics in float32; where deterministic
algorithms are asked for, one program per image and block of channels walks boxes and bins in order, one lane per
channel. For the gradient of the boxes a program walks all channels of its bins, and torch sums over the bins.
"""

import torch
import triton
import triton.language as tl

from triops import _gpu
from triops._dtypes import compute_dtype
from triops._gpu.arithmetic import as_mask, divide, from_bits
from triops._gpu.rois import (
    check_images_if_strict,
    image_of,
    output_offsets,
    over_bins,
    over_channels,
    pixel_offsets,
    plane_offsets,
    programs,
    tile_of_block,
)
from triops._rois import empty_in_format, empty_like_format, format_of

NUMBERS = {2: 256, 4: 128, 8: 128}  # bins times channels of a program of one warp, by the bytes of an element


def prroi_pool(input, boxes, pooled_height, pooled_width, spatial_scale):
    check_images_if_strict("prroi_pool", boxes, input.shape[0])
    batch, channels, height, width = input.shape
    output = empty_like_format((boxes.shape[0], channels, pooled_height, pooled_width), input.dtype, input)
    if input.numel() == 0 or output.numel() == 0:
        return output.zero_()
    layout = format_of(input)
    grid, blocks, options = programs(output.shape, NUMBERS[input.element_size()], layout == torch.channels_last)
    _forward_kernel[grid](
        input.contiguous(memory_format=layout), boxes.contiguous(), output, batch, channels, height, width,
        pooled_height, pooled_width, blocks, _gpu.bits_of(spatial_scale), **options,
    )  # fmt: skip
    return output


def prroi_pool_backward(grad_output, boxes, batch, height, width, spatial_scale, channels_last):
    check_images_if_strict("prroi_pool_backward", boxes, batch)
    total, channels, rows, columns = grad_output.shape
    real = compute_dtype(grad_output.dtype)
    grad = empty_in_format((batch, channels, height, width), real, grad_output.device, channels_last).zero_()
    if grad.numel() and grad_output.numel():
        layout = torch.channels_last if channels_last else torch.contiguous_format
        in_order = torch.are_deterministic_algorithms_enabled()
        grid, blocks, options = programs(
            grad_output.shape, NUMBERS[real.itemsize], channels_last, in_order_of=batch if in_order else 0
        )
        _backward_kernel[grid](
            grad_output.contiguous(memory_format=layout), boxes.contiguous(), grad, total, batch, channels, height,
            width, rows, columns, blocks, _gpu.bits_of(spatial_scale), IN_ORDER=in_order, **options,
        )  # fmt: skip
    return grad.to(grad_output.dtype)


def prroi_pool_boxes_backward(grad_output, input, boxes, spatial_scale):
    check_images_if_strict("prroi_pool_boxes_backward", boxes, input.shape[0])
    batch, channels, height, width = input.shape
    total, _, rows, columns = grad_output.shape
    real, layout = compute_dtype(input.dtype), format_of(input)
    if input.numel() == 0 or grad_output.numel() == 0:
        return torch.zeros_like(boxes, memory_format=torch.contiguous_format)
    (programs_of_bins, _), blocks, options = programs(
        grad_output.shape, NUMBERS[real.itemsize], layout == torch.channels_last
    )
    parts = torch.empty((total, rows * columns, 5), dtype=real, device=input.device)
    _boxes_backward_kernel[(programs_of_bins,)](
        grad_output.contiguous(memory_format=layout), input.contiguous(memory_format=layout), boxes.contiguous(),
        parts, batch, channels, height, width, rows, columns, blocks, _gpu.bits_of(spatial_scale), **options,
    )  # fmt: skip
    return parts.sum(1).to(boxes.dtype)


@triton.jit
def _axis(boxes, roi, axis, place, pooled, size, factor):
    """Of the bins at `place` along one axis of a map: first and last edge, length of a bin, the first pixel and the one
    behind the last, and whether the box is finite."""
    REAL: tl.constexpr = factor.dtype
    start = tl.load(boxes + roi * 5 + 1 + axis).to(REAL) * factor
    extent = tl.load(boxes + roi * 5 + 3 + axis).to(REAL) * factor - start
    finite = (tl.abs(start) < float("inf")) & (tl.abs(extent) < float("inf"))
    start = tl.where(finite, start, 0.0)
    length = divide(tl.maximum(tl.where(finite, extent, 0.0), 0.0), tl.cast(pooled, REAL))
    first = start + length * place.to(REAL)
    last = first + length
    end = tl.cast(size, REAL)
    low = tl.minimum(tl.maximum(tl.floor(first), 0.0), end).to(tl.int32)
    high = tl.minimum(tl.maximum(tl.ceil(last), -1.0), end - 1.0).to(tl.int32)
    return first, last, length, low, tl.minimum(high, size - 1) + 1, finite


@triton.jit
def _hat(pixel, place):
    return tl.maximum(1.0 - tl.abs(place - pixel), 0.0)


@triton.jit
def _integral(pixel, first, last):
    """Of the hat function of a pixel from `first` to `last`: its two straight pieces at their middles.

    Middles are taken from where a piece is 0 on: what lies close to there keeps its digits, and does not become 0.
    """
    low, high = pixel - 1.0, pixel + 1.0
    begin = tl.maximum(low, first)
    end = tl.minimum(pixel, last)
    weight = tl.maximum(end - begin, 0.0) * (((begin - low) + (end - low)) * 0.5)
    begin = tl.maximum(pixel, first)
    end = tl.minimum(high, last)
    return weight + tl.maximum(end - begin, 0.0) * (((high - begin) + (high - end)) * 0.5)


@triton.jit
def _edges(pixel, first, last):
    """The hat function of a pixel at both edges of bins, less its mean between them; that is small in small bins, and
    so worked out in float64."""
    REAL: tl.constexpr = first.dtype
    first = first.to(tl.float64)
    last = last.to(tl.float64)
    pixel = pixel.to(tl.float64)
    length = last - first
    mean = _integral(pixel, first, last) / tl.where(length > 0.0, length, 1.0)
    return (_hat(pixel, first) - mean).to(REAL), (_hat(pixel, last) - mean).to(REAL)


@_gpu.kernel(specialize=("channels",))
def _forward_kernel(
    input, boxes, output, batch, channels, height, width, rows, columns, blocks, scale,
    CHANNELS_LAST: tl.constexpr, BINS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    REAL: tl.constexpr = tl.float64 if input.dtype.element_ty == tl.float64 else tl.float32
    roi = tl.cast(tl.program_id(0) // blocks, tl.int64)
    bins = rows * columns
    number, channel, valid = tile_of_block(tl.program_id(0) % blocks, bins, channels, CHANNELS_LAST, BINS, CHANNELS)
    image, exists = image_of(boxes, roi, batch, 5)
    factor = from_bits(scale, REAL)
    y1, y2, tall, top, bottom, finite_y = _axis(boxes, roi, 1, number // columns, rows, height, factor)
    x1, x2, wide, left, right, finite_x = _axis(boxes, roi, 0, number % columns, columns, width, factor)
    area = tall * wide
    readable = exists & finite_y & finite_x & (area > 0.0)
    steps_y = tl.where(readable, tl.max(bottom - top, 0), 0)
    steps_x = tl.where(readable, tl.max(right - left, 0), 0)
    plane = input + plane_offsets(image, channel, height, width, channels, CHANNELS_LAST)
    result = tl.zeros([BINS, CHANNELS] if CHANNELS_LAST else [CHANNELS, BINS], REAL)
    for i in range(steps_y):
        row = top + i
        weight_y = tl.where(row < bottom, _integral(row.to(REAL), y1, y2), 0.0)
        for j in range(steps_x):
            column = left + j
            weight_x = tl.where(column < right, _integral(column.to(REAL), x1, x2), 0.0)
            mask = over_bins((weight_y > 0.0) & (weight_x > 0.0), CHANNELS_LAST) & valid
            at = plane + pixel_offsets(row, column, width, channels, CHANNELS_LAST)
            result += over_bins(weight_y * weight_x, CHANNELS_LAST) * tl.load(at, mask=mask, other=0.0).to(REAL)
    result = divide(result, tl.zeros(result.shape, REAL) + tl.where(readable, area, 1.0))
    to = output_offsets(roi, number, channel, bins, channels, CHANNELS_LAST)
    tl.store(output + to, result.to(output.dtype.element_ty), mask=valid)


@triton.jit
def _give_back(
    given, boxes, grad, roi, block, own_image, batch, channels, height, width, rows, columns, factor,
    CHANNELS_LAST: tl.constexpr, IN_ORDER: tl.constexpr, BINS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """Add the gradients of a block of bins of one box, IN_ORDER only where it belongs to `own_image`."""
    REAL: tl.constexpr = factor.dtype
    bins = rows * columns
    number, channel, valid = tile_of_block(block, bins, channels, CHANNELS_LAST, BINS, CHANNELS)
    image, exists = image_of(boxes, roi, batch, 5)
    if IN_ORDER:
        exists = exists & (image == own_image)
    y1, y2, tall, top, bottom, finite_y = _axis(boxes, roi, 1, number // columns, rows, height, factor)
    x1, x2, wide, left, right, finite_x = _axis(boxes, roi, 0, number % columns, columns, width, factor)
    area = tall * wide
    readable = exists & finite_y & finite_x & (area > 0.0)
    steps_y = tl.where(readable, tl.max(bottom - top, 0), 0)
    steps_x = tl.where(readable, tl.max(right - left, 0), 0)
    plane = grad + plane_offsets(image, channel, height, width, channels, CHANNELS_LAST)
    source = output_offsets(roi, number, channel, bins, channels, CHANNELS_LAST)
    value = tl.load(given + source, mask=valid, other=0.0).to(REAL)
    value = divide(value, tl.zeros(value.shape, REAL) + tl.where(readable, area, 1.0))
    for i in range(steps_y):
        row = top + i
        weight_y = tl.where(row < bottom, _integral(row.to(REAL), y1, y2), 0.0)
        for j in range(steps_x):
            column = left + j
            weight_x = tl.where(column < right, _integral(column.to(REAL), x1, x2), 0.0)
            mask = over_bins((weight_y > 0.0) & (weight_x > 0.0), CHANNELS_LAST) & valid
            at = plane + pixel_offsets(row, column, width, channels, CHANNELS_LAST)
            tl.atomic_add(at, over_bins(weight_y * weight_x, CHANNELS_LAST) * value, mask=mask, sem="relaxed")


@_gpu.kernel(specialize=("channels",))
def _backward_kernel(
    given, boxes, grad, total, batch, channels, height, width, rows, columns, blocks, scale,
    CHANNELS_LAST: tl.constexpr, IN_ORDER: tl.constexpr, BINS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    factor = from_bits(scale, grad.dtype.element_ty)
    if IN_ORDER:
        for roi in range(total):
            for block in range(blocks):
                _give_back(
                    given, boxes, grad, tl.cast(roi, tl.int64), block, tl.program_id(0), batch, channels, height,
                    width, rows, columns, factor, CHANNELS_LAST, IN_ORDER, BINS, CHANNELS,
                )  # fmt: skip
    else:
        _give_back(
            given, boxes, grad, tl.cast(tl.program_id(0) // blocks, tl.int64), tl.program_id(0) % blocks, 0, batch,
            channels, height, width, rows, columns, factor, CHANNELS_LAST, IN_ORDER, BINS, CHANNELS,
        )  # fmt: skip


@_gpu.kernel(specialize=("channels",))
def _boxes_backward_kernel(
    given, input, boxes, parts, batch, channels, height, width, rows, columns, blocks, scale,
    CHANNELS_LAST: tl.constexpr, BINS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    REAL: tl.constexpr = parts.dtype.element_ty
    SUM: tl.constexpr = 1 if CHANNELS_LAST else 0  # the axis of channels
    roi = tl.cast(tl.program_id(0) // blocks, tl.int64)
    number = tl.program_id(0) % blocks * BINS + tl.arange(0, BINS)
    bins = rows * columns
    image, exists = image_of(boxes, roi, batch, 5)
    factor = from_bits(scale, REAL)
    y1, y2, tall, top, bottom, finite_y = _axis(boxes, roi, 1, number // columns, rows, height, factor)
    x1, x2, wide, left, right, finite_x = _axis(boxes, roi, 0, number % columns, columns, width, factor)
    area = tall * wide
    readable = exists & finite_y & finite_x & (area > 0.0)
    area = tl.where(readable, area, 1.0)
    steps_y = tl.where(readable, tl.max(bottom - top, 0), 0)
    steps_x = tl.where(readable, tl.max(right - left, 0), 0)
    nothing = tl.zeros([BINS, CHANNELS] if CHANNELS_LAST else [CHANNELS, BINS], REAL)
    to_x1 = tl.zeros([BINS], REAL)
    to_x2 = to_x1
    to_y1 = to_x1
    to_y2 = to_x1
    for block in range((channels + CHANNELS - 1) // CHANNELS):
        channel = block * CHANNELS + tl.arange(0, CHANNELS)
        valid = over_bins(number < bins, CHANNELS_LAST) & over_channels(channel < channels, CHANNELS_LAST)
        plane = input + plane_offsets(image, channel, height, width, channels, CHANNELS_LAST)
        at_x1 = nothing
        at_x2 = nothing
        at_y1 = nothing
        at_y2 = nothing
        for i in range(steps_y):
            row = top + i
            weight_y = tl.where(row < bottom, _integral(row.to(REAL), y1, y2), 0.0)
            first_y, last_y = _edges(row, y1, y2)
            across = nothing
            for j in range(steps_x):
                column = left + j
                weight_x = tl.where(column < right, _integral(column.to(REAL), x1, x2), 0.0)
                first_x, last_x = _edges(column, x1, x2)
                some = (weight_y > 0.0) & (weight_x > 0.0)
                at = plane + pixel_offsets(row, column, width, channels, CHANNELS_LAST)
                value = tl.load(at, mask=over_bins(some, CHANNELS_LAST) & valid, other=0.0).to(REAL)
                across += over_bins(weight_x, CHANNELS_LAST) * value
                at_x1 += over_bins(weight_y * first_x, CHANNELS_LAST) * value
                at_x2 += over_bins(weight_y * last_x, CHANNELS_LAST) * value
            at_y1 += over_bins(first_y, CHANNELS_LAST) * across
            at_y2 += over_bins(last_y, CHANNELS_LAST) * across
        source = output_offsets(roi, number, channel, bins, channels, CHANNELS_LAST)
        share = tl.load(given + source, mask=valid & as_mask(readable, valid), other=0.0).to(REAL)
        share = divide(share, nothing + area)
        to_x1 -= tl.sum(at_x1 * share, SUM)
        to_x2 += tl.sum(at_x2 * share, SUM)
        to_y1 -= tl.sum(at_y1 * share, SUM)
        to_y2 += tl.sum(at_y2 * share, SUM)
    part = (number % columns).to(REAL) / tl.cast(columns, REAL)
    next_part = (number % columns + 1).to(REAL) / tl.cast(columns, REAL)
    to = parts + (roi * bins + number) * 5
    inside = number < bins
    tl.store(to, tl.zeros([BINS], REAL), mask=inside)
    tl.store(to + 1, (to_x1 * (1.0 - part) + to_x2 * (1.0 - next_part)) * factor, mask=inside)
    tl.store(to + 3, (to_x1 * part + to_x2 * next_part) * factor, mask=inside)
    part = (number // columns).to(REAL) / tl.cast(rows, REAL)
    next_part = (number // columns + 1).to(REAL) / tl.cast(rows, REAL)
    tl.store(to + 2, (to_y1 * (1.0 - part) + to_y2 * (1.0 - next_part)) * factor, mask=inside)
    tl.store(to + 4, (to_y1 * part + to_y2 * next_part) * factor, mask=inside)
