"""min_area_polygons on GPU: a launch for the hulls and one for the rectangles, a thread per set.

The arithmetic is that of `reference.py`, step by step.
"""

import torch
import triton
import triton.language as tl

from triops import _gpu
from triops._geometry.polygon.gpu import CORNERS, load_bounds, make_polygons
from triops._gpu.arithmetic import divide

BLOCK = _gpu.block(64, interpreted=1024)


def min_area_polygons(pointsets):
    count, fields = pointsets.shape
    out = torch.empty((count, 8), dtype=pointsets.dtype, device=pointsets.device)
    if count:
        _rectangles_kernel[(_gpu.cdiv(count, BLOCK),)](
            make_polygons(pointsets), out, count, K=fields // 2, BLOCK=BLOCK, num_warps=2, enable_fp_fusion=False
        )
    return out


@_gpu.kernel
def _rectangles_kernel(polygons, out, count, K: tl.constexpr, BLOCK: tl.constexpr):
    REAL: tl.constexpr = polygons.dtype.element_ty
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside, step = i < count, tl.cast(count, tl.int64)
    corners = polygons + i + CORNERS * step
    origin_x, origin_y = tl.load(corners, inside, 0.0), tl.load(corners + step, inside, 0.0)
    best_area = tl.full((BLOCK,), float("inf"), REAL)
    best_u, best_v, best_square = tl.full((BLOCK,), 1.0, REAL), tl.zeros((BLOCK,), REAL), tl.full((BLOCK,), 1.0, REAL)
    best_left, best_right = tl.zeros((BLOCK,), REAL), tl.zeros((BLOCK,), REAL)
    best_bottom, best_top = tl.zeros((BLOCK,), REAL), tl.zeros((BLOCK,), REAL)
    for k in range(K):
        x, y = _corner(corners, k, step, inside, origin_x, origin_y)
        after_x, after_y = _corner(corners, (k + 1) % K, step, inside, origin_x, origin_y)
        x, y = after_x - x, after_y - y
        first, second, third = (x > 0) & (y >= 0), (x <= 0) & (y > 0), (x < 0) & (y <= 0)
        u = tl.where(first, x, tl.where(second, y, tl.where(third, -x, -y)))
        v = tl.where(first, y, tl.where(second, -x, tl.where(third, -y, x)))
        square = u * u + v * v
        left, right = tl.zeros((BLOCK,), REAL), tl.zeros((BLOCK,), REAL)
        bottom, top = tl.zeros((BLOCK,), REAL), tl.zeros((BLOCK,), REAL)
        for n in range(1, K):
            x, y = _corner(corners, n, step, inside, origin_x, origin_y)
            along, across = x * u + y * v, y * u - x * v
            left, right = tl.where(along < left, along, left), tl.where(along > right, along, right)
            bottom, top = tl.where(across < bottom, across, bottom), tl.where(across > top, across, top)
        area = divide((right - left) * (top - bottom), square)
        better = (square > 0) & (area < best_area)
        best_area = tl.where(better, area, best_area)
        best_u, best_v = tl.where(better, u, best_u), tl.where(better, v, best_v)
        best_square = tl.where(better, square, best_square)
        best_left, best_right = tl.where(better, left, best_left), tl.where(better, right, best_right)
        best_bottom, best_top = tl.where(better, bottom, best_bottom), tl.where(better, top, best_top)
    low_x, _, high_x, _ = load_bounds(polygons, i, inside, count)
    finite = low_x <= high_x
    place = (origin_x, origin_y, best_u, best_v, best_square, finite)
    row = out + i * 8
    _store(row, best_right, best_bottom, place, inside)
    _store(row + 2, best_left, best_bottom, place, inside)
    _store(row + 4, best_left, best_top, place, inside)
    _store(row + 6, best_right, best_top, place, inside)


@triton.jit
def _corner(corners, k, step, mask, origin_x, origin_y):
    at = corners + (2 * k) * step
    return tl.load(at, mask, 0.0) - origin_x, tl.load(at + step, mask, 0.0) - origin_y


@triton.jit
def _store(at, along, across, place, mask):
    origin_x, origin_y, u, v, square, finite = place
    x = origin_x + divide(along * u - across * v, square)
    y = origin_y + divide(along * v + across * u, square)
    tl.store(at, tl.where(finite, x, float("nan")).to(at.dtype.element_ty), mask)
    tl.store(at + 1, tl.where(finite, y, float("nan")).to(at.dtype.element_ty), mask)
