"""The specification of roiaware_pool3d_forward and roiaware_pool3d_backward."""

import torch
from torch import Tensor

from triops import _check
from triops._dtypes import compute_dtype
from triops._geometry.box.reference import cells, frames, inside


def roiaware_pool3d_forward(
    rois: Tensor,
    points: Tensor,
    features: Tensor,
    out_x: int,
    out_y: int,
    out_z: int,
    max_points_per_voxel: int,
    mode: str,
    z_origin: str,
    margin: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """rois [R, 7], points [P, 3], features [P, C] -> pooled [R, X, Y, Z, C], argmax like it, point_indices."""
    count, channels, slots = rois.shape[0], features.shape[1], max_points_per_voxel
    total = out_x * out_y * out_z
    point_indices = rois.new_zeros((count, total, slots), dtype=torch.int32)
    rois, points = (t.to(compute_dtype(t.dtype)) for t in (rois, points))
    frame = frames(rois, z_origin, margin)
    every_cell = torch.arange(total, device=rois.device)
    for r in range(count):
        held = inside(points, frame[r]).nonzero()[:, 0]
        cell = cells(points[held], rois[r], frame[r], z_origin, (out_x, out_y, out_z))
        cell, order = cell.sort(stable=True)  # ascending points within a cell
        first = torch.searchsorted(cell, every_cell)
        point_indices[r, :, 0] = (torch.searchsorted(cell, every_cell, right=True) - first).clamp(max=slots - 1)
        rank = torch.arange(len(cell), device=rois.device) - first[cell]
        kept = rank < slots - 1
        point_indices[r, cell[kept], 1 + rank[kept]] = held[order][kept].int()

    lists = point_indices.view(-1, slots)
    values = features.to(compute_dtype(features.dtype))
    pooled = values.new_zeros((len(lists), channels))
    argmax = lists.new_full((len(lists), channels), -1)
    for slot in range(1, _longest(lists) + 1):
        rows = (lists[:, 0] >= slot).nonzero()[:, 0]
        index = lists[rows, slot]
        value = values[index.long()]
        if mode == "avg":
            pooled[rows] += value
        else:
            better = torch.where(argmax[rows] < 0, value > -torch.inf, value > pooled[rows])
            pooled[rows] = torch.where(better, value, pooled[rows])
            argmax[rows] = torch.where(better, index[:, None], argmax[rows])
    if mode == "avg":
        pooled /= lists[:, :1].clamp(min=1)
    shape = (count, out_x, out_y, out_z)
    return (
        pooled.to(features.dtype).view(*shape, channels),
        argmax.view(*shape, channels),
        point_indices.view(*shape, slots),
    )


def roiaware_pool3d_backward(
    point_indices: Tensor, argmax: Tensor, grad_out: Tensor, num_points: int, mode: str
) -> Tensor:
    """point_indices [R, X, Y, Z, slots], argmax and grad_out [R, X, Y, Z, C] -> grad_in [num_points, C]."""
    if grad_out.device.type == "cpu" or _check.strict():
        check_indices(point_indices, argmax, num_points, mode)
    rois, channels = grad_out.shape[0], grad_out.shape[4]
    grad = grad_out.to(compute_dtype(grad_out.dtype))
    grad_in = grad.new_zeros((num_points, channels))
    for r in range(rois):
        if mode == "max":
            winner = argmax[r].long()
            *cell, channel = ((winner >= 0) & (winner < num_points)).nonzero(as_tuple=True)
            flat = winner[(*cell, channel)] * channels + channel
            grad_in.view(-1).index_add_(0, flat, grad[r][(*cell, channel)])
        else:
            count, listed = _listed(point_indices[r])
            index = point_indices[r, ..., 1:]
            *cell, slot = (listed & (index >= 0) & (index < num_points)).nonzero(as_tuple=True)
            share = grad[r] / count.clamp(min=1)
            grad_in.index_add_(0, index[(*cell, slot)].long(), share[tuple(cell)])
    return grad_in.to(grad_out.dtype)


def check_indices(point_indices: Tensor, argmax: Tensor, num_points: int, mode: str) -> None:
    """Raise IndexError where `mode` would read an index or a count that is out of range."""
    slots = point_indices.shape[4]
    for r in range(point_indices.shape[0]):
        if mode == "max":
            if ((argmax[r] < -1) | (argmax[r] >= num_points)).any():
                raise IndexError(f"roiaware_pool3d_backward: argmax must lie in -1..{num_points - 1}")
            continue
        index, (count, listed) = point_indices[r, ..., 1:], _listed(point_indices[r])
        if (count != point_indices[r, ..., :1]).any():
            raise IndexError(f"roiaware_pool3d_backward: a count in point_indices must lie in 0..{slots - 1}")
        if (listed & ((index < 0) | (index >= num_points))).any():
            raise IndexError(f"roiaware_pool3d_backward: point_indices must lie in 0..{num_points - 1}")


def _listed(lists: Tensor) -> tuple[Tensor, Tensor]:
    """The counts [..., 1], 0 where out of range, and which slots [..., 1:] of the lists they cover."""
    slots = lists.shape[-1]
    count = torch.where((lists[..., :1] > 0) & (lists[..., :1] < slots), lists[..., :1], 0)
    return count, torch.arange(1, slots, device=lists.device) <= count


def _longest(lists: Tensor) -> int:
    return int(lists[:, 0].max()) if len(lists) else 0
