"""The mean over an adaptive number of samples on GPU: every pixel of a bin is read once.

Bilinear weights are separable. Summed over the samples of a bin, a pixel has a share along y times a share along x. A
first kernel works out the shares of each box, bin and axis from the samples, below 0 where none reads the pixel (one
that is read with weight 0 counts: 0 times infinity is NaN); a second one adds up the pixels of a bin by them, or in the
backward gives them their part of its gradient. There is about one sample per pixel, so this takes a quarter of the
reads and of the atomics of four pixels per sample. Large bins are programs of their own, and blocks of channels follow
each other, so that the part of the map that is read at a time stays in the cache.
"""

import torch
import triton
import triton.language as tl

from triops import _gpu
from triops._dtypes import compute_dtype
from triops._gpu.arithmetic import divide, from_bits
from triops._gpu.rois import (
    bin_offsets,
    cut_box,
    image_of,
    neighbors,
    over_bins,
    over_channels,
    pixel_offsets,
    plane_offsets,
    sample_position,
    samples_within,
)

ROWS, COLUMNS = 2, 4  # pixels of a bin that a program takes at a time; 4 x 4 take a third longer on an H200
CHANNELS = {2: 64, 4: 64, 8: 32}  # of a program, by the bytes of an element
PLANES = 16  # of a program, where the map is NCHW
WARPS = 1
MOST_BYTES = 2**28  # of the shares that are held at a time


def forward(maps, boxes, output, spatial_scale, aligned, channels_last):
    """Fill `output` [K, C, PH, PW] with means over `maps` [N, C, H, W]. channels_last: in memory order [N, H, W, C]."""
    _per_bin(_forward_kernel, maps, boxes, output, spatial_scale, aligned, channels_last, channels_last)


def backward(grad, boxes, given, spatial_scale, aligned, grad_last, given_last):
    """Add the part of `given` [K, C, PH, PW] to each pixel of `grad` [N, C, H, W], of float32 or float64.

    *_last: in memory order [N, H, W, C].
    """
    _per_bin(_backward_kernel, grad, boxes, given, spatial_scale, aligned, grad_last, given_last)


