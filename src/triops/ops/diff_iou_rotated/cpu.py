"""diff_iou_rotated and its gradient on CPU: one pass over the pairs. The arithmetic is that of `reference.py`."""

import numpy as np
import torch

from triops._cpu.intrinsics import maximum, minimum
from triops._cpu.jit import jit
from triops._cpu.memory import as_numpy
from triops._cpu.threads import run
from triops._dtypes import compute_dtype
from triops._geometry.rotated.cpu import (
    AREA,
    COS,
    HALF_X,
    HALF_Y,
    REACH_X,
    REACH_Y,
    SIN,
    X,
    Y,
    frames,
    shared_area,
    shared_area_motion,
    slack,
)
from triops.ops.diff_iou_rotated.reference import MODES

GRAIN = 500  # pairs worth a thread
DZ, BOTTOM, TOP = 9, 10, 11  # rows of an array of boxes [12, N], behind those of a frame
GIOU, DIOU = MODES.index("giou"), MODES.index("diou")


def diff_iou_rotated(boxes1, boxes2, mode):
    out = torch.empty(boxes1.shape[:-1], dtype=compute_dtype(boxes1.dtype))
    solid = boxes1.shape[-1] == 7
    run(_forward, out.numel(), GRAIN, _boxes(boxes1), _boxes(boxes2), MODES.index(mode), solid, as_numpy(out.view(-1)))
    return out.to(boxes1.dtype)


def diff_iou_rotated_backward(grad_output, boxes1, boxes2, mode):
    real, fields = compute_dtype(boxes1.dtype), boxes1.shape[-1]
    first, second = (torch.empty(boxes1.shape, dtype=real) for _ in range(2))
    grad = as_numpy(grad_output.to(real).reshape(-1))
    outputs = as_numpy(first.view(-1, fields)), as_numpy(second.view(-1, fields))
    run(_backward, len(grad), GRAIN, grad, _boxes(boxes1), _boxes(boxes2), MODES.index(mode), *outputs)
    return first.to(boxes1.dtype), second.to(boxes2.dtype)


def _boxes(boxes):
    """Boxes [..., 5] or [..., 7] -> one row per field [12, N]. One that is not valid reaches nowhere."""
    boxes = as_numpy(boxes, compute_dtype(boxes.dtype)).reshape(-1, boxes.shape[-1])
    made, half = np.empty((12, len(boxes)), boxes.dtype), boxes.dtype.type(0.5)
    if boxes.shape[1] == 5:
        frames(boxes, True, 0.0, made)
        made[DZ], made[BOTTOM], made[TOP] = 1, -half, half
        return made
    frames(boxes[:, [0, 1, 3, 4, 6]], True, 0.0, made)
    z, dz = boxes[:, 2], boxes[:, 5]
    made[DZ], made[BOTTOM], made[TOP] = dz, z - dz * half, z + dz * half
    made[REACH_X][~(np.isfinite(z) & np.isfinite(dz) & (dz > 0))] = -np.inf
    return made


@jit
def _forward(begin, end, a, b, mode, solid, out):
    real = a.dtype.type
    for i in range(begin, end):
        _, _, union, iou, _, width, length, depth, distance, diagonal = _compare(a, b, i, solid)
        value = iou
        if mode == GIOU:
            enclosing = (width * length) * depth
            value = value - maximum(enclosing - union, real(0)) / enclosing
        elif mode == DIOU:
            value = value - distance / diagonal
        out[i] = value if _valid(a, b, i) & np.isfinite(value) else real(0)


@jit
def _valid(a, b, i):
    return (a[REACH_X, i] > -np.inf) & (b[REACH_X, i] > -np.inf)


