"""vector_pool: features around each center, averaged in the cells of a small grid (PV-RCNN++)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

import torch
from torch import Tensor

from triops import _check, _op
from triops._clouds import check_offsets
from triops._dtypes import compute_dtype
from triops.ops.dynamic_scatter import dynamic_scatter
from triops.ops.gather_points import gather_points
from triops.ops.ingroup_inds import ingroup_inds
from triops.ops.vector_pool import reference

Shape = Literal["cube", "ball"]
SHAPES: tuple[Shape, ...] = get_args(Shape)
Pool = Literal["avg", "first"]
POOLS: tuple[Pool, ...] = get_args(Pool)
MOST_CELLS = 2**16


def vector_pool(
    points: Tensor, features: Tensor, centers: Tensor, radius: float, grid: Sequence[int], channels: int, *,
    shape: Shape = "cube", pool: Pool = "avg", k: int = -1, offsets: Tensor | None = None,
    center_offsets: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Features of the points around each center, one mean per cell of a grid. Differentiable in `features`.

    The grid divides the cube of half length `radius` around a center. Of C feature channels those with the same number
    modulo `channels` are added up, so that a cell has `channels` of them.

    Args:
        points: float tensor [N, 3].
        features: float tensor [N, C], C a multiple of `channels`.
        centers: tensor [M, 3] of the points' dtype.
        radius: of the cube along each axis, or of the ball; points at that very distance belong to it.
        grid: cells along x, y and z.
        channels: of a cell.
        shape: "cube" or "ball".
        pool: "avg", or "first" for the lowest point of each cell alone.
        k: points of a center, or with "first" cells, that are used at most, the lowest first; all of them if not
            positive.
        offsets: int32 or int64 tensor [B + 1]: cloud b is rows offsets[b] to offsets[b + 1] - 1. One cloud without it.
        center_offsets: likewise for the centers.

    Returns:
        pooled [M, cells * channels], of the features' dtype; 0 for an empty cell. Cells ascend with z fastest.
        local [M, cells * 3], of the points' dtype: the mean of p - c of the points in the cell. No gradient flows.
        counts, int32 [M, cells]: points of each cell.
        On a GPU this waits for the number of pairs.

    Raises:
        ValueError, TypeError: on a wrong rank, shape, dtype, device, radius, grid or option.
        IndexError: when offsets do not ascend from 0 to the number of rows. On a GPU they are clamped instead, unless
            TRIOPS_CHECK=1 asks for the error there too.

    >>> import torch, triops
    >>> points = torch.tensor([[-0.5, 0.0, 0.0], [0.2, 0, 0], [0.6, 0, 0], [9, 0, 0]])
    >>> pooled, local, counts = triops.vector_pool(
    ...     points, torch.tensor([[1.0], [2], [4], [8]]), torch.zeros(1, 3), 1.0, (2, 1, 1), 1)
    >>> pooled, counts
    (tensor([[1., 3.]]), tensor([[1, 2]], dtype=torch.int32))
    """
    c = _check.Checker("vector_pool")
    for name, value in (("points", points), ("features", features), ("centers", centers)):
        if not isinstance(value, Tensor):
            c.fail(f"{name} must be a Tensor, got {type(value).__name__}", TypeError)
    channels = c.integer("channels", channels, 1)
    c.shape("points", points, "N", 3)
    c.shape("features", features, "N", "C")
    c.dtype("features", features, _check.FLOATS)
    c.same_device(points=points, features=features)
    if features.shape[1] % channels:
        c.fail(f"features must have a multiple of {channels} channels, got {list(features.shape)}")
    c.choice("shape", shape, SHAPES)
    c.choice("pool", pool, POOLS)
    sizes = c.integers("grid", grid)
    pairs = vector_pool_pairs(
        points, centers, radius, sizes, shape=shape, k=k if pool == "avg" else -1, offsets=offsets,
        center_offsets=center_offsets,
    )  # fmt: skip
    cells, number = sizes[0] * sizes[1] * sizes[2], centers.shape[0]
    if pool == "first":
        pairs = first_of_cells(pairs, cells, k)
    point, center = pairs[:, 0], pairs[:, 1].long()
    row = center * cells + pairs[:, 2]
    real = compute_dtype(features.dtype)
    folded = features.to(real).unflatten(1, (features.shape[1] // channels, channels)).sum(1)
    pooled = _mean(gather_points(folded, point), row, number * cells).to(features.dtype)
    with torch.no_grad():
        local = gather_points(points, point) - centers[center]
        local = _mean(local, row, number * cells)
        counts = row.bincount(minlength=number * cells).int()
    return pooled.view(number, cells * channels), local.view(number, cells * 3), counts.view(number, cells)


def vector_pool_pairs(
    points: Tensor, centers: Tensor, radius: float, grid: Sequence[int], *, shape: Shape = "cube", k: int = -1,
    offsets: Tensor | None = None, center_offsets: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """The pairs that `vector_pool` pools: point, center and cell, int32 [P, 3], by center, then by point."""
    c = _check.Checker("vector_pool")
    for name, value in (("points", points), ("centers", centers)):
        if not isinstance(value, Tensor):
            c.fail(f"{name} must be a Tensor, got {type(value).__name__}", TypeError)
        c.shape(name, value, "N" if name == "points" else "M", 3)
    c.choice("shape", shape, SHAPES)
    if offsets is None:
        offsets = torch.tensor([0, points.shape[0]], device=points.device)
    if center_offsets is None:
        center_offsets = torch.tensor([0, centers.shape[0]], device=points.device)
    sizes = c.integers("grid", grid)
    return _vector_pool_pairs(  # type: ignore[no-any-return]
        points, centers, offsets, center_offsets, radius, sizes, k, shape == "ball"
    )


def _mean(values: Tensor, row: Tensor, rows: int) -> Tensor:
    """values [P, C] averaged by row, [rows, C]; 0 for a row without values."""
    means, used = dynamic_scatter(values, row[:, None], "mean")
    return values.new_zeros((rows, values.shape[1])).index_copy(0, used[:, 0], means)


def first_of_cells(pairs: Tensor, cells: int, k: int = -1) -> Tensor:
    """Of the pairs of `vector_pool_pairs` the first of each cell, and of these the first k of each center."""
    pairs = pairs[ingroup_inds(pairs[:, 1].long() * cells + pairs[:, 2]) == 0]
    return pairs[ingroup_inds(pairs[:, 1].contiguous()) < k] if k > 0 else pairs


def _check_pairs(
    points: Tensor, centers: Tensor, offsets: Tensor, center_offsets: Tensor, radius: float, grid: list[int], k: int,
    ball: bool,
) -> None:  # fmt: skip
    c = _check.Checker("vector_pool")
    c.shape("points", points, "N", 3)
    c.shape("centers", centers, "M", 3)
    c.dtype("points", points, _check.FLOATS)
    c.same_dtype(points=points, centers=centers)
    check_offsets(c, "offsets", offsets)
    check_offsets(c, "center_offsets", center_offsets)
    c.shape("center_offsets", center_offsets, offsets.shape[0])
    c.same_device(points=points, centers=centers, offsets=offsets, center_offsets=center_offsets)
    c.finite("radius", radius)
    if not radius > 0:
        c.fail(f"radius must be above 0, got {radius}")
    if len(grid) != 3 or min(grid) < 1 or grid[0] > MOST_CELLS // grid[1] // grid[2]:
        c.fail(f"grid must be three numbers of cells, at least 1 and {MOST_CELLS} in all, got {list(grid)}")
    for name, tensor in (("points", points), ("centers", centers)):
        if _check.too_many(tensor.shape[0]):
            c.fail(f"{name} must be at most 2**30, got {tensor.shape[0]}")


def _fake_pairs(
    points: Tensor, centers: Tensor, offsets: Tensor, center_offsets: Tensor, radius: float, grid: list[int], k: int,
    ball: bool,
) -> Tensor:  # fmt: skip
    return points.new_empty((torch.library.get_ctx().new_dynamic_size(), 3), dtype=torch.int32)


_vector_pool_pairs = _op.define(reference.vector_pool_pairs, check=_check_pairs, fake=_fake_pairs)
_vector_pool_pairs.dynamic_output = True

__all__ = ["first_of_cells", "vector_pool", "vector_pool_pairs"]