def _per_bin(kernel, maps, boxes, pooled, spatial_scale, aligned, maps_last, pooled_last):
    batch, channels, height, width = maps.shape
    total, _, rows, columns = pooled.shape
    real, device = compute_dtype(maps.dtype), maps.device
    block = _gpu.block(CHANNELS[maps.element_size()] if maps_last else PLANES, interpreted=1024)
    block = min(_gpu.next_power_of_2(channels), block)
    per_box = rows * height + columns * width
    step = min(total, max(1, MOST_BYTES // (per_box * real.itemsize)))
    shares = torch.empty((step, per_box), dtype=real, device=device)
    spans = torch.empty((step, rows + columns, 2), dtype=torch.int32, device=device)
    for begin in range(0, total, step):
        count = min(step, total - begin)
        _shares_kernel[(count, rows + columns)](
            boxes, spans, shares, begin, batch, height, width, rows, columns, _gpu.bits_of(spatial_scale),
            ALIGNED=aligned, PIXELS=_gpu.block(32, interpreted=128), num_warps=1, enable_fp_fusion=False,
        )  # fmt: skip
        kernel[(count * rows * columns, _gpu.cdiv(channels, block))](
            maps, boxes, spans, shares, pooled, begin, batch, channels, height, width, rows, columns,
            MAPS_LAST=maps_last, POOLED_LAST=pooled_last, ROWS=_gpu.block(ROWS, interpreted=8),
            COLUMNS=_gpu.block(COLUMNS, interpreted=16), CHANNELS=block, num_warps=WARPS,
        )  # fmt: skip


@_gpu.kernel
def _shares_kernel(
    boxes, spans, shares, begin, batch, height, width, rows, columns, scale, ALIGNED: tl.constexpr, PIXELS: tl.constexpr
):
    """Shares of the pixels of one bin along one axis, -1 of what no sample reads, and the span [first, end) of those
    that have one."""
    REAL: tl.constexpr = shares.dtype.element_ty
    own = tl.cast(tl.program_id(0), tl.int64)
    roi = own + begin
    place = tl.program_id(1)
    along_y = place < rows
    size = tl.where(along_y, height, width)
    number = tl.where(along_y, place, place - rows)
    start, length, samples, _ = cut_box(
        boxes, roi, tl.where(along_y, 1, 0), from_bits(scale, REAL), tl.where(along_y, rows, columns), 0, True, ALIGNED,
        REAL,
    )  # fmt: skip
    _, exists = image_of(boxes, roi, batch, 5)
    base = start + number.to(REAL) * length
    low, end = _pixels(base, length, size)
    end = tl.where(exists & (samples > 0), end, low)
    at = own * (tl.cast(rows, tl.int64) * height + tl.cast(columns, tl.int64) * width)
    at += tl.where(along_y, 0, tl.cast(rows, tl.int64) * height) + number.to(tl.int64) * size
    first_read = end
    end_read = low
    for x in range(low, end, PIXELS):
        pixel = x + tl.arange(0, PIXELS)
        bases = tl.zeros([PIXELS], REAL) + base
        # A sample reads the pixels less than one away from it, and from just off the map the one at the border.
        sample, behind = samples_within(bases, length, samples, pixel.to(REAL) - 1.0, pixel.to(REAL) + 1.0, True)
        share = tl.zeros([PIXELS], REAL)
        some = pixel < low  # none yet
        for i in range(tl.max(behind - sample, 0)):
            on_map, one, other, part = neighbors(sample_position(bases, length, samples, sample + i), size)
            reads = on_map & (sample + i < behind)
            share += tl.where(reads & (one == pixel), 1.0 - part, 0.0)
            share += tl.where(reads & (other == pixel), part, 0.0)
            some = some | (reads & ((one == pixel) | (other == pixel)))
        share = divide(share, tl.zeros([PIXELS], REAL) + samples.to(REAL))
        tl.store(shares + at + pixel, tl.where(some, share, -1.0), mask=pixel < end)
        some = some & (pixel < end)
        first_read = tl.minimum(first_read, tl.min(tl.where(some, pixel, end), 0))
        end_read = tl.maximum(end_read, tl.max(tl.where(some, pixel + 1, low), 0))
    to = spans + (own * (rows + columns) + place) * 2
    tl.store(to, first_read)
    tl.store(to + 1, end_read)


@triton.jit
def _pixels(base, length, size):
    """Pixels [low, end) of an axis, among which are all that the samples of a bin from `base` on can read."""
    most = (size - 1).to(base.dtype)
    low = tl.minimum(tl.maximum(tl.floor(base), 0.0), most).to(tl.int32)
    # One pixel more than the second neighbor of the last sample: positions are rounded.
    end = tl.minimum(tl.maximum(tl.floor(base + length) + 2.0, 0.0), most).to(tl.int32) + 1
    near = (base <= size.to(base.dtype)) & (base + length >= -2.0)
    return low, tl.where(near, end, low)


@triton.jit
def _spans_of(spans, shares, own, height, width, rows, columns):
    """Of the bin of a program: its number, the span of its pixels along y and x, and pointers to their shares."""
    number = tl.program_id(0) % (rows * columns)
    y = number // columns
    x = number % columns
    span = spans + own * (rows + columns) * 2
    size = tl.cast(rows, tl.int64) * height
    of_y = shares + own * (size + tl.cast(columns, tl.int64) * width) + y.to(tl.int64) * height
    of_x = shares + own * (size + tl.cast(columns, tl.int64) * width) + size + x.to(tl.int64) * width
    first_y = tl.load(span + y * 2)
    end_y = tl.load(span + y * 2 + 1)
    first_x = tl.load(span + (rows + x) * 2)
    end_x = tl.load(span + (rows + x) * 2 + 1)
    return number, first_y, end_y, of_y, first_x, end_x, of_x


@_gpu.kernel(specialize=("channels",))
def _forward_kernel(
    maps, boxes, spans, shares, pooled, begin, batch, channels, height, width, rows, columns,
    MAPS_LAST: tl.constexpr, POOLED_LAST: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    CHANNELS: tl.constexpr,
):  # fmt: skip
    """A program takes one bin and a block of channels, and of its pixels a tile [ROWS * COLUMNS] at a time."""
    REAL: tl.constexpr = shares.dtype.element_ty
    own = tl.cast(tl.program_id(0) // (rows * columns), tl.int64)
    number, first_y, end_y, of_y, first_x, end_x, of_x = _spans_of(spans, shares, own, height, width, rows, columns)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    valid = over_channels(channel < channels, MAPS_LAST)
    image, _ = image_of(boxes, own + begin, batch, 5)
    plane = maps + plane_offsets(image, channel, height, width, channels, MAPS_LAST)
    pixel = tl.arange(0, ROWS * COLUMNS)
    step = tl.cast(width, tl.int64) * ROWS * (channels if MAPS_LAST else 1)
    total = tl.zeros([ROWS * COLUMNS, CHANNELS] if MAPS_LAST else [CHANNELS, ROWS * COLUMNS], REAL)
    for x in range(first_x, end_x, COLUMNS):
        column = x + pixel % COLUMNS
        share_x = tl.load(of_x + column, mask=column < end_x, other=-1.0)
        at = pixel_offsets(first_y + pixel // COLUMNS, column, width, channels, MAPS_LAST)
        for y in range(first_y, end_y, ROWS):
            row = y + pixel // COLUMNS
            share_y = tl.load(of_y + row, mask=row < end_y, other=-1.0)
            mask = over_bins((share_x >= 0.0) & (share_y >= 0.0), MAPS_LAST) & valid
            value = tl.load(plane + at, mask=mask, other=0.0)
            total += over_bins(share_x * share_y, MAPS_LAST) * value.to(REAL)
            at += step
    result = tl.sum(total, 0 if MAPS_LAST else 1)
    to = bin_offsets(own + begin, number, channel, rows * columns, channels, POOLED_LAST)
    tl.store(pooled + to, result.to(pooled.dtype.element_ty), mask=channel < channels)


@_gpu.kernel(specialize=("channels",))
def _backward_kernel(
    maps, boxes, spans, shares, pooled, begin, batch, channels, height, width, rows, columns,
    MAPS_LAST: tl.constexpr, POOLED_LAST: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    CHANNELS: tl.constexpr,
):  # fmt: skip
    """As the forward, with one atomic addition in place of each read."""
    REAL: tl.constexpr = shares.dtype.element_ty
    own = tl.cast(tl.program_id(0) // (rows * columns), tl.int64)
    number, first_y, end_y, of_y, first_x, end_x, of_x = _spans_of(spans, shares, own, height, width, rows, columns)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    valid = over_channels(channel < channels, MAPS_LAST)
    image, _ = image_of(boxes, own + begin, batch, 5)
    plane = maps + plane_offsets(image, channel, height, width, channels, MAPS_LAST)
    source = bin_offsets(own + begin, number, channel, rows * columns, channels, POOLED_LAST)
    given = over_channels(tl.load(pooled + source, mask=channel < channels, other=0.0).to(REAL), MAPS_LAST)
    pixel = tl.arange(0, ROWS * COLUMNS)
    step = tl.cast(width, tl.int64) * ROWS * (channels if MAPS_LAST else 1)
    for x in range(first_x, end_x, COLUMNS):
        column = x + pixel % COLUMNS
        share_x = tl.load(of_x + column, mask=column < end_x, other=-1.0)
        at = pixel_offsets(first_y + pixel // COLUMNS, column, width, channels, MAPS_LAST)
        for y in range(first_y, end_y, ROWS):
            row = y + pixel // COLUMNS
            share_y = tl.load(of_y + row, mask=row < end_y, other=-1.0)
            mask = over_bins((share_x >= 0.0) & (share_y >= 0.0), MAPS_LAST) & valid
            tl.atomic_add(plane + at, over_bins(share_x * share_y, MAPS_LAST) * given, mask=mask, sem="relaxed")
            at += step
