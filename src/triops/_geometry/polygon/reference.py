"""Convex polygons in plain torch."""

from __future__ import annotations

from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from triops._dtypes import compute_dtype

Mode = Literal["iou", "iof"]
MODES: tuple[Mode, ...] = get_args(Mode)
SLACK = 8  # units in the last place of the polygons' extent within which two sides count as one


class Polygons(NamedTuple):
    """Convex polygons of up to K corners, counter-clockwise; places that are left over repeat the first one.

    Those with a corner that is not finite reach nowhere.
    """

    x: Tensor  # [..., K]
    y: Tensor
    low_x: Tensor  # [...]
    low_y: Tensor
    high_x: Tensor
    high_y: Tensor
    area: Tensor

    def rows(self) -> Polygons:
        return Polygons(*(field[:, None] for field in self))


def hull(points: Tensor, valid: Tensor | None = None) -> Tensor:
    """points [..., K, 2] -> int64 [..., 2K]: which of them are the corners of the hull, counter-clockwise.

    A corner may repeat: a side without length changes no area and cuts nothing off. Of equal points the first counts.
    valid: bool [..., K], one at least; the others are left out.

    From the lowest point a chain goes up along the right side, always to the point of the flattest slope, and from the
    highest one another goes down along the left side. They only ever rise or fall, so rounding cannot make them go
    around twice.
    """
    x, y = points.unbind(-1)
    valid = torch.ones_like(x, dtype=torch.bool) if valid is None else valid

    def chain(x: Tensor, y: Tensor) -> list[Tensor]:
        bottom = valid & (y == torch.where(valid, y, torch.inf).amin(-1, keepdim=True))
        current = torch.where(bottom, x, -torch.inf).argmax(-1, keepdim=True)
        found = [current]
        for _ in range(points.shape[-2] - 1):
            rise = y - y.gather(-1, current)
            above = valid & (rise > 0)
            slope = torch.where(above, (x - x.gather(-1, current)) / rise, -torch.inf)
            flattest = above & (slope == slope.amax(-1, keepdim=True))
            following = torch.where(flattest, rise, -1.0).argmax(-1, keepdim=True)  # the furthest of those in line
            current = torch.where(above.any(-1, keepdim=True), following, current)
            found.append(current)
        return found

    return torch.cat([*chain(x, y), *chain(-x, -y)], -1)


def make_polygons(points: Tensor) -> Polygons:
    """The hulls of points [N, 2K], of float64 for float64 and else of float32."""
    points = points.to(compute_dtype(points.dtype)).unflatten(-1, (-1, 2))
    finite = points.isfinite().flatten(-2).all(-1)
    points = torch.where(finite[..., None, None], points, 0.0)
    found = corners(points, hull(points))
    needed = (found != found.roll(-1, -2)).any(-1)
    order = (~needed).to(torch.int8).sort(dim=-1, stable=True).indices[..., : points.shape[-2]]
    used = torch.arange(points.shape[-2], device=points.device) < needed.sum(-1, keepdim=True)
    found = torch.where(used[..., None], corners(found, order), found[..., :1, :])
    x, y = found.unbind(-1)
    area = torch.zeros_like(x[..., 0])
    for k in range(1, x.shape[-1]):  # triangles between the first corner and two neighbors
        before_x, before_y = x[..., k - 1] - x[..., 0], y[..., k - 1] - y[..., 0]
        area = area + (before_x * (y[..., k] - y[..., 0]) - before_y * (x[..., k] - x[..., 0]))
    low, high = points.amin(-2), points.amax(-2)
    low, high = (torch.where(finite[..., None], b, v) for b, v in ((low, torch.inf), (high, -torch.inf)))
    return Polygons(x, y, low[..., 0], low[..., 1], high[..., 0], high[..., 1], area * 0.5)


