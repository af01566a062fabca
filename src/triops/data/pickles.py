"""Pickles of plain containers, numbers, strings and NumPy arrays, and of nothing else.

A pickle is a program. This reader runs only the instructions that build plain values: every name that a pickle may ask
for stands for a function here, which checks its arguments and makes an array or a scalar of a plain dtype. Pickles of
NumPy 1 and 2 are read, whichever is installed.
"""

from __future__ import annotations

import io
import pickle
import pickletools
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from triops.data import cpu
from triops.data.garbage import no_garbage

_MAX_DIMENSIONS = 64  # of an array
_MAX_ITEM = 1 << 16  # bytes of a string in an array
_ROOM, _GROWTH = 1 << 26, 64  # what functions make may take 64 MB, or so many times the size of their file
_ITEM = 64  # bytes of an item of a set
_MEMO = 1 << 16  # values that a pickle may number; more, where it has more bytes than that


class PickleError(ValueError):
    """A pickle that is damaged or that asks for more than plain values."""


def load_pickle(data: bytes, source: str = "pickle") -> Any:
    """What a pickle holds.

    Raises:
        PickleError: it is damaged, or asks for anything but plain containers, numbers, strings and NumPy arrays.

    >>> load_pickle(pickle.dumps({"name": ["Car"], "box": np.zeros(2, np.float32)}))["box"].tolist()
    [0.0, 0.0]
    >>> load_pickle(pickle.dumps(print), "infos.pkl")
    Traceback (most recent call last):
    triops.data.pickles.PickleError: infos.pkl: refused: it asks for builtins.print
    """
    try:
        with no_garbage():
            _check_memo(data)
            return _Unpickler(data).load()
    except PickleError as error:
        raise PickleError(f"{source}: refused: {error}") from None
    except RecursionError:
        raise PickleError(f"{source}: refused: nested too deeply") from None
    except MemoryError:
        raise PickleError(f"{source}: refused: it asks for more memory than there is") from None
    except Exception as error:  # whatever instructions that make no sense lead to
        raise PickleError(f"{source}: not a whole pickle ({type(error).__name__}: {error})") from None


def _check_memo(data: bytes) -> None:
    """Refuse numbers of values that no pickle of this size needs.

    Python's reader makes room for as many values as the largest number says, 16 bytes for each: ten bytes may ask for
    gigabytes. Values are numbered one by one, so every number is less than the bytes there are. A pickle in which such
    a number may hide behind the end of a frame is refused as well.
    """
    if cpu.first_far_put(np.frombuffer(data, np.uint8), arguments(), max(_MEMO, len(data))) >= 0:
        raise PickleError("it numbers more values than it can hold, or its frames end within an instruction")


def arguments() -> npt.NDArray[np.int64]:
    """What follows each instruction of a pickle, as `cpu.first_far_put` takes it."""
    special = {
        pickletools.UP_TO_NEWLINE: cpu.LINE,
        pickletools.TAKEN_FROM_ARGUMENT1: cpu.COUNT - 1,
        pickletools.TAKEN_FROM_ARGUMENT4: cpu.COUNT - 4,
        pickletools.TAKEN_FROM_ARGUMENT4U: cpu.COUNT - 4,
        pickletools.TAKEN_FROM_ARGUMENT8U: cpu.COUNT - 8,
    }
    found = np.full(256, cpu.NOTHING_ELSE, np.int64)
    for instruction in pickletools.opcodes:
        argument = instruction.arg
        size = 0 if argument is None else special.get(argument.n, argument.n)
        found[ord(instruction.code)] = cpu.LINES if argument is pickletools.stringnl_noescape_pair else size
    return found


def dump_pickle(value: Any) -> bytes:
    """A pickle that every version of NumPy reads, the same bytes for the same value.

    NumPy's own pickles name modules that NumPy 1 does not have. Here an array is a call of `numpy.array`.
    """
    buffer = io.BytesIO()
    _Pickler(buffer, protocol=4).dump(value)
    return buffer.getvalue()


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, np.ndarray):
            return np.array, (value.tolist(), value.dtype.str)
        return NotImplemented


class _Dtype:
    """A dtype of numbers or strings. Its state says no more than the byte order."""

    spend: Callable[[int], None] | None = None  # counts the bytes of arrays

    def __init__(self, code: str, align: object = False, copy: object = True) -> None:
        if not isinstance(code, str):
            raise PickleError("a dtype that is not named by a string")
        try:
            self.value = np.dtype(code)
        except (TypeError, ValueError):
            raise PickleError(f"a dtype {code[:40]!r}") from None
        if self.value.kind not in "biufSUO" or self.value.itemsize > _MAX_ITEM or self.value.names:
            raise PickleError(f"a dtype {code[:40]!r}")

    def __setstate__(self, state: Any) -> None:
        order, subarray, names, fields = state[1:5]
        if order not in ("<", ">", "=", "|") or any(part is not None for part in (subarray, names, fields)):
            raise PickleError("a dtype with fields")
        self.value = self.value.newbyteorder(order)


