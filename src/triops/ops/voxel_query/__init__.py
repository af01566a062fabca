"""voxel_query: the points of the voxels around each center (Voxel R-CNN)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from triops import _check, _op
from triops._neighbors import check_k
from triops.ops.voxel_query import reference

MOST_WINDOW = 2**20


def voxel_query(
    points: Tensor, centers: Tensor, coords: Tensor, voxel_rows: Tensor, radius: float, k: int,
    max_range: int | Sequence[int],
) -> Tensor:  # fmt: skip
    """Up to k points within a radius of each center, of the voxels around it, filled with the first.

    Where each voxel of a grid holds at most one point, neighbors need no search: they stand in the window of voxels
    around the center's. The window is read in the order z, y, x, and the first k points whose squared distance is at
    most `radius**2`, in float32 (float64 for float64), are taken.

    Args:
        points: float tensor [N, 3].
        centers: tensor [M, 3] of the same dtype.
        coords: int32 or int64 tensor [M, 4]: (batch, z, y, x) of the voxel of each center, which may lie off the grid.
        voxel_rows: int32 or int64 tensor [B, Z, Y, X]: the row of `points` of each voxel, less than 0 for none.
        radius: of the balls, 0 or more.
        k: points per center, 1 to 4096.
        max_range: voxels on either side of the center's, one integer or three for (z, y, x).

    Returns:
        int32 tensor [M, k], rows of `points`; k times -1 for a center without any.

    Raises:
        ValueError, TypeError: on a wrong shape, dtype, device, radius, k or range.
        IndexError: when a voxel names a row, or a center a batch, that is not there. On a GPU such a voxel is empty and
            such a center has no points, unless TRIOPS_CHECK=1 asks for the error there too.

    >>> import torch, triops
    >>> points = torch.tensor([[0.5, 0.5, 0.5], [1.5, 0.5, 0.5], [3.5, 0.5, 0.5]])
    >>> voxel_rows = torch.tensor([[[[0, 1, -1, 2]]]])  # along x
    >>> coords = torch.tensor([[0, 0, 0, 1], [0, 0, 0, 3]])
    >>> triops.voxel_query(points, points[1:], coords, voxel_rows, radius=1.0, k=3, max_range=[0, 0, 1])
    tensor([[0, 1, 0],
            [2, 2, 2]], dtype=torch.int32)
    """
    c = _check.Checker("voxel_query")
    one = _check.as_integer(max_range)
    ranges = [one] * 3 if one is not None else c.integers("max_range", max_range)
    return _voxel_query(points, centers, coords, voxel_rows, radius, k, ranges)  # type: ignore[no-any-return]


def _check_call(
    points: Tensor, centers: Tensor, coords: Tensor, voxel_rows: Tensor, radius: float, k: int, max_range: list[int]
) -> None:
    c = _check.Checker("voxel_query")
    c.shape("points", points, "N", 3)
    c.shape("centers", centers, "M", 3)
    c.shape("coords", coords, "M", 4)
    c.shape("voxel_rows", voxel_rows, "B", "Z", "Y", "X")
    c.dtype("points", points, _check.FLOATS)
    c.same_dtype(points=points, centers=centers)
    c.dtype("coords", coords, _check.INDICES)
    c.dtype("voxel_rows", voxel_rows, _check.INDICES)
    c.same_device(points=points, centers=centers, coords=coords, voxel_rows=voxel_rows)
    c.finite("radius", radius)
    c.at_least("radius", radius, 0)
    check_k(c, k)
    if len(max_range) != 3:
        c.fail(f"max_range must be one integer or three (z, y, x), got {len(max_range)}")
    window = 1
    for reach in max_range:
        c.at_least("max_range", reach, 0)
        window *= 2 * reach + 1
    if not isinstance(window, torch.SymInt) and window > MOST_WINDOW:
        c.fail(f"max_range must be a window of at most 2**20 voxels, got {window}")
    if _check.too_many(points.shape[0]) or _check.too_many(centers.shape[0]):
        c.fail(f"points and centers must be at most 2**30, got {points.shape[0]} and {centers.shape[0]}")
    if any(_check.too_many(size) for size in voxel_rows.shape[1:]):
        c.fail(f"voxel_rows must be at most 2**30 along each axis, got {list(voxel_rows.shape)}")


def _fake(
    points: Tensor, centers: Tensor, coords: Tensor, voxel_rows: Tensor, radius: float, k: int, max_range: list[int]
) -> Tensor:
    return centers.new_empty((centers.shape[0], k), dtype=torch.int32)


_voxel_query = _op.define(reference.voxel_query, check=_check_call, fake=_fake)
