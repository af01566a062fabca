"""roi_pool on GPU: a program takes a block of bins of one box and a block of channels (see `_gpu.rois`).

Each bin begins with its own first pixel, so bins of any size go side by side. The gradient is added up by atomics in
float32; where deterministic algorithms are asked for, one program per image and block of channels walks boxes and bins
in order, one lane per channel.
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
    pixel_offsets,
    plane_offsets,
    programs,
    tile_of_block,
)
from triops._rois import empty_in_format, format_of
from triops.ops.roi_pool.reference import LOWEST, NONE, empty_outputs

NUMBERS = {2: 256, 4: 128, 8: 128}  # bins times channels of a program of one warp, by the bytes of an element
BACKWARD_NUMBERS = 256
LEAST = tl.constexpr(LOWEST)
NOWHERE = tl.constexpr(NONE)


def roi_pool_forward(input, boxes, pooled_height, pooled_width, spatial_scale):
    check_images_if_strict("roi_pool", boxes, input.shape[0])
    output, argmax = empty_outputs(input, boxes, pooled_height, pooled_width)
    if input.numel() == 0 or output.numel() == 0:
        return output.zero_(), argmax.fill_(NONE)
    batch, channels, height, width = input.shape
    layout = format_of(input)
    grid, blocks, options = programs(output.shape, NUMBERS[input.element_size()], layout == torch.channels_last)
    _forward_kernel[grid](
        input.contiguous(memory_format=layout), boxes.contiguous(), output, argmax, batch, channels, height, width,
        pooled_height, pooled_width, blocks, _gpu.bits_of(spatial_scale), **options,
    )  # fmt: skip
    return output, argmax


def roi_pool_backward(grad_output, boxes, argmax, batch, height, width, channels_last):
    check_images_if_strict("roi_pool_backward", boxes, batch)
    total, channels, rows, columns = grad_output.shape
    real = compute_dtype(grad_output.dtype)
    grad = empty_in_format((batch, channels, height, width), real, grad_output.device, channels_last).zero_()
    if grad.numel() and grad_output.numel():
        layout = torch.channels_last if channels_last else torch.contiguous_format
        in_order = torch.are_deterministic_algorithms_enabled()
        grid, blocks, options = programs(
            grad_output.shape, BACKWARD_NUMBERS, channels_last, in_order_of=batch if in_order else 0
        )
        _backward_kernel[grid](
            grad_output.contiguous(memory_format=layout), boxes.contiguous(), argmax.contiguous(memory_format=layout),
            grad, total, batch, channels, height, width, rows * columns, blocks, IN_ORDER=in_order, **options,
        )  # fmt: skip
    return grad.to(grad_output.dtype)


@triton.jit
def _axis(boxes, roi, axis, place, pooled, size, factor, REAL: tl.constexpr):
    """Of the bins at `place` along one axis of a map: the first pixel and the one behind the last, and whether the box
    is finite and has an extent."""
    start = tl.load(boxes + roi * 5 + 1 + axis).to(REAL) * factor
    extent = (tl.load(boxes + roi * 5 + 3 + axis).to(REAL) + 1.0) * factor - start
    readable = (tl.abs(start) < float("inf")) & (tl.abs(extent) < float("inf")) & (extent > 0.0)
    start = tl.where(readable, start, 0.0)
    length = divide(tl.where(readable, extent, 0.0), tl.cast(pooled, REAL))
    end = tl.cast(size, tl.float32)
    first = tl.floor((place.to(REAL) * length + start).to(tl.float32))
    last = tl.ceil(((place + 1).to(REAL) * length + start).to(tl.float32))
    first = tl.minimum(tl.maximum(first, 0.0), end).to(tl.int32)
    last = tl.minimum(tl.maximum(last, 0.0), end).to(tl.int32)
    return first, last, readable


@_gpu.kernel(specialize=("channels",))
def _forward_kernel(
    input, boxes, output, argmax, batch, channels, height, width, rows, columns, blocks, scale,
    CHANNELS_LAST: tl.constexpr, BINS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    REAL: tl.constexpr = tl.float64 if input.dtype.element_ty == tl.float64 else tl.float32
    roi = tl.cast(tl.program_id(0) // blocks, tl.int64)
    bins = rows * columns
    number, channel, valid = tile_of_block(tl.program_id(0) % blocks, bins, channels, CHANNELS_LAST, BINS, CHANNELS)
    image, exists = image_of(boxes, roi, batch, 5)
    factor = from_bits(scale, REAL)
    top, bottom, readable_y = _axis(boxes, roi, 1, number // columns, rows, height, factor, REAL)
    left, right, readable_x = _axis(boxes, roi, 0, number % columns, columns, width, factor, REAL)
    some = (top < bottom) & (left < right) & as_mask(exists & readable_y & readable_x, top) & (number < bins)
    tall = tl.max(tl.where(some, bottom - top, 0), 0)
    wide = tl.max(tl.where(some, right - left, 0), 0)
    plane = input + plane_offsets(image, channel, height, width, channels, CHANNELS_LAST)
    nothing = tl.zeros([BINS, CHANNELS] if CHANNELS_LAST else [CHANNELS, BINS], REAL)
    best = tl.where(over_bins(some, CHANNELS_LAST), nothing + LEAST, nothing)
    at = nothing.to(tl.int32) + NOWHERE
    for i in range(tall):
        row = top + i
        within = some & (row < bottom)
        for j in range(wide):
            column = left + j
            mask = over_bins(within & (column < right), CHANNELS_LAST) & valid
            pixel = pixel_offsets(row, column, width, channels, CHANNELS_LAST)
            value = tl.load(plane + pixel, mask=mask, other=float("-inf")).to(REAL)
            greater = value > best
            best = tl.where(greater, value, best)
            at = tl.where(greater, over_bins(row * width + column, CHANNELS_LAST), at)
    to = output_offsets(roi, number, channel, bins, channels, CHANNELS_LAST)
    tl.store(output + to, best.to(output.dtype.element_ty), mask=valid)
    tl.store(argmax + to, at, mask=valid)


@triton.jit
def _give_back(
    given, boxes, argmax, grad, roi, block, own_image, batch, channels, height, width, bins,
    CHANNELS_LAST: tl.constexpr, IN_ORDER: tl.constexpr, BINS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """Add the gradients of a block of bins of one box, IN_ORDER only where it belongs to `own_image`."""
    number, channel, valid = tile_of_block(block, bins, channels, CHANNELS_LAST, BINS, CHANNELS)
    image, exists = image_of(boxes, roi, batch, 5)
    if IN_ORDER:
        exists = exists & (image == own_image)
    valid = valid & as_mask(exists, valid)
    source = output_offsets(roi, number, channel, bins, channels, CHANNELS_LAST)
    at = tl.load(argmax + source, mask=valid, other=NOWHERE).to(tl.int64)
    valid = valid & (at >= 0) & (at < tl.cast(height, tl.int64) * width)
    value = tl.load(given + source, mask=valid, other=0.0).to(grad.dtype.element_ty)
    plane = grad + plane_offsets(image, channel, height, width, channels, CHANNELS_LAST)
    stride = channels if CHANNELS_LAST else 1
    tl.atomic_add(plane + at * stride, value, mask=valid, sem="relaxed")


@_gpu.kernel(specialize=("channels",))
def _backward_kernel(
    given, boxes, argmax, grad, total, batch, channels, height, width, bins, blocks,
    CHANNELS_LAST: tl.constexpr, IN_ORDER: tl.constexpr, BINS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    if IN_ORDER:
        for roi in range(total):
            for block in range(blocks):
                _give_back(
                    given, boxes, argmax, grad, tl.cast(roi, tl.int64), block, tl.program_id(0), batch, channels,
                    height, width, bins, CHANNELS_LAST, IN_ORDER, BINS, CHANNELS,
                )  # fmt: skip
    else:
        _give_back(
            given, boxes, argmax, grad, tl.cast(tl.program_id(0) // blocks, tl.int64), tl.program_id(0) % blocks, 0,
            batch, channels, height, width, bins, CHANNELS_LAST, IN_ORDER, BINS, CHANNELS,
        )  # fmt: skip
