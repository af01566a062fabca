"""The specification of chamfer_distance and its gradient."""

import torch
from torch import Tensor

from triops._dtypes import compute_dtype
from triops._neighbors import squared_distances


def chamfer_distance(xyz1: Tensor, xyz2: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """xyz1 [B, N, D], xyz2 [B, M, D] -> squared distances [B, N] and [B, M] to the nearest point of the other set, and
    its index, int32; inf and -1 where there is none."""
    one, two = in_space(xyz1), in_space(xyz2)
    distances1, indices1 = _nearest(two, one)
    distances2, indices2 = _nearest(one, two)
    return distances1, distances2, indices1, indices2


def in_space(points: Tensor) -> Tensor:
    """Points in a plane are points in space: (dx*dx + dy*dy) + 0 is no other number."""
    return torch.nn.functional.pad(points, (0, 3 - points.shape[2]))


def _nearest(points: Tensor, queries: Tensor) -> tuple[Tensor, Tensor]:
    distances = queries.new_full(queries.shape[:2], torch.inf, dtype=compute_dtype(queries.dtype))
    indices = torch.full_like(distances, -1, dtype=torch.int32)
    for b in range(points.shape[0] if points.shape[1] else 0):
        for first, distance in squared_distances(points[b], queries[b]):
            distance = torch.where(distance.isfinite(), distance, torch.inf)
            part = slice(first, first + distance.shape[0])
            nearest = distance.argmin(1)  # the first of equals
            distances[b, part] = distance.gather(1, nearest[:, None])[:, 0]
            indices[b, part] = torch.where(distances[b, part].isfinite(), nearest, -1).int()
    return distances, indices


def chamfer_distance_backward(
    xyz1: Tensor, xyz2: Tensor, idx1: Tensor, idx2: Tensor, grad_dist1: Tensor, grad_dist2: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradients of both sets, in their shape and dtype; a point with index -1 gives none."""
    check_indices(idx1, xyz2.shape[1])
    check_indices(idx2, xyz1.shape[1])
    real = compute_dtype(xyz1.dtype)
    one, two = xyz1.to(real), xyz2.to(real)
    grad1, grad2 = torch.zeros_like(one), torch.zeros_like(two)
    for points, others, index, grad, own, other in (
        (one, two, idx1, grad_dist1, grad1, grad2), (two, one, idx2, grad_dist2, grad2, grad1),
    ):  # fmt: skip
        if others.shape[1] == 0:
            continue
        place = index.clamp(min=0).long()[..., None].expand_as(points)
        pull = 2 * grad[..., None] * (points - others.gather(1, place))
        pull = torch.where(index[..., None] >= 0, pull, 0)
        own += pull
        other.scatter_add_(1, place, -pull)
    return grad1.to(xyz1.dtype), grad2.to(xyz2.dtype)


def check_indices(index: Tensor, count: int) -> None:
    """IndexError for a point that is not there."""
    if index.numel() and not (int(index.min()) >= -1 and int(index.max()) < count):
        raise IndexError(f"chamfer_distance_backward: indices must be from -1 to {count - 1}, and are not")
