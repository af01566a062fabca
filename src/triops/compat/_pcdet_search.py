"""Searches among points of OpenPCDet's `pointnet2_batch_cuda` and `pointnet2_stack_cuda`, called by position."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

import triops
from triops._clouds import counts_to_offsets
from triops.compat._mmcv_search import marked_in_front, stacked_ball_query


def _ball_query(b: int, n: int, m: int, radius: float, nsample: int, new_xyz: Tensor, xyz: Tensor, idx: Tensor) -> int:
    idx.copy_(triops.ball_query(xyz, new_xyz, radius, nsample))
    return 1


def _three_nn(b: int, n: int, m: int, unknown: Tensor, known: Tensor, dist2: Tensor, idx: Tensor) -> None:
    squares, indices = triops.three_nn(unknown, known, squared=True)
    dist2.copy_(squares)
    idx.copy_(indices)


def _stacked_ball_query(
    b: int, m: int, radius: float, nsample: int, new_xyz: Tensor, new_xyz_batch_cnt: Tensor, xyz: Tensor,
    xyz_batch_cnt: Tensor, idx: Tensor,
) -> int:  # fmt: skip
    idx.copy_(stacked_ball_query(xyz, xyz_batch_cnt, new_xyz, new_xyz_batch_cnt, radius, nsample))
    return 1


def _voxel_query(
    m: int, r1: int, r2: int, r3: int, nsample: int, radius: float, z_range: int, y_range: int, x_range: int,
    new_xyz: Tensor, xyz: Tensor, new_coords: Tensor, point_indices: Tensor, idx: Tensor,
) -> int:  # fmt: skip
    ranges = [z_range, y_range, x_range]
    idx.copy_(marked_in_front(triops.voxel_query(xyz, new_xyz, new_coords, point_indices, radius, nsample, ranges)))
    return 1


def _stacked_three_nn(
    unknown: Tensor, unknown_batch_cnt: Tensor, known: Tensor, known_batch_cnt: Tensor, dist2: Tensor, idx: Tensor
) -> None:
    squares, indices = triops.three_nn(
        unknown, known, squared=True, offsets=counts_to_offsets(known_batch_cnt),
        query_offsets=counts_to_offsets(unknown_batch_cnt),
    )  # fmt: skip
    dist2.copy_(squares)
    idx.copy_(indices)


FUNCTIONS: dict[str, dict[str, Callable[..., Any]]] = {
    "pointnet2_batch_cuda": {"ball_query_wrapper": _ball_query, "three_nn_wrapper": _three_nn},
    "pointnet2_stack_cuda": {
        "ball_query_wrapper": _stacked_ball_query,
        "three_nn_wrapper": _stacked_three_nn,
        "voxel_query_wrapper": _voxel_query,
    },
}
