"""The specification of min_area_polygons."""

import torch
from torch import Tensor

from triops._geometry.polygon.reference import make_polygons


def min_area_polygons(pointsets: Tensor) -> Tensor:
    """pointsets [N, 2K] -> [N, 8]. A side of the smallest rectangle lies on a side of the hull: all are tried."""
    polygons = make_polygons(pointsets)
    origin_x, origin_y = polygons.x[:, 0], polygons.y[:, 0]
    x, y = polygons.x - origin_x[:, None], polygons.y - origin_y[:, None]
    zero, count = torch.zeros_like(origin_x), x.shape[1]
    # the direction of the best side so far, its length squared, and how far the corners reach along and across it
    best = [torch.ones_like(zero), zero, torch.ones_like(zero), zero, zero, zero, zero]
    best_area = torch.full_like(zero, torch.inf)
    for k in range(count):
        after = (k + 1) % count
        u, v = _first_quadrant(x[:, after] - x[:, k], y[:, after] - y[:, k])
        square = u * u + v * v
        left, right, bottom, top = zero, zero, zero, zero
        for n in range(1, count):
            along, across = x[:, n] * u + y[:, n] * v, y[:, n] * u - x[:, n] * v
            left, right = torch.where(along < left, along, left), torch.where(along > right, along, right)
            bottom, top = torch.where(across < bottom, across, bottom), torch.where(across > top, across, top)
        area = (right - left) * (top - bottom) / square
        better = (square > 0) & (area < best_area)
        found = (u, v, square, left, right, bottom, top)
        best = [torch.where(better, new, old) for new, old in zip(found, best, strict=True)]
        best_area = torch.where(better, area, best_area)
    u, v, square, left, right, bottom, top = best
    corners = []
    for along, across in ((right, bottom), (left, bottom), (left, top), (right, top)):
        corners += [origin_x + (along * u - across * v) / square, origin_y + (along * v + across * u) / square]
    finite = polygons.low_x <= polygons.high_x
    return torch.where(finite[:, None], torch.stack(corners, 1), torch.nan).to(pointsets.dtype)


def _first_quadrant(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """A direction, turned by as many quarters as make x above 0 and y at least 0."""
    first, second, third = (x > 0) & (y >= 0), (x <= 0) & (y > 0), (x < 0) & (y <= 0)
    return (
        torch.where(first, x, torch.where(second, y, torch.where(third, -x, -y))),
        torch.where(first, y, torch.where(second, -x, torch.where(third, -y, x))),
    )
