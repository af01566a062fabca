"""Tensors that a CPU kernel gets as addresses, where calls are small enough that passing arguments decides.

A NumPy array of a tensor takes ten times as long to make as its address takes to ask for, and Numba unpacks an integer
sooner than an array, and far sooner than a named tuple. The tensor has to have a name for as long as the kernel runs:
the address alone does not keep its memory.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
from numba.np.numpy_support import carray

from triops._cpu.jit import jit

# By which a kernel knows the element type of an address: arrays without elements.
ELEMENTS = {torch.float32: np.empty(0, np.float32), torch.float64: np.empty(0, np.float64)}


def laid(
    tensor: torch.Tensor, dtype: torch.dtype, memory_format: torch.memory_format = torch.contiguous_format
) -> torch.Tensor:
    """A CPU tensor of this dtype that lies dense in this format: itself where it does, else a copy."""
    if tensor.dtype is not dtype:  # a small call feels `to` even where it does nothing
        tensor = tensor.to(dtype)
    return tensor.contiguous(memory_format=memory_format)


@jit
def array_at(address: int, count: int, like: Any) -> Any:
    """The `count` elements at an address as a flat array of the element type of `like`."""
    return carray(_pointer(address), (count,), like.dtype)  # type: ignore[call-arg]


@intrinsic
def _pointer(typing_context: Any, address: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], cgutils.voidptr_t)

    return types.voidptr(types.intp), generate
