"""Argument checks: one vocabulary of errors. Each names the argument, what was expected, what was got."""

from __future__ import annotations

import math
import numbers
import operator
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from triops import _environment

FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
INDICES = (torch.int32, torch.int64)
MAX_COUNT = 2**30
MAX_OFFSETS = 4096  # of one kernel


def strict() -> bool:
    """True when TRIOPS_CHECK=1: also look at the values of index tensors on a GPU (this synchronises)."""
    return _environment.check_values()


def too_many(size: int) -> bool:
    """More than kernels count in int32, in blocks. A symbolic size passes: tracing must not make a condition of it."""
    return not isinstance(size, torch.SymInt) and size > MAX_COUNT


def as_integer(value: Any) -> int | None:
    """A Python, NumPy or symbolic integer as a plain one; None for all else, bools and tensors included.

    >>> import numpy
    >>> as_integer(numpy.int64(3)), as_integer(3.0), as_integer(True), as_integer("3")
    (3, None, None, None)
    """
    if type(value) is int or isinstance(value, torch.SymInt):
        return value  # type: ignore[return-value]
    if isinstance(value, (bool, Tensor)) or not hasattr(value, "__index__"):
        return None
    try:
        return operator.index(value)
    except TypeError:  # an array of several integers
        return None


def as_float(value: Any) -> float | None:
    """A real number of any kind as a float, infinite where no float can hold it; None for what is no number.

    >>> as_float(10**400), as_float("3")
    (inf, None)
    """
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return None
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf  # type: ignore[operator]


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

    def tensor(self, name: str, value: Any) -> None:
        """For functions that look at a tensor before an operator does."""
        if not isinstance(value, Tensor):
            self.fail(f"{name} must be a Tensor, got {type(value).__name__}", TypeError)

    def word(self, name: str, value: Any, options: Sequence[str]) -> None:
        """As `choice`, for functions that look at an option before an operator does."""
        if not isinstance(value, str):
            self.fail(f"{name} must be a string, got {_kind(value)}", TypeError)
        self.choice(name, value, options)

    def shape(self, name: str, tensor: Tensor, *pattern: int | str) -> None:
        """`pattern` holds one entry a dimension: a number, or a name that must mean one size everywhere."""
        got = tensor.shape
        if len(got) == len(pattern):
            for size, want in zip(got, pattern):  # noqa: B905 - strict would cost time
                if type(want) is str:
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
        self.fail(f"{name} must have shape {expected}, got {list(got)}{_shape_remedy(name, got, pattern)}")

    def dtype(self, name: str, tensor: Tensor, allowed: Sequence[torch.dtype]) -> None:
        if tensor.dtype not in allowed:
            self.fail(f"{name} must be {_one_of(map(_short, allowed))}, got {_short(tensor.dtype)}", TypeError)

    def same_dtype(self, **tensors: Tensor) -> None:
        first, *others = tensors.values()
        if any([t.dtype != first.dtype for t in others]):  # noqa: C419 - a list is quicker
            got = ", ".join(f"{name} {_short(t.dtype)}" for name, t in tensors.items())
            self.fail(f"{_all_of(tensors)} must have one dtype, got {got}", TypeError)

    def same_device(self, **tensors: Tensor) -> None:
        first, *others = tensors.values()
        if any([t.device != first.device for t in others]):  # noqa: C419 - a list is quicker
            got = ", ".join(f"{name} on {t.device}" for name, t in tensors.items())
            self.fail(f"{_all_of(tensors)} must be on one device, got {got}")

    def choice(self, name: str, value: object, options: Sequence[object]) -> None:
        if value not in options:
            self.fail(f"{name} must be {_one_of(map(repr, options))}, got {value!r}")

    def finite(self, name: str, value: float) -> None:
        if not abs(value) < 1e38:  # float32 kernels must be able to hold it; NaN is not below either
            self.fail(f"{name} must be finite, got {value}")

    def at_least(self, name: str, value: int | float, least: int | float) -> None:
        if not value >= least:
            self.fail(f"{name} must be at least {least}, got {value}")

    def integer(self, name: str, value: Any, least: int | None = None, most: int | None = None) -> int:
        """`value` as a plain integer from `least` to `most`."""
        found = as_integer(value)
        if found is None:
            raise TypeError(f"{self.operator}: {name} must be an integer, got {_kind(value)}")  # fail() tells mypy less
        if least is not None:
            self.at_least(name, found, least)
        if most is not None and found > most:
            self.fail(f"{name} must be at most {most}, got {found}")
        return found

    def integers(self, name: str, value: Any) -> list[int]:
        """`value`, a sequence, an array or a tensor of integers, as a list of plain ones."""
        if type(value) in (list, tuple) and {*map(type, value)} == {int}:
            return list(value)
        readable = not isinstance(value, Tensor) or (value.dtype in INDICES and value.device.type != "meta")
        values = value.tolist() if hasattr(value, "tolist") and readable else value
        if isinstance(values, (str, bytes)) or not isinstance(values, Sequence):
            self.fail(f"{name} must be a sequence of integers, got {_kind(value)}", TypeError)
        found = [as_integer(v) for v in values]
        for v, integer in zip(values, found, strict=True):
            if integer is None:
                self.fail(f"{name} must be integers, got {_kind(v)} in it", TypeError)
        return found  # type: ignore[return-value]

    def flag(self, name: str, value: Any) -> bool:
        """`value` as a bool: True, False, 1 or 0."""
        if (
            type(value) is not bool
            and as_integer(value) not in (0, 1)
            and type(value).__name__ not in ("bool", "bool_")
        ):
            self.fail(f"{name} must be a bool, got {_kind(value)}", TypeError)
        return bool(value)


def _shape_remedy(name: str, got: Sequence[int], pattern: Sequence[int | str]) -> str:
    """What a newcomer with points or 3D boxes most likely has to write; "" where nothing is likely.

    Further columns are not dropped unasked: the first one may be the number of the sample, as in OpenPCDet.

    >>> _shape_remedy("boxes", [2, 5, 9], ["B", "T", 7]), _shape_remedy("points", [50, 3], ["B", "M", 3])
    ('; if the columns behind the first 7 are features: boxes[..., :7]', '; with a batch axis: points[None]')
    >>> _shape_remedy("boxes", [9, 4], ["K", 5])
    '; the first column is the image of each box'
    """
    *axes, columns = pattern or ("",)
    if (name, axes, [*got[1:]]) in (("boxes", ["K"], [4]), ("boxes", ["K"], [5])) and got[1] + 1 == columns:
        return "; the first column is the image of each box"
    if columns not in (3, 7) or not got:
        return ""
    if len(got) == len(pattern) and got[-1] > columns:
        return f"; if the columns behind the first {columns} are features: {name}[..., :{columns}]"
    if axes[:1] == ["B"] and len(got) == len(axes) and got[-1] == columns:
        return f"; with a batch axis: {name}[None]"
    return ""


def _kind(value: Any) -> str:
    return f"a tensor of shape {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _one_of(words: Iterable[str]) -> str:
    *head, last = words
    return f"{', '.join(head)} or {last}" if head else last


def _all_of(words: Iterable[str]) -> str:
    *head, last = words
    return f"{', '.join(head)} and {last}"
