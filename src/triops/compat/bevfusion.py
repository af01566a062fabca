"""BEVFusion without a compiler: importing this module supplies `bev_pool_ext` and `voxel_layer`, unless compiled.

For `projects/BEVFusion` of mmdetection3d: modules of these names under `ops.bev_pool` and `ops.voxel`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

import triops
from triops.compat import _bev, _finder
from triops.compat._extension import Extension
from triops.compat._mmcv_voxels import dynamic_point_to_voxel_backward, dynamic_point_to_voxel_forward


def hard_voxelize(
    points: Tensor, voxels: Tensor, coors: Tensor, num_points_per_voxel: Tensor, voxel_size: Sequence[float],
    coors_range: Sequence[float], max_points: int, max_voxels: int, NDim: int = 3, deterministic: bool = True,
) -> int:  # fmt: skip
    """Fills voxels, cells and numbers of points; returns how many voxels there are. Cells are x, y, z here."""
    found = triops.voxelize(points, list(voxel_size), list(coors_range), max_points, max_voxels)
    number = found[0].shape[0]
    for given, made in zip((voxels, coors, num_points_per_voxel), (found[0], found[1].flip(1), found[2]), strict=True):
        given[:number] = made
    return number


def dynamic_voxelize(
    points: Tensor, coors: Tensor, voxel_size: Sequence[float], coors_range: Sequence[float], NDim: int = 3
) -> None:
    coors.copy_(triops.dynamic_voxelize(points, list(voxel_size), list(coors_range)).flip(1))


FUNCTIONS: dict[str, dict[str, Callable[..., Any]]] = {
    "bev_pool_ext": _bev.FUNCTIONS,
    "voxel_layer": {
        "hard_voxelize": hard_voxelize,
        "dynamic_voxelize": dynamic_voxelize,
        "dynamic_point_to_voxel_forward": dynamic_point_to_voxel_forward,
        "dynamic_point_to_voxel_backward": dynamic_point_to_voxel_backward,
    },
}


def extension(name: str) -> Extension:
    return Extension(name, FUNCTIONS[name.rpartition(".")[2]])


_finder.install("bevfusion")
