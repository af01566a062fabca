"""How the two plans of a table lie in memory: each is one int32 tensor, so that it is one value and one allocation.

A plan is what the convolution's kernels read in place of a table int32 [K, A] (K offsets, A rows; an entry is a row of
the other side, or -1). What lies behind the counts is never read.

pairs  [K, 2, A] columns and entries of the pairs of each offset, columns ascending; then [K] how many there are.
tiles  T tiles of R rows, rows with the same offsets side by side, tiles with the most visits last:
       neighbors [T, K, R]  the entries of each visit (a tile under one offset), -1 where a row lacks the offset
       rows      [T, R]     the rows of a tile, -1 behind the last
       offsets   [T, K]     the offset of each visit, ascending
       counts    [T]        how many visits a tile has
"""

from __future__ import annotations

import itertools
from functools import cache
from typing import NamedTuple

from torch import Tensor

TILE = 64  # rows, unless a caller asks for another number
LARGEST_TILE = 256
MASK_BITS = 31  # offsets that tell which columns are alike


def pairs_size(table: Tensor) -> int:
    offsets, rows = table.shape
    return 2 * offsets * rows + offsets


def tiles_size(table: Tensor, tile: int) -> int:
    offsets, rows = table.shape
    return -(-rows // tile) * (offsets * tile + tile + offsets + 1)


@cache
def offset_order(offsets: int) -> tuple[int, ...]:
    """The offsets by which columns are sorted, the farthest from the kernel's centre, and so the rarest, first.

    Of more than MASK_BITS only the nearest. The kernel counts as a cube or a square where the number of its offsets is
    one, else as a line: a wrong guess costs speed, not correctness.

    >>> offset_order(9)
    (0, 2, 6, 8, 1, 3, 5, 7, 4)
    """
    shapes = ((side,) * axes for axes in (3, 2, 4) for side in range(2, offsets) if side**axes == offsets)
    shape = next(shapes, (offsets,))
    places = itertools.product(*map(range, shape))
    distance = [sum(abs(2 * x - side + 1) for x, side in zip(place, shape, strict=True)) for place in places]
    nearest = sorted(range(offsets), key=lambda k: (distance[k], k))[:MASK_BITS]
    return tuple(sorted(nearest, key=lambda k: (-distance[k], k)))


class Pairs(NamedTuple):
    """Views of a plan of pairs."""

    pairs: Tensor  # int32 [K, 2, A]
    counts: Tensor  # int32 [K]

    @classmethod
    def of(cls, plan: Tensor, offsets: int, rows: int) -> Pairs:
        return cls(plan[: 2 * offsets * rows].view(offsets, 2, rows), plan[2 * offsets * rows :])


class Tiles(NamedTuple):
    """Views of a plan of tiles."""

    neighbors: Tensor  # int32 [T, K, R]
    rows: Tensor  # int32 [T, R]
    offsets: Tensor  # int32 [T, K]
    counts: Tensor  # int32 [T]

    @classmethod
    def of(cls, plan: Tensor, offsets: int, rows: int, tile: int) -> Tiles:
        tiles = -(-rows // tile)
        sizes = tiles * offsets * tile, tiles * tile, tiles * offsets, tiles
        neighbors, order, visited, counts = plan.split(sizes)
        return cls(neighbors.view(tiles, offsets, tile), order.view(tiles, tile), visited.view(tiles, offsets), counts)
