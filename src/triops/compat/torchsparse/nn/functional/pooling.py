"""Pooling of all sites of a sample."""

from __future__ import annotations

import torch
from torch import Tensor

from triops.compat.torchsparse.tensor import SparseTensor

__all__ = ["global_avg_pool", "global_max_pool"]


def global_avg_pool(inputs: SparseTensor) -> Tensor:
    """[B, C]: the mean of each sample; NaN without sites."""
    return torch.stack([sites.mean(0) for sites in samples(inputs)])


def global_max_pool(inputs: SparseTensor) -> Tensor:
    """[B, C]: the maximum of each sample, which must have a site; the gradient goes to one of equals."""
    return torch.stack([sites.max(0)[0] for sites in samples(inputs)])


def samples(inputs: SparseTensor) -> list[Tensor]:
    """The features of each sample."""
    return [inputs.feats[inputs.batch == number] for number in range(int(inputs.batch.max()) + 1)]
