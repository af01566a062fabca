"""Norms of sparse tensors."""

from __future__ import annotations

import torch
from torch import nn

from triops.compat.torchsparse.nn.utils import fapply
from triops.compat.torchsparse.tensor import SparseTensor

__all__ = ["BatchNorm", "GroupNorm", "InstanceNorm"]


class BatchNorm(nn.BatchNorm1d):
    def forward(self, input: SparseTensor) -> SparseTensor:  # type: ignore[override]
        return fapply(input, super().forward)


class InstanceNorm(nn.InstanceNorm1d):
    def forward(self, input: SparseTensor) -> SparseTensor:  # type: ignore[override]
        return fapply(input, super().forward)


class GroupNorm(nn.GroupNorm):
    """Over the sites of each sample."""

    def forward(self, input: SparseTensor) -> SparseTensor:  # type: ignore[override]
        feats = input.feats
        made = torch.zeros_like(feats)
        for number in range(int(input.batch.max()) + 1 if feats.shape[0] else 0):
            rows = (input.batch == number).nonzero()[:, 0]
            if rows.shape[0]:
                made = made.index_copy(0, rows, super().forward(feats[rows].T[None])[0].T.to(made.dtype))
        return input.like(made)
