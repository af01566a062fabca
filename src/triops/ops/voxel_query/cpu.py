"""voxel_query on CPU: each center reads its window of voxels in order, until it has k points."""

import numpy as np
import torch

from triops._cpu.jit import inline, jit
from triops._cpu.memory import as_numpy
from triops._cpu.threads import run
from triops._dtypes import compute_dtype
from triops.ops.voxel_query.reference import check_values

VOXELS_PER_THREAD = 50_000
FAR = 2**40  # voxels: beyond every grid and window, and far from where integers end


def voxel_query(points, centers, coords, voxel_rows, radius, k, max_range):
    check_values(points, coords, voxel_rows)
    real = compute_dtype(points.dtype)
    out = torch.empty((centers.shape[0], k), dtype=torch.int32)
    far = torch.tensor(radius, dtype=real).square().numpy()[()]
    window = int(np.prod([2 * reach + 1 for reach in max_range]))
    arrays = (as_numpy(t) for t in (points.to(real), centers.to(real), coords, voxel_rows))
    grain = max(1, VOXELS_PER_THREAD // window)
    run(_query, len(centers), grain, *arrays, far, np.array(max_range, np.int64), out.numpy())
    return out


@inline
def _place(coordinate):
    return min(max(np.int64(coordinate), -FAR), FAR)


@jit
def _query(begin, end, points, centers, coords, voxel_rows, far, max_range, out):
    k = out.shape[1]
    _, depth, height, width = voxel_rows.shape
    for q in range(begin, end):
        batch, z0, y0, x0 = coords[q, 0], _place(coords[q, 1]), _place(coords[q, 2]), _place(coords[q, 3])
        count = 0
        for z in range(max(z0 - max_range[0], 0), min(z0 + max_range[0] + 1, depth)):
            for y in range(max(y0 - max_range[1], 0), min(y0 + max_range[1] + 1, height)):
                for x in range(max(x0 - max_range[2], 0), min(x0 + max_range[2] + 1, width)):
                    row = voxel_rows[batch, z, y, x]
                    if row < 0 or count == k:
                        continue
                    dx = points[row, 0] - centers[q, 0]
                    dy = points[row, 1] - centers[q, 1]
                    dz = points[row, 2] - centers[q, 2]
                    if (dx * dx + dy * dy) + dz * dz <= far:
                        out[q, count] = row
                        count += 1
                if count == k:
                    break
        for slot in range(count, k):
            out[q, slot] = out[q, 0] if count > 0 else -1
