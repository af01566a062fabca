"""Activations of sparse tensors."""

from __future__ import annotations

from torch.nn import functional

from triops.compat.torchsparse.nn.utils import fapply
from triops.compat.torchsparse.tensor import SparseTensor

__all__ = ["leaky_relu", "relu", "silu"]


def relu(input: SparseTensor, inplace: bool = True) -> SparseTensor:
    return fapply(input, functional.relu, inplace=inplace)


def silu(input: SparseTensor, inplace: bool = True) -> SparseTensor:
    return fapply(input, functional.silu, inplace=inplace)


def leaky_relu(input: SparseTensor, negative_slope: float = 0.1, inplace: bool = True) -> SparseTensor:
    return fapply(input, functional.leaky_relu, negative_slope=negative_slope, inplace=inplace)
