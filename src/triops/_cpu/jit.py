"""How a CPU kernel is compiled, and where compiled kernels are kept."""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numba


@cache
def cache_directory() -> str | None:
    """Where compiled kernels are kept, or None where nothing is writable.

    Numba invalidates a cached kernel when its own file changes, not when a helper in another file
    does, so the directory is keyed by a hash of the whole package: a
    constant that a kernel takes from any file is compiled into it.
    """
    package = Path(__file__).parents[1]
    digest = hashlib.sha256()
    for source in sorted(package.rglob("*.py")):
        digest.update(source.read_bytes())
    key = digest.hexdigest()[:16]
    wanted = os.environ.get("NUMBA_CACHE_DIR") or os.path.join(
        os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache"), "triops"
    )
    for base in (wanted, os.path.join(tempfile.gettempdir(), f"triops-{_user()}")):
        directory = os.path.join(base, key)
        try:
            os.makedirs(directory, mode=0o700, exist_ok=True)
            with tempfile.TemporaryFile(dir=directory):
                return directory
        except OSError:
            continue
    return None


def _user() -> str:
    return str(os.getuid()) if hasattr(os, "getuid") else os.environ.get("USERNAME", "user")


def jit(function: Callable[..., Any]) -> Callable[..., Any]:
    """`numba.njit` as every CPU kernel and helper uses it: no GIL, IEEE arithmetic, cached on disk.

    A function that Python calls writes into arrays that it is given and returns nothing or numbers: Numba makes a
    returned array by a function in Python, and an interrupt that arrives there comes out as another error.
    """
    options: dict[str, Any] = {"nogil": True, "error_model": "numpy"}
    directory = cache_directory()
    if directory is None:
        return numba.njit(**options)(function)  # type: ignore[no-any-return]
    settings: Any = numba.config
    before, settings.CACHE_DIR = settings.CACHE_DIR, directory
    try:
        return numba.njit(cache=True, **options)(function)  # type: ignore[no-any-return]
    finally:
        settings.CACHE_DIR = before
