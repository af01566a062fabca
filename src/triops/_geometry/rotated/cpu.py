"""The area that two rotated rectangles share, for Numba. The arithmetic is that of `reference.py`, step by step.

A row is one rectangle against many. `find_near` flags those whose axis-aligned bounding box overlaps that of the row,
one byte each; `pack` gathers them, and `overlaps` computes their overlaps in one loop that LLVM vectorises.
"""

import math

import numpy as np
import torch

from triops._cpu.half import as_bits, widen
from triops._cpu.intrinsics import maximum, minimum
from triops._cpu.jit import inline, jit
from triops._geometry.box.cpu import cos_sin
from triops._geometry.rotated.reference import FLAT, SLACK

# Rows of an array of frames [9, N].
X, Y, HALF_X, HALF_Y, COS, SIN, REACH_X, REACH_Y, AREA = range(9)
IOU, IOF, PLAIN_AREA = range(3)  # modes, in the order of `reference.MODES`
TILE = 1024  # columns at a time: their frames stay in the L2 cache


def make_frames(boxes, clockwise, margin):
    """Frames [9, N] of boxes [N, 5]: float64 for float64, else float32."""
    real = np.float64 if boxes.dtype == torch.float64 else np.float32
    made = np.empty((9, boxes.shape[0]), real)
    frames(as_bits(boxes), clockwise, margin, made)
    return made


@jit
def frames(boxes, clockwise, margin, out):
    """boxes [N, 5], half types as bits, -> out [9, N]."""
    real = out.dtype.type
    half, grow = real(0.5), real(margin)
    for i in range(boxes.shape[0]):
        x, y, width, height = widen(boxes[i, 0]), widen(boxes[i, 1]), widen(boxes[i, 2]), widen(boxes[i, 3])
        angle = widen(boxes[i, 4])
        cos64, sin64 = cos_sin(float(angle if clockwise else -angle))
        cos, sin = real(cos64), real(sin64)
        half_x, half_y = width * half, height * half
        finite = math.isfinite(x) & math.isfinite(y) & math.isfinite(width) & math.isfinite(height)
        valid = finite & math.isfinite(angle) & (width > 0) & (height > 0)
        reach_x = (half_x + grow) * abs(cos) + (half_y + grow) * abs(sin)
        out[X, i], out[Y, i], out[HALF_X, i], out[HALF_Y, i] = x, y, half_x, half_y
        out[COS, i], out[SIN, i] = cos, sin
        out[REACH_X, i] = reach_x if valid else real(-np.inf)
        out[REACH_Y, i] = (half_x + grow) * abs(sin) + (half_y + grow) * abs(cos)
        out[AREA, i] = width * height


@jit
def find_near(row, i, columns, begin, end, flags):
    """flags[j - begin] = 1 where the axis-aligned bounding boxes of row i and column j overlap."""
    x, y, reach_x, reach_y = row[X, i], row[Y, i], row[REACH_X, i], row[REACH_Y, i]
    xs, ys = columns[X, begin:end], columns[Y, begin:end]
    reaches_x, reaches_y = columns[REACH_X, begin:end], columns[REACH_Y, begin:end]
    for j in range(np.uint64(end - begin)):
        flags[j] = (abs(x - xs[j]) < reach_x + reaches_x[j]) & (abs(y - ys[j]) < reach_y + reaches_y[j])


