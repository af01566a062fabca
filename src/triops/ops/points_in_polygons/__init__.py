"""points_in_polygons: which points lie in which quadrilaterals."""

from __future__ import annotations

import torch
from torch import Tensor

from triops import _check, _op
from triops.ops.points_in_polygons import reference


def points_in_polygons(points: Tensor, polygons: Tensor) -> Tensor:
    """Whether each point lies in each polygon of four corners, by counting the edges to its right.

    A point on an edge or a corner is inside or outside depending on the edges that come before it, as in mmcv; the same
    on every backend.

    Args:
        points: float tensor [N, 2] of (x, y). One that is not finite lies nowhere.
        polygons: tensor [M, 8] of the same dtype: (x1, y1, ..., x4, y4). One that is not finite holds nothing.

    Returns:
        bool tensor [N, M].

    Raises:
        ValueError, TypeError: on a wrong shape, dtype or device.

    >>> import torch, triops
    >>> triops.points_in_polygons(torch.tensor([[1.0, 1.0], [3.0, 1.0]]), torch.tensor([[0.0, 0, 2, 0, 2, 2, 0, 2]]))
    tensor([[ True],
            [False]])
    """
    return _points_in_polygons(points, polygons)  # type: ignore[no-any-return]


def _check_call(points: Tensor, polygons: Tensor) -> None:
    c = _check.Checker("points_in_polygons")
    c.shape("points", points, "N", 2)
    c.shape("polygons", polygons, "M", 8)
    c.dtype("points", points, _check.FLOATS)
    c.same_dtype(points=points, polygons=polygons)
    c.same_device(points=points, polygons=polygons)
    if _check.too_many(points.shape[0]) or _check.too_many(polygons.shape[0]):
        c.fail(f"points and polygons must be at most 2**30, got {points.shape[0]} and {polygons.shape[0]}")


def _fake(points: Tensor, polygons: Tensor) -> Tensor:
    return points.new_empty((points.shape[0], polygons.shape[0]), dtype=torch.bool)


_points_in_polygons = _op.define(reference.points_in_polygons, check=_check_call, fake=_fake)
