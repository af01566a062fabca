"""roi_align on GPU: a program takes a block of bins of one box and a block of channels.

Channels lie across the lanes where the map is channels-last, bins where it is NCHW. Positions are worked out once per
bin and sample. Each bin begins with its own first sample near the map, so that a box far larger than the map costs no
more steps than the map has pixels. The gradient is added up by atomics in float32; where deterministic algorithms are
asked for, one program per image and block of channels walks boxes and bins in order, one lane per channel.
"""

import torch
import triton
import triton.language as tl

from triops import _gpu
from triops._dtypes import compute_dtype
from triops._gpu.arithmetic import as_mask, divide, from_bits
from triops._gpu.rois import (
    add_bilinear,
    check_images_if_strict,
    cut_box,
    image_of,
    neighbors,
    output_offsets,
    over_bins,
    over_channels,
    plane_offsets,
    read_bilinear,
    sample_position,
    samples_within,
    tile_of,
    warps_of,
)
from triops._rois import empty_in_format, format_of
from triops.ops.roi_align.reference import LOWEST, NOWHERE, empty_outputs

NUMBERS = {2: 256, 4: 128, 8: 128}  # bins times channels of a program of one warp, by the bytes of an element
LEAST = tl.constexpr(LOWEST)
OFF = tl.constexpr(NOWHERE)


def roi_align_forward(input, boxes, pooled_height, pooled_width, spatial_scale, sampling_ratio, aligned, mode):
    check_images_if_strict("roi_align", boxes, input.shape[0])
    output, *positions = empty_outputs(input, boxes, pooled_height, pooled_width, mode)
    if input.numel() == 0 or output.numel() == 0:
        return output.zero_(), *(p.fill_(NOWHERE) for p in positions)
    batch, channels, height, width = input.shape
    layout = format_of(input)
    channels_last, maximum = layout == torch.channels_last, mode == "max"
    bins = pooled_height * pooled_width
    bin_block, channel_block = tile_of(bins, channels, NUMBERS[input.element_size()], channels_last)
    blocks = _gpu.cdiv(bins, bin_block)
    _forward_kernel[(boxes.shape[0] * blocks, _gpu.cdiv(channels, channel_block))](
        input.contiguous(memory_format=layout), boxes.contiguous(), output,
        positions[0] if maximum else output, positions[1] if maximum else output,
        batch, channels, height, width, pooled_height, pooled_width, blocks, _gpu.bits_of(spatial_scale),
        max(sampling_ratio, 0),
        ADAPTIVE=sampling_ratio <= 0, ALIGNED=bool(aligned), MAXIMUM=maximum, CHANNELS_LAST=channels_last,
        BINS=bin_block, CHANNELS=channel_block, num_warps=warps_of(bin_block * channel_block), enable_fp_fusion=False,
    )  # fmt: skip
    return output, positions[0], positions[1]


def roi_align_backward(
    grad_output, boxes, argmax_y, argmax_x, batch, height, width, spatial_scale, sampling_ratio, aligned, mode,
    channels_last,
):  # fmt: skip
    check_images_if_strict("roi_align_backward", boxes, batch)
    total, channels, rows, columns = grad_output.shape
    shape = (batch, channels, height, width)
    real = compute_dtype(grad_output.dtype)
    grad = empty_in_format(shape, real, grad_output.device, channels_last).zero_()
    if grad.numel() and grad_output.numel():
        layout = torch.channels_last if channels_last else torch.contiguous_format
        maximum, in_order = mode == "max", torch.are_deterministic_algorithms_enabled()
        bin_block, channel_block = tile_of(rows * columns, channels, NUMBERS[real.itemsize], channels_last)
        if in_order:
            bin_block, channel_block = 1, 32
        blocks = _gpu.cdiv(rows * columns, bin_block)
        given = grad_output.contiguous(memory_format=layout)
        argmax_y, argmax_x = (
            (p.contiguous(memory_format=layout) for p in (argmax_y, argmax_x)) if maximum else (grad, grad)
        )
        _backward_kernel[(batch if in_order else total * blocks, _gpu.cdiv(channels, channel_block))](
            given, boxes.contiguous(), argmax_y, argmax_x, grad, total, batch, channels, height, width, rows, columns,
            blocks, _gpu.bits_of(spatial_scale), max(sampling_ratio, 0),
            ADAPTIVE=sampling_ratio <= 0, ALIGNED=bool(aligned), MAXIMUM=maximum, CHANNELS_LAST=channels_last,
            IN_ORDER=in_order, BINS=bin_block, CHANNELS=channel_block,
            num_warps=1 if in_order else warps_of(bin_block * channel_block), enable_fp_fusion=False,
        )  # fmt: skip
    return grad.to(grad_output.dtype)


