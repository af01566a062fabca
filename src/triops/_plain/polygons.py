"""Polygons as mmcv's functions take them, in plain torch: quadrilaterals, sets of nine points, sorted vertices."""

from __future__ import annotations

import torch
from torch import Tensor

from triops._geometry.polygon.reference import corners, cross, hull, signed_area

NEAR = 1e-8  # mmcv's: below, a number counts as 0
MOST_VERTICES = 8  # of what two rectangles share
ROWS = 2**16  # pairs at a time


def sorted_vertices(vertices: Tensor, mask: Tensor) -> Tensor:
    """Indices of the valid vertices by their angle from the x axis, then the first again, then any not valid one.

    vertices [..., M, 2] around their own mean, mask [..., M] -> int32 [..., 9]; the first 8 of M are corners of boxes,
    the rest are points where sides cross, 0 where not valid. Of fewer than 3 vertices all are not valid ones. Vertices
    that equal the one before them are left out.
    """
    vertices, slot = vertices.double(), torch.arange(vertices.shape[-2], device=vertices.device)
    x, y = vertices.unbind(-1)
    lengths = x * x + y * y
    part = torch.where(lengths > 0, x * x.abs() / lengths, 0.0)
    angle = torch.where((y > 0) | ((y == 0) & (x >= 0)), 1.0 - part, 3.0 + part)  # rises from 0 to 4 with the angle
    order = torch.where(mask, angle, torch.inf).sort(dim=-1, stable=True).indices
    points = corners(vertices, order)
    near = 1e-6 * torch.where(mask, vertices.abs().amax(-1), 0.0).amax(-1, keepdim=True)
    repeated = (points - points.roll(1, -2)).abs().amax(-1) <= near
    kept = mask.gather(-1, order) & (~repeated | (slot == 0))
    order, count = order.gather(-1, _front(kept)), kept.sum(-1)

    # Sides on each other cross anywhere along them. Of more than 8 vertices those go that change the area least.
    points = corners(vertices, order)
    after = _following(points, count) - points
    before = torch.cat([corners(after, (count - 1).clamp(min=0)[..., None]), after[..., :-1, :]], -2)
    change = torch.where(slot < count[..., None], cross(before, after).abs(), -1.0)
    rank = change.argsort(dim=-1, descending=True, stable=True).argsort(-1)
    kept = (slot < count[..., None]) & (rank < MOST_VERTICES)
    order, last = order.gather(-1, _front(kept)), kept.sum(-1, keepdim=True)

    first, crossings = order[..., :1], mask[..., 8:]
    free = torch.where(crossings.all(-1, keepdim=True), first, 8 + crossings.to(torch.int8).argmin(-1, keepdim=True))
    slot = slot[: MOST_VERTICES + 1]
    found = torch.where(slot < last, order[..., : MOST_VERTICES + 1], torch.where(slot == last, first, free))
    return torch.where(mask.sum(-1, keepdim=True) >= 3, found, free).int()


def _front(valid: Tensor) -> Tensor:
    """Indices of the valid ones, in their order, and behind them those of the others."""
    return (~valid).to(torch.int8).sort(dim=-1, stable=True).indices


def quadrilateral_overlaps(boxes1: Tensor, boxes2: Tensor, mode: str, aligned: bool = False) -> Tensor:
    """Overlaps [N, M] or, aligned, [N] of quadrilaterals [N, 4, 2] and [M, 4, 2], by mmcv's rule.

    What two share is the hull of the points where sides cross and of the corners of each in the other, where a corner
    is inside when it lies within the first and the last side along them: right for rectangles, and generous for others.
    """
    low1, high1, low2, high2 = boxes1.amin(-2), boxes1.amax(-2), boxes2.amin(-2), boxes2.amax(-2)
    if not aligned:
        low1, high1 = low1[:, None], high1[:, None]
    near = ((low1 <= high2) & (low2 <= high1)).all(-1)
    out = boxes1.new_zeros(near.shape)
    for pairs in near.nonzero().split(ROWS):
        found = _near_overlaps(boxes1[pairs[:, 0]], boxes2[pairs[:, -1]], mode)
        out[tuple(pairs.t())] = found
    return out


def _near_overlaps(p: Tensor, q: Tensor, mode: str) -> Tensor:
    middle = torch.cat([p, q], -2).mean(-2, keepdim=True)
    p, q = p - middle, q - middle
    p_step, q_step = p.roll(-1, -2) - p, q.roll(-1, -2) - q
    apart = q[:, None] - p[:, :, None]  # [R, 4, 4, 2]
    area = cross(q_step[:, None], p_step[:, :, None])
    t, u = cross(q_step[:, None], apart) / area, cross(p_step[:, :, None], apart) / area
    crossing = (area.abs() > 1e-14) & (t >= 0) & (t <= 1) & (u >= 0) & (u <= 1)
    crossings = p[:, :, None] + p_step[:, :, None] * torch.where(crossing, t, 0.0)[..., None]
    points = torch.cat([crossings.flatten(1, 2), p, q], 1)
    valid = torch.cat([crossing.flatten(1), _projects_inside(p, q), _projects_inside(q, p)], 1)
    some = valid.sum(-1) > 2
    valid[~some, 0] = True  # a hull needs a point
    shared = torch.where(some, signed_area(corners(points, hull(points, valid))), 0.0)
    area1, area2 = _fan_area(p), _fan_area(q)
    base = area1 + area2 - shared if mode == "iou" else area1
    return torch.where((area1 < 1e-14) | (area2 < 1e-14), 0.0, shared / base)


