"""vector_pool_pairs on CPU: each center tests the points of its cloud, once to count and once to write."""

import math

import numpy as np
import torch

from triops._clouds import check_ascending
from triops._cpu.jit import jit
from triops._cpu.memory import as_numpy
from triops._cpu.threads import run
from triops._dtypes import compute_dtype
from triops.ops.vector_pool.reference import ranges_of_centers

TESTS = 100_000  # pairs worth a thread


def vector_pool_pairs(points, centers, offsets, center_offsets, radius, grid, k, ball):
    check_ascending("vector_pool", "offsets", offsets, len(points))
    check_ascending("vector_pool", "center_offsets", center_offsets, len(centers))
    real = compute_dtype(points.dtype)
    place, center = (as_numpy(t, real) for t in (points, centers))
    ranges = (r.numpy() for r in ranges_of_centers(len(points), len(centers), offsets, center_offsets))
    reach = place.dtype.type(radius)
    # Points of a row: as many as there are, or k.
    before = np.zeros(len(center) + 1, np.int64)
    args = (place, center, *ranges, reach, tuple(grid), k, ball, before)
    grain = max(1, TESTS // max(len(points), 1))
    run(_pairs, len(center), grain, *args, np.empty((0, 3), np.int32))
    before[1:] = before[1:].cumsum()
    out = torch.empty((int(before[-1]), 3), dtype=torch.int32)
    if len(out):
        run(_pairs, len(center), grain, *args, out.numpy())
    return out


@jit
def _pairs(begin, end, points, centers, starts, stops, reach, grid, k, ball, before, out):
    """Without room in `out`, how many pairs center m has, in before[m + 1]; else the pairs themselves."""
    real = type(reach)
    writing = out.shape[0] > 0
    size_x, size_y, size_z = (reach * real(2)) / real(grid[0]), (reach * real(2)) / real(grid[1]), (
        reach * real(2)) / real(grid[2])  # fmt: skip
    last_cell = grid[0] * grid[1] * grid[2] - 1
    for m in range(begin, end):
        cx, cy, cz = centers[m, 0], centers[m, 1], centers[m, 2]
        found = 0
        for i in range(starts[m], stops[m]):
            x, y, z = points[i, 0] - cx, points[i, 1] - cy, points[i, 2] - cz
            if ball:
                near = (x * x + y * y) + z * z <= reach * reach
            else:
                near = (abs(x) <= reach) & (abs(y) <= reach) & (abs(z) <= reach)
            if near:
                if writing:
                    cell = np.int64(math.floor((x + reach) / size_x)) * grid[1]
                    cell = (cell + np.int64(math.floor((y + reach) / size_y))) * grid[2]
                    cell = cell + np.int64(math.floor((z + reach) / size_z))
                    row = before[m] + found
                    out[row, 0], out[row, 1] = i, m
                    out[row, 2] = min(max(cell, 0), last_cell)
                found += 1
                if found == k:
                    break
        if not writing:
            before[m + 1] = found
