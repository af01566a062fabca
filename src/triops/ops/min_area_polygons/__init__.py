"""min_area_polygons: the rectangle of least area around each set of points."""

from __future__ import annotations

from torch import Tensor

from triops import _check, _op
from triops.ops.min_area_polygons import reference

MOST_POINTS = 16  # of a set


def min_area_polygons(pointsets: Tensor) -> Tensor:
    """Corners of the rectangle of least area around each set of points. No gradient flows.

    Args:
        pointsets: float tensor [N, 2K] of `(x1, y1, ..., xK, yK)`, K from 1 to 16. Half types are computed in float32.

    Returns:
        tensor [N, 8] of the points' dtype. In axes turned by at least 0 and less than a quarter, they are right bottom,
        left bottom, left top, right top. Points in line have a rectangle without width, equal ones without any size.
        NaN for a set with a coordinate that is not finite.

    Raises:
        ValueError, TypeError: on a wrong shape or dtype.

    >>> import torch, triops
    >>> triops.min_area_polygons(torch.tensor([[0.0, 0.0, 4.0, 0.0, 1.0, 1.0]]))
    tensor([[4., 0., 0., 0., 0., 1., 4., 1.]])
    """
    return _min_area_polygons(pointsets)  # type: ignore[no-any-return]


def _check_call(pointsets: Tensor) -> None:
    c = _check.Checker("min_area_polygons")
    c.shape("pointsets", pointsets, "N", "2K")
    columns = pointsets.shape[1]
    if columns % 2 or not 2 <= columns <= 2 * MOST_POINTS:
        c.fail(f"pointsets must have 2 to {2 * MOST_POINTS} columns, x and y of each point, got {columns}")
    if _check.too_many(pointsets.shape[0]):
        c.fail(f"pointsets must be at most 2**30, got {pointsets.shape[0]}")
    c.dtype("pointsets", pointsets, _check.FLOATS)


def _fake(pointsets: Tensor) -> Tensor:
    return pointsets.new_empty((pointsets.shape[0], 8))


_min_area_polygons = _op.define(reference.min_area_polygons, check=_check_call, fake=_fake)

__all__ = ["min_area_polygons"]
