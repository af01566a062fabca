"""Convex polygons, for Triton. The arithmetic is that of `reference.py`, step by step.

Kernels that use these must be launched with `enable_fp_fusion=False`.
"""

import torch
import triton
import triton.language as tl

from triops import _gpu
from triops._dtypes import compute_dtype
from triops._geometry.polygon.reference import SLACK as _SLACK
from triops._gpu.arithmetic import divide

BLOCK = _gpu.block(32, interpreted=512)
SLACK = tl.constexpr(_SLACK)
CORNERS = tl.constexpr(5)  # rows before those of the corners


def make_polygons(points):
    """The hulls of points [N, 2K] -> [5 + 2K, N]: bounds, area, and x and y of each corner."""
    count, fields = points.shape
    made = torch.empty((5 + fields, count), dtype=compute_dtype(points.dtype), device=points.device)
    if count:
        _hulls_kernel[(_gpu.cdiv(count, BLOCK),)](
            points.contiguous(), made, count,
            K=fields // 2, LANES=_gpu.next_power_of_2(fields // 2), BLOCK=BLOCK, num_warps=1, enable_fp_fusion=False,
        )  # fmt: skip
    return made


@_gpu.kernel
def _hulls_kernel(points, made, count, K: tl.constexpr, LANES: tl.constexpr, BLOCK: tl.constexpr):
    REAL: tl.constexpr = made.dtype.element_ty
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    lane = tl.arange(0, LANES)[None, :]
    mask = (i < count)[:, None] & (lane < K)
    at = points + i[:, None] * (2 * K) + 2 * lane
    x, y = tl.load(at, mask, 0.0).to(REAL), tl.load(at + 1, mask, 0.0).to(REAL)
    finite = tl.sum(((x * 0 + y * 0) == 0).to(tl.int32), 1) == LANES
    x, y = tl.where(finite[:, None], x, 0.0), tl.where(finite[:, None], y, 0.0)
    valid = lane < K
    low_x, high_x = tl.min(tl.where(valid, x, float("inf")), 1), tl.max(tl.where(valid, x, float("-inf")), 1)
    low_y, high_y = tl.min(tl.where(valid, y, float("inf")), 1), tl.max(tl.where(valid, y, float("-inf")), 1)
    first_x = tl.max(tl.where(valid & (y == low_y[:, None]), x, float("-inf")), 1)
    last_x = tl.min(tl.where(valid & (y == high_y[:, None]), x, float("inf")), 1)
    corner_x = tl.zeros((BLOCK, LANES), REAL) + first_x[:, None]
    corner_y = tl.zeros((BLOCK, LANES), REAL) + low_y[:, None]
    found, doubled = tl.zeros((BLOCK,), tl.int32), tl.zeros((BLOCK,), REAL)
    before_x, before_y = tl.zeros((BLOCK,), REAL), tl.zeros((BLOCK,), REAL)
    for side in tl.static_range(2):  # up along the right side, then down along the left one
        if side == 0:
            sign = 1.0
            here_x, here_y, end_x, end_y = first_x, low_y, last_x, high_y
        else:
            sign = -1.0
            here_x, here_y, end_x, end_y = last_x, high_y, first_x, low_y
        going = tl.full((BLOCK,), 1, tl.int32)
        for _ in range(K):
            rise = (y - here_y[:, None]) * sign
            above = valid & (rise > 0)
            slope = divide((x - here_x[:, None]) * sign, tl.where(above, rise, 1.0))
            slope = tl.where(above, slope, float("-inf"))
            flattest = above & (slope == tl.max(slope, 1)[:, None])
            furthest = tl.max(tl.where(flattest, rise, 0.0), 1)
            chosen = tl.min(tl.where(flattest & (rise == furthest[:, None]), lane, LANES), 1)
            moving = chosen < LANES
            emitted = (going != 0) & (moving | (here_x != end_x) | (here_y != end_y))
            place = emitted[:, None] & (lane == found[:, None])
            corner_x = tl.where(place, here_x[:, None], corner_x)
            corner_y = tl.where(place, here_y[:, None], corner_y)
            step = before_x * (here_y - low_y) - before_y * (here_x - first_x)
            doubled += tl.where(emitted & (found > 0), step, 0.0)
            before_x = tl.where(emitted, here_x - first_x, before_x)
            before_y = tl.where(emitted, here_y - low_y, before_y)
            found += emitted.to(tl.int32)
            going = going & moving.to(tl.int32)
            following = (lane == chosen[:, None]).to(REAL)
            here_x = tl.where(moving, tl.sum(x * following, 1), here_x)
            here_y = tl.where(moving, tl.sum(y * following, 1), here_y)
    inside, step = i < count, tl.cast(count, tl.int64)
    out = made + i
    tl.store(out, tl.where(finite, low_x, float("inf")), inside)
    tl.store(out + step, tl.where(finite, low_y, float("inf")), inside)
    tl.store(out + 2 * step, tl.where(finite, high_x, float("-inf")), inside)
    tl.store(out + 3 * step, tl.where(finite, high_y, float("-inf")), inside)
    tl.store(out + 4 * step, doubled * 0.5, inside)
    corner = out[:, None] + (2 * lane + CORNERS).to(tl.int64) * step
    tl.store(corner, corner_x, mask)
    tl.store(corner + step, corner_y, mask)


