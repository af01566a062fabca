"""Memory of CPU kernels: tensors as NumPy arrays, huge pages, fills that stay off torch's threads."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable
from typing import Any

import torch

from triops._cpu.jit import jit
from triops._cpu.threads import run

HUGE_PAGE_BYTES = 4 * 2**20  # from here on huge pages pay
PAGE = mmap.PAGESIZE
MADV_HUGEPAGE: int = getattr(mmap, "MADV_HUGEPAGE", -1)  # Linux only
FILL_GRAIN = 2**20  # bytes worth a thread
ONE_THREAD = 32_768  # elements that torch itself fills on one thread


def as_numpy(tensor: torch.Tensor, dtype: torch.dtype | None = None) -> Any:
    """A CPU tensor's memory as a NumPy array, copied only where it does not lie contiguous or is of another dtype."""
    if tensor.requires_grad:
        tensor = tensor.detach()
    if dtype is not None and tensor.dtype is not dtype:  # a small call feels `to` even where it does nothing
        tensor = tensor.to(dtype)
    return tensor.contiguous().numpy()


def flat(tensor: torch.Tensor, memory_format: torch.memory_format, dtype: torch.dtype | None = None) -> Any:
    """A 4D tensor's elements in their order in memory, once it lies in the given format."""
    if memory_format == torch.channels_last:
        tensor = tensor.permute(0, 2, 3, 1)
    return as_numpy(tensor, dtype).reshape(-1)


def in_huge_pages(tensor: torch.Tensor) -> None:
    """Ask Linux to back a large tensor that is about to be written with huge pages, as NumPy does for its arrays.

    A fresh 16 MB result otherwise costs 4,096 page faults, several times what a fast kernel needs to fill it.
    """
    size = tensor.nbytes
    if size >= HUGE_PAGE_BYTES and _madvise is not None:
        begin = -(-tensor.data_ptr() // PAGE) * PAGE
        _madvise(begin, (tensor.data_ptr() + size - begin) // PAGE * PAGE, MADV_HUGEPAGE)


def _find_madvise() -> Callable[[int, int, int], int] | None:
    try:
        function: Any = ctypes.CDLL(None, use_errno=True).madvise
        function.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    except (OSError, AttributeError, TypeError):
        return None
    return function if MADV_HUGEPAGE >= 0 else None


_madvise = _find_madvise()


def zeros(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """`torch.zeros` on the threads of `run`.

    For a while after they have filled a tensor, torch's own threads compete with those of a kernel: on two cores, calls
    that used torch's took up to twice as long on two threads as on one.
    """
    return clear(torch.empty(shape, dtype=dtype))


def clear(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor that lies dense in memory, in any order of its axes, set to 0 as `zeros` are."""
    return _fill_bytes(tensor, 0)


def minus_ones(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    """Integers -1, filled as `zeros` are."""
    return _fill_bytes(torch.empty(shape, dtype=dtype), 255)


def _fill_bytes(tensor: torch.Tensor, byte: int) -> torch.Tensor:
    if tensor.numel() <= ONE_THREAD:
        return tensor.fill_(-1) if byte else tensor.zero_()
    in_huge_pages(tensor)
    elements = tensor.as_strided((tensor.numel(),), (1,))
    run(_fill, tensor.numel() * tensor.element_size(), FILL_GRAIN, elements.view(torch.uint8).numpy(), byte)
    return tensor


@jit
def _fill(begin: int, end: int, flat: Any, byte: int) -> None:
    flat[begin:end] = byte
