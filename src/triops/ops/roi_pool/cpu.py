"""roi_pool on CPU: rows and columns of the bins are found once per box and serve all channels.

Planes of an NCHW map are read four at a time, which gives the processor four chains of comparisons at once; a
channels-last map is read in vectors of channels.

Backward: a thread takes channels of one image, so that no two add to one pixel, and walks the boxes in order.
"""

from typing import NamedTuple

import numpy as np
import torch

from triops._cpu.addresses import ELEMENTS, array_at, laid
from triops._cpu.jit import jit
from triops._cpu.memory import in_huge_pages
from triops._cpu.rois import as_arrays, on_images, worth_tiles
from triops._cpu.threads import run
from triops._cpu.vectors import LANES, take_maxima, transpose
from triops._dtypes import compute_dtype
from triops._rois import empty_in_format, format_of, no_image
from triops.ops.roi_pool.reference import LOWEST, NONE, empty_outputs

VALUES_PER_THREAD = 100_000
PIXELS = 16  # guess of the pixels of a bin
BLOCK = 16  # channels per work item of the backward
PLACE = np.empty(0, np.int32)  # by which a kernel knows the element type of `argmax`


class Rules(NamedTuple):
    batch: int
    channels: int
    height: int
    width: int
    rows: int  # of bins
    columns: int
    channels_last: bool


