"""Searching the neighbors of queries among points: what the operators check, and the distances of their references.

Both come padded, [B, N, 3] and [B, M, 3], or ragged, [N, 3] and [M, 3] with offsets [B + 1] each (one cloud without).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from triops import _check
from triops._clouds import check_ascending, check_offsets
from triops._dtypes import compute_dtype

MOST_CLOUDS, MOST_NEIGHBORS = 2**20, 4096
DISTANCES = 2**24  # that a reference holds at a time


def check_clouds(
    c: _check.Checker, names: tuple[str, str], points: Tensor, queries: Tensor, offsets: Tensor | None,
    query_offsets: Tensor | None, offset_names: tuple[str, str],
) -> None:  # fmt: skip
    """Shapes, dtypes and devices of points, queries and their offsets; `names` are the operator's for them."""
    of_points, of_queries = names
    padded = points.dim() == 3
    if points.dim() not in (2, 3):
        c.fail(f"{of_points} must have shape [B, N, 3], or [N, 3] with offsets, got {list(points.shape)}")
    batch = ("B",) if padded else ()
    c.shape(of_points, points, *batch, "N", 3)
    c.shape(of_queries, queries, *batch, "M", 3)
    c.dtype(of_points, points, _check.FLOATS)
    c.same_dtype(**{of_points: points, of_queries: queries})
    c.same_device(**{of_points: points, of_queries: queries})
    if (offsets is None) != (query_offsets is None):
        c.fail(f"{offset_names[0]} and {offset_names[1]} must be given both or not at all")
    if offsets is not None and query_offsets is not None:
        if padded:
            c.fail(f"{offset_names[0]} are for {of_points} of shape [N, 3], got {list(points.shape)}")
        for name, given in zip(offset_names, (offsets, query_offsets), strict=True):
            check_offsets(c, name, given)
            c.same_device(**{of_points: points, name: given})
        if offsets.shape != query_offsets.shape:
            c.fail(f"{offset_names[0]} and {offset_names[1]} must have one shape, got {list(offsets.shape)} and "
                   f"{list(query_offsets.shape)}")  # fmt: skip
    rows, others = (t.shape[0] * t.shape[1] if padded else t.shape[0] for t in (points, queries))
    if _check.too_many(rows) or _check.too_many(others):
        c.fail(f"{of_points} and {of_queries} must be at most 2**30 each, since indices are int32, "
               f"got {rows} and {others}")  # fmt: skip
    clouds = points.shape[0] if padded else 1 if offsets is None else offsets.shape[0] - 1
    if not isinstance(clouds, torch.SymInt) and clouds > MOST_CLOUDS:
        c.fail(f"there must be at most {MOST_CLOUDS} clouds, got {clouds}")


def check_k(c: _check.Checker, k: int) -> None:
    c.at_least("k", k, 1)
    if not isinstance(k, torch.SymInt) and k > MOST_NEIGHBORS:
        c.fail(f"k must be at most {MOST_NEIGHBORS}, got {k}")


def bounds_of(operator: str, name: str, points: Tensor, offsets: Tensor | None) -> list[int]:
    """The offsets [B + 1] of points, padded or ragged, as integers. IndexError where they do not ascend to the end."""
    if points.dim() == 3:
        return [b * points.shape[1] for b in range(points.shape[0] + 1)]
    if offsets is None:
        return [0, points.shape[0]]
    check_ascending(operator, name, offsets, points.shape[0])
    found: list[int] = offsets.tolist()
    return found


def squared_distances(points: Tensor, queries: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Of points [N, 3] and some queries at a time: the first of these, and (dx*dx + dy*dy) + dz*dz [m, N] in float32,
    or float64 for float64."""
    points, queries = points.to(compute_dtype(points.dtype)), queries.to(compute_dtype(queries.dtype))
    step = max(1, DISTANCES // max(points.shape[0], 1))
    for begin in range(0, queries.shape[0], step):
        dx, dy, dz = ((queries[begin : begin + step, None, axis] - points[None, :, axis]) for axis in range(3))
        yield begin, (dx * dx + dy * dy) + dz * dz
