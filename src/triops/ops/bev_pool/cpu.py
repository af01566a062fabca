"""bev_pool on CPU: threads share the cells, or in the backward the pixels; each sums its own points in their order.

So a sum is the same with any number of threads. The index is a counting sort.
"""

import numpy as np
import torch

from triops._cpu.half import as_bits, narrow, widen
from triops._cpu.jit import jit
from triops._cpu.memory import as_numpy, in_huge_pages
from triops._cpu.threads import run
from triops.ops.bev_pool.reference import check_index

NUMBERS = 100_000  # elements of features, read or written, worth a thread


def bev_pool_index(cells, num_cells):
    order = torch.empty(cells.shape[0], dtype=torch.int32)
    starts = torch.empty(num_cells + 1, dtype=torch.int32)
    _sort(as_numpy(cells), num_cells, np.zeros(num_cells + 2, np.int32), order.numpy(), starts.numpy())
    return order, starts


def bev_pool_forward(features, depth, cells, order, starts):
    num_cells, channels = starts.shape[0] - 1, features.shape[1]
    rows, begins = as_numpy(order), as_numpy(starts)
    if _outside(rows, begins):
        check_index(order, starts)
    out = torch.empty((num_cells, channels), dtype=features.dtype)
    in_huge_pages(out)
    values = as_bits(features)
    weights, depths, pixels = _weights(features, depth)
    grain = max(1, NUMBERS * max(num_cells, 1) // max(rows.shape[0] * channels, 1))
    run(_pool, num_cells, grain, values, weights, depths, pixels, rows, begins, _real(features), as_bits(out))
    return out


def bev_pool_backward(grad, features, depth, cells):
    channels = features.shape[1]
    grad_features = torch.empty(features.shape, dtype=features.dtype)
    in_huge_pages(grad_features)
    upstream, at = as_bits(grad), as_numpy(cells)
    if depth is None:
        grain = max(1, NUMBERS // max(channels, 1))
        run(_gather, len(at), grain, upstream, at, as_bits(grad_features))
        return grad_features, grad.new_empty(0)
    grad_depth = torch.empty(depth.shape, dtype=depth.dtype)
    weights, depths, pixels = _weights(features, depth)
    grain = max(1, NUMBERS // max(channels * depths, 1))
    run(
        _gradients, features.shape[0], grain, upstream, as_bits(features), weights, depths, pixels, at, _real(features),
        as_bits(grad_features), as_bits(grad_depth).reshape(-1),
    )  # fmt: skip
    return grad_features, grad_depth


def _weights(features, depth):
    """-> weights by point, empty without depth; depths and pixels per image."""
    if depth is None:
        return as_bits(features.new_empty(0)), 0, 1
    return as_bits(depth).reshape(-1), depth.shape[1], max(depth.shape[2], 1)


def _real(features):
    """An array of one element of the accumulator dtype."""
    return np.zeros(1, np.float64 if features.dtype == torch.float64 else np.float32)


@jit
def _sort(cells, num_cells, counts, order, starts):
    for i in range(cells.shape[0]):
        cell = np.int64(cells[i])
        counts[(cell if 0 <= cell < num_cells else num_cells) + 1] += 1
    for cell in range(num_cells + 1):
        counts[cell + 1] += counts[cell]
        starts[cell] = counts[cell]
    for i in range(cells.shape[0]):
        cell = np.int64(cells[i])
        if cell < 0 or cell >= num_cells:
            cell = num_cells
        order[counts[cell]] = i
        counts[cell] += 1


@jit
def _outside(order, starts):
    points, bad = order.shape[0], False
    for i in range(points):
        bad |= (order[i] < 0) | (order[i] >= points)
    for cell in range(starts.shape[0]):
        bad |= (starts[cell] < 0) | (starts[cell] > points)
        bad |= cell > 0 and starts[cell] < starts[cell - 1]
    return bad


@jit
def _pool(begin, end, features, weights, depths, pixels, order, starts, like, out):
    channels = np.uint64(features.shape[1])
    total = np.empty(features.shape[1], like.dtype)
    for cell in range(begin, end):
        total[:] = 0
        for k in range(starts[cell], starts[cell + 1]):
            point = np.uint64(order[k])
            if depths:
                at = np.uint32(point)  # a 32-bit division takes half the time
                row = np.uint64(at // np.uint32(depths * pixels) * np.uint32(pixels) + at % np.uint32(pixels))
                weight = like.dtype.type(widen(weights[point]))
                for c in range(channels):
                    total[c] += weight * widen(features[row, c])
            else:
                for c in range(channels):
                    total[c] += widen(features[point, c])
        for c in range(channels):
            out[cell, c] = narrow(total[c], out)


@jit
def _gather(begin, end, grad, cells, grad_features):
    zero = grad_features.dtype.type(0)
    for point in range(begin, end):
        cell = np.int64(cells[point])
        if 0 <= cell < grad.shape[0]:
            grad_features[point] = grad[cell]
        else:
            grad_features[point] = zero


@jit
def _gradients(begin, end, grad, features, weights, depths, pixels, cells, like, grad_features, grad_weights):
    """A row is a pixel: it and its weights get their gradients from the cells of its points, one per depth."""
    channels = np.uint64(features.shape[1])
    total = np.empty(features.shape[1], like.dtype)
    for row in range(begin, end):
        total[:] = 0
        image, pixel = row // pixels, row % pixels
        for d in range(depths):
            point = np.uint64((image * depths + d) * pixels + pixel)
            cell = np.int64(cells[point])
            product = like.dtype.type(0)
            if 0 <= cell < grad.shape[0]:
                weight, at = like.dtype.type(widen(weights[point])), np.uint64(cell)
                for c in range(channels):
                    upstream = widen(grad[at, c])
                    total[c] += weight * upstream
                    product += upstream * widen(features[row, c])
            grad_weights[point] = narrow(product, grad_weights)
        for c in range(channels):
            grad_features[row, c] = narrow(total[c], grad_features)
