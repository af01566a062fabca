"""dynamic_scatter on CPU: a radix sort brings the points of a voxel together, and each voxel is reduced by itself.

The sort is stable, so a voxel adds its points up in ascending order, whatever the number of threads.
"""

import math

import numpy as np
import torch

from triops._box.reference import compute_dtype
from triops._half import as_bits, narrow, widen
from triops._launch import as_numpy, in_huge_pages, jit, run
from triops.ops.dynamic_scatter.reference import check_indices
from triops.ops.get_indice_pairs.submanifold.cpu import radix_sort

NUMBERS = 100_000  # of the features, worth a thread
MAX_KEY = 2**62
GROUP = 16  # channels: a cache line of float32


def dynamic_scatter_forward(features, coords, reduce):
    total, channels = features.shape
    rows_np = as_numpy(coords)
    keys, rows = _sorted_keys(rows_np, coords)
    starts = np.empty(len(rows) + 1, np.int32)
    voxels = _segments(keys, len(rows), starts)

    reduced = torch.empty((voxels, channels), dtype=features.dtype)
    voxel_coords = torch.empty((voxels, coords.shape[1]), dtype=coords.dtype)
    counts = torch.empty(voxels, dtype=torch.int32)
    point_to_voxel = torch.full((total,), -1, dtype=torch.int32)
    in_huge_pages(reduced)
    kernel = _maximum if reduce == "max" else _sum
    real = np.dtype(np.float64 if features.dtype == torch.float64 else np.float32)
    grain = max(1, NUMBERS * max(voxels, 1) // max(features.numel(), 1))
    run(kernel, voxels, grain, as_bits(features), rows, starts, np.zeros(1, real), reduce == "mean", as_bits(reduced))
    run(
        _describe, voxels, max(1, NUMBERS * max(voxels, 1) // max(len(rows), 1)), rows_np, rows, starts,
        voxel_coords.numpy(), counts.numpy(), point_to_voxel.numpy(),
    )  # fmt: skip
    return reduced, voxel_coords, point_to_voxel, counts


def dynamic_scatter_backward(grad_reduced, features, reduced, point_to_voxel, counts, reduce):
    total, channels = features.shape
    voxel = as_numpy(point_to_voxel)
    if _outside(voxel, grad_reduced.shape[0]):
        check_indices(point_to_voxel, grad_reduced.shape[0])
    grad_features = torch.empty((total, channels), dtype=features.dtype)
    in_huge_pages(grad_features)
    grad, target = as_bits(grad_reduced), as_bits(grad_features)
    if reduce == "max":
        taken = np.zeros((grad_reduced.shape[0], channels), np.bool_)
        groups = -(-channels // GROUP)
        grain = max(1, NUMBERS // max(total * GROUP, 1))
        run(_give_to_winners, groups, grain, grad, as_bits(features), as_bits(reduced), voxel, taken, target)
    else:
        divisor = as_numpy(counts.to(compute_dtype(features.dtype)))
        run(_give_to_all, total, max(1, NUMBERS // max(channels, 1)), grad, voxel, divisor, reduce == "mean", target)
    return grad_features


def _sorted_keys(rows_np, coords):
    """-> keys int64 [n + 1] and rows int32 [n] of the points that are kept, ascending by voxel, then by point."""
    highest = np.zeros(coords.shape[1], np.int64)
    kept = _extent(rows_np, highest)
    shape = [int(h) + 1 for h in highest]
    keys, rows = np.empty(kept + 1, np.int64), np.empty(kept, np.int32)
    if math.prod(shape) < MAX_KEY:
        strides = np.array([math.prod(shape[axis + 1 :]) for axis in range(len(shape))], np.int64)
        ascending = _keys(rows_np, strides, keys, rows)
        return (keys, rows) if ascending else radix_sort(keys, rows)
    inside = (coords >= 0).all(1)  # coordinates that no flat number can hold
    keys[:kept] = coords[inside].unique(dim=0, return_inverse=True)[1].numpy()
    rows[:] = inside.nonzero()[:, 0].numpy()
    return radix_sort(keys, rows)


@jit
def _extent(coords, highest):
    """The highest coordinates among rows without a negative one. -> how many rows that are"""
    kept = 0
    for i in range(coords.shape[0]):
        negative = False
        for d in range(coords.shape[1]):
            negative |= coords[i, d] < 0
        if not negative:
            kept += 1
            for d in range(coords.shape[1]):
                highest[d] = max(highest[d], np.int64(coords[i, d]))
    return kept


@jit
def _keys(coords, strides, keys, rows):
    n, before, ascending = 0, np.int64(-1), True
    for i in range(coords.shape[0]):
        key, negative = np.int64(0), False
        for d in range(coords.shape[1]):
            value = np.int64(coords[i, d])
            negative |= value < 0
            key += value * strides[d]
        if not negative:
            keys[n], rows[n] = key, i
            ascending &= key >= before
            before = key
            n += 1
    return ascending


@jit
def _segments(keys, count, starts):
    """Where the runs of equal keys begin, and the end behind them. -> how many runs"""
    n = 0
    for j in range(count):
        if j == 0 or keys[j] != keys[j - 1]:
            starts[n] = j
            n += 1
    starts[n] = count
    return n


@jit
def _describe(begin, end, coords, rows, starts, voxel_coords, counts, point_to_voxel):
    for v in range(begin, end):
        for d in range(coords.shape[1]):
            voxel_coords[v, d] = coords[rows[starts[v]], d]
        counts[v] = starts[v + 1] - starts[v]
        for j in range(starts[v], starts[v + 1]):
            point_to_voxel[rows[j]] = v


@jit
def _sum(begin, end, features, rows, starts, zero, mean, reduced):
    channels = np.uint64(features.shape[1])
    total = np.empty(features.shape[1], zero.dtype)
    for v in range(begin, end):
        row = np.uint64(rows[starts[v]])
        for c in range(channels):
            total[c] = widen(features[row, c])
        for j in range(starts[v] + 1, starts[v + 1]):
            row = np.uint64(rows[j])
            for c in range(channels):
                total[c] += widen(features[row, c])
        count = zero.dtype.type(starts[v + 1] - starts[v]) if mean else zero.dtype.type(1)
        for c in range(channels):
            reduced[v, c] = narrow(total[c] / count, reduced)


@jit
def _maximum(begin, end, features, rows, starts, zero, mean, reduced):
    channels = np.uint64(features.shape[1])
    best = np.empty(features.shape[1], zero.dtype)
    for v in range(begin, end):
        best[:] = -np.inf
        for j in range(starts[v], starts[v + 1]):
            row = np.uint64(rows[j])
            for c in range(channels):
                value = widen(features[row, c])
                best[c] = value if value > best[c] else best[c]  # NaN is above nothing
        for c in range(channels):
            reduced[v, c] = narrow(best[c], reduced)


@jit
def _outside(point_to_voxel, voxels):
    bad = False
    for i in range(len(point_to_voxel)):
        bad |= (point_to_voxel[i] < -1) | (point_to_voxel[i] >= voxels)
    return bad


@jit
def _give_to_all(begin, end, grad, point_to_voxel, counts, mean, grad_features):
    one = counts.dtype.type(1)
    channels = np.uint64(grad.shape[1])
    for i in range(begin, end):
        voxel = point_to_voxel[i]
        if voxel < 0:
            grad_features[i] = 0
            continue
        count = counts[voxel] if mean else one
        for c in range(channels):
            grad_features[i, c] = narrow(widen(grad[voxel, c]) / count, grad_features)


@jit
def _give_to_winners(begin, end, grad, features, reduced, point_to_voxel, taken, grad_features):
    """Points ascend, so the first that holds the maximum is the lowest. Threads share the channels."""
    zero = grad_features.dtype.type(0)
    first, last = np.uint64(begin * GROUP), np.uint64(min(end * GROUP, features.shape[1]))
    for i in range(features.shape[0]):
        voxel = point_to_voxel[i]
        if voxel < 0:
            grad_features[i, first:last] = 0
            continue
        at = np.uint64(voxel)
        for c in range(first, last):
            wins = (widen(features[i, c]) == widen(reduced[at, c])) & ~taken[at, c]
            grad_features[i, c] = grad[at, c] if wins else zero
            taken[at, c] |= wins
