"""Kernels compiled ahead of their first launch, on threads."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any


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
    with ThreadPoolExecutor(workers or os.cpu_count() or 1) as pool, _async_compile.AsyncCompileMode(pool) as mode:
        if not of_all_threads:
            yield mode.future_kernels
            return
        known = _async_compile.active_mode
        _async_compile.active_mode = ContextVar("compiling", default=mode)  # seen by all threads, not by this one alone
        try:
            yield mode.future_kernels
        finally:
            _async_compile.active_mode = known
