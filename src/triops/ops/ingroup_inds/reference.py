"""The specification of ingroup_inds."""

import torch
from torch import Tensor


def ingroup_inds(group_inds: Tensor) -> Tensor:
    """group_inds [N] -> int32 [N]: how many elements before each one are of the same group."""
    ascending, order = group_inds.sort(stable=True)
    begin = torch.searchsorted(ascending, ascending)
    rank = torch.arange(len(order), device=order.device) - begin
    return torch.empty_like(order, dtype=torch.int32).scatter_(0, order, rank.int())
