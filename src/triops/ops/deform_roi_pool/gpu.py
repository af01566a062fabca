"""deform_roi_pool on GPU: a program takes a block of bins of one box and a block of channels (see `_gpu.rois`).

Each bin begins with its own first sample near the map. The gradient of the map is added up by atomics in float32; where
deterministic algorithms are asked for, one program per image and block of channels walks boxes and bins in order, one
lane per channel. For the gradient of the offsets a program walks all channels of its bins.
"""

import torch
import triton
import triton.language as tl

from triops import _gpu
from triops._dtypes import compute_dtype
from triops._gpu.arithmetic import divide, from_bits
from triops._gpu.rois import (
    add_bilinear,
    check_images_if_strict,
    cut_box,
    image_of,
    neighbors,
    output_offsets,
    over_bins,
    over_channels,
    pixel_offsets,
    plane_offsets,
    programs,
    read_bilinear,
    sample_position,
    samples_within,
    tile_of_block,
)
from triops._rois import empty_in_format, empty_like_format, format_of
from triops.ops.deform_roi_pool.reference import empty_gradients

NUMBERS = {2: 256, 4: 128, 8: 128}  # bins times channels of a program of one warp, by the bytes of an element


def deform_roi_pool(input, boxes, offset, pooled_height, pooled_width, spatial_scale, sampling_ratio, gamma):
    check_images_if_strict("deform_roi_pool", boxes, input.shape[0])
    output = empty_like_format((boxes.shape[0], input.shape[1], pooled_height, pooled_width), input.dtype, input)
    if input.numel() == 0 or output.numel() == 0:
        return output.zero_()
    layout = format_of(input)
    grid, blocks, options = programs(output.shape, NUMBERS[input.element_size()], layout == torch.channels_last)
    _forward_kernel[grid](
        input.contiguous(memory_format=layout), boxes.contiguous(), boxes if offset is None else offset.contiguous(),
        output, *input.shape, pooled_height, pooled_width, blocks, _gpu.bits_of(spatial_scale), max(sampling_ratio, 0),
        _gpu.bits_of(gamma), MOVED=offset is not None, ADAPTIVE=sampling_ratio <= 0, **options,
    )  # fmt: skip
    return output


def deform_roi_pool_backward(
    grad_output, input, boxes, offset, spatial_scale, sampling_ratio, gamma, of_input, of_offset
):
    check_images_if_strict("deform_roi_pool_backward", boxes, input.shape[0])
    to_input, to_offset = empty_gradients(input, offset, of_input, of_offset)
    if input.numel() == 0 or grad_output.numel() == 0:
        return to_input.zero_(), to_offset.zero_()
    real, layout = compute_dtype(input.dtype), format_of(input)
    channels_last = layout == torch.channels_last
    total, _, rows, columns = grad_output.shape
    given, boxes = grad_output.contiguous(memory_format=layout), boxes.contiguous()
    moved = boxes if offset is None else offset.contiguous()
    rules = _gpu.bits_of(spatial_scale), max(sampling_ratio, 0), _gpu.bits_of(gamma)
    kind = {"MOVED": offset is not None, "ADAPTIVE": sampling_ratio <= 0}
    if to_offset.numel():
        (programs_of_bins, _), blocks, options = programs(grad_output.shape, NUMBERS[real.itemsize], channels_last)
        _offset_kernel[(programs_of_bins,)](
            given, input.contiguous(memory_format=layout), boxes, moved, to_offset, *input.shape, rows, columns,
            blocks, *rules, **kind, **options,
        )  # fmt: skip
    if of_input:
        in_order = torch.are_deterministic_algorithms_enabled()
        grid, blocks, options = programs(
            grad_output.shape, NUMBERS[real.itemsize], channels_last, in_order_of=input.shape[0] if in_order else 0
        )
        grad = to_input
        if to_input.dtype != real:
            grad = empty_in_format(input.shape, real, input.device, channels_last)
        _input_kernel[grid](
            given, boxes, moved, grad.zero_(), total, *input.shape, rows, columns, blocks, *rules,
            IN_ORDER=in_order, **kind, **options,
        )  # fmt: skip
        to_input = grad.to(input.dtype)
    return to_input, to_offset