class _Array(np.ndarray):
    """An array whose state is checked before NumPy sees it."""

    def __setstate__(self, state: Any) -> None:
        _, shape, dtype, fortran, data = state
        if not isinstance(dtype, _Dtype) or not isinstance(shape, tuple) or not all(type(n) is int for n in shape):
            raise PickleError("an array of something else")
        count = int(np.prod([*shape, 1], dtype=object))
        if dtype.value.kind == "O":
            fits = isinstance(data, list) and len(data) == count
        else:
            fits = isinstance(data, bytes) and len(data) == count * dtype.value.itemsize
        if not fits or any(n < 0 for n in shape):
            raise PickleError("an array whose data does not fit its shape")
        if dtype.spend is not None:
            dtype.spend(count * dtype.value.itemsize)
        super().__setstate__((1, shape, dtype.value, bool(fortran), data))  # type: ignore[arg-type]

    def __reduce_ex__(self, protocol: Any) -> Any:
        """As an array of NumPy: what was read may be sent to another process."""
        return self.view(np.ndarray).__reduce_ex__(protocol)


class _Call:
    """A function that a pickle may call, and do nothing else with: its state cannot be set."""

    __slots__ = ("function",)
    function: Callable[..., Any]

    def __init__(self, function: Callable[..., Any]) -> None:
        object.__setattr__(self, "function", function)

    def __call__(self, *args: Any) -> Any:
        return self.function(*args)

    def __setstate__(self, state: Any) -> None:
        raise PickleError("to change a function")

    def __setattr__(self, name: str, value: Any) -> None:
        raise PickleError("to change a function")


def _new_array(kind: Any, shape: Any, code: Any) -> _Array:
    return np.empty(0).view(_Array)


def _array(values: Any, dtype: Any = None, *rest: Any) -> Any:
    if not isinstance(values, list) or not isinstance(dtype, _Dtype) or rest:
        raise PickleError("an array of something else")
    return np.array(values, dtype.value)


def _from_buffer(data: Any, dtype: Any, shape: Any, order: Any) -> Any:
    if not isinstance(data, (bytes, bytearray)) or not isinstance(dtype, _Dtype) or dtype.value.kind == "O":
        raise PickleError("an array of something else")
    return np.frombuffer(bytes(data), dtype.value).reshape(shape, order="F" if order == "F" else "C").copy()


def _scalar(dtype: Any, data: Any = None) -> Any:
    if not isinstance(dtype, _Dtype) or dtype.value.kind == "O" or not isinstance(data, bytes):
        raise PickleError("a scalar of something else")
    if len(data) != dtype.value.itemsize:
        raise PickleError("a scalar whose data does not fit its dtype")
    return np.frombuffer(data, dtype.value)[0] if data else dtype.value.type()


def _encode(text: Any, encoding: Any = "latin1") -> bytes:
    if not isinstance(text, str) or encoding not in ("latin1", "latin-1"):
        raise PickleError("an encoding other than latin1")
    return text.encode("latin1")


def _refuse(*args: Any) -> Any:
    raise PickleError("to make an array in an unknown way")


_ALLOWED: dict[tuple[str, str], Callable[..., Any]] = {
    ("_codecs", "encode"): _encode,  # bytes, in pickles of protocol 2
    ("__builtin__", "set"): set,  # sets, up to protocol 3
    ("builtins", "set"): set,
    ("__builtin__", "bytes"): lambda: b"",  # empty bytes, in pickles of protocol 2
    ("numpy", "dtype"): _Dtype,
    ("numpy", "ndarray"): _refuse,  # named as an argument, never called
    ("numpy", "array"): _array,
    **{
        (f"numpy.{core}.{module}", name): function
        for core in ("core", "_core")
        for module, name, function in (
            ("multiarray", "_reconstruct", _new_array),
            ("multiarray", "scalar", _scalar),
            ("numeric", "_frombuffer", _from_buffer),
        )
    },
}


class _Unpickler(pickle.Unpickler):
    def __init__(self, data: bytes) -> None:
        super().__init__(io.BytesIO(data))
        self._room = max(_ROOM, _GROWTH * len(data))

    def find_class(self, module: str, name: str) -> Any:
        function = _ALLOWED.get((module, name))
        if function is None:
            raise PickleError(f"it asks for {module}.{name}"[:200])
        return _Call(partial(self._array if function is _array else self._make, function))

    def _make(self, function: Callable[..., Any], *args: Any) -> Any:
        """What a function makes, which is about as large as what it is given.

        The same bytes may be given again and again: a short file, any number of copies of a part of it.
        """
        for value in args:
            if isinstance(value, bytes | bytearray | str):
                self._spend(len(value))
            elif function is set:
                self._spend(_ITEM * len(value))
        made = function(*args)
        if function is _Dtype:
            made.spend = self._spend
        return made

    def _array(self, function: Callable[..., Any], values: Any, dtype: Any = None, *rest: Any) -> Any:
        """The same list may be named again and again, also within itself."""
        wanted = dtype if isinstance(dtype, _Dtype) else _Dtype(dtype)
        size, level = wanted.value.itemsize, values
        for _ in range(_MAX_DIMENSIONS):
            if not isinstance(level, list | tuple) or not level:
                break
            size, level = size * len(level), level[0]
        self._spend(size)
        return function(values, wanted, *rest)

    def _spend(self, size: int) -> None:
        self._room -= size
        if self._room < 0:
            raise PickleError("values far larger than the file")

    def persistent_load(self, identifier: Any) -> Any:
        raise PickleError("it asks for an object from outside")
