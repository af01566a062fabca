"""Kernels compiled ahead of their first launch, on threads."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from triton.runtime.driver import driver


@contextmanager
def compiling_on_threads(workers: int | None = None, of_all_threads: bool = False) -> Iterator[Collection[Any]]:
    """Inside this block Triton compiles on a pool of threads, where a launch asks for it. Yields what it compiles.

    of_all_threads: where a launch of any thread asks for it, not only one of the thread that entered the block.

    Most of a compilation is outside of Python, without the lock that threads share. A Triton without this mode
    compiles in turn, and what it compiles is not known.
    """
    try:
        from triton.runtime import _async_compile
    except ImportError:
        yield ()
        return
    with _Compilers(workers or os.cpu_count() or 1) as pool, _async_compile.AsyncCompileMode(pool) as mode:
        if not of_all_threads:
            yield mode.future_kernels
            return
        known = _async_compile.active_mode
        _async_compile.active_mode = ContextVar("compiling", default=mode)  # seen by all threads, not by this one alone
        try:
            yield mode.future_kernels
        finally:
            _async_compile.active_mode = known


class _Compilers(ThreadPoolExecutor):
    """Threads that compile kernels, and behind each kernel its launcher.

    Up to Triton 3.6 that is a module in C, one for every list of argument types, which the first launch hands to the C
    compiler: one after the other, half of the time that a network's first call takes. It stays in Triton's cache.
    """

    def __init__(self, workers: int) -> None:
        super().__init__(workers)
        self.seen: set[tuple[str, ...]] = set()

    def submit(self, compile_kernel: Callable[[], Any]) -> Future[Any]:  # type: ignore[override]
        def compile_both() -> Any:
            kernel = compile_kernel()
            self._make_launcher(kernel)
            return kernel

        return super().submit(compile_both)

    def _make_launcher(self, kernel: Any) -> None:
        try:
            types = tuple(map(str, kernel.src.signature.values()))
            if types not in self.seen:
                self.seen.add(types)
                driver.active.launcher_cls(kernel.src, kernel.metadata)
        except Exception:  # whatever is wrong with it, the launch will say
            pass
