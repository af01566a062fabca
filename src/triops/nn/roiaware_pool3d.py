"""The module over `roiaware_pool3d`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor, nn

from triops.ops.roiaware_pool3d import Mode, roiaware_pool3d


class RoIAwarePool3d(nn.Module):
    """See `triops.roiaware_pool3d`.

    >>> import torch, triops.nn
    >>> pool = triops.nn.RoIAwarePool3d(out_size=12, mode="avg")
    >>> pool(torch.rand(2, 7), torch.rand(50, 3), torch.rand(50, 16)).shape
    torch.Size([2, 12, 12, 12, 16])
    """

    def __init__(self, out_size: int | Sequence[int], max_points_per_voxel: int = 128, mode: Mode = "max") -> None:
        super().__init__()
        self.out_size = out_size
        self.max_points_per_voxel = max_points_per_voxel
        self.mode = mode

    def forward(self, rois: Tensor, points: Tensor, features: Tensor) -> Tensor:
        return roiaware_pool3d(rois, points, features, self.out_size, self.max_points_per_voxel, self.mode)

    if TYPE_CHECKING:
        __call__ = forward

    def extra_repr(self) -> str:
        return f"out_size={self.out_size}, max_points_per_voxel={self.max_points_per_voxel}, mode={self.mode!r}"