@triton.jit
def load_bounds(polygons, i, mask, count):
    """low_x, low_y, high_x, high_y of polygons `i`; where masked off, of one that reaches nowhere."""
    at, step = polygons + i, tl.cast(count, tl.int64)
    return (
        tl.load(at, mask, float("inf")), tl.load(at + step, mask, float("inf")),
        tl.load(at + 2 * step, mask, float("-inf")), tl.load(at + 3 * step, mask, float("-inf")),
    )  # fmt: skip


@triton.jit
def shared_bounds(p_bounds, q_bounds):
    """Bounds of where two bounding boxes overlap."""
    return (
        _maximum(p_bounds[0], q_bounds[0]), _maximum(p_bounds[1], q_bounds[1]),
        _minimum(p_bounds[2], q_bounds[2]), _minimum(p_bounds[3], q_bounds[3]),
    )  # fmt: skip


@triton.jit
def overlap(
    p, i, p_mask, p_count, p_bounds, q, j, q_mask, q_count, q_bounds,
    P_CORNERS: tl.constexpr, Q_CORNERS: tl.constexpr, OVER_UNION: tl.constexpr,
):  # fmt: skip
    """Of polygons `i` of p and `j` of q, which broadcast."""
    low_x, low_y, high_x, high_y = shared_bounds(p_bounds, q_bounds)
    near = (low_x < high_x) & (low_y < high_y)
    middle_x = tl.where(near, (low_x + high_x) * 0.5, 0.0)
    middle_y = tl.where(near, (low_y + high_y) * 0.5, 0.0)
    extent = _maximum(tl.abs(p_bounds[0] - middle_x), 0.0)
    extent = _maximum(tl.abs(p_bounds[2] - middle_x), extent)
    extent = _maximum(tl.abs(q_bounds[0] - middle_x), extent)
    extent = _maximum(tl.abs(q_bounds[2] - middle_x), extent)
    extent = _maximum(tl.abs(p_bounds[1] - middle_y), extent)
    extent = _maximum(tl.abs(p_bounds[3] - middle_y), extent)
    extent = _maximum(tl.abs(q_bounds[1] - middle_y), extent)
    extent = _maximum(tl.abs(q_bounds[3] - middle_y), extent)
    slack = extent * (SLACK * 2.0**-52) if extent.dtype == tl.float64 else extent * (SLACK * 2.0**-23)
    doubled = _inside(p, i, p_mask, p_count, q, j, q_mask, q_count, middle_x, middle_y, slack, P_CORNERS, Q_CORNERS)
    doubled += _inside(q, j, q_mask, q_count, p, i, p_mask, p_count, middle_x, middle_y, -slack, Q_CORNERS, P_CORNERS)
    p_area = tl.load(p + i + 4 * tl.cast(p_count, tl.int64), p_mask, 0.0)
    q_area = tl.load(q + j + 4 * tl.cast(q_count, tl.int64), q_mask, 0.0)
    shared = _minimum(_minimum(doubled * 0.5, p_area), q_area)
    shared = tl.where(near & (shared > 0), shared, 0.0)
    base = p_area + q_area - shared if OVER_UNION else tl.broadcast_to(p_area, shared.shape)
    ratio = divide(shared, base)
    return tl.where(ratio > 0, ratio, 0.0)


@triton.jit
def _inside(
    p, i, p_mask, p_count, q, j, q_mask, q_count, middle_x, middle_y, slack,
    P_CORNERS: tl.constexpr, Q_CORNERS: tl.constexpr,
):  # fmt: skip
    """Twice the area between the parts of the sides of p in q, grown by `slack`, and the middle."""
    total = tl.zeros_like(middle_x)
    for k in range(P_CORNERS):
        x, y = _corner(p, i, p_mask, p_count, k, middle_x, middle_y)
        next_x, next_y = _corner(p, i, p_mask, p_count, (k + 1) % P_CORNERS, middle_x, middle_y)
        first, last = tl.zeros_like(total), tl.full(total.shape, 1.0, total.dtype)
        outside = tl.zeros(total.shape, tl.int32)
        for n in range(Q_CORNERS):
            corner_x, corner_y = _corner(q, j, q_mask, q_count, n, middle_x, middle_y)
            end_x, end_y = _corner(q, j, q_mask, q_count, (n + 1) % Q_CORNERS, middle_x, middle_y)
            side_x, side_y = end_x - corner_x, end_y - corner_y
            grow = slack * (tl.abs(side_x) + tl.abs(side_y))
            begin = (side_x * (y - corner_y) - side_y * (x - corner_x)) + grow
            end = (side_x * (next_y - corner_y) - side_y * (next_x - corner_x)) + grow
            at = divide(begin, begin - end)
            first = tl.where((begin < 0) & (end >= 0), _maximum(at, first), first)
            last = tl.where((begin >= 0) & (end < 0), _minimum(at, last), last)
            outside |= ((begin < 0) & (end < 0)).to(tl.int32)
        part = tl.where((outside != 0) | (last < first), 0.0, last - first)
        total += part * (x * (next_y - y) - y * (next_x - x))
    return total


@triton.jit
def _corner(polygons, i, mask, count, k, middle_x, middle_y):
    step = tl.cast(count, tl.int64)
    at = polygons + i + (2 * k + CORNERS) * step
    return tl.load(at, mask, 0.0) - middle_x, tl.load(at + step, mask, 0.0) - middle_y


@triton.jit
def _minimum(a, b):
    return tl.where(a < b, a, b)


@triton.jit
def _maximum(a, b):
    return tl.where(a > b, a, b)
