"""`torchsparse.cat` and `generative_add`."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from triops.compat.torchsparse.tensor import SparseTensor

__all__ = ["cat", "generative_add"]


def cat(inputs: Sequence[SparseTensor]) -> SparseTensor:
    """The channels of several tensors with the same sites, side by side."""
    first = inputs[0]
    return first.like(torch.cat([x.feats for x in inputs], 1))


def generative_add(a: SparseTensor, b: SparseTensor) -> SparseTensor:
    """The sum of two tensors with different sites, at the sites of either, in ascending order."""
    first, second = (a, b) if a.feats.shape[0] >= b.feats.shape[0] else (b, a)
    coords, row = torch.unique(torch.cat([first.coords, second.coords]), dim=0, return_inverse=True)
    feats = torch.cat([first.feats, second.feats])
    total = feats.new_zeros((coords.shape[0], feats.shape[1])).index_add(0, row, feats)
    return first.like(total, coords, first.stride, first.spatial_range)
