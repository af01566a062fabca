"""Sampling, grouping and interpolation of point sets of `mmcv._ext`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import triops
from triops._dtypes import compute_dtype


def furthest_point_sampling_forward(
    points_tensor: Tensor, temp_tensor: Tensor, idx_tensor: Tensor, b: int, n: int, m: int
) -> None:
    idx_tensor.copy_(triops.furthest_point_sample(points_tensor, m))


def furthest_point_sampling_with_dist_forward(
    points_tensor: Tensor, temp_tensor: Tensor, idx_tensor: Tensor, b: int, n: int, m: int
) -> None:
    idx_tensor.copy_(triops.furthest_point_sample_with_dist(points_tensor, m))


def gather_points_forward(
    points_tensor: Tensor, idx_tensor: Tensor, out_tensor: Tensor, b: int, c: int, n: int, npoints: int
) -> None:
    out_tensor.copy_(triops.gather_points(points_tensor, idx_tensor))


def gather_points_backward(
    grad_out_tensor: Tensor, idx_tensor: Tensor, grad_points_tensor: Tensor, b: int, c: int, n: int, npoints: int
) -> None:
    grad_points_tensor += triops.gather_points_backward(grad_out_tensor, idx_tensor, n)


def group_points_forward(
    points_tensor: Tensor, idx_tensor: Tensor, out_tensor: Tensor, b: int, c: int, n: int, npoints: int, nsample: int
) -> None:
    out_tensor.copy_(triops.group_points(points_tensor, idx_tensor))


def group_points_backward(
    grad_out_tensor: Tensor, idx_tensor: Tensor, grad_points_tensor: Tensor, b: int, c: int, n: int, npoints: int,
    nsample: int,
) -> None:  # fmt: skip
    grad_points_tensor += triops.gather_points_backward(grad_out_tensor.flatten(2), idx_tensor.flatten(1), n)


def stack_group_points_forward(
    features_tensor: Tensor, features_batch_cnt_tensor: Tensor, idx_tensor: Tensor, idx_batch_cnt_tensor: Tensor,
    out_tensor: Tensor, b: int, c: int, m: int, nsample: int,
) -> None:  # fmt: skip
    rows = as_rows(idx_tensor, idx_batch_cnt_tensor, features_batch_cnt_tensor)
    out_tensor.copy_(triops.group_points(features_tensor, rows).mT)


def stack_group_points_backward(
    grad_out_tensor: Tensor, idx_tensor: Tensor, idx_batch_cnt_tensor: Tensor, features_batch_cnt_tensor: Tensor,
    grad_features_tensor: Tensor, b: int, c: int, m: int, n: int, nsample: int,
) -> None:  # fmt: skip
    rows = as_rows(idx_tensor, idx_batch_cnt_tensor, features_batch_cnt_tensor)
    grad = grad_out_tensor.mT.reshape(1, m * nsample, c)
    grad_features_tensor += triops.gather_points_backward(grad, rows.view(1, -1), n, channels_last=True)[0]


def three_interpolate_forward(
    points_tensor: Tensor, idx_tensor: Tensor, weight_tensor: Tensor, out_tensor: Tensor, b: int, c: int, m: int, n: int
) -> None:
    out_tensor.copy_(
        triops.three_interpolate(points_tensor, idx_tensor, weight_tensor.to(compute_dtype(points_tensor.dtype)))
    )


def three_interpolate_backward(
    grad_out_tensor: Tensor, idx_tensor: Tensor, weight_tensor: Tensor, grad_points_tensor: Tensor, b: int, c: int,
    n: int, m: int,
) -> None:  # fmt: skip
    unread = grad_out_tensor.new_empty((1, 1, 1)).expand(b, c, m)
    grad_points_tensor += triops.three_interpolate_backward(
        grad_out_tensor, unread, idx_tensor, weight_tensor.to(compute_dtype(grad_out_tensor.dtype)), of_weights=False
    )[0]


def roipoint_pool3d_forward(
    xyz: Tensor, boxes3d: Tensor, pts_feature: Tensor, pooled_features: Tensor, pooled_empty_flag: Tensor
) -> None:
    pooled, empty = triops.roipoint_pool3d(xyz, pts_feature, boxes3d.to(xyz.dtype), pooled_features.shape[2])
    pooled_features.copy_(pooled)
    pooled_empty_flag.copy_(empty)


def furthest_point_sample(points_xyz: Tensor, num_points: int) -> Tensor:
    """In place of mmcv's Python function, which makes its tensors on a CUDA device wherever the points are."""
    return triops.furthest_point_sample(points_xyz.detach(), num_points)


def as_rows(indices: Tensor, index_counts: Tensor, point_counts: Tensor) -> Tensor:
    """Indices [M, K] within clouds as rows of all points, -1 where there is none. Counts are of each cloud."""
    starts = point_counts.cumsum(0) - point_counts
    start, size = (
        each.repeat_interleave(index_counts.long(), output_size=len(indices))[:, None]
        for each in (starts, point_counts)
    )
    return torch.where((indices < 0) | (indices >= size), -1, indices + start).to(indices.dtype)


FUNCTIONS: dict[str, Callable[..., Any]] = {
    function.__name__: function
    for function in (
        furthest_point_sampling_forward, furthest_point_sampling_with_dist_forward, gather_points_forward,
        gather_points_backward, group_points_forward, group_points_backward, stack_group_points_forward,
        stack_group_points_backward, three_interpolate_forward, three_interpolate_backward, roipoint_pool3d_forward,
    )
}  # fmt: skip
