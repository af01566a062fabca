"""roi_align on CPU.

A mean of bilinear samples is separable: the samples of a bin become pixels with weights ("taps") along y and along x,
each pixel once, and the bin is the sum over both. Taps are found once per box and serve all channels. Planes of an
NCHW map are read four at a time, which shares the loads of taps among them; a channels-last map is read in vectors of
channels. A maximum needs every sample by itself; they too are located once per box.

Backward: a thread takes channels of one image, so that no two add to one pixel, and walks the boxes in order.
"""

from typing import NamedTuple

import numpy as np
import torch

from triops._cpu.addresses import ELEMENTS, array_at, laid
from triops._cpu.jit import inline, jit
from triops._cpu.memory import clear, in_huge_pages
from triops._cpu.rois import (
    as_arrays,
    average,
    average_tile,
    cut_box,
    empty_lists,
    give_back_average,
    give_back_tile,
    neighbors,
    on_images,
    samples_within,
    worth_tiles,
)
from triops._cpu.threads import run
from triops._cpu.vectors import LANES, transpose
from triops._dtypes import compute_dtype
from triops._rois import empty_in_format, format_of, no_image
from triops.ops.roi_align.reference import LOWEST, NOWHERE, empty_outputs

VALUES_PER_THREAD = 100_000  # channels times taps worth a thread
BLOCK = 16  # channels per work item of the backward
MOST_LISTED = 16  # samples of a bin along an axis, of which a list of all its pixels is short


class Rules(NamedTuple):
    batch: int
    channels: int
    height: int
    width: int
    rows: int  # of bins
    columns: int
    ratio: int
    aligned: bool
    channels_last: bool


