"""Sites of convolutions: which outputs there are, and the rulebooks between them and the inputs.

Sites are int32 [N, 4] here, batch, x, y, z; offsets of a kernel go x slowest, z fastest.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from triops import Rulebook

Three = tuple[int, ...]


def kernel_offsets(kernel: Three, first: Three, step: Three, device: torch.device) -> Tensor:
    """int32 [K, 3]: from `first` on, `step` apart."""
    axes = [torch.arange(k, dtype=torch.int32) * s + f for k, f, s in zip(kernel, first, step, strict=True)]
    return torch.cartesian_prod(*axes).to(device)


def centered(kernel: Three, step: Three) -> Three:
    """Where offsets begin: an even kernel has one more behind its center than before."""
    return tuple(-((k - 1) // 2) * s for k, s in zip(kernel, step, strict=True))


@dataclass
class Grid:
    """The box of some sites: the lowest and the highest batch and position, which wait for a GPU once."""

    low: list[int]
    high: list[int]

    @classmethod
    def of(cls, sites: Tensor) -> Grid:
        if sites.shape[0] == 0:
            return cls([0] * 4, [0] * 4)
        low, high = torch.stack(sites.aminmax(dim=0)).tolist()
        return cls(low, high)


def unique_sites(sites: Tensor) -> Tensor:
    """Each site once, in ascending order."""
    if sites.shape[0] == 0:
        return sites
    grid = Grid.of(sites)
    low = torch.tensor(grid.low, device=sites.device)  # int64
    size = [h - lo + 1 for lo, h in zip(grid.low, grid.high, strict=True)]
    if math.prod(size) >= 2**63:
        found: Tensor = torch.unique(sites, dim=0)
        return found
    place = sites - low
    key = place[:, 0]
    for axis in range(1, 4):
        key = key * size[axis] + place[:, axis]
    key = torch.unique(key)
    columns = []
    for axis in (3, 2, 1):
        columns.append(key % size[axis])
        key = key // size[axis]
    return (torch.stack([key, *reversed(columns)], 1) + low).to(sites.dtype)


def coarse_sites(sites: Tensor, step: Three, scaled: bool) -> Tensor:
    """The cells of `step` sites along each axis that hold a site, numbered (`scaled`), or by their lowest corner."""
    cell = torch.tensor([1, *step], dtype=sites.dtype, device=sites.device)
    found = unique_sites(torch.div(sites, cell, rounding_mode="floor"))
    return found if scaled else found * cell


def reached_sites(sites: Tensor, offsets: Tensor, step: Three, low: Tensor, high: Tensor | None) -> Tensor:
    """The sites o from `low` to `high` with o * step = site - offset for some site and offset."""
    moved = (sites[:, None, 1:] - offsets).reshape(-1, 3)
    batch = sites[:, :1].expand(-1, offsets.shape[0]).reshape(-1, 1)
    stride = torch.tensor(step, dtype=sites.dtype, device=sites.device)
    found = torch.div(moved, stride, rounding_mode="floor")
    kept = (found * stride == moved) & (found >= low)
    if high is not None:
        kept &= found <= high
    return unique_sites(torch.cat([batch, found], 1)[kept.all(1)])


def submanifold(sites: Tensor, kernel: Three, step: Three, first: Three) -> Rulebook:
    """Outputs are the inputs; under an offset one meets the site that lies there."""
    if all(k % 2 == 1 for k in kernel) and first == centered(kernel, step):
        grid = Grid.of(sites)
        shape = [h - lo + 1 for lo, h in zip(grid.low, grid.high, strict=True)]
        if grid.low[0] >= 0 and math.prod(shape) < 2**50:
            moved = sites - torch.tensor([0, *grid.low[1:]], dtype=sites.dtype, device=sites.device)
            return Rulebook.submanifold(moved, grid.high[0] + 1, shape[1:], list(kernel), list(step))
    return between(sites, sites, kernel, step, first, distinct=False)


def by_cells(sites: Tensor, cell: Three) -> tuple[Rulebook, Tensor] | None:
    """Kernel and stride are a cell, from its lowest corner: the rulebook, and the numbers of the cells. None where a
    batch is negative."""
    grid = Grid.of(sites)
    if grid.low[0] < 0:
        return None
    first = [0, *(low // c for low, c in zip(grid.low[1:], cell, strict=True))]
    base = [0, *(f * c for f, c in zip(first[1:], cell, strict=True))]
    shape = [((h - b) // c + 1) * c for h, b, c in zip(grid.high[1:], base[1:], cell, strict=True)]
    moved = sites - torch.tensor(base, dtype=sites.dtype, device=sites.device)
    rulebook = Rulebook.sparse(moved, grid.high[0] + 1, shape, list(cell), list(cell))
    return rulebook, rulebook.out_indices + torch.tensor(first, dtype=sites.dtype, device=sites.device)


def between(
    sites: Tensor, outputs: Tensor, kernel: Three, step: Three, first: Three, distinct: bool = True
) -> Rulebook:
    """Under an offset an output meets the site that lies there from it."""
    offsets = kernel_offsets(kernel, first, step, sites.device)
    return Rulebook.between(sites, outputs, offsets, list(kernel), distinct=distinct)
