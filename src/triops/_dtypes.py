"""Which dtype an operator computes in."""

from __future__ import annotations

import torch
from torch import Tensor


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """Half types are computed and accumulated in float32, float64 in float64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def autocast(tensor: Tensor) -> Tensor:
    """A tensor as torch's own layers take it inside `torch.autocast`: in its dtype, but float64 as it is."""
    device = tensor.device.type
    if device == "meta" or not torch.is_autocast_enabled(device):
        return tensor
    castable = tensor.is_floating_point() and tensor.dtype != torch.float64
    return tensor.to(torch.get_autocast_dtype(device)) if castable else tensor
