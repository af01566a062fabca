"""The gradients of deform_conv2d on GPU, by two kernels of implicit products.

One makes the gradient of what a tile of output pixels read under one tap, by a product with the weight, and from it
those of offset and mask, by sums over channels, and of the map, by atomics in float32. The other reads the map again
and multiplies with the gradient of the output, for the weight: every program keeps a sum of its own, which are added
up in order. In deterministic mode the reference adds up the gradient of the map.
"""

from functools import cache

import torch
import triton
import triton.language as tl

from triops import _gpu
from triops._gpu.products import hopper, parts_of, product, product_of_parts, round_to_tf32, split
from triops._rois import format_of
from triops.ops.deform_conv2d import reference
from triops.ops.deform_conv2d.reference import Sizes, empty_gradients
from triops.ops.deform_conv2d.sampling_gpu import (
    TF32,
    Config,
    Samples,
    as_rows,
    constants_of,
    corner,
    corners,
    load_rows,
    numbers_of,
    parts_for,
    place,
    prepared,
    read,
    rest_of,
    roomy,
    segment_of,
    side,
    steps_of,
)

PROGRAMS = 528  # of the weight gradient, at least, where there are so many tiles


def deform_conv2d_backward(grad, input, offset, weight, mask, stride, padding, dilation, of_inputs, of_weight):
    sizes = Sizes.of(input, offset, weight)
    grads = empty_gradients(input, offset, weight, mask, of_inputs, of_weight)
    if grad.numel() == 0 or input.numel() == 0:
        for found in grads:
            found.zero_()
        return grads
    if of_inputs and torch.are_deterministic_algorithms_enabled():
        found = reference.deform_conv2d_backward(
            grad, input, offset, weight, mask, stride, padding, dilation, True, False
        )
        grads, of_inputs = (*found[:3], grads[3]), False
    if not of_inputs and not of_weight:
        return grads
    parts = parts_for(input.dtype)
    given = as_rows(grad)
    if parts > TF32:
        given = split(given, parts)
    maps, samples = as_rows(input), Samples.of(offset, mask)
    numbers = numbers_of(sizes, stride, padding, dilation)
    constants = dict(constants_of(sizes, mask, maps, grad), PARTS=parts)
    if of_inputs:
        _of_inputs(sizes, given, maps, samples, weight, numbers, constants, grads)
    if of_weight:
        grads[3].copy_(_of_weight(sizes, given, maps, samples, numbers, constants).view(weight.shape))
    return grads


