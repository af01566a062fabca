"""Features of voxels at points between them."""

from __future__ import annotations

import torch
from torch import Tensor

import triops
from triops.compat.torchsparse import _generation

__all__ = ["calc_ti_weights", "spdevoxelize"]


def calc_ti_weights(coords: Tensor, idx_query: Tensor, scale: float = 1) -> Tensor:
    """Trilinear weights of points between the eight corners of their voxels; without a gradient.

    Args:
        coords: [N, 3] or more columns, of which x, y, z are the first.
        idx_query: the rows of the corners, z fastest, -1 where there is none, which then weighs nothing: [8, N] in
            torchsparse 1.4, [N, 8] in 2.1. The shape tells which is meant, and of eight points the caller does.
        scale: the size of a voxel.

    Returns:
        the weights, of the shape of `idx_query`, which add up to 1 where a corner is there.
    """
    points = coords.shape[0]
    shapes = {_generation.OLD: [8, points], _generation.NEW: [points, 8]}
    if list(idx_query.shape) not in shapes.values():
        raise ValueError(
            f"calc_ti_weights: idx_query must have shape [8, {points}] or [{points}, 8], got {list(idx_query.shape)}"
        )
    with torch.no_grad():
        low = torch.floor(coords[:, :3] / scale) * scale
        below, above = (low + scale - coords[:, :3]).unbind(1), (coords[:, :3] - low).unbind(1)
        corners = [
            (above if x else below)[0] * (above if y else below)[1] * (above if z else below)[2]
            for x in (0, 1) for y in (0, 1) for z in (0, 1)
        ]  # fmt: skip
        old = list(idx_query.shape) == shapes[_generation.OLD]
        if points == 8:
            old = _generation.of_caller() == _generation.OLD
        weights = torch.stack(corners, 0 if old else 1) / scale**3
        weights = weights.masked_fill(idx_query == -1, 0)
        return weights / (weights.sum(0 if old else 1, keepdim=True) + 1e-8)


def spdevoxelize(feats: Tensor, coords: Tensor, weights: Tensor) -> Tensor:
    """[N, C]: sums of rows of `feats` [V, C] by weights [N, 8]. Differentiable in `feats`.

    coords: integers [N, 8], the rows; -1 is none.
    """
    if weights.dtype != feats.dtype and not (weights.dtype == torch.float32 and feats.dtype.itemsize == 2):
        weights = weights.to(feats.dtype)
    return triops.three_interpolate(feats, coords.contiguous(), weights.detach().contiguous())
