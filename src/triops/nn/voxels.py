"""Modules that turn points into voxels, and into the sparse tensor that convolutions begin with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from triops.nn.sparse_tensor import SparseConvTensor
from triops.ops.dynamic_scatter import Reduce, dynamic_scatter
from triops.ops.voxelize import Numbers, grid_size, voxelize, voxelize_padded


class Voxelization(nn.Module):
    """See `triops.voxelize`.

    max_voxels: one number, or one for training and one for evaluation.

    >>> import torch, triops.nn
    >>> layer = triops.nn.Voxelization((1, 1, 1), (0, 0, 0, 4, 4, 2), max_points=5, max_voxels=(100, 200))
    >>> voxels, coords, num_points = layer(torch.tensor([[0.5, 0.5, 0.5], [3.5, 0.5, 1.5], [3.1, 0.1, 1.1]]))
    >>> coords.tolist(), num_points.tolist()
    ([[0, 0, 0], [1, 0, 3]], [1, 2])
    """

    def __init__(
        self, voxel_size: Numbers, point_range: Numbers, max_points: int, max_voxels: int | tuple[int, int]
    ) -> None:
        super().__init__()
        self.voxel_size, self.point_range = list(voxel_size), list(point_range)
        self.max_points = max_points
        self.max_voxels = (max_voxels, max_voxels) if isinstance(max_voxels, int) else (max_voxels[0], max_voxels[1])
        self._spatial_shape = grid_size(voxel_size, point_range)[::-1]  # once: torch.compile cannot trace NumPy's part

    @property
    def spatial_shape(self) -> list[int]:
        """Cells along z, y and x: the `spatial_shape` of a SparseConvTensor."""
        return list(self._spatial_shape)

    def forward(self, points: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return voxelize(points, self.voxel_size, self.point_range, self.max_points, self._most())

    if TYPE_CHECKING:
        __call__ = forward

    def _most(self) -> int:
        return self.max_voxels[0 if self.training else 1]  # Dynamo of torch 2.11 takes no bool for an index

    def extra_repr(self) -> str:
        return (
            f"voxel_size={self.voxel_size}, point_range={self.point_range}, max_points={self.max_points}, "
            f"max_voxels={self.max_voxels}"
        )


class MeanVoxels(Voxelization):
    """Points to the sparse tensor that a network begins with: each voxel holds the mean of its points.

    Takes points [N, C], or a list of them, one per sample of the batch. Arguments as for `Voxelization`. The sites of
    one tensor of points are as many as `max_voxels` allows, those behind the true number, `active`, inactive (-1):
    no host waits, so that a network from points to a bird's-eye map has static shapes for CUDA graphs, compile and
    export. Of a list they are as many as there are.

    >>> import torch, triops.nn
    >>> layer = triops.nn.MeanVoxels((1, 1, 1), (0, 0, 0, 4, 4, 2), max_points=5, max_voxels=100)
    >>> points = torch.tensor([[0.5, 0.5, 0.5, 7.0], [3.5, 0.5, 1.5, 2.0], [3.1, 0.1, 1.1, 4.0]])
    >>> x = layer([points])
    >>> x, x.features[:, 3]
    (SparseConvTensor(2 sites, 4 channels, spatial_shape=[2, 4, 4], batch_size=1), tensor([7., 3.]))
    >>> layer(points).indices.tolist()
    [[0, 0, 0, 0], [0, 1, 0, 3], [-1, -1, -1, -1]]
    """

    def forward(self, points: Tensor | Sequence[Tensor]) -> SparseConvTensor:  # type: ignore[override]
        if isinstance(points, Tensor):
            return self._padded(points)
        if not points:
            raise ValueError("MeanVoxels: points must hold at least one tensor, got an empty list")
        features, sites = [], []
        for b, cloud in enumerate(points):
            voxels, coords, num_points = super().forward(cloud)
            features.append(_mean(voxels, num_points))
            sites.append(torch.cat([torch.full_like(coords[:, :1], b), coords], 1))
        return SparseConvTensor(torch.cat(features), torch.cat(sites), self.spatial_shape, len(points))

    if TYPE_CHECKING:
        __call__ = forward  # type: ignore[assignment]

    def _padded(self, points: Tensor) -> SparseConvTensor:
        voxels, coords, num_points, _, count = voxelize_padded(
            points, self.voxel_size, self.point_range, self.max_points, self._most()
        )
        sites = torch.where(num_points[:, None] > 0, torch.nn.functional.pad(coords, (1, 0)), -1)
        made = SparseConvTensor(_mean(voxels, num_points), sites, self.spatial_shape, 1)
        made.active = count.reshape(1)
        return made


class DynamicScatter(nn.Module):
    """See `triops.dynamic_scatter`.

    >>> import torch, triops.nn
    >>> triops.nn.DynamicScatter("max")(torch.tensor([[1.0], [2.0]]), torch.tensor([[0, 5], [0, 5]]))
    (tensor([[2.]]), tensor([[0, 5]]))
    """

    def __init__(self, reduce: Reduce = "mean") -> None:
        super().__init__()
        self.reduce = reduce

    def forward(self, features: Tensor, coords: Tensor) -> tuple[Tensor, Tensor]:
        return dynamic_scatter(features, coords, self.reduce)

    if TYPE_CHECKING:
        __call__ = forward

    def extra_repr(self) -> str:
        return f"reduce={self.reduce!r}"


def _mean(voxels: Tensor, num_points: Tensor) -> Tensor:
    """The mean of each voxel's points: slots behind the last are 0. In float32 for half types."""
    total = voxels.sum(1, dtype=torch.promote_types(voxels.dtype, torch.float32))
    return (total / num_points.clamp(min=1)[:, None]).to(voxels.dtype)
