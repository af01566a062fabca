"""What the GPU kernels of deform_conv2d share: how a call is cut, tensors as kernels want them, reading the map.

Channels lie across the lanes: an NCHW map is transposed first.
"""

import math
from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from triops import _gpu
from triops._gpu.maps import in_format
from triops._gpu.products import parts_of, round_to_tf32
from triops._gpu.products import precision as precision_of
from triops._rois import format_of

TF32 = 1  # how a weight was prepared: float32 numbers rounded to TF32
PARTS = {"split": 3, "tf32": TF32}  # bfloat16 numbers that stand for a float32, or TF32; 0 where it stays as it is
HALVES = {torch.float16: 2, torch.bfloat16: 3}  # numbers that stand for what was read of a half map; 1: it is rounded


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


class Samples(NamedTuple):
    """Offset and mask as they lie, NCHW or channels-last; the mask is the offset where there is none."""

    offset: torch.Tensor
    mask: torch.Tensor
    steps: tuple[int, int, int, int]  # from pixel to pixel and from channel to channel, in elements, of both

    @classmethod
    def of(cls, offset, mask):
        offset = offset.contiguous(memory_format=format_of(offset))
        mask = offset if mask is None else mask.contiguous(memory_format=format_of(mask))
        return cls(offset, mask, (*steps_of(offset), *steps_of(mask)))


def steps_of(maps):
    """From pixel to pixel and from channel to channel, in elements."""
    _, channels, height, width = maps.shape
    return (channels, 1) if format_of(maps) == torch.channels_last else (1, height * width)


def as_rows(maps):
    """maps [B, C, H, W] as a contiguous tensor [B, H, W, C]: as it lies, where it lies so."""
    if maps.is_contiguous() and not maps.is_contiguous(memory_format=torch.channels_last):
        maps = in_format(maps, channels_last=True)
    return maps.permute(0, 2, 3, 1).contiguous()


def parts_for(dtype):
    """How float32 is multiplied: see PARTS."""
    return PARTS.get(precision_of(dtype), 0)


def prepared(weight, sizes, parts, outputs_last):
    """-> the weight as [taps, groups, C / groups, N / groups], or with its last two axes exchanged; parts come first"""
    own, outputs = sizes.channels // sizes.groups, sizes.outputs // sizes.groups
    dtype, count = (torch.bfloat16, parts) if parts > TF32 else (weight.dtype, 1)
    shape = (count, sizes.taps, sizes.groups, *((own, outputs) if outputs_last else (outputs, own)))
    found = torch.empty(shape, dtype=dtype, device=weight.device)
    block = _gpu.block(1024, interpreted=65536)
    _prepare_kernel[(_gpu.cdiv(weight.numel(), block),)](
        weight, found, weight.numel(), *weight.stride(), IN=own, OUT=outputs, GROUPS=sizes.groups,
        KERNEL_WIDTH=sizes.kernel_width, PARTS=parts, OUTPUTS_LAST=outputs_last, BLOCK=block, num_warps=4,
    )  # fmt: skip
    return found


