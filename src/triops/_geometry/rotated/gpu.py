"""The area that two rotated rectangles share, for Triton. The arithmetic is that of `reference.py`, step by step.

Kernels that use these must be launched with `enable_fp_fusion=False`: a fused multiply-add rounds once
where the reference rounds twice.
"""

import torch
import triton
import triton.language as tl

from triops import _gpu
from triops._dtypes import compute_dtype
from triops._geometry.box.gpu import cos_sin
from triops._geometry.rotated.reference import FLAT as _FLAT
from triops._geometry.rotated.reference import SLACK as _SLACK
from triops._geometry.rotated.reference import SMALLEST_UNION as _SMALLEST_UNION
from triops._gpu.arithmetic import divide, from_bits

BLOCK = _gpu.block(128, interpreted=4096)
SMALLEST_UNION = tl.constexpr(_SMALLEST_UNION)
SLACK, FLAT = tl.constexpr(_SLACK), tl.constexpr(_FLAT)


def make_frames(first, second, clockwise, margin, order=None):
    """Frames [9, N + M] of rectangles [N, 5] and [M, 5], or of 3D boxes [N, 7] and [M, 7] seen from above; with
    `order`, those of `first` in that order."""
    count, total = first.shape[0], first.shape[0] + second.shape[0]
    frames = torch.empty((9, total), dtype=compute_dtype(first.dtype), device=first.device)
    _frames_kernel[(_gpu.cdiv(total, BLOCK),)](
        first.contiguous(), second.contiguous(), first if order is None else order, frames, count, total,
        _gpu.bits_of(margin),
        CLOCKWISE=clockwise, ORDERED=order is not None, FIELDS=first.shape[1], BLOCK=BLOCK, num_warps=4,
        enable_fp_fusion=False,
    )  # fmt: skip
    return frames


