"""Means of the points of voxels."""

from __future__ import annotations

import torch
from torch import Tensor

from triops._dtypes import compute_dtype

__all__ = ["spvoxelize"]


def spvoxelize(feats: Tensor, coords: Tensor, counts: Tensor) -> Tensor:
    """[V, C]: the sum of the features of each voxel's points by its count. Differentiable in `feats`.

    Args:
        feats: [N, C].
        coords: integers [N]: the voxel of each point; a number outside of 0..V - 1 is none.
        counts: integers [V], as of `spcount`; where it is 0 the voxel is 0.

    >>> feats = torch.tensor([[1.0], [3.0], [5.0]])
    >>> spvoxelize(feats, torch.tensor([1, 1, -1]), torch.tensor([0, 2])).tolist()
    [[0.0], [2.0]]
    """
    voxels, row = counts.shape[0], coords.long()
    row = torch.where((row >= 0) & (row < voxels), row, voxels)
    points = feats.to(compute_dtype(feats.dtype))
    total = points.new_zeros((voxels + 1, feats.shape[1])).index_add(0, row, points)[:voxels]
    share = torch.where(counts > 0, 1 / counts.clamp(min=1).to(total.dtype), 0)
    return (total * share[:, None]).to(feats.dtype)
