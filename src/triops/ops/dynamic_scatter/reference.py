"""The specification of dynamic_scatter_forward and dynamic_scatter_backward."""

import torch
from torch import Tensor

from triops import _check
from triops._dtypes import compute_dtype


def dynamic_scatter_forward(features: Tensor, coords: Tensor, reduce: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """features [N, C], coords [N, D] -> reduced [V, C], voxel_coords [V, D], point_to_voxel int32 [N], counts int32 [V]

    Rows with a negative coordinate belong to no voxel; voxels ascend in the order of their coordinates.
    """
    kept = (coords >= 0).all(1).nonzero()[:, 0]
    voxel_coords, voxel, counts = coords[kept].unique(dim=0, return_inverse=True, return_counts=True)
    point_to_voxel = coords.new_full((len(coords),), -1, dtype=torch.int32)
    point_to_voxel[kept] = voxel.int()
    values = features[kept].to(compute_dtype(features.dtype))
    shape = (len(voxel_coords), features.shape[1])
    if reduce == "max":
        values = torch.where(values.isnan(), -torch.inf, values)
        index = voxel[:, None].expand_as(values)
        reduced = values.new_full(shape, -torch.inf).scatter_reduce_(0, index, values, "amax")
    else:
        reduced = values.new_zeros(shape).index_add_(0, voxel, values)
        if reduce == "mean":
            reduced /= counts[:, None]
    return reduced.to(features.dtype), voxel_coords, point_to_voxel, counts.int()


def dynamic_scatter_backward(
    grad_reduced: Tensor, features: Tensor, reduced: Tensor, point_to_voxel: Tensor, counts: Tensor, reduce: str
) -> Tensor:
    """grad_reduced [V, C], features [N, C], reduced [V, C], point_to_voxel [N], counts [V] -> grad_features [N, C]."""
    if features.device.type == "cpu" or _check.strict():
        check_indices(point_to_voxel, len(reduced))
    kept = ((point_to_voxel >= 0) & (point_to_voxel < len(reduced))).nonzero()[:, 0]
    voxel = point_to_voxel[kept].long()
    grad = grad_reduced[voxel].to(compute_dtype(grad_reduced.dtype))
    if reduce == "max":
        # Of the points that hold the maximum the lowest gets the gradient.
        no_point = len(features)
        holds = features[kept] == reduced[voxel]
        candidate = torch.where(holds, kept[:, None], no_point)
        winner = candidate.new_full(reduced.shape, no_point)
        winner.scatter_reduce_(0, voxel[:, None].expand_as(candidate), candidate, "amin")
        grad = torch.where(winner[voxel] == kept[:, None], grad, 0)
    elif reduce == "mean":
        grad = grad / counts[voxel][:, None]
    grad_features = torch.zeros_like(features, memory_format=torch.contiguous_format)
    grad_features[kept] = grad.to(features.dtype)
    return grad_features


def check_indices(point_to_voxel: Tensor, voxels: int) -> None:
    """Raise IndexError where point_to_voxel is out of range."""
    if ((point_to_voxel < -1) | (point_to_voxel >= voxels)).any():
        raise IndexError(f"dynamic_scatter_backward: point_to_voxel must lie in -1..{voxels - 1}")
