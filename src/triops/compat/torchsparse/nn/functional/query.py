"""Looking up hashes."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["sphashquery"]


def sphashquery(queries: Tensor, references: Tensor) -> Tensor:
    """The lowest place in `references` of each query, -1 where it is not among them: int64, of the queries' shape.

    >>> sphashquery(torch.tensor([7, 5, 6]), torch.tensor([5, 7, 7]))
    tensor([ 1,  0, -1])
    """
    if references.numel() == 0:
        return torch.full(queries.shape, -1, dtype=torch.int64, device=queries.device)
    keys, order = references.flatten().sort(stable=True)
    place = torch.searchsorted(keys, queries.contiguous()).clamp(max=keys.shape[0] - 1)
    return torch.where(keys[place] == queries, order[place], -1)
