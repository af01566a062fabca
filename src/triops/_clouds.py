"""Batches of point clouds as rows of one tensor: cloud b is rows offsets[b] to offsets[b + 1] - 1."""

from __future__ import annotations

import torch
from torch import Tensor

from triops import _check


def check_offsets(c: _check.Checker, name: str, offsets: Tensor) -> None:
    """An int32 or int64 tensor [B + 1]."""
    if offsets.dim() != 1 or offsets.shape[0] < 1:
        c.fail(f"{name} must have shape [B + 1], got {list(offsets.shape)}")
    c.dtype(name, offsets, _check.INDICES)


def check_ascending(operator: str, name: str, offsets: Tensor, total: int) -> None:
    """IndexError where offsets do not ascend from 0 to `total`. Looks at values, so never call it while tracing."""
    right = offsets[0] == 0 and offsets[-1] == total and bool((offsets[1:] >= offsets[:-1]).all())
    if not right:
        raise IndexError(f"{operator}: {name} must ascend from 0 to {total}, and do not")


def check_indices(operator: str, indices: Tensor, count: int) -> None:
    """IndexError on a CPU, or under TRIOPS_CHECK=1, for an index that is neither a point's nor -1."""
    if indices.device.type != "cpu" and not _check.strict():
        return
    if indices.numel() and not (int(indices.min()) >= -1 and int(indices.max()) < count):
        raise IndexError(f"{operator}: indices must lie in -1..{count - 1}, and do not")


def check_indices_on_request(operator: str, indices: Tensor, count: int) -> None:
    """As `check_indices`, for GPU kernels: under TRIOPS_CHECK=1 alone, since it waits for the GPU."""
    if _check.strict():
        check_indices(operator, indices, count)


def even_offsets(batch: int, each: int, device: torch.device) -> Tensor:
    """Offsets of `batch` clouds of `each` rows: a padded batch [B, N, ...] seen as rows."""
    return torch.arange(batch + 1, device=device) * each


def ends_to_offsets(ends: Tensor) -> Tensor:
    """Offsets from the end of each cloud [B], as pointops writes them."""
    return torch.nn.functional.pad(ends, (1, 0))


def counts_to_offsets(counts: Tensor) -> Tensor:
    """Offsets from the rows of each cloud [B], as OpenPCDet writes them."""
    return torch.nn.functional.pad(counts.cumsum(0), (1, 0))
