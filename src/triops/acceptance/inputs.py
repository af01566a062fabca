"""What a check does to its surroundings: other random numbers, and allocations that show what nobody wrote."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor


@contextlib.contextmanager
def reseeded(seed: int) -> Iterator[None]:
    """Inside, samples draw other numbers than their own seeds give; 0 leaves them as they are."""
    if seed == 0:
        yield
        return
    original = torch.Generator

    class Reseeded(original):  # type: ignore[misc, valid-type]
        def manual_seed(self, own: int) -> Any:
            return super().manual_seed(own + 1_000_003 * seed)

    torch.Generator = Reseeded  # type: ignore[misc]
    try:
        yield
    finally:
        torch.Generator = original  # type: ignore[misc]


@contextlib.contextmanager
def poisoned_allocations() -> Iterator[None]:
    """Every `torch.empty` comes filled with NaN or nonsense, so that an element nobody wrote shows."""

    def poison(tensor: Tensor) -> Tensor:
        if tensor.is_floating_point():
            return tensor.fill_(float("nan"))
        return tensor.fill_(True) if tensor.dtype == torch.bool else tensor.fill_(torch.iinfo(tensor.dtype).max // 3)

    originals = {name: getattr(torch, name) for name in ("empty", "empty_like", "empty_strided")}
    new_empty = torch.Tensor.new_empty
    try:
        for name, original in originals.items():
            setattr(torch, name, lambda *a, _original=original, **k: poison(_original(*a, **k)))
        torch.Tensor.new_empty = lambda self, *a, **k: poison(new_empty(self, *a, **k))  # type: ignore[method-assign]
        yield
    finally:
        for name, original in originals.items():
            setattr(torch, name, original)
        torch.Tensor.new_empty = new_empty  # type: ignore[method-assign]
