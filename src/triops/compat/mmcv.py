"""mmcv without a compiler: importing this module supplies `mmcv._ext`, unless a compiled one is there.

Import it before `mmcv.ops`. The functions have the keyword names of mmcv 2.1 and fill the tensors that they are given.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

import triops
from triops.compat import (
    _finder,
    _mmcv_attention,
    _mmcv_boxes,
    _mmcv_deform,
    _mmcv_images,
    _mmcv_losses,
    _mmcv_maps,
    _mmcv_motion,
    _mmcv_norm,
    _mmcv_points,
    _mmcv_rois,
    _mmcv_rotated,
    _mmcv_search,
    _mmcv_sparse,
    _mmcv_text,
    _mmcv_voxels,
)
from triops.compat._extension import Extension
from triops.ops.bbox_overlaps import Mode as OverlapMode
from triops.ops.roiaware_pool3d import Mode as PoolMode

OVERLAP_MODES: tuple[OverlapMode, ...] = ("iou", "iof")
POOL_MODES: tuple[PoolMode, ...] = ("max", "avg")


def get_compiler_version() -> str:
    return f"none, triops {triops.__version__}"


def get_compiling_cuda_version() -> str:
    return torch.version.cuda or "not available"


def bbox_overlaps(bboxes1: Tensor, bboxes2: Tensor, ious: Tensor, mode: int, aligned: bool, offset: int) -> None:
    # (0, 1) is what some callers make for aligned boxes when there are none
    ious.copy_(triops.bbox_overlaps(bboxes1, bboxes2, OVERLAP_MODES[mode], bool(aligned), offset).view_as(ious))


def border_align_forward(input: Tensor, boxes: Tensor, output: Tensor, argmax_idx: Tensor, pool_size: int) -> None:
    pooled, steps = triops.border_align_forward(input, boxes, pool_size)
    output.copy_(pooled)
    argmax_idx.copy_(steps)


def border_align_backward(
    grad_output: Tensor, boxes: Tensor, argmax_idx: Tensor, grad_input: Tensor, pool_size: int
) -> None:
    grad_input += triops.border_align_backward(grad_output, boxes, argmax_idx, grad_input.shape, pool_size)


def points_in_boxes_cpu_forward(boxes_tensor: Tensor, pts_tensor: Tensor, pts_indices_tensor: Tensor) -> None:
    """One batch: boxes [T, 7], points [M, 3], 0 or 1 in [T, M]."""
    held = triops.points_in_boxes_all(pts_tensor[None], boxes_tensor[None], z_origin="bottom")[0]
    pts_indices_tensor.copy_(held.t())


def points_in_boxes_part_forward(boxes_tensor: Tensor, pts_tensor: Tensor, box_idx_of_points_tensor: Tensor) -> None:
    box_idx_of_points_tensor.copy_(triops.points_in_boxes(pts_tensor, boxes_tensor, z_origin="bottom"))


def points_in_boxes_all_forward(boxes_tensor: Tensor, pts_tensor: Tensor, box_idx_of_points_tensor: Tensor) -> None:
    box_idx_of_points_tensor.copy_(triops.points_in_boxes_all(pts_tensor, boxes_tensor, z_origin="bottom"))


def roiaware_pool3d_forward(
    rois: Tensor, pts: Tensor, pts_feature: Tensor, argmax: Tensor, pts_idx_of_voxels: Tensor, pooled_features: Tensor,
    pool_method: int,
) -> None:  # fmt: skip
    *cells, slots = pts_idx_of_voxels.shape[1:]
    pooled, winners, lists = triops.roiaware_pool3d_forward(
        rois, pts, pts_feature, cells, slots, POOL_MODES[pool_method]
    )
    pooled_features.copy_(pooled)
    pts_idx_of_voxels.copy_(lists)
    if POOL_MODES[pool_method] == "max":  # a mean has no winner: mmcv leaves the 0 that it was given
        argmax.copy_(winners)


def roiaware_pool3d_backward(
    pts_idx_of_voxels: Tensor, argmax: Tensor, grad_out: Tensor, grad_in: Tensor, pool_method: int
) -> None:
    grad_in += triops.roiaware_pool3d_backward(
        pts_idx_of_voxels, argmax, grad_out, grad_in.shape[0], POOL_MODES[pool_method]
    )


FUNCTIONS: dict[str, Callable[..., Any]] = {
    function.__name__: function
    for function in (
        get_compiler_version, get_compiling_cuda_version, bbox_overlaps, border_align_forward, border_align_backward,
        points_in_boxes_cpu_forward, points_in_boxes_part_forward, points_in_boxes_all_forward,
        roiaware_pool3d_forward, roiaware_pool3d_backward,
    )
}  # fmt: skip
FUNCTIONS |= _mmcv_attention.FUNCTIONS
FUNCTIONS |= _mmcv_deform.FUNCTIONS
FUNCTIONS |= _mmcv_losses.FUNCTIONS
FUNCTIONS |= _mmcv_images.FUNCTIONS
FUNCTIONS |= _mmcv_maps.FUNCTIONS
FUNCTIONS |= _mmcv_motion.FUNCTIONS
FUNCTIONS |= _mmcv_norm.FUNCTIONS
FUNCTIONS |= _mmcv_points.FUNCTIONS
FUNCTIONS |= _mmcv_text.FUNCTIONS
FUNCTIONS |= _mmcv_boxes.FUNCTIONS
FUNCTIONS |= _mmcv_rois.FUNCTIONS
FUNCTIONS |= _mmcv_rotated.FUNCTIONS
FUNCTIONS |= _mmcv_search.FUNCTIONS
FUNCTIONS |= _mmcv_sparse.FUNCTIONS
FUNCTIONS |= _mmcv_voxels.FUNCTIONS


def extension(name: str) -> Extension:
    return Extension(name, FUNCTIONS)


def points_in_boxes_part(points: Tensor, boxes: Tensor) -> Tensor:
    return triops.points_in_boxes(points, boxes, z_origin="bottom")


def points_in_boxes_all(points: Tensor, boxes: Tensor) -> Tensor:
    return triops.points_in_boxes_all(points, boxes, z_origin="bottom").int()


def replace_wrappers(module: ModuleType) -> None:
    """Functions of mmcv that are Python around a kernel: those for points in boxes, sampling, nearest neighbors and the
    backward pass of the naive CARAFE ask for a CUDA device or its tensors, which fails without a GPU; those of rotated
    boxes lose corners by rounding."""
    replaced: dict[str, Callable[..., Any]] = {
        "points_in_boxes_part": points_in_boxes_part,
        "points_in_boxes_all": points_in_boxes_all,
        "diff_iou_rotated_2d": _mmcv_rotated.diff_iou_rotated_2d,
        "diff_iou_rotated_3d": _mmcv_rotated.diff_iou_rotated_3d,
        "furthest_point_sample": _mmcv_points.furthest_point_sample,
        "knn": _mmcv_search.knn,
    }
    for name, function in replaced.items():
        original = getattr(module, name, None)
        if original is not None:
            setattr(module, name, functools.wraps(original)(function))
    carafe = getattr(module, "CARAFENaiveFunction", None)
    if carafe is not None:
        carafe.backward = staticmethod(_mmcv_maps.carafe_naive_gradients)


_finder.install("mmcv")
