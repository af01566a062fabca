"""site_neighbors: which rows of a list of sites lie at given offsets from other sites."""

from __future__ import annotations

import torch
from torch import Tensor

from triops import _check, _op
from triops.ops.site_neighbors import reference


def site_neighbors(indices: Tensor, centers: Tensor, offsets: Tensor) -> Tensor:
    """The rows of sites that lie at given offsets from centers: the neighbor table between any two sets of sites.

    No grid is needed: positions may be negative, and lie as far apart as their dtype goes. `Rulebook.between` makes a
    rulebook of such a table.

    Args:
        indices: int32 or int64 [N, 1 + D], D from 1 to 4: batch and position of each site. A row with a negative batch
            is no site.
        centers: [A, 1 + D] of the same dtype: where to look from. A row with a negative batch finds nothing.
        offsets: [K, D] of the same dtype, at most 4096 of them.

    Returns:
        int32 [K, A]: the lowest row of `indices` whose batch is that of center a and whose position is center a's plus
        offset k, or -1. Sums do not wrap around: beyond the range of int64 there is nothing.

    Raises:
        ValueError, TypeError: on a wrong shape, dtype or device. Every value is allowed.

    >>> import torch, triops
    >>> sites = torch.tensor([[0, -4], [0, 2], [1, 2]])
    >>> triops.site_neighbors(sites, torch.tensor([[0, 0], [1, 2]]), torch.tensor([[0], [2]]))
    tensor([[-1,  2],
            [ 1, -1]], dtype=torch.int32)
    """
    return _site_neighbors(indices, centers, offsets)  # type: ignore[no-any-return]


def _check_site_neighbors(indices: Tensor, centers: Tensor, offsets: Tensor) -> None:
    c = _check.Checker("site_neighbors")
    if indices.dim() != 2 or not 2 <= indices.shape[1] <= 5:
        c.fail(f"indices must have shape [N, 1 + D] with D from 1 to 4, got {list(indices.shape)}")
    c.dtype("indices", indices, _check.INDICES)
    c.shape("centers", centers, "A", indices.shape[1])
    c.dtype("centers", centers, (indices.dtype,))
    c.shape("offsets", offsets, "K", indices.shape[1] - 1)
    c.dtype("offsets", offsets, (indices.dtype,))
    c.same_device(indices=indices, centers=centers, offsets=offsets)
    if offsets.shape[0] > _check.MAX_OFFSETS:
        c.fail(f"offsets must have at most {_check.MAX_OFFSETS} rows, got {offsets.shape[0]}")
    for name, rows in (("indices", indices), ("centers", centers)):
        if _check.too_many(rows.shape[0]):
            c.fail(f"{name} must hold at most 2**30 sites, since rows are int32, got {rows.shape[0]}")


def _fake_site_neighbors(indices: Tensor, centers: Tensor, offsets: Tensor) -> Tensor:
    return indices.new_empty((offsets.shape[0], centers.shape[0]), dtype=torch.int32)


_site_neighbors = _op.define(reference.site_neighbors, check=_check_site_neighbors, fake=_fake_site_neighbors)

__all__ = ["site_neighbors"]