@_gpu.kernel
def _prepare_kernel(
    weight, found, size, step_out, step_in, step_y, step_x, IN: tl.constexpr, OUT: tl.constexpr, GROUPS: tl.constexpr,
    KERNEL_WIDTH: tl.constexpr, PARTS: tl.constexpr, OUTPUTS_LAST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    exists = place < size
    if OUTPUTS_LAST:
        output = place % OUT
        channel = place // OUT % IN
    else:
        channel = place % IN
        output = place // IN % OUT
    group = place // (IN * OUT) % GROUPS
    tap = place // (IN * OUT * GROUPS)
    at = weight + (group * OUT + output) * step_out + channel * step_in
    value = tl.load(at + tap // KERNEL_WIDTH * step_y + tap % KERNEL_WIDTH * step_x, mask=exists, other=0.0)
    if PARTS > 1:
        high, middle, low = parts_of(value)
        tl.store(found + place, high, mask=exists)
        tl.store(found + size + place, middle, mask=exists)
        if PARTS == 3:
            tl.store(found + 2 * tl.cast(size, tl.int64) + place, low, mask=exists)
    else:
        if PARTS == 1:
            value = round_to_tf32(value)
        tl.store(found + place, value, mask=exists)


def segment_of(sizes):
    """Channels that share a group of the convolution and an offset group: a block of channels lies within one."""
    return math.gcd(sizes.channels // sizes.groups, sizes.channels // sizes.offset_groups)


def numbers_of(sizes, stride, padding, dilation):
    return sizes.height, sizes.width, sizes.out_width, sizes.pixels, *stride, *padding, *dilation


def constants_of(sizes, mask, maps, other):
    """What a network fixes. LONG: addresses within an image need 64 bits."""
    image = max(maps.numel(), other.numel()) // sizes.batch
    return {
        "CHANNELS": sizes.channels, "IN": sizes.channels // sizes.groups, "OUT": sizes.outputs // sizes.groups,
        "SEGMENT": segment_of(sizes), "GROUPS": sizes.groups, "OFFSET_GROUPS": sizes.offset_groups, "TAPS": sizes.taps,
        "KERNEL_WIDTH": sizes.kernel_width, "MASKED": mask is not None, "HALVES": HALVES.get(maps.dtype, 1),
        "LONG": max(image, 2 * sizes.offset_groups * sizes.taps * sizes.pixels) >= 2**31,
    }  # fmt: skip


def kind_of(sizes, maps, samples, bias, out):
    """What else decides over the kernels of a call."""
    lies = tuple(format_of(t) == torch.channels_last for t in (samples.offset, samples.mask, out))
    same = sizes._replace(batch=0, height=0, width=0, out_height=0, out_width=0)
    dtypes = maps.dtype, samples.offset.dtype, samples.mask.dtype
    return same, dtypes, samples.mask is samples.offset, bias is None, lies


def side(number, least, most):
    return min(max(_gpu.next_power_of_2(number), least), most)


@cache
def roomy():
    """Whether programs may have more shared memory than the 99 KiB of smaller GPUs, or the 64 of AMD's."""
    if torch.version.hip:
        return False
    if not torch.cuda.is_available():
        return True
    return torch.cuda.get_device_properties().shared_memory_per_block_optin >= 160 << 10


@triton.jit
def place(
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
def corner(inside, top, left, fy, fx, height, width, down, right, LONG: tl.constexpr):
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
def load_rows(source, row, exists, channel, limit, STEP: tl.constexpr, WHOLE: tl.constexpr):
    """source[row * STEP + channel], as a tile; 0 where the row does not exist or the channel is not below the limit."""
    mask = exists[:, None]
    if not WHOLE:
        mask = mask & (channel < limit)[None, :]
    return tl.load(source + row[:, None] * STEP + channel[None, :], mask=mask, other=0.0)


@triton.jit
def corners(inside, top, left, fy, fx, factor, height, width, LONG: tl.constexpr):
    """-> numbers and shares of the four pixels"""
    p0, y0, x0 = corner(inside, top, left, fy, fx, height, width, 0, 0, LONG)
    p1, y1, x1 = corner(inside, top, left, fy, fx, height, width, 0, 1, LONG)
    p2, y2, x2 = corner(inside, top, left, fy, fx, height, width, 1, 0, LONG)
    p3, y3, x3 = corner(inside, top, left, fy, fx, height, width, 1, 1, LONG)
    # The choice keeps a mask that is not finite off what is no pixel.
    w0 = tl.where(p0 >= 0, y0 * x0 * factor, 0.0)
    w1 = tl.where(p1 >= 0, y1 * x1 * factor, 0.0)
    w2 = tl.where(p2 >= 0, y2 * x2 * factor, 0.0)
    w3 = tl.where(p3 >= 0, y3 * x3 * factor, 0.0)
    return p0, p1, p2, p3, w0, w1, w2, w3


@triton.jit
def read(
    own, p0, p1, p2, p3, w0, w1, w2, w3, channel, limit, CHANNELS: tl.constexpr, WHOLE: tl.constexpr
):  # fmt: skip
    """What the pixels of a tile read of a block of channels."""
    found = w0[:, None] * load_rows(own, p0, p0 >= 0, channel, limit, CHANNELS, WHOLE).to(w0.dtype)
    found += w1[:, None] * load_rows(own, p1, p1 >= 0, channel, limit, CHANNELS, WHOLE).to(w0.dtype)
    found += w2[:, None] * load_rows(own, p2, p2 >= 0, channel, limit, CHANNELS, WHOLE).to(w0.dtype)
    found += w3[:, None] * load_rows(own, p3, p3 >= 0, channel, limit, CHANNELS, WHOLE).to(w0.dtype)
    return found


@triton.jit
def rest_of(value, DTYPE: tl.constexpr, REPAIR: tl.constexpr):
    """What rounding to a half type takes away; REPAIR: 0 where that is not finite."""
    rest = value - value.to(DTYPE).to(value.dtype)
    return tl.where(tl.abs(rest) < 1e30, rest, 0.0) if REPAIR else rest
