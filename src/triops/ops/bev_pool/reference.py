"""The specification of bev_pool_index, bev_pool_forward and bev_pool_backward.

A point is a row of `features`, or with `depth` [N, D, S] pixel s of image n at depth d: point (n * D + d) * S + s with
the features of row n * S + s, weighted.
"""

from typing import Optional

import torch
from torch import Tensor

from triops import _check
from triops._dtypes import compute_dtype


def bev_pool_index(cells: Tensor, num_cells: int) -> tuple[Tensor, Tensor]:
    """cells [P] -> order int32 [P], the points by cell and then by number, and starts int32 [num_cells + 1]."""
    key = torch.where((cells >= 0) & (cells < num_cells), cells, num_cells)
    ascending, order = key.sort(stable=True)
    starts = torch.searchsorted(ascending, torch.arange(num_cells + 1, dtype=key.dtype, device=key.device))
    return order.int(), starts.int()


def bev_pool_forward(
    features: Tensor,
    depth: Optional[Tensor],  # noqa: UP045
    cells: Tensor,
    order: Tensor,
    starts: Tensor,
) -> Tensor:
    """features [R, C], depth [N, D, S] or None, order [P], starts [num_cells + 1] -> [num_cells, C].

    `cells` is read by the backward only.
    """
    if features.device.type == "cpu" or _check.strict():
        check_index(order, starts)
    begin, end = starts[:-1].long().clamp(0, len(order)), starts[1:].long().clamp(0, len(order))
    length = (end - begin).clamp(min=0)
    cell = torch.arange(len(begin), device=begin.device).repeat_interleave(length)
    first = length.cumsum(0) - length
    point = order[torch.arange(len(cell), device=cell.device) - first[cell] + begin[cell]].long()
    known = (point >= 0) & (point < len(order))
    cell, point = cell[known], point[known]
    real = compute_dtype(features.dtype)
    rows = features[point if depth is None else _row(point, depth)].to(real)
    if depth is not None:
        rows = rows * depth.flatten()[point][:, None].to(real)
    pooled = torch.zeros((len(begin), features.shape[1]), dtype=real, device=features.device)
    return pooled.index_add_(0, cell, rows).to(features.dtype)


def bev_pool_backward(
    grad: Tensor,
    features: Tensor,
    depth: Optional[Tensor],  # noqa: UP045
    cells: Tensor,
) -> tuple[Tensor, Tensor]:
    """grad [num_cells, C] -> the gradients of features [R, C] and of depth [N, D, S], or [0] where there is none."""
    valid = (cells >= 0) & (cells < len(grad))
    upstream = grad.new_zeros((len(cells), grad.shape[1]))
    upstream[valid] = grad[cells[valid].long()]
    if depth is None:
        return upstream, grad.new_zeros(0)
    images, depths, pixels = depth.shape
    real = compute_dtype(features.dtype)
    upstream = upstream.to(real).view(images, depths, pixels, grad.shape[1])
    # a point of no cell counts for nothing, even where its weight or its feature is not finite
    valid = valid.view(images, depths, pixels, 1)
    grad_features = torch.where(valid, upstream * depth[..., None].to(real), 0).sum(1).flatten(0, 1)
    grad_depth = torch.where(valid, upstream * features.to(real).view(images, 1, pixels, grad.shape[1]), 0).sum(-1)
    return grad_features.to(features.dtype), grad_depth.to(depth.dtype)


def _row(point: Tensor, depth: Tensor) -> Tensor:
    _, depths, pixels = depth.shape
    return point // (depths * pixels) * pixels + point % pixels


def check_index(order: Tensor, starts: Tensor) -> None:
    """Raise IndexError where an index is not one that `bev_pool_index` makes."""
    points = len(order)
    if bool(((order < 0) | (order >= points)).any()):
        raise IndexError(f"bev_pool: order must lie in 0..{points - 1}")
    if bool(((starts < 0) | (starts > points)).any()) or bool((starts[1:] < starts[:-1]).any()):
        raise IndexError(f"bev_pool: starts must ascend within 0..{points}")
