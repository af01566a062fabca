"""OpenPCDet's `roiaware_pool3d_utils` over triops, and its extension modules without a compiler.

Importing this module supplies the extension modules under `pcdet.ops`, unless compiled ones are there.
Boxes are `(x, y, z, dx, dy, dz, heading)` with z at the centre.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import triops
from triops.compat import _finder
from triops.compat._extension import Extension

CPU_MARGIN, GPU_MARGIN = 1e-2, 1e-5  # OpenPCDet's constants; which applies depends on the function, not on the device
POOL_MODES = ("max", "avg")


def points_in_boxes_cpu(points: Tensor | np.ndarray[Any, Any], boxes: Tensor | np.ndarray[Any, Any]) -> Any:
    """Which points lie in which box, with a margin of 1e-2 in x and y.

    Args:
        points: float [M, 3], a tensor or an array.
        boxes: float [T, 7], likewise.

    Returns:
        int32 [T, M] of 0 and 1; an array where `boxes` is one.

    >>> import torch
    >>> from triops.compat.pcdet import points_in_boxes_cpu
    >>> points_in_boxes_cpu(torch.tensor([[1.005, 0, 0], [1.05, 0, 0]]), torch.tensor([[0.0, 0, 0, 2, 2, 2, 0]]))
    tensor([[1, 0]], dtype=torch.int32)
    """
    rows, columns = torch.as_tensor(boxes).float(), torch.as_tensor(points).float()
    held = triops.points_in_boxes_all(columns[None], rows[None], margin=CPU_MARGIN)[0].t().contiguous().int()
    return held.numpy() if isinstance(boxes, np.ndarray) else held


def points_in_boxes_gpu(points: Tensor, boxes: Tensor) -> Tensor:
    """The first box that holds each point, or -1, with a margin of 1e-5 in x and y. On a CPU too.

    Args:
        points: float tensor [B, M, 3].
        boxes: tensor [B, T, 7] of the same dtype.

    Returns:
        int32 tensor [B, M].

    >>> import torch
    >>> from triops.compat.pcdet import points_in_boxes_gpu
    >>> points_in_boxes_gpu(torch.tensor([[[1.005, 0, 0], [0, 0, 0]]]), torch.tensor([[[0.0, 0, 0, 2, 2, 2, 0]]]))
    tensor([[-1,  0]], dtype=torch.int32)
    """
    return triops.points_in_boxes(points, boxes, margin=GPU_MARGIN)


class RoIAwarePool3d(nn.Module):
    """See `triops.roiaware_pool3d`; the RoIs have z at the centre and a margin of 1e-5."""

    def __init__(self, out_size: int | Sequence[int], max_pts_each_voxel: int = 128) -> None:
        super().__init__()
        self.out_size = out_size
        self.max_pts_each_voxel = max_pts_each_voxel

    def forward(self, rois: Tensor, pts: Tensor, pts_feature: Tensor, pool_method: str = "max") -> Tensor:
        """rois [N, 7], pts [P, 3], pts_feature [P, C] -> [N, X, Y, Z, C], differentiable in pts_feature."""
        return triops.roiaware_pool3d(
            rois, pts, pts_feature, self.out_size, self.max_pts_each_voxel, pool_method,
            z_origin="center", margin=GPU_MARGIN,
        )  # fmt: skip


def _forward(
    rois: Tensor, pts: Tensor, pts_feature: Tensor, argmax: Tensor, pts_idx_of_voxels: Tensor, pooled_features: Tensor,
    pool_method: int,
) -> int:  # fmt: skip
    *cells, slots = pts_idx_of_voxels.shape[1:]
    pooled, winners, lists = triops.roiaware_pool3d_forward(
        rois, pts, pts_feature, cells, slots, POOL_MODES[pool_method], z_origin="center", margin=GPU_MARGIN
    )
    pooled_features.copy_(pooled)
    pts_idx_of_voxels.copy_(lists)
    if POOL_MODES[pool_method] == "max":  # a mean has no winner: OpenPCDet leaves the 0 that it was given
        argmax.copy_(winners)
    return 1


def _backward(pts_idx_of_voxels: Tensor, argmax: Tensor, grad_out: Tensor, grad_in: Tensor, pool_method: int) -> int:
    grad_in += triops.roiaware_pool3d_backward(
        pts_idx_of_voxels, argmax, grad_out, grad_in.shape[0], POOL_MODES[pool_method]
    )
    return 1


def _points_in_boxes_gpu(boxes: Tensor, pts: Tensor, box_idx_of_points: Tensor) -> int:
    box_idx_of_points.copy_(points_in_boxes_gpu(pts, boxes))
    return 1


def _points_in_boxes_cpu(boxes: Tensor, pts: Tensor, pts_indices: Tensor) -> int:
    pts_indices.copy_(points_in_boxes_cpu(pts, boxes))
    return 1


FUNCTIONS: dict[str, dict[str, Callable[..., Any]]] = {
    "roiaware_pool3d_cuda": {
        "forward": _forward,
        "backward": _backward,
        "points_in_boxes_gpu": _points_in_boxes_gpu,
        "points_in_boxes_cpu": _points_in_boxes_cpu,
    }
}


def extension(name: str) -> Extension:
    return Extension(name, FUNCTIONS.get(name.rpartition(".")[2], {}))


_finder.install("pcdet")

__all__ = ["RoIAwarePool3d", "points_in_boxes_cpu", "points_in_boxes_gpu"]
