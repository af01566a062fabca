"""The voxels of `mmcv._ext`: hard and dynamic voxelisation, and the reduction of points to voxels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

import triops
from triops.ops.dynamic_scatter import Reduce


def hard_voxelize_forward(
    points: Tensor, voxel_size: Tensor, coors_range: Tensor, voxels: Tensor, coors: Tensor,
    num_points_per_voxel: Tensor, voxel_num: Tensor, max_points: int, max_voxels: int, NDim: int = 3,
    deterministic: bool = True,
) -> None:  # fmt: skip
    """mmcv's other order of voxels, without `deterministic`, is any order: so this one serves both."""
    _refuse_other_axes("hard_voxelize_forward", NDim)
    *found, _, count = triops.voxelize_padded(points, voxel_size.tolist(), coors_range.tolist(), max_points, max_voxels)
    number = int(count)
    for given, made in zip((voxels, coors, num_points_per_voxel), found, strict=True):
        given[:number] = made[:number]
    voxel_num.fill_(number)


def dynamic_voxelize_forward(
    points: Tensor, voxel_size: Tensor, coors_range: Tensor, coors: Tensor, NDim: int = 3
) -> None:
    _refuse_other_axes("dynamic_voxelize_forward", NDim)
    coors.copy_(triops.dynamic_voxelize(points, voxel_size.tolist(), coors_range.tolist()))


def dynamic_point_to_voxel_forward(feats: Tensor, coors: Tensor, reduce_type: Reduce) -> list[Tensor]:
    return list(triops.dynamic_scatter_forward(feats, coors, reduce_type))


def dynamic_point_to_voxel_backward(
    grad_feats: Tensor, grad_reduced_feats: Tensor, feats: Tensor, reduced_feats: Tensor, coors_idx: Tensor,
    reduce_count: Tensor, reduce_type: Reduce,
) -> None:  # fmt: skip
    grad_feats.copy_(
        triops.dynamic_scatter_backward(grad_reduced_feats, feats, reduced_feats, coors_idx, reduce_count, reduce_type)
    )


def _refuse_other_axes(name: str, axes: int) -> None:
    if axes != 3:
        raise ValueError(f"{name}: NDim must be 3, got {axes}")


FUNCTIONS: dict[str, Callable[..., Any]] = {
    function.__name__: function
    for function in (
        hard_voxelize_forward, dynamic_voxelize_forward, dynamic_point_to_voxel_forward,
        dynamic_point_to_voxel_backward,
    )
}  # fmt: skip
