"""The area that two rotated rectangles share, in plain torch."""

from __future__ import annotations

from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from triops._dtypes import compute_dtype
from triops._geometry.box.reference import cos_sin

Mode = Literal["iou", "iof", "area"]
MODES: tuple[Mode, ...] = get_args(Mode)
SLACK = 4  # units in the last place of the rectangles' extent within which two sides count as one
FLAT = 1e-20  # what the sine or cosine of parallel sides is taken as: a step that is not 0
SMALLEST_UNION = 1e-8  # of mmcv, where a margin can make the shared area larger than both rectangles


class Frames(NamedTuple):
    """Rectangles, one tensor per field."""

    x: Tensor
    y: Tensor
    half_x: Tensor
    half_y: Tensor
    cos: Tensor
    sin: Tensor
    reach_x: Tensor
    reach_y: Tensor
    area: Tensor

    def rows(self) -> Frames:
        return Frames(*(field[:, None] for field in self))


def frames(boxes: Tensor, clockwise: bool, margin: float) -> Frames:
    """boxes [..., 5] -> their frames. One with a non-finite field or without a positive size reaches nowhere."""
    boxes = boxes.to(compute_dtype(boxes.dtype))
    x, y, width, height, angle = boxes.unbind(-1)
    cos, sin = (v.to(boxes.dtype) for v in cos_sin((angle if clockwise else -angle).double()))
    half_x, half_y = width * 0.5, height * 0.5
    grow = torch.full_like(x, margin)
    reach_x = (half_x + grow) * cos.abs() + (half_y + grow) * sin.abs()
    reach_y = (half_x + grow) * sin.abs() + (half_y + grow) * cos.abs()
    valid = boxes.isfinite().all(-1) & (width > 0) & (height > 0)
    reach_x = torch.where(valid, reach_x, -torch.inf)
    return Frames(x, y, half_x, half_y, cos, sin, reach_x, reach_y, width * height)


def overlap(a: Frames, b: Frames, mode: str, margin: float) -> Tensor:
    """Shared area of rectangles `a` and `b`, which broadcast; for "iou" and "iof" over the union or the area of `a`."""
    shared = shared_area(a, b) if margin == 0 else shared_polygon(a, b, margin)
    if mode == "area":
        return shared
    base = a.area + b.area - shared if mode == "iou" else a.area
    if margin > 0:
        base = maximum(base, torch.full_like(base, SMALLEST_UNION))
    ratio = shared / base
    return torch.where(ratio > 0, ratio, 0.0)  # also for NaN, of areas beyond the largest or below the smallest float


def near(a: Frames, b: Frames) -> Tensor:
    """Whether their axis-aligned bounding boxes overlap; if not, they share nothing."""
    return ((a.x - b.x).abs() < a.reach_x + b.reach_x) & ((a.y - b.y).abs() < a.reach_y + b.reach_y)