@_gpu.kernel
def _frames_kernel(
    first, second, order, frames, count, total, margin_bits: tl.int64,
    CLOCKWISE: tl.constexpr, ORDERED: tl.constexpr, FIELDS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    REAL: tl.constexpr = frames.dtype.element_ty
    SIZES: tl.constexpr = 3 if FIELDS == 7 else 2
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    grow = from_bits(margin_bits, REAL)
    in_first, in_second = i < count, (i >= count) & (i < total)
    row = first + tl.load(order + i, in_first, 0) * FIELDS if ORDERED else first + i * FIELDS
    other = second + (i - count) * FIELDS
    x = _field(row, other, 0, in_first, in_second, REAL)
    y = _field(row, other, 1, in_first, in_second, REAL)
    width = _field(row, other, SIZES, in_first, in_second, REAL)
    height = _field(row, other, SIZES + 1, in_first, in_second, REAL)
    angle = _field(row, other, FIELDS - 1, in_first, in_second, REAL)
    if not CLOCKWISE:
        angle = -angle
    half_x, half_y, cos, sin, reach_x, reach_y, area = make_frame(x, y, width, height, angle, grow)
    out, inside = frames + i, i < total
    step = total.to(tl.int64)
    tl.store(out, x, inside)
    tl.store(out + step, y, inside)
    tl.store(out + 2 * step, half_x, inside)
    tl.store(out + 3 * step, half_y, inside)
    tl.store(out + 4 * step, cos, inside)
    tl.store(out + 5 * step, sin, inside)
    tl.store(out + 6 * step, reach_x, inside)
    tl.store(out + 7 * step, reach_y, inside)
    tl.store(out + 8 * step, area, inside)


@triton.jit
def make_frame(x, y, width, height, angle, grow):
    """Half sizes, cosine, sine, reaches and area: what a frame holds besides the centre."""
    cos64, sin64 = cos_sin(angle.to(tl.float64))
    cos, sin = cos64.to(x.dtype), sin64.to(x.dtype)
    half_x, half_y = width * 0.5, height * 0.5
    valid = ((x * 0 + y * 0 + width * 0 + height * 0 + angle * 0) == 0) & (width > 0) & (height > 0)
    reach_x = (half_x + grow) * tl.abs(cos) + (half_y + grow) * tl.abs(sin)
    reach_y = (half_x + grow) * tl.abs(sin) + (half_y + grow) * tl.abs(cos)
    return half_x, half_y, cos, sin, tl.where(valid, reach_x, float("-inf")), reach_y, width * height


@triton.jit
def _field(row, other, FIELD: tl.constexpr, in_first, in_second, REAL: tl.constexpr):
    value = tl.load(row + FIELD, in_first, 0.0).to(REAL)
    return tl.where(in_second, tl.load(other + FIELD, in_second, 0.0).to(REAL), value)


@triton.jit
def load_rectangle(boxes, i, mask, grow, CLOCKWISE: tl.constexpr, FIELDS: tl.constexpr, REAL: tl.constexpr):
    """Centre, half sizes, cosine, sine, reaches and area of rectangles [*, 5], or of 3D boxes [*, 7] seen from above;
    where masked off, of one without any."""
    SIZES: tl.constexpr = 3 if FIELDS == 7 else 2
    field = boxes + i * FIELDS
    x = tl.load(field, mask, 0.0).to(REAL)
    y = tl.load(field + 1, mask, 0.0).to(REAL)
    width = tl.load(field + SIZES, mask, 0.0).to(REAL)
    height = tl.load(field + SIZES + 1, mask, 0.0).to(REAL)
    angle = tl.load(field + FIELDS - 1, mask, 0.0).to(REAL)
    if not CLOCKWISE:
        angle = -angle
    half_x, half_y, cos, sin, reach_x, reach_y, area = make_frame(x, y, width, height, angle, grow)
    return x, y, half_x, half_y, cos, sin, reach_x, reach_y, area


@triton.jit
def load_reach(frames, i, mask, total):
    """Centre and reach of rectangles `i`; where masked off, of one that overlaps no other."""
    step = total.to(tl.int64)
    field = frames + i
    x = tl.load(field, mask, 0.0)
    y = tl.load(field + step, mask, 0.0)
    reach_x = tl.load(field + 6 * step, mask, float("-inf"))
    reach_y = tl.load(field + 7 * step, mask, 0.0)
    return x, y, reach_x, reach_y


@triton.jit
def load_shape(frames, i, mask, total):
    """Half sizes, cosine, sine and area of rectangles `i`."""
    step = total.to(tl.int64)
    field = frames + i
    half_x = tl.load(field + 2 * step, mask, 0.0)
    half_y = tl.load(field + 3 * step, mask, 0.0)
    cos = tl.load(field + 4 * step, mask, 1.0)
    sin = tl.load(field + 5 * step, mask, 0.0)
    area = tl.load(field + 8 * step, mask, 0.0)
    return half_x, half_y, cos, sin, area


@triton.jit
def near(a_x, a_y, a_reach_x, a_reach_y, b_x, b_y, b_reach_x, b_reach_y):
    """Whether their axis-aligned bounding boxes overlap."""
    return (tl.abs(a_x - b_x) < a_reach_x + b_reach_x) & (tl.abs(a_y - b_y) < a_reach_y + b_reach_y)


@triton.jit
def overlap(
    shift_x, shift_y, a_half_x, a_half_y, a_cos, a_sin, a_area, b_half_x, b_half_y, b_cos, b_sin, b_area, margin,
    MODE: tl.constexpr, POLYGON: tl.constexpr,
):  # fmt: skip
    """The overlap of rectangles that are near; MODE is an index into `reference.MODES`."""
    cos = a_cos * b_cos + a_sin * b_sin
    sin = a_sin * b_cos - a_cos * b_sin
    centre_x = shift_x * b_cos + shift_y * b_sin
    centre_y = shift_y * b_cos - shift_x * b_sin
    low_x, high_x = -b_half_x - centre_x, b_half_x - centre_x
    low_y, high_y = -b_half_y - centre_y, b_half_y - centre_y
    ux, uy = a_half_x * cos, a_half_x * sin
    vx, vy = a_half_y * sin, a_half_y * cos
    x0, x1, x2, x3 = -ux + vx, ux + vx, ux - vx, -ux - vx
    y0, y1, y2, y3 = -uy - vy, uy - vy, uy + vy, -uy + vy
    if POLYGON:
        shared = _shared_polygon(
            (x0, x1, x2, x3), (y0, y1, y2, y3), low_x, high_x, low_y, high_y, cos, sin, centre_x, centre_y,
            a_half_x + margin, a_half_y + margin, b_half_x + margin, b_half_y + margin,
        )  # fmt: skip
    else:
        along_x = shift_x * a_cos + shift_y * a_sin
        along_y = shift_y * a_cos - shift_x * a_sin
        overlapping = tl.abs(along_x) < a_half_x + (b_half_x * tl.abs(cos) + b_half_y * tl.abs(sin))
        overlapping &= tl.abs(along_y) < a_half_y + (b_half_x * tl.abs(sin) + b_half_y * tl.abs(cos))
        origin = _clamp(tl.zeros_like(low_y), low_y, high_y)
        low_y, high_y = low_y - origin, high_y - origin
        y0, y1, y2, y3 = y0 - origin, y1 - origin, y2 - origin, y3 - origin
        c0, c1 = _clamp(x0, low_x, high_x), _clamp(x1, low_x, high_x)
        c2, c3 = _clamp(x2, low_x, high_x), _clamp(x3, low_x, high_x)
        slope, steep = divide(sin, cos), -divide(cos, sin)
        first = _strip(x0, y0, c0, x1, y1, c1, slope, low_y, high_y)
        first += _strip(x1, y1, c1, x2, y2, c2, steep, low_y, high_y)
        second = _strip(x2, y2, c2, x3, y3, c3, slope, low_y, high_y)
        second += _strip(x3, y3, c3, x0, y0, c0, steep, low_y, high_y)
        shared = (first + second) * -0.5
        shared = minimum(minimum(shared, a_area), b_area)
        shared = tl.where(overlapping & (shared > 0), shared, 0.0)
    if MODE == 2:
        return shared
    else:
        base = a_area + b_area - shared if MODE == 0 else tl.broadcast_to(a_area, shared.shape)
        if POLYGON:
            base = tl.where(base > SMALLEST_UNION, base, SMALLEST_UNION)
        ratio = divide(shared, base)
        return tl.where(ratio > 0, ratio, 0.0)


@triton.jit
def slack(shift_x, shift_y, a_half_x, a_half_y, b_half_x, b_half_y):
    """By how much rounding may move a side of one of two rectangles."""
    extent = ((a_half_x + a_half_y) + (b_half_x + b_half_y)) + (tl.abs(shift_x) + tl.abs(shift_y))
    return extent * (SLACK * 2.0**-52) if extent.dtype == tl.float64 else extent * (SLACK * 2.0**-23)


@triton.jit
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


@triton.jit
def _sides_inside(half_x, half_y, b_half_x, b_half_y, centre_x, centre_y, cos, sin, grow):
    """Lengths of the sides of a rectangle in another one, and the derivative of the area by its angle."""
    wide_x, wide_y = b_half_x + grow, b_half_y + grow
    narrow_x, narrow_y = maximum(b_half_x - grow, 0.0), maximum(b_half_y - grow, 0.0)
    one = tl.full(cos.shape, 1.0, cos.dtype)
    per_cos = divide(one, tl.where(tl.abs(cos) > FLAT, cos, FLAT))
    per_sin = divide(one, tl.where(tl.abs(sin) > FLAT, sin, FLAT))
    limits = (wide_x, wide_y, narrow_x, narrow_y)
    ux, uy = half_x * cos, half_x * sin
    vx, vy = half_y * sin, half_y * cos
    right, right_moment = _side(centre_x + ux, centre_y + uy, -per_sin, per_cos, half_y, limits)
    left, left_moment = _side(centre_x - ux, centre_y - uy, -per_sin, per_cos, half_y, limits)
    top, top_moment = _side(centre_x - vx, centre_y + vy, per_cos, per_sin, half_x, limits)
    bottom, bottom_moment = _side(centre_x + vx, centre_y - vy, per_cos, per_sin, half_x, limits)
    return right, left, top, bottom, (left_moment - right_moment) + (top_moment - bottom_moment)


@triton.jit
def _side(x, y, per_x, per_y, half, limits):
    wide, wide_moment = _within(x, y, per_x, per_y, half, limits[0], limits[1])
    narrow, narrow_moment = _within(x, y, per_x, per_y, half, limits[2], limits[3])
    return (wide + narrow) * 0.5, (wide_moment + narrow_moment) * 0.25


@triton.jit
def _within(x, y, per_x, per_y, half, limit_x, limit_y):
    """Of the points (x + t / per_x, y + t / per_y), |t| <= half: the length inside, and twice the integral of t."""
    first, second = (-limit_x - x) * per_x, (limit_x - x) * per_x
    from_x, to_x = tl.where(first < second, first, second), tl.where(first < second, second, first)
    first, second = (-limit_y - y) * per_y, (limit_y - y) * per_y
    from_y, to_y = tl.where(first < second, first, second), tl.where(first < second, second, first)
    begin, end = maximum(maximum(from_x, from_y), -half), minimum(minimum(to_x, to_y), half)
    length = maximum(end - begin, 0.0)
    return length, length * (begin + end)


@triton.jit
def minimum(a, b):
    return tl.where(a < b, a, b)


@triton.jit
def maximum(a, b):
    return tl.where(a > b, a, b)


@triton.jit
def _clamp(value, low, high):
    return maximum(minimum(value, high), low)


@triton.jit
def _strip(x0, y0, clipped0, x1, y1, clipped1, slope, low_y, high_y):
    """Twice the integral of y, clamped, over an edge, within the range of x."""
    low, high = minimum(y0, y1), maximum(y0, y1)
    begin = _clamp(y0 + (clipped0 - x0) * slope, low, high)
    end = _clamp(y1 + (clipped1 - x1) * slope, low, high)
    inner_begin, inner_end = _clamp(begin, low_y, high_y), _clamp(end, low_y, high_y)
    length = tl.abs(end - begin)
    shift = divide(tl.abs(end - inner_end) - tl.abs(begin - inner_begin), length)
    shift = tl.where(length > 0, shift, 0.0)
    mean = (inner_begin + inner_end) + (inner_end - inner_begin) * shift
    return (clipped1 - clipped0) * mean


@triton.jit
def _angle_key(x, y):
    part = divide(x, tl.abs(x) + tl.abs(y))
    part = tl.where(part >= -1, part, 1.0)
    return tl.where(y < 0, part - 1.0, 1.0 - part)


@triton.jit
def _shared_polygon(
    corner_x, corner_y, low_x, high_x, low_y, high_y, cos, sin, centre_x, centre_y,
    a_half_x, a_half_y, b_half_x, b_half_y,
):  # fmt: skip
    """The polygon through crossings and corners; the half sizes have the margin in them."""
    xs, ys, valid = (), (), ()
    for i in tl.static_range(4):
        x, y = corner_x[i], corner_y[i]
        step_x, step_y = corner_x[(i + 1) % 4] - x, corner_y[(i + 1) % 4] - y
        t0, t1 = divide(low_x - x, step_x), divide(high_x - x, step_x)
        from_x, to_x = tl.where(t0 < t1, t0, t1), tl.where(t0 < t1, t1, t0)
        t0, t1 = divide(low_y - y, step_y), divide(high_y - y, step_y)
        from_y, to_y = tl.where(t0 < t1, t0, t1), tl.where(t0 < t1, t1, t0)
        enter, leave = maximum(from_x, from_y), minimum(to_x, to_y)
        xs += (x + enter * step_x, x + leave * step_x)
        ys += (y + enter * step_y, y + leave * step_y)
        crossing = enter < leave
        valid += (crossing & (enter > 0) & (enter < 1), crossing & (leave > 0) & (leave < 1))
    for i in tl.static_range(4):
        x, y = corner_x[i], corner_y[i]
        xs += (x,)
        ys += (y,)
        valid += ((tl.abs(x + centre_x) < b_half_x) & (tl.abs(y + centre_y) < b_half_y),)
    for i in tl.static_range(4):
        x = high_x if i == 1 or i == 2 else low_x
        y = high_y if i >= 2 else low_y
        xs += (x,)
        ys += (y,)
        valid += ((tl.abs(x * cos + y * sin) < a_half_x) & (tl.abs(y * cos - x * sin) < a_half_y),)

    count, sum_x, sum_y = tl.zeros_like(cos), tl.zeros_like(cos), tl.zeros_like(cos)
    for i in tl.static_range(16):
        count += tl.where(valid[i], 1.0, 0.0)
        sum_x += tl.where(valid[i], xs[i], 0.0)
        sum_y += tl.where(valid[i], ys[i], 0.0)
    middle_x, middle_y = divide(sum_x, count), divide(sum_y, count)

    # Insertion sort: a new point goes before the first one of larger angle, and all from there on move up by one.
    keys, sorted_x, sorted_y = (), (), ()
    for i in tl.static_range(16):
        x, y = xs[i], ys[i]
        key = tl.where(valid[i], _angle_key(x - middle_x, y - middle_y), 4.0)
        next_keys, next_x, next_y = (), (), ()
        later = tl.zeros_like(cos) != 0
        for j in tl.static_range(i):
            later |= keys[j] > key
            next_keys += (tl.where(later, key, keys[j]),)
            next_x += (tl.where(later, x, sorted_x[j]),)
            next_y += (tl.where(later, y, sorted_y[j]),)
            key, x, y = tl.where(later, keys[j], key), tl.where(later, sorted_x[j], x), tl.where(later, sorted_y[j], y)
        next_keys += (key,)
        next_x += (x,)
        next_y += (y,)
        keys, sorted_x, sorted_y = next_keys, next_x, next_y

    doubled, before_x, before_y = tl.zeros_like(cos), tl.zeros_like(cos), tl.zeros_like(cos)
    for i in tl.static_range(1, 16):
        x = tl.where(count > i, sorted_x[i] - sorted_x[0], 0.0)
        y = tl.where(count > i, sorted_y[i] - sorted_y[0], 0.0)
        doubled += before_x * y - before_y * x
        before_x, before_y = x, y
    shared = tl.abs(doubled) * 0.5
    return tl.where(shared > 0, shared, 0.0)
