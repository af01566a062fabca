"""Sampling, grouping, interpolation and pooling of points of OpenPCDet's extension modules, over triops.

The functions have OpenPCDet's parameters, in its order, and fill the tensors that they are given.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

import triops
from triops._clouds import counts_to_offsets
from triops._dtypes import compute_dtype
from triops.compat import _mmcv_points
from triops.ops.furthest_point_sample import furthest_point_sample_rows

ROI_MARGIN = 1e-5  # in x and y, of roipoint_pool3d


def _sample(b: int, n: int, m: int, points: Tensor, temp: Tensor, idx: Tensor) -> int:
    idx.copy_(triops.furthest_point_sample(points, m))
    return 1


def _stack_sample(points: Tensor, temp: Tensor, xyz_batch_cnt: Tensor, idx: Tensor, num_sampled_points: Tensor) -> int:
    offsets, samples = counts_to_offsets(xyz_batch_cnt), counts_to_offsets(num_sampled_points)
    idx.copy_(furthest_point_sample_rows(points, offsets, samples, idx.shape[0]))
    return 1


def _gather(b: int, c: int, n: int, npoints: int, points: Tensor, idx: Tensor, out: Tensor) -> int:
    _mmcv_points.gather_points_forward(points, idx, out, b, c, n, npoints)
    return 1


def _gather_grad(b: int, c: int, n: int, npoints: int, grad_out: Tensor, idx: Tensor, grad_points: Tensor) -> int:
    _mmcv_points.gather_points_backward(grad_out, idx, grad_points, b, c, n, npoints)
    return 1


def _group(b: int, c: int, n: int, npoints: int, nsample: int, points: Tensor, idx: Tensor, out: Tensor) -> int:
    _mmcv_points.group_points_forward(points, idx, out, b, c, n, npoints, nsample)
    return 1


def _group_grad(
    b: int, c: int, n: int, npoints: int, nsample: int, grad_out: Tensor, idx: Tensor, grad_points: Tensor
) -> int:
    _mmcv_points.group_points_backward(grad_out, idx, grad_points, b, c, n, npoints, nsample)
    return 1


def _interpolate(b: int, c: int, m: int, n: int, points: Tensor, idx: Tensor, weight: Tensor, out: Tensor) -> None:
    _mmcv_points.three_interpolate_forward(points, idx, weight, out, b, c, m, n)


def _interpolate_grad(
    b: int, c: int, n: int, m: int, grad_out: Tensor, idx: Tensor, weight: Tensor, grad_points: Tensor
) -> None:
    _mmcv_points.three_interpolate_backward(grad_out, idx, weight, grad_points, b, c, n, m)


def _stack_group(
    B: int, M: int, C: int, nsample: int, features: Tensor, features_batch_cnt: Tensor, idx: Tensor,
    idx_batch_cnt: Tensor, out: Tensor,
) -> int:  # fmt: skip
    _mmcv_points.stack_group_points_forward(features, features_batch_cnt, idx, idx_batch_cnt, out, B, C, M, nsample)
    return 1


def _stack_group_grad(
    B: int, M: int, C: int, N: int, nsample: int, grad_out: Tensor, idx: Tensor, idx_batch_cnt: Tensor,
    features_batch_cnt: Tensor, grad_features: Tensor,
) -> int:  # fmt: skip
    _mmcv_points.stack_group_points_backward(
        grad_out, idx, idx_batch_cnt, features_batch_cnt, grad_features, B, C, M, N, nsample
    )
    return 1


def _stack_interpolate(features: Tensor, idx: Tensor, weight: Tensor, out: Tensor) -> None:
    out.copy_(triops.three_interpolate(features, idx, weight.to(compute_dtype(features.dtype))))


def _stack_interpolate_grad(grad_out: Tensor, idx: Tensor, weight: Tensor, grad_features: Tensor) -> None:
    grad_features += triops.three_interpolate_backward(
        grad_out[None], grad_features[None], idx[None], weight[None].to(compute_dtype(grad_out.dtype)), True, False
    )[0][0]


def _roipoint_pool3d(
    xyz: Tensor, boxes3d: Tensor, pts_feature: Tensor, pooled_features: Tensor, pooled_empty_flag: Tensor
) -> int:
    pooled, empty = triops.roipoint_pool3d(
        xyz, pts_feature, boxes3d.to(xyz.dtype), pooled_features.shape[2], z_origin="center", margin=ROI_MARGIN
    )
    pooled_features.copy_(pooled)
    pooled_empty_flag.copy_(empty)
    return 1


FUNCTIONS: dict[str, dict[str, Callable[..., Any]]] = {
    "pointnet2_batch_cuda": {
        "farthest_point_sampling_wrapper": _sample,
        "gather_points_wrapper": _gather,
        "gather_points_grad_wrapper": _gather_grad,
        "group_points_wrapper": _group,
        "group_points_grad_wrapper": _group_grad,
        "three_interpolate_wrapper": _interpolate,
        "three_interpolate_grad_wrapper": _interpolate_grad,
    },
    "pointnet2_stack_cuda": {
        "farthest_point_sampling_wrapper": _sample,
        "stack_farthest_point_sampling_wrapper": _stack_sample,
        "group_points_wrapper": _stack_group,
        "group_points_grad_wrapper": _stack_group_grad,
        "three_interpolate_wrapper": _stack_interpolate,
        "three_interpolate_grad_wrapper": _stack_interpolate_grad,
    },
    "roipoint_pool3d_cuda": {"forward": _roipoint_pool3d},
}