def shared_area(a: Frames, b: Frames) -> Tensor:
    shift_x, shift_y = a.x - b.x, a.y - b.y
    cos = a.cos * b.cos + a.sin * b.sin
    sin = a.sin * b.cos - a.cos * b.sin

    # In the axes of a: disjoint ones share nothing, whatever rounding says. (In the axes of b that comes by itself.)
    along_x, along_y = shift_x * a.cos + shift_y * a.sin, shift_y * a.cos - shift_x * a.sin
    overlapping = near(a, b)
    overlapping = overlapping & (along_x.abs() < a.half_x + (b.half_x * cos.abs() + b.half_y * sin.abs()))
    overlapping = overlapping & (along_y.abs() < a.half_y + (b.half_x * sin.abs() + b.half_y * cos.abs()))

    # In the axes of b, with the centre of a as origin: b is a range of x and of y. The origin of y then moves into
    # that range, which changes no area and keeps the numbers, and so their rounding, as small as the shared part.
    centre_x, centre_y = shift_x * b.cos + shift_y * b.sin, shift_y * b.cos - shift_x * b.sin
    low_x, high_x = -b.half_x - centre_x, b.half_x - centre_x
    low_y, high_y = -b.half_y - centre_y, b.half_y - centre_y
    origin = _clamp(torch.zeros_like(low_y), low_y, high_y)
    low_y, high_y = low_y - origin, high_y - origin

    xs, ys = _corners(a, cos, sin)
    ys = [y - origin for y in ys]
    clipped = [_clamp(x, low_x, high_x) for x in xs]
    slopes = sin / cos, -(cos / sin)  # infinite or NaN where an edge is vertical, which then has no width

    def strip(i: int, j: int, slope: Tensor) -> Tensor:
        """Twice the integral of y, clamped, over the edge from corner i to corner j, within the range of x."""
        low, high = minimum(ys[i], ys[j]), maximum(ys[i], ys[j])
        begin = _clamp(ys[i] + (clipped[i] - xs[i]) * slope, low, high)
        end = _clamp(ys[j] + (clipped[j] - xs[j]) * slope, low, high)
        inner_begin, inner_end = _clamp(begin, low_y, high_y), _clamp(end, low_y, high_y)
        # The mean of the clamped y is halfway between its ends, shifted towards the end that is cut off more.
        length = (end - begin).abs()
        shift = ((end - inner_end).abs() - (begin - inner_begin).abs()) / length
        shift = torch.where(length > 0, shift, 0.0)
        mean = (inner_begin + inner_end) + (inner_end - inner_begin) * shift
        return (clipped[j] - clipped[i]) * mean

    first = strip(0, 1, slopes[0]) + strip(1, 2, slopes[1])
    second = strip(2, 3, slopes[0]) + strip(3, 0, slopes[1])
    shared = (first + second) * -0.5
    shared = minimum(minimum(shared, a.area), b.area)
    return torch.where(overlapping & (shared > 0), shared, 0.0)


class Motion(NamedTuple):
    """Derivatives of a number by how two rectangles `a` and `b` lie to each other.

    Such a number stays the same when both move or turn together, so these hold those by the centre and angle of `b`.
    """

    x: Tensor  # by the centre of a; minus these by that of b
    y: Tensor
    angle: Tensor  # of a
    a_half_x: Tensor
    a_half_y: Tensor
    b_half_x: Tensor
    b_half_y: Tensor

    def angle_of_b(self, a: Frames, b: Frames) -> Tensor:
        return -self.angle - ((a.x - b.x) * self.y - (a.y - b.y) * self.x)


def shared_area_motion(a: Frames, b: Frames) -> Motion:
    """Derivatives of the area that `a` and `b` share.

    A side that moves outwards by d adds d times the length of it that lies in the other rectangle. Where a side lies on
    one of the other's, to within rounding, half of it counts: the mean of the derivatives from both hands.
    """
    shift_x, shift_y = a.x - b.x, a.y - b.y
    cos = a.cos * b.cos + a.sin * b.sin
    sin = a.sin * b.cos - a.cos * b.sin
    grow = slack(a, b)
    in_b = shift_x * b.cos + shift_y * b.sin, shift_y * b.cos - shift_x * b.sin
    in_a = shift_x * a.cos + shift_y * a.sin, shift_y * a.cos - shift_x * a.sin
    right, left, top, bottom, angle = _sides_inside(a, b, *in_b, cos, sin, grow)
    b_right, b_left, b_top, b_bottom, _ = _sides_inside(b, a, -in_a[0], -in_a[1], cos, -sin, grow)
    along_x, along_y = right - left, top - bottom
    return Motion(
        along_x * a.cos - along_y * a.sin, along_x * a.sin + along_y * a.cos, angle,
        right + left, top + bottom, b_right + b_left, b_top + b_bottom,
    )  # fmt: skip


