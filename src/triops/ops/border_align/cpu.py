"""border_align on CPU.

Forward: samples along an edge are located once for many channels. Then every vector of channels visits all of them,
with its maximum and the step of it in registers. A channels_last map is read as it lies. Reading single pixels out of
NCHW planes would cost several times more, so these are transposed into tiles, each a compact channels-last map of a few
channels that stays in the L2 cache while all boxes are aligned on it.

Backward: a work item sums the gradient of some channels of one edge in a compact tile. In the map itself pixels lie a
power of two apart and evict each other from the cache.
"""

from typing import NamedTuple

import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from triops._cpu.jit import inline, jit
from triops._cpu.memory import as_numpy, flat, in_huge_pages
from triops._cpu.threads import run
from triops._cpu.vectors import LANES, Array, splat, transpose
from triops._dtypes import compute_dtype
from triops._rois import empty_like_format, format_of
from triops.ops.border_align.reference import empty_outputs, refuse_argmax

TILE = 64  # channels per tile of an NCHW map
STRIP = 16  # boxes per strip: their results are transposed back to NCHW together
STEPS = 256  # samples of an edge that are located at a time
LOCATED = 2**18  # samples that are kept for all tiles: 12 MB
LOCATED_PER_THREAD = 20_000  # samples worth a thread to locate
VALUES_PER_THREAD = 200_000  # channels times samples worth a thread


class Map(NamedTuple):
    """Feature maps of the four edges in a flat array, with channels side by side."""

    height: int
    width: int
    channels: int  # per edge
    pixel_stride: int
    edge_stride: int


class Samples(NamedTuple):
    """Samples of many rows (a row is one edge of one box), up to STEPS of each."""

    offsets: np.ndarray  # [rows, 4, samples]: offsets of the corner pixels, in the reference's order
    weights: np.ndarray  # [rows, 4, samples]: of the corner pixels
    spans: np.ndarray  # [rows, 2]: begin and end of the samples on the map


def border_align_forward(input, boxes, pool_size):
    output, argmax = empty_outputs(input, boxes)
    if output.numel() == 0 or input.numel() == 0:
        return output.zero_(), argmax.zero_()
    real = compute_dtype(input.dtype)
    # Half types pass through float32: one sweep over the map, next to pool_size + 1 over as many boxes.
    values = output if output.dtype == real else torch.empty_like(output, dtype=real)
    in_huge_pages(values)
    in_huge_pages(argmax)
    layout = format_of(input)
    align = _align_channels_last if layout == torch.channels_last else _align_planes
    align(
        flat(input, layout, real), as_numpy(boxes, real), *input.shape[2:], output.shape[1], pool_size,
        flat(values, layout), flat(argmax, layout),
    )  # fmt: skip
    if values is not output:
        output.copy_(values)
    return output, argmax


