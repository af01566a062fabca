"""diff_iou_rotated and its gradient on GPU: one launch each, a thread per pair, nothing kept in between.

The arithmetic is that of `reference.py`, step by step.
"""

import torch
import triton
import triton.language as tl

from triops import _gpu
from triops._geometry.rotated.gpu import make_frame, maximum, minimum, near, overlap, shared_area_motion, slack
from triops._gpu.arithmetic import divide

# A pair is some hundred operations and takes most registers of a thread. Small blocks reach all multiprocessors.
BLOCK = _gpu.block(64, interpreted=4096)
WARPS = 2


def diff_iou_rotated(boxes1, boxes2, mode):
    out = torch.empty(boxes1.shape[:-1], dtype=boxes1.dtype, device=boxes1.device)
    if out.numel():
        _forward_kernel[(_gpu.cdiv(out.numel(), BLOCK),)](
            boxes1.contiguous(), boxes2.contiguous(), out, out.numel(),
            FIELDS=boxes1.shape[-1], MODE=mode, BLOCK=BLOCK, num_warps=WARPS, enable_fp_fusion=False,
        )  # fmt: skip
    return out


def diff_iou_rotated_backward(grad_output, boxes1, boxes2, mode):
    boxes1, boxes2 = boxes1.contiguous(), boxes2.contiguous()
    first, second = torch.empty_like(boxes1), torch.empty_like(boxes2)
    count = grad_output.numel()
    if count:
        # the gradient of a sum is one expanded number, which a stride of 0 reads without a copy
        expanded = count > 1 and not any(grad_output.stride())
        grad_output = grad_output if expanded else grad_output.contiguous()
        _backward_kernel[(_gpu.cdiv(count, BLOCK),)](
            grad_output, boxes1, boxes2, first, second, count, 0 if expanded else 1,
            FIELDS=boxes1.shape[-1], MODE=mode, BLOCK=BLOCK, num_warps=WARPS, enable_fp_fusion=False,
        )  # fmt: skip
    return first, second


