"""Which dtype an operator computes in."""

from __future__ import annotations

import torch


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """Half types are computed and accumulated in float32, float64 in float64."""
    return torch.float64 if dtype == torch.float64 else torch.float32
