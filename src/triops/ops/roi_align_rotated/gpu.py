"""roi_align_rotated on GPU: a program takes a block of bins of one box and a block of channels (see `_gpu.rois`).

A map that is NCHW is copied to channels-last first where the boxes read a good part of it, as in roi_align. Positions
are worked out once per bin and sample. Each bin begins with its own first sample near the map, so that a box far larger
than the map costs no more steps than the map has pixels. The gradient is added up by atomics in float32; where
deterministic algorithms are asked for, one program per image and block of channels walks boxes and bins in order, one
lane per channel. Oriented channels are turned in torch, in float32.
"""

import torch
import triton
import triton.language as tl

from triops import _gpu
from triops._dtypes import compute_dtype
from triops._geometry.box.gpu import cos_sin
from triops._gpu.arithmetic import divide, from_bits
from triops._gpu.maps import in_format
from triops._gpu.rois import (
    add_bilinear,
    bin_offsets,
    bins_of,
    check_images_if_strict,
    image_of,
    launch_moved_where_it_pays,
    neighbors,
    output_offsets,
    over_bins,
    over_channels,
    plane_offsets,
    programs,
    read_bilinear,
    sample_position,
    samples_within,
    tile_of_block,
)
from triops._rois import empty_in_format, empty_like_format, format_of
from triops.ops.roi_align_rotated.reference import FAR, MOST_ANGLE, turned

NUMBERS = {2: 256, 4: 128, 8: 128}  # bins times channels of a program of one warp, by the bytes of an element
BEYOND = tl.constexpr(FAR)
LARGEST = tl.constexpr(MOST_ANGLE)


def roi_align_rotated(
    input, boxes, pooled_height, pooled_width, spatial_scale, sampling_ratio, aligned, clockwise, orientations
):
    check_images_if_strict("roi_align_rotated", boxes, input.shape[0])
    batch, channels, height, width = input.shape
    shape = (boxes.shape[0], channels, pooled_height, pooled_width)
    output = empty_like_format(shape, input.dtype, input)
    if input.numel() == 0 or output.numel() == 0:
        return output.zero_()
    real, layout = compute_dtype(input.dtype), format_of(input)
    values = output if orientations == 1 else torch.empty_like(output, dtype=real)
    boxes, last = boxes.contiguous(), layout == torch.channels_last
    input = input.contiguous(memory_format=layout)

    def launch(moved):
        maps, target = input, values
        if moved:  # the output too: lanes lie along channels, and would store NCHW one number at a time
            maps = in_format(input, channels_last=True)
            target = empty_in_format(shape, values.dtype, values.device, channels_last=True)
        grid, blocks, options = programs(shape, NUMBERS[input.element_size()], last or moved)
        _forward_kernel[grid](
            maps, boxes, target, batch, channels, height, width, pooled_height, pooled_width, blocks,
            _gpu.bits_of(spatial_scale), max(sampling_ratio, 0),
            ADAPTIVE=sampling_ratio <= 0, ALIGNED=bool(aligned), CLOCKWISE=bool(clockwise), **options,
        )  # fmt: skip
        if moved:
            in_format(target, channels_last=False, target=values)

    key = "roi_align_rotated", input.dtype, boxes.dtype, aligned, clockwise, orientations == 1
    launch_moved_where_it_pays(launch, last, input.shape, shape, sampling_ratio, key)
    return output if orientations == 1 else output.copy_(turned(values, boxes, orientations))


