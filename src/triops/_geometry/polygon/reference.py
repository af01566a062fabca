"""Convex polygons in plain torch.

The hull of K points is 2K corners, counter-clockwise, in which some repeat: a side without length changes no area and
cuts nothing off.
"""

from __future__ import annotations

import torch
from torch import Tensor

SLACK = 8  # units in the last place of the polygons' extent within which two sides count as one


def hull(points: Tensor, valid: Tensor | None = None) -> Tensor:
    """points [..., K, 2] -> int64 [..., 2K]: which of them are the corners of the hull, counter-clockwise.

    Of equal points the first counts. valid: bool [..., K], one at least; the others are left out.

    From the lowest point two chains go up to the highest, one along the right side and one along the left, always to
    the point of the flattest slope. Both only ever rise, so rounding cannot make them go around twice.
    """
    x, y = points.unbind(-1)
    valid = torch.ones_like(x, dtype=torch.bool) if valid is None else valid
    bottom = valid & (y == torch.where(valid, y, torch.inf).amin(-1, keepdim=True))

    def chain(side: Tensor) -> list[Tensor]:
        """side: x, or -x for the left chain."""
        current = torch.where(bottom, side, -torch.inf).argmax(-1, keepdim=True)
        found = [current]
        for _ in range(points.shape[-2] - 1):
            rise = y - y.gather(-1, current)
            above = valid & (rise > 0)
            slope = torch.where(above, (side - side.gather(-1, current)) / rise, -torch.inf)
            flattest = above & (slope == slope.amax(-1, keepdim=True))
            following = torch.where(flattest, rise, -1.0).argmax(-1, keepdim=True)  # the furthest of those in line
            current = torch.where(above.any(-1, keepdim=True), following, current)
            found.append(current)
        return found

    return torch.cat([*chain(x), *reversed(chain(-x))], -1)


def corners(points: Tensor, index: Tensor) -> Tensor:
    """points [..., K, 2] at index [..., V] -> [..., V, 2]."""
    return points.gather(-2, index[..., None].expand(*index.shape, 2))


def signed_area(vertices: Tensor) -> Tensor:
    """Of a polygon [..., V, 2]; above 0 where it runs counter-clockwise."""
    inner = vertices - vertices[..., :1, :]
    return cross(inner, inner.roll(-1, -2)).sum(-1) * 0.5


def cross(a: Tensor, b: Tensor) -> Tensor:
    return a[..., 0] * b[..., 1] - a[..., 1] * b[..., 0]


def shared_area(p: Tensor, q: Tensor) -> Tensor:
    """The area that convex polygons p [..., V, 2] and q [..., W, 2] share, both counter-clockwise.

    Around what they share lie the parts of the sides of p that are in q, and the other way round. Each part adds its
    share of the triangle between the side and a point, here the middle of where the bounding boxes overlap. A side
    that lies on one of the other polygon counts for p and not for q.
    """
    low = torch.maximum(p.amin(-2), q.amin(-2))
    high = torch.minimum(p.amax(-2), q.amax(-2))
    middle = ((low + high) * 0.5)[..., None, :]
    p, q = torch.broadcast_tensors(p - middle, q - middle) if p.shape[-2] == q.shape[-2] else (p - middle, q - middle)
    extent = torch.maximum(p.abs().amax((-2, -1)), q.abs().amax((-2, -1)))
    slack = (extent * (SLACK * torch.finfo(p.dtype).eps))[..., None, None]
    doubled = _inside(p, q, slack) + _inside(q, p, -slack)
    area = torch.where((low < high).all(-1) & (doubled > 0), doubled * 0.5, 0.0)
    return torch.minimum(area, torch.minimum(signed_area(p), signed_area(q)))


def _inside(p: Tensor, q: Tensor, slack: Tensor) -> Tensor:
    """Twice the area between the parts of the sides of p in q, grown by `slack`, and the origin."""
    step, side = p.roll(-1, -2) - p, q.roll(-1, -2) - q
    reach = slack * side.abs().sum(-1)[..., None, :]
    begin = cross(side[..., None, :, :], p[..., :, None, :] - q[..., None, :, :]) + reach  # [..., V, W]: inside if >= 0
    end = begin.roll(-1, -2)
    at = begin / (begin - end)
    first = torch.where((begin < 0) & (end >= 0), at, 0.0).amax(-1)
    last = torch.where((begin >= 0) & (end < 0), at, 1.0).amin(-1)
    outside = ((begin < 0) & (end < 0)).any(-1)
    part = torch.where(outside, 0.0, (last - first).clamp(min=0))
    return (part * cross(p, step)).sum(-1)
