"""Convex polygons, for Numba. The arithmetic is that of `reference.py`, step by step."""

import numpy as np

from triops._cpu.intrinsics import maximum, minimum
from triops._cpu.jit import jit
from triops._cpu.memory import as_numpy
from triops._dtypes import compute_dtype
from triops._geometry.polygon.reference import SLACK

# Columns of an array of polygons [N, 5 + 2K], of which the last 2K are x and y of the corners.
LOW_X, LOW_Y, HIGH_X, HIGH_Y, AREA, CORNERS = range(6)


def make_polygons(points):
    """The hulls of points [N, 2K] -> [N, 5 + 2K]."""
    points = as_numpy(points, compute_dtype(points.dtype))
    made = np.empty((len(points), CORNERS + points.shape[1]), points.dtype)
    hulls(points, made)
    return made


@jit
def hulls(points, out):
    real = points.dtype.type
    count = points.shape[1] // 2
    for n in range(points.shape[0]):
        row, made = points[n], out[n]
        finite = True
        for k in range(2 * count):
            finite &= np.isfinite(row[k])
        if not finite:
            made[:] = real(0)
            made[LOW_X], made[LOW_Y], made[HIGH_X], made[HIGH_Y] = np.inf, np.inf, -np.inf, -np.inf
            continue
        low_x, low_y, high_x, high_y = row[0], row[1], row[0], row[1]
        for k in range(1, count):
            low_x, high_x = minimum(row[2 * k], low_x), maximum(row[2 * k], high_x)
            low_y, high_y = minimum(row[2 * k + 1], low_y), maximum(row[2 * k + 1], high_y)
        made[LOW_X], made[LOW_Y], made[HIGH_X], made[HIGH_Y] = low_x, low_y, high_x, high_y
        first, last = real(-np.inf), real(np.inf)  # x of the lowest corner on the right, of the highest one on the left
        for k in range(count):
            if row[2 * k + 1] == low_y:
                first = maximum(row[2 * k], first)
            if row[2 * k + 1] == high_y:
                last = minimum(row[2 * k], last)
        for k in range(count):
            made[CORNERS + 2 * k], made[CORNERS + 2 * k + 1] = first, low_y
        found, doubled = _chain(row, real(1), first, low_y, last, high_y, made, 0, real(0))
        found, doubled = _chain(row, real(-1), last, high_y, first, low_y, made, found, doubled)
        made[AREA] = doubled * real(0.5)


@jit
def _chain(row, sign, x, y, end_x, end_y, made, found, doubled):
    """Corners from (x, y) on, up along the right side; with a sign of -1 down along the left side."""
    going = True
    while going:
        best, best_rise, next_x, next_y = type(x)(-np.inf), type(x)(0), x, y
        for k in range(len(row) // 2):
            rise = (row[2 * k + 1] - y) * sign
            if rise > 0:
                slope = ((row[2 * k] - x) * sign) / rise
                if (slope > best) | ((slope == best) & (rise > best_rise)):
                    best, best_rise, next_x, next_y = slope, rise, row[2 * k], row[2 * k + 1]
        going = best_rise > 0
        if going | (x != end_x) | (y != end_y):
            at = CORNERS + 2 * found
            made[at], made[at + 1] = x, y
            if found > 0:
                from_x, from_y = made[CORNERS], made[CORNERS + 1]
                before_x, before_y = made[at - 2] - from_x, made[at - 1] - from_y
                doubled += before_x * (y - from_y) - before_y * (x - from_x)
            found += 1
        x, y = next_x, next_y
    return found, doubled


@jit
def overlap(p, q, over_union):
    """Of two rows of polygons."""
    zero, half = p.dtype.type(0), p.dtype.type(0.5)
    low_x, low_y = maximum(p[LOW_X], q[LOW_X]), maximum(p[LOW_Y], q[LOW_Y])
    high_x, high_y = minimum(p[HIGH_X], q[HIGH_X]), minimum(p[HIGH_Y], q[HIGH_Y])
    if not ((low_x < high_x) & (low_y < high_y)):
        return zero
    middle_x, middle_y = (low_x + high_x) * half, (low_y + high_y) * half
    extent = maximum(abs(p[LOW_X] - middle_x), zero)
    extent = maximum(abs(p[HIGH_X] - middle_x), extent)
    extent = maximum(abs(q[LOW_X] - middle_x), extent)
    extent = maximum(abs(q[HIGH_X] - middle_x), extent)
    extent = maximum(abs(p[LOW_Y] - middle_y), extent)
    extent = maximum(abs(p[HIGH_Y] - middle_y), extent)
    extent = maximum(abs(q[LOW_Y] - middle_y), extent)
    extent = maximum(abs(q[HIGH_Y] - middle_y), extent)
    slack = extent * (p.dtype.type(SLACK) * np.finfo(p.dtype).eps)
    doubled = _inside(p, q, middle_x, middle_y, slack) + _inside(q, p, middle_x, middle_y, -slack)
    shared = minimum(minimum(doubled * half, p[AREA]), q[AREA])
    shared = shared if shared > zero else zero
    ratio = shared / (p[AREA] + q[AREA] - shared if over_union else p[AREA])
    return ratio if ratio > zero else zero


@jit
def _inside(p, q, middle_x, middle_y, slack):
    """Twice the area between the parts of the sides of p in q, grown by `slack`, and the middle."""
    zero, one = p.dtype.type(0), p.dtype.type(1)
    total = zero
    next_x, next_y = p[CORNERS] - middle_x, p[CORNERS + 1] - middle_y
    for i in range(CORNERS, len(p), 2):
        x, y = next_x, next_y
        following = i + 2 if i + 2 < len(p) else CORNERS
        next_x, next_y = p[following] - middle_x, p[following + 1] - middle_y
        if (x == next_x) & (y == next_y):
            continue
        first, last, outside = zero, one, False
        corner_x, corner_y = q[CORNERS] - middle_x, q[CORNERS + 1] - middle_y
        for j in range(CORNERS, len(q), 2):
            following = j + 2 if j + 2 < len(q) else CORNERS
            end_x, end_y = q[following] - middle_x, q[following + 1] - middle_y
            side_x, side_y = end_x - corner_x, end_y - corner_y
            grow = slack * (abs(side_x) + abs(side_y))
            begin = (side_x * (y - corner_y) - side_y * (x - corner_x)) + grow
            end = (side_x * (next_y - corner_y) - side_y * (next_x - corner_x)) + grow
            at = begin / (begin - end)
            if (begin < zero) & (end >= zero):
                first = maximum(at, first)
            if (begin >= zero) & (end < zero):
                last = minimum(at, last)
            outside |= (begin < zero) & (end < zero)
            corner_x, corner_y = end_x, end_y
        if not (outside | (last < first)):
            total += (last - first) * (x * (next_y - y) - y * (next_x - x))
    return total