def overlap(p: Polygons, q: Polygons, mode: str) -> Tensor:
    """The area that p and q share, which broadcast, over that of the union ("iou") or of p ("iof").

    Around what they share lie the parts of the sides of p that are in q, and the other way round. Each part adds its
    share of the triangle between the side and a point, here the middle of where the bounding boxes overlap. A side
    that lies on one of the other polygon counts for p and not for q.
    """
    low_x, low_y = _maximum(p.low_x, q.low_x), _maximum(p.low_y, q.low_y)
    high_x, high_y = _minimum(p.high_x, q.high_x), _minimum(p.high_y, q.high_y)
    near = (low_x < high_x) & (low_y < high_y)
    middle_x, middle_y = (torch.where(near, (a + b) * 0.5, 0.0) for a, b in ((low_x, high_x), (low_y, high_y)))
    extent = torch.zeros_like(middle_x)
    for bound, middle in (
        (p.low_x, middle_x), (p.high_x, middle_x), (q.low_x, middle_x), (q.high_x, middle_x),
        (p.low_y, middle_y), (p.high_y, middle_y), (q.low_y, middle_y), (q.high_y, middle_y),
    ):  # fmt: skip
        extent = _maximum((bound - middle).abs(), extent)
    slack = extent * (SLACK * torch.finfo(extent.dtype).eps)
    p_x, p_y = p.x - middle_x[..., None], p.y - middle_y[..., None]
    q_x, q_y = q.x - middle_x[..., None], q.y - middle_y[..., None]
    doubled = _inside(p_x, p_y, q_x, q_y, slack) + _inside(q_x, q_y, p_x, p_y, -slack)
    shared = _minimum(_minimum(doubled * 0.5, p.area), q.area)
    shared = torch.where(near & (shared > 0), shared, 0.0)
    ratio = shared / (p.area + q.area - shared if mode == "iou" else p.area)
    return torch.where(ratio > 0, ratio, 0.0)  # also for NaN, of areas beyond the largest or below the smallest float


def _inside(p_x: Tensor, p_y: Tensor, q_x: Tensor, q_y: Tensor, slack: Tensor) -> Tensor:
    """Twice the area between the parts of the sides of p in q, grown by `slack`, and the origin."""
    total = torch.zeros_like(slack)
    for i in range(p_x.shape[-1]):
        x, y = p_x[..., i], p_y[..., i]
        next_x, next_y = p_x[..., (i + 1) % p_x.shape[-1]], p_y[..., (i + 1) % p_x.shape[-1]]
        first, last = torch.zeros_like(total), torch.ones_like(total)
        outside = torch.zeros_like(total, dtype=torch.bool)
        for j in range(q_x.shape[-1]):
            corner_x, corner_y = q_x[..., j], q_y[..., j]
            side_x = q_x[..., (j + 1) % q_x.shape[-1]] - corner_x
            side_y = q_y[..., (j + 1) % q_x.shape[-1]] - corner_y
            grow = slack * (side_x.abs() + side_y.abs())
            begin = (side_x * (y - corner_y) - side_y * (x - corner_x)) + grow  # inside from 0 on
            end = (side_x * (next_y - corner_y) - side_y * (next_x - corner_x)) + grow
            at = begin / (begin - end)
            first = torch.where((begin < 0) & (end >= 0), _maximum(at, first), first)
            last = torch.where((begin >= 0) & (end < 0), _minimum(at, last), last)
            outside = outside | ((begin < 0) & (end < 0))
        part = torch.where(outside | (last < first), 0.0, last - first)
        total = total + part * (x * (next_y - y) - y * (next_x - x))
    return total


# These order NaN the same way on every device, which minimum and maximum do not.
def _minimum(a: Tensor, b: Tensor) -> Tensor:
    return torch.where(a < b, a, b)


def _maximum(a: Tensor, b: Tensor) -> Tensor:
    return torch.where(a > b, a, b)


def corners(points: Tensor, index: Tensor) -> Tensor:
    """points [..., K, 2] at index [..., V] -> [..., V, 2]."""
    return points.gather(-2, index[..., None].expand(*index.shape, 2))


def signed_area(vertices: Tensor) -> Tensor:
    """Of a polygon [..., V, 2]; above 0 where it runs counter-clockwise."""
    inner = vertices - vertices[..., :1, :]
    return cross(inner, inner.roll(-1, -2)).sum(-1) * 0.5


def cross(a: Tensor, b: Tensor) -> Tensor:
    return a[..., 0] * b[..., 1] - a[..., 1] * b[..., 0]
