"""Scored sums of neighbor features, as PAConv assembles its kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from triops._plain import wide


def assign_score(points: Tensor, centers: Tensor, scores: Tensor, neighbors: Tensor) -> Tensor:
    """points, centers [B, N, O], scores [B, P, K], neighbors [B, P, K] -> [B, O, P, K]: one matrix of the weight bank.

    score * (feature of the neighbor - center feature of the first neighbor). Neighbors that are not there give 0.
    """
    batch = torch.arange(len(points), device=points.device)[:, None, None]
    valid = (neighbors >= 0) & (neighbors < points.shape[1])
    valid = valid & valid[..., :1]
    index = torch.where(valid, neighbors, 0).long()
    difference = wide(points)[batch, index] - wide(centers)[batch, index[..., :1]]  # [B, P, K, O]
    difference = torch.where(valid[..., None], difference, 0)  # both, so that nothing that is not finite gets through
    return (torch.where(valid, wide(scores), 0)[..., None] * difference).permute(0, 3, 1, 2)
