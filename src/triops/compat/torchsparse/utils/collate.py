"""Samples to batches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from triops.compat.torchsparse import _generation
from triops.compat.torchsparse.tensor import SparseTensor

__all__ = ["sparse_collate", "sparse_collate_fn"]


def sparse_collate(inputs: Sequence[SparseTensor]) -> SparseTensor:
    """One tensor of all samples, whose coordinates [N, 3] get the batch: the last column in 1.4, the first in 2.1."""
    stride, generation = inputs[0].stride, inputs[0].generation
    coords, feats = [], []
    for number, sample in enumerate(inputs):
        if sample.stride != stride:
            raise ValueError(f"sparse_collate: inputs must have one stride, got {stride} and {sample.stride}")
        site, feat = _tensor(sample.coords), _tensor(sample.feats)
        batch = torch.full((site.shape[0], 1), number, dtype=torch.int, device=site.device)
        coords.append(torch.cat((batch, site) if generation == _generation.NEW else (site, batch), 1))
        feats.append(feat)
    made = SparseTensor(torch.cat(feats), torch.cat(coords), stride)
    made.generation = generation
    return made


def sparse_collate_fn(inputs: Sequence[Any]) -> Any:
    """A batch of dicts as one dict: sparse tensors collated, arrays and tensors stacked, everything else in lists."""
    if not isinstance(inputs[0], dict):
        return inputs
    made: dict[Any, Any] = {}
    for name, first in inputs[0].items():
        values = [sample[name] for sample in inputs]
        if isinstance(first, dict):
            made[name] = sparse_collate_fn(values)
        elif isinstance(first, (np.ndarray, Tensor)):
            made[name] = torch.stack([_tensor(value) for value in values])
        else:
            made[name] = sparse_collate(values) if isinstance(first, SparseTensor) else values
    return made


def _tensor(value: Any) -> Tensor:
    if not isinstance(value, (np.ndarray, Tensor)):
        raise TypeError(f"sparse_collate: coords and feats must be tensors or arrays, got {type(value).__name__}")
    return value if isinstance(value, Tensor) else torch.tensor(value)
