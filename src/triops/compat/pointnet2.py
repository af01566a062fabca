"""PointNet++ without a compiler: importing this module supplies `pointnet2._ext`, `pointnet2_ops._ext` and `chamfer`.

VoteNet, 3DETR, Mask3D and others compile the first, Pointnet2_PyTorch the second; the functions are the same. Where
nothing on the path has the name `pointnet2`, an empty package of that name is supplied too, as its installation is.
The third is the Chamfer distance of GRNet, PoinTr and SurroundOcc; ViDAR's is `chamferdist._C`, supplied likewise.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

import triops
from triops.compat import _chamferdist, _finder
from triops.compat._extension import Extension

NEAR_ORIGIN = 1e-3  # squared distance up to which a point is taken for padding and not sampled


def furthest_point_sampling(points: Tensor, nsamples: int) -> Tensor:
    """int32 [B, nsamples] of points [B, N, 3]. Points next to the origin are never chosen but as the first."""
    # They stand where the first one does, and so at no distance from what is sampled.
    padding = points.square().sum(2, keepdim=True) <= NEAR_ORIGIN
    return triops.furthest_point_sample(torch.where(padding, points[:, :1], points), nsamples)


def ball_query(new_xyz: Tensor, xyz: Tensor, radius: float, nsample: int) -> Tensor:
    return triops.ball_query(xyz, new_xyz, radius, nsample)


def group_points(points: Tensor, idx: Tensor) -> Tensor:
    return triops.group_points(points, idx)


def group_points_grad(grad_out: Tensor, idx: Tensor, n: int) -> Tensor:
    return triops.gather_points_backward(grad_out.flatten(2), idx.flatten(1), n)


def gather_points(points: Tensor, idx: Tensor) -> Tensor:
    return triops.gather_points(points, idx)


def gather_points_grad(grad_out: Tensor, idx: Tensor, n: int) -> Tensor:
    return triops.gather_points_backward(grad_out, idx, n)


def three_nn(unknowns: Tensor, knows: Tensor) -> list[Tensor]:
    """Squared distances and indices, both [B, N, 3]."""
    return [*triops.three_nn(unknowns, knows, squared=True)]


def three_interpolate(points: Tensor, idx: Tensor, weight: Tensor) -> Tensor:
    return triops.three_interpolate(points, idx, weight)


def three_interpolate_grad(grad_out: Tensor, idx: Tensor, weight: Tensor, m: int) -> Tensor:
    unread = grad_out.new_empty((1, 1, 1)).expand(*grad_out.shape[:2], m)
    return triops.three_interpolate_backward(grad_out, unread, idx, weight, of_weights=False)[0]


FUNCTIONS: dict[str, Callable[..., Any]] = {
    function.__name__: function
    for function in (
        furthest_point_sampling, ball_query, group_points, group_points_grad, gather_points, gather_points_grad,
        three_nn, three_interpolate, three_interpolate_grad,
    )
}  # fmt: skip


CHAMFER: dict[str, Callable[..., Any]] = {
    "forward": lambda xyz1, xyz2: [*triops.chamfer_distance(xyz1, xyz2)],
    "backward": lambda xyz1, xyz2, idx1, idx2, grad_dist1, grad_dist2: [
        *triops.chamfer_distance_backward(xyz1, xyz2, idx1, idx2, grad_dist1, grad_dist2)
    ],
}


def extension(name: str) -> ModuleType:
    if name == "chamfer":
        return Extension(name, CHAMFER)
    if name == "chamferdist._C":
        return Extension(name, _chamferdist.FUNCTIONS)
    return Extension(name, FUNCTIONS) if name.endswith("._ext") else ModuleType(name)


_finder.install("pointnet2")
