"""Pooling of all sites of a sample."""

from __future__ import annotations

from torch import Tensor, nn

from triops.compat.torchsparse.nn import functional
from triops.compat.torchsparse.tensor import SparseTensor

__all__ = ["GlobalAvgPool", "GlobalMaxPool"]


class GlobalAvgPool(nn.Module):
    """`global_avg_pool` as a module."""

    def forward(self, input: SparseTensor) -> Tensor:
        return functional.global_avg_pool(input)


class GlobalMaxPool(nn.Module):
    """`global_max_pool` as a module."""

    def forward(self, input: SparseTensor) -> Tensor:
        return functional.global_max_pool(input)
