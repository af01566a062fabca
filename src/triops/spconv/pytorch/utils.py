"""Names of `spconv.pytorch.utils`: voxels of points as torch tensors, and their features back at the points."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from triops.spconv import voxels


class PointToVoxel:
    """Voxels of a cloud of points, in one to four dimensions; see `triops.voxelize`.

    Args:
        vsize_xyz: size of a voxel along each axis.
        coors_range_xyz: lower bounds of all axes, then upper bounds.
        num_point_features: numbers per point, coordinates included.
        max_num_voxels: voxels at most; those whose first point comes later are dropped.
        max_num_points_per_voxel: points that a voxel keeps, the first ones.
        device: where the points will be.

    >>> import torch
    >>> generator = PointToVoxel([1, 1, 1], [0, 0, 0, 4, 4, 4], 3, max_num_voxels=9, max_num_points_per_voxel=1)
    >>> points = torch.tensor([[2.5, 0.5, 0.0], [2.1, 0.1, 0.1], [9.0, 0.0, 0.0]])
    >>> voxels, indices, num_per_voxel, voxel_id = generator.generate_voxel_with_id(points)
    >>> indices.tolist(), num_per_voxel.tolist(), voxel_id.tolist()
    ([[0, 0, 2]], [1], [0, 0, -1])
    """

    def __init__(
        self, vsize_xyz: Any, coors_range_xyz: Any, num_point_features: int, max_num_voxels: int,
        max_num_points_per_voxel: int, device: torch.device | str = torch.device("cpu:0"),  # noqa: B008
    ) -> None:  # fmt: skip
        self._grid = voxels.Grid("PointToVoxel", vsize_xyz, coors_range_xyz)
        self.ndim = self._grid.axes
        self.device = torch.device(device)
        self.num_point_features = num_point_features
        self.max_num_voxels = max_num_voxels
        self.max_num_points_per_voxel = max_num_points_per_voxel
        self.vsize, self.grid_size, self.grid_stride, self.coors_range = self._grid.meta_data()

    def __call__(
        self, pc: Tensor, clear_voxels: bool = True, empty_mean: bool = False
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Voxels float32 [V, P, C], indices int32 [V, D] (the last coordinate first), points per voxel int32 [V].

        Free places of a voxel are 0, or with `empty_mean` the mean of its points.
        """
        return self.generate_voxel_with_id(pc, clear_voxels, empty_mean)[:3]

    def generate_voxel_with_id(
        self, pc: Tensor, clear_voxels: bool = True, empty_mean: bool = False
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """As a call, and int64 [N]: the voxel of each point, or -1 where it has none."""
        if pc.device.type != self.device.type:
            raise ValueError(f"PointToVoxel: pc must be on {self.device.type}, got {pc.device.type}")
        return voxels.generate(
            self._grid, pc, self.num_point_features, self.max_num_voxels, self.max_num_points_per_voxel,
            empty_mean=empty_mean,
        )  # fmt: skip


def gather_features_by_pc_voxel_id(
    seg_res_features: Tensor, pc_voxel_id: Tensor, invalid_value: int | float = 0
) -> Tensor:
    """The features of each point's voxel: [V, ...] and int64 [N] -> [N, ...]; `invalid_value` where it has none."""
    voxel = pc_voxel_id.to(seg_res_features.device)
    rows = seg_res_features.new_full((1, *seg_res_features.shape[1:]), invalid_value)
    return torch.cat([seg_res_features, rows])[torch.where(voxel >= 0, voxel, seg_res_features.shape[0])]


__all__ = ["PointToVoxel", "gather_features_by_pc_voxel_id"]
