"""Sites as numbers, by which they are looked up: see `sphashquery`."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["sphash"]

_START, _PRIME = 14695981039346656037 - 2**64, 1099511628211  # of FNV-1a, as int64
_LOW_32, _LOW_60 = 2**32 - 1, 2**60 - 1


def sphash(coords: Tensor, offsets: Tensor | None = None) -> Tensor:
    """int64 [N], or [K, N] with offsets: FNV-1a over the four columns, folded to 60 bits; equal sites have equal ones.

    Args:
        coords: int32 [N, 4].
        offsets: int32 [K, 3], added to the first three columns.
    """
    if coords.dtype != torch.int32 or coords.dim() != 2 or coords.shape[1] != 4:
        raise ValueError(f"sphash: coords must be int32 [N, 4], got {coords.dtype} {list(coords.shape)}")
    sites = coords
    if offsets is not None:
        if offsets.dtype != torch.int32 or offsets.dim() != 2 or offsets.shape[1] != 3:
            raise ValueError(f"sphash: offsets must be int32 [K, 3], got {offsets.dtype} {list(offsets.shape)}")
        sites = coords + torch.nn.functional.pad(offsets, (0, 1))[:, None]
    columns = sites.long() & _LOW_32
    key = torch.full_like(columns[..., 0], _START)
    for column in range(4):
        key = (key ^ columns[..., column]) * _PRIME
    return ((key >> 60) & 15) ^ (key & _LOW_60)