def roi_align_forward(input, boxes, pooled_height, pooled_width, spatial_scale, sampling_ratio, aligned, mode):
    real, layout = compute_dtype(input.dtype), format_of(input)
    batch, channels, height, width = input.shape
    rows, total, like = laid(boxes, real), boxes.shape[0], ELEMENTS[real]
    if not on_images(rows.data_ptr(), total, batch, like):
        raise no_image("roi_align", batch)
    output, *positions = empty_outputs(input, boxes, pooled_height, pooled_width, mode)
    if input.numel() == 0 or output.numel() == 0:
        return output.zero_(), *(p.fill_(NOWHERE) for p in positions)
    maps = laid(input, real, layout)
    values = output if output.dtype is real else torch.empty_like(output, dtype=real)
    in_huge_pages(values)
    sizes = batch, channels, height, width, pooled_height, pooled_width, max(sampling_ratio, 0)
    rules = *sizes, bool(aligned), layout is torch.channels_last
    operands = maps.data_ptr(), rows.data_ptr(), values.data_ptr(), total, spatial_scale, like
    tiles = _tiles(total, *sizes) if mode == "avg" and layout is not torch.channels_last else None
    if tiles:
        run(_average_tiles, *tiles, *operands, *rules)
    else:
        grain = max(1, VALUES_PER_THREAD // (16 * channels * pooled_height * pooled_width))
        if mode == "avg":
            run(_average, total, grain, *operands, *rules)
        else:
            run(_maximum, total, grain, *operands, *(p.data_ptr() for p in positions), *rules)
    if values is not output:
        output.copy_(values)
    return output, positions[0], positions[1]


def roi_align_backward(
    grad_output, boxes, argmax_y, argmax_x, batch, height, width, spatial_scale, sampling_ratio, aligned, mode,
    channels_last,
):  # fmt: skip
    total, channels, rows, columns = grad_output.shape
    real = compute_dtype(grad_output.dtype)
    boxes, like = laid(boxes, real), ELEMENTS[real]
    if not on_images(boxes.data_ptr(), boxes.shape[0], batch, like):
        raise no_image("roi_align_backward", batch)
    sums = empty_in_format((batch, channels, height, width), real, grad_output.device, channels_last)
    if sums.numel() == 0 or grad_output.numel() == 0:
        return sums.zero_().to(grad_output.dtype)
    layout = torch.channels_last if channels_last else torch.contiguous_format
    sizes = batch, channels, height, width, rows, columns, max(sampling_ratio, 0)
    rules = *sizes, bool(aligned), channels_last
    given = laid(grad_output, real, layout)
    operands = given.data_ptr(), boxes.data_ptr(), sums.data_ptr(), total, spatial_scale, like
    tiles = _tiles(total, *sizes) if mode == "avg" and not channels_last else None
    if tiles:
        in_huge_pages(sums)
        run(_give_back_tiles, *tiles, *operands, *rules)
    else:
        block = 4 * BLOCK if channels_last else BLOCK
        items = batch * -(-channels // block)
        grain = max(1, VALUES_PER_THREAD // (16 * min(block, channels) * rows * columns * -(-total // batch)))
        clear(sums)
        if mode == "avg":
            run(_give_back_average, items, grain, *operands, block, *rules)
        else:
            found = laid(argmax_y, real, layout), laid(argmax_x, real, layout)
            run(_give_back_maximum, items, grain, *operands, *(f.data_ptr() for f in found), block, *rules)
    return sums if sums.dtype is grad_output.dtype else sums.to(grad_output.dtype)


def _tiles(total, batch, channels, height, width, rows, columns, ratio):
    """Of an NCHW map: the number of tiles and how many are worth a thread; None where tiles do not pay."""
    bins, plane = total * rows * columns, height * width
    if ratio > MOST_LISTED or plane >= 2**31:  # a list of a bin's taps would be long, or not in 32 bits
        return None
    if not worth_tiles(bins * (4 * ratio * ratio or 16), batch, height, width):  # the pixels of a bin
        return None
    values = LANES * (plane + 16 * rows * columns * -(-total // batch))
    return batch * -(-channels // LANES), max(1, VALUES_PER_THREAD // values)


# Positions


@jit
def _find_taps(start, length, samples, pooled, size, ratio, firsts, pixels, weights):
    """Pixels and weights of each bin along an axis: those of bin p are [firsts[p], firsts[p + 1])."""
    real = weights.dtype.type
    count = np.int64(0)
    for p in range(pooled):
        firsts[p] = first = count
        base = start + real(p) * length
        begin, end = samples_within(base, length, samples, -1, size, ratio)
        for i in range(begin, end):
            position = base + (real(i) + real(0.5)) * length / real(samples)
            on_map, low, high, part = neighbors(position, size, weights)
            if not on_map:
                continue
            # Positions ascend unless the box is turned around: what is already there are the last one or two.
            at = count
            if count > first and pixels[count - 1] == low:
                at = count - 1
            elif count > first + 1 and pixels[count - 2] == low:
                at = count - 2
            for pixel, weight in ((low, real(1) - part), (high, part)):
                if at > first and at == count and pixels[at - 1] == pixel:
                    at -= 1
                if at == count:
                    pixels[at], weights[at] = pixel, real(0)
                    count += 1
                weights[at] += weight
                at += 1
    firsts[pooled] = count


@jit
def _most_taps(pooled, size, ratio):
    return pooled * (2 * ratio if ratio > 0 else size) + 2


@jit
def _box_taps(box, scale, rules, taps):
    """Fill the taps of a box along y and x -> the number of samples per bin, at least 1; 0 for a box off the map."""
    firsts_y, pixels_y, weights_y, firsts_x, pixels_x, weights_x = taps
    y, length_y, samples_y, finite_y = cut_box(box[2], box[4], scale, rules.aligned, rules.rows, rules.ratio)
    x, length_x, samples_x, finite_x = cut_box(box[1], box[3], scale, rules.aligned, rules.columns, rules.ratio)
    if not (finite_y and finite_x):
        return scale.dtype.type(0)
    _find_taps(y, length_y, samples_y, rules.rows, rules.height, rules.ratio, firsts_y, pixels_y, weights_y)
    _find_taps(x, length_x, samples_x, rules.columns, rules.width, rules.ratio, firsts_x, pixels_x, weights_x)
    real = scale.dtype.type
    return max(real(samples_y) * real(samples_x), real(1))


@jit
def _most_in_bin(rules):
    """Taps of one bin, along y and x together."""
    return _most_taps(1, rules.height, rules.ratio) * _most_taps(1, rules.width, rules.ratio)


@inline
def _empty_taps(rules, like):
    most_y = _most_taps(rules.rows, rules.height, rules.ratio)
    most_x = _most_taps(rules.columns, rules.width, rules.ratio)
    return (
        np.empty(rules.rows + 1, np.int64), np.empty(most_y, np.int64), np.empty(most_y, like.dtype),
        np.empty(rules.columns + 1, np.int64), np.empty(most_x, np.int64), np.empty(most_x, like.dtype),
    )  # fmt: skip


# Forward


@jit
def _average(begin, end, maps, boxes, values, total, scale, like, *rules):
    rules = Rules(*rules)
    input, boxes, output, scale = as_arrays(maps, boxes, values, total, scale, like, rules)
    taps = _empty_taps(rules, output)
    size = rules.channels * rules.rows * rules.columns
    for k in range(begin, end):
        count = _box_taps(boxes[k], scale, rules, taps)
        if count == 0:
            output[k * size : (k + 1) * size] = 0
            continue
        image = np.int64(boxes[k, 0]) * rules.channels * rules.height * rules.width
        average(input, image, taps, rules, count, output, k * size)


@jit
def _average_tiles(begin, end, maps, boxes, values, total, scale, like, *rules):
    """An item is a tile: LANES channels of one image."""
    rules = Rules(*rules)
    input, boxes, output, scale = as_arrays(maps, boxes, values, total, scale, like, rules)
    taps, bins, plane = _empty_taps(rules, output), rules.rows * rules.columns, rules.height * rules.width
    tile, sums = np.zeros((plane, LANES), output.dtype), np.empty((bins, LANES), output.dtype)
    blocks = -(-rules.channels // LANES)
    for item in range(begin, end):
        n, first = item // blocks, item % blocks * LANES
        channels = min(LANES, rules.channels - first)
        transpose(channels, plane, input, (n * rules.channels + first) * plane, plane, tile.reshape(-1), 0, LANES)
        for k in range(boxes.shape[0]):
            if np.int64(boxes[k, 0]) != n:
                continue
            to = (k * rules.channels + first) * bins
            count = _box_taps(boxes[k], scale, rules, taps)
            if count == 0:
                output[to : to + channels * bins] = 0
                continue
            average_tile(tile, taps, rules, count, sums, channels, output, to)


@jit
def _maximum(begin, end, maps, boxes, values, total, scale, like, argmax_y, argmax_x, *rules):
    """Every sample in the order of rows; those further off the map are skipped, as one 0 stands for all of them."""
    rules = Rules(*rules)
    input, boxes, output, scale = as_arrays(maps, boxes, values, total, scale, like, rules)
    argmax_y, argmax_x = array_at(argmax_y, len(output), like), array_at(argmax_x, len(output), like)
    real = output.dtype.type
    bins = rules.rows * rules.columns
    pixel = rules.channels if rules.channels_last else 1
    plane = 1 if rules.channels_last else rules.height * rules.width
    step = 1 if rules.channels_last else bins
    for k in range(begin, end):
        box = boxes[k]
        y0, length_y, samples_y, finite_y = cut_box(box[2], box[4], scale, rules.aligned, rules.rows, rules.ratio)
        x0, length_x, samples_x, finite_x = cut_box(box[1], box[3], scale, rules.aligned, rules.columns, rules.ratio)
        image = np.int64(box[0]) * rules.channels * rules.height * rules.width
        for b in range(bins):
            to = (k * bins + b) * rules.channels if rules.channels_last else k * rules.channels * bins + b
            place = to, step, rules.channels
            _start(output, argmax_y, argmax_x, place, real(LOWEST) if finite_y and finite_x else real(0))
            if samples_y == 0 or samples_x == 0:
                continue
            base_y = y0 + real(b // rules.columns) * length_y
            base_x = x0 + real(b % rules.columns) * length_x
            begin_y, end_y = samples_within(base_y, length_y, samples_y, -1, rules.height, rules.ratio)
            begin_x, end_x = samples_within(base_x, length_x, samples_x, -1, rules.width, rules.ratio)
            if begin_y > 0 or begin_x > 0:
                _compete_with_zero(output, argmax_y, argmax_x, place)
            for i in range(begin_y, end_y):
                y = base_y + (real(i) + real(0.5)) * length_y / real(samples_y)
                on_y, low_y, high_y, part_y = neighbors(y, rules.height, output)
                for j in range(begin_x, end_x):
                    x = base_x + (real(j) + real(0.5)) * length_x / real(samples_x)
                    on_x, low_x, high_x, part_x = neighbors(x, rules.width, output)
                    if not (on_y and on_x):
                        _compete_with_zero(output, argmax_y, argmax_x, place)
                        continue
                    rest_y, rest_x = real(1) - part_y, real(1) - part_x
                    w0, w1, w2, w3 = rest_y * rest_x, rest_y * part_x, part_y * rest_x, part_y * part_x
                    o0 = image + (low_y * rules.width + low_x) * pixel
                    o1 = image + (low_y * rules.width + high_x) * pixel
                    o2 = image + (high_y * rules.width + low_x) * pixel
                    o3 = image + (high_y * rules.width + high_x) * pixel
                    for c in range(rules.channels):
                        value = w0 * input[o0 + c * plane]
                        value += w1 * input[o1 + c * plane]
                        value += w2 * input[o2 + c * plane]
                        value += w3 * input[o3 + c * plane]
                        if value > output[to + c * step]:
                            output[to + c * step] = value
                            argmax_y[to + c * step] = y
                            argmax_x[to + c * step] = x
                if end_x < samples_x:
                    _compete_with_zero(output, argmax_y, argmax_x, place)
            if end_y < samples_y:
                _compete_with_zero(output, argmax_y, argmax_x, place)


@jit
def _start(output, argmax_y, argmax_x, place, value):
    to, step, channels = place
    for c in range(channels):
        output[to + c * step] = value
        argmax_y[to + c * step] = argmax_x[to + c * step] = NOWHERE


@jit
def _compete_with_zero(output, argmax_y, argmax_x, place):
    """A sample off the map is a 0 that competes."""
    to, step, channels = place
    zero = output.dtype.type(0)
    for c in range(channels):
        if zero > output[to + c * step]:
            output[to + c * step] = zero
            argmax_y[to + c * step] = argmax_x[to + c * step] = NOWHERE


# Backward


@jit
def _give_back_average(begin, end, given, boxes, sums, total, scale, like, block, *rules):
    """An item is a block of channels of one image."""
    rules = Rules(*rules)
    grad, boxes, given, scale = as_arrays(sums, boxes, given, total, scale, like, rules)
    taps, share = _empty_taps(rules, grad), np.empty(block, grad.dtype)
    blocks = -(-rules.channels // block)
    for item in range(begin, end):
        n, first = item // blocks, item % blocks * block
        channels = min(block, rules.channels - first)
        for k in range(boxes.shape[0]):
            if np.int64(boxes[k, 0]) != n:
                continue
            count = _box_taps(boxes[k], scale, rules, taps)
            if count == 0:
                continue
            give_back_average(given, k, n, first, channels, taps, rules, count, share, grad)


@jit
def _give_back_tiles(begin, end, given, boxes, sums, total, scale, like, *rules):
    """An item is a tile: LANES channels of one image."""
    rules = Rules(*rules)
    grad, boxes, given, scale = as_arrays(sums, boxes, given, total, scale, like, rules)
    taps, bins, plane = _empty_taps(rules, grad), rules.rows * rules.columns, rules.height * rules.width
    lists = empty_lists(_most_in_bin(rules), grad)
    tile, shares = np.empty((plane, LANES), grad.dtype), np.zeros((bins, LANES), grad.dtype)
    blocks = -(-rules.channels // LANES)
    for item in range(begin, end):
        n, first = item // blocks, item % blocks * LANES
        channels = min(LANES, rules.channels - first)
        tile[:] = 0
        for k in range(boxes.shape[0]):
            if np.int64(boxes[k, 0]) != n:
                continue
            count = _box_taps(boxes[k], scale, rules, taps)
            if count > 0:
                read = (k * rules.channels + first) * bins
                give_back_tile(given, read, taps, rules, count, lists, shares, channels, tile)
        transpose(plane, channels, tile.reshape(-1), 0, LANES, grad, (n * rules.channels + first) * plane, plane)


@jit
def _give_back_maximum(begin, end, given, boxes, sums, total, scale, like, argmax_y, argmax_x, block, *rules):
    rules = Rules(*rules)
    grad, boxes, given, _ = as_arrays(sums, boxes, given, total, scale, like, rules)
    argmax_y, argmax_x = array_at(argmax_y, len(given), like), array_at(argmax_x, len(given), like)
    real = grad.dtype.type
    blocks, bins, plane = -(-rules.channels // block), rules.rows * rules.columns, rules.height * rules.width
    pixel = rules.channels if rules.channels_last else 1
    for item in range(begin, end):
        n, first = item // blocks, item % blocks * block
        for k in range(boxes.shape[0]):
            if np.int64(boxes[k, 0]) != n:
                continue
            for c in range(first, min(first + block, rules.channels)):
                to = n * rules.channels * plane + (c if rules.channels_last else c * plane)
                for b in range(bins):
                    read = (
                        (k * bins + b) * rules.channels + c
                        if rules.channels_last
                        else (k * rules.channels + c) * bins + b
                    )
                    on_y, low_y, high_y, part_y = neighbors(argmax_y[read], rules.height, grad)
                    on_x, low_x, high_x, part_x = neighbors(argmax_x[read], rules.width, grad)
                    if not (on_y and on_x):
                        continue
                    value, rest_y, rest_x = given[read], real(1) - part_y, real(1) - part_x
                    grad[to + (low_y * rules.width + low_x) * pixel] += rest_y * rest_x * value
                    grad[to + (low_y * rules.width + high_x) * pixel] += rest_y * part_x * value
                    grad[to + (high_y * rules.width + low_x) * pixel] += part_y * rest_x * value
                    grad[to + (high_y * rules.width + high_x) * pixel] += part_y * part_x * value
