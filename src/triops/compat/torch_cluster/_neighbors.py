"""Neighbours and samples of point sets: what `torch_cluster` asks for, in plain torch.

Everything goes through `nearest`, `within` and `furthest`, which search all points, a bounded number of distances at a
time; the nearest in up to three dimensions are found by `triops.knn`. Non-finite points are nobody's neighbours.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.functional import pad

import triops
from triops._neighbors import MOST_NEIGHBORS

DISTANCES = 2**24  # held at a time


def nearest(points: Tensor, queries: Tensor, k: int, cosine: bool = False) -> tuple[Tensor, Tensor]:
    """points [N, F], queries [M, F] -> int64 [M, min(k, N)], nearest first, and bool: whether there is such a point.

    Of equal distances the lower index is nearer.
    """
    k = min(k, points.shape[0])
    searched = points.is_floating_point() and points.dtype == queries.dtype and not cosine
    if searched and points.shape[1] in (1, 2, 3) and 0 < k <= MOST_NEIGHBORS:
        space = (0, 3 - points.shape[1])  # with an axis of zeros distances stay the same numbers
        indices, _ = triops.knn(pad(points, space), pad(queries, space), k, squared=True)
        return indices.clamp(min=0).long(), indices >= 0
    rows, found = [], []
    for _, distance in _distances(points, queries, cosine):
        if distance.dtype == torch.float64:
            value, index = distance.sort(dim=1, stable=True)
            rows.append(index[:, :k])
            found.append(value[:, :k].isfinite())
            continue
        # The bits of a float that is not negative ascend with it; with the index behind them, no two are equal.
        bits = (distance + 0.0).view(torch.int32).long()
        key = (bits << 32) | torch.arange(points.shape[0], device=points.device)
        lowest = key.topk(k, dim=1, largest=False, sorted=True).values
        rows.append(lowest & 0xFFFFFFFF)
        found.append((lowest >> 32).int().view(torch.float32).isfinite())
    return _joined(rows, (queries.shape[0], k), points), _joined(found, (queries.shape[0], k), points, torch.bool)


def within(points: Tensor, queries: Tensor, radius: float, most: int, skip_same: bool) -> tuple[Tensor, Tensor]:
    """The pairs (query, point), both int64, closer than `radius`; of each query those with the lowest indices.

    skip_same: leave out the point of the query's own number.
    """
    rows, columns = [], []
    limit = torch.tensor(radius, dtype=torch.float64).square().to(points.dtype).to(points.device)
    for begin, distance in _distances(points, queries):
        near = distance < limit
        if skip_same:
            number = torch.arange(begin, begin + near.shape[0], device=near.device)
            inside = number < near.shape[1]
            near[inside.nonzero()[:, 0], number[inside]] = False
        near &= near.cumsum(1) <= most
        row, column = near.nonzero(as_tuple=True)
        rows.append(row + begin)
        columns.append(column)
    return _joined(rows, (0,), points), _joined(columns, (0,), points)


def furthest(points: Tensor, pointers: Tensor, counts: Tensor, starts: Tensor) -> Tensor:
    """Samples of ragged sets: points [N, F], pointers [B + 1], counts and starts [B] -> int64 [sum of counts].

    Each sample is the point furthest from all before it; of equals the lowest. The first is `starts`, counted within
    the set. All sets go side by side.
    """
    lengths = pointers.diff()
    sets, longest, samples = len(lengths), int(lengths.max()), int(counts.max())
    places = torch.arange(longest, device=points.device)
    exists = places < lengths[:, None]
    rows = torch.where(exists, pointers[:-1, None] + places, 0)
    padded = points[rows]  # [B, longest, F]
    gap = torch.where(exists & padded.isfinite().all(2), torch.inf, -1.0)
    chosen = torch.empty((sets, samples), dtype=torch.int64, device=points.device)
    last, numbers = starts, torch.arange(sets, device=points.device)
    for step in range(samples):
        chosen[:, step] = last
        offset = padded - padded[numbers, last][:, None]
        gap = torch.minimum(gap, offset.square().sum(2).to(gap.dtype))
        gap[numbers, last] = torch.where(gap[numbers, last] > 0, 0, gap[numbers, last])
        last = gap.argmax(1)
    wanted = torch.arange(samples, device=points.device) < counts[:, None]
    return (pointers[:-1, None] + chosen)[wanted]


def _distances(points: Tensor, queries: Tensor, cosine: bool = False) -> Iterator[tuple[int, Tensor]]:
    """Squared distances (or cosine distances) of some queries at a time to all points; inf where not finite."""
    if cosine:
        points, queries = (t / t.norm(dim=1, keepdim=True).clamp(min=1e-12) for t in (points, queries))
    if points.dtype not in (torch.float32, torch.float64):
        points, queries = points.float(), queries.float()
    for begin, part in _parts(queries, points.shape[0]):
        if cosine:
            distance = (1 - part @ points.t()).clamp(min=0)
        else:
            distance = part.new_zeros((part.shape[0], points.shape[0]))
            for axis in range(points.shape[1]):
                distance += (part[:, axis, None] - points[:, axis]).square()
        yield begin, torch.where(distance.isfinite(), distance, torch.inf)


def _parts(queries: Tensor, points: int) -> Iterator[tuple[int, Tensor]]:
    step = max(1, DISTANCES // max(points, 1))
    for begin in range(0, queries.shape[0], step):
        yield begin, queries[begin : begin + step]


def _joined(parts: list[Tensor], shape: tuple[int, ...], like: Tensor, dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.cat(parts) if parts else torch.empty(shape, dtype=dtype, device=like.device)