def slack(a: Frames, b: Frames) -> Tensor:
    """By how much rounding may move a side of one of two rectangles."""
    extent = ((a.half_x + a.half_y) + (b.half_x + b.half_y)) + ((a.x - b.x).abs() + (a.y - b.y).abs())
    return extent * (SLACK * torch.finfo(extent.dtype).eps)


def _sides_inside(
    a: Frames, b: Frames, centre_x: Tensor, centre_y: Tensor, cos: Tensor, sin: Tensor, grow: Tensor
) -> tuple[Tensor, ...]:
    """Lengths of the sides of `a` in `b`: right, left, top, bottom; and the derivative of the area by the angle of `a`.

    centre_x to sin: the centre and the rotation of `a` in the axes of `b`. Each is a mean of two, in `b` grown and
    shrunk, which is the length itself where sides cross, and half of a side that lies on one of `b`.
    """
    wide_x, wide_y = b.half_x + grow, b.half_y + grow
    narrow_x, narrow_y = _positive(b.half_x - grow), _positive(b.half_y - grow)
    per_cos, per_sin = 1.0 / _not_flat(cos), 1.0 / _not_flat(sin)

    def within(
        x: Tensor, y: Tensor, per_x: Tensor, per_y: Tensor, half: Tensor, limit_x: Tensor, limit_y: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Of the points (x + t / per_x, y + t / per_y), |t| <= half: the length inside, and twice the integral of t."""
        from_x, to_x = _ordered((-limit_x - x) * per_x, (limit_x - x) * per_x)
        from_y, to_y = _ordered((-limit_y - y) * per_y, (limit_y - y) * per_y)
        begin, end = maximum(maximum(from_x, from_y), -half), minimum(minimum(to_x, to_y), half)
        length = _positive(end - begin)
        return length, length * (begin + end)

    def side(x: Tensor, y: Tensor, per_x: Tensor, per_y: Tensor, half: Tensor) -> tuple[Tensor, Tensor]:
        wide, wide_moment = within(x, y, per_x, per_y, half, wide_x, wide_y)
        narrow, narrow_moment = within(x, y, per_x, per_y, half, narrow_x, narrow_y)
        return (wide + narrow) * 0.5, (wide_moment + narrow_moment) * 0.25

    ux, uy = a.half_x * cos, a.half_x * sin
    vx, vy = a.half_y * sin, a.half_y * cos
    right, right_moment = side(centre_x + ux, centre_y + uy, -per_sin, per_cos, a.half_y)
    left, left_moment = side(centre_x - ux, centre_y - uy, -per_sin, per_cos, a.half_y)
    top, top_moment = side(centre_x - vx, centre_y + vy, per_cos, per_sin, a.half_x)
    bottom, bottom_moment = side(centre_x + vx, centre_y - vy, per_cos, per_sin, a.half_x)
    return right, left, top, bottom, (left_moment - right_moment) + (top_moment - bottom_moment)


def shared_polygon(a: Frames, b: Frames, margin: float) -> Tensor:
    shift_x, shift_y = a.x - b.x, a.y - b.y
    cos = a.cos * b.cos + a.sin * b.sin
    sin = a.sin * b.cos - a.cos * b.sin
    centre_x, centre_y = shift_x * b.cos + shift_y * b.sin, shift_y * b.cos - shift_x * b.sin
    low_x, high_x = -b.half_x - centre_x, b.half_x - centre_x
    low_y, high_y = -b.half_y - centre_y, b.half_y - centre_y
    grow = torch.full_like(cos, margin)
    points: list[tuple[Tensor, Tensor, Tensor]] = []  # x, y, and whether it belongs to the polygon

    xs, ys = _corners(a, cos, sin)
    for i in range(4):  # where an edge of a enters b and where it leaves
        x, y = xs[i], ys[i]
        step_x, step_y = xs[(i + 1) % 4] - x, ys[(i + 1) % 4] - y
        from_x, to_x = _ordered((low_x - x) / step_x, (high_x - x) / step_x)
        from_y, to_y = _ordered((low_y - y) / step_y, (high_y - y) / step_y)
        enter, leave = maximum(from_x, from_y), minimum(to_x, to_y)
        for t in (enter, leave):
            points.append((x + t * step_x, y + t * step_y, (enter < leave) & (t > 0) & (t < 1)))
    for x, y in zip(xs, ys, strict=True):
        inside = ((x + centre_x).abs() < b.half_x + grow) & ((y + centre_y).abs() < b.half_y + grow)
        points.append((x, y, inside))
    for x, y in ((low_x, low_y), (high_x, low_y), (high_x, high_y), (low_x, high_y)):
        inside = ((x * cos + y * sin).abs() < a.half_x + grow) & ((y * cos - x * sin).abs() < a.half_y + grow)
        points.append((x, y, inside))

    count, sum_x, sum_y = (torch.zeros_like(cos) for _ in range(3))
    for x, y, valid in points:
        count = count + valid.to(cos.dtype)
        sum_x = sum_x + torch.where(valid, x, 0.0)
        sum_y = sum_y + torch.where(valid, y, 0.0)
    middle_x, middle_y = sum_x / count, sum_y / count
    keys = [
        torch.where(valid, _angle_key(x - middle_x, y - middle_y), 4.0)  # the others come last
        for x, y, valid in points
    ]
    order = torch.stack(keys, -1).sort(dim=-1, stable=True).indices
    xs_sorted = torch.stack([x.expand_as(cos) for x, _, _ in points], -1).gather(-1, order)
    ys_sorted = torch.stack([y.expand_as(cos) for _, y, _ in points], -1).gather(-1, order)

    doubled = torch.zeros_like(cos)
    previous_x, previous_y = torch.zeros_like(cos), torch.zeros_like(cos)
    for k in range(1, len(points)):  # triangles between the first point and two neighbors
        valid = count > k
        x = torch.where(valid, xs_sorted[..., k] - xs_sorted[..., 0], 0.0)
        y = torch.where(valid, ys_sorted[..., k] - ys_sorted[..., 0], 0.0)
        doubled = doubled + (previous_x * y - previous_y * x)
        previous_x, previous_y = x, y
    shared = doubled.abs() * 0.5
    return torch.where(near(a, b) & (shared > 0), shared, 0.0)


def _corners(a: Frames, cos: Tensor, sin: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """x and y of the corners of `a`, counter-clockwise, from its own centre."""
    ux, uy = a.half_x * cos, a.half_x * sin
    vx, vy = a.half_y * sin, a.half_y * cos
    return [-ux + vx, ux + vx, ux - vx, -ux - vx], [-uy - vy, uy - vy, uy + vy, -uy + vy]


def _angle_key(x: Tensor, y: Tensor) -> Tensor:
    """Increases with the angle of (x, y), as atan2 does, from -2 to 2, in operations that every device rounds alike."""
    part = x / (x.abs() + y.abs())
    part = torch.where(part >= -1, part, 1.0)  # also for NaN, at the centre itself
    return torch.where(y < 0, part - 1.0, 1.0 - part)


def _not_flat(value: Tensor) -> Tensor:
    return torch.where(value.abs() > FLAT, value, FLAT)


def _positive(value: Tensor) -> Tensor:
    return torch.where(value > 0, value, 0.0)


# These order NaN the same way on every device, which minimum, maximum and clamp do not.
def minimum(a: Tensor, b: Tensor) -> Tensor:
    return torch.where(a < b, a, b)


def maximum(a: Tensor, b: Tensor) -> Tensor:
    return torch.where(a > b, a, b)


def _clamp(value: Tensor, low: Tensor, high: Tensor) -> Tensor:
    return maximum(minimum(value, high), low)


def _ordered(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    return torch.where(a < b, a, b), torch.where(a < b, b, a)
