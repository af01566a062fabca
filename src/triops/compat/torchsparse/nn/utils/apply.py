"""A function of features on a sparse tensor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from triops.compat.torchsparse.tensor import SparseTensor

__all__ = ["fapply"]


def fapply(input: SparseTensor, fn: Callable[..., Tensor], *args: Any, **kwargs: Any) -> SparseTensor:
    """The tensor with `fn(feats, *args, **kwargs)` for its features."""
    return input.like(fn(input.feats, *args, **kwargs))
