"""deform_conv2d on GPU: implicit products. What a tile of output pixels reads goes from registers into the product.

A program takes a tile of output pixels of one image and, forward, as many output channels as fit, through all taps.
Channels lie across its lanes: an NCHW map is transposed first. float32 runs on tensor cores without losing its
precision, as six products of bfloat16 parts; three of them where torch allows TF32. What is read of a half map is a
float32, and enters as the sum of two float16 or three bfloat16.

The backward has two kernels. One makes the gradient of what a tile read under one tap, by a product with the weight,
and from it those of offset and mask, by sums over channels, and of the map, by atomics in float32. The other reads the
map again and multiplies with the gradient of the output, for the weight: every program keeps a sum of its own, which
are added up in order. In deterministic mode the reference adds up the gradient of the map.
"""

import math
from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from triops import _gpu
from triops._gpu.products import hopper, parts_of, product, product_of_parts, split
from triops._gpu.products import precision as precision_of
from triops._rois import empty_like_format, format_of
from triops.ops.deform_conv2d import reference
from triops.ops.deform_conv2d.reference import Sizes, empty_gradients

PARTS = {"split": 3, "tf32": 2}  # bfloat16 numbers that stand for a float32
HALVES = {torch.float16: 2, torch.bfloat16: 3}  # numbers that stand for what was read of a half map; 1: it is rounded
FEW = 132  # tiles: with fewer, narrow blocks of output channels keep more of the GPU busy
PROGRAMS = 528  # of the weight gradient, at least, where there are so many tiles


class Config(NamedTuple):
    """How a product is cut: pixels of a tile, its other side, numbers summed at a time, warps, pipeline stages.

    registers: how many a thread may have, 0 where the compiler decides.
    """

    rows: int
    out: int
    inner: int
    warps: int
    stages: int
    registers: int = 0

    def options(self):
        """Of a launch."""
        limit = {"maxnreg": self.registers} if self.registers else {}
        return {"STAGES": self.stages, "num_warps": self.warps, **limit}