@jit
def _compare(a, b, i, solid):
    """The fields of `reference.Pair`."""
    real = a.dtype.type
    half, zero = real(0.5), real(0)
    shift_x, shift_y = a[X, i] - b[X, i], a[Y, i] - b[Y, i]
    near = (abs(shift_x) < a[REACH_X, i] + b[REACH_X, i]) & (abs(shift_y) < a[REACH_Y, i] + b[REACH_Y, i])
    area = zero
    if near:
        area = shared_area(
            shift_x, shift_y, a[HALF_X, i], a[HALF_Y, i], a[COS, i], a[SIN, i], a[AREA, i],
            b[HALF_X, i], b[HALF_Y, i], b[COS, i], b[SIN, i], b[AREA, i],
        )  # fmt: skip
    a_top, b_top, a_bottom, b_bottom = a[TOP, i], b[TOP, i], a[BOTTOM, i], b[BOTTOM, i]
    gap = minimum(a_top, b_top) - maximum(a_bottom, b_bottom)
    shared = area * maximum(gap, zero)
    union = (a[AREA, i] * a[DZ, i] + b[AREA, i] * b[DZ, i]) - shared
    width, length = _enclose(a, b, i)[:2]
    other_width, other_length = _enclose(b, a, i)[:2]
    turned = other_width * other_length < width * length
    if turned:
        width, length = other_width, other_length
    depth = maximum(a_top, b_top) - minimum(a_bottom, b_bottom)
    shift_z = (a_bottom + a_top) * half - (b_bottom + b_top) * half
    distance = (shift_x * shift_x + shift_y * shift_y) + shift_z * shift_z
    diagonal = width * width + length * length
    diagonal = diagonal + depth * depth if solid else diagonal
    return area, gap, union, shared / union, turned, width, length, depth, distance, diagonal


@jit
def _enclose(inner, outer, i):
    """The fields of `reference.Enclosing`."""
    shift_x, shift_y = inner[X, i] - outer[X, i], inner[Y, i] - outer[Y, i]
    half_x, half_y, outer_half_x, outer_half_y = inner[HALF_X, i], inner[HALF_Y, i], outer[HALF_X, i], outer[HALF_Y, i]
    cos = inner[COS, i] * outer[COS, i] + inner[SIN, i] * outer[SIN, i]
    sin = inner[SIN, i] * outer[COS, i] - inner[COS, i] * outer[SIN, i]
    x = shift_x * outer[COS, i] + shift_y * outer[SIN, i]
    y = shift_y * outer[COS, i] - shift_x * outer[SIN, i]
    reach_x, reach_y = half_x * abs(cos) + half_y * abs(sin), half_x * abs(sin) + half_y * abs(cos)
    width = maximum(reach_x + x, outer_half_x) + maximum(reach_x - x, outer_half_x)
    length = maximum(reach_y + y, outer_half_y) + maximum(reach_y - y, outer_half_y)
    return width, length, x, y, reach_x, reach_y, cos, sin


@jit
def _backward(begin, end, grad, a, b, mode, first, second):
    real = a.dtype.type
    solid = first.shape[1] == 7
    zero, half, one, two = real(0), real(0.5), real(1), real(2)
    for i in range(begin, end):
        first[i] = zero
        second[i] = zero
        if not _valid(a, b, i):
            continue
        area, gap, union, iou, turned, width, length, depth, distance, diagonal = _compare(a, b, i, solid)
        by_shared, by_volume = (one + iou) / union, -(iou / union)
        by_width, by_length, by_depth, by_shift = zero, zero, zero, zero
        if mode == GIOU:
            enclosing = (width * length) * depth
            by_shared, by_volume = by_shared - one / enclosing, by_volume + one / enclosing
            by_enclosing = -((union / enclosing) / enclosing)
            by_width = by_enclosing * (length * depth)
            by_length = by_enclosing * (width * depth)
            by_depth = by_enclosing * (width * length)
        elif mode == DIOU:
            by_shift = -two / diagonal
            by_diagonal = -(by_shift * (distance / diagonal))
            by_width, by_length, by_depth = by_diagonal * width, by_diagonal * length, by_diagonal * depth

        by_area, by_height = by_shared * maximum(gap, zero), by_shared * area
        shift_x, shift_y = a[X, i] - b[X, i], a[Y, i] - b[Y, i]
        shared = shared_area_motion(
            shift_x, shift_y, a[HALF_X, i], a[HALF_Y, i], a[COS, i], a[SIN, i],
            b[HALF_X, i], b[HALF_Y, i], b[COS, i], b[SIN, i],
        )  # fmt: skip
        around = _enclosing_motion(a, b, i, turned, by_width, by_length)
        x = (by_area * shared[0] + around[0]) + by_shift * shift_x
        y = (by_area * shared[1] + around[1]) + by_shift * shift_y
        angle = by_area * shared[2] + around[2]
        a_half_x, a_half_y = by_area * shared[3] + around[3], by_area * shared[4] + around[4]
        b_half_x, b_half_y = by_area * shared[5] + around[5], by_area * shared[6] + around[6]
        b_angle = -angle - (shift_x * y - shift_y * x)

        a_top, b_top, a_bottom, b_bottom = a[TOP, i], b[TOP, i], a[BOTTOM, i], b[BOTTOM, i]
        some = _over(gap, zero, zero)
        top, bottom = _over(b_top, a_top, zero), _over(a_bottom, b_bottom, zero)
        z = by_height * (some * (top - bottom)) + by_depth * (bottom - top)
        z = z + by_shift * ((a_bottom + a_top) * half - (b_bottom + b_top) * half)
        a_half_z = by_height * (some * (top + bottom)) + by_depth * (two - (top + bottom))
        b_half_z = by_height * (some * (two - (top + bottom))) + by_depth * (top + bottom)
        _store(grad[i], first, a, i, x, y, z, a_half_x, a_half_y, a_half_z, angle, by_volume)
        _store(grad[i], second, b, i, -x, -y, -z, b_half_x, b_half_y, b_half_z, b_angle, by_volume)