def _align_channels_last(input, boxes, height, width, channels, pool_size, output, argmax):
    layout = Map(height, width, channels, 4 * channels, channels)
    grain = max(1, VALUES_PER_THREAD // (4 * channels * (pool_size + 1)))
    run(_align_boxes, boxes.shape[0] * boxes.shape[1], grain, input, layout, boxes, pool_size, output, argmax)


def _align_planes(input, boxes, height, width, channels, pool_size, output, argmax):
    batch, total = boxes.shape[:2]
    pixels, tile = height * width, min(TILE, -(-channels // LANES) * LANES)
    tiles, layout = -(-channels // tile), Map(height, width, tile, tile, pixels * tile)
    # By torch, whose memory begins at a cache line: vectors that span two lines take twice as long to load.
    packed = torch.zeros(tiles * 4 * layout.edge_stride, dtype=torch.float64 if input.itemsize == 8 else torch.float32)
    packed = packed.numpy()
    keep = pool_size < STEPS
    chunk = min(total, max(1, LOCATED // (4 * (pool_size + 1)))) if keep else total
    samples = _samples.py_func(4 * chunk if keep else 0, pool_size, packed)  # Python gets no arrays from Numba
    pack_grain = max(1, VALUES_PER_THREAD // layout.edge_stride)
    locate_grain = max(1, LOCATED_PER_THREAD // (4 * (pool_size + 1)))
    align_grain = max(1, VALUES_PER_THREAD // (STRIP * 4 * tile * (pool_size + 1)))
    for n in range(batch):
        planes = input[n * 4 * channels * pixels :]
        run(_pack, tiles * 4, pack_grain, planes, channels, layout, packed)
        for first in range(0, total, chunk):
            some = boxes[n, first : first + chunk]
            if keep:
                run(_locate_boxes, len(some), locate_grain, some, pool_size, layout, samples)
            to = (n * channels * total + first) * 4
            run(
                _align_strips, tiles * -(-len(some) // STRIP), align_grain,
                packed, layout, some, pool_size, samples, channels, total, output[to:], argmax[to:],
            )  # fmt: skip


class Gradient(NamedTuple):
    """The layout of the backward: flat outputs [N, C, 4K] or [N, 4K, C], gradient [N, 4C, H * W] or [N, H * W, 4C]."""

    height: int
    width: int
    channels: int
    block: int  # channels per work item
    row_stride: int  # of the outputs; a row is one edge of one box
    channel_stride: int
    pixel_stride: int  # of the gradient
    plane_stride: int


def border_align_backward(grad_output, boxes, argmax, height, width, pool_size):
    batch, channels, total = grad_output.shape[:3]
    real = compute_dtype(grad_output.dtype)
    memory = format_of(argmax)
    grad = empty_like_format((batch, 4 * channels, height, width), real, argmax)
    out_of_range = np.zeros(1, np.bool_)
    if memory == torch.channels_last:
        block = max(1, min(64, channels))  # neighbors are read together
        layout = Gradient(height, width, channels, block, channels, 1, 4 * channels, 1)
    else:
        block = max(1, min(16, channels))
        layout = Gradient(height, width, channels, block, 1, 4 * total, 1, height * width)
    run(
        _scatter, batch * 4 * -(-channels // block), max(1, VALUES_PER_THREAD // (16 * block * max(total, 1))),
        flat(grad_output, memory, real), as_numpy(boxes, real), flat(argmax, memory),
        layout, pool_size, flat(grad, memory), out_of_range,
    )  # fmt: skip
    if out_of_range[0]:
        refuse_argmax(pool_size)
    return grad.to(grad_output.dtype)


# Positions


@jit
def _neighbors(box, position, size):
    """The two pixels around a position on one axis, clamped to the map, and the share of the second."""
    real = box.dtype.type
    zero, last = real(0), real(size - 1)
    position = position if position > zero else zero
    position = position if position < last else last
    low = min(np.int64(position), size - 1)
    return low, min(low + 1, size - 1), real(position - real(low))


@jit
def _on_axis(box, position, size):
    real = box.dtype.type
    return position >= real(-1) and position <= real(size)


@jit
def _walk(box, edge, pool_size):
    """Start and stride along an edge, its fixed coordinate, and whether the box is finite."""
    x, y = (box[0], box[1]) if edge < 2 else (box[2], box[3])
    steps = box.dtype.type(pool_size)
    finite = np.isfinite(box[0]) and np.isfinite(box[1]) and np.isfinite(box[2]) and np.isfinite(box[3])
    if edge % 2 == 0:
        start, fixed, stride = x, y, (box[2] - box[0]) / steps
    else:
        start, fixed, stride = y, x, (box[3] - box[1]) / steps
    return start, (stride if edge < 2 else -stride), fixed, finite


@jit
def _samples(rows, pool_size, pixels):
    count = min(pool_size + 1, STEPS)
    offsets, weights = np.empty((rows, 4, count), np.intp), np.empty((rows, 4, count), pixels.dtype)
    return Samples(offsets, weights, np.empty((rows, 2), np.intp))


@jit
def _locate(box, row, first, pool_size, layout, samples):
    """Fill rows [row, row + 4), the edges of a box, with its samples from step `first` on."""
    real = box.dtype.type
    offsets, weights, spans = samples
    count = min(offsets.shape[2], pool_size + 1 - first)
    for edge in range(4):
        horizontal = edge % 2 == 0
        size, fixed_size = (layout.width, layout.height) if horizontal else (layout.height, layout.width)
        row_stride = layout.pixel_stride * layout.width
        along, across = (layout.pixel_stride, row_stride) if horizontal else (row_stride, layout.pixel_stride)
        start, stride, fixed, finite = _walk(box, edge, pool_size)
        begin, end = count, 0
        if finite and _on_axis(box, fixed, fixed_size):
            low, high, fixed_part = _neighbors(box, fixed, fixed_size)
            on_low, on_high, fixed_rest = low * across, high * across, real(1) - fixed_part
            # Upper right comes before lower left, and is one pixel further along a horizontal edge.
            second, third = (1, 2) if horizontal else (2, 1)
            for s in range(np.uint32(count)):
                position = start + real(np.int32(first + s)) * stride
                on_map = _on_axis(box, position, size)
                begin = min(begin, np.int64(s) if on_map else count)
                end = max(end, np.int64(s) + 1 if on_map else 0)
                low, high, part = _neighbors(box, position, size)
                rest = real(1) - part
                offsets[row, 0, s], weights[row, 0, s] = on_low + low * along, fixed_rest * rest
                offsets[row, second, s], weights[row, second, s] = on_low + high * along, fixed_rest * part
                offsets[row, third, s], weights[row, third, s] = on_high + low * along, fixed_part * rest
                offsets[row, 3, s], weights[row, 3, s] = on_high + high * along, fixed_part * part
        # Positions only ascend or only descend: samples on the map follow one another.
        spans[row, 0], spans[row, 1] = begin, max(begin, end)
        row += 1


# Forward


@jit
def _align_boxes(begin, end, pixels, layout, boxes, pool_size, output, argmax):
    """Boxes [begin, end) of [N, K] on a map [N, H * W, 4, C]; output, argmax [N, K, 4, C]."""
    samples = _samples(4, pool_size, pixels)
    image = layout.height * layout.width * layout.pixel_stride
    for item in range(begin, end):
        n, k = item // boxes.shape[1], item % boxes.shape[1]
        for first in range(0, pool_size + 1, STEPS):
            _locate(boxes[n, k], 0, first, pool_size, layout, samples)
            for edge in range(4):
                origin, to = n * image + edge * layout.edge_stride, (item * 4 + edge) * layout.channels
                _compete(pixels, origin, samples, edge, first, pool_size, output, argmax, to, layout.channels)


@jit
def _pack(begin, end, planes, channels, layout, packed):
    """planes [4, C, H * W] -> packed [tiles, 4, H * W, channels of a tile]; an item is one edge of one tile."""
    pixels = layout.height * layout.width
    for item in range(begin, end):
        c, edge = item // 4 * layout.channels, item % 4
        transpose(
            min(layout.channels, channels - c), pixels, planes, (edge * channels + c) * pixels, pixels,
            packed, item * layout.edge_stride, layout.pixel_stride,
        )  # fmt: skip


@jit
def _locate_boxes(begin, end, boxes, pool_size, layout, samples):
    for k in range(begin, end):
        _locate(boxes[k], 4 * k, 0, pool_size, layout, samples)


@jit
def _align_strips(begin, end, packed, layout, boxes, pool_size, samples, channels, total, output, argmax):
    """An item is one strip of boxes on one tile; output, argmax [C, 4K], of which these boxes are the first.

    `samples` of all boxes, or none: then they do not fit, and are located here.
    """
    tile, strips, located = layout.channels, -(-boxes.shape[0] // STRIP), samples.offsets.shape[0] > 0
    if not located:
        samples = _samples(4 * STRIP, pool_size, packed)
    values, steps = np.empty(STRIP * 4 * tile, output.dtype), np.empty(STRIP * 4 * tile, np.int32)
    for item in range(begin, end):
        c, first_box = item // strips * tile, item % strips * STRIP
        count = min(STRIP, boxes.shape[0] - first_box)
        first_row = 4 * first_box if located else 0
        for first in range(0, pool_size + 1, STEPS):
            if not located:
                for k in range(count):
                    _locate(boxes[first_box + k], 4 * k, first, pool_size, layout, samples)
            for row in range(4 * count):
                origin = (c // tile * 4 + row % 4) * layout.edge_stride
                _compete(packed, origin, samples, first_row + row, first, pool_size, values, steps, row * tile, tile)
        to, real_channels = (c * total + first_box) * 4, min(tile, channels - c)
        transpose(4 * count, real_channels, values, 0, tile, output, to, 4 * total)
        transpose(4 * count, real_channels, steps, 0, tile, argmax, to, 4 * total)


@inline
def _compete(pixels, origin, samples, row, first, pool_size, best, step_of_best, to, channels):
    """Let the samples of a row, from step `first` on, compete in all channels, with the maxima at best[to:]."""
    offsets, weights, spans = samples
    begin, end = spans[row, 0], spans[row, 1]
    if begin > 0:
        _compete_with_zero(first, best, step_of_best, to, channels)
    if begin < end:
        c = 0
        while c + 4 * LANES <= channels:
            four = c, c + LANES, c + 2 * LANES, c + 3 * LANES
            _keep_highest(pixels, origin, offsets, weights, row, first, begin, end, best, step_of_best, to, four)
            c += 4 * LANES
        while c < channels and channels >= LANES:
            one = (min(c, channels - LANES),)  # the last may cover some channels twice, with the same result
            _keep_highest(pixels, origin, offsets, weights, row, first, begin, end, best, step_of_best, to, one)
            c += LANES
        while c < channels:
            for s in range(begin, end):
                value = weights[row, 0, s] * pixels[origin + offsets[row, 0, s] + c]
                for corner in range(1, 4):
                    value += weights[row, corner, s] * pixels[origin + offsets[row, corner, s] + c]
                if first + s == 0 or value > best[to + c]:
                    best[to + c], step_of_best[to + c] = value, first + s
            c += 1
    if end < min(offsets.shape[2], pool_size + 1 - first):
        _compete_with_zero(first + end, best, step_of_best, to, channels)


@jit
def _compete_with_zero(step, best, step_of_best, to, channels):
    """A sample off the map is a 0 that competes. As the first sample it is the maximum so far."""
    zero, step = best.dtype.type(0), np.int32(step)
    for i in range(to, to + channels):
        if step == 0 or zero > best[i]:
            best[i], step_of_best[i] = zero, step


@intrinsic
def _keep_highest(
    typing_context, pixels, origin, offsets, weights, row, first, begin, end, best, step_of_best, to, channels
):
    """Let samples [begin, end) of a row compete in LANES channels from each of the `channels`, a tuple, on."""

    def generate(context, builder, signature, args):
        pixels, offsets, weights, best, step_of_best = (
            Array(context, builder, signature, args, i) for i in (0, 2, 3, 8, 9)
        )
        origin, row, first, begin, end, to = (args[i] for i in (1, 4, 5, 6, 7, 10))
        channels = cgutils.unpack_tuple(builder, args[11])

        def values(sample):
            """A vector per element of `channels`, summed in the reference's order, without fused multiply-adds."""
            totals = [None] * len(channels)
            for corner in range(4):
                offset = builder.add(origin, builder.load(offsets.at(row, origin.type(corner), sample)))
                weight = splat(builder, builder.load(weights.at(row, origin.type(corner), sample)))
                for i, c in enumerate(channels):
                    product = builder.fmul(weight, pixels.vector(pixels.at(builder.add(offset, c))))
                    totals[i] = builder.fadd(totals[i], product) if corner else product
            return totals

        targets = [builder.add(to, c) for c in channels]
        highest = [best.variable(best.at(target)) for target in targets]
        step_of_highest = [step_of_best.variable(step_of_best.at(target)) for target in targets]
        is_first = builder.icmp_signed("==", builder.add(first, begin), first.type(0))
        with builder.if_then(is_first):
            for i, value in enumerate(values(begin)):
                builder.store(value, highest[i])
                builder.store(ir.Constant(step_of_best.kind, None), step_of_highest[i])
        with cgutils.for_range(builder, end, start=builder.add(begin, builder.zext(is_first, begin.type))) as loop:
            step = splat(builder, builder.trunc(builder.add(first, loop.index), ir.IntType(32)))
            for i, value in enumerate(values(loop.index)):
                so_far = builder.load(highest[i])
                greater = builder.fcmp_ordered(">", value, so_far)
                builder.store(builder.select(greater, value, so_far), highest[i])
                builder.store(builder.select(greater, step, builder.load(step_of_highest[i])), step_of_highest[i])
        for i, target in enumerate(targets):
            best.put(highest[i], best.at(target))
            step_of_best.put(step_of_highest[i], step_of_best.at(target))
        return context.get_dummy_value()

    number = types.intp
    arrays, samples = (best, step_of_best), (number, number, number, number)
    return types.none(pixels, number, offsets, weights, *samples, *arrays, number, channels), generate


# Backward


@jit
def _scatter(begin, end, given, boxes, argmax, layout, pool_size, grad, out_of_range):
    """Write the gradient of the items [begin, end): each is the channels of one block, edge and image.

    No other item writes to these channels, so the sums come out in one order whatever the number of threads.
    """
    total, pixels, channels = boxes.shape[1], layout.height * layout.width, layout.channels
    blocks = -(-channels // layout.block)
    tile = np.empty((pixels, layout.block), grad.dtype)
    for item in range(begin, end):
        n, edge, first = item // (4 * blocks), item // blocks % 4, item % blocks * layout.block
        count = min(layout.block, channels - first)
        tile[:] = 0
        for k in range(total):
            read = n * 4 * channels * total + (4 * k + edge) * layout.row_stride + first * layout.channel_stride
            _add_row(boxes[n, k], edge, given, argmax, read, count, layout, pool_size, tile, out_of_range)
        _write_tile(
            tile, count, grad, n * 4 * channels * pixels + (edge * channels + first) * layout.plane_stride, layout
        )


@inline
def _add_row(box, edge, given, argmax, read, count, layout, pool_size, tile, out_of_range):
    """Add the gradients of `count` channels of one edge of a box, from given[read] on, to a tile [H * W, block]."""
    real = tile.dtype.type
    horizontal = edge % 2 == 0
    size, fixed_size = (layout.width, layout.height) if horizontal else (layout.height, layout.width)
    along, across = (1, layout.width) if horizontal else (layout.width, 1)
    start, stride, fixed, finite = _walk(box, edge, pool_size)
    on_map = finite and tile.shape[0] > 0 and _on_axis(box, fixed, fixed_size)
    low, high, fixed_part = _neighbors(box, fixed, fixed_size) if on_map else (0, 0, real(0))
    fixed_rest = real(1) - fixed_part
    on_low, on_high = low * across, high * across
    for c in range(count):
        step, value = argmax[read], given[read]
        read += layout.channel_stride
        if step < 0 or step > pool_size:
            out_of_range[0] = True
            continue
        position = start + real(step) * stride
        if not (on_map and _on_axis(box, position, size)):
            continue
        low, high, part = _neighbors(box, position, size)
        rest = real(1) - part
        low, high = low * along, high * along
        tile[on_low + low, c] += fixed_rest * rest * value
        tile[on_low + high, c] += fixed_rest * part * value
        tile[on_high + low, c] += fixed_part * rest * value
        tile[on_high + high, c] += fixed_part * part * value


@inline
def _write_tile(tile, count, grad, first, layout):
    """Write the first `count` channels of a tile to grad[first:]."""
    if layout.plane_stride == 1:
        for pixel in range(tile.shape[0]):
            to = first + pixel * layout.pixel_stride
            grad[to : to + count] = tile[pixel, :count]
    else:
        for c in range(count):
            to = first + c * layout.plane_stride
            grad[to : to + tile.shape[0]] = tile[:, c]
