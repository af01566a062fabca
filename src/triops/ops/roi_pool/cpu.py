"""roi_pool on CPU: rows and columns of the bins are found once per box and serve all channels.

Planes of an NCHW map are read four at a time, which gives the processor four chains of comparisons at once; a
channels-last map is read in vectors of channels.

Backward: a thread takes channels of one image, so that no two add to one pixel, and walks the boxes in order.
"""

from typing import NamedTuple

import numpy as np
import torch

from triops._cpu.jit import jit
from triops._cpu.memory import as_numpy, flat, in_huge_pages, zeros
from triops._cpu.threads import run
from triops._dtypes import compute_dtype
from triops._rois import check_images, empty_in_format, format_of
from triops.ops.roi_pool.reference import LOWEST, NONE, bins, empty_outputs

VALUES_PER_THREAD = 100_000
PIXELS = 16  # guess of the pixels of a bin
BLOCK = 16  # channels per work item of the backward


class Rules(NamedTuple):
    channels: int
    height: int
    width: int
    rows: int  # of bins
    columns: int
    channels_last: bool


def roi_pool_forward(input, boxes, pooled_height, pooled_width, spatial_scale):
    check_images("roi_pool", boxes, input.shape[0])
    output, argmax = empty_outputs(input, boxes, pooled_height, pooled_width)
    if input.numel() == 0 or output.numel() == 0:
        return output.zero_(), argmax.fill_(NONE)
    real = compute_dtype(input.dtype)
    layout = format_of(input)
    values = output if output.dtype == real else torch.empty_like(output, dtype=real)
    in_huge_pages(values)
    in_huge_pages(argmax)
    _, channels, height, width = input.shape
    rules = Rules(channels, height, width, pooled_height, pooled_width, layout == torch.channels_last)
    edges = bins(boxes, pooled_height, pooled_width, spatial_scale, height, width, input.dtype)
    grain = max(1, VALUES_PER_THREAD // (PIXELS * channels * pooled_height * pooled_width))
    run(_maximum, len(boxes), grain, flat(input.to(real), layout), as_numpy(boxes[:, 0].long()),
        *map(as_numpy, edges), rules, flat(values, layout), flat(argmax, layout))  # fmt: skip
    if values is not output:
        output.copy_(values)
    return output, argmax


def roi_pool_backward(grad_output, boxes, argmax, batch, height, width, channels_last):
    check_images("roi_pool_backward", boxes, batch)
    total, channels, rows, columns = grad_output.shape
    real = compute_dtype(grad_output.dtype)
    out = empty_in_format((batch, channels, height, width), grad_output.dtype, grad_output.device, channels_last)
    if out.numel() == 0 or grad_output.numel() == 0:
        return out.zero_()
    layout = torch.channels_last if channels_last else torch.contiguous_format
    rules = Rules(channels, height, width, rows, columns, channels_last)
    sums = zeros(out.numel(), dtype=real)
    block = 4 * BLOCK if channels_last else BLOCK
    grain = max(1, VALUES_PER_THREAD // (min(block, channels) * rows * columns * -(-total // batch)))
    run(_give_back, batch * -(-channels // block), grain, flat(grad_output.to(real), layout),
        as_numpy(boxes[:, 0].long()), flat(argmax, layout), rules, block, as_numpy(sums))  # fmt: skip
    if channels_last:
        return sums.view(batch, height, width, channels).permute(0, 3, 1, 2).to(grad_output.dtype)
    return sums.view(out.shape).to(grad_output.dtype)


@jit
def _maximum(begin, end, input, images, tops, bottoms, lefts, rights, rules, output, argmax):
    plane, size = rules.height * rules.width, rules.channels * rules.rows * rules.columns
    for k in range(begin, end):
        image, rows, columns = images[k] * rules.channels * plane, (tops[k], bottoms[k]), (lefts[k], rights[k])
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
def _give_back(begin, end, given, images, argmax, rules, block, grad):
    blocks, bins, plane = -(-rules.channels // block), rules.rows * rules.columns, rules.height * rules.width
    pixel = rules.channels if rules.channels_last else 1
    for item in range(begin, end):
        n, first = item // blocks, item % blocks * block
        last = min(first + block, rules.channels)
        for k in range(images.shape[0]):
            if images[k] != n:
                continue
            if rules.channels_last:
                for b in range(bins):
                    read = (k * bins + b) * rules.channels
                    for c in range(first, last):
                        at = np.int64(argmax[read + c])
                        if 0 <= at < plane:
                            grad[n * rules.channels * plane + at * pixel + c] += given[read + c]
                continue
            for c in range(first, last):
                read, to = (k * rules.channels + c) * bins, (n * rules.channels + c) * plane
                for b in range(read, read + bins):
                    at = np.int64(argmax[b])
                    if 0 <= at < plane:
                        grad[to + at] += given[b]
