"""What spconv's voxel generators share: a grid of one to four dimensions, and the voxels of a cloud of points."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

import triops
from triops.ops.voxelize import geometry, reference


class Grid:
    """Voxel size, range and number of cells along each axis. Sizes are those that float32 can hold, as in spconv."""

    def __init__(self, name: str, voxel_size: Any, point_range: Any) -> None:
        self.name = name
        self.voxel_size = _float32(name, "vsize_xyz", voxel_size)
        self.point_range = _float32(name, "coors_range_xyz", point_range)
        if not 1 <= len(self.voxel_size) <= 4 or len(self.point_range) != 2 * len(self.voxel_size):
            raise ValueError(
                f"{name}: vsize_xyz must be one to four numbers and coors_range_xyz twice as many, "
                f"got {len(self.voxel_size)} and {len(self.point_range)}"
            )
        if not all(size > 0 for size in self.voxel_size):
            raise ValueError(f"{name}: vsize_xyz must be above 0, got {self.voxel_size}")
        self.size = geometry.grid_size(self.voxel_size, self.point_range)
        if not all(cells >= 1 for cells in self.size) or math.prod(self.size) >= geometry.MAX_CELLS:
            raise ValueError(
                f"{name}: coors_range_xyz must hold at least one voxel on every axis and below 2**62 in all, "
                f"got {self.size}"
            )

    @property
    def axes(self) -> int:
        return len(self.voxel_size)

    @property
    def voxel_zyx(self) -> list[float]:
        return self.voxel_size[::-1]

    @property
    def range_zyx(self) -> list[float]:
        return [*self.point_range[: self.axes][::-1], *self.point_range[self.axes :][::-1]]

    @property
    def size_zyx(self) -> list[int]:
        return self.size[::-1]

    def meta_data(self) -> tuple[list[float], list[int], list[int], list[float]]:
        """Voxel size, cells, strides of cells in memory and range, the last coordinate first."""
        sizes = self.size_zyx
        strides = [math.prod(sizes[axis + 1 :]) for axis in range(self.axes)]
        return self.voxel_zyx, sizes, strides, self.range_zyx


def _float32(operator: str, name: str, values: Any) -> list[float]:
    return [float(np.float32(value)) for value in geometry.as_numbers(operator, name, list(values))]


class Voxels(NamedTuple):
    voxels: Tensor  # [V, max_points, C]
    indices: Tensor  # int32 [V, D], the last coordinate first
    num_per_voxel: Tensor  # int32 [V]
    point_voxel_id: Tensor  # int64 [N]: the voxel of each point, or -1


def nothing(grid: Grid, features: int, max_voxels: int, max_points: int, device: Any) -> Voxels:
    """No voxels."""
    return Voxels(
        torch.zeros((0, max_points, features), device=device),
        torch.zeros((0, grid.axes), dtype=torch.int32, device=device),
        torch.zeros(0, dtype=torch.int32, device=device),
        torch.zeros(0, dtype=torch.int64, device=device),
    )


@torch.no_grad()
def generate(
    grid: Grid, points: Tensor, features: int, max_voxels: int, max_points: int, *, empty_mean: bool = False,
    dtype: torch.dtype = torch.float32,
) -> Voxels:  # fmt: skip
    """The voxels of points [N, features], first come, first served; see `triops.voxelize`.

    A point that finds its voxel full belongs to it in `point_voxel_id` all the same; a point outside the grid, or in a
    voxel beyond `max_voxels`, belongs to none.
    """
    if points.dim() != 2 or points.shape[1] != features or features < grid.axes:
        raise ValueError(
            f"{grid.name}: points must have shape [N, {features}] with the {grid.axes} coordinates first, "
            f"got {list(points.shape)}"
        )
    arguments = points, grid.voxel_size, grid.point_range, max_points, max_voxels
    if grid.axes == 3:
        found = triops.voxelize_padded(*arguments)
        cells = triops.dynamic_voxelize(*arguments[:3])
    else:  # rare enough for plain torch
        found = reference.voxelize_padded(*arguments)
        cells = reference.dynamic_voxelize(*arguments[:3])
    voxels, indices, counts = (part[: int(found[4])] for part in found[:3])
    if empty_mean:
        free = torch.arange(max_points, device=counts.device) >= counts[:, None]
        mean = voxels.sum(1, keepdim=True) / counts[:, None, None].clamp(min=1)
        voxels = torch.where(free[:, :, None], mean, voxels)
    return Voxels(voxels.to(dtype), indices, counts, _voxel_of(cells, indices, grid.size_zyx))


def _voxel_of(cells: Tensor, indices: Tensor, sizes: Sequence[int]) -> Tensor:
    """The row of `indices` that equals each cell, or -1."""
    wanted, flat = _flatten(cells, sizes), _flatten(indices, sizes)
    ascending, order = flat.sort()
    place = torch.searchsorted(ascending, wanted)
    # one row behind the last answers for cells above all voxels
    found = F.pad(ascending, (0, 1), value=-1)[place] == wanted
    return torch.where(found & (cells[:, 0] >= 0), F.pad(order, (0, 1), value=-1)[place], -1)


def _flatten(cells: Tensor, sizes: Sequence[int]) -> Tensor:
    flat = cells.new_zeros(cells.shape[:1], dtype=torch.int64)
    for axis, size in enumerate(sizes):
        flat = flat * size + cells[:, axis]
    return flat