@jit
def _store(grad, out, box, i, x, y, z, half_x, half_y, half_z, angle, by_volume):
    half, two = type(x)(0.5), type(x)(2)
    width = half_x * half + by_volume * ((box[HALF_Y, i] * two) * box[DZ, i])
    length = half_y * half + by_volume * ((box[HALF_X, i] * two) * box[DZ, i])
    depth = half_z * half + by_volume * box[AREA, i]
    sizes = 2
    if out.shape[1] == 7:
        sizes = 3
        out[i, 2], out[i, 5] = _times(grad, z), _times(grad, depth)
    out[i, 0], out[i, 1] = _times(grad, x), _times(grad, y)
    out[i, sizes], out[i, sizes + 1] = _times(grad, width), _times(grad, length)
    out[i, out.shape[1] - 1] = _times(grad, angle)


@jit
def _times(grad, value):
    return grad * value if np.isfinite(value) else type(value)(0)


@jit
def _enclosing_motion(a, b, i, turned, by_width, by_length):
    """The fields of `reference.Motion`, given the derivatives by the sizes of the enclosing rectangle."""
    zero, one, two = type(by_width)(0), type(by_width)(1), type(by_width)(2)
    inner, outer = (b, a) if turned else (a, b)
    _, _, centre_x, centre_y, reach_x, reach_y, cos, sin = _enclose(inner, outer, i)
    shift_x, shift_y = a[X, i] - b[X, i], a[Y, i] - b[Y, i]
    half_x, half_y, outer_half_x, outer_half_y = inner[HALF_X, i], inner[HALF_Y, i], outer[HALF_X, i], outer[HALF_Y, i]
    near = slack(shift_x, shift_y, a[HALF_X, i], a[HALF_Y, i], b[HALF_X, i], b[HALF_Y, i])
    right, left = _over(reach_x + centre_x, outer_half_x, near), _over(reach_x - centre_x, outer_half_x, near)
    top, bottom = _over(reach_y + centre_y, outer_half_y, near), _over(reach_y - centre_y, outer_half_y, near)
    by_reach_x, by_reach_y = by_width * (right + left), by_length * (top + bottom)
    inner_x = by_reach_x * abs(cos) + by_reach_y * abs(sin)
    inner_y = by_reach_x * abs(sin) + by_reach_y * abs(cos)
    outer_x, outer_y = by_width * (two - (right + left)), by_length * (two - (top + bottom))
    along_x, along_y = by_width * (right - left), by_length * (top - bottom)
    sign = -one if turned else one
    x = (along_x * outer[COS, i] - along_y * outer[SIN, i]) * sign
    y = (along_x * outer[SIN, i] + along_y * outer[COS, i]) * sign
    by_cos = -sin if cos > zero else (sin if cos < zero else zero)
    by_sin = cos if sin > zero else (-cos if sin < zero else zero)
    angle = by_reach_x * (half_x * by_cos + half_y * by_sin)
    angle = angle + by_reach_y * (half_x * by_sin + half_y * by_cos)
    if turned:
        return x, y, -angle - (shift_x * y - shift_y * x), outer_x, outer_y, inner_x, inner_y
    return x, y, angle, inner_x, inner_y, outer_x, outer_y


@jit
def _over(a, b, near):
    """1 where a > b, 0 where a < b, and 1/2 where they are equal or up to `near` apart."""
    half, zero = type(a)(0.5), type(a)(0)
    return (half if a > b + near else zero) + (half if a >= b - near else zero)
