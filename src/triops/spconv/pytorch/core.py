"""Names of `spconv.pytorch.core`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from triops.nn.sparse_tensor import IndiceData, SparseConvTensor

ImplicitGemmIndiceData = IndiceData  # there is one form of rulebook here


class ThrustSortAllocator:
    """The scratch memory that spconv keeps for sorting. Layers here take theirs from torch."""

    def __init__(self, device: torch.device) -> None:
        self.device = device


def scatter_nd(indices: Tensor, updates: Tensor, shape: Sequence[int]) -> Tensor:
    """Zeros of `shape` with `updates` [N, ...] at `indices` [N, D]."""
    out = updates.new_zeros(list(shape))
    rows = indices.reshape(-1, indices.shape[-1]).long()
    out[tuple(rows.unbind(1))] = updates.reshape(rows.shape[0], *shape[indices.shape[-1] :])
    return out


def expand_nd(ndim: int, val: Any) -> list[int]:
    """One integer for each axis."""
    values = [val] * ndim if isinstance(val, int) else [int(v) for v in val]
    if len(values) != ndim:
        raise ValueError(f"expand_nd: expected an integer or {ndim} integers, got {values}")
    return values


__all__ = [
    "ImplicitGemmIndiceData",
    "IndiceData",
    "SparseConvTensor",
    "ThrustSortAllocator",
    "expand_nd",
    "scatter_nd",
]
