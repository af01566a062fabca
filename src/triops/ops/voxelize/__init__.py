"""voxelize: the points of a scene, gathered by the cells of a grid."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from triops import _check, _op
from triops.ops.voxelize import geometry, reference
from triops.ops.voxelize.geometry import Numbers


def voxelize(
    points: Tensor, voxel_size: Numbers, point_range: Numbers, max_points: int, max_voxels: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Gather points by the voxels they lie in, first come, first served. Differentiable in `points`.

    A point lies in the cell `floor((p - low) / size)` of each axis; the grid has `round((high - low) / size)` cells,
    and points outside of it, or not finite, are left out. Voxels are numbered in the order of their first points.
    Each keeps its first `max_points` points; voxels after the first `max_voxels` are dropped with all of their points.
    The result is the same on every backend and in every run.

    Args:
        points: float tensor [N, C], C at least 3: x, y, z and any further features.
        voxel_size: three numbers, along x, y and z.
        point_range: six numbers, the lower x, y, z and the upper x, y, z.
        max_points: the most points per voxel.
        max_voxels: the most voxels.

    Returns:
        voxels [V, max_points, C], of the dtype of `points`: 0 behind a voxel's last point.
        coords int32 [V, 3]: the cells, as z, y, x.
        num_points int32 [V]: from 1 to max_points.
        V is 0 without points, or without points inside. On a GPU this waits for V; `voxelize_padded` does not.

    Raises:
        ValueError, TypeError: on a wrong shape, dtype or number, an empty grid, or voxels of more than 2**30 numbers.

    >>> import torch, triops
    >>> points = torch.tensor([[2.5, 0.5, 0.5, 7.0], [0.5, 0.5, 0.5, 8.0], [2.1, 0.9, 0.1, 9.0], [9.0, 0.0, 0.0, 1.0]])
    >>> voxels, coords, num_points = triops.voxelize(points, (1, 1, 1), (0, 0, 0, 4, 2, 1), max_points=2, max_voxels=9)
    >>> coords.tolist(), num_points.tolist()
    ([[0, 0, 2], [0, 0, 0]], [2, 1])
    >>> voxels[:, :, 3]
    tensor([[7., 9.],
            [8., 0.]])
    """
    voxels, coords, num_points, _, count = voxelize_padded(points, voxel_size, point_range, max_points, max_voxels)
    found = int(count)
    return voxels[:found], coords[:found], num_points[:found]


