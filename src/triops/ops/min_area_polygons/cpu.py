"""min_area_polygons on CPU. The arithmetic is that of `reference.py`, step by step."""

import numpy as np
import torch

from triops._cpu.jit import jit
from triops._cpu.memory import as_numpy
from triops._cpu.threads import run
from triops._dtypes import compute_dtype
from triops._geometry.polygon.cpu import CORNERS, HIGH_X, LOW_X, make_polygons

GRAIN = 200  # sets worth a thread


def min_area_polygons(pointsets):
    out = torch.empty((len(pointsets), 8), dtype=compute_dtype(pointsets.dtype))
    run(_rectangles, len(out), GRAIN, make_polygons(pointsets), as_numpy(out))
    return out.to(pointsets.dtype)


@jit
def _rectangles(begin, end, polygons, out):
    real = polygons.dtype.type
    zero, one = real(0), real(1)
    for i in range(begin, end):
        corners, row = polygons[i, CORNERS:], out[i]
        if not polygons[i, LOW_X] <= polygons[i, HIGH_X]:
            row[:] = np.nan
            continue
        origin_x, origin_y = corners[0], corners[1]
        best_area, best = real(np.inf), (one, zero, one, zero, zero, zero, zero)
        for k in range(0, len(corners), 2):
            after = k + 2 if k + 2 < len(corners) else 0
            x = (corners[after] - origin_x) - (corners[k] - origin_x)
            y = (corners[after + 1] - origin_y) - (corners[k + 1] - origin_y)
            if (x > zero) & (y >= zero):
                u, v = x, y
            elif (x <= zero) & (y > zero):
                u, v = y, -x
            elif (x < zero) & (y <= zero):
                u, v = -x, -y
            else:
                u, v = -y, x
            square = u * u + v * v
            left, right, bottom, top = zero, zero, zero, zero
            for n in range(2, len(corners), 2):
                x, y = corners[n] - origin_x, corners[n + 1] - origin_y
                along, across = x * u + y * v, y * u - x * v
                left, right = min(along, left), max(along, right)
                bottom, top = min(across, bottom), max(across, top)
            area = (right - left) * (top - bottom) / square
            if (square > zero) & (area < best_area):
                best_area, best = area, (u, v, square, left, right, bottom, top)
        u, v, square, left, right, bottom, top = best
        for c, (along, across) in enumerate(((right, bottom), (left, bottom), (left, top), (right, top))):
            row[2 * c] = origin_x + (along * u - across * v) / square
            row[2 * c + 1] = origin_y + (along * v + across * u) / square
