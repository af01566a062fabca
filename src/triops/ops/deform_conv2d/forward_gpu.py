"""deform_conv2d on GPU: an implicit product. What a tile of output pixels reads goes from registers into the product.

A program takes a tile of output pixels of one image and as many output channels as fit, through all taps. float32 runs
on tensor cores without losing its precision, as six products of bfloat16 parts, unless torch allows TF32. What is read
of a half map is a float32, and enters as the sum of two float16 or three bfloat16.
"""

from functools import cache

import torch
import triton
import triton.language as tl

from triops import _gpu
from triops._gpu.products import hopper, parts_of, product, product_of_parts, round_to_tf32
from triops._rois import empty_like_format, format_of
from triops.ops.deform_conv2d.reference import Sizes
from triops.ops.deform_conv2d.sampling_gpu import (
    TF32,
    Config,
    Samples,
    as_rows,
    constants_of,
    corners,
    kind_of,
    numbers_of,
    parts_for,
    place,
    prepared,
    read,
    rest_of,
    roomy,
    segment_of,
    side,
)

FEW = 132  # programs: where there are fewer, several share the taps of a tile
MANY = 540  # programs that are enough then
MOST_SHARES = 9


def deform_conv2d(input, offset, weight, mask, bias, stride, padding, dilation):
    sizes = Sizes.of(input, offset, weight)
    out = empty_like_format((sizes.batch, sizes.outputs, sizes.out_height, sizes.out_width), input.dtype, input)
    if out.numel() == 0:
        return out
    if input.numel() == 0:
        return out.zero_() if bias is None else out.copy_(bias.view(1, -1, 1, 1).expand_as(out))
    parts = parts_for(weight.dtype)
    weights = prepared(weight, sizes, parts, parts != TF32)
    maps, samples = as_rows(input), Samples.of(offset, mask)
    shifts = out if bias is None else bias.contiguous()
    own, outputs = segment_of(sizes), sizes.outputs // sizes.groups
    visits = sizes.taps * (sizes.channels // sizes.groups // own)

    def programs(config):
        return sizes.batch * _gpu.cdiv(sizes.pixels, config.rows) * sizes.groups * _gpu.cdiv(outputs, config.out)

    def launch(config, shares):
        found = out
        if shares > 1:
            wide = torch.float64 if input.dtype == torch.float64 else torch.float32
            shape = shares, sizes.batch, sizes.pixels, sizes.outputs
            found = torch.empty(shape, dtype=wide, device=input.device)
        _conv_kernel[(programs(config) * shares,)](
            maps, samples.offset, samples.mask, weights, shifts, found, _gpu.cdiv(sizes.pixels, config.rows),
            *numbers_of(sizes, stride, padding, dilation), *samples.steps, weight.numel(), sizes.batch,
            _gpu.cdiv(visits, shares), shares, **constants_of(sizes, mask, maps, out), PARTS=parts,
            BIAS=bias is not None, CHANNELS_LAST=format_of(out) == torch.channels_last, SHARED=shares > 1,
            ROWS=config.rows, BLOCK_OUT=config.out, BLOCK_IN=config.inner, **config.options(),
        )  # fmt: skip
        if shares > 1:
            _sum(found, shifts, out, bias is not None)

    config, of_a_share = _configs(input.dtype, parts, own, outputs)
    most = min(visits, MOST_SHARES)
    if most > 1:
        key = "deform_conv2d", config, parts, kind_of(sizes, maps, samples, bias, out)
        _gpu.compile_once(key, lambda: (launch(config, 1), launch(of_a_share, most)))
    # The same on every GPU, so that the sums are, too.
    if most > 1 and programs(config) < FEW:
        launch(of_a_share, min(most, _gpu.cdiv(MANY, programs(of_a_share))))
    else:
        launch(config, 1)
    return out


def _sum(found, bias, out, biased):
    """out = found [shares, B, pixels, N] summed over the shares, in order, and the bias."""
    shares, batch, pixels, outputs = found.shape
    block = _gpu.block(32, interpreted=256)
    blocks = _gpu.cdiv(pixels, block), _gpu.cdiv(outputs, block)
    _sum_kernel[(batch * blocks[0] * blocks[1],)](
        found, bias, out, pixels, outputs, *blocks, batch * pixels * outputs, shares, BIAS=biased,
        CHANNELS_LAST=format_of(out) == torch.channels_last, SIDE=block, num_warps=4,
    )  # fmt: skip


@_gpu.kernel(specialize=("outputs",))
def _sum_kernel(
    found, bias, out, pixels, outputs, blocks_of_pixels, blocks_of_outputs, size, shares,
    BIAS: tl.constexpr, CHANNELS_LAST: tl.constexpr, SIDE: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    output = block % blocks_of_outputs * SIDE + tl.arange(0, SIDE)
    pixel = block // blocks_of_outputs % blocks_of_pixels * SIDE + tl.arange(0, SIDE)
    image = tl.cast(block // (blocks_of_outputs * blocks_of_pixels), tl.int64) * pixels * outputs
    mask = (pixel < pixels)[:, None] & (output < outputs)[None, :]
    last = image + pixel[:, None].to(tl.int64) * outputs + output[None, :]
    total = tl.load(found + last, mask=mask, other=0.0)
    for share in range(1, shares):
        total += tl.load(found + tl.cast(size, tl.int64) * share + last, mask=mask, other=0.0)
    if BIAS:
        total += tl.load(bias + output, mask=output < outputs, other=0.0).to(total.dtype)[None, :]
    to = last
    if not CHANNELS_LAST:
        to = image + output[None, :].to(tl.int64) * pixels + pixel[:, None]
    tl.store(out + to, total.to(out.dtype.element_ty), mask=mask)


@cache
def _configs(dtype, parts, segment, outputs):
    """-> of a program that takes a tile through all taps, of one that shares them."""
    rows, inner = _gpu.block(64, interpreted=512), side(segment, 16, 32)
    if dtype == torch.float64:
        config = Config(rows, side(outputs, 16, 32), 16, 4, 1)
    elif outputs <= 64 and parts == TF32:  # [6, 64, 232, 400] on an H200: 854 us
        config = Config(rows, side(outputs, 16, 64), inner, 4, 1, registers=128 if hopper() else 0)
    elif outputs <= 64:  # 526 us in float16, 1,211 in float32; in two stages 589 and 3,104
        registers = (168 if dtype == torch.float32 else 160) if hopper() else 0
        config = Config(rows, side(outputs, 16, 64), side(segment, 16, 64), 4, 1, registers)
    elif not roomy():
        config = Config(rows, 128, inner, 8, 2)
    elif parts > TF32:  # [2, 256, 100, 152] in float32: 847 us; shared, [2, 256, 25, 38]: 78
        return Config(max(rows, 128), 128, inner, 8, 3), Config(rows, 128, inner, 4, 1)
    else:  # 201 us in float16, 225 with 128 rows, 275 in TF32; shared 38 and 43
        config = Config(rows, side(outputs, 128, 256), inner, 4, 2 if parts == TF32 else 3)
    return config, config


@triton.jit
def _weights(
    weights, channel, output, limit, IN: tl.constexpr, OUT: tl.constexpr, ALL: tl.constexpr, INPUTS_LAST: tl.constexpr
):
    """weights[channel, output] as a tile; 0 beyond the limit and OUT."""
    if INPUTS_LAST:
        at = weights + output[None, :] * IN + channel[:, None]
    else:
        at = weights + channel[:, None] * OUT + output[None, :]
    if ALL:  # a mask would cost wide loads
        return tl.load(at)
    else:
        return tl.load(at, mask=(channel < limit)[:, None] & (output < OUT)[None, :], other=0.0)


@triton.jit
def _step(
    own, weights, p0, p1, p2, p3, w0, w1, w2, w3, first, start, output, part, total,
    CHANNELS: tl.constexpr, IN: tl.constexpr, OUT: tl.constexpr, SEGMENT: tl.constexpr, HALVES: tl.constexpr,
    PARTS: tl.constexpr, BLOCK_OUT: tl.constexpr, BLOCK_IN: tl.constexpr, REPAIR: tl.constexpr,
):  # fmt: skip
    """total + what a tile reads of channels [start, start + BLOCK_IN) of a segment, which begins at `first` in its
    group, times their weights."""
    WHOLE: tl.constexpr = SEGMENT % BLOCK_IN == 0
    ALL: tl.constexpr = WHOLE and OUT % BLOCK_OUT == 0
    channel = start + tl.arange(0, BLOCK_IN)
    limit = first + SEGMENT
    a = read(own, p0, p1, p2, p3, w0, w1, w2, w3, channel, SEGMENT, CHANNELS, WHOLE)
    if PARTS == 1:
        b = _weights(weights, first + channel, output, limit, IN, OUT, ALL, True)
        total = product(round_to_tf32(a), b, total, "tf32")
    elif PARTS == 0:
        if weights.dtype.element_ty == a.dtype:
            b = _weights(weights, first + channel, output, limit, IN, OUT, ALL, False)
            total = product(a, b, total, "ieee")
        else:
            b = _weights(weights, first + channel, output, limit, IN, OUT, ALL, False)
            total = product(a.to(b.dtype), b, total, "native")
            rest = rest_of(a, b.dtype, REPAIR)
            if HALVES > 1:
                total = product(rest.to(b.dtype), b, total, "native")
            if HALVES > 2:
                total = product(rest_of(rest, b.dtype, REPAIR).to(b.dtype), b, total, "native")
    else:
        a_high, a_middle, a_low = parts_of(a)
        b = _weights(weights, first + channel, output, limit, IN, OUT, ALL, False)
        b_middle = _weights(weights + part, first + channel, output, limit, IN, OUT, ALL, False)
        b_low = b
        if PARTS == 3:
            b_low = _weights(weights + 2 * part, first + channel, output, limit, IN, OUT, ALL, False)
        # Summed outside of the tensor cores, whose accumulators truncate.
        total += product_of_parts(
            a_high, a_middle, a_low, b, b_middle, b_low, tl.zeros_like(total), PARTS, REPAIR
        )  # fmt: skip
    return total


@triton.jit
def _all_taps(
    total, begin, end, maps, offset, mask, weights, image, row, valid, group, output, part, height, width, out_width,
    pixels, stride_y, stride_x, up, left, spread_y, spread_x, offset_step, offset_channel, mask_step, mask_channel,
    CHANNELS: tl.constexpr, IN: tl.constexpr, OUT: tl.constexpr, SEGMENT: tl.constexpr, GROUPS: tl.constexpr,
    OFFSET_GROUPS: tl.constexpr, TAPS: tl.constexpr, KERNEL_WIDTH: tl.constexpr, MASKED: tl.constexpr,
    HALVES: tl.constexpr, LONG: tl.constexpr, PARTS: tl.constexpr, BLOCK_OUT: tl.constexpr, BLOCK_IN: tl.constexpr,
    STAGES: tl.constexpr, REPAIR: tl.constexpr,
):  # fmt: skip
    """total + the sums of a tile over visits [begin, end), each of one tap and one segment of the group's channels."""
    REAL: tl.constexpr = tl.float64 if maps.dtype.element_ty == tl.float64 else tl.float32
    SEGMENTS: tl.constexpr = IN // SEGMENT
    SINGLE: tl.constexpr = SEGMENT <= BLOCK_IN
    for visit in tl.range(begin, end, num_stages=STAGES if SINGLE else 1):
        tap = visit // SEGMENTS
        first = visit % SEGMENTS * SEGMENT
        channel = group * IN + first
        inside, top, near, fy, fx, factor = place(
            offset, mask, image, row, valid, channel // (CHANNELS // OFFSET_GROUPS), tap, height, width, out_width,
            pixels, stride_y, stride_x, up, left, spread_y, spread_x, offset_step, offset_channel, mask_step,
            mask_channel, REAL, OFFSET_GROUPS, TAPS, KERNEL_WIDTH, MASKED, LONG,
        )  # fmt: skip
        p0, p1, p2, p3, w0, w1, w2, w3 = corners(inside, top, near, fy, fx, factor, height, width, LONG)
        own = maps + image * height * width * CHANNELS + channel
        of_tap = weights + tl.cast(tap * GROUPS + group, tl.int64) * (IN * OUT)
        if SINGLE:
            total = _step(
                own, of_tap, p0, p1, p2, p3, w0, w1, w2, w3, first, 0, output, part, total,
                CHANNELS, IN, OUT, SEGMENT, HALVES, PARTS, BLOCK_OUT, BLOCK_IN, REPAIR,
            )  # fmt: skip
        else:
            for start in tl.range(0, SEGMENT, BLOCK_IN, num_stages=STAGES):
                total = _step(
                    own, of_tap, p0, p1, p2, p3, w0, w1, w2, w3, first, start, output, part, total,
                    CHANNELS, IN, OUT, SEGMENT, HALVES, PARTS, BLOCK_OUT, BLOCK_IN, REPAIR,
                )  # fmt: skip
    return total


@_gpu.kernel(specialize=("offset_step", "mask_step"))
def _conv_kernel(
    maps, offset, mask, weights, bias, out, tiles, height, width, out_width, pixels, stride_y, stride_x, up, left,
    spread_y, spread_x, offset_step, offset_channel, mask_step, mask_channel, part, batch,
    each, shares,
    CHANNELS: tl.constexpr, IN: tl.constexpr, OUT: tl.constexpr, SEGMENT: tl.constexpr, GROUPS: tl.constexpr,
    OFFSET_GROUPS: tl.constexpr, TAPS: tl.constexpr, KERNEL_WIDTH: tl.constexpr, MASKED: tl.constexpr,
    HALVES: tl.constexpr, LONG: tl.constexpr, PARTS: tl.constexpr, BIAS: tl.constexpr, CHANNELS_LAST: tl.constexpr,
    SHARED: tl.constexpr, ROWS: tl.constexpr, BLOCK_OUT: tl.constexpr, BLOCK_IN: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """SHARED: as many programs as there are shares divide the visits of a tile, `each` so many, and store sums of their
    own."""
    ACROSS: tl.constexpr = (OUT + BLOCK_OUT - 1) // BLOCK_OUT
    VISITS: tl.constexpr = TAPS * (IN // SEGMENT)
    block = tl.program_id(0) % ACROSS
    group = tl.program_id(0) // ACROSS % GROUPS
    tile = tl.program_id(0) // (ACROSS * GROUPS)
    share = 0
    begin = 0
    end = VISITS
    if SHARED:
        share = tile % shares
        tile = tile // shares
        begin = share * each
        end = tl.minimum(begin + each, VISITS)
    image = (tile // tiles).to(tl.int64)
    row = tile % tiles * ROWS + tl.arange(0, ROWS)
    valid = row < pixels
    output = block * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    total = tl.zeros([ROWS, BLOCK_OUT], tl.float64 if maps.dtype.element_ty == tl.float64 else tl.float32)
    total = _all_taps(
        total, begin, end, maps, offset, mask, weights, image, row, valid, group, output, part, height, width,
        out_width, pixels, stride_y, stride_x, up, left, spread_y, spread_x, offset_step, offset_channel, mask_step,
        mask_channel, CHANNELS, IN, OUT, SEGMENT, GROUPS, OFFSET_GROUPS, TAPS, KERNEL_WIDTH, MASKED, HALVES, LONG,
        PARTS, BLOCK_OUT, BLOCK_IN, STAGES, False,
    )  # fmt: skip
    if PARTS > 1 or HALVES > 1:
        # Splitting makes NaN of what is infinite: a tile that holds any is summed up anew, with more care. Else the
        # loop takes no step.
        spoilt = tl.max((total != total).to(tl.int32))
        total = tl.where(spoilt > 0, 0.0, total)
        total = _all_taps(
            total, begin, begin + (end - begin) * spoilt, maps, offset, mask, weights, image, row, valid, group, output,
            part, height, width, out_width, pixels, stride_y, stride_x, up, left, spread_y, spread_x, offset_step,
            offset_channel, mask_step, mask_channel, CHANNELS, IN, OUT, SEGMENT, GROUPS, OFFSET_GROUPS, TAPS,
            KERNEL_WIDTH, MASKED, HALVES, LONG, PARTS, BLOCK_OUT, BLOCK_IN, 1, True,
        )  # fmt: skip
    if BIAS and not SHARED:
        total += tl.load(bias + group * OUT + output, mask=output < OUT, other=0.0).to(total.dtype)[None, :]
    if LONG:
        row = row.to(tl.int64)
    own = out + (share * batch + image) * pixels * (GROUPS * OUT)
    if CHANNELS_LAST or SHARED:
        at = own + row[:, None] * (GROUPS * OUT) + (group * OUT + output)[None, :]
    else:
        at = own + (group * OUT + output)[None, :].to(tl.int64) * pixels + row[:, None]
    exists = valid[:, None]
    if OUT % BLOCK_OUT != 0:
        exists = exists & (output < OUT)[None, :]
    tl.store(at, total.to(out.dtype.element_ty), mask=exists)
