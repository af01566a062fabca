"""Argument checks: one vocabulary of errors. Each names the argument, what was expected, what was got."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from triops import _environment

FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
INDICES = (torch.int32, torch.int64)
MAX_COUNT = 2**30


def strict() -> bool:
    """True when TRIOPS_CHECK=1: also look at the values of index tensors on a GPU (this synchronises)."""
    return _environment.check_values()


def too_many(size: int) -> bool:
    """More than kernels count in int32, in blocks. A symbolic size passes: tracing must not make a condition of it."""
    return not isinstance(size, torch.SymInt) and size > MAX_COUNT


class Checker:
    """Checks of one operator's call. Named dimensions are bound by the first tensor that has them.

    >>> import torch
    >>> check = Checker("points_in_boxes")
    >>> check.shape("points", torch.zeros(2, 5, 3), "B", "M", 3)
    >>> check.shape("boxes", torch.zeros(1, 4, 7), "B", "T", 7)
    Traceback (most recent call last):
    ValueError: points_in_boxes: boxes must have shape [B, T, 7] with B = 2 as in points, got [1, 4, 7]
    """

    def __init__(self, operator: str) -> None:
        self.operator = operator
        self.sizes: dict[str, tuple[int, str]] = {}

    def fail(self, message: str, error: type[Exception] = ValueError) -> None:
        raise error(f"{self.operator}: {message}")

    def shape(self, name: str, tensor: Tensor, *pattern: int | str) -> None:
        """`pattern` holds one entry a dimension: a number, or a name that must mean one size everywhere."""
        got = tensor.shape
        if len(got) == len(pattern):
            for size, want in zip(got, pattern, strict=True):
                if isinstance(want, str):
                    bound = self.sizes.get(want)
                    if bound is None:
                        self.sizes[want] = (size, name)
                    elif bound[0] != size:
                        break
                elif size != want:
                    break
            else:
                return
        bound_names = [
            f"{p} = {self.sizes[p][0]} as in {self.sizes[p][1]}"
            for p in pattern
            if isinstance(p, str) and p in self.sizes and self.sizes[p][1] != name
        ]
        expected = f"[{', '.join(map(str, pattern))}]" + (" with " + ", ".join(bound_names) if bound_names else "")
        self.fail(f"{name} must have shape {expected}, got {list(got)}")

    def dtype(self, name: str, tensor: Tensor, allowed: Sequence[torch.dtype]) -> None:
        if tensor.dtype not in allowed:
            self.fail(f"{name} must be {_one_of(map(_short, allowed))}, got {_short(tensor.dtype)}", TypeError)

    def same_dtype(self, **tensors: Tensor) -> None:
        if len({t.dtype for t in tensors.values()}) > 1:
            got = ", ".join(f"{name} {_short(t.dtype)}" for name, t in tensors.items())
            self.fail(f"{_all_of(tensors)} must have one dtype, got {got}", TypeError)

    def same_device(self, **tensors: Tensor) -> None:
        if len({t.device for t in tensors.values()}) > 1:
            got = ", ".join(f"{name} on {t.device}" for name, t in tensors.items())
            self.fail(f"{_all_of(tensors)} must be on one device, got {got}")

    def choice(self, name: str, value: object, options: Sequence[object]) -> None:
        if value not in options:
            self.fail(f"{name} must be {_one_of(map(repr, options))}, got {value!r}")

    def finite(self, name: str, value: float) -> None:
        if not (math.isfinite(value) and abs(value) < 1e38):  # float32 kernels must be able to hold it
            self.fail(f"{name} must be finite, got {value}")

    def at_least(self, name: str, value: int | float, least: int | float) -> None:
        if not value >= least:
            self.fail(f"{name} must be at least {least}, got {value}")


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _one_of(words: Iterable[str]) -> str:
    *head, last = words
    return f"{', '.join(head)} or {last}" if head else last


def _all_of(words: Iterable[str]) -> str:
    *head, last = words
    return f"{', '.join(head)} and {last}"