@triton.jit
def _axis(
    boxes, offset, roi, axis, number, place, bins, pooled, size, factor, ratio, gamma,
    MOVED: tl.constexpr, ADAPTIVE: tl.constexpr,
):  # fmt: skip
    """Of the bins of a block along one axis of the map, at `place` along it: where they begin, length and samples of a
    bin, the first sample to visit and the one behind the last, `gamma` times the box, and whether it is finite."""
    REAL: tl.constexpr = factor.dtype
    start, length, samples, finite = cut_box(boxes, roi, axis, factor, pooled, ratio, ADAPTIVE, True, REAL)
    low = tl.load(boxes + roi * 5 + 1 + axis).to(REAL) * factor - 0.5
    extent = (tl.load(boxes + roi * 5 + 3 + axis).to(REAL) * factor - 0.5) - low
    reach = tl.where(finite, gamma * extent, 0.0)
    base = tl.zeros(place.shape, REAL) + start
    if MOVED:
        at = offset + (roi * 2 + axis) * bins + number
        base += reach * tl.load(at, mask=number < bins, other=0.0).to(REAL)
    near = tl.abs(base) < float("inf")
    base = tl.where(near, base, 0.0) + place.to(REAL) * length
    begin, end = samples_within(base, length, samples, -1.0, tl.cast(size, REAL), ADAPTIVE)
    return base, length, samples, begin, tl.where(near, end, begin), reach, finite


@triton.jit
def _steps(begin, end, readable):
    """How many steps it takes to visit the samples of all bins."""
    return tl.where(readable, tl.max(end - begin, 0), 0)


@triton.jit
def _visit(base, length, samples, begin, end, step, size):
    """Sample number `step` of each bin's visit along an axis: where it is, and `neighbors`, where there is one."""
    position = sample_position(base, length, samples, begin + step)
    on_map, low, high, part = neighbors(position, size)
    return position, on_map & (begin + step < end), low, high, part


