"""The specification of diff_iou_rotated and of its gradient.

The gradient does not go through the clipping: `shared_area_motion` has the derivatives of the area that two rectangles
share from how much of their sides lies in each other, finite wherever they lie. The rest is the chain rule.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from triops._dtypes import compute_dtype
from triops._geometry.rotated.reference import (
    Frames,
    Motion,
    frames,
    maximum,
    minimum,
    shared_area,
    shared_area_motion,
    slack,
)

Mode = Literal["iou", "giou", "diou"]
MODES: tuple[Mode, ...] = get_args(Mode)


class Solid(NamedTuple):
    """Boxes, one tensor per field. A rectangle is a box of height 1, so that its volume is its area."""

    frame: Frames
    dz: Tensor
    bottom: Tensor
    top: Tensor
    valid: Tensor  # finite, with sizes above 0


class Pair(NamedTuple):
    """What value and gradient of two boxes are made of."""

    area: Tensor  # that the rectangles share
    gap: Tensor  # from the higher bottom to the lower top, below 0 where the boxes lie above each other
    union: Tensor
    iou: Tensor
    turned: Tensor  # whether the enclosing box has the axes of the first box
    width: Tensor  # of the enclosing box
    length: Tensor
    depth: Tensor
    distance: Tensor  # between the centres, squared
    diagonal: Tensor  # of the enclosing box, squared


def diff_iou_rotated(boxes1: Tensor, boxes2: Tensor, mode: str) -> Tensor:
    """boxes1, boxes2 [..., 5] or [..., 7] -> [...]"""
    a, b = solid(boxes1), solid(boxes2)
    pair = compare(a, b, boxes1.shape[-1])
    value = pair.iou
    if mode == "giou":
        enclosing = (pair.width * pair.length) * pair.depth
        outside = enclosing - pair.union
        value = value - torch.where(outside > 0, outside, 0.0) / enclosing
    elif mode == "diou":
        value = value - pair.distance / pair.diagonal
    return torch.where(a.valid & b.valid & value.isfinite(), value, 0.0).to(boxes1.dtype)


def diff_iou_rotated_backward(grad_output: Tensor, boxes1: Tensor, boxes2: Tensor, mode: str) -> tuple[Tensor, Tensor]:
    """grad_output [...] -> the gradients of boxes1 and boxes2."""
    a, b = solid(boxes1), solid(boxes2)
    pair = compare(a, b, boxes1.shape[-1])
    zero = torch.zeros_like(pair.iou)

    # The value's derivatives by the shared volume, by that of each box, by the sizes of the enclosing box, and by the
    # vector between the centres, over this vector.
    by_shared, by_volume = (1.0 + pair.iou) / pair.union, -(pair.iou / pair.union)
    by_width, by_length, by_depth, by_shift = zero, zero, zero, zero
    if mode == "giou":
        enclosing = (pair.width * pair.length) * pair.depth
        by_shared, by_volume = by_shared - 1.0 / enclosing, by_volume + 1.0 / enclosing
        by_enclosing = -((pair.union / enclosing) / enclosing)
        by_width = by_enclosing * (pair.length * pair.depth)
        by_length = by_enclosing * (pair.width * pair.depth)
        by_depth = by_enclosing * (pair.width * pair.length)
    elif mode == "diou":
        by_shift = -2.0 / pair.diagonal
        by_diagonal = -(by_shift * (pair.distance / pair.diagonal))
        by_width, by_length, by_depth = by_diagonal * pair.width, by_diagonal * pair.length, by_diagonal * pair.depth

    height = torch.where(pair.gap > 0, pair.gap, 0.0)
    by_area, by_height = by_shared * height, by_shared * pair.area
    shared = shared_area_motion(a.frame, b.frame)
    around = enclosing_motion(a.frame, b.frame, pair.turned, by_width, by_length)
    motion = Motion(*(by_area * s + e for s, e in zip(shared, around, strict=True)))
    motion = motion._replace(
        x=motion.x + by_shift * (a.frame.x - b.frame.x), y=motion.y + by_shift * (a.frame.y - b.frame.y)
    )
    some = over(pair.gap, zero, zero)
    top, bottom = over(b.top, a.top, zero), over(a.bottom, b.bottom, zero)  # 1 where those of a bound what is shared
    z = by_height * (some * (top - bottom)) + by_depth * (bottom - top)
    z = z + by_shift * ((a.bottom + a.top) * 0.5 - (b.bottom + b.top) * 0.5)
    a_half_z = by_height * (some * (top + bottom)) + by_depth * (2.0 - (top + bottom))
    b_half_z = by_height * (some * (2.0 - (top + bottom))) + by_depth * (top + bottom)

    def gradient(
        s: Solid, x: Tensor, y: Tensor, z: Tensor, half_x: Tensor, half_y: Tensor, half_z: Tensor, angle: Tensor
    ) -> Tensor:
        width = half_x * 0.5 + by_volume * ((s.frame.half_y * 2.0) * s.dz)
        length = half_y * 0.5 + by_volume * ((s.frame.half_x * 2.0) * s.dz)
        depth = half_z * 0.5 + by_volume * s.frame.area
        all_fields = [x, y, z, width, length, depth, angle]
        fields = torch.stack(all_fields if boxes1.shape[-1] == 7 else [x, y, width, length, angle], -1)
        known = (a.valid & b.valid)[..., None] & fields.isfinite()
        return torch.where(known, grad_output.to(fields.dtype)[..., None] * fields, 0.0).to(boxes1.dtype)

    m = motion
    first = gradient(a, m.x, m.y, z, m.a_half_x, m.a_half_y, a_half_z, m.angle)
    second = gradient(b, -m.x, -m.y, -z, m.b_half_x, m.b_half_y, b_half_z, m.angle_of_b(a.frame, b.frame))
    return first, second


def solid(boxes: Tensor) -> Solid:
    boxes = boxes.to(compute_dtype(boxes.dtype))
    if boxes.shape[-1] == 5:
        rectangles, z, dz = boxes, torch.zeros_like(boxes[..., 0]), torch.ones_like(boxes[..., 0])
    else:
        rectangles, z, dz = boxes[..., [0, 1, 3, 4, 6]], boxes[..., 2], boxes[..., 5]
    frame = frames(rectangles, True, 0.0)
    valid = (frame.reach_x > -torch.inf) & z.isfinite() & dz.isfinite() & (dz > 0)
    return Solid(frame, dz, z - dz * 0.5, z + dz * 0.5, valid)


def compare(a: Solid, b: Solid, fields: int) -> Pair:
    area = shared_area(a.frame, b.frame)
    gap = minimum(a.top, b.top) - maximum(a.bottom, b.bottom)
    shared = area * torch.where(gap > 0, gap, 0.0)
    union = (a.frame.area * a.dz + b.frame.area * b.dz) - shared

    along_b, along_a = enclose(a.frame, b.frame), enclose(b.frame, a.frame)
    turned = along_a.width * along_a.length < along_b.width * along_b.length
    width = torch.where(turned, along_a.width, along_b.width)
    length = torch.where(turned, along_a.length, along_b.length)
    depth = maximum(a.top, b.top) - minimum(a.bottom, b.bottom)

    shift_x, shift_y = a.frame.x - b.frame.x, a.frame.y - b.frame.y
    shift_z = (a.bottom + a.top) * 0.5 - (b.bottom + b.top) * 0.5
    distance = (shift_x * shift_x + shift_y * shift_y) + shift_z * shift_z
    diagonal = width * width + length * length
    diagonal = diagonal + depth * depth if fields == 7 else diagonal
    return Pair(area, gap, union, shared / union, turned, width, length, depth, distance, diagonal)


class Enclosing(NamedTuple):
    """The smallest rectangle with the axes of `outer` around `inner` and `outer`; `inner` as it lies in those axes."""

    width: Tensor
    length: Tensor
    centre_x: Tensor
    centre_y: Tensor
    reach_x: Tensor
    reach_y: Tensor
    cos: Tensor
    sin: Tensor


def enclose(inner: Frames, outer: Frames) -> Enclosing:
    shift_x, shift_y = inner.x - outer.x, inner.y - outer.y
    cos = inner.cos * outer.cos + inner.sin * outer.sin
    sin = inner.sin * outer.cos - inner.cos * outer.sin
    x, y = shift_x * outer.cos + shift_y * outer.sin, shift_y * outer.cos - shift_x * outer.sin
    reach_x = inner.half_x * cos.abs() + inner.half_y * sin.abs()
    reach_y = inner.half_x * sin.abs() + inner.half_y * cos.abs()
    width = maximum(reach_x + x, outer.half_x) + maximum(reach_x - x, outer.half_x)
    length = maximum(reach_y + y, outer.half_y) + maximum(reach_y - y, outer.half_y)
    return Enclosing(width, length, x, y, reach_x, reach_y, cos, sin)


def enclosing_motion(a: Frames, b: Frames, turned: Tensor, by_width: Tensor, by_length: Tensor) -> Motion:
    """Derivatives of a number, given those by the sizes of the enclosing rectangle."""
    inner = Frames(*(torch.where(turned, g, f) for f, g in zip(a, b, strict=True)))
    outer = Frames(*(torch.where(turned, f, g) for f, g in zip(a, b, strict=True)))
    e, near = enclose(inner, outer), slack(a, b)
    # 1 where the inner one reaches beyond the outer one on that side
    right, left = over(e.reach_x + e.centre_x, outer.half_x, near), over(e.reach_x - e.centre_x, outer.half_x, near)
    top, bottom = over(e.reach_y + e.centre_y, outer.half_y, near), over(e.reach_y - e.centre_y, outer.half_y, near)
    by_reach_x, by_reach_y = by_width * (right + left), by_length * (top + bottom)
    cos, sin = e.cos.abs(), e.sin.abs()
    inner_half_x, inner_half_y = by_reach_x * cos + by_reach_y * sin, by_reach_x * sin + by_reach_y * cos
    outer_half_x, outer_half_y = by_width * (2.0 - (right + left)), by_length * (2.0 - (top + bottom))
    along_x, along_y = by_width * (right - left), by_length * (top - bottom)
    sign = torch.where(turned, -torch.ones_like(along_x), 1.0)  # what moves b by d moves a by -d
    x = (along_x * outer.cos - along_y * outer.sin) * sign
    y = (along_x * outer.sin + along_y * outer.cos) * sign
    # d|cos| is -sin and d|sin| is cos, with the signs of cos and sin
    by_cos, by_sin = e.sin * -torch.sign(e.cos), e.cos * torch.sign(e.sin)
    angle = by_reach_x * (inner.half_x * by_cos + inner.half_y * by_sin)
    angle = angle + by_reach_y * (inner.half_x * by_sin + inner.half_y * by_cos)
    of_the_other = -angle - ((a.x - b.x) * y - (a.y - b.y) * x)
    return Motion(
        x, y, torch.where(turned, of_the_other, angle),
        torch.where(turned, outer_half_x, inner_half_x), torch.where(turned, outer_half_y, inner_half_y),
        torch.where(turned, inner_half_x, outer_half_x), torch.where(turned, inner_half_y, outer_half_y),
    )  # fmt: skip


def over(a: Tensor, b: Tensor, near: Tensor) -> Tensor:
    """1 where a > b, 0 where a < b, and 1/2 where they are equal or up to `near` apart."""
    return (a > b + near).to(a.dtype) * 0.5 + (a >= b - near).to(a.dtype) * 0.5
