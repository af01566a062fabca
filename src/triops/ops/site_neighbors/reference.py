"""The specification of site_neighbors: every site is a number, and numbers are looked up among sorted ones."""

import torch
from torch import Tensor


def site_neighbors(indices: Tensor, centers: Tensor, offsets: Tensor) -> Tensor:
    """-> int32 [K, A]: the lowest row of `indices` whose site is that of center a moved by offset k, or -1."""
    table = torch.full((offsets.shape[0], centers.shape[0]), -1, dtype=torch.int32, device=indices.device)
    rows = (indices[:, 0] >= 0).nonzero()[:, 0]
    if rows.shape[0] == 0 or table.numel() == 0:
        return table
    sites = indices[rows].long()
    low, high = sites.amin(0), sites.amax(0)
    keys, order = _flatten(sites - low, high - low).sort(stable=True)
    for k, offset in enumerate(offsets.long()):
        wanted = centers.long()
        wanted[:, 1:] += offset
        inside = ((wanted >= low) & (wanted <= high)).all(1) & (centers[:, 0] >= 0)
        key = _flatten(wanted - low, high - low)
        place = torch.searchsorted(keys, key).clamp(max=keys.shape[0] - 1)  # the first of equal ones
        table[k] = torch.where(inside & (keys[place] == key), rows[order[place]], -1)
    return table


def _flatten(sites: Tensor, last: Tensor) -> Tensor:
    key = sites[:, 0]
    for axis in range(1, sites.shape[1]):
        key = key * (last[axis] + 1) + sites[:, axis]
    return key