@_gpu.kernel
def _forward_kernel(
    boxes1, boxes2, out, count, FIELDS: tl.constexpr, MODE: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    a, b = _load(boxes1, i, i < count, FIELDS), _load(boxes2, i, i < count, FIELDS)
    _, _, union, iou, _, width, length, depth, distance, diagonal = _compare(a, b, FIELDS)
    value = iou
    if MODE == "giou":
        enclosing = (width * length) * depth
        value = value - divide(maximum(enclosing - union, 0.0), enclosing)
    if MODE == "diou":
        value = value - divide(distance, diagonal)
    value = tl.where(_valid(a, b) & (value * 0 == 0), value, 0.0)
    tl.store(out + i, value.to(out.dtype.element_ty), i < count)


@_gpu.kernel
def _backward_kernel(
    grad_output, boxes1, boxes2, first, second, count, stride,
    FIELDS: tl.constexpr, MODE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    a, b = _load(boxes1, i, i < count, FIELDS), _load(boxes2, i, i < count, FIELDS)
    area, gap, union, iou, turned, width, length, depth, distance, diagonal = _compare(a, b, FIELDS)
    by_shared, by_volume = divide(1.0 + iou, union), -divide(iou, union)
    by_width, by_length = tl.zeros_like(iou), tl.zeros_like(iou)
    by_depth, by_shift = tl.zeros_like(iou), tl.zeros_like(iou)
    if MODE == "giou":
        enclosing = (width * length) * depth
        inverse = divide(tl.full(iou.shape, 1.0, iou.dtype), enclosing)
        by_shared, by_volume = by_shared - inverse, by_volume + inverse
        by_enclosing = -divide(divide(union, enclosing), enclosing)
        by_width = by_enclosing * (length * depth)
        by_length = by_enclosing * (width * depth)
        by_depth = by_enclosing * (width * length)
    if MODE == "diou":
        by_shift = divide(tl.full(iou.shape, -2.0, iou.dtype), diagonal)
        by_diagonal = -(by_shift * divide(distance, diagonal))
        by_width, by_length, by_depth = by_diagonal * width, by_diagonal * length, by_diagonal * depth

    a_x, a_y, a_half_x, a_half_y, a_cos, a_sin, _, _, _, _, a_bottom, a_top = a
    b_x, b_y, b_half_x, b_half_y, b_cos, b_sin, _, _, _, _, b_bottom, b_top = b
    by_area, by_height = by_shared * maximum(gap, 0.0), by_shared * area
    shift_x, shift_y = a_x - b_x, a_y - b_y
    x, y, angle, a_wide, a_long, b_wide, b_long = shared_area_motion(
        shift_x, shift_y, a_half_x, a_half_y, a_cos, a_sin, b_half_x, b_half_y, b_cos, b_sin
    )
    x, y, angle = by_area * x, by_area * y, by_area * angle
    a_wide, a_long, b_wide, b_long = by_area * a_wide, by_area * a_long, by_area * b_wide, by_area * b_long
    if MODE != "iou":
        around = _enclosing_motion(a, b, turned, by_width, by_length)
        x, y, angle = x + around[0], y + around[1], angle + around[2]
        a_wide, a_long, b_wide, b_long = a_wide + around[3], a_long + around[4], b_wide + around[5], b_long + around[6]
    x, y = x + by_shift * shift_x, y + by_shift * shift_y
    b_angle = -angle - (shift_x * y - shift_y * x)

    some = _over(gap, tl.zeros_like(gap), 0.0)
    top, bottom = _over(b_top, a_top, 0.0), _over(a_bottom, b_bottom, 0.0)
    z = by_height * (some * (top - bottom)) + by_depth * (bottom - top)
    z = z + by_shift * ((a_bottom + a_top) * 0.5 - (b_bottom + b_top) * 0.5)
    a_deep = by_height * (some * (top + bottom)) + by_depth * (2.0 - (top + bottom))
    b_deep = by_height * (some * (2.0 - (top + bottom))) + by_depth * (top + bottom)
    grad = tl.load(grad_output + i * stride, i < count, 0.0).to(iou.dtype)
    valid = _valid(a, b)
    _store(first, i, i < count, valid, grad, a, x, y, z, a_wide, a_long, a_deep, angle, by_volume, FIELDS)
    _store(second, i, i < count, valid, grad, b, -x, -y, -z, b_wide, b_long, b_deep, b_angle, by_volume, FIELDS)


@triton.jit
def _load(boxes, i, mask, FIELDS: tl.constexpr):
    """x, y, half_x, half_y, cos, sin, reach_x, reach_y, area, dz, bottom, top. One not valid reaches nowhere."""
    REAL: tl.constexpr = tl.float64 if boxes.dtype.element_ty == tl.float64 else tl.float32
    SIZES: tl.constexpr = 3 if FIELDS == 7 else 2
    field = boxes + i * FIELDS
    x = tl.load(field, mask, 0.0).to(REAL)
    y = tl.load(field + 1, mask, 0.0).to(REAL)
    width = tl.load(field + SIZES, mask, 0.0).to(REAL)
    height = tl.load(field + SIZES + 1, mask, 0.0).to(REAL)
    angle = tl.load(field + FIELDS - 1, mask, 0.0).to(REAL)
    half_x, half_y, cos, sin, reach_x, reach_y, area = make_frame(x, y, width, height, angle, 0.0)
    if FIELDS == 7:
        z = tl.load(field + 2, mask, 0.0).to(REAL)
        dz = tl.load(field + 5, mask, 0.0).to(REAL)
        reach_x = tl.where((z * 0 + dz * 0 == 0) & (dz > 0), reach_x, float("-inf"))
    else:
        z, dz = tl.zeros_like(x), tl.full(x.shape, 1.0, REAL)
    return x, y, half_x, half_y, cos, sin, reach_x, reach_y, area, dz, z - dz * 0.5, z + dz * 0.5


@triton.jit
def _valid(a, b):
    return (a[6] > float("-inf")) & (b[6] > float("-inf"))


@triton.jit
def _compare(a, b, FIELDS: tl.constexpr):
    """The fields of `reference.Pair`."""
    a_x, a_y, a_half_x, a_half_y, a_cos, a_sin, a_reach_x, a_reach_y, a_area, a_dz, a_bottom, a_top = a
    b_x, b_y, b_half_x, b_half_y, b_cos, b_sin, b_reach_x, b_reach_y, b_area, b_dz, b_bottom, b_top = b
    area = overlap(
        a_x - b_x, a_y - b_y, a_half_x, a_half_y, a_cos, a_sin, a_area, b_half_x, b_half_y, b_cos, b_sin, b_area,
        0.0, 2, False,
    )  # fmt: skip
    area = tl.where(near(a_x, a_y, a_reach_x, a_reach_y, b_x, b_y, b_reach_x, b_reach_y), area, 0.0)
    gap = minimum(a_top, b_top) - maximum(a_bottom, b_bottom)
    shared = area * maximum(gap, 0.0)
    union = (a_area * a_dz + b_area * b_dz) - shared
    width, length, _, _, _, _, _, _ = _enclose(
        a_x - b_x, a_y - b_y, a_half_x, a_half_y, a_cos, a_sin, b_half_x, b_half_y, b_cos, b_sin
    )
    other_width, other_length, _, _, _, _, _, _ = _enclose(
        b_x - a_x, b_y - a_y, b_half_x, b_half_y, b_cos, b_sin, a_half_x, a_half_y, a_cos, a_sin
    )
    turned = other_width * other_length < width * length
    width, length = tl.where(turned, other_width, width), tl.where(turned, other_length, length)
    depth = maximum(a_top, b_top) - minimum(a_bottom, b_bottom)
    shift_x, shift_y = a_x - b_x, a_y - b_y
    shift_z = (a_bottom + a_top) * 0.5 - (b_bottom + b_top) * 0.5
    distance = (shift_x * shift_x + shift_y * shift_y) + shift_z * shift_z
    diagonal = width * width + length * length
    if FIELDS == 7:
        diagonal += depth * depth
    return area, gap, union, divide(shared, union), turned, width, length, depth, distance, diagonal


@triton.jit
def _enclose(shift_x, shift_y, half_x, half_y, cos, sin, outer_half_x, outer_half_y, outer_cos, outer_sin):
    """The fields of `reference.Enclosing`; shift: from the centre of the outer one to that of the inner one."""
    x, y = shift_x * outer_cos + shift_y * outer_sin, shift_y * outer_cos - shift_x * outer_sin
    cos, sin = cos * outer_cos + sin * outer_sin, sin * outer_cos - cos * outer_sin
    reach_x = half_x * tl.abs(cos) + half_y * tl.abs(sin)
    reach_y = half_x * tl.abs(sin) + half_y * tl.abs(cos)
    width = maximum(reach_x + x, outer_half_x) + maximum(reach_x - x, outer_half_x)
    length = maximum(reach_y + y, outer_half_y) + maximum(reach_y - y, outer_half_y)
    return width, length, x, y, reach_x, reach_y, cos, sin


@triton.jit
def _enclosing_motion(a, b, turned, by_width, by_length):
    """The fields of `reference.Motion`, given the derivatives by the sizes of the enclosing rectangle."""
    shift_x, shift_y = a[0] - b[0], a[1] - b[1]
    half_x, half_y = tl.where(turned, b[2], a[2]), tl.where(turned, b[3], a[3])
    outer_half_x, outer_half_y = tl.where(turned, a[2], b[2]), tl.where(turned, a[3], b[3])
    outer_cos, outer_sin = tl.where(turned, a[4], b[4]), tl.where(turned, a[5], b[5])
    _, _, centre_x, centre_y, reach_x, reach_y, cos, sin = _enclose(
        tl.where(turned, -shift_x, shift_x), tl.where(turned, -shift_y, shift_y), half_x, half_y,
        tl.where(turned, b[4], a[4]), tl.where(turned, b[5], a[5]), outer_half_x, outer_half_y, outer_cos, outer_sin,
    )  # fmt: skip
    close = slack(shift_x, shift_y, a[2], a[3], b[2], b[3])
    right, left = _over(reach_x + centre_x, outer_half_x, close), _over(reach_x - centre_x, outer_half_x, close)
    top, bottom = _over(reach_y + centre_y, outer_half_y, close), _over(reach_y - centre_y, outer_half_y, close)
    by_reach_x, by_reach_y = by_width * (right + left), by_length * (top + bottom)
    inner_x = by_reach_x * tl.abs(cos) + by_reach_y * tl.abs(sin)
    inner_y = by_reach_x * tl.abs(sin) + by_reach_y * tl.abs(cos)
    outer_x, outer_y = by_width * (2.0 - (right + left)), by_length * (2.0 - (top + bottom))
    along_x, along_y = by_width * (right - left), by_length * (top - bottom)
    x, y = along_x * outer_cos - along_y * outer_sin, along_x * outer_sin + along_y * outer_cos
    x, y = tl.where(turned, -x, x), tl.where(turned, -y, y)
    by_cos = tl.where(cos > 0, -sin, tl.where(cos < 0, sin, 0.0))
    by_sin = tl.where(sin > 0, cos, tl.where(sin < 0, -cos, 0.0))
    angle = by_reach_x * (half_x * by_cos + half_y * by_sin)
    angle = angle + by_reach_y * (half_x * by_sin + half_y * by_cos)
    angle = tl.where(turned, -angle - (shift_x * y - shift_y * x), angle)
    return (
        x, y, angle, tl.where(turned, outer_x, inner_x), tl.where(turned, outer_y, inner_y),
        tl.where(turned, inner_x, outer_x), tl.where(turned, inner_y, outer_y),
    )  # fmt: skip


@triton.jit
def _over(a, b, close):
    """1 where a > b, 0 where a < b, and 1/2 where they are equal or up to `close` apart."""
    half = tl.full(a.shape, 0.5, a.dtype)
    return tl.where(a > b + close, half, 0.0) + tl.where(a >= b - close, half, 0.0)


@triton.jit
def _store(out, i, mask, valid, grad, box, x, y, z, wide, long, deep, angle, by_volume, FIELDS: tl.constexpr):
    """Gradients of the fields of boxes; wide, long, deep: the derivatives by their half sizes."""
    SIZES: tl.constexpr = 3 if FIELDS == 7 else 2
    field = out + i * FIELDS
    width = wide * 0.5 + by_volume * ((box[3] * 2.0) * box[9])
    length = long * 0.5 + by_volume * ((box[2] * 2.0) * box[9])
    _store_field(field, mask, valid, grad, x)
    _store_field(field + 1, mask, valid, grad, y)
    _store_field(field + SIZES, mask, valid, grad, width)
    _store_field(field + SIZES + 1, mask, valid, grad, length)
    _store_field(field + FIELDS - 1, mask, valid, grad, angle)
    if FIELDS == 7:
        _store_field(field + 2, mask, valid, grad, z)
        _store_field(field + 5, mask, valid, grad, deep * 0.5 + by_volume * box[8])


@triton.jit
def _store_field(at, mask, valid, grad, value):
    value = tl.where(valid & (value * 0 == 0), grad * value, 0.0)
    tl.store(at, value.to(at.dtype.element_ty), mask)
