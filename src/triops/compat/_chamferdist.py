"""`chamferdist._C`, the nearest neighbors of ViDAR's Chamfer distance."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

import triops


def knn_points_idx(
    p1: Tensor, p2: Tensor, lengths1: Tensor, lengths2: Tensor, K: int, version: int
) -> tuple[Tensor, Tensor]:
    """p1 [N, P1, D], p2 [N, P2, D], D up to 3, and how many points of each cloud count -> of each point of p1 the
    nearest ones of p2, int64 [N, P1, K], and their squared distances, both 0 where there is none.

    `version` chooses between the kernels of the compiled function.
    """
    if not 1 <= p1.shape[2] <= 3:
        raise ValueError(f"knn_points_idx: p1 must have shape [N, P1, D] with D from 1 to 3, got {list(p1.shape)}")
    clouds, offsets = zip(*(_packed(*each) for each in ((p1, lengths1), (p2, lengths2))), strict=True)
    found, squares = triops.knn(clouds[1], clouds[0], K, squared=True, offsets=offsets[1], query_offsets=offsets[0])
    counted = _counted(p1, lengths1)
    begins = offsets[1][:-1].repeat_interleave(lengths1)
    idx = torch.zeros((*p1.shape[:2], K), dtype=torch.int64, device=p1.device)
    dists = p1.new_zeros(idx.shape)
    idx[counted] = torch.where(found >= 0, found - begins[:, None], 0)
    dists[counted] = torch.where(found >= 0, squares, 0).to(dists.dtype)
    return idx, dists


def knn_points_backward(
    p1: Tensor, p2: Tensor, lengths1: Tensor, lengths2: Tensor, idxs: Tensor, grad_dists: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradients of p1 and p2, given those of the squared distances [N, P1, K]."""
    image = torch.arange(len(p1), device=p1.device)[:, None, None]
    held = torch.arange(idxs.shape[2], device=p1.device) < lengths2[:, None, None]
    counted = held & _counted(p1, lengths1)[..., None]
    grads = 2 * torch.where(counted, grad_dists, 0)[..., None] * (p1[:, :, None] - p2[image, idxs])
    rows = (image * p2.shape[1] + idxs).flatten()
    of_p2 = torch.zeros_like(p2).flatten(0, 1).index_add_(0, rows, -grads.flatten(0, 2))
    return grads.sum(2), of_p2.view(p2.shape)


def _packed(points: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """The points that count, [n, 3], and where each cloud begins."""
    flat = functional.pad(points, (0, 3 - points.shape[2]))[_counted(points, lengths)]
    return flat, functional.pad(lengths.cumsum(0), (1, 0))


def _counted(points: Tensor, lengths: Tensor) -> Tensor:
    return torch.arange(points.shape[1], device=points.device) < lengths[:, None]


FUNCTIONS: dict[str, Callable[..., Any]] = {
    function.__name__: function for function in (knn_points_idx, knn_points_backward)
}
