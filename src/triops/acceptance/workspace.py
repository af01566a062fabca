"""How much memory a call takes beside its inputs and outputs, at its peak.

On a GPU the caching allocator counts. On a CPU, what torch allocates is followed tensor by tensor, and what NumPy
allocates by `tracemalloc`; what a compiled kernel allocates inside of itself is seen by neither.
"""

from __future__ import annotations

import tracemalloc
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from triops._sample import bytes_of


def workspace(call: Callable[..., Any], args: tuple[Any, ...], device: str) -> int:
    """Bytes at the peak of `call(*args)`, without inputs and outputs. Call it warm: a first call also compiles.

    >>> import torch
    >>> workspace(lambda x: (x + 1).double().sum(), (torch.zeros(1_000_000),), "cpu") // 10**6
    12
    """
    if device == "cuda":
        return _gpu_workspace(call, args)
    with _Allocations(args):
        call(*args)  # torch imports what it needs for this at the first use, which is no memory of the call
    torch_memory, tracing = _Allocations(args), tracemalloc.is_tracing()
    tracemalloc.start()
    try:
        tracemalloc.reset_peak()
        before, _ = tracemalloc.get_traced_memory()
        with torch_memory:
            out = call(*args)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        if not tracing:
            tracemalloc.stop()
    return max(torch_memory.peak - bytes_of(out), 0) + max(peak - before, 0)


def _gpu_workspace(call: Callable[..., Any], args: tuple[Any, ...]) -> int:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = int(torch.cuda.memory_allocated())
    out = call(*args)
    torch.cuda.synchronize()
    return max(int(torch.cuda.max_memory_allocated()) - before - bytes_of(out), 0)


class _Allocations(TorchDispatchMode):
    """Counts the bytes of the storages that the operators of one thread make, for as long as a tensor holds them."""

    def __init__(self, known: tuple[Any, ...]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.peak = 0
        self._held: Counter[int] = Counter()  # tensors by storage
        self._known = {_storage(t) for t in known if isinstance(t, Tensor)}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor) and _storage(tensor) not in self._known:
                self._hold(tensor)
        return out

    def _hold(self, tensor: Tensor) -> None:
        key, size = _storage(tensor), tensor.untyped_storage().nbytes()
        if not self._held[key]:
            self.now += size
            self.peak = max(self.peak, self.now)
        self._held[key] += 1
        weakref.finalize(tensor, self._release, key, size)

    def _release(self, key: int, size: int) -> None:
        self._held[key] -= 1
        if not self._held[key]:
            self.now -= size


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
