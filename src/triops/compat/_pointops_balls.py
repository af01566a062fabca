"""Ball queries of `pointops._C`, which differ from everybody else's, in plain torch.

pointops takes points nearer than the radius, or at most 1e-5 away, nearest first; of more than enough it takes evenly
spaced ones. (Its own sort by distance does not sort: points come in no particular order there.)
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

FAR = 1e10  # the squared distance of no neighbor
TOUCHING = 1e-5  # a squared distance that is always near enough
AT_ONCE = 2**24  # distances in memory


def ball_query_cuda(
    m: int, nsample: int, min_radius: float, max_radius: float, xyz: Tensor, new_xyz: Tensor, offset: Tensor,
    new_offset: Tensor, idx: Tensor, dist2: Tensor,
) -> None:  # fmt: skip
    slot = torch.arange(nsample, device=xyz.device)
    for begin, points, rows in _parts(xyz, new_xyz, offset, new_offset):
        squares, near = _near(points, new_xyz[rows], min_radius, max_radius)
        ascending, order = torch.where(near, squares, torch.inf).sort(dim=1, stable=True)
        count = near.sum(1, keepdim=True)
        spaced = (count.float() / nsample * slot).long()
        place = torch.where(count <= nsample, slot, spaced).clamp(max=max(len(points) - 1, 0))
        _fill(idx, dist2, rows, begin, slot < count, order, ascending, place)


def random_ball_query_cuda(
    m: int, nsample: int, min_radius: float, max_radius: float, order: Tensor, xyz: Tensor, new_xyz: Tensor,
    offset: Tensor, new_offset: Tensor, idx: Tensor, dist2: Tensor,
) -> None:  # fmt: skip
    slot = torch.arange(nsample, device=xyz.device)
    for begin, points, rows in _parts(xyz[order.long()], new_xyz, offset, new_offset):
        squares, near = _near(points, new_xyz[rows], min_radius, max_radius)
        first = near.int().argsort(dim=1, descending=True, stable=True)
        place = slot.clamp(max=max(len(points) - 1, 0)).expand(len(near), -1)
        own = order[begin : begin + len(points)].long() - begin
        found = own[first] if len(points) else first
        _fill(idx, dist2, rows, begin, slot < near.sum(1, keepdim=True), found, squares.gather(1, first), place)


def _parts(xyz: Tensor, new_xyz: Tensor, offset: Tensor, new_offset: Tensor) -> Iterator[tuple[int, Tensor, slice]]:
    """-> where a cloud begins, its points, and some of its queries, so that their distances fit in memory"""
    begin = first = 0
    for end, last in zip(offset.tolist(), new_offset.tolist(), strict=True):
        step = max(1, AT_ONCE // max(end - begin, 1))
        for row in range(first, last, step):
            yield begin, xyz[begin:end], slice(row, min(row + step, last))
        begin, first = end, last


def _near(points: Tensor, queries: Tensor, least: float, most: float) -> tuple[Tensor, Tensor]:
    """Squared distances [M, N], and which of them are near enough."""
    dx, dy, dz = (queries[:, None] - points[None]).unbind(-1)
    squares = (dx * dx + dy * dy) + dz * dz
    return squares, (squares <= TOUCHING) | ((squares >= least * least) & (squares < most * most))


def _fill(
    idx: Tensor, dist2: Tensor, rows: slice, begin: int, valid: Tensor, order: Tensor, squares: Tensor, place: Tensor
) -> None:
    if order.shape[1] == 0:
        idx[rows], dist2[rows] = -1, FAR
        return
    idx[rows] = torch.where(valid, order.gather(1, place) + begin, -1).to(idx.dtype)
    dist2[rows] = torch.where(valid, squares.gather(1, place), FAR)
