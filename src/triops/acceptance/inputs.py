"""Other random numbers in the samples than their own seeds give."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch


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
