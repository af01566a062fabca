"""How many points lie in each voxel."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["spcount"]


def spcount(coords: Tensor, num: int) -> Tensor:
    """int32 [num]: how often each of 0..num - 1 occurs in `coords`; negative ones are left out.

    >>> spcount(torch.tensor([2, 0, 2, -1]), 3)
    tensor([1, 0, 2], dtype=torch.int32)
    """
    row = coords.flatten().long()
    count = torch.zeros(num + 1, dtype=torch.int32, device=coords.device)
    ones = torch.ones((), dtype=torch.int32, device=coords.device).expand(row.shape)
    return count.scatter_add(0, torch.where(row < 0, num, row), ones)[:num]
