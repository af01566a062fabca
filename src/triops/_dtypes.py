"""Which dtype an operator computes in."""

from __future__ import annotations

import torch
from torch import Tensor


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """Half types are computed and accumulated in float32, float64 in float64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def autocast_dtype(tensor: Tensor) -> torch.dtype:
    """The dtype that torch's own layers take a tensor in: that of `torch.autocast` inside it, but float64 stays."""
    if no_autocast():
        return tensor.dtype
    device = tensor.device.type
    castable = tensor.is_floating_point() and tensor.dtype != torch.float64
    if device == "meta" or not castable or not torch.is_autocast_enabled(device):
        return tensor.dtype
    return torch.get_autocast_dtype(device)


def no_autocast() -> bool:
    """Nothing is cast by `torch.autocast`: spares most calls the questions about every tensor."""
    return not torch.compiler.is_compiling() and not torch._C._is_any_autocast_enabled()


def autocast(tensor: Tensor) -> Tensor:
    """A tensor as torch's own layers take it; see `autocast_dtype`."""
    dtype = autocast_dtype(tensor)
    return tensor if tensor.dtype == dtype else tensor.to(dtype)
