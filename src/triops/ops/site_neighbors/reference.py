"""The specification of site_neighbors: sites are numbered column by column, and looked up among sorted numbers.

A number stands for all sites that agree in the columns so far, so it stays below 2**30, and no product of two of them
leaves int64, however far apart the sites lie.
"""

import torch
from torch import Tensor


def site_neighbors(indices: Tensor, centers: Tensor, offsets: Tensor) -> Tensor:
    """-> int32 [K, A]: the lowest row of `indices` whose site is that of center a moved by offset k, or -1."""
    table = torch.full((offsets.shape[0], centers.shape[0]), -1, dtype=torch.int32, device=indices.device)
    rows = (indices[:, 0] >= 0).nonzero()[:, 0]
    if rows.shape[0] == 0 or table.numel() == 0:
        return table
    sites, centers, offsets = indices[rows].long(), centers.long(), offsets.long()
    number, levels = torch.zeros_like(rows), []
    for column in sites.unbind(1):
        values, rank = column.unique(return_inverse=True)
        keys, number = (number * values.shape[0] + rank).unique(return_inverse=True)
        levels.append((values, keys))
    lowest = rows.new_full(keys.shape, indices.shape[0]).scatter_reduce(0, number, rows, "amin")

    steps = torch.cat((offsets.new_zeros((offsets.shape[0], 1)), offsets), 1)  # none along the batch
    for k, step in enumerate(steps):
        found, number = centers[:, 0] >= 0, torch.zeros_like(centers[:, 0])
        for column, by, (values, keys) in zip(centers.unbind(1), step, levels, strict=True):
            wanted = column + by
            rank, known = _search(values, wanted)
            number, occupied = _search(keys, number * values.shape[0] + rank)
            found = found & known & occupied & ((wanted < column) == (by < 0))  # no site lies beyond int64
        table[k] = torch.where(found, lowest[number], -1)
    return table


def _search(ascending: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
    """-> where each wanted number stands among ascending ones, and whether it stands there at all"""
    place = torch.searchsorted(ascending, wanted).clamp(max=ascending.shape[0] - 1)
    return place, ascending[place] == wanted
