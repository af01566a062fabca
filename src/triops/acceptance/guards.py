"""Memory that shows what a kernel does to it.

Inside `guarded_memory()` every buffer that a launcher allocates, by torch or by NumPy, lies between guard bytes, and
what `empty` returns holds NaN or nonsense; `Guards.place` puts a call's inputs between guard bytes too, at any offset
from an aligned address. Afterwards `Guards.damage` names what was written outside of a buffer, what inputs changed and,
of Triton kernels in its interpreter, what was read beside a buffer or before anybody wrote it; an element that nobody
wrote shows in the result.

    with guarded_memory() as guards:
        out = kernel(*guards.place(args))
        failures = guards.damage()

A thread that is not inside such a block allocates as ever. Arrays that a Numba kernel allocates itself have no guard
bytes, but hold nonsense where the C library can do that (glibc).
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

GUARD = 512  # bytes on either side; what allocators align to stays aligned
NONSENSE = 0x2A  # in every byte of what malloc returns

_TORCH_EMPTY = ("empty", "empty_like", "empty_strided")
_TORCH_FILLED = ("zeros", "zeros_like", "ones", "ones_like", "full", "full_like")
_TENSOR_EMPTY, _TENSOR_FILLED = ("new_empty",), ("new_zeros", "new_ones", "new_full")
_NUMPY_EMPTY, _NUMPY_FILLED = ("empty", "empty_like"), ("zeros", "zeros_like", "ones", "full")

# What `empty` returns, by element size: quiet NaNs that no arithmetic makes; integers far beyond every index, with the
# lowest bit set, as a lone bit of a mask may be all that is looked at.
_NAN = {2: 0x7FD5, 4: 0x7FD5D5D5, 8: 0x7FFD5D5D5D5D5D5D}
_INTEGER = {1: 0x55, 2: 0x5555, 4: 0x55555555, 8: 0x5555555555555555}
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

_M_PERTURB = -6  # of glibc's mallopt

_local = threading.local()


@dataclass(frozen=True)
class _Block:
    """A buffer of bytes: guard, what the kernel sees, guard."""

    bytes: Tensor
    begin: int
    end: int
    front: Tensor  # the guards as they were
    back: Tensor
    name: str
    before: Tensor | None = None  # an input as it was

    def addresses(self) -> tuple[int, int, int, int]:
        """Where the guard before the buffer begins, the buffer, the guard behind it, and what is no part of it."""
        first = self.bytes.data_ptr()
        return first, first + self.begin, first + self.end, first + len(self.bytes)

    def guards(self) -> tuple[Tensor, Tensor]:
        return self.bytes[: self.begin], self.bytes[self.end :]

    def damage(self) -> Iterator[str]:
        front, back = self.guards()
        for where, hit in (("before", (front != self.front).flip(0)), ("after", back != self.back)):
            at = hit.nonzero().flatten().tolist()
            if at:
                yield f"{len(at)} bytes written {where} {self.name}, {at[0] + 1} to {at[-1] + 1} from its edge"
        if self.before is not None and not torch.equal(self.bytes[self.begin : self.end], self.before):
            yield f"{self.name} was changed"


class _Empty:
    """The bytes of a buffer that `empty` returned, on the CPU."""

    def __init__(self, block: _Block) -> None:
        self.name, self.now = block.name, block.bytes[block.begin : block.end].numpy()
        self.first, self.before = self.now.ctypes.data, self.now.copy()

    def unwritten(self, addresses: np.ndarray[Any, Any], size: int) -> int:
        """How many of the elements of `size` bytes at these addresses lie here and are as they were."""
        at = addresses - np.uint64(self.first)  # beyond the end also if before the begin
        at = at[at <= len(self.now) - size].astype(np.int64)
        same = self.now[at] == self.before[at]
        for i in range(1, size if same.any() else 0):
            same &= self.now[at + i] == self.before[at + i]
        return int(same.sum())


class Guards:
    """The guarded buffers of one thread."""

    def __init__(self) -> None:
        self._blocks: list[_Block] = []
        self._empty: list[_Empty] = []
        self._places: list[tuple[str, int, int, int, int]] = []  # of the buffers on the CPU, with their names
        self._unwritten: dict[str, int] = {}  # elements that were read, by buffer
        self._beside: dict[str, int] = {}

    def place(self, values: Sequence[Any], *, offset: int = 0, names: Sequence[str] = ()) -> tuple[Any, ...]:
        """The values, with tensors copied between guard bytes, strides kept; a tensor given twice stays one tensor.

        offset: elements between an address that is aligned to 64 bytes and the tensor's.
        """
        placed: dict[int, Any] = {}
        with _unguarded():
            for i, value in enumerate(values):
                if isinstance(value, Tensor) and id(value) not in placed:
                    name = f"input {names[i] if i < len(names) else i}"
                    placed[id(value)] = self._guarded(value, name, offset, value.is_floating_point(), is_input=True)
        return tuple(placed.get(id(v), v) for v in values)

    def damage(self) -> list[str]:
        """What was written where it should not have been, in words."""
        by_device: dict[torch.device, list[_Block]] = {}
        for block in self._blocks:
            by_device.setdefault(block.bytes.device, []).append(block)
        found = []
        for blocks in by_device.values():
            # one look at all of them: on a GPU each look is a wait
            are = torch.cat([g for b in blocks for g in b.guards()])
            should = torch.cat([g for b in blocks for g in (b.front, b.back)])
            whole = torch.equal(are, should)
            found += [d for b in blocks if not whole or b.before is not None for d in b.damage()]
        found += [f"{n} elements read beside {name}" for name, n in self._beside.items()]
        return found + [f"{n} elements of {name} read before they were written" for name, n in self._unwritten.items()]

    def look_at_reads(self, addresses: np.ndarray[Any, Any], size: int) -> None:
        """To be called before elements of `size` bytes are read."""
        if not addresses.size:
            return
        lowest, highest = int(addresses.min()), int(addresses.max())
        for name, first, begin, end, last in self._places:
            if highest < first or lowest >= last or (begin <= lowest and highest + size <= end):
                continue
            beside = (addresses >= first) & (addresses < last) & ((addresses < begin) | (addresses > end - size))
            if beside.any():
                self._beside[name] = self._beside.get(name, 0) + int(beside.sum())
        for empty in self._empty:
            if highest < empty.first or lowest >= empty.first + len(empty.now):
                continue
            unwritten = empty.unwritten(addresses, size)
            if unwritten:
                self._unwritten[empty.name] = self._unwritten.get(empty.name, 0) + unwritten

    def adopt(self, value: Any, name: str, poisoned: bool) -> Any:
        """What an allocation returned, as a copy between guard bytes; as it is where that cannot be."""
        if isinstance(value, np.ndarray):
            if value.dtype.kind not in "fiub" or not value.flags.c_contiguous:
                return value
            flat = torch.from_numpy(value.reshape(-1).view(np.uint8))
            tensor = self._guarded(flat, _describe(name, value), 0, value.dtype.kind == "f", filled=not poisoned)
            if poisoned:
                self._poison_last(value.dtype.kind, value.dtype.itemsize)
            return tensor.numpy().view(value.dtype).reshape(value.shape)
        if type(value) is not Tensor or value.requires_grad or value.device.type not in ("cpu", "cuda"):
            return value
        if value.device.type == "cpu" and torch.cuda.is_available() and value.is_pinned():
            return value
        tensor = self._guarded(value, _describe(name, value), 0, value.is_floating_point(), filled=not poisoned)
        if poisoned:
            kind = "f" if value.is_floating_point() else "b" if value.dtype == torch.bool else "i"
            self._poison_last(kind, value.element_size())
        return tensor

    def _poison_last(self, kind: str, size: int) -> None:
        """Fill the last buffer as `empty` leaves one."""
        block = self._blocks[-1]
        inside = block.bytes[block.begin : block.end]
        inside.view(_BITS[size]).fill_(1 if kind == "b" else (_NAN if kind == "f" else _INTEGER)[size])
        if kind != "b" and inside.device.type == "cpu" and len(inside):  # of a boolean nobody can tell who wrote it
            self._empty.append(_Empty(block))

    def _guarded(
        self, value: Tensor, name: str, offset: int, floats: bool, *, is_input: bool = False, filled: bool = True
    ) -> Tensor:
        value = value.detach()
        size = value.element_size()
        span = 1 + sum((n - 1) * s for n, s in zip(value.shape, value.stride(), strict=True)) if value.numel() else 0
        begin, count = GUARD + offset * size, span * size
        # pairs of bytes, since half types are the smallest floats
        shape = (begin + count + GUARD + 1) // 2
        buffer = torch.empty(shape, dtype=torch.int16, device=value.device).view(torch.uint8)[: begin + count + GUARD]
        pattern = torch.full(((begin + GUARD + 1) // 2,), self._pattern(floats), dtype=torch.int16, device=value.device)
        front, back = pattern.view(torch.uint8)[:begin], pattern.view(torch.uint8)[:GUARD]
        buffer[:begin], buffer[begin + count :] = front, back
        inside = buffer[begin : begin + count]
        if filled:
            inside.view(value.dtype).copy_(value.as_strided((span,), (1,)))
        before = inside.clone() if is_input else None
        block = _Block(buffer, begin, begin + count, front, back, name, before)
        self._blocks.append(block)
        if buffer.device.type == "cpu":
            self._places.append((name, *block.addresses()))
        return inside.view(value.dtype).as_strided(value.shape, value.stride())

    def _pattern(self, floats: bool) -> int:
        """Two bytes, others for each buffer, so that a copy from beside one buffer to beside another is seen.

        In every float dtype a NaN, but none that arithmetic makes; in every integer dtype a large index.
        """
        number = len(self._blocks)
        return -0x100 + 0xF1 + number % 14 if floats else 0x101 * (0x21 + number % 64)


def _describe(name: str, value: Any) -> str:
    return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)} of {name}"


# Patches: installed while any thread is inside a block, looked at by those threads alone

_ORIGINALS: dict[tuple[Any, str], Callable[..., Any]] = {}
_PATCHES: dict[tuple[Any, str], Callable[..., Any]] = {}
_lock = threading.RLock()
_inside = _compiling = 0


@contextlib.contextmanager
def guarded_memory() -> Iterator[Guards]:
    """See the module."""
    global _inside
    guards, outer = Guards(), getattr(_local, "guards", None)
    with _lock:
        _inside += 1
        if _inside == 1:
            _install()
    _local.guards = guards
    try:
        yield guards
    finally:
        _local.guards = outer
        with _lock:
            _inside -= 1
            if _inside == 0:
                _uninstall()


@contextlib.contextmanager
def _unguarded() -> Iterator[None]:
    """Inside, this thread allocates as ever: the guards allocate, too."""
    guards, _local.guards = getattr(_local, "guards", None), None
    try:
        yield
    finally:
        _local.guards = guards


def _install() -> None:
    for owner, prefix, names, poisoned in (
        (torch, "torch.", _TORCH_EMPTY, True), (torch, "torch.", _TORCH_FILLED, False),
        (torch.Tensor, "Tensor.", _TENSOR_EMPTY, True), (torch.Tensor, "Tensor.", _TENSOR_FILLED, False),
        (np, "np.", _NUMPY_EMPTY, True), (np, "np.", _NUMPY_FILLED, False),
    ):  # fmt: skip
        for name in names:
            original = _ORIGINALS[owner, name] = getattr(owner, name)
            _PATCHES[owner, name] = _guarding(original, prefix + name, poisoned)
    dispatcher = _numba_dispatcher()
    if dispatcher is not None:
        compile = _ORIGINALS[dispatcher, "_compile_for_args"] = dispatcher._compile_for_args
        _PATCHES[dispatcher, "_compile_for_args"] = _with_numpy_as_it_is(compile)
    interpreter = sys.modules.get("triton.runtime.interpreter")
    if interpreter is not None:
        executor, builder = interpreter.GridExecutor, interpreter.InterpreterBuilder
        launch = _ORIGINALS[executor, "__call__"] = executor.__call__
        _PATCHES[executor, "__call__"] = _launching(launch)
        for name, pointers, mask in (
            ("create_masked_load", 0, 1), ("create_atomic_rmw", 1, 3), ("create_atomic_cas", 0, None)
        ):  # fmt: skip
            original = _ORIGINALS[builder, name] = getattr(builder, name)
            _PATCHES[builder, name] = _reading(original, pointers, mask)
    _set(_PATCHES)
    _perturb_malloc(NONSENSE)


def _uninstall() -> None:
    _set(_ORIGINALS)
    _ORIGINALS.clear()
    _PATCHES.clear()
    _perturb_malloc(0)


def _set(functions: dict[tuple[Any, str], Callable[..., Any]], only: Any = None) -> None:
    for (owner, name), function in functions.items():
        if only is None or owner is only:
            setattr(owner, name, function)


def _numba_dispatcher() -> Any:
    try:
        from numba.core.dispatcher import _DispatcherBase
    except ImportError:
        return None
    return _DispatcherBase


def _launching(original: Callable[..., Any]) -> Callable[..., Any]:
    """The launch of a kernel in Triton's interpreter, whose own arrays need no guards."""

    @functools.wraps(original)
    def launch(executor: Any, *args: Any, **options: Any) -> Any:
        outer = getattr(_local, "reader", None)
        _local.reader = getattr(_local, "guards", None)
        try:
            with _unguarded():
                return original(executor, *args, **options)
        finally:
            _local.reader = outer

    return launch


