"""roi_align on GPU: a program takes a block of bins of one box and a block of channels.

Channels lie across the lanes where the map is channels-last, bins where it is NCHW. A map that is NCHW is copied to
channels-last first where the boxes read a good part of it. Positions are worked out once per bin and sample. Where the
number of samples is adaptive, each bin begins with its own first sample near the map, so that a box far larger than the
map costs no more steps than the map has pixels; means over them have kernels of their own (`adaptive_gpu.py`). The
gradient is added up by atomics in float32; where deterministic algorithms are asked for, one program per image and
block of channels walks boxes and bins in order, one lane per channel.
"""

import torch
import triton
import triton.language as tl

from triops import _gpu
from triops._dtypes import compute_dtype
from triops._gpu.arithmetic import as_mask, divide, from_bits
from triops._gpu.maps import in_format
from triops._gpu.rois import (
    add_bilinear,
    bin_offsets,
    check_images_if_strict,
    cut_box,
    image_of,
    launch_moved_where_it_pays,
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
from triops._rois import empty_in_format, format_of
from triops.ops.roi_align import adaptive_gpu
from triops.ops.roi_align.reference import LOWEST, NOWHERE, empty_outputs

# Bins times channels of a program of one warp, by the bytes of an element: of a map that is channels-last, or NCHW.
NUMBERS = {True: {2: 256, 4: 256, 8: 256}, False: {2: 256, 4: 128, 8: 128}}
BACK = {4: 128, 8: 128}
LEAST = tl.constexpr(LOWEST)
OFF = tl.constexpr(NOWHERE)


def roi_align_forward(input, boxes, pooled_height, pooled_width, spatial_scale, sampling_ratio, aligned, mode):
    check_images_if_strict("roi_align", boxes, input.shape[0])
    output, *positions = empty_outputs(input, boxes, pooled_height, pooled_width, mode)
    if input.numel() == 0 or output.numel() == 0:
        return output.zero_(), *(p.fill_(NOWHERE) for p in positions)
    boxes, last = boxes.contiguous(), format_of(input) == torch.channels_last
    input = input.contiguous(memory_format=format_of(input))

    def launch(moved):
        found = [output, *(positions if mode == "max" else [])]
        maps, targets = input, found
        if moved:  # the outputs too: lanes lie along channels, and would store NCHW one number at a time
            maps = in_format(input, channels_last=True)
            targets = [empty_in_format(t.shape, t.dtype, t.device, channels_last=True) for t in found]
        if sampling_ratio <= 0 and mode == "avg":
            adaptive_gpu.forward(maps, boxes, targets[0], spatial_scale, bool(aligned), last or moved)
        else:
            _sample(maps, boxes, targets[0], targets[1:], spatial_scale, sampling_ratio, bool(aligned), last or moved)
        if moved:
            for target, wanted in zip(targets, found, strict=True):
                in_format(target, channels_last=False, target=wanted)

    key = "roi_align", "forward", input.dtype, boxes.dtype, aligned, mode
    launch_moved_where_it_pays(launch, last, input.shape, output.shape, sampling_ratio, key)
    return output, positions[0], positions[1]


def _sample(maps, boxes, output, positions, spatial_scale, sampling_ratio, aligned, channels_last):
    """Fill `output`, and where they are to be filled the positions of maxima, from samples of `maps`."""
    batch, channels, height, width = maps.shape
    _, _, rows, columns = output.shape
    grid, blocks, options = programs(output.shape, NUMBERS[channels_last][maps.element_size()], channels_last)
    sizes = batch, channels, height, width, rows, columns, blocks, _gpu.bits_of(spatial_scale), max(sampling_ratio, 0)
    if positions:
        _maximum_kernel[grid](
            maps, boxes, output, *positions, *sizes, ADAPTIVE=sampling_ratio <= 0, ALIGNED=aligned, **options
        )
    else:
        _mean_kernel[grid](maps, boxes, output, *sizes, ALIGNED=aligned, **options)


def roi_align_backward(
    grad_output, boxes, argmax_y, argmax_x, batch, height, width, spatial_scale, sampling_ratio, aligned, mode,
    channels_last,
):  # fmt: skip
    check_images_if_strict("roi_align_backward", boxes, batch)
    shape = (batch, grad_output.shape[1], height, width)
    real = compute_dtype(grad_output.dtype)
    device, in_order = grad_output.device, torch.are_deterministic_algorithms_enabled()
    if grad_output.numel() == 0 or 0 in shape:
        return empty_in_format(shape, grad_output.dtype, device, channels_last).zero_()
    boxes = boxes.contiguous()
    layout = torch.channels_last if channels_last else torch.contiguous_format
    given, *places = (p.contiguous(memory_format=layout) for p in (grad_output, argmax_y, argmax_x) if p.dim() == 4)
    made = []

    def launch(moved):
        last = channels_last or moved
        grad = empty_in_format(shape, real, device, last).zero_()
        if sampling_ratio <= 0 and mode == "avg" and not in_order:
            adaptive_gpu.backward(grad, boxes, given, spatial_scale, bool(aligned), last, channels_last)
        else:
            _give(grad, boxes, given, places, spatial_scale, sampling_ratio, aligned, in_order, last, channels_last)
        made[:] = [in_format(grad, channels_last, grad_output.dtype) if moved else grad.to(grad_output.dtype)]

    if in_order:
        launch(False)
    else:
        key = "roi_align", "backward", grad_output.dtype, boxes.dtype, aligned, mode
        launch_moved_where_it_pays(launch, channels_last, shape, grad_output.shape, sampling_ratio, key)
    return made[0]


def _give(
    grad, boxes, given, places, spatial_scale, sampling_ratio, aligned, in_order, grad_last, given_last
):  # fmt: skip
    batch, channels, height, width = grad.shape
    total, _, rows, columns = given.shape
    grid, blocks, options = programs(
        given.shape, BACK[grad.element_size()], grad_last, in_order_of=batch if in_order else 0
    )
    _backward_kernel[grid](
        given, boxes, *(places or (grad, grad)), grad, total, batch, channels, height, width, rows, columns, blocks,
        _gpu.bits_of(spatial_scale), max(sampling_ratio, 0),
        ADAPTIVE=sampling_ratio <= 0, ALIGNED=bool(aligned), MAXIMUM=bool(places), GIVEN_LAST=given_last,
        IN_ORDER=in_order, **options,
    )  # fmt: skip


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
def _mean_kernel(
    input, boxes, output, batch, channels, height, width, rows, columns, blocks, scale, ratio,
    ALIGNED: tl.constexpr, CHANNELS_LAST: tl.constexpr, BINS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """The mean over `ratio` x `ratio` samples. It is bound by its instructions, so rows are found once per row."""
    REAL: tl.constexpr = tl.float64 if input.dtype.element_ty == tl.float64 else tl.float32
    roi = tl.cast(tl.program_id(0) // blocks, tl.int64)
    bins = rows * columns
    number, channel, valid = tile_of_block(tl.program_id(0) % blocks, bins, channels, CHANNELS_LAST, BINS, CHANNELS)
    image, exists = image_of(boxes, roi, batch, 5)
    factor = from_bits(scale, REAL)
    start_y, length_y, samples, finite_y = cut_box(boxes, roi, 1, factor, rows, ratio, False, ALIGNED, REAL)
    start_x, length_x, _, finite_x = cut_box(boxes, roi, 0, factor, columns, ratio, False, ALIGNED, REAL)
    base_y = start_y + (number // columns).to(REAL) * length_y
    base_x = start_x + (number % columns).to(REAL) * length_x
    steps = tl.where(exists & finite_y & finite_x, samples, 0)
    plane = input + plane_offsets(image, channel, height, width, channels, CHANNELS_LAST)
    zero = tl.zeros([BINS], tl.int32)
    result = tl.zeros([BINS, CHANNELS] if CHANNELS_LAST else [CHANNELS, BINS], REAL)
    for i in range(steps):
        on_y, low_y, high_y, part_y = neighbors(sample_position(base_y, length_y, ratio, zero + i), height)
        upper = plane + pixel_offsets(low_y, zero, width, channels, CHANNELS_LAST)
        lower = plane + pixel_offsets(high_y, zero, width, channels, CHANNELS_LAST)
        for j in range(steps):
            on_x, low_x, high_x, part_x = neighbors(sample_position(base_x, length_x, ratio, zero + j), width)
            mask = over_bins(on_y & on_x, CHANNELS_LAST) & valid
            left = pixel_offsets(zero, low_x, width, channels, CHANNELS_LAST)
            right = pixel_offsets(zero, high_x, width, channels, CHANNELS_LAST)
            result = _add(result, (1.0 - part_y) * (1.0 - part_x), upper + left, mask, CHANNELS_LAST)
            result = _add(result, (1.0 - part_y) * part_x, upper + right, mask, CHANNELS_LAST)
            result = _add(result, part_y * (1.0 - part_x), lower + left, mask, CHANNELS_LAST)
            result = _add(result, part_y * part_x, lower + right, mask, CHANNELS_LAST)
    one = tl.cast(1.0, REAL)
    result *= divide(one, tl.maximum(samples.to(REAL) * samples.to(REAL), one))
    to = output_offsets(roi, number, channel, bins, channels, CHANNELS_LAST)
    tl.store(output + to, result.to(output.dtype.element_ty), mask=valid)


@triton.jit
def _add(result, weight, pixels, mask, CHANNELS_LAST: tl.constexpr):
    """The result and a pixel per bin by its weight, fused: the kernel itself must not, for the positions' sake."""
    value = tl.load(pixels, mask=mask, other=0.0).to(result.dtype)
    return tl.fma(over_bins(weight, CHANNELS_LAST), value, result)


@_gpu.kernel(specialize=("channels",))
def _maximum_kernel(
    input, boxes, output, argmax_y, argmax_x, batch, channels, height, width, rows, columns, blocks, scale, ratio,
    ADAPTIVE: tl.constexpr, ALIGNED: tl.constexpr, CHANNELS_LAST: tl.constexpr, BINS: tl.constexpr,
    CHANNELS: tl.constexpr,
):  # fmt: skip
    """The highest sample of each bin, and where it lies: the bits of the reference, so nothing is fused."""
    REAL: tl.constexpr = tl.float64 if input.dtype.element_ty == tl.float64 else tl.float32
    roi = tl.cast(tl.program_id(0) // blocks, tl.int64)
    bins = rows * columns
    number, channel, valid = tile_of_block(tl.program_id(0) % blocks, bins, channels, CHANNELS_LAST, BINS, CHANNELS)
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
    best_y = nothing + OFF
    best_x = nothing + OFF
    some = readable & (samples_y > 0) & (samples_x > 0)
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
            greater = over_bins(within_y & within_x, CHANNELS_LAST) & (value > result)
            result = tl.where(greater, value, result)
            best_y = tl.where(greater, over_bins(tl.where(on_map, y, OFF), CHANNELS_LAST), best_y)
            best_x = tl.where(greater, over_bins(tl.where(on_map, x, OFF), CHANNELS_LAST), best_x)
        behind = over_bins(within_y & (end_x < samples_x), CHANNELS_LAST) & (result < 0.0)
        result = tl.where(behind, 0.0, result)
        best_y = tl.where(behind, OFF, best_y)
        best_x = tl.where(behind, OFF, best_x)
    to = output_offsets(roi, number, channel, bins, channels, CHANNELS_LAST)
    behind = over_bins((end_y < samples_y) & as_mask(some, end_y), CHANNELS_LAST) & (result < 0.0)
    result = tl.where(behind, 0.0, result)
    tl.store(argmax_y + to, tl.where(behind, OFF, best_y), mask=valid)
    tl.store(argmax_x + to, tl.where(behind, OFF, best_x), mask=valid)
    tl.store(output + to, result.to(output.dtype.element_ty), mask=valid)


@triton.jit
def _give_back(
    given, boxes, argmax_y, argmax_x, grad, roi, block, own_image, batch, channels, height, width, rows, columns,
    factor, ratio,
    ADAPTIVE: tl.constexpr, ALIGNED: tl.constexpr, MAXIMUM: tl.constexpr, CHANNELS_LAST: tl.constexpr,
    GIVEN_LAST: tl.constexpr, IN_ORDER: tl.constexpr, BINS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """Add the gradients of a block of bins of one box, IN_ORDER only where it belongs to `own_image`."""
    REAL: tl.constexpr = factor.dtype
    bins = rows * columns
    number, channel, valid = tile_of_block(block, bins, channels, CHANNELS_LAST, BINS, CHANNELS)
    image, readable = image_of(boxes, roi, batch, 5)
    if IN_ORDER:
        readable = readable & (image == own_image)
    plane = grad + plane_offsets(image, channel, height, width, channels, CHANNELS_LAST)
    source = bin_offsets(
        roi, over_bins(number, CHANNELS_LAST), over_channels(channel, CHANNELS_LAST), bins, channels, GIVEN_LAST
    )
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
    GIVEN_LAST: tl.constexpr, IN_ORDER: tl.constexpr, BINS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    REAL: tl.constexpr = grad.dtype.element_ty
    factor = from_bits(scale, REAL)
    if IN_ORDER:
        for roi in range(total):
            for block in range(blocks):
                _give_back(
                    given, boxes, argmax_y, argmax_x, grad, tl.cast(roi, tl.int64), block, tl.program_id(0), batch,
                    channels, height, width, rows, columns, factor, ratio,
                    ADAPTIVE, ALIGNED, MAXIMUM, CHANNELS_LAST, GIVEN_LAST, IN_ORDER, BINS, CHANNELS,
                )  # fmt: skip
    else:
        _give_back(
            given, boxes, argmax_y, argmax_x, grad, tl.cast(tl.program_id(0) // blocks, tl.int64),
            tl.program_id(0) % blocks, 0, batch, channels, height, width, rows, columns, factor, ratio,
            ADAPTIVE, ALIGNED, MAXIMUM, CHANNELS_LAST, GIVEN_LAST, IN_ORDER, BINS, CHANNELS,
        )  # fmt: skip
