"""Numbers for each axis."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["make_divisible", "make_ntuple", "make_tensor"]


def make_ntuple(x: Any, ndim: int) -> tuple[int, ...]:
    """A number, or a sequence or tensor of `ndim` of them, as a tuple of `ndim`.

    >>> make_ntuple(2, ndim=3), make_ntuple([1, 2, 1], ndim=3)
    ((2, 2, 2), (1, 2, 1))
    """
    if isinstance(x, int):
        return (x,) * ndim
    made = tuple(x.flatten().tolist() if isinstance(x, Tensor) else x)
    if len(made) != ndim:
        raise ValueError(f"make_ntuple: x must be an integer or {ndim} of them, got {x!r}")
    return made


def make_tensor(x: tuple[int, ...], dtype: torch.dtype, device: Any) -> Tensor:
    return torch.tensor(x, dtype=dtype, device=device)


def make_divisible(x: int, divisor: int) -> int:
    """The lowest multiple of `divisor` that is no less than `x`."""
    return -(-x // divisor) * divisor
