"""Where compiled CPU kernels are kept between processes.

Numba's cache files are pickles: whoever can write one runs code in every process that reads it. So only a folder that
no other user can write to is used. A file that cannot be read or written costs a compilation and one warning, and the
call goes on.
"""

from __future__ import annotations

import hashlib
import os
import stat
import tempfile
import threading
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numba
from numba.core.caching import FunctionCache

_OTHER_ROOMS = ("_gpu", "nn", "spconv", "compat", "acceptance")  # no CPU kernel imports from these
_SETTINGS_LOCK = threading.Lock()  # the folder is a setting of Numba for the whole process


@cache
def cache_directory() -> str | None:
    """The folder in use: in NUMBA_CACHE_DIR or the user's own cache, else in the temporary directory; None for none."""
    key = source_key(Path(__file__).parents[1])
    reasons = []
    for base in (_user_cache, _temporary_cache):
        try:
            return _usable(os.path.join(base(), key))
        except OSError as error:
            reasons.append(str(error))
    _warn_once("; ".join(reasons))
    return None


def source_key(package: Path) -> str:
    """A hash of all source that a CPU kernel could be compiled from.

    Numba itself recompiles a kernel when its own file changes, but not when a file changes from which it imports a
    helper or a constant. Takes 3 ms.
    """
    digest = hashlib.sha256()
    for path in sorted(os.path.join(root, name) for root, _, names in os.walk(package) for name in names):
        relative = os.path.relpath(path, package)
        if is_part_of_the_key(relative):
            digest.update(relative.encode())
            with open(path, "rb") as source:
                digest.update(source.read())
    return digest.hexdigest()[:16]


def is_part_of_the_key(path: str) -> bool:
    """Whether a file of the package, by its path inside, may hold what a CPU kernel imports.

    `tests/test_architecture.py` follows the imports.
    """
    room, name = path.split(os.sep)[0], os.path.basename(path)
    return name.endswith(".py") and room not in _OTHER_ROOMS and not name.endswith(("gpu.py", "samples.py"))


def _user_cache() -> str:
    chosen = os.environ.get("NUMBA_CACHE_DIR")
    if chosen:
        return chosen
    home = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    if not os.path.isabs(home):
        raise FileNotFoundError("this user has no home directory")
    return os.path.join(home, "triops")


def _temporary_cache() -> str:
    """Anyone can guess its name and create it first, so it is checked to be private before anything in it is read."""
    user = str(os.getuid()) if hasattr(os, "getuid") else os.environ.get("USERNAME", "user")
    directory = os.path.join(tempfile.gettempdir(), f"triops-{user}")
    os.makedirs(directory, mode=0o700, exist_ok=True)
    _refuse_unless_private(directory)
    return directory


def _usable(directory: str) -> str:
    os.makedirs(directory, mode=0o700, exist_ok=True)
    _refuse_unless_private(directory)
    with tempfile.TemporaryFile(dir=directory):
        return directory


def _refuse_unless_private(directory: str) -> None:
    """An OSError unless it is a folder, not a link to one, that belongs to this user and nobody else can write to."""
    found = os.lstat(directory)
    if not stat.S_ISDIR(found.st_mode):
        raise NotADirectoryError(f"{directory} is not a folder")
    if hasattr(os, "getuid") and (found.st_uid != os.getuid() or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)):
        raise PermissionError(f"{directory} belongs to another user or can be written by others")


def keep_compiled(kernel: Any) -> None:
    """Let a Numba function load its compiled versions from `cache_directory`, and save them there."""
    directory = cache_directory()
    if directory is None:
        return
    try:
        kernel._cache = _KernelCache(kernel.py_func, directory)
    except (OSError, RuntimeError) as error:  # the folder is gone, or the disk is full
        _warn_once(str(error))


class _KernelCache(FunctionCache):
    """Numba's cache of one function in `cache_directory`, whose failures never reach the caller."""

    def __init__(self, function: Callable[..., Any], directory: str) -> None:
        settings: Any = numba.config
        with _SETTINGS_LOCK:
            before, settings.CACHE_DIR = settings.CACHE_DIR, directory
            try:
                super().__init__(function)  # type: ignore[no-untyped-call]
            finally:
                settings.CACHE_DIR = before
        self._directory = directory
        if not self.cache_path.startswith(directory):  # Numba's fallback, which is not keyed by the source
            raise PermissionError(f"{directory} cannot be written")

    def load_overload(self, signature: Any, context: Any) -> Any:
        try:
            _refuse_unless_private(self._directory)
            return super().load_overload(signature, context)  # type: ignore[no-untyped-call]
        except Exception as error:
            _warn_once(f"{type(error).__name__}: {error}")
            return None

    def save_overload(self, signature: Any, compiled: Any) -> None:
        try:
            _refuse_unless_private(self._directory)
            super().save_overload(signature, compiled)  # type: ignore[no-untyped-call]
        except Exception as error:
            _warn_once(f"{type(error).__name__}: {error}")


_warned = False


def _warn_once(reason: str) -> None:
    global _warned
    if not _warned:
        _warned = True
        warnings.warn(
            f"triops: compiled CPU kernels cannot be kept, so every process compiles them anew ({reason}). "
            "Remedy: set NUMBA_CACHE_DIR to a folder of your own",
            RuntimeWarning,
            stacklevel=3,
        )