def roi_align_rotated_backward(
    grad_output, boxes, batch, height, width, spatial_scale, sampling_ratio, aligned, clockwise, orientations,
    channels_last,
):  # fmt: skip
    check_images_if_strict("roi_align_rotated_backward", boxes, batch)
    total, channels, rows, columns = grad_output.shape
    real, shape = compute_dtype(grad_output.dtype), (batch, channels, height, width)
    if grad_output.numel() == 0 or 0 in shape:
        return empty_in_format(shape, grad_output.dtype, grad_output.device, channels_last).zero_()
    layout = torch.channels_last if channels_last else torch.contiguous_format
    given = grad_output if orientations == 1 else turned(grad_output.to(real), boxes, orientations, back=True)
    given, boxes = given.contiguous(memory_format=layout), boxes.contiguous()
    in_order = torch.are_deterministic_algorithms_enabled()
    made = []

    def launch(moved):
        last = channels_last or moved
        grad = empty_in_format(shape, real, given.device, last).zero_()
        grid, blocks, options = programs(
            given.shape, NUMBERS[real.itemsize], last, in_order_of=batch if in_order else 0
        )
        _backward_kernel[grid](
            given, boxes, grad, total, batch, channels, height, width, rows, columns, blocks,
            _gpu.bits_of(spatial_scale), max(sampling_ratio, 0),
            ADAPTIVE=sampling_ratio <= 0, ALIGNED=bool(aligned), CLOCKWISE=bool(clockwise), GIVEN_LAST=channels_last,
            IN_ORDER=in_order, **options,
        )  # fmt: skip
        made[:] = [in_format(grad, channels_last, grad_output.dtype) if moved else grad.to(grad_output.dtype)]

    if in_order:
        launch(False)
    else:
        key = "roi_align_rotated_backward", grad_output.dtype, boxes.dtype, aligned, clockwise, orientations == 1
        launch_moved_where_it_pays(launch, channels_last, shape, given.shape, sampling_ratio, key)
    return made[0]


@triton.jit
def _frame(boxes, roi, factor, ALIGNED: tl.constexpr, CLOCKWISE: tl.constexpr):
    """Centre, width, height, cosine and sine of a box on the map, and whether it is finite."""
    REAL: tl.constexpr = factor.dtype
    offset: tl.constexpr = 0.5 if ALIGNED else 0.0
    field = boxes + roi * 6
    x = tl.load(field + 1).to(REAL) * factor - offset
    y = tl.load(field + 2).to(REAL) * factor - offset
    wide = tl.load(field + 3).to(REAL) * factor
    tall = tl.load(field + 4).to(REAL) * factor
    angle = tl.load(field + 5).to(REAL)
    finite = (tl.abs(x) < BEYOND) & (tl.abs(y) < BEYOND) & (tl.abs(wide) < BEYOND) & (tl.abs(tall) < BEYOND)
    finite = finite & (tl.abs(angle) < LARGEST)
    x = tl.where(finite, x, 0.0)
    y = tl.where(finite, y, 0.0)
    wide = tl.where(finite, wide, 0.0)
    tall = tl.where(finite, tall, 0.0)
    angle = tl.where(finite, angle, 0.0).to(tl.float64)
    if not ALIGNED:
        wide = tl.maximum(wide, 1.0)
        tall = tl.maximum(tall, 1.0)
    if CLOCKWISE:
        angle = -angle
    cos, sin = cos_sin(angle)
    return y, x, tall, wide, cos.to(REAL), sin.to(REAL), finite


@triton.jit
def _visits(y, x, tall, wide, cos, sin, base_y, base_x, length_y, length_x, samples_y, samples_x, height, width,
            ADAPTIVE: tl.constexpr):  # fmt: skip
    """The first sample to visit of each bin and the one behind the last, along y and along x of the box."""
    REAL: tl.constexpr = y.dtype
    left = -1.0 - x
    right = tl.cast(width, REAL) - x
    top = -1.0 - y
    bottom = tl.cast(height, REAL) - y
    # The corners of the map along the axes of the box, and more than positions are rounded by
    reach = tl.maximum(tl.abs(left), tl.abs(right)) + tl.maximum(tl.abs(top), tl.abs(bottom))
    margin = 2.0 + 1e-6 * (reach + tl.abs(wide) + tl.abs(tall))
    low_y = tl.minimum(left * sin, right * sin) + tl.minimum(top * cos, bottom * cos)
    high_y = tl.maximum(left * sin, right * sin) + tl.maximum(top * cos, bottom * cos)
    low_x = tl.minimum(left * cos, right * cos) - tl.maximum(top * sin, bottom * sin)
    high_x = tl.maximum(left * cos, right * cos) - tl.minimum(top * sin, bottom * sin)
    begin_y, end_y = samples_within(base_y, length_y, samples_y, low_y - margin, high_y + margin, ADAPTIVE)
    begin_x, end_x = samples_within(base_x, length_x, samples_x, low_x - margin, high_x + margin, ADAPTIVE)
    return begin_y, end_y, begin_x, end_x


