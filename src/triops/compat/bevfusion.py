"""BEVFusion without a compiler: importing this module supplies `bev_pool_ext` and `voxel_layer`, unless compiled.

For `projects/BEVFusion` of mmdetection3d, BEVFusion itself and mmdetection3d before 1.0: modules of these names under
`ops.bev_pool` and `ops.voxel`. And for BEVDet, BEVDepth and OpenOccupancy, which pool in modules of other names.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

import triops
from triops.compat import _bev, _finder
from triops.compat._extension import Extension
from triops.compat._mmcv_voxels import dynamic_point_to_voxel_backward, dynamic_point_to_voxel_forward


def hard_voxelize(
    points: Tensor, voxels: Tensor, coors: Tensor, num_points_per_voxel: Tensor, voxel_size: Sequence[float],
    coors_range: Sequence[float], max_points: int, max_voxels: int, NDim: int = 3, deterministic: bool = True, *,
    z_first: bool,
) -> int:  # fmt: skip
    """Fills voxels, cells and numbers of points; returns how many voxels there are."""
    found = triops.voxelize(points, list(voxel_size), list(coors_range), max_points, max_voxels)
    number, cells = found[0].shape[0], found[1] if z_first else found[1].flip(1)
    for given, made in zip((voxels, coors, num_points_per_voxel), (found[0], cells, found[2]), strict=True):
        given[:number] = made
    return number


def dynamic_voxelize(
    points: Tensor, coors: Tensor, voxel_size: Sequence[float], coors_range: Sequence[float], NDim: int = 3, *,
    z_first: bool,
) -> None:  # fmt: skip
    cells = triops.dynamic_voxelize(points, list(voxel_size), list(coors_range))
    coors.copy_(cells if z_first else cells.flip(1))


def cells_are_z_first(name: str) -> bool:
    """Whether the module would give cells of (z, y, x), as mmdetection3d's does, or of (x, y, z), as BEVFusion's fork
    of it does under the same name. The sources that nobody compiled say so."""
    package = name.rpartition(".")[0]
    for folder in getattr(sys.modules.get(package), "__path__", ()):
        source = Path(folder, "src", "voxelization_cpu.cpp")
        if source.is_file():
            return "ndim_minus_1 - j" in source.read_text(encoding="utf-8", errors="replace")
    return package == "mmdet3d.ops.voxel"


def voxel_layer(name: str) -> dict[str, Callable[..., Any]]:
    z_first = cells_are_z_first(name)
    return {
        "hard_voxelize": functools.partial(hard_voxelize, z_first=z_first),
        "dynamic_voxelize": functools.partial(dynamic_voxelize, z_first=z_first),
        "dynamic_point_to_voxel_forward": dynamic_point_to_voxel_forward,
        "dynamic_point_to_voxel_backward": dynamic_point_to_voxel_backward,
    }


def extension(name: str) -> Extension:
    leaf = name.rpartition(".")[2]
    return Extension(name, voxel_layer(name) if leaf == "voxel_layer" else _bev.FUNCTIONS[leaf])


_finder.install("bevfusion")