def roi_pool_forward(input, boxes, pooled_height, pooled_width, spatial_scale):
    real, layout = compute_dtype(input.dtype), format_of(input)
    batch, channels, height, width = input.shape
    rows, total, like = laid(boxes, real), boxes.shape[0], ELEMENTS[real]
    if not on_images(rows.data_ptr(), total, batch, like):
        raise no_image("roi_pool", batch)
    output, argmax = empty_outputs(input, boxes, pooled_height, pooled_width)
    if input.numel() == 0 or output.numel() == 0:
        return output.zero_(), argmax.fill_(NONE)
    maps = laid(input, real, layout)
    values = output if output.dtype is real else torch.empty_like(output, dtype=real)
    in_huge_pages(values)
    in_huge_pages(argmax)
    rules = batch, channels, height, width, pooled_height, pooled_width, layout == torch.channels_last
    reads = PIXELS * total * pooled_height * pooled_width
    operands = maps.data_ptr(), rows.data_ptr(), values.data_ptr(), total, spatial_scale, like
    if layout != torch.channels_last and worth_tiles(reads, batch, height, width):
        work = LANES * (height * width + reads // batch)
        items, grain = batch * -(-channels // LANES), max(1, VALUES_PER_THREAD // work)
        run(_maximum_tiles, items, grain, *operands, argmax.data_ptr(), *rules)
    else:
        grain = max(1, VALUES_PER_THREAD * total // (reads * channels))
        run(_maximum, total, grain, *operands, argmax.data_ptr(), *rules)
    if values is not output:
        output.copy_(values)
    return output, argmax


def roi_pool_backward(grad_output, boxes, argmax, batch, height, width, channels_last):
    total, channels, rows, columns = grad_output.shape
    real = compute_dtype(grad_output.dtype)
    boxes, like = laid(boxes, real), ELEMENTS[real]
    if not on_images(boxes.data_ptr(), total, batch, like):
        raise no_image("roi_pool_backward", batch)
    sums = empty_in_format((batch, channels, height, width), real, grad_output.device, channels_last)
    if sums.numel() > 0:
        in_huge_pages(sums)
        layout = torch.channels_last if channels_last else torch.contiguous_format
        given, places = laid(grad_output, real, layout), laid(argmax, torch.int32, layout)
        # Of a channels-last gradient every block reads the same lines: as few blocks as there are threads.
        block = max(4 * BLOCK, channels // torch.get_num_threads()) if channels_last else BLOCK
        work = min(block, channels) * (rows * columns * -(-total // batch) + height * width // LANES + 1)
        run(_give_back, batch * -(-channels // block), VALUES_PER_THREAD // work + 1, given.data_ptr(),
            boxes.data_ptr(), sums.data_ptr(), total, like, places.data_ptr(), block, batch, channels, height, width,
            rows, columns, channels_last)  # fmt: skip
    return sums if sums.dtype is grad_output.dtype else sums.to(grad_output.dtype)


@jit
def _empty_edges(rules):
    return (
        np.empty(rules.rows, np.int64), np.empty(rules.rows, np.int64), np.empty(rules.columns, np.int64),
        np.empty(rules.columns, np.int64),
    )  # fmt: skip


@jit
def _find_edges(box, scale, rules, edges):
    """First rows of the bins of a box, the rows behind their last, and columns likewise; as `bins` of the reference."""
    real, one = scale.dtype.type, scale.dtype.type(1)
    left, top = box[1] * scale[0], box[2] * scale[0]
    width, height = (box[3] + one) * scale[0] - left, (box[4] + one) * scale[0] - top
    finite = np.isfinite(left) and np.isfinite(top) and np.isfinite(width) and np.isfinite(height)
    readable = finite and width > 0 and height > 0
    for start, extent, size, begins, ends in (
        (top, height, rules.height, edges[0], edges[1]), (left, width, rules.width, edges[2], edges[3]),
    ):  # fmt: skip
        pooled = len(begins)
        length, last = extent / real(pooled), np.float32(size)
        for p in range(pooled):
            begin = np.floor(np.float32(real(p) * length + start))
            end = np.ceil(np.float32((real(p) + one) * length + start))
            begins[p] = np.int64(min(max(begin, np.float32(0)), last)) if readable else 0
            ends[p] = np.int64(min(max(end, np.float32(0)), last)) if readable else 0


@jit
def _maximum_tiles(begin, end, maps, boxes, values, total, scale, like, argmax, *rules):
    """An item is a tile: LANES channels of one image, side by side."""
    rules = Rules(*rules)
    input, boxes, output, scale = as_arrays(maps, boxes, values, total, scale, like, rules)
    argmax = array_at(argmax, len(output), PLACE)
    real, bins, plane = output.dtype.type, rules.rows * rules.columns, rules.height * rules.width
    edges = _empty_edges(rules)
    tops, bottoms, lefts, rights = edges
    tile, best = np.zeros((plane, LANES), output.dtype), np.empty((bins, LANES), output.dtype)
    places = np.empty((bins, LANES), np.int32)
    blocks = -(-rules.channels // LANES)
    for item in range(begin, end):
        n, first = item // blocks, item % blocks * LANES
        channels = min(LANES, rules.channels - first)
        transpose(channels, plane, input, (n * rules.channels + first) * plane, plane, tile.reshape(-1), 0, LANES)
        for k in range(boxes.shape[0]):
            if np.int64(boxes[k, 0]) != n:
                continue
            _find_edges(boxes[k], scale, rules, edges)
            places[:] = NONE
            for p in range(rules.rows):
                for q in range(rules.columns):
                    b, left, right = p * rules.columns + q, lefts[q], rights[q]
                    best[b] = real(LOWEST) if tops[p] < bottoms[p] and left < right else real(0)
                    for i in range(tops[p], bottoms[p]):
                        take_maxima(best, places, b, tile, i * rules.width + left, i * rules.width + right)
            to = (k * rules.channels + first) * bins
            transpose(bins, channels, best.reshape(-1), 0, LANES, output, to, bins)
            transpose(bins, channels, places.reshape(-1), 0, LANES, argmax, to, bins)


@jit
def _maximum(begin, end, maps, boxes, values, total, scale, like, argmax, *rules):
    rules = Rules(*rules)
    input, boxes, output, scale = as_arrays(maps, boxes, values, total, scale, like, rules)
    argmax = array_at(argmax, len(output), PLACE)
    plane, size = rules.height * rules.width, rules.channels * rules.rows * rules.columns
    edges = _empty_edges(rules)
    for k in range(begin, end):
        _find_edges(boxes[k], scale, rules, edges)
        image, rows, columns = np.int64(boxes[k, 0]) * rules.channels * plane, edges[:2], edges[2:]
        if rules.channels_last:
            _maximum_vectors(input, image, rows, columns, rules, output, argmax, k * size)
            continue
        c = 0
        while c + 4 <= rules.channels:
            _maximum_planes(input, image + c * plane, plane, rows, columns, rules, output, argmax, k * size, c)
            c += 4
        while c < rules.channels:
            _maximum_planes(input, image + c * plane, 0, rows, columns, rules, output, argmax, k * size, c)
            c += 1


@jit
def _maximum_planes(input, first, plane, rows, columns, rules, output, argmax, to, c):
    """Four planes from input[first] on, or with plane = 0 one of them four times."""
    real = output.dtype.type
    to += c * rules.rows * rules.columns
    step = rules.rows * rules.columns if plane > 0 else 0
    for p in range(rules.rows):
        for q in range(rules.columns):
            top, bottom, left, right = rows[0][p], rows[1][p], columns[0][q], columns[1][q]
            start = real(LOWEST) if top < bottom and left < right else real(0)
            b0, b1, b2, b3 = start, start, start, start
            a0, a1, a2, a3 = np.int32(NONE), np.int32(NONE), np.int32(NONE), np.int32(NONE)
            for i in range(top, bottom):
                for pixel in range(i * rules.width + left, i * rules.width + right):
                    at, here = first + pixel, np.int32(pixel)
                    v0, v1, v2, v3 = input[at], input[at + plane], input[at + 2 * plane], input[at + 3 * plane]
                    if v0 > b0:
                        b0, a0 = v0, here
                    if v1 > b1:
                        b1, a1 = v1, here
                    if v2 > b2:
                        b2, a2 = v2, here
                    if v3 > b3:
                        b3, a3 = v3, here
            output[to], argmax[to] = b0, a0
            output[to + step], argmax[to + step] = b1, a1
            output[to + 2 * step], argmax[to + 2 * step] = b2, a2
            output[to + 3 * step], argmax[to + 3 * step] = b3, a3
            to += 1


@jit
def _maximum_vectors(input, image, rows, columns, rules, output, argmax, to):
    real = output.dtype.type
    channels = np.uint64(rules.channels)
    for p in range(rules.rows):
        for q in range(rules.columns):
            top, bottom, left, right = rows[0][p], rows[1][p], columns[0][q], columns[1][q]
            best, at = output[to : to + rules.channels], argmax[to : to + rules.channels]
            best[:] = real(LOWEST) if top < bottom and left < right else real(0)
            at[:] = NONE
            for i in range(top, bottom):
                for j in range(left, right):
                    pixel = i * rules.width + j
                    values, here = input[image + pixel * rules.channels :], np.int32(pixel)
                    for c in range(channels):
                        greater = values[c] > best[c]
                        best[c] = values[c] if greater else best[c]
                        at[c] = here if greater else at[c]
            to += rules.channels


@jit
def _give_back(begin, end, given, boxes, sums, total, like, argmax, block, *rules):
    rules = Rules(*rules)
    grad, boxes, given, _ = as_arrays(sums, boxes, given, total, 1.0, like, rules)
    argmax = array_at(argmax, len(given), PLACE)
    blocks, bins, plane = -(-rules.channels // block), rules.rows * rules.columns, rules.height * rules.width
    pixels = np.uint64(plane)
    for item in range(begin, end):
        n, first = item // blocks, item % blocks * block
        last = min(first + block, rules.channels)
        if rules.channels_last:
            for pixel in range(n * plane, (n + 1) * plane):
                grad[pixel * rules.channels + first : pixel * rules.channels + last] = 0
        else:
            grad[(n * rules.channels + first) * plane : (n * rules.channels + last) * plane] = 0
        for k in range(boxes.shape[0]):
            if np.int64(boxes[k, 0]) != n:
                continue
            if rules.channels_last:
                image = np.uint64(n * rules.channels * plane)
                for b in range(bins):
                    read = np.uint64((k * bins + b) * rules.channels)
                    for c in range(np.uint64(first), np.uint64(last)):
                        at = np.uint64(np.int64(argmax[read + c]))  # a negative one is huge
                        if at < pixels:
                            grad[image + at * np.uint64(rules.channels) + c] += given[read + c]
                continue
            # The bins of a block of channels lie one behind the other.
            read, to = np.uint64((k * rules.channels + first) * bins), np.uint64((n * rules.channels + first) * plane)
            for _ in range(first, last):
                for b in range(read, read + np.uint64(bins)):
                    at = np.uint64(np.int64(argmax[b]))
                    if at < pixels:
                        grad[to + at] += given[b]
                read += np.uint64(bins)
                to += pixels
