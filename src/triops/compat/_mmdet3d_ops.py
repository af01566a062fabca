"""The extension modules that mmdetection3d compiled under `mmdet3d.ops` before 1.0, over triops.

BEVFormer, UniAD and VAD were written for those versions, BEVFusion and BEVDet carry them. The functions have the
parameters of the compiled ones, in their order, and fill the tensors that they are given. Boxes are of that time: a
heading turns clockwise seen from above, and of `(x, y, z, w, l, h, heading)` the width lies along x at heading 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import triops
from triops.compat import _mmcv_motion, _mmcv_points, _mmcv_search, _mmcv_sparse, _pcdet_points
from triops.compat import mmcv as of_mmcv
from triops.compat._mmcv_boxes import falling

MARGIN = 1e-5  # by which a corner may lie outside of a rotated box and count as inside


def _turned(boxes: Tensor) -> Tensor:
    """Boxes [..., 7] with the length along x at heading 0, turning counterclockwise; z stays at the bottom."""
    width, length = boxes[..., 3:4], boxes[..., 4:5]
    return torch.cat([boxes[..., :3], length, width, boxes[..., 5:6], -boxes[..., 6:7] - math.pi / 2], -1)


def _seen_from_above(boxes: Tensor) -> Tensor:
    """Boxes [N, 5] of `(x1, y1, x2, y2, heading)` as float [N, 7]."""
    low, high = boxes[:, :2], boxes[:, 2:4]
    flat = torch.zeros_like(low[:, :1])
    return torch.cat([(low + high) / 2, flat, high - low, flat + 1, -boxes[:, 4:5]], 1)


def _points_in_boxes_gpu(boxes: Tensor, pts: Tensor, box_idx_of_points: Tensor) -> int:
    of_mmcv.points_in_boxes_part_forward(_turned(boxes), pts, box_idx_of_points)
    return 1


def _points_in_boxes_batch(boxes: Tensor, pts: Tensor, box_idx_of_points: Tensor) -> int:
    of_mmcv.points_in_boxes_all_forward(_turned(boxes), pts, box_idx_of_points)
    return 1


def _points_in_boxes_cpu(boxes: Tensor, pts: Tensor, pts_indices: Tensor) -> int:
    of_mmcv.points_in_boxes_cpu_forward(_turned(boxes), pts, pts_indices)
    return 1


def _roiaware_forward(
    rois: Tensor, pts: Tensor, pts_feature: Tensor, argmax: Tensor, pts_idx_of_voxels: Tensor, pooled_features: Tensor,
    pool_method: int,
) -> int:  # fmt: skip
    of_mmcv.roiaware_pool3d_forward(
        _turned(rois), pts, pts_feature, argmax, pts_idx_of_voxels, pooled_features, pool_method
    )
    return 1


def _roiaware_backward(
    pts_idx_of_voxels: Tensor, argmax: Tensor, grad_out: Tensor, grad_in: Tensor, pool_method: int
) -> int:
    of_mmcv.roiaware_pool3d_backward(pts_idx_of_voxels, argmax, grad_out, grad_in, pool_method)
    return 1


def _boxes_overlap_bev_gpu(boxes_a: Tensor, boxes_b: Tensor, ans_overlap: Tensor) -> int:
    shared = triops.boxes_overlap_bev(_seen_from_above(boxes_a), _seen_from_above(boxes_b), margin=MARGIN)
    ans_overlap.copy_(shared)
    return 1


def _boxes_iou_bev_gpu(boxes_a: Tensor, boxes_b: Tensor, ans_iou: Tensor) -> int:
    ans_iou.copy_(triops.boxes_iou_bev(_seen_from_above(boxes_a), _seen_from_above(boxes_b), margin=MARGIN))
    return 1


def _nms_gpu(boxes: Tensor, keep: Tensor, nms_overlap_thresh: float, device_id: int | None = None) -> int:
    """The boxes come best first; `keep` may be on another device."""
    kept = triops.nms3d(_seen_from_above(boxes), falling(boxes), nms_overlap_thresh, margin=MARGIN)
    keep[: len(kept)] = kept.to(keep.device)
    return len(kept)


def _nms_normal_gpu(boxes: Tensor, keep: Tensor, nms_overlap_thresh: float, device_id: int | None = None) -> int:
    kept = triops.nms3d_normal(_seen_from_above(boxes), falling(boxes), nms_overlap_thresh)
    keep[: len(kept)] = kept.to(keep.device)
    return len(kept)


def _ball_query(
    b: int, n: int, m: int, min_radius: float, max_radius: float, nsample: int, new_xyz: Tensor, xyz: Tensor,
    idx: Tensor,
) -> int:  # fmt: skip
    _mmcv_search.ball_query_forward(new_xyz, xyz, idx, b, n, m, min_radius, max_radius, nsample)
    return 1


def _knn(b: int, n: int, m: int, nsample: int, xyz: Tensor, new_xyz: Tensor, idx: Tensor, dist2: Tensor) -> None:
    _mmcv_search.knn_forward(xyz, new_xyz, idx, dist2, b, n, m, nsample)


def _three_nn(b: int, n: int, m: int, unknown: Tensor, known: Tensor, dist2: Tensor, idx: Tensor) -> None:
    _mmcv_search.three_nn_forward(unknown, known, dist2, idx, b, n, m)


def _sample(b: int, n: int, m: int, points: Tensor, temp: Tensor, idx: Tensor) -> int:
    _mmcv_points.furthest_point_sampling_forward(points, temp, idx, b, n, m)
    return 1


def _sample_with_dist(b: int, n: int, m: int, points: Tensor, temp: Tensor, idx: Tensor) -> int:
    _mmcv_points.furthest_point_sampling_with_dist_forward(points, temp, idx, b, n, m)
    return 1


def _assign_score(
    B: int, N0: int, N1: int, M: int, K: int, O: int, aggregate: int, points: Tensor, centers: Tensor,  # noqa: E741
    scores: Tensor, knn_idx: Tensor, output: Tensor,
) -> None:  # fmt: skip
    _mmcv_motion.assign_score_withk_forward(
        points, centers, scores, knn_idx, output, B, N0, N1, M, K, O, aggregate
    )  # fmt: skip


def _assign_score_grad(
    B: int, N0: int, N1: int, M: int, K: int, O: int, aggregate: int, grad_out: Tensor, points: Tensor,  # noqa: E741
    centers: Tensor, scores: Tensor, knn_idx: Tensor, grad_points: Tensor, grad_centers: Tensor, grad_scores: Tensor,
) -> None:  # fmt: skip
    _mmcv_motion.assign_score_withk_backward(
        grad_out, points, centers, scores, knn_idx, grad_points, grad_centers, grad_scores, B, N0, N1, M, K, O,
        aggregate,
    )  # fmt: skip


_points = _pcdet_points.FUNCTIONS["pointnet2_batch_cuda"]  # OpenPCDet's have the same parameters

FUNCTIONS: dict[str, dict[str, Callable[..., Any]]] = {
    "iou3d_cuda": {
        "boxes_overlap_bev_gpu": _boxes_overlap_bev_gpu,
        "boxes_iou_bev_gpu": _boxes_iou_bev_gpu,
        "nms_gpu": _nms_gpu,
        "nms_normal_gpu": _nms_normal_gpu,
    },
    "roiaware_pool3d_ext": {
        "forward": _roiaware_forward,
        "backward": _roiaware_backward,
        "points_in_boxes_gpu": _points_in_boxes_gpu,
        "points_in_boxes_batch": _points_in_boxes_batch,
        "points_in_boxes_cpu": _points_in_boxes_cpu,
    },
    "ball_query_ext": {"ball_query_wrapper": _ball_query},
    "knn_ext": {"knn_wrapper": _knn},
    "interpolate_ext": {
        "three_nn_wrapper": _three_nn,
        "three_interpolate_wrapper": _points["three_interpolate_wrapper"],
        "three_interpolate_grad_wrapper": _points["three_interpolate_grad_wrapper"],
    },
    "group_points_ext": {"forward": _points["group_points_wrapper"], "backward": _points["group_points_grad_wrapper"]},
    "gather_points_ext": {name: _points[name] for name in ("gather_points_wrapper", "gather_points_grad_wrapper")},
    "furthest_point_sample_ext": {
        "furthest_point_sampling_wrapper": _sample,
        "furthest_point_sampling_with_dist_wrapper": _sample_with_dist,
    },
    "assign_score_withk_ext": {
        "assign_score_withk_forward_wrapper": _assign_score,
        "assign_score_withk_backward_wrapper": _assign_score_grad,
    },
    "sparse_conv_ext": {
        f"{name}_{kind}": _mmcv_sparse.FUNCTIONS[function]
        for name, function in (
            ("indice_conv", "indice_conv_forward"),
            ("indice_conv_backward", "indice_conv_backward"),
            ("fused_indice_conv", "fused_indice_conv_forward"),
            ("indice_maxpool", "indice_maxpool_forward"),
            ("indice_maxpool_backward", "indice_maxpool_backward"),
        )
        for kind in ("fp32", "half")
    }
    | {f"get_indice_pairs_{d}d": _mmcv_sparse.FUNCTIONS[f"get_indice_pairs_{d}d_forward"] for d in (2, 3, 4)}
    | {f"get_indice_pairs_grid_{d}d": _mmcv_sparse.FUNCTIONS[f"get_indice_pairs_{d}d_backward"] for d in (2, 3)},
}