@jit
def pack(flags, words, count, columns, begin, found, packed):
    """Indices of the flagged columns into `found` and their frames into `packed`; returns how many.

    words: the same flags, eight at a time, to pass quickly over columns that are far away.
    """
    n = np.uint64(0)
    for word in range(np.uint64((count + 7) // 8)):
        if words[word] != 0:
            for j in range(np.uint64(8) * word, min(np.uint64(8) * word + np.uint64(8), np.uint64(count))):
                found[n] = j
                n += flags[j]
    for field in range(9):
        source, target = columns[field, begin:], packed[field]
        for k in range(n):
            target[k] = source[found[k]]
    return n


@jit
def _clamp(value, low, high):
    return maximum(minimum(value, high), low)


@jit
def _strip(x0, y0, clipped0, x1, y1, clipped1, slope, low_y, high_y):
    """Twice the integral of y, clamped, over an edge, within the range of x."""
    low, high = minimum(y0, y1), maximum(y0, y1)
    begin = _clamp(y0 + (clipped0 - x0) * slope, low, high)
    end = _clamp(y1 + (clipped1 - x1) * slope, low, high)
    inner_begin, inner_end = _clamp(begin, low_y, high_y), _clamp(end, low_y, high_y)
    length = abs(end - begin)
    shift = (abs(end - inner_end) - abs(begin - inner_begin)) / length
    shift = shift if length > 0 else type(slope)(0)
    mean = (inner_begin + inner_end) + (inner_end - inner_begin) * shift
    return (clipped1 - clipped0) * mean


@inline  # a call in its loop would keep `overlaps` from becoming vector code
def shared_area(
    shift_x, shift_y, a_half_x, a_half_y, a_cos, a_sin, a_area, b_half_x, b_half_y, b_cos, b_sin, b_area
):  # fmt: skip
    """The area that two rectangles share whose bounding boxes overlap; shift: from the centre of b to that of a."""
    zero = type(a_cos)(0)
    cos = a_cos * b_cos + a_sin * b_sin
    sin = a_sin * b_cos - a_cos * b_sin
    along_x, along_y = shift_x * a_cos + shift_y * a_sin, shift_y * a_cos - shift_x * a_sin
    overlapping = (abs(along_x) < a_half_x + (b_half_x * abs(cos) + b_half_y * abs(sin))) & (
        abs(along_y) < a_half_y + (b_half_x * abs(sin) + b_half_y * abs(cos))
    )
    centre_x, centre_y = shift_x * b_cos + shift_y * b_sin, shift_y * b_cos - shift_x * b_sin
    low_x, high_x = -b_half_x - centre_x, b_half_x - centre_x
    low_y, high_y = -b_half_y - centre_y, b_half_y - centre_y
    origin = _clamp(zero, low_y, high_y)
    low_y, high_y = low_y - origin, high_y - origin
    ux, uy = a_half_x * cos, a_half_x * sin
    vx, vy = a_half_y * sin, a_half_y * cos
    x0, x1, x2, x3 = -ux + vx, ux + vx, ux - vx, -ux - vx
    y0, y1, y2, y3 = (-uy - vy) - origin, (uy - vy) - origin, (uy + vy) - origin, (-uy + vy) - origin
    c0, c1 = _clamp(x0, low_x, high_x), _clamp(x1, low_x, high_x)
    c2, c3 = _clamp(x2, low_x, high_x), _clamp(x3, low_x, high_x)
    slope, steep = sin / cos, -(cos / sin)
    first = _strip(x0, y0, c0, x1, y1, c1, slope, low_y, high_y)
    first = first + _strip(x1, y1, c1, x2, y2, c2, steep, low_y, high_y)
    second = _strip(x2, y2, c2, x3, y3, c3, slope, low_y, high_y)
    second = second + _strip(x3, y3, c3, x0, y0, c0, steep, low_y, high_y)
    shared = (first + second) * type(a_cos)(-0.5)
    shared = minimum(minimum(shared, a_area), b_area)
    return shared if overlapping & (shared > zero) else zero


@jit
def overlaps(row, i, packed, count, mode, out):
    """out[k] = the overlap of row i with packed rectangle k, which are near; margin 0."""
    real = row.dtype.type
    zero, one = real(0), real(1)
    ax, ay, a_half_x, a_half_y = row[X, i], row[Y, i], row[HALF_X, i], row[HALF_Y, i]
    a_cos, a_sin, a_area = row[COS, i], row[SIN, i], row[AREA, i]
    bx, by, b_halves_x, b_halves_y = packed[X], packed[Y], packed[HALF_X], packed[HALF_Y]
    b_coss, b_sins, b_areas = packed[COS], packed[SIN], packed[AREA]
    union, over_first = mode == IOU, mode == IOF
    for k in range(np.uint64(count)):
        shared = shared_area(
            ax - bx[k], ay - by[k], a_half_x, a_half_y, a_cos, a_sin, a_area,
            b_halves_x[k], b_halves_y[k], b_coss[k], b_sins[k], b_areas[k],
        )  # fmt: skip
        base = a_area + b_areas[k] - shared if union else (a_area if over_first else one)
        ratio = shared / base
        out[k] = ratio if ratio > zero else zero


@jit
def slack(shift_x, shift_y, a_half_x, a_half_y, b_half_x, b_half_y):
    """By how much rounding may move a side of one of two rectangles."""
    extent = ((a_half_x + a_half_y) + (b_half_x + b_half_y)) + (abs(shift_x) + abs(shift_y))
    return extent * (type(extent)(SLACK) * np.finfo(type(extent)).eps)


@jit
def shared_area_motion(shift_x, shift_y, a_half_x, a_half_y, a_cos, a_sin, b_half_x, b_half_y, b_cos, b_sin):
    """Derivatives of the shared area: the fields of `reference.Motion`."""
    cos = a_cos * b_cos + a_sin * b_sin
    sin = a_sin * b_cos - a_cos * b_sin
    grow = slack(shift_x, shift_y, a_half_x, a_half_y, b_half_x, b_half_y)
    centre_x, centre_y = shift_x * b_cos + shift_y * b_sin, shift_y * b_cos - shift_x * b_sin
    right, left, top, bottom, angle = _sides_inside(
        a_half_x, a_half_y, b_half_x, b_half_y, centre_x, centre_y, cos, sin, grow
    )
    centre_x, centre_y = shift_x * a_cos + shift_y * a_sin, shift_y * a_cos - shift_x * a_sin
    b_right, b_left, b_top, b_bottom, _ = _sides_inside(
        b_half_x, b_half_y, a_half_x, a_half_y, -centre_x, -centre_y, cos, -sin, grow
    )
    along_x, along_y = right - left, top - bottom
    return (
        along_x * a_cos - along_y * a_sin, along_x * a_sin + along_y * a_cos, angle,
        right + left, top + bottom, b_right + b_left, b_top + b_bottom,
    )  # fmt: skip


@jit
def _sides_inside(half_x, half_y, b_half_x, b_half_y, centre_x, centre_y, cos, sin, grow):
    """Lengths of the sides of a rectangle in another one, and the derivative of the area by its angle."""
    zero, one, flat = type(cos)(0), type(cos)(1), type(cos)(FLAT)
    wide_x, wide_y = b_half_x + grow, b_half_y + grow
    narrow_x, narrow_y = maximum(b_half_x - grow, zero), maximum(b_half_y - grow, zero)
    per_cos, per_sin = one / (cos if abs(cos) > flat else flat), one / (sin if abs(sin) > flat else flat)
    limits = wide_x, wide_y, narrow_x, narrow_y
    ux, uy = half_x * cos, half_x * sin
    vx, vy = half_y * sin, half_y * cos
    right, right_moment = _side(centre_x + ux, centre_y + uy, -per_sin, per_cos, half_y, limits)
    left, left_moment = _side(centre_x - ux, centre_y - uy, -per_sin, per_cos, half_y, limits)
    top, top_moment = _side(centre_x - vx, centre_y + vy, per_cos, per_sin, half_x, limits)
    bottom, bottom_moment = _side(centre_x + vx, centre_y - vy, per_cos, per_sin, half_x, limits)
    return right, left, top, bottom, (left_moment - right_moment) + (top_moment - bottom_moment)


@jit
def _side(x, y, per_x, per_y, half, limits):
    wide, wide_moment = _within(x, y, per_x, per_y, half, limits[0], limits[1])
    narrow, narrow_moment = _within(x, y, per_x, per_y, half, limits[2], limits[3])
    return (wide + narrow) * type(x)(0.5), (wide_moment + narrow_moment) * type(x)(0.25)


@jit
def _within(x, y, per_x, per_y, half, limit_x, limit_y):
    """Of the points (x + t / per_x, y + t / per_y), |t| <= half: the length inside, and twice the integral of t."""
    first, second = (-limit_x - x) * per_x, (limit_x - x) * per_x
    from_x, to_x = (first, second) if first < second else (second, first)
    first, second = (-limit_y - y) * per_y, (limit_y - y) * per_y
    from_y, to_y = (first, second) if first < second else (second, first)
    begin, end = maximum(maximum(from_x, from_y), -half), minimum(minimum(to_x, to_y), half)
    length = maximum(end - begin, type(x)(0))
    return length, length * (begin + end)


@jit
def polygon_overlaps(row, i, packed, count, mode, margin, out):
    """As `overlaps`, with a margin above 0: few enough to be computed one by one."""
    real = row.dtype.type
    zero, grow, smallest = real(0), real(margin), real(1e-8)
    xs, ys, keys = np.empty(16, row.dtype), np.empty(16, row.dtype), np.empty(16, row.dtype)
    half_x, half_y, a_cos, a_sin = row[HALF_X, i], row[HALF_Y, i], row[COS, i], row[SIN, i]
    for k in range(count):
        b_cos, b_sin = packed[COS, k], packed[SIN, k]
        shift_x, shift_y = row[X, i] - packed[X, k], row[Y, i] - packed[Y, k]
        cos = a_cos * b_cos + a_sin * b_sin
        sin = a_sin * b_cos - a_cos * b_sin
        centre_x, centre_y = shift_x * b_cos + shift_y * b_sin, shift_y * b_cos - shift_x * b_sin
        n = _vertices(half_x, half_y, cos, sin, centre_x, centre_y, packed[HALF_X, k], packed[HALF_Y, k], grow, xs, ys)
        _sort_around_middle(xs, ys, keys, n)
        shared = _polygon_area(xs, ys, n)
        shared = shared if shared > zero else zero
        if mode == PLAIN_AREA:
            out[k] = shared
        else:
            base = row[AREA, i] + packed[AREA, k] - shared if mode == IOU else row[AREA, i]
            ratio = shared / maximum(base, smallest)
            out[k] = ratio if ratio > zero else zero


@inline
def _vertices(half_x, half_y, cos, sin, centre_x, centre_y, b_half_x, b_half_y, grow, xs, ys):
    """Vertices of what rectangles a and b share, unordered, from the middle of a, in the axes of b. -> how many

    half_x to sin: a, rotated relative to b; centre_x to b_half_y: the position of its middle in b, and the size of b.
    Corners up to `grow` outside of the other rectangle count as inside.
    """
    low_x, high_x = -b_half_x - centre_x, b_half_x - centre_x
    low_y, high_y = -b_half_y - centre_y, b_half_y - centre_y
    ux, uy = half_x * cos, half_x * sin
    vx, vy = half_y * sin, half_y * cos
    corners_x = (-ux + vx, ux + vx, ux - vx, -ux - vx, -ux + vx)
    corners_y = (-uy - vy, uy - vy, uy + vy, -uy + vy, -uy - vy)
    n = 0
    for edge in range(4):  # where an edge of a enters b and where it leaves
        x, y = corners_x[edge], corners_y[edge]
        step_x, step_y = corners_x[edge + 1] - x, corners_y[edge + 1] - y
        t0, t1 = (low_x - x) / step_x, (high_x - x) / step_x
        from_x, to_x = (t0, t1) if t0 < t1 else (t1, t0)
        t0, t1 = (low_y - y) / step_y, (high_y - y) / step_y
        from_y, to_y = (t0, t1) if t0 < t1 else (t1, t0)
        enter, leave = maximum(from_x, from_y), minimum(to_x, to_y)
        if enter < leave:
            for t in (enter, leave):
                if (t > 0) & (t < 1):
                    xs[n], ys[n] = x + t * step_x, y + t * step_y
                    n += 1
    for corner in range(4):  # of a, in b
        x, y = corners_x[corner], corners_y[corner]
        if (abs(x + centre_x) < b_half_x + grow) & (abs(y + centre_y) < b_half_y + grow):
            xs[n], ys[n] = x, y
            n += 1
    for corner in range(4):  # of b, in a
        x = high_x if (corner == 1) | (corner == 2) else low_x
        y = high_y if corner >= 2 else low_y
        if (abs(x * cos + y * sin) < half_x + grow) & (abs(y * cos - x * sin) < half_y + grow):
            xs[n], ys[n] = x, y
            n += 1
    return n


@inline
def _sort_around_middle(xs, ys, keys, n):
    """Vertices in the order of their angle around their mean, equals as they came: an insertion sort in place."""
    middle_x, middle_y = xs.dtype.type(0), xs.dtype.type(0)
    for p in range(n):
        middle_x += xs[p]
        middle_y += ys[p]
    middle_x, middle_y = middle_x / xs.dtype.type(n), middle_y / xs.dtype.type(n)
    for p in range(n):
        x, y = xs[p], ys[p]
        key = _angle_key(x - middle_x, y - middle_y)
        q = p
        while q > 0 and keys[q - 1] > key:
            xs[q], ys[q], keys[q] = xs[q - 1], ys[q - 1], keys[q - 1]
            q -= 1
        xs[q], ys[q], keys[q] = x, y, key


@jit
def _angle_key(x, y):
    """Increases with the angle of a vector."""
    part = x / (abs(x) + abs(y))
    one = type(x)(1)
    part = part if part >= -one else one
    return part - one if y < 0 else one - part


@inline
def _polygon_area(xs, ys, n):
    """Of vertices in order: triangles between the first one and two neighbors."""
    zero = xs.dtype.type(0)
    doubled, before_x, before_y = zero, zero, zero
    for p in range(1, n):
        x, y = xs[p] - xs[0], ys[p] - ys[0]
        doubled += before_x * y - before_y * x
        before_x, before_y = x, y
    return abs(doubled) * xs.dtype.type(0.5)
