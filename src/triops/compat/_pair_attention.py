"""Attention over given pairs of points, with learned tables of relative positions, in plain torch.

`pointops2_cuda` of Stratified Transformer and `sptr_cuda` of SphereFormer are made of it. Each pair has a row of
numbers [heads, channels] per source: of its query, of its key, or of a table, which is the sum of three entries, one
per axis. Pairs are many: some of them are in memory at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

AT_ONCE = 2**24  # numbers of one source in memory


@dataclass(frozen=True)
class Points:
    """rows [N, h, d], and of each pair which one, [M]."""

    rows: Tensor
    index: Tensor

    def read(self, part: slice) -> Tensor:
        return _wide(self.rows.index_select(0, self.index[part]))

    def add(self, total: Tensor, part: slice, grad: Tensor) -> None:
        total.index_add_(0, self.index[part], grad.to(total.dtype))


@dataclass(frozen=True)
class Table:
    """rows [L, 3, h, d], and of each pair an entry per axis, [M, 3]."""

    rows: Tensor
    index: Tensor

    def read(self, part: slice) -> Tensor:
        entries = (self.rows[:, axis].index_select(0, self.index[part, axis]) for axis in range(3))
        return _wide(next(entries)) + next(entries) + next(entries)

    def add(self, total: Tensor, part: slice, grad: Tensor) -> None:
        for axis in range(3):
            total[:, axis].index_add_(0, self.index[part, axis], grad.to(total.dtype))


Source = Points | Table


def scores(products: Sequence[tuple[Source, Source]], output: Tensor) -> None:
    """Fills output [M, h] with the sum of the products of sources, over channels."""
    for part in _parts(products[0][0]):
        output[part] = sum((one.read(part) * other.read(part)).sum(-1) for one, other in products)


def scores_backward(
    products: Sequence[tuple[Source, Source]], grad: Tensor, totals: Sequence[tuple[Tensor, Tensor]]
) -> None:
    """grad [M, h]. Adds the gradients of all sources to `totals`."""
    for part in _parts(products[0][0]):
        each = _wide(grad[part])[..., None]
        for (one, other), (of_one, of_other) in zip(products, totals, strict=True):
            one.add(of_one, part, each * other.read(part))
            other.add(of_other, part, each * one.read(part))


def sums(weights: Tensor, queries: Tensor, sources: Sequence[Source], output: Tensor) -> None:
    """Fills output [N, h, d]: each query has the sum over its pairs of the rows, times weights [M, h]."""
    total = torch.zeros_like(output, dtype=_wide(output[:0]).dtype)
    for part in _parts(sources[0]):
        total.index_add_(0, queries[part], _wide(weights[part])[..., None] * _total(sources, part))
    output.copy_(total)


def sums_backward(
    weights: Tensor, queries: Tensor, sources: Sequence[Source], grad: Tensor, of_weights: Tensor,
    totals: Sequence[Tensor],
) -> None:  # fmt: skip
    """grad [N, h, d]. Adds the gradients of weights and sources."""
    for part in _parts(sources[0]):
        each = _wide(grad.index_select(0, queries[part]))
        of_weights[part] += (each * _total(sources, part)).sum(-1)
        of_rows = each * _wide(weights[part])[..., None]
        for source, total in zip(sources, totals, strict=True):
            source.add(total, part, of_rows)


def queries_of(offsets: Tensor, keys: Tensor) -> Tensor:
    """Which query each pair has, int32 [M] as its keys; those of query n are from offsets[n] to offsets[n + 1]."""
    pairs = torch.arange(len(keys), dtype=offsets.dtype, device=offsets.device)
    return torch.searchsorted(offsets[1:].contiguous(), pairs, right=True, out_int32=True)


def _parts(source: Source) -> Iterator[slice]:
    pairs, numbers = len(source.index), source.rows.shape[-2] * source.rows.shape[-1]
    step = max(AT_ONCE // max(numbers, 1), 1)
    for begin in range(0, pairs, step):
        yield slice(begin, min(begin + step, pairs))


def _total(sources: Sequence[Source], part: slice) -> Tensor:
    first, *others = (source.read(part) for source in sources)
    return sum(others, first)


def _wide(rows: Tensor) -> Tensor:
    """Half types are computed in float32."""
    return rows.to(torch.promote_types(rows.dtype, torch.float32))