def deform_conv2d(input, offset, weight, mask, bias, stride, padding, dilation):
    sizes = Sizes.of(input, offset, weight)
    out = empty_like_format((sizes.batch, sizes.outputs, sizes.out_height, sizes.out_width), input.dtype, input)
    if out.numel() == 0:
        return out
    if input.numel() == 0:
        return out.zero_() if bias is None else out.copy_(bias.view(1, -1, 1, 1).expand_as(out))
    weights, parts = _weights(weight, sizes)
    maps, samples = _rows(input), _Samples.of(offset, mask)

    def launch(config):
        tiles = _gpu.cdiv(sizes.pixels, config.rows)
        across = _gpu.cdiv(sizes.outputs // sizes.groups, config.out)
        _conv_kernel[(sizes.batch * tiles * sizes.groups * across,)](
            maps, samples.offset, samples.mask, weights, out if bias is None else bias.contiguous(), out, tiles,
            *_numbers(sizes, stride, padding, dilation), *samples.steps, weights.numel() // max(parts, 1),
            **_constants(sizes, mask, maps, out), PARTS=parts, BIAS=bias is not None,
            CHANNELS_LAST=format_of(out) == torch.channels_last, ROWS=config.rows, BLOCK_OUT=config.out,
            BLOCK_IN=config.inner, **config.options(),
        )  # fmt: skip

    wide, narrow = _forward_configs(input.dtype, parts, _segment(sizes), sizes.outputs // sizes.groups)
    if wide != narrow:
        key = "deform_conv2d", wide, parts, _kind(sizes, maps, samples, bias, out)
        _gpu.compile_once(key, lambda: (launch(wide), launch(narrow)))
    launch(narrow if sizes.batch * _gpu.cdiv(sizes.pixels, wide.rows) * sizes.groups < FEW else wide)
    return out


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
    parts = PARTS.get(precision_of(input.dtype), 0)
    given = _rows(grad)
    if parts:
        given = split(given, parts)
    maps, samples = _rows(input), _Samples.of(offset, mask)
    numbers = _numbers(sizes, stride, padding, dilation)
    constants = dict(_constants(sizes, mask, maps, grad), PARTS=parts)
    if of_inputs:
        _of_inputs(sizes, given, maps, samples, weight, numbers, constants, grads)
    if of_weight:
        grads[3].copy_(_of_weight(sizes, given, maps, samples, numbers, constants).view(weight.shape))
    return grads


def _of_inputs(sizes, given, maps, samples, weight, numbers, constants, grads):
    """Fill the gradients of input, offset and mask."""
    config = _inputs_config(maps.dtype, constants["PARTS"], _segment(sizes), sizes.outputs // sizes.groups)
    weights, parts = _weights(weight, sizes)
    grad_input, grad_offset, grad_mask, _ = grads
    wide = torch.float64 if maps.dtype == torch.float64 else torch.float32
    direct = grad_input.dtype == wide and format_of(grad_input) == torch.channels_last
    grad_maps = grad_input.zero_() if direct else torch.zeros(maps.shape, dtype=wide, device=maps.device)
    tiles = _gpu.cdiv(sizes.pixels, config.rows)
    _inputs_kernel[(sizes.batch * tiles * sizes.taps * sizes.offset_groups,)](
        given, maps, samples.offset, samples.mask, weights, grad_maps, grad_offset,
        grad_mask if grad_mask.numel() else grad_offset, tiles,
        *numbers, *samples.steps, *_steps(grad_offset), *_steps(grad_mask if grad_mask.numel() else grad_offset),
        given.numel() // max(parts, 1), weights.numel() // max(parts, 1),
        **constants, ROWS=config.rows, BLOCK_IN=config.out, BLOCK_OUT=config.inner, **config.options(),
    )  # fmt: skip
    if not direct:
        grad_input.copy_(grad_maps.view(sizes.batch, sizes.height, sizes.width, -1).permute(0, 3, 1, 2))


def _of_weight(sizes, given, maps, samples, numbers, constants):
    """-> [N, C / groups, taps]"""
    config = _weight_config(maps.dtype, constants["PARTS"], _segment(sizes), sizes.outputs // sizes.groups)
    own, outputs = sizes.channels // sizes.groups, sizes.outputs // sizes.groups
    pieces = sizes.channels // _segment(sizes) * _gpu.cdiv(_segment(sizes), config.out)
    each = sizes.taps * pieces * _gpu.cdiv(outputs, config.inner)
    tiles = _gpu.cdiv(sizes.pixels, config.rows)
    # as many tiles per program whatever the GPU, so that the sums do not depend on it
    share = max(_gpu.cdiv(sizes.batch * tiles * each, max(_gpu.block(PROGRAMS, interpreted=2 * each), each)), 1)
    shares = _gpu.cdiv(sizes.batch * tiles, share)
    wide = torch.float64 if maps.dtype == torch.float64 else torch.float32
    found = torch.empty((shares, sizes.outputs, sizes.taps, own), dtype=wide, device=maps.device)
    _weight_kernel[(shares * each,)](
        given, maps, samples.offset, samples.mask, found, sizes.batch * tiles, tiles, share,
        *numbers, *samples.steps, given.numel() // max(constants["PARTS"], 1),
        **constants, ROWS=config.rows, BLOCK_IN=config.out, BLOCK_OUT=config.inner, **config.options(),
    )  # fmt: skip
    return (found[0] if shares == 1 else found.sum(0)).transpose(1, 2)


class _Samples(NamedTuple):
    """Offset and mask as they lie, NCHW or channels-last; the mask is the offset where there is none."""

    offset: torch.Tensor
    mask: torch.Tensor
    steps: tuple[int, int, int, int]  # from pixel to pixel and from channel to channel, in elements, of both

    @classmethod
    def of(cls, offset, mask):
        offset = offset.contiguous(memory_format=format_of(offset))
        mask = offset if mask is None else mask.contiguous(memory_format=format_of(mask))
        return cls(offset, mask, (*_steps(offset), *_steps(mask)))


def _steps(maps):
    """From pixel to pixel and from channel to channel, in elements."""
    _, channels, height, width = maps.shape
    return (channels, 1) if format_of(maps) == torch.channels_last else (1, height * width)


def _rows(maps):
    """maps [B, C, H, W] as a contiguous tensor [B, H, W, C]: as it lies, where it lies so."""
    return maps.permute(0, 2, 3, 1).contiguous()


def _weights(weight, sizes):
    """-> the weight as [taps, groups, C / groups, N / groups], in parts where float32 is multiplied so; how many"""
    parts = PARTS.get(precision_of(weight.dtype), 0)
    shape = sizes.groups, sizes.outputs // sizes.groups, sizes.channels // sizes.groups, sizes.taps
    weights = weight.reshape(shape).permute(3, 0, 2, 1).contiguous()
    return (split(weights, parts) if parts else weights), parts


def _segment(sizes):
    """Channels that share a group of the convolution and an offset group: a block of channels lies within one."""
    return math.gcd(sizes.channels // sizes.groups, sizes.channels // sizes.offset_groups)


def _numbers(sizes, stride, padding, dilation):
    return sizes.height, sizes.width, sizes.out_width, sizes.pixels, *stride, *padding, *dilation


def _constants(sizes, mask, maps, other):
    """What a network fixes. LONG: addresses within an image need 64 bits."""
    image = max(maps.numel(), other.numel()) // sizes.batch
    return {
        "CHANNELS": sizes.channels, "IN": sizes.channels // sizes.groups, "OUT": sizes.outputs // sizes.groups,
        "SEGMENT": _segment(sizes), "GROUPS": sizes.groups, "OFFSET_GROUPS": sizes.offset_groups, "TAPS": sizes.taps,
        "KERNEL_WIDTH": sizes.kernel_width, "MASKED": mask is not None, "HALVES": HALVES.get(maps.dtype, 1),
        "LONG": max(image, 2 * sizes.offset_groups * sizes.taps * sizes.pixels) >= 2**31,
    }  # fmt: skip


def _kind(sizes, maps, samples, bias, out):
    """What else decides over the kernels of a call."""
    lies = tuple(format_of(t) == torch.channels_last for t in (samples.offset, samples.mask, out))
    same = sizes._replace(batch=0, height=0, width=0, out_height=0, out_width=0)
    dtypes = maps.dtype, samples.offset.dtype, samples.mask.dtype
    return same, dtypes, samples.mask is samples.offset, bias is None, lies


def _side(number, least, most):
    return min(max(_gpu.next_power_of_2(number), least), most)


@cache
def _roomy():
    """Whether programs may have more shared memory than the 99 KiB of smaller GPUs, or the 64 of AMD's."""
    if torch.version.hip:
        return False
    if not torch.cuda.is_available():
        return True
    return torch.cuda.get_device_properties().shared_memory_per_block_optin >= 160 << 10


@cache
def _forward_configs(dtype, parts, segment, outputs):
    """-> for many tiles of pixels, for few."""
    rows = _gpu.block(64, interpreted=512)
    if dtype == torch.float64:
        config = Config(rows, _side(outputs, 16, 32), 16, 4, 1)
        return config, config
    out, inner = _side(outputs, 16, 256 if _roomy() and dtype != torch.float32 else 128), _side(segment, 16, 32)
    narrow = Config(rows, min(out, 64), inner, 4, 2)
    if not _roomy():
        return Config(rows, out, inner, 8 if out > 64 else 4, 2), narrow
    if out > 64:  # [2, 256, 100, 152] on an H200: 272 us in float16, 897 in float32; with half the rows 928 and 1,660
        return Config(max(rows, 128), out, inner, 8, 2), narrow
    if hopper():  # [6, 64, 232, 400]: 628 and 1,438 us; where the compiler decides 695 and 1,612
        return narrow._replace(registers=168 if dtype == torch.float32 else 128), narrow
    return narrow, narrow


@cache
def _inputs_config(dtype, parts, segment, outputs):
    """`out` counts channels of the map, `inner` those of the output."""
    rows = _gpu.block(64, interpreted=512)
    if dtype == torch.float64:
        return Config(min(rows, 32), _side(segment, 16, 32), 16, 4, 1)
    if (
        dtype == torch.float32
    ):  # 2,180 us for [2, 256, 100, 152] and 4,623 for [6, 64, 232, 400]; the other way 2,589, 7,418
        wide = outputs > 64
        return Config(rows, _side(segment, 16, 64), _side(outputs, 16, 32 if wide else 64), 4 if wide else 8, 2)
    return Config(rows, _side(segment, 16, 32), _side(outputs, 16, 64), 4, 2)


@cache
def _weight_config(dtype, parts, segment, outputs):
    """`out` counts channels of the map, `inner` those of the output; pixels are what is summed."""
    if dtype == torch.float64:
        return Config(32, _side(segment, 16, 32), _side(outputs, 16, 32), 4, 1)
    if dtype == torch.float32:
        return Config(32, _side(segment, 16, 64), _side(outputs, 16, 128 if _roomy() else 64), 4, 2)
    inner = _side(outputs, 16, 256 if _roomy() else 128)
    return Config(64 if _roomy() else 32, _side(segment, 16, 64), inner, 8 if inner > 128 else 4, 2)


@triton.jit
def _place(
    offset, mask, image, row, valid, group, tap, height, width, out_width, pixels, stride_y, stride_x, up, left,
    spread_y, spread_x, offset_step, offset_channel, mask_step, mask_channel,
    REAL: tl.constexpr, OFFSET_GROUPS: tl.constexpr, TAPS: tl.constexpr, KERNEL_WIDTH: tl.constexpr,
    MASKED: tl.constexpr, LONG: tl.constexpr,
):  # fmt: skip
    """Where output pixels read the map under a tap.

    -> whether they do, the pixel above and to the left, as row and column, the shares of the pixel below and of the
    one to the right, the mask; anything but NaN where they do not
    """
    if LONG:
        row = row.to(tl.int64)
    number = group * TAPS + tap
    channel = tl.cast(2 * number, tl.int64)
    moved = offset + image * (2 * OFFSET_GROUPS * TAPS) * pixels + row * offset_step
    y = row // out_width * stride_y - up + tap // KERNEL_WIDTH * spread_y
    x = row % out_width * stride_x - left + tap % KERNEL_WIDTH * spread_x
    at_y = y.to(REAL) + tl.load(moved + channel * offset_channel, mask=valid, other=0.0).to(REAL)
    at_x = x.to(REAL) + tl.load(moved + (channel + 1) * offset_channel, mask=valid, other=0.0).to(REAL)
    inside = valid & (at_y > -1) & (at_x > -1) & (at_y < height) & (at_x < width)  # false for NaN
    at_y = tl.where(inside, at_y, 0.0)
    at_x = tl.where(inside, at_x, 0.0)
    top = tl.floor(at_y)
    begin = tl.floor(at_x)
    factor = tl.full(at_y.shape, 1.0, REAL)
    if MASKED:
        own = mask + image * (OFFSET_GROUPS * TAPS) * pixels + row * mask_step
        factor = tl.load(own + tl.cast(number, tl.int64) * mask_channel, mask=inside, other=0.0).to(REAL)
    return inside, top.to(tl.int32), begin.to(tl.int32), at_y - top, at_x - begin, factor


@triton.jit
def _corner(inside, top, left, fy, fx, height, width, down, right, LONG: tl.constexpr):
    """One of the four pixels. -> its number, -1 where there is none; the weights along y and x"""
    row = top + down
    column = left + right
    exists = inside & (row >= 0) & (row < height) & (column >= 0) & (column < width)
    if LONG:
        row = row.to(tl.int64)
    wy = tl.where(down == 1, fy, 1 - fy)
    wx = tl.where(right == 1, fx, 1 - fx)
    return tl.where(exists, row * width + column, -1), wy, wx


@triton.jit
def _load_rows(source, row, exists, channel, limit, STEP: tl.constexpr, WHOLE: tl.constexpr):
    """source[row * STEP + channel], as a tile; 0 where the row does not exist or the channel is not below the limit."""
    mask = exists[:, None]
    if not WHOLE:
        mask = mask & (channel < limit)[None, :]
    return tl.load(source + row[:, None] * STEP + channel[None, :], mask=mask, other=0.0)


@triton.jit
def _corners(inside, top, left, fy, fx, factor, height, width, LONG: tl.constexpr):
    """-> numbers and shares of the four pixels"""
    p0, y0, x0 = _corner(inside, top, left, fy, fx, height, width, 0, 0, LONG)
    p1, y1, x1 = _corner(inside, top, left, fy, fx, height, width, 0, 1, LONG)
    p2, y2, x2 = _corner(inside, top, left, fy, fx, height, width, 1, 0, LONG)
    p3, y3, x3 = _corner(inside, top, left, fy, fx, height, width, 1, 1, LONG)
    # The choice keeps a mask that is not finite off what is no pixel.
    w0 = tl.where(p0 >= 0, y0 * x0 * factor, 0.0)
    w1 = tl.where(p1 >= 0, y1 * x1 * factor, 0.0)
    w2 = tl.where(p2 >= 0, y2 * x2 * factor, 0.0)
    w3 = tl.where(p3 >= 0, y3 * x3 * factor, 0.0)
    return p0, p1, p2, p3, w0, w1, w2, w3


@triton.jit
def _read(
    own, p0, p1, p2, p3, w0, w1, w2, w3, channel, limit, CHANNELS: tl.constexpr, WHOLE: tl.constexpr
):  # fmt: skip
    """What the pixels of a tile read of a block of channels."""
    found = w0[:, None] * _load_rows(own, p0, p0 >= 0, channel, limit, CHANNELS, WHOLE).to(w0.dtype)
    found += w1[:, None] * _load_rows(own, p1, p1 >= 0, channel, limit, CHANNELS, WHOLE).to(w0.dtype)
    found += w2[:, None] * _load_rows(own, p2, p2 >= 0, channel, limit, CHANNELS, WHOLE).to(w0.dtype)
    found += w3[:, None] * _load_rows(own, p3, p3 >= 0, channel, limit, CHANNELS, WHOLE).to(w0.dtype)
    return found


@triton.jit
def _rest(value, DTYPE: tl.constexpr):
    """What rounding to a half type takes away; 0 where that is not finite."""
    rest = value - value.to(DTYPE).to(value.dtype)
    return tl.where(tl.abs(rest) < 1e30, rest, 0.0)


@triton.jit
def _step(
    own, weights, p0, p1, p2, p3, w0, w1, w2, w3, first, start, output, part, total,
    CHANNELS: tl.constexpr, IN: tl.constexpr, OUT: tl.constexpr, SEGMENT: tl.constexpr, HALVES: tl.constexpr,
    PARTS: tl.constexpr, BLOCK_OUT: tl.constexpr, BLOCK_IN: tl.constexpr, REPAIR: tl.constexpr,
):  # fmt: skip
    """total + what a tile reads of channels [start, start + BLOCK_IN) of a segment, which begins at `first` in its
    group, times their weights."""
    WHOLE: tl.constexpr = SEGMENT % BLOCK_IN == 0
    channel = start + tl.arange(0, BLOCK_IN)
    a = _read(own, p0, p1, p2, p3, w0, w1, w2, w3, channel, SEGMENT, CHANNELS, WHOLE)
    at = weights + (first + channel)[:, None] * OUT + output[None, :]
    if WHOLE and OUT % BLOCK_OUT == 0:
        b = tl.load(at)
    else:
        exists = (channel < SEGMENT)[:, None] & (output < OUT)[None, :]
        b = tl.load(at, mask=exists, other=0.0)
    if PARTS == 0:
        if a.dtype == b.dtype:
            total = product(a, b, total, "ieee")
        else:
            total = product(a.to(b.dtype), b, total, "native")
            rest = _rest(a, b.dtype)
            if HALVES > 1:
                total = product(rest.to(b.dtype), b, total, "native")
            if HALVES > 2:
                total = product(_rest(rest, b.dtype).to(b.dtype), b, total, "native")
    else:
        a_high, a_middle, a_low = parts_of(a)
        b_low = b
        if WHOLE and OUT % BLOCK_OUT == 0:
            b_middle = tl.load(at + part)
            if PARTS == 3:
                b_low = tl.load(at + 2 * part)
        else:
            b_middle = tl.load(at + part, mask=exists, other=0.0)
            if PARTS == 3:
                b_low = tl.load(at + 2 * part, mask=exists, other=0.0)
        # Summed outside of the tensor cores, whose accumulators truncate.
        total += product_of_parts(
            a_high, a_middle, a_low, b, b_middle, b_low, tl.zeros_like(total), PARTS, REPAIR
        )  # fmt: skip
    return total


@triton.jit
def _all_taps(
    total, visits, maps, offset, mask, weights, image, row, valid, group, output, part, height, width, out_width,
    pixels, stride_y, stride_x, up, left, spread_y, spread_x, offset_step, offset_channel, mask_step, mask_channel,
    CHANNELS: tl.constexpr, IN: tl.constexpr, OUT: tl.constexpr, SEGMENT: tl.constexpr, GROUPS: tl.constexpr,
    OFFSET_GROUPS: tl.constexpr, TAPS: tl.constexpr, KERNEL_WIDTH: tl.constexpr, MASKED: tl.constexpr,
    HALVES: tl.constexpr, LONG: tl.constexpr, PARTS: tl.constexpr, BLOCK_OUT: tl.constexpr, BLOCK_IN: tl.constexpr,
    STAGES: tl.constexpr, REPAIR: tl.constexpr,
):  # fmt: skip
    """total + the sums of a tile over so many visits, each of one tap and one segment of the group's channels."""
    REAL: tl.constexpr = tl.float64 if maps.dtype.element_ty == tl.float64 else tl.float32
    SEGMENTS: tl.constexpr = IN // SEGMENT
    SINGLE: tl.constexpr = SEGMENT <= BLOCK_IN
    for visit in tl.range(0, visits, num_stages=STAGES if SINGLE else 1):
        tap = visit // SEGMENTS
        first = visit % SEGMENTS * SEGMENT
        channel = group * IN + first
        inside, top, begin, fy, fx, factor = _place(
            offset, mask, image, row, valid, channel // (CHANNELS // OFFSET_GROUPS), tap, height, width, out_width,
            pixels, stride_y, stride_x, up, left, spread_y, spread_x, offset_step, offset_channel, mask_step,
            mask_channel, REAL, OFFSET_GROUPS, TAPS, KERNEL_WIDTH, MASKED, LONG,
        )  # fmt: skip
        p0, p1, p2, p3, w0, w1, w2, w3 = _corners(inside, top, begin, fy, fx, factor, height, width, LONG)
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
    spread_y, spread_x, offset_step, offset_channel, mask_step, mask_channel, part,
    CHANNELS: tl.constexpr, IN: tl.constexpr, OUT: tl.constexpr, SEGMENT: tl.constexpr, GROUPS: tl.constexpr,
    OFFSET_GROUPS: tl.constexpr, TAPS: tl.constexpr, KERNEL_WIDTH: tl.constexpr, MASKED: tl.constexpr,
    HALVES: tl.constexpr, LONG: tl.constexpr, PARTS: tl.constexpr, BIAS: tl.constexpr, CHANNELS_LAST: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_OUT: tl.constexpr, BLOCK_IN: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    ACROSS: tl.constexpr = (OUT + BLOCK_OUT - 1) // BLOCK_OUT
    block = tl.program_id(0) % ACROSS
    group = tl.program_id(0) // ACROSS % GROUPS
    tile = tl.program_id(0) // (ACROSS * GROUPS)
    image = (tile // tiles).to(tl.int64)
    row = tile % tiles * ROWS + tl.arange(0, ROWS)
    valid = row < pixels
    output = block * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    VISITS: tl.constexpr = TAPS * (IN // SEGMENT)
    total = tl.zeros([ROWS, BLOCK_OUT], tl.float64 if maps.dtype.element_ty == tl.float64 else tl.float32)
    total = _all_taps(
        total, VISITS, maps, offset, mask, weights, image, row, valid, group, output, part, height, width, out_width,
        pixels, stride_y, stride_x, up, left, spread_y, spread_x, offset_step, offset_channel, mask_step, mask_channel,
        CHANNELS, IN, OUT, SEGMENT, GROUPS, OFFSET_GROUPS, TAPS, KERNEL_WIDTH, MASKED, HALVES, LONG, PARTS,
        BLOCK_OUT, BLOCK_IN, STAGES, False,
    )  # fmt: skip
    if PARTS > 0:
        # Splitting makes NaN of what is infinite: a tile that holds any is summed up anew, with more care. Else the
        # loop takes no step.
        spoilt = tl.max((total != total).to(tl.int32))
        total = tl.where(spoilt > 0, 0.0, total)
        total = _all_taps(
            total, VISITS * spoilt, maps, offset, mask, weights, image, row, valid, group, output, part, height, width,
            out_width, pixels, stride_y, stride_x, up, left, spread_y, spread_x, offset_step, offset_channel,
            mask_step, mask_channel, CHANNELS, IN, OUT, SEGMENT, GROUPS, OFFSET_GROUPS, TAPS, KERNEL_WIDTH, MASKED,
            HALVES, LONG, PARTS, BLOCK_OUT, BLOCK_IN, 1, True,
        )  # fmt: skip
    if BIAS:
        total += tl.load(bias + group * OUT + output, mask=output < OUT, other=0.0).to(total.dtype)[None, :]
    if LONG:
        row = row.to(tl.int64)
    own = out + image * pixels * (GROUPS * OUT)
    if CHANNELS_LAST:
        at = own + row[:, None] * (GROUPS * OUT) + (group * OUT + output)[None, :]
    else:
        at = own + (group * OUT + output)[None, :].to(tl.int64) * pixels + row[:, None]
    exists = valid[:, None]
    if OUT % BLOCK_OUT != 0:
        exists = exists & (output < OUT)[None, :]
    tl.store(at, total.to(out.dtype.element_ty), mask=exists)


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
    a = _load_rows(given, image_row, valid, output, OUT, STEP, WHOLE)
    b = tl.load(at, mask=exists, other=0.0)
    if PARTS == 0:
        total = product(a, b, total, "ieee" if a.dtype == total.dtype else "native")
    else:
        a_middle = _load_rows(given + part, image_row, valid, output, OUT, STEP, WHOLE)
        b_middle = tl.load(at + weight_part, mask=exists, other=0.0)
        a_low = a
        b_low = b
        if PARTS == 3:
            a_low = _load_rows(given + 2 * part, image_row, valid, output, OUT, STEP, WHOLE)
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
    inside, top, begin, fy, fx, factor = _place(
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
        for corner in range(4):  # not unrolled: its tiles would be in registers all at once
            down = corner // 2
            right = corner % 2
            pixel, wy, wx = _corner(inside, top, begin, fy, fx, height, width, down, right, LONG)
            exists = pixel >= 0
            on_map = on_map | exists
            found = _load_rows(maps + base, pixel, exists, number, SEGMENT, CHANNELS, WHOLE).to(REAL)
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
        inside, top, begin, fy, fx, factor = _place(
            offset, mask, image, row, valid, first // (CHANNELS // OFFSET_GROUPS), tap, height, width, out_width,
            pixels, stride_y, stride_x, up, left, spread_y, spread_x, offset_step, offset_channel, mask_step,
            mask_channel, REAL, OFFSET_GROUPS, TAPS, KERNEL_WIDTH, MASKED, LONG,
        )  # fmt: skip
        p0, p1, p2, p3, w0, w1, w2, w3 = _corners(inside, top, begin, fy, fx, factor, height, width, LONG)
        own = maps + image * height * width * CHANNELS + first
        b = _read(own, p0, p1, p2, p3, w0, w1, w2, w3, channel, SEGMENT, CHANNELS, WHOLE)
        if LONG:
            row = row.to(tl.int64)
        own_given = given + image * pixels * (GROUPS * OUT) + group * OUT
        a = tl.trans(_load_rows(own_given, row, valid, output, OUT, GROUPS * OUT, ALL))
        if PARTS == 0:
            if a.dtype == b.dtype:
                total = product(a, b, total, "ieee")
            else:
                total = product(a, b.to(a.dtype), total, "native")
                rest = _rest(b, a.dtype)
                if HALVES > 1:
                    total = product(a, rest.to(a.dtype), total, "native")
                if HALVES > 2:
                    total = product(a, _rest(rest, a.dtype).to(a.dtype), total, "native")
        else:
            b_high, b_middle, b_low = parts_of(b)
            a_middle = tl.trans(_load_rows(own_given + part, row, valid, output, OUT, GROUPS * OUT, ALL))
            a_low = a
            if PARTS == 3:
                a_low = tl.trans(_load_rows(own_given + 2 * part, row, valid, output, OUT, GROUPS * OUT, ALL))
            zero = tl.zeros_like(total)
            total += product_of_parts(a, a_middle, a_low, b_high, b_middle, b_low, zero, PARTS, True)
    line = tl.cast(number, tl.int64) * (GROUPS * OUT) + group * OUT + output
    to = found + (line[:, None] * TAPS + tap) * IN + (first % IN + channel)[None, :]
    tl.store(to, total, mask=(output < OUT)[:, None] & (channel < SEGMENT)[None, :])
