"""points_in_polygons on CPU: a point meets the edges of those polygons alone whose height it is at."""

import numpy as np
import torch

from triops._cpu.jit import jit
from triops._cpu.memory import as_numpy, zeros
from triops._cpu.threads import run
from triops._dtypes import compute_dtype

PAIRS_PER_THREAD = 50_000


def points_in_polygons(points, polygons):
    real = compute_dtype(points.dtype)
    out = zeros(points.shape[0], polygons.shape[0], dtype=torch.bool)
    if out.numel():
        corners = as_numpy(polygons, real)
        low, high = corners[:, 1::2].min(1), corners[:, 1::2].max(1)
        low[~np.isfinite(corners).all(1)] = np.inf  # no point is that high
        grain = max(1, PAIRS_PER_THREAD // len(corners))
        run(_inside, len(points), grain, as_numpy(points, real), corners, low, high, out.numpy())
    return out


@jit
def _inside(begin, end, points, polygons, low, high, out):
    for n in range(begin, end):
        px, py = points[n, 0], points[n, 1]
        if not (np.isfinite(px) and np.isfinite(py)):
            continue
        for m in range(polygons.shape[0]):
            if py < low[m] or py > high[m]:
                continue
            odd = False
            for i in range(4):
                j = (i + 3) % 4
                sx, sy, tx, ty = polygons[m, 2 * i], polygons[m, 2 * i + 1], polygons[m, 2 * j], polygons[m, 2 * j + 1]
                if (sx == px and sy == py) or (tx == px and ty == py):
                    break
                if (sy < py and ty >= py) or (sy >= py and ty < py):
                    at = sx + (py - sy) * (tx - sx) / (ty - sy)
                    if at == px:
                        break
                    odd ^= at > px
            out[n, m] = odd
