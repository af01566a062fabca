"""Searches among points of `mmcv._ext`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import triops
from triops._clouds import counts_to_offsets
from triops._dtypes import compute_dtype

PAIRS = 1 << 24  # distances in float16 that are held at once


def ball_query_forward(
    new_xyz_tensor: Tensor, xyz_tensor: Tensor, idx_tensor: Tensor, b: int, n: int, m: int, min_radius: float,
    max_radius: float, nsample: int,
) -> None:  # fmt: skip
    idx_tensor.copy_(triops.ball_query(xyz_tensor, new_xyz_tensor, max_radius, nsample, min_radius=min_radius))


def stack_ball_query_forward(
    new_xyz_tensor: Tensor, new_xyz_batch_cnt: Tensor, xyz_tensor: Tensor, xyz_batch_cnt: Tensor, idx_tensor: Tensor,
    max_radius: float, nsample: int,
) -> None:  # fmt: skip
    idx_tensor.copy_(
        stacked_ball_query(xyz_tensor, xyz_batch_cnt, new_xyz_tensor, new_xyz_batch_cnt, max_radius, nsample)
    )


def stacked_ball_query(
    points: Tensor, counts: Tensor, centers: Tensor, center_counts: Tensor, radius: float, k: int
) -> Tensor:
    """As mmcv and OpenPCDet have it: indices within the cloud, and -1, 0, 0, ... for an empty ball."""
    offsets = counts_to_offsets(counts)
    found = triops.ball_query(
        points, centers, radius, k, offsets=offsets, center_offsets=counts_to_offsets(center_counts)
    )
    begin = offsets[:-1].repeat_interleave(center_counts, output_size=centers.shape[0])
    return marked_in_front(torch.where(found < 0, -1, found - begin[:, None].int()))


def marked_in_front(indices: Tensor) -> Tensor:
    """Rows of -1 as the stacked functions of mmcv and OpenPCDet write them: -1, 0, 0, ..."""
    front = torch.arange(indices.shape[1], device=indices.device) == 0
    return torch.where((indices < 0) & ~front, 0, indices)


def knn_forward(
    xyz_tensor: Tensor, new_xyz_tensor: Tensor, idx_tensor: Tensor, dist2_tensor: Tensor, b: int, n: int, m: int,
    nsample: int,
) -> None:  # fmt: skip
    indices, squares = triops.knn(_as_read(xyz_tensor), _as_read(new_xyz_tensor), nsample, squared=True)
    idx_tensor.copy_(indices.clamp(min=0))  # mmcv's sign of nothing is index 0 at a squared distance of 1e10
    dist2_tensor.copy_(squares.clamp(max=1e10))


def knn(k: int, xyz: Tensor, center_xyz: Tensor | None = None, transposed: bool = False) -> Tensor:
    """In place of mmcv's Python function, which asks for the current CUDA device: indices [B, k, M]."""
    points, centers = xyz.detach(), (xyz if center_xyz is None else center_xyz).detach()
    if transposed:
        points, centers = points.mT, centers.mT
    indices = triops.knn(_as_read(points), _as_read(centers), k)[0].clamp(min=0)  # as of knn_forward
    return indices.mT.contiguous()


def _as_read(points: Tensor) -> Tensor:
    """Points [B, N, 3]. mmcv's kernels take three numbers after three from memory, whatever a point has: those of the
    first rows, of DGCNN's features [B, N, C] and of SA-SSD's points with a batch index, and their checkpoints were
    trained so."""
    if points.dim() != 3 or points.shape[2] <= 3:
        return points
    batch, number, _ = points.shape
    return points.reshape(-1)[: 3 * batch * number].view(batch, number, 3)


def three_nn_forward(
    unknown_tensor: Tensor, known_tensor: Tensor, dist2_tensor: Tensor, idx_tensor: Tensor, b: int, n: int, m: int
) -> None:
    squares, indices = triops.three_nn(_as_read(unknown_tensor), _as_read(known_tensor), squared=True)
    dist2_tensor.copy_(squares)
    idx_tensor.copy_(indices)


def points_in_polygons_forward(points: Tensor, polygons: Tensor, output: Tensor) -> None:
    output.copy_(triops.points_in_polygons(points, polygons))


def chamfer_distance_forward(
    xyz1: Tensor, xyz2: Tensor, dist1: Tensor, dist2: Tensor, idx1: Tensor, idx2: Tensor
) -> None:
    in_half = xyz1.dtype == torch.float16 and xyz1.shape[2] == 2
    for given, found in zip(
        (dist1, dist2, idx1, idx2), (chamfer_in_half if in_half else triops.chamfer_distance)(xyz1, xyz2), strict=True
    ):
        given.copy_(found)


def chamfer_in_half(xyz1: Tensor, xyz2: Tensor) -> tuple[Tensor, ...]:
    """`triops.chamfer_distance` in the plane in the arithmetic of mmcv's kernel: each operation is rounded to float16.
    Which of two points is nearer can depend on it, and of equal ones the first counts."""
    one, two = _nearest_in_half(xyz1, xyz2), _nearest_in_half(xyz2, xyz1)
    return one[0], two[0], one[1], two[1]


def _nearest_in_half(queries: Tensor, points: Tensor) -> tuple[Tensor, Tensor]:
    squares = queries.new_full(queries.shape[:2], torch.inf)
    indices = torch.full_like(squares, -1, dtype=torch.int32)
    step = max(1, PAIRS // max(1, points.shape[0] * points.shape[1]))
    for first in range(0, queries.shape[1] if points.numel() else 0, step):
        part = slice(first, first + step)
        terms = (queries[:, part, None] - points[:, None]).square()
        each = terms[..., 0] + terms[..., 1]
        squares[:, part], nearest = each.where(each.isfinite(), torch.inf).min(2)
        indices[:, part] = nearest.where(squares[:, part].isfinite(), -1)
    return squares, indices


def chamfer_distance_backward(
    xyz1: Tensor, xyz2: Tensor, idx1: Tensor, idx2: Tensor, graddist1: Tensor, graddist2: Tensor, gradxyz1: Tensor,
    gradxyz2: Tensor,
) -> None:  # fmt: skip
    real = compute_dtype(xyz1.dtype)
    grads = triops.chamfer_distance_backward(xyz1, xyz2, idx1, idx2, graddist1.to(real), graddist2.to(real))
    gradxyz1 += grads[0]
    gradxyz2 += grads[1]


FUNCTIONS: dict[str, Callable[..., Any]] = {
    function.__name__: function
    for function in (
        ball_query_forward, stack_ball_query_forward, knn_forward, three_nn_forward, points_in_polygons_forward,
        chamfer_distance_forward, chamfer_distance_backward,
    )
}  # fmt: skip