def _reading(original: Callable[..., Any], pointers: int, mask: int | None) -> Callable[..., Any]:
    """An instruction that reads at its operand `pointers`, where its operand `mask` is true."""

    @functools.wraps(original)
    def instruction(builder: Any, *operands: Any, **options: Any) -> Any:
        guards: Guards | None = getattr(_local, "reader", None)
        if guards is not None:
            places = operands[pointers]
            addresses = np.asarray(places.data, np.uint64)
            if mask is not None:
                addresses = addresses[np.broadcast_to(operands[mask].data, addresses.shape)]
            guards.look_at_reads(addresses.reshape(-1), max(places.get_element_ty().primitive_bitwidth // 8, 1))
        return original(builder, *operands, **options)

    return instruction


def _with_numpy_as_it_is(compile: Callable[..., Any]) -> Callable[..., Any]:
    """Numba's compiler knows NumPy's functions, not the ones here."""

    def compile_for_args(*args: Any, **options: Any) -> Any:
        global _compiling
        with _lock:
            _compiling += 1
            _set(_ORIGINALS, np)
        try:
            return compile(*args, **options)
        finally:
            with _lock:
                _compiling -= 1
                if _compiling == 0:
                    _set(_PATCHES, np)

    return compile_for_args


def _perturb_malloc(byte: int) -> None:
    """glibc fills what malloc returns with the complement of this byte; 0 turns that off."""
    with contextlib.suppress(OSError, AttributeError, TypeError):
        ctypes.CDLL(None).mallopt(_M_PERTURB, byte ^ 0xFF if byte else 0)


def _guarding(original: Callable[..., Any], name: str, poisoned: bool) -> Callable[..., Any]:
    @functools.wraps(original)
    def allocate(*args: Any, **options: Any) -> Any:
        value = original(*args, **options)
        guards: Guards | None = getattr(_local, "guards", None)
        if guards is None:
            return value
        with _unguarded():
            return guards.adopt(value, name, poisoned)

    return allocate
