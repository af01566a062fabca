"""Lists of sites, int32 [N, 1 + D] with the batch in front: distinct ones, strided ones, those a kernel reaches."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

import triops
from triops.ops.rulebook import Rulebook

MAX_AXES = 4  # of triops.site_neighbors


def distinct(sites: Tensor) -> tuple[Tensor, Tensor]:
    """-> int64 rows of the first of each site, ascending, and int64 [N]: which of them each row equals.

    >>> import torch
    >>> from triops.compat.minkowski_engine.sites import distinct
    >>> distinct(torch.tensor([[0, -1], [0, 2], [0, -1]], dtype=torch.int32))
    (tensor([0, 1]), tensor([0, 1, 0]))
    """
    first = neighbors(sites, sites, sites.new_zeros((1, sites.shape[1] - 1)))[0].long()
    own = first == torch.arange(first.shape[0], device=first.device)
    numbers = own.cumsum(0) - 1
    return own.nonzero()[:, 0], numbers[first]


def strided(sites: Tensor, tensor_stride: Sequence[int]) -> Tensor:
    """Positions rounded down to multiples of a stride; the batch stays."""
    steps = sites.new_tensor([1, *tensor_stride])
    return torch.div(sites, steps, rounding_mode="floor") * steps


def reached(sites: Tensor, offsets: Tensor, tensor_stride: Sequence[int] | None = None) -> Tensor:
    """Every site moved by every offset, each once, in the order of sites and then of offsets.

    tensor_stride: only positions that are multiples of it.
    """
    moved = sites[:, None].repeat(1, offsets.shape[0], 1)
    moved[..., 1:] += offsets
    moved = moved.flatten(0, 1)
    if tensor_stride is not None:
        moved = moved[(moved == strided(moved, tensor_stride)).all(1)]
    return moved[distinct(moved)[0]]


def neighbors(sites: Tensor, centers: Tensor, offsets: Tensor) -> Tensor:
    """`triops.site_neighbors` for any number of axes."""
    return triops.site_neighbors(*_folded(sites, centers, offsets))


def rulebook(sites: Tensor, centers: Tensor, offsets: Tensor, mirrored: bool) -> Rulebook:
    """The rulebook from sites to centers, both distinct, for weights [Cout, K, Cin].

    mirrored: `sites` are `centers`, and the offsets in reverse are the offsets the other way.
    """
    sites, centers, offsets = _folded(sites, centers, offsets)
    if mirrored:
        gather = triops.site_neighbors(sites, centers, offsets)
        return Rulebook(sites, centers, [], [], 0, [offsets.shape[0]], gather, None)
    return Rulebook.between(sites, centers, offsets, distinct=True)


def _folded(sites: Tensor, centers: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The same sites with at most `MAX_AXES` axes: the last two become one, as wide as offsets may reach."""
    if sites.shape[1] - 1 <= MAX_AXES:
        return sites, centers, offsets
    sites, centers, offsets = sites.long(), centers.long(), offsets.long()
    while sites.shape[1] - 1 > MAX_AXES:
        last = torch.cat([sites[:, -1], centers[:, -1], offsets.new_zeros(1)])
        reach = offsets[:, -1].abs().amax()
        low = last.amin() - reach
        width = last.amax() + reach - low + 1
        sites, centers = (
            torch.cat([t[:, :-2], (t[:, -2] * width + t[:, -1] - low)[:, None]], 1) for t in (sites, centers)
        )
        offsets = torch.cat([offsets[:, :-2], (offsets[:, -2] * width + offsets[:, -1])[:, None]], 1)
    return sites, centers, offsets