def _of_inputs(sizes, given, maps, samples, weight, numbers, constants, grads):
    """Fill the gradients of input, offset and mask."""
    config = _inputs_config(maps.dtype, constants["PARTS"], segment_of(sizes), sizes.outputs // sizes.groups)
    parts = constants["PARTS"]
    weights = prepared(weight, sizes, parts, True)
    grad_input, grad_offset, grad_mask, _ = grads
    wide = torch.float64 if maps.dtype == torch.float64 else torch.float32
    direct = grad_input.dtype == wide and format_of(grad_input) == torch.channels_last
    grad_maps = grad_input.zero_() if direct else torch.zeros(maps.shape, dtype=wide, device=maps.device)
    tiles = _gpu.cdiv(sizes.pixels, config.rows)
    _inputs_kernel[(sizes.batch * tiles * sizes.taps * sizes.offset_groups,)](
        given, maps, samples.offset, samples.mask, weights, grad_maps, grad_offset,
        grad_mask if grad_mask.numel() else grad_offset, tiles,
        *numbers, *samples.steps, *steps_of(grad_offset), *steps_of(grad_mask if grad_mask.numel() else grad_offset),
        sizes.batch * sizes.pixels * sizes.outputs, weight.numel(),
        **constants, ROWS=config.rows, BLOCK_IN=config.out, BLOCK_OUT=config.inner, **config.options(),
    )  # fmt: skip
    if not direct:
        grad_input.copy_(grad_maps.view(sizes.batch, sizes.height, sizes.width, -1).permute(0, 3, 1, 2))


def _of_weight(sizes, given, maps, samples, numbers, constants):
    """-> [N, C / groups, taps]"""
    config = _weight_config(maps.dtype, constants["PARTS"], segment_of(sizes), sizes.outputs // sizes.groups)
    own, outputs = sizes.channels // sizes.groups, sizes.outputs // sizes.groups
    pieces = sizes.channels // segment_of(sizes) * _gpu.cdiv(segment_of(sizes), config.out)
    each = sizes.taps * pieces * _gpu.cdiv(outputs, config.inner)
    tiles = _gpu.cdiv(sizes.pixels, config.rows)
    # as many tiles per program whatever the GPU, so that the sums do not depend on it
    share = max(_gpu.cdiv(sizes.batch * tiles * each, max(_gpu.block(PROGRAMS, interpreted=2 * each), each)), 1)
    shares = _gpu.cdiv(sizes.batch * tiles, share)
    wide = torch.float64 if maps.dtype == torch.float64 else torch.float32
    found = torch.empty((shares, sizes.outputs, sizes.taps, own), dtype=wide, device=maps.device)
    _weight_kernel[(shares * each,)](
        given, maps, samples.offset, samples.mask, found, sizes.batch * tiles, tiles, share,
        *numbers, *samples.steps, sizes.batch * sizes.pixels * sizes.outputs,
        **constants, ROWS=config.rows, BLOCK_IN=config.out, BLOCK_OUT=config.inner, **config.options(),
    )  # fmt: skip
    return (found[0] if shares == 1 else found.sum(0)).transpose(1, 2)


@cache
def _inputs_config(dtype, parts, segment, outputs):
    """`out` counts channels of the map, `inner` those of the output. Times on an H200."""
    rows, wide = _gpu.block(64, interpreted=512), outputs > 64
    channels = side(segment, 16, 64)
    if dtype == torch.float64:
        return Config(min(rows, 32), side(segment, 16, 32), 16, 4, 1)
    if parts == TF32:  # 876 us for [2, 256, 100, 152]
        return Config(rows, channels, side(outputs, 16, 32), 4, 3)
    if dtype == torch.float32 and wide:  # 1,760 us; of 64 rows 2,187
        return Config(max(rows, 128) if roomy() else rows, channels, 32, 4, 2)
    if dtype == torch.float32:  # 3,921 us for [6, 64, 232, 400]; where the compiler decides over registers 4,240
        return Config(rows, channels, side(outputs, 16, 64), 4, 2, registers=168 if hopper() else 0)
    if wide:  # 685 us
        return Config(rows, side(segment, 16, 32), 64, 4, 3)
    return Config(_gpu.block(32, interpreted=rows), channels, side(outputs, 16, 64), 4, 1)  # 2,599 us; of 64 rows 2,758


@cache
def _weight_config(dtype, parts, segment, outputs):
    """`out` counts channels of the map, `inner` those of the output; pixels are what is summed."""
    channels = side(segment, 16, 64)
    if dtype == torch.float64:
        return Config(32, side(segment, 16, 32), side(outputs, 16, 32), 4, 1)
    if parts > TF32 and min(segment, outputs) > 64 and roomy():  # 851 us for [2, 256, 100, 152]; as below 1,088
        return Config(64, 128, 128, 8, 1)
    if dtype == torch.float32:  # 793 us in TF32; 1,517 for [6, 64, 232, 400]; in two stages 1,127 and 2,906
        return Config(32, channels, side(outputs, 16, 128 if roomy() else 64), 4, 1)
    if not roomy():
        return Config(32, channels, side(outputs, 16, 128), 4, 2)
    if outputs <= 64:  # 642 us; of 64 pixels 1,280
        return Config(128, channels, side(outputs, 16, 64), 4, 2)
    return Config(64, channels, side(outputs, 16, 256), 4, 2)  # 297 us; of eight warps 441


@triton.jit
def _back_step(
    given, weights, image_row, valid, start, number, channel, part, weight_part, total,
    OUT: tl.constexpr, STEP: tl.constexpr, SEGMENT: tl.constexpr, PARTS: tl.constexpr, BLOCK_OUT: tl.constexpr,
    BLOCK_IN: tl.constexpr,
):  # fmt: skip
    """total + the gradient of a tile's outputs [start, start + BLOCK_OUT) times their weights for some channels."""
    WHOLE: tl.constexpr = OUT % BLOCK_OUT == 0
    output = start + tl.arange(0, BLOCK_OUT)
    at = weights + channel[None, :] * OUT + output[:, None]
    exists = (output < OUT)[:, None] & (number < SEGMENT)[None, :]
    a = load_rows(given, image_row, valid, output, OUT, STEP, WHOLE)
    b = tl.load(at, mask=exists, other=0.0)
    if PARTS == 0:
        total = product(a, b, total, "ieee" if a.dtype == total.dtype else "native")
    elif PARTS == 1:
        total = product(round_to_tf32(a), b, total, "tf32")
    else:
        a_middle = load_rows(given + part, image_row, valid, output, OUT, STEP, WHOLE)
        b_middle = tl.load(at + weight_part, mask=exists, other=0.0)
        a_low = a
        b_low = b
        if PARTS == 3:
            a_low = load_rows(given + 2 * part, image_row, valid, output, OUT, STEP, WHOLE)
            b_low = tl.load(at + 2 * weight_part, mask=exists, other=0.0)
        total += product_of_parts(a, a_middle, a_low, b, b_middle, b_low, tl.zeros_like(total), PARTS, True)
    return total


@_gpu.kernel(specialize=("offset_step", "mask_step", "grad_offset_step", "grad_mask_step"))
def _inputs_kernel(
    given, maps, offset, mask, weights, grad_maps, grad_offset, grad_mask, tiles, height, width, out_width, pixels,
    stride_y, stride_x, up, left, spread_y, spread_x, offset_step, offset_channel, mask_step, mask_channel,
    grad_offset_step, grad_offset_channel, grad_mask_step, grad_mask_channel, part, weight_part,
    CHANNELS: tl.constexpr, IN: tl.constexpr, OUT: tl.constexpr, SEGMENT: tl.constexpr, GROUPS: tl.constexpr,
    OFFSET_GROUPS: tl.constexpr, TAPS: tl.constexpr, KERNEL_WIDTH: tl.constexpr, MASKED: tl.constexpr,
    HALVES: tl.constexpr, LONG: tl.constexpr, PARTS: tl.constexpr, ROWS: tl.constexpr, BLOCK_IN: tl.constexpr,
    BLOCK_OUT: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    REAL: tl.constexpr = grad_maps.dtype.element_ty
    OWN: tl.constexpr = CHANNELS // OFFSET_GROUPS
    STEPS: tl.constexpr = (SEGMENT + BLOCK_IN - 1) // BLOCK_IN
    WHOLE: tl.constexpr = SEGMENT % BLOCK_IN == 0
    offset_group = tl.program_id(0) % OFFSET_GROUPS
    tap = tl.program_id(0) // OFFSET_GROUPS % TAPS
    tile = tl.program_id(0) // (OFFSET_GROUPS * TAPS)
    image = (tile // tiles).to(tl.int64)
    row = tile % tiles * ROWS + tl.arange(0, ROWS)
    valid = row < pixels
    inside, top, begin, fy, fx, factor = place(
        offset, mask, image, row, valid, offset_group, tap, height, width, out_width, pixels, stride_y, stride_x, up,
        left, spread_y, spread_x, offset_step, offset_channel, mask_step, mask_channel, REAL, OFFSET_GROUPS, TAPS,
        KERNEL_WIDTH, MASKED, LONG,
    )  # fmt: skip
    along_y = tl.zeros([ROWS], REAL)
    along_x = tl.zeros([ROWS], REAL)
    along_mask = tl.zeros([ROWS], REAL)
    on_map = row < 0
    long_row = row.to(tl.int64) if LONG else row
    for piece in range(OWN // SEGMENT * STEPS):
        number = piece % STEPS * BLOCK_IN + tl.arange(0, BLOCK_IN)  # within the segment
        first = offset_group * OWN + piece // STEPS * SEGMENT
        group = first // IN
        back = tl.zeros([ROWS, BLOCK_IN], REAL)
        own_given = given + image * pixels * (GROUPS * OUT) + group * OUT
        own_weights = weights + tl.cast(tap * GROUPS + group, tl.int64) * (IN * OUT)
        for start in tl.range(0, OUT, BLOCK_OUT, num_stages=STAGES):
            back = _back_step(
                own_given, own_weights, long_row, valid, start, number, first % IN + number, part, weight_part, back,
                OUT, GROUPS * OUT, SEGMENT, PARTS, BLOCK_OUT, BLOCK_IN,
            )  # fmt: skip
        base = image * height * width * CHANNELS + first
        for which in range(4):  # not unrolled: its tiles would be in registers all at once
            down = which // 2
            right = which % 2
            pixel, wy, wx = corner(inside, top, begin, fy, fx, height, width, down, right, LONG)
            exists = pixel >= 0
            on_map = on_map | exists
            found = load_rows(maps + base, pixel, exists, number, SEGMENT, CHANNELS, WHOLE).to(REAL)
            dot = tl.where(exists, tl.sum(found * back, 1), 0.0)
            along_mask += wy * wx * dot
            along_y += tl.where(down == 1, wx, -wx) * dot
            along_x += tl.where(right == 1, wy, -wy) * dot
            covered = exists[:, None]
            if not WHOLE:
                covered = covered & (number < SEGMENT)[None, :]
            at = grad_maps + base + pixel[:, None] * CHANNELS + number[None, :]
            tl.atomic_add(at, (wy * wx * factor)[:, None] * back, mask=covered, sem="relaxed")
    factor = tl.where(on_map, factor, 0.0)  # off the map nothing counts, not even a NaN
    channel = tl.cast(offset_group * TAPS + tap, tl.int64)
    to = grad_offset + image * (2 * OFFSET_GROUPS * TAPS) * pixels + long_row * grad_offset_step
    element = grad_offset.dtype.element_ty
    tl.store(to + 2 * channel * grad_offset_channel, (along_y * factor).to(element), mask=valid)
    tl.store(to + (2 * channel + 1) * grad_offset_channel, (along_x * factor).to(element), mask=valid)
    if MASKED:
        to = grad_mask + image * (OFFSET_GROUPS * TAPS) * pixels + long_row * grad_mask_step
        tl.store(to + channel * grad_mask_channel, along_mask.to(grad_mask.dtype.element_ty), mask=valid)


@_gpu.kernel(specialize=("offset_step", "mask_step"))
def _weight_kernel(
    given, maps, offset, mask, found, all_tiles, tiles, share, height, width, out_width, pixels, stride_y, stride_x,
    up, left, spread_y, spread_x, offset_step, offset_channel, mask_step, mask_channel, part,
    CHANNELS: tl.constexpr, IN: tl.constexpr, OUT: tl.constexpr, SEGMENT: tl.constexpr, GROUPS: tl.constexpr,
    OFFSET_GROUPS: tl.constexpr, TAPS: tl.constexpr, KERNEL_WIDTH: tl.constexpr, MASKED: tl.constexpr,
    HALVES: tl.constexpr, LONG: tl.constexpr, PARTS: tl.constexpr, ROWS: tl.constexpr, BLOCK_IN: tl.constexpr,
    BLOCK_OUT: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    REAL: tl.constexpr = found.dtype.element_ty
    ACROSS: tl.constexpr = (OUT + BLOCK_OUT - 1) // BLOCK_OUT
    STEPS: tl.constexpr = (SEGMENT + BLOCK_IN - 1) // BLOCK_IN
    PIECES: tl.constexpr = CHANNELS // SEGMENT * STEPS
    WHOLE: tl.constexpr = SEGMENT % BLOCK_IN == 0
    ALL: tl.constexpr = OUT % BLOCK_OUT == 0
    piece = tl.program_id(0) % PIECES
    output = tl.program_id(0) // PIECES % ACROSS * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    tap = tl.program_id(0) // (PIECES * ACROSS) % TAPS
    number = tl.program_id(0) // (PIECES * ACROSS * TAPS)  # of the share
    first = piece // STEPS * SEGMENT
    channel = piece % STEPS * BLOCK_IN + tl.arange(0, BLOCK_IN)  # within the segment
    group = first // IN
    total = tl.zeros([BLOCK_OUT, BLOCK_IN], REAL)
    for tile in tl.range(number * share, tl.minimum((number + 1) * share, all_tiles), num_stages=STAGES):
        image = (tile // tiles).to(tl.int64)
        row = tile % tiles * ROWS + tl.arange(0, ROWS)
        valid = row < pixels
        inside, top, begin, fy, fx, factor = place(
            offset, mask, image, row, valid, first // (CHANNELS // OFFSET_GROUPS), tap, height, width, out_width,
            pixels, stride_y, stride_x, up, left, spread_y, spread_x, offset_step, offset_channel, mask_step,
            mask_channel, REAL, OFFSET_GROUPS, TAPS, KERNEL_WIDTH, MASKED, LONG,
        )  # fmt: skip
        p0, p1, p2, p3, w0, w1, w2, w3 = corners(inside, top, begin, fy, fx, factor, height, width, LONG)
        own = maps + image * height * width * CHANNELS + first
        b = read(own, p0, p1, p2, p3, w0, w1, w2, w3, channel, SEGMENT, CHANNELS, WHOLE)
        if LONG:
            row = row.to(tl.int64)
        own_given = given + image * pixels * (GROUPS * OUT) + group * OUT
        a = tl.trans(load_rows(own_given, row, valid, output, OUT, GROUPS * OUT, ALL))
        if PARTS == 0:
            if a.dtype == b.dtype:
                total = product(a, b, total, "ieee")
            else:
                total = product(a, b.to(a.dtype), total, "native")
                rest = rest_of(b, a.dtype, True)
                if HALVES > 1:
                    total = product(a, rest.to(a.dtype), total, "native")
                if HALVES > 2:
                    total = product(a, rest_of(rest, a.dtype, True).to(a.dtype), total, "native")
        elif PARTS == 1:
            # Summed over pixels, both lie the wrong way round for TF32 tensor cores.
            a_high, a_middle, a_low = parts_of(a)
            b_high, b_middle, b_low = parts_of(b)
            total += product_of_parts(
                a_high, a_middle, a_low, b_high, b_middle, b_low, tl.zeros_like(total), 2, True
            )  # fmt: skip
        else:
            b_high, b_middle, b_low = parts_of(b)
            a_middle = tl.trans(load_rows(own_given + part, row, valid, output, OUT, GROUPS * OUT, ALL))
            a_low = a
            if PARTS == 3:
                a_low = tl.trans(load_rows(own_given + 2 * part, row, valid, output, OUT, GROUPS * OUT, ALL))
            zero = tl.zeros_like(total)
            total += product_of_parts(a, a_middle, a_low, b_high, b_middle, b_low, zero, PARTS, True)
    line = tl.cast(number, tl.int64) * (GROUPS * OUT) + group * OUT + output
    to = found + (line[:, None] * TAPS + tap) * IN + (first % IN + channel)[None, :]
    tl.store(to, total, mask=(output < OUT)[:, None] & (channel < SEGMENT)[None, :])
