"""The arguments of an operator: its schema for PyTorch's dispatcher, and the check of a call's types.

Both are read from one table, by the annotations of the reference.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, get_args, get_type_hints

import torch
from torch import Tensor
from torch._C import _has_storage as has_storage  # False for sparse layouts and functorch's leftovers
from torch.nn import Parameter

from triops._check import as_float, as_integer

LOWEST, HIGHEST = -(2**63), 2**63 - 1  # of the integers that the dispatcher can pass on

INTEGER = (int, torch.SymInt)
NUMBER = (int, float, torch.SymInt, torch.SymFloat)


class Kind(NamedTuple):
    """What one annotation stands for."""

    schema: str  # the dispatcher's word
    expected: str  # the user's
    types: tuple[type, ...]  # what passes
    exact: type  # of those, the one that a kernel gets
    entries: tuple[type, ...] = ()  # of a list


KINDS: dict[Any, Kind] = {
    Tensor: Kind("Tensor", "a Tensor", (Tensor,), Tensor),
    Tensor | None: Kind("Tensor?", "a Tensor or None", (Tensor, type(None)), Tensor),
    str: Kind("str", "a string", (str,), str),
    bool: Kind("bool", "a bool", (bool,), bool),
    int: Kind("SymInt", "an integer", INTEGER, int),
    float: Kind("float", "a number", NUMBER, float),
    list[int]: Kind("SymInt[]", "a list of integers", (list, tuple), int, INTEGER),
    list[float]: Kind("float[]", "a list of numbers", (list, tuple), float, NUMBER),
}


class Signature:
    """The parameters of one operator.

    >>> def area(boxes: Tensor, offset: int) -> Tensor: ...
    >>> signature = Signature(area)
    >>> signature.schema
    '(Tensor boxes, SymInt offset) -> Tensor'
    >>> signature.accepted((torch.zeros(4), "one"))
    Traceback (most recent call last):
    TypeError: area: offset must be an integer, got str
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        hints = get_type_hints(function)
        self.name: str = function.__name__
        self.parameters: list[str] = list(inspect.signature(function).parameters)
        self._kinds = tuple(self._kind(hints[name]) for name in self.parameters)
        places = list(enumerate(self._kinds))
        self.tensors = tuple(i for i, kind in places if kind.exact is Tensor)
        self.key = _key_function(self._kinds)

        returned = [self._kind(hint).schema for hint in get_args(hints["return"]) or (hints["return"],)]
        taken = ", ".join(f"{kind.schema} {name}" for kind, name in zip(self._kinds, self.parameters, strict=True))
        self.schema = f"({taken}) -> {returned[0] if len(returned) == 1 else '(' + ', '.join(returned) + ')'}"

    def _kind(self, hint: Any) -> Kind:
        if hint not in KINDS:
            raise TypeError(f"{self.name}: no operator can take or return {hint}")
        return KINDS[hint]

    def accepted(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """The arguments as the dispatcher takes them, or a TypeError that names the one it would not take."""
        for position, (name, kind) in enumerate(zip(self.parameters, self._kinds, strict=True)):
            value: Any = args[position]
            if not _is(value, kind.types):
                number = _number(value, kind)
                if number is None:
                    got = type(value).__name__
                    remedy = f"; torch.from_numpy({name})" if got == "ndarray" and Tensor in kind.types else ""
                    raise TypeError(f"{self.name}: {name} must be {kind.expected}, got {got}{remedy}")
                value, args = number, (*args[:position], number, *args[position + 1 :])
            elif kind.entries:
                for entry in value:
                    if not _is(entry, kind.entries):
                        raise TypeError(
                            f"{self.name}: {name} must be {kind.expected}, got {type(entry).__name__} in it"
                        )
            if INTEGER in (kind.types, kind.entries):
                for entry in value if kind.entries else (value,):
                    if type(entry) is int and not LOWEST <= entry <= HIGHEST:
                        raise ValueError(f"{self.name}: {name} must fit in 64 bits, got {entry}")
            elif NUMBER in (kind.types, kind.entries):  # the dispatcher refuses integers that no float can hold
                floats = [as_float(n) if type(n) is int else n for n in (value if kind.entries else (value,))]
                args = (*args[:position], floats if kind.entries else floats[0], *args[position + 1 :])
        return args


def is_plain(tensor: Tensor) -> bool:
    """Whether a tensor is of no subclass, dense, and what lies at its address."""
    return (
        type(tensor) in (Tensor, Parameter)
        and tensor.layout is torch.strided
        and not (tensor.is_neg() or tensor._is_zerotensor())
        and has_storage(tensor)
    )


_TENSOR_KEY = """
    kind = type({name})
    if kind is Tensor or kind is Parameter:
        if {name}.is_neg() or {name}._is_zerotensor() or not has_storage({name}):
            return None
        {name} = {name}.shape, {name}.dtype, {name}.device
    elif {name} is not None:
        return None"""
_VALUE_KEY = """
    if type({name}) is not {type}:
        return None"""
_LIST_KEY = """
    if type({name}) is not list or any([type(entry) is not {type} for entry in {name}]):
        return None
    {name} = tuple({name})"""


def _key_function(kinds: Sequence[Kind]) -> Callable[[tuple[Any, ...]], tuple[Any, ...] | None]:
    """`key(args)`: all of a call that a check may look at: shapes, dtypes and devices of tensors, and plain values.

    None where PyTorch's dispatcher or `accepted` has to see the arguments first: tensor subclasses, tensors that
    are not dense or not what lies at their address, and values that are not of the very type that a kernel gets.

    Its code is written out for the kinds of the parameters: every eager call runs it, and loops take twice as long.
    """
    names = [f"a{i}" for i in range(len(kinds))]
    source = f"def key(args):\n    {', '.join(names)}, = args"
    for name, kind in zip(names, kinds, strict=True):
        text = _TENSOR_KEY if kind.exact is Tensor else _LIST_KEY if kind.entries else _VALUE_KEY
        source += text.format(name=name, type=kind.exact.__name__)
    source += f"\n    return {', '.join(names)},"
    scope: dict[str, Any] = {"Tensor": Tensor, "Parameter": Parameter, "has_storage": has_storage}
    exec(source, scope)
    return scope["key"]  # type: ignore[no-any-return]


def _is(value: Any, types: tuple[type, ...]) -> bool:
    """Like isinstance, but a bool is no number."""
    return isinstance(value, types) and (not isinstance(value, bool) or bool in types)


def _number(value: Any, kind: Kind) -> int | float | None:
    """NumPy scalars are numbers to a user and strangers to the dispatcher; None for what is no such number."""
    if kind.types is NUMBER:
        return as_float(value)
    return as_integer(value) if kind.types is INTEGER else None
