"""What the arguments of the command line mean: operators, a device, a place to write to."""

from __future__ import annotations

import difflib
import errno
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import torch

import triops
from triops._op import OPERATORS, Operator


class UsageError(ValueError):
    """A call of the command line that makes no sense, or that this machine cannot do. One sentence."""


def choose_device(device: str | None) -> str:
    """The device asked for, or the best there is."""
    if device not in (None, "cpu", "cuda"):
        raise UsageError(f"--device must be cpu or cuda, got {device}")
    if device == "cuda" and not torch.cuda.is_available():
        raise UsageError("--device cuda: torch sees no GPU here")
    return device or ("cuda" if torch.cuda.is_available() else "cpu")


def choose_operators(names: Sequence[str]) -> list[str]:
    """The registered operators behind functions, operators and folders of operators, each once. None give none.

    >>> choose_operators(["border_align", "nms3d"])
    ['border_align_backward', 'border_align_forward', 'nms_rotated']
    """
    chosen, unknown = set[str](), []
    for name in names:
        found = operators_of(name)
        chosen.update(found)
        if not found:
            unknown.append(name)
    if unknown:
        known = sorted({*OPERATORS, *(n for n in triops.__all__ if operators_of(n))})
        close = [near for name in unknown for near in difflib.get_close_matches(name, known, n=1)]
        there = f"did you mean {' or '.join(close)}?" if close else f"there are {', '.join(known)}"
        raise UsageError(f"no operator {', '.join(unknown)}; {there}")
    return [name for name in OPERATORS if name in chosen]


def operators_of(name: str) -> list[str]:
    """The registered operators that a name stands for; none where it stands for nothing.

    A registered operator stands for itself and its backward, a public function for those that it calls and their
    backwards, a folder under `triops/ops` for all that it defines.

    >>> operators_of("voxelize"), operators_of("sparse_max_pool"), operators_of("points_in_circles")
    (['voxelize_padded'], ['sparse_max_pool_backward', 'sparse_max_pool'], [])
    """
    if name in OPERATORS:
        return [n for n in OPERATORS if n == name or n.startswith(f"{name}_backward")]
    function = getattr(triops, name, None) if name in triops.__all__ else None
    if isinstance(function, FunctionType):
        called = [op.name.removesuffix("_forward") for op in _called(function, set())]
        return [n for n in OPERATORS if any(n in (c, f"{c}_forward") or n.startswith(f"{c}_backward") for c in called)]
    return [op.name for op in OPERATORS.values() if op.package == f"triops.ops.{name}"]


def _called(function: FunctionType, seen: set[FunctionType]) -> list[Operator]:
    """Operators that a function, or a function of its operator's folder that it calls, names."""
    seen.add(function)
    found: list[Operator] = []
    for name in _names(function.__code__):
        value: Any = function.__globals__.get(name)
        if isinstance(value, Operator):
            found.append(value)
        elif isinstance(value, FunctionType) and value.__module__ == function.__module__ and value not in seen:
            found += _called(value, seen)
    return found


def _names(code: CodeType) -> set[str]:
    inner = (_names(c) for c in code.co_consts if isinstance(c, CodeType))
    return set(code.co_names).union(*inner)


def writable_folder(folder: Path, option: str) -> Path:
    """The folder, made if need be. Asked for before the work starts, not after it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except OSError as error:
        raise UsageError(f"{option}: {folder} cannot be written ({error.strerror or error})") from None


def writable_file(path: Path | None, option: str) -> None:
    """As `writable_folder`, for a file that is written at the end; None is no file."""
    if path is None:
        return
    writable_folder(path.parent, option)
    reason = errno.EISDIR if path.is_dir() else errno.EACCES if path.exists() and not os.access(path, os.W_OK) else 0
    if reason:
        raise UsageError(f"{option}: {path} cannot be written ({os.strerror(reason)})")
