"""prroi_pool on CPU: the weights of the rows and columns of each bin are found once per box and serve all channels.

Forward and gradient of the map are sums over pixels with separable weights (see `_cpu.rois`). The gradient of the boxes
takes three sums per row of pixels: by the weights of its columns, and by what their hat functions are at both edges.
"""

from typing import NamedTuple

import numpy as np
import torch

from triops._cpu.jit import inline, jit
from triops._cpu.memory import as_numpy, clear, flat, in_huge_pages
from triops._cpu.rois import average, give_back_average
from triops._cpu.threads import run
from triops._dtypes import compute_dtype
from triops._rois import check_images, empty_in_format, empty_like_format, format_of
from triops.ops.prroi_pool.reference import cut

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


def prroi_pool(input, boxes, pooled_height, pooled_width, spatial_scale):
    check_images("prroi_pool", boxes, input.shape[0])
    _, channels, height, width = input.shape
    output = empty_like_format((boxes.shape[0], channels, pooled_height, pooled_width), input.dtype, input)
    if input.numel() == 0 or output.numel() == 0:
        return output.zero_()
    real, layout = compute_dtype(input.dtype), format_of(input)
    values = output if output.dtype == real else torch.empty_like(output, dtype=real)
    in_huge_pages(values)
    rules = Rules(channels, height, width, pooled_height, pooled_width, layout == torch.channels_last)
    grain = max(1, VALUES_PER_THREAD // (PIXELS * channels * pooled_height * pooled_width))
    bins = tuple(map(as_numpy, cut(boxes, pooled_height, pooled_width, spatial_scale, real)))
    run(_average, len(boxes), grain, flat(input, layout, real), as_numpy(boxes[:, 0].long()), bins, rules,
        flat(values, layout))  # fmt: skip
    if values is not output:
        output.copy_(values)
    return output


def prroi_pool_backward(grad_output, boxes, batch, height, width, spatial_scale, channels_last):
    check_images("prroi_pool_backward", boxes, batch)
    total, channels, rows, columns = grad_output.shape
    real = compute_dtype(grad_output.dtype)
    sums = clear(empty_in_format((batch, channels, height, width), real, grad_output.device, channels_last))
    if sums.numel() == 0 or grad_output.numel() == 0:
        return sums.to(grad_output.dtype)
    layout = torch.channels_last if channels_last else torch.contiguous_format
    rules = Rules(channels, height, width, rows, columns, channels_last)
    block = 4 * BLOCK if channels_last else BLOCK
    grain = max(1, VALUES_PER_THREAD // (PIXELS * min(block, channels) * rows * columns * -(-total // batch)))
    bins = tuple(map(as_numpy, cut(boxes, rows, columns, spatial_scale, real)))
    run(_give_back, batch * -(-channels // block), grain, flat(grad_output, layout, real),
        as_numpy(boxes[:, 0].long()), bins, rules, block, flat(sums, layout))  # fmt: skip
    return sums.to(grad_output.dtype)


def prroi_pool_boxes_backward(grad_output, input, boxes, spatial_scale):
    check_images("prroi_pool_boxes_backward", boxes, input.shape[0])
    real, layout = compute_dtype(input.dtype), format_of(input)
    grad = torch.zeros(boxes.shape, dtype=real)
    if input.numel() and grad_output.numel():
        _, channels, height, width = input.shape
        rows, columns = grad_output.shape[2:]
        rules = Rules(channels, height, width, rows, columns, layout == torch.channels_last)
        grain = max(1, VALUES_PER_THREAD // (3 * PIXELS * channels * rows * columns))
        bins = tuple(map(as_numpy, cut(boxes, rows, columns, spatial_scale, real)))
        run(_give_back_to_boxes, len(boxes), grain, flat(grad_output, layout, real), flat(input, layout, real),
            as_numpy(boxes[:, 0].long()), bins, rules, as_numpy(grad))  # fmt: skip
        grad[:, 1:] *= spatial_scale
    return grad.to(boxes.dtype)


@jit
def _find_taps(starts, length, size, firsts, pixels, weights, edges):
    """Pixels of each bin along an axis, their weights, and the hat function at both edges of the bin, less its mean.

    In float64: at the edges of a small bin the hat function is close to its mean.
    """
    real = weights.dtype.type
    count = 0
    for p in range(starts.shape[0]):
        firsts[p] = count
        first, last = np.float64(starts[p]), np.float64(starts[p] + length)
        low = np.int64(min(max(np.floor(first), 0.0), np.float64(size)))
        high = np.int64(min(max(np.ceil(last), -1.0), np.float64(size - 1)))
        for at in range(low, high + 1):
            pixel = np.float64(at)
            begin, end = max(pixel - 1, first), min(pixel, last)
            weight = max(end - begin, 0.0) * max(1 - abs((begin + end) / 2 - pixel), 0.0)
            begin, end = max(pixel, first), min(pixel + 1, last)
            weight += max(end - begin, 0.0) * max(1 - abs((begin + end) / 2 - pixel), 0.0)
            if weight > 0:
                mean = weight / (last - first)
                pixels[count], weights[count] = at, real(weight)
                edges[0, count] = real(max(1 - abs(first - pixel), 0.0) - mean)
                edges[1, count] = real(max(1 - abs(last - pixel), 0.0) - mean)
                count += 1
    firsts[starts.shape[0]] = count


@inline
def _empty_taps(rules, like):
    """Taps along y and x: of boxes far larger than the map, rounding may lay all of it into several bins."""
    most_y, most_x = rules.rows * rules.height, rules.columns * rules.width
    return (
        np.empty(rules.rows + 1, np.int64), np.empty(most_y, np.int64), np.empty(most_y, like.dtype),
        np.empty(rules.columns + 1, np.int64), np.empty(most_x, np.int64), np.empty(most_x, like.dtype),
    )  # fmt: skip


@inline
def _empty_edges(taps, like):
    return np.empty((2, taps[1].shape[0]), like.dtype), np.empty((2, taps[4].shape[0]), like.dtype)


@jit
def _box_taps(k, bins, rules, taps, edges):
    y, x, tall, wide, _ = bins
    _find_taps(y[k], tall[k], rules.height, taps[0], taps[1], taps[2], edges[0])
    _find_taps(x[k], wide[k], rules.width, taps[3], taps[4], taps[5], edges[1])


@jit
def _average(begin, end, input, images, bins, rules, output):
    area, size = bins[4], rules.channels * rules.rows * rules.columns
    taps = _empty_taps(rules, output)
    edges = _empty_edges(taps, output)
    for k in range(begin, end):
        if not area[k] > 0:
            output[k * size : (k + 1) * size] = 0
            continue
        _box_taps(k, bins, rules, taps, edges)
        average(input, images[k] * rules.channels * rules.height * rules.width, taps, rules, area[k], output, k * size)


@jit
def _give_back(begin, end, given, images, bins, rules, block, grad):
    """An item is a block of channels of one image."""
    area, blocks = bins[4], -(-rules.channels // block)
    taps, share = _empty_taps(rules, grad), np.empty(block, grad.dtype)
    edges = _empty_edges(taps, grad)
    for item in range(begin, end):
        n, first = item // blocks, item % blocks * block
        channels = min(block, rules.channels - first)
        for k in range(images.shape[0]):
            if images[k] == n and area[k] > 0:
                _box_taps(k, bins, rules, taps, edges)
                give_back_average(given, k, n, first, channels, taps, rules, area[k], share, grad)


@jit
def _give_back_to_boxes(begin, end, given, input, images, bins, rules, grad):
    """Sums in float64: there are as many terms as outputs of a box. Without the scale."""
    area = bins[4]
    taps = _empty_taps(rules, grad)
    edges = _empty_edges(taps, grad)
    firsts_y, pixels_y, weights_y, firsts_x, pixels_x, weights_x = taps
    edges_y, edges_x = edges
    real, size = grad.dtype.type, rules.rows * rules.columns
    pixel = rules.channels if rules.channels_last else 1
    plane = 1 if rules.channels_last else rules.height * rules.width
    for k in range(begin, end):
        if not area[k] > 0:
            continue
        _box_taps(k, bins, rules, taps, edges)
        image = images[k] * rules.channels * rules.height * rules.width
        for b in range(size):
            p, q = b // rules.columns, b % rules.columns
            x1, y1, x2, y2 = 0.0, 0.0, 0.0, 0.0
            for c in range(rules.channels):
                left, right, top, bottom = real(0), real(0), real(0), real(0)
                for i in range(firsts_y[p], firsts_y[p + 1]):
                    row = image + c * plane + pixels_y[i] * rules.width * pixel
                    across, at_left, at_right = real(0), real(0), real(0)
                    for j in range(firsts_x[q], firsts_x[q + 1]):
                        value = input[row + pixels_x[j] * pixel]
                        across += weights_x[j] * value
                        at_left += edges_x[0, j] * value
                        at_right += edges_x[1, j] * value
                    left += weights_y[i] * at_left
                    right += weights_y[i] * at_right
                    top += edges_y[0, i] * across
                    bottom += edges_y[1, i] * across
                read = (k * size + b) * rules.channels + c
                if not rules.channels_last:
                    read = (k * rules.channels + c) * size + b
                share = given[read] / area[k]
                x1 -= left * share
                x2 += right * share
                y1 -= top * share
                y2 += bottom * share
            u, v = q / rules.columns, (q + 1) / rules.columns
            grad[k, 1] += real(x1 * (1 - u) + x2 * (1 - v))
            grad[k, 3] += real(x1 * u + x2 * v)
            u, v = p / rules.rows, (p + 1) / rules.rows
            grad[k, 2] += real(y1 * (1 - u) + y2 * (1 - v))
            grad[k, 4] += real(y1 * u + y2 * v)