def voxelize_padded(
    points: Tensor, voxel_size: Numbers, point_range: Numbers, max_points: int, max_voxels: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """`voxelize` without waiting for the number of voxels: sizes depend on no data, so it works in a CUDA graph.

    Arguments and errors as for `voxelize`. With R = min(max_voxels, N):

    Returns:
        voxels [R, max_points, C], coords int32 [R, 3], num_points int32 [R]: as from `voxelize`, then zeros.
        slots int32 [N]: where each point went, `voxel * max_points + place`, or -1.
        count int32 []: the number of voxels.

    >>> import torch, triops
    >>> points = torch.tensor([[2.5, 0.5, 0.5], [0.5, 0.5, 0.5], [2.1, 0.9, 0.1], [9.0, 0.0, 0.0]])
    >>> _, coords, _, slots, count = triops.voxelize_padded(points, (1, 1, 1), (0, 0, 0, 4, 2, 1), 2, 9)
    >>> coords.shape, slots.tolist(), int(count)
    (torch.Size([4, 3]), [0, 2, 1, -1], 2)
    """
    name = "voxelize"
    size, bounds = (
        geometry.as_numbers(name, key, value)
        for key, value in (("voxel_size", voxel_size), ("point_range", point_range))
    )
    return _voxelize_padded(points, size, bounds, max_points, max_voxels)  # type: ignore[no-any-return]


def dynamic_voxelize(points: Tensor, voxel_size: Numbers, point_range: Numbers) -> Tensor:
    """The cell of every point, as `voxelize` finds it.

    Args:
        points: float tensor [N, C], C at least 3: x, y, z; further columns are not read.
        voxel_size, point_range: as in `voxelize`.

    Returns:
        int32 tensor [N, 3] of z, y, x; -1, -1, -1 for a point outside the range or not finite.

    Raises:
        ValueError, TypeError: as `voxelize`.

    >>> import torch, triops
    >>> points = torch.tensor([[2.5, 0.5, 0.5], [0.5, 1.5, 0.5], [4.0, 0.0, 0.0]])
    >>> triops.dynamic_voxelize(points, (1, 1, 1), (0, 0, 0, 4, 2, 1)).tolist()
    [[0, 0, 2], [0, 1, 0], [-1, -1, -1]]
    """
    name = "dynamic_voxelize"
    size, bounds = (
        geometry.as_numbers(name, key, value)
        for key, value in (("voxel_size", voxel_size), ("point_range", point_range))
    )
    return _dynamic_voxelize(points, size, bounds)  # type: ignore[no-any-return]


def grid_size(voxel_size: Numbers, point_range: Numbers) -> list[int]:
    """The cells of the grid of `voxelize` along x, y and z.

    They are `round(range / size)`, halves away from zero, in float32 whatever the points are, as in mmcv.

    Args:
        voxel_size, point_range: as in `voxelize`.

    Raises:
        ValueError, TypeError: as `voxelize`.

    >>> import triops
    >>> triops.grid_size((0.16, 0.16, 4), (0, -39.68, -3, 69.12, 39.68, 1))
    [432, 496, 1]
    """
    size, bounds = (
        geometry.as_numbers("grid_size", key, value)
        for key, value in (("voxel_size", voxel_size), ("point_range", point_range))
    )
    geometry.check_grid(_check.Checker("grid_size"), size, bounds)
    return geometry.grid_size(size, bounds)


def _check_dynamic(points: Tensor, voxel_size: list[float], point_range: list[float]) -> None:
    geometry.check_points("dynamic_voxelize", points, voxel_size, point_range)


def _check_padded(
    points: Tensor, voxel_size: list[float], point_range: list[float], max_points: int, max_voxels: int
) -> None:
    geometry.check_voxelize("voxelize", points, voxel_size, point_range, max_points, max_voxels)


def _fake_dynamic(points: Tensor, voxel_size: list[float], point_range: list[float]) -> Tensor:
    return points.new_empty((points.shape[0], 3), dtype=torch.int32)


def _fake_padded(
    points: Tensor, voxel_size: list[float], point_range: list[float], max_points: int, max_voxels: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    rows = torch.sym_min(max_voxels, points.shape[0])
    return (
        points.new_empty((rows, max_points, points.shape[1])),
        points.new_empty((rows, 3), dtype=torch.int32),
        points.new_empty((rows,), dtype=torch.int32),
        points.new_empty((points.shape[0],), dtype=torch.int32),
        points.new_empty((), dtype=torch.int32),
    )


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(output[3])


def _backward(ctx: Any, grad_voxels: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
    grad_points = None
    if grad_voxels is not None:
        (slots,) = ctx.saved_tensors
        # A point is in one slot or in none, so the gradient is a gather.
        rows = grad_voxels.flatten(0, 1)[slots.clamp(min=0)]
        grad_points = torch.where(slots[:, None] >= 0, rows, 0)
    return grad_points, None, None, None, None


_dynamic_voxelize = _op.define(reference.dynamic_voxelize, check=_check_dynamic, fake=_fake_dynamic)
_voxelize_padded = _op.define(
    reference.voxelize_padded,
    check=_check_padded,
    fake=_fake_padded,
    setup_context=_setup_context,
    backward=_backward,
)

__all__ = ["Numbers", "dynamic_voxelize", "grid_size", "voxelize", "voxelize_padded"]