@triton.jit
def _axis(
    boxes, roi, axis, place, bins, size, factor, ratio,
    ADAPTIVE: tl.constexpr, ALIGNED: tl.constexpr, REAL: tl.constexpr,
):  # fmt: skip
    """Of the bins at `place` along one axis of a map of `size` pixels: where they begin, length and samples of a bin,
    the first sample to visit and the one behind the last, and whether the box is finite."""
    start, length, samples, finite = cut_box(boxes, roi, axis, factor, bins, ratio, ADAPTIVE, ALIGNED, REAL)
    base = start + place.to(REAL) * length
    begin, end = samples_within(base, length, samples, -1.0, tl.cast(size, REAL), ADAPTIVE)
    return base, length, samples, begin, end, finite


@_gpu.kernel(specialize=("channels",))
def _forward_kernel(
    input, boxes, output, argmax_y, argmax_x, batch, channels, height, width, rows, columns, blocks, scale, ratio,
    ADAPTIVE: tl.constexpr, ALIGNED: tl.constexpr, MAXIMUM: tl.constexpr, CHANNELS_LAST: tl.constexpr,
    BINS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    REAL: tl.constexpr = tl.float64 if input.dtype.element_ty == tl.float64 else tl.float32
    roi = tl.cast(tl.program_id(0) // blocks, tl.int64)
    number = tl.program_id(0) % blocks * BINS + tl.arange(0, BINS)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    bins = rows * columns
    valid = over_bins(number < bins, CHANNELS_LAST) & over_channels(channel < channels, CHANNELS_LAST)
    image, exists = image_of(boxes, roi, batch, 5)
    factor = from_bits(scale, REAL)
    base_y, length_y, samples_y, begin_y, end_y, finite_y = _axis(
        boxes, roi, 1, number // columns, rows, height, factor, ratio, ADAPTIVE, ALIGNED, REAL
    )
    base_x, length_x, samples_x, begin_x, end_x, finite_x = _axis(
        boxes, roi, 0, number % columns, columns, width, factor, ratio, ADAPTIVE, ALIGNED, REAL
    )
    readable = exists & finite_y & finite_x
    steps_y = tl.where(readable, tl.max(end_y - begin_y, 0), 0)
    steps_x = tl.where(readable, tl.max(end_x - begin_x, 0), 0)
    plane = input + plane_offsets(image, channel, height, width, channels, CHANNELS_LAST)
    nothing = tl.zeros([BINS, CHANNELS] if CHANNELS_LAST else [CHANNELS, BINS], REAL)
    result = nothing
    best_y = nothing + OFF
    best_x = nothing + OFF
    some = readable & (samples_y > 0) & (samples_x > 0)
    if MAXIMUM:
        # What is skipped in front is a 0 that competes first.
        skipped = ((begin_y > 0) | (begin_x > 0)) & as_mask(some, begin_y)
        result = tl.where(over_bins(skipped, CHANNELS_LAST), nothing, nothing + LEAST)
        result = tl.where(readable, result, 0.0)
    for i in range(steps_y):
        sample_y = begin_y + i
        within_y = sample_y < end_y
        y = sample_position(base_y, length_y, samples_y, sample_y)
        on_y, low_y, high_y, part_y = neighbors(y, height)
        on_y = on_y & within_y
        for j in range(steps_x):
            sample_x = begin_x + j
            within_x = sample_x < end_x
            x = sample_position(base_x, length_x, samples_x, sample_x)
            on_x, low_x, high_x, part_x = neighbors(x, width)
            on_map = on_y & on_x & within_x
            load = over_bins(on_map, CHANNELS_LAST) & valid
            value = read_bilinear(
                plane, low_y, high_y, part_y, low_x, high_x, part_x, width, channels, load, CHANNELS_LAST, REAL
            )
            if MAXIMUM:
                greater = over_bins(within_y & within_x, CHANNELS_LAST) & (value > result)
                result = tl.where(greater, value, result)
                best_y = tl.where(greater, over_bins(tl.where(on_map, y, OFF), CHANNELS_LAST), best_y)
                best_x = tl.where(greater, over_bins(tl.where(on_map, x, OFF), CHANNELS_LAST), best_x)
            else:
                result = result + value
        if MAXIMUM:
            behind = over_bins(within_y & (end_x < samples_x), CHANNELS_LAST) & (result < 0.0)
            result = tl.where(behind, 0.0, result)
            best_y = tl.where(behind, OFF, best_y)
            best_x = tl.where(behind, OFF, best_x)
    to = output_offsets(roi, number, channel, bins, channels, CHANNELS_LAST)
    if MAXIMUM:
        behind = over_bins((end_y < samples_y) & as_mask(some, end_y), CHANNELS_LAST) & (result < 0.0)
        result = tl.where(behind, 0.0, result)
        tl.store(argmax_y + to, tl.where(behind, OFF, best_y), mask=valid)
        tl.store(argmax_x + to, tl.where(behind, OFF, best_x), mask=valid)
    else:
        count = tl.maximum(samples_y.to(REAL) * samples_x.to(REAL), 1.0)
        result = divide(result, nothing + count)
    tl.store(output + to, result.to(output.dtype.element_ty), mask=valid)


@triton.jit
def _give_back(
    given, boxes, argmax_y, argmax_x, grad, roi, block, own_image, batch, channels, height, width, rows, columns,
    factor, ratio,
    ADAPTIVE: tl.constexpr, ALIGNED: tl.constexpr, MAXIMUM: tl.constexpr, CHANNELS_LAST: tl.constexpr,
    IN_ORDER: tl.constexpr, BINS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """Add the gradients of a block of bins of one box, IN_ORDER only where it belongs to `own_image`."""
    REAL: tl.constexpr = factor.dtype
    number = block * BINS + tl.arange(0, BINS)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    bins = rows * columns
    valid = over_bins(number < bins, CHANNELS_LAST) & over_channels(channel < channels, CHANNELS_LAST)
    image, readable = image_of(boxes, roi, batch, 5)
    if IN_ORDER:
        readable = readable & (image == own_image)
    plane = grad + plane_offsets(image, channel, height, width, channels, CHANNELS_LAST)
    source = output_offsets(roi, number, channel, bins, channels, CHANNELS_LAST)
    if MAXIMUM:
        valid = valid & as_mask(readable, valid)
        value = tl.load(given + source, mask=valid, other=0.0).to(REAL)
        on_y, low_y, high_y, part_y = neighbors(tl.load(argmax_y + source, mask=valid, other=OFF), height)
        on_x, low_x, high_x, part_x = neighbors(tl.load(argmax_x + source, mask=valid, other=OFF), width)
        mask = valid & on_y & on_x
        stride = channels if CHANNELS_LAST else 1
        for down in tl.static_range(2):
            for right in tl.static_range(2):
                weight = (part_y if down else 1.0 - part_y) * (part_x if right else 1.0 - part_x)
                at = (high_y if down else low_y).to(tl.int64) * width + (high_x if right else low_x)
                tl.atomic_add(plane + at * stride, weight * value, mask=mask, sem="relaxed")
    else:
        base_y, length_y, samples_y, begin_y, end_y, finite_y = _axis(
            boxes, roi, 1, number // columns, rows, height, factor, ratio, ADAPTIVE, ALIGNED, REAL
        )
        base_x, length_x, samples_x, begin_x, end_x, finite_x = _axis(
            boxes, roi, 0, number % columns, columns, width, factor, ratio, ADAPTIVE, ALIGNED, REAL
        )
        readable = readable & finite_y & finite_x
        steps_y = tl.where(readable, tl.max(end_y - begin_y, 0), 0)
        steps_x = tl.where(readable, tl.max(end_x - begin_x, 0), 0)
        value = tl.load(given + source, mask=valid, other=0.0).to(REAL)
        count = tl.maximum(samples_y.to(REAL) * samples_x.to(REAL), 1.0)
        value = divide(value, tl.zeros(value.shape, REAL) + count)
        for i in range(steps_y):
            y = sample_position(base_y, length_y, samples_y, begin_y + i)
            on_y, low_y, high_y, part_y = neighbors(y, height)
            on_y = on_y & (begin_y + i < end_y)
            for j in range(steps_x):
                x = sample_position(base_x, length_x, samples_x, begin_x + j)
                on_x, low_x, high_x, part_x = neighbors(x, width)
                mask = over_bins(on_y & on_x & (begin_x + j < end_x), CHANNELS_LAST) & valid
                add_bilinear(
                    plane, value, low_y, high_y, part_y, low_x, high_x, part_x, width, channels, mask, CHANNELS_LAST
                )


@_gpu.kernel(specialize=("channels",))
def _backward_kernel(
    given, boxes, argmax_y, argmax_x, grad, total, batch, channels, height, width, rows, columns, blocks, scale, ratio,
    ADAPTIVE: tl.constexpr, ALIGNED: tl.constexpr, MAXIMUM: tl.constexpr, CHANNELS_LAST: tl.constexpr,
    IN_ORDER: tl.constexpr, BINS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    REAL: tl.constexpr = grad.dtype.element_ty
    factor = from_bits(scale, REAL)
    if IN_ORDER:
        for roi in range(total):
            for block in range(blocks):
                _give_back(
                    given, boxes, argmax_y, argmax_x, grad, tl.cast(roi, tl.int64), block, tl.program_id(0), batch,
                    channels, height, width, rows, columns, factor, ratio,
                    ADAPTIVE, ALIGNED, MAXIMUM, CHANNELS_LAST, IN_ORDER, BINS, CHANNELS,
                )  # fmt: skip
    else:
        _give_back(
            given, boxes, argmax_y, argmax_x, grad, tl.cast(tl.program_id(0) // blocks, tl.int64),
            tl.program_id(0) % blocks, 0, batch, channels, height, width, rows, columns, factor, ratio,
            ADAPTIVE, ALIGNED, MAXIMUM, CHANNELS_LAST, IN_ORDER, BINS, CHANNELS,
        )  # fmt: skip