def _projects_inside(points: Tensor, q: Tensor) -> Tensor:
    """Whether points [R, 4, 2], projected on the first and on the last side of q [R, 4, 2], lie on them."""
    inside = torch.ones_like(points[..., 0], dtype=torch.bool)
    for side in (q[:, 1:2] - q[:, :1], q[:, 3:] - q[:, :1]):
        along = ((points - q[:, :1]) * side).sum(-1)
        inside &= (along >= 0) & (along <= side.square().sum(-1))
    return inside


def _fan_area(q: Tensor) -> Tensor:
    """Of the two triangles from the first corner, each counted positive."""
    spokes = q[:, 1:] - q[:, :1]
    return cross(spokes[:, :2], spokes[:, 1:]).abs().sum(-1) * 0.5


def convex_giou(pointsets: Tensor, polygons: Tensor) -> Tensor:
    """Generalised IoU [N] of the hulls of points [N, 9, 2] with polygons [N, 4, 2] in their place, differentiable.

    Computed as mmcv does, by triangles between each side and the origin, so that autograd gives mmcv's gradient where
    sides lie on each other, too.
    """
    with torch.no_grad():
        own, around = hull(pointsets), hull(torch.cat([pointsets, polygons], 1))
        turned = signed_area(polygons) < 0
    p, q = corners(pointsets, own), torch.where(turned[:, None, None], polygons.flip(1), polygons)
    sides = p[:, :, None], p.roll(-1, 1)[:, :, None], q[:, None], q.roll(-1, 1)[:, None]
    shared = _triangles(*torch.broadcast_tensors(*sides)).sum((1, 2))
    union = signed_area(p) + signed_area(q).abs() - shared
    enclosing = signed_area(corners(torch.cat([pointsets, polygons], 1), around))
    return shared / union - (enclosing - union) / enclosing


def _triangles(a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> Tensor:
    """The signed area that the triangles (0, a, b) and (0, c, d) share; all [..., 2]."""
    first, second = _sign(cross(a, b)), _sign(cross(c, d))
    a, b = (torch.where((first < 0)[..., None], v, w) for v, w in ((b, a), (a, b)))
    c, d = (torch.where((second < 0)[..., None], v, w) for v, w in ((d, c), (c, d)))
    zero = torch.zeros_like(a)
    points, count = torch.stack([zero, a, b], -2), torch.full(a.shape[:-1], 3, device=a.device)
    for begin, end in ((zero, c), (c, d), (d, zero)):
        points, count = _cut(points, count, begin, end)
    following = _following(points, count)
    used = torch.arange(points.shape[-2], device=a.device) < count[..., None]
    area = torch.where(used, cross(points, following), 0.0).sum(-1) * 0.5
    return first * second * area


def _sign(value: Tensor) -> Tensor:
    return (value > NEAR).to(value.dtype) - (value < -NEAR).to(value.dtype)


def _following(points: Tensor, count: Tensor) -> Tensor:
    """For each of the first `count` points the one behind it, and the first for the last."""
    index = torch.arange(1, points.shape[-2] + 1, device=points.device).expand(points.shape[:-1])
    return corners(points, torch.where(index >= count[..., None], 0, index).clamp(max=points.shape[-2] - 1))


def _cut(points: Tensor, count: Tensor, begin: Tensor, end: Tensor) -> tuple[Tensor, Tensor]:
    """What of a polygon lies to the left of the line from `begin` to `end`: one corner more at most."""
    slots = points.shape[-2]
    used = torch.arange(slots, device=points.device) < count[..., None]
    following = _following(points, count)
    side = cross((end - begin)[..., None, :], points - begin[..., None, :])
    next_side = cross((end - begin)[..., None, :], following - begin[..., None, :])
    kept = used & (_sign(side) > 0)
    crossed = used & (_sign(side) != _sign(next_side))
    between = torch.where(crossed, next_side - side, 1.0)[..., None]
    crossing = (points * next_side[..., None] - following * side[..., None]) / between
    points = torch.stack([points, crossing], -2).flatten(-3, -2)  # each point, and what lies between it and the next
    valid = torch.stack([kept, crossed], -1).flatten(-2)
    points, count = _packed(points, valid, slots + 2)

    with torch.no_grad():  # equal neighbors become one, the first of them
        used = torch.arange(slots + 2, device=points.device) < count[..., None]
        repeated = (points - points.roll(1, -2)).abs().amax(-1) <= NEAR
        repeated[..., 0] = False
        valid = used & ~repeated
    points, count = _packed(points, valid, slots + 1)
    with torch.no_grad():
        last = corners(points, (count - 1).clamp(min=0)[..., None])[..., 0, :]
        closed = (count > 1) & ((last - points[..., 0, :]).abs().amax(-1) <= NEAR)
    return points, count - closed.long()


def _packed(points: Tensor, valid: Tensor, slots: int) -> tuple[Tensor, Tensor]:
    """The valid points in front, and how many they are."""
    return corners(points, _front(valid)[..., :slots]), valid.sum(-1)
