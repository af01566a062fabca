"""How a CPU kernel is compiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
from numba.core import event

from triops import _compiling
from triops._cpu.cache import keep_compiled


def jit(function: Callable[..., Any]) -> Callable[..., Any]:
    """`numba.njit` as every CPU kernel and helper uses it: no GIL, IEEE arithmetic, cached on disk.

    A function that Python calls writes into arrays that it is given and returns nothing or numbers: Numba creates a
    returned array by calling Python, and an interrupt during that call is raised as another error.
    """
    return _compiled(function)


def inline(function: Callable[..., Any]) -> Callable[..., Any]:
    """As `jit`, for a helper that takes many arrays: always inlined into its caller.

    LLVM decides by itself about others, and a call passes every field of every array on the stack.
    """
    return _compiled(function, forceinline=True)


def _compiled(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    kernel: Any = numba.njit(nogil=True, error_model="numpy", **options)(function)
    keep_compiled(kernel)
    return kernel  # type: ignore[no-any-return]


class _Notice(event.Listener):
    """Says that kernels are being compiled. Numba tells it of every function; only those of triops count."""

    def on_start(self, found: Any) -> None:
        module = self._module_of(found)
        if module.startswith("triops."):
            _compiling.started(module, "CPU")

    def on_end(self, found: Any) -> None:
        if self._module_of(found).startswith("triops."):
            _compiling.ended()

    def _module_of(self, found: Any) -> str:
        return found.data["dispatcher"].py_func.__module__ or ""  # a function made by exec() may have none


event.register("numba:compile", _Notice())  # type: ignore[no-untyped-call]
