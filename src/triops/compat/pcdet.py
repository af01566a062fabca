"""OpenPCDet's `roiaware_pool3d_utils` and `iou3d_nms_utils` over triops, and its extension modules without a compiler.

Importing this module supplies the extension modules under `pcdet.ops`, unless compiled ones are there, and in place of
kernels in `numba.cuda` the overlaps that the evaluations of KITTI and ONCE ask for.
Boxes are `(x, y, z, dx, dy, dz, heading)` with z at the centre.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import triops
from triops.compat import _bev, _finder, _pcdet_points, _pcdet_search, _pcdet_vector_pool, _rotate_iou
from triops.compat._extension import Extension
from triops.compat._mmcv_boxes import falling
from triops.ops.nms.reference import by_score
from triops.ops.roiaware_pool3d import Mode as PoolMode

CPU_MARGIN, GPU_MARGIN = 1e-2, 1e-5  # OpenPCDet's constants; which applies depends on the function, not on the device
IOU_MARGIN = 1e-2  # by which a corner may lie outside and count as inside
POOL_MODES: tuple[PoolMode, ...] = ("max", "avg")


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

    def forward(self, rois: Tensor, pts: Tensor, pts_feature: Tensor, pool_method: PoolMode = "max") -> Tensor:
        """rois [N, 7], pts [P, 3], pts_feature [P, C] -> [N, X, Y, Z, C], differentiable in pts_feature."""
        return triops.roiaware_pool3d(
            rois, pts, pts_feature, self.out_size, self.max_pts_each_voxel, pool_method,
            z_origin="center", margin=GPU_MARGIN,
        )  # fmt: skip


def boxes_bev_iou_cpu(boxes_a: Tensor | np.ndarray[Any, Any], boxes_b: Tensor | np.ndarray[Any, Any]) -> Any:
    """Intersection over union seen from above, with OpenPCDet's margin of 1e-2 around corners. On any device.

    Args:
        boxes_a: float [N, 7], a tensor or an array.
        boxes_b: float [M, 7], likewise.

    Returns:
        float32 [N, M]; an array where `boxes_b` is one.
    """
    ious = boxes_iou_bev(torch.as_tensor(boxes_a), torch.as_tensor(boxes_b))
    return ious.numpy() if isinstance(boxes_b, np.ndarray) else ious


def boxes_iou_bev(boxes_a: Tensor, boxes_b: Tensor) -> Tensor:
    """As `boxes_bev_iou_cpu`, for tensors. boxes_a [N, 7], boxes_b [M, 7] -> [N, M]."""
    return triops.boxes_iou_bev(boxes_a.float(), boxes_b.float(), margin=IOU_MARGIN)


def boxes_iou3d_gpu(boxes_a: Tensor, boxes_b: Tensor) -> Tensor:
    """Intersection over union of volumes. boxes_a [N, 7], boxes_b [M, 7] -> [N, M], on any device.

    >>> import torch
    >>> from triops.compat.pcdet import boxes_iou3d_gpu
    >>> boxes = torch.tensor([[0.0, 0, 0, 4, 2, 2, 0], [0.0, 0, 1, 4, 2, 2, 0]])
    >>> boxes_iou3d_gpu(boxes[:1], boxes)
    tensor([[1.0000, 0.3333]])
    """
    return triops.boxes_iou3d(boxes_a.float(), boxes_b.float(), margin=IOU_MARGIN)


def boxes_aligned_iou3d_gpu(boxes_a: Tensor, boxes_b: Tensor) -> Tensor:
    """As `boxes_iou3d_gpu`, row by row. boxes_a [N, 7], boxes_b [N, 7] -> [N, 1]."""
    return paired_boxes_iou3d_gpu(boxes_a, boxes_b)[:, None]


def paired_boxes_iou3d_gpu(boxes_a: Tensor, boxes_b: Tensor) -> Tensor:
    """As `boxes_aligned_iou3d_gpu`, without the last axis. boxes_a [N, 7], boxes_b [N, 7] -> [N]."""
    return triops.boxes_iou3d(boxes_a.float(), boxes_b.float(), aligned=True, margin=IOU_MARGIN)


def nms_gpu(
    boxes: Tensor, scores: Tensor, thresh: float, pre_maxsize: int | None = None, **kwargs: Any
) -> tuple[Tensor, None]:
    """Suppression of boxes seen from above, of which the best `pre_maxsize` take part. On any device.

    Args:
        boxes: float tensor [N, 7].
        scores: float tensor [N].
        thresh: a box that overlaps a better one by more is dropped.

    Returns:
        int64 tensor with the boxes that are kept, best first; and None, as OpenPCDet's callers expect.
    """
    order = by_score(scores)[:pre_maxsize]
    return order[triops.nms3d(boxes[order].float(), falling(order), thresh, margin=IOU_MARGIN)], None


def nms_normal_gpu(boxes: Tensor, scores: Tensor, thresh: float, **kwargs: Any) -> tuple[Tensor, None]:
    """As `nms_gpu`, with every heading taken as 0."""
    return triops.nms3d_normal(boxes.float(), scores, thresh), None


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


def _boxes_overlap_bev_gpu(boxes_a: Tensor, boxes_b: Tensor, ans_overlap: Tensor) -> int:
    ans_overlap.copy_(triops.boxes_overlap_bev(boxes_a, boxes_b, margin=IOU_MARGIN))
    return 1


def _boxes_aligned_overlap_bev_gpu(boxes_a: Tensor, boxes_b: Tensor, ans_overlap: Tensor) -> int:
    shared = triops.boxes_overlap_bev(boxes_a, boxes_b, aligned=True, margin=IOU_MARGIN)
    ans_overlap.copy_(shared.view_as(ans_overlap))
    return 1


def _boxes_iou_bev(boxes_a: Tensor, boxes_b: Tensor, ans_iou: Tensor) -> int:
    ans_iou.copy_(boxes_iou_bev(boxes_a, boxes_b))
    return 1


def _boxes_aligned_iou_bev_cpu(boxes_a: Tensor, boxes_b: Tensor, ans_iou: Tensor) -> int:
    ans_iou.copy_(triops.boxes_iou_bev(boxes_a, boxes_b, aligned=True, margin=IOU_MARGIN).view_as(ans_iou))
    return 1


def _nms_gpu(boxes: Tensor, keep: Tensor, nms_overlap_thresh: float) -> int:
    """The boxes come best first; `keep` may be on another device."""
    kept = triops.nms3d(boxes, falling(boxes), nms_overlap_thresh, margin=IOU_MARGIN)
    keep[: len(kept)] = kept.to(keep.device)
    return len(kept)


def _nms_normal_gpu(boxes: Tensor, keep: Tensor, nms_overlap_thresh: float) -> int:
    kept = triops.nms3d_normal(boxes, falling(boxes), nms_overlap_thresh)
    keep[: len(kept)] = kept.to(keep.device)
    return len(kept)


def _ingroup_inds(group_inds: Tensor, out_inds: Tensor) -> None:
    out_inds.copy_(triops.ingroup_inds(group_inds))


FUNCTIONS: dict[str, dict[str, Callable[..., Any]]] = {
    "roiaware_pool3d_cuda": {
        "forward": _forward,
        "backward": _backward,
        "points_in_boxes_gpu": _points_in_boxes_gpu,
        "points_in_boxes_cpu": _points_in_boxes_cpu,
    },
    "iou3d_nms_cuda": {
        "boxes_overlap_bev_gpu": _boxes_overlap_bev_gpu,
        "boxes_aligned_overlap_bev_gpu": _boxes_aligned_overlap_bev_gpu,
        "paired_boxes_overlap_bev_gpu": _boxes_aligned_overlap_bev_gpu,
        "boxes_iou_bev_gpu": _boxes_iou_bev,
        "boxes_iou_bev_cpu": _boxes_iou_bev,
        "boxes_aligned_iou_bev_cpu": _boxes_aligned_iou_bev_cpu,
        "nms_gpu": _nms_gpu,
        "nms_normal_gpu": _nms_normal_gpu,
    },
    "bev_pool_ext": _bev.FUNCTIONS["bev_pool_ext"],
    "ingroup_inds_cuda": {"forward": _ingroup_inds},
    "rotate_iou": _rotate_iou.FUNCTIONS,  # of the evaluations of KITTI and of ONCE
    "iou_utils": _rotate_iou.FUNCTIONS,
}
for _part in (_pcdet_points.FUNCTIONS, _pcdet_search.FUNCTIONS, _pcdet_vector_pool.FUNCTIONS):
    for _module, _functions in _part.items():
        FUNCTIONS[_module] = FUNCTIONS.get(_module, {}) | _functions


def extension(name: str) -> Extension:
    return Extension(name, FUNCTIONS.get(name.rpartition(".")[2], {}))


_finder.install("pcdet")

__all__ = [
    "RoIAwarePool3d",
    "boxes_aligned_iou3d_gpu",
    "boxes_bev_iou_cpu",
    "boxes_iou3d_gpu",
    "boxes_iou_bev",
    "nms_gpu",
    "nms_normal_gpu",
    "paired_boxes_iou3d_gpu",
    "points_in_boxes_cpu",
    "points_in_boxes_gpu",
]
