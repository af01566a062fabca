"""Sites within a box."""

from __future__ import annotations

from torch import nn

from triops.compat.torchsparse.nn import functional
from triops.compat.torchsparse.tensor import SparseTensor

__all__ = ["SparseCrop"]


class SparseCrop(nn.Module):
    """`spcrop` as a module."""

    def __init__(self, coords_min: tuple[int, ...] | None = None, coords_max: tuple[int, ...] | None = None) -> None:
        super().__init__()
        self.coords_min = coords_min
        self.coords_max = coords_max

    def forward(self, input: SparseTensor) -> SparseTensor:
        return functional.spcrop(input, self.coords_min, self.coords_max)