@_gpu.kernel(specialize=("channels",))
def _forward_kernel(
    input, boxes, offset, output, batch, channels, height, width, rows, columns, blocks, scale, ratio, gamma,
    MOVED: tl.constexpr, ADAPTIVE: tl.constexpr, CHANNELS_LAST: tl.constexpr, BINS: tl.constexpr,
    CHANNELS: tl.constexpr,
):  # fmt: skip
    REAL: tl.constexpr = tl.float64 if input.dtype.element_ty == tl.float64 else tl.float32
    roi = tl.cast(tl.program_id(0) // blocks, tl.int64)
    bins = rows * columns
    number, channel, valid = tile_of_block(tl.program_id(0) % blocks, bins, channels, CHANNELS_LAST, BINS, CHANNELS)
    image, exists = image_of(boxes, roi, batch, 5)
    factor = from_bits(scale, REAL)
    share = from_bits(gamma, REAL)
    base_y, length_y, samples_y, begin_y, end_y, _, finite_y = _axis(
        boxes, offset, roi, 1, number, number // columns, bins, rows, height, factor, ratio, share, MOVED, ADAPTIVE
    )
    base_x, length_x, samples_x, begin_x, end_x, _, finite_x = _axis(
        boxes, offset, roi, 0, number, number % columns, bins, columns, width, factor, ratio, share, MOVED, ADAPTIVE
    )
    readable = exists & finite_y & finite_x
    count = tl.maximum(samples_y.to(REAL) * samples_x.to(REAL), 1.0)
    plane = input + plane_offsets(image, channel, height, width, channels, CHANNELS_LAST)
    result = tl.zeros([BINS, CHANNELS] if CHANNELS_LAST else [CHANNELS, BINS], REAL)
    for i in range(_steps(begin_y, end_y, readable)):
        _y, on_y, low_y, high_y, part_y = _visit(base_y, length_y, samples_y, begin_y, end_y, i, height)
        for j in range(_steps(begin_x, end_x, readable)):
            _x, on_x, low_x, high_x, part_x = _visit(base_x, length_x, samples_x, begin_x, end_x, j, width)
            mask = over_bins(on_y & on_x, CHANNELS_LAST) & valid
            result += read_bilinear(
                plane, low_y, high_y, part_y, low_x, high_x, part_x, width, channels, mask, CHANNELS_LAST, REAL
            )
    result = divide(result, tl.zeros(result.shape, REAL) + count)
    to = output_offsets(roi, number, channel, bins, channels, CHANNELS_LAST)
    tl.store(output + to, result.to(output.dtype.element_ty), mask=valid)


@triton.jit
def _give_back(
    given, boxes, offset, grad, roi, block, own_image, batch, channels, height, width, rows, columns, factor, ratio,
    share, MOVED: tl.constexpr, ADAPTIVE: tl.constexpr, CHANNELS_LAST: tl.constexpr, IN_ORDER: tl.constexpr,
    BINS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """Add the gradients of a block of bins of one box, IN_ORDER only where it belongs to `own_image`."""
    REAL: tl.constexpr = factor.dtype
    bins = rows * columns
    number, channel, valid = tile_of_block(block, bins, channels, CHANNELS_LAST, BINS, CHANNELS)
    image, readable = image_of(boxes, roi, batch, 5)
    if IN_ORDER:
        readable = readable & (image == own_image)
    base_y, length_y, samples_y, begin_y, end_y, _, finite_y = _axis(
        boxes, offset, roi, 1, number, number // columns, bins, rows, height, factor, ratio, share, MOVED, ADAPTIVE
    )
    base_x, length_x, samples_x, begin_x, end_x, _, finite_x = _axis(
        boxes, offset, roi, 0, number, number % columns, bins, columns, width, factor, ratio, share, MOVED, ADAPTIVE
    )
    readable = readable & finite_y & finite_x
    count = tl.maximum(samples_y.to(REAL) * samples_x.to(REAL), 1.0)
    plane = grad + plane_offsets(image, channel, height, width, channels, CHANNELS_LAST)
    source = output_offsets(roi, number, channel, bins, channels, CHANNELS_LAST)
    value = tl.load(given + source, mask=valid, other=0.0).to(REAL)
    value = divide(value, tl.zeros(value.shape, REAL) + count)
    for i in range(_steps(begin_y, end_y, readable)):
        _y, on_y, low_y, high_y, part_y = _visit(base_y, length_y, samples_y, begin_y, end_y, i, height)
        for j in range(_steps(begin_x, end_x, readable)):
            _x, on_x, low_x, high_x, part_x = _visit(base_x, length_x, samples_x, begin_x, end_x, j, width)
            mask = over_bins(on_y & on_x, CHANNELS_LAST) & valid
            add_bilinear(
                plane, value, low_y, high_y, part_y, low_x, high_x, part_x, width, channels, mask, CHANNELS_LAST
            )


@_gpu.kernel(specialize=("channels",))
def _input_kernel(
    given, boxes, offset, grad, total, batch, channels, height, width, rows, columns, blocks, scale, ratio, gamma,
    IN_ORDER: tl.constexpr, MOVED: tl.constexpr, ADAPTIVE: tl.constexpr, CHANNELS_LAST: tl.constexpr,
    BINS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    factor = from_bits(scale, grad.dtype.element_ty)
    share = from_bits(gamma, grad.dtype.element_ty)
    if IN_ORDER:
        for roi in range(total):
            for block in range(blocks):
                _give_back(
                    given, boxes, offset, grad, tl.cast(roi, tl.int64), block, tl.program_id(0), batch, channels,
                    height, width, rows, columns, factor, ratio, share,
                    MOVED, ADAPTIVE, CHANNELS_LAST, IN_ORDER, BINS, CHANNELS,
                )  # fmt: skip
    else:
        _give_back(
            given, boxes, offset, grad, tl.cast(tl.program_id(0) // blocks, tl.int64), tl.program_id(0) % blocks, 0,
            batch, channels, height, width, rows, columns, factor, ratio, share,
            MOVED, ADAPTIVE, CHANNELS_LAST, IN_ORDER, BINS, CHANNELS,
        )  # fmt: skip


@triton.jit
def _dot(plane, row, column, width, channels, value, mask, CHANNELS_LAST: tl.constexpr):
    """Of a pixel per bin with the gradient of the bin, over a block of channels."""
    at = plane + pixel_offsets(row, column, width, channels, CHANNELS_LAST)
    return tl.sum(tl.load(at, mask=mask, other=0.0).to(value.dtype) * value, 1 if CHANNELS_LAST else 0)


@_gpu.kernel(specialize=("channels",))
def _offset_kernel(
    given, input, boxes, offset, grad, batch, channels, height, width, rows, columns, blocks, scale, ratio, gamma,
    MOVED: tl.constexpr, ADAPTIVE: tl.constexpr, CHANNELS_LAST: tl.constexpr, BINS: tl.constexpr,
    CHANNELS: tl.constexpr,
):  # fmt: skip
    REAL: tl.constexpr = tl.float64 if input.dtype.element_ty == tl.float64 else tl.float32
    roi = tl.cast(tl.program_id(0) // blocks, tl.int64)
    number = tl.program_id(0) % blocks * BINS + tl.arange(0, BINS)
    bins = rows * columns
    image, exists = image_of(boxes, roi, batch, 5)
    factor = from_bits(scale, REAL)
    share = from_bits(gamma, REAL)
    base_y, length_y, samples_y, begin_y, end_y, reach_y, finite_y = _axis(
        boxes, offset, roi, 1, number, number // columns, bins, rows, height, factor, ratio, share, MOVED, ADAPTIVE
    )
    base_x, length_x, samples_x, begin_x, end_x, reach_x, finite_x = _axis(
        boxes, offset, roi, 0, number, number % columns, bins, columns, width, factor, ratio, share, MOVED, ADAPTIVE
    )
    readable = exists & finite_y & finite_x
    count = tl.maximum(samples_y.to(REAL) * samples_x.to(REAL), 1.0)
    along_y = tl.zeros([BINS], REAL)
    along_x = tl.zeros([BINS], REAL)
    for first in range(0, channels, CHANNELS):
        channel = first + tl.arange(0, CHANNELS)
        valid = over_bins(number < bins, CHANNELS_LAST) & over_channels(channel < channels, CHANNELS_LAST)
        plane = input + plane_offsets(image, channel, height, width, channels, CHANNELS_LAST)
        source = output_offsets(roi, number, channel, bins, channels, CHANNELS_LAST)
        value = tl.load(given + source, mask=valid, other=0.0).to(REAL)
        value = divide(value, tl.zeros(value.shape, REAL) + count)
        for i in range(_steps(begin_y, end_y, readable)):
            y, on_y, low_y, high_y, part_y = _visit(base_y, length_y, samples_y, begin_y, end_y, i, height)
            moves_y = (y >= 0.0) & (y <= tl.cast(height - 1, REAL))
            for j in range(_steps(begin_x, end_x, readable)):
                x, on_x, low_x, high_x, part_x = _visit(base_x, length_x, samples_x, begin_x, end_x, j, width)
                on_map = on_y & on_x
                mask = over_bins(on_map, CHANNELS_LAST) & valid
                top_left = _dot(plane, low_y, low_x, width, channels, value, mask, CHANNELS_LAST)
                top_right = _dot(plane, low_y, high_x, width, channels, value, mask, CHANNELS_LAST)
                bottom_left = _dot(plane, high_y, low_x, width, channels, value, mask, CHANNELS_LAST)
                bottom_right = _dot(plane, high_y, high_x, width, channels, value, mask, CHANNELS_LAST)
                slope_x = (1.0 - part_y) * (top_right - top_left) + part_y * (bottom_right - bottom_left)
                slope_y = (1.0 - part_x) * (bottom_left - top_left) + part_x * (bottom_right - top_right)
                moves_x = (x >= 0.0) & (x <= tl.cast(width - 1, REAL))
                along_x += tl.where(on_map & moves_x, slope_x, 0.0)
                along_y += tl.where(on_map & moves_y, slope_y, 0.0)
    to = grad + roi * 2 * bins + number
    element = grad.dtype.element_ty
    tl.store(to, (reach_x * along_x).to(element), mask=number < bins)
    tl.store(to + bins, (reach_y * along_y).to(element), mask=number < bins)
