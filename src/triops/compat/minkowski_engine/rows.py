"""Rows of features: reduced by a number that each has, and sums over a neighbor table."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

import triops


def reduced(features: Tensor, numbers: Tensor, count: int, reduce: Literal["sum", "mean", "max"]) -> Tensor:
    """[N, C], [N] -> [count, C]: the rows that have each number, reduced; 0 where none has. Differentiable."""
    found, present = triops.dynamic_scatter(features, numbers[:, None], reduce)
    if found.shape[0] == count:
        return found
    return found.new_zeros((count, found.shape[1])).index_copy(0, present[:, 0].long(), found)


def gathered_sum(features: Tensor, table: Tensor, weights: Tensor | None = None) -> Tensor:
    """[N, C], int32 [K, A] -> [A, C]: over k, the sum of the rows in the table, where it has one. Differentiable.

    weights: multiplied to the rows under each k, [K, C] for all of them alike or [K, A, 1] for each.
    """
    total = features.new_zeros((table.shape[1], features.shape[1]))
    for k in range(table.shape[0]):
        rows = triops.gather_points(features, table[k])
        total = total + (rows if weights is None else rows * weights[k])
    return total


def by_batch(features: Tensor, order: Tensor | None, counts: list[int]) -> list[Tensor]:
    """[N, C] -> one tensor per element of the batch: `order` are its rows, one element after the other."""
    return list(torch.split(features if order is None else features.index_select(0, order), counts))