@_gpu.kernel(specialize=("channels",))
def _forward_kernel(
    input, boxes, output, batch, channels, height, width, rows, columns, blocks, scale, ratio,
    ADAPTIVE: tl.constexpr, ALIGNED: tl.constexpr, CLOCKWISE: tl.constexpr, CHANNELS_LAST: tl.constexpr,
    BINS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    REAL: tl.constexpr = tl.float64 if input.dtype.element_ty == tl.float64 else tl.float32
    roi = tl.cast(tl.program_id(0) // blocks, tl.int64)
    bins = rows * columns
    number, channel, valid = tile_of_block(tl.program_id(0) % blocks, bins, channels, CHANNELS_LAST, BINS, CHANNELS)
    image, exists = image_of(boxes, roi, batch, 6)
    cy, cx, tall, wide, cos, sin, finite = _frame(boxes, roi, from_bits(scale, REAL), ALIGNED, CLOCKWISE)
    length_y, samples_y = bins_of(tall, rows, ratio, ADAPTIVE)
    length_x, samples_x = bins_of(wide, columns, ratio, ADAPTIVE)
    base_y = -tall * 0.5 + (number // columns).to(REAL) * length_y
    base_x = -wide * 0.5 + (number % columns).to(REAL) * length_x
    begin_y, end_y, begin_x, end_x = _visits(
        cy, cx, tall, wide, cos, sin, base_y, base_x, length_y, length_x, samples_y, samples_x, height, width, ADAPTIVE
    )
    steps_y = tl.where(exists & finite, tl.max(end_y - begin_y, 0), 0)
    steps_x = tl.where(exists & finite, tl.max(end_x - begin_x, 0), 0)
    plane = input + plane_offsets(image, channel, height, width, channels, CHANNELS_LAST)
    result = tl.zeros([BINS, CHANNELS] if CHANNELS_LAST else [CHANNELS, BINS], REAL)
    for i in range(steps_y):
        yy = sample_position(base_y, length_y, samples_y, begin_y + i)
        for j in range(steps_x):
            xx = sample_position(base_x, length_x, samples_x, begin_x + j)
            on_y, low_y, high_y, part_y = neighbors((yy * cos - xx * sin) + cy, height)
            on_x, low_x, high_x, part_x = neighbors((yy * sin + xx * cos) + cx, width)
            on_map = on_y & on_x & (begin_y + i < end_y) & (begin_x + j < end_x)
            result += read_bilinear(
                plane, low_y, high_y, part_y, low_x, high_x, part_x, width, channels,
                over_bins(on_map, CHANNELS_LAST) & valid, CHANNELS_LAST, REAL,
            )  # fmt: skip
    count = tl.maximum(samples_y.to(REAL) * samples_x.to(REAL), 1.0)
    result = divide(result, tl.zeros(result.shape, REAL) + count)
    to = output_offsets(roi, number, channel, bins, channels, CHANNELS_LAST)
    tl.store(output + to, result.to(output.dtype.element_ty), mask=valid)


@triton.jit
def _give_back(
    given, boxes, grad, roi, block, own_image, batch, channels, height, width, rows, columns, factor, ratio,
    ADAPTIVE: tl.constexpr, ALIGNED: tl.constexpr, CLOCKWISE: tl.constexpr, CHANNELS_LAST: tl.constexpr,
    GIVEN_LAST: tl.constexpr, IN_ORDER: tl.constexpr, BINS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """Add the gradients of a block of bins of one box, IN_ORDER only where it belongs to `own_image`."""
    REAL: tl.constexpr = factor.dtype
    bins = rows * columns
    number, channel, valid = tile_of_block(block, bins, channels, CHANNELS_LAST, BINS, CHANNELS)
    image, readable = image_of(boxes, roi, batch, 6)
    if IN_ORDER:
        readable = readable & (image == own_image)
    cy, cx, tall, wide, cos, sin, finite = _frame(boxes, roi, factor, ALIGNED, CLOCKWISE)
    length_y, samples_y = bins_of(tall, rows, ratio, ADAPTIVE)
    length_x, samples_x = bins_of(wide, columns, ratio, ADAPTIVE)
    base_y = -tall * 0.5 + (number // columns).to(REAL) * length_y
    base_x = -wide * 0.5 + (number % columns).to(REAL) * length_x
    begin_y, end_y, begin_x, end_x = _visits(
        cy, cx, tall, wide, cos, sin, base_y, base_x, length_y, length_x, samples_y, samples_x, height, width, ADAPTIVE
    )
    steps_y = tl.where(readable & finite, tl.max(end_y - begin_y, 0), 0)
    steps_x = tl.where(readable & finite, tl.max(end_x - begin_x, 0), 0)
    plane = grad + plane_offsets(image, channel, height, width, channels, CHANNELS_LAST)
    source = bin_offsets(
        roi, over_bins(number, CHANNELS_LAST), over_channels(channel, CHANNELS_LAST), bins, channels, GIVEN_LAST
    )
    value = tl.load(given + source, mask=valid, other=0.0).to(REAL)
    count = tl.maximum(samples_y.to(REAL) * samples_x.to(REAL), 1.0)
    value = divide(value, tl.zeros(value.shape, REAL) + count)
    for i in range(steps_y):
        yy = sample_position(base_y, length_y, samples_y, begin_y + i)
        for j in range(steps_x):
            xx = sample_position(base_x, length_x, samples_x, begin_x + j)
            on_y, low_y, high_y, part_y = neighbors((yy * cos - xx * sin) + cy, height)
            on_x, low_x, high_x, part_x = neighbors((yy * sin + xx * cos) + cx, width)
            on_map = on_y & on_x & (begin_y + i < end_y) & (begin_x + j < end_x)
            mask = over_bins(on_map, CHANNELS_LAST) & valid
            add_bilinear(
                plane, value, low_y, high_y, part_y, low_x, high_x, part_x, width, channels, mask, CHANNELS_LAST
            )


@_gpu.kernel(specialize=("channels",))
def _backward_kernel(
    given, boxes, grad, total, batch, channels, height, width, rows, columns, blocks, scale, ratio,
    ADAPTIVE: tl.constexpr, ALIGNED: tl.constexpr, CLOCKWISE: tl.constexpr, CHANNELS_LAST: tl.constexpr,
    GIVEN_LAST: tl.constexpr, IN_ORDER: tl.constexpr, BINS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    factor = from_bits(scale, grad.dtype.element_ty)
    if IN_ORDER:
        for roi in range(total):
            for block in range(blocks):
                _give_back(
                    given, boxes, grad, tl.cast(roi, tl.int64), block, tl.program_id(0), batch, channels, height,
                    width, rows, columns, factor, ratio,
                    ADAPTIVE, ALIGNED, CLOCKWISE, CHANNELS_LAST, GIVEN_LAST, IN_ORDER, BINS, CHANNELS,
                )  # fmt: skip
    else:
        _give_back(
            given, boxes, grad, tl.cast(tl.program_id(0) // blocks, tl.int64), tl.program_id(0) % blocks, 0, batch,
            channels, height, width, rows, columns, factor, ratio,
            ADAPTIVE, ALIGNED, CLOCKWISE, CHANNELS_LAST, GIVEN_LAST, IN_ORDER, BINS, CHANNELS,
        )  # fmt: skip
