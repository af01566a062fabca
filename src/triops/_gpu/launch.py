"""What GPU launchers share: fast launches, block sizes for the interpreter, float64 arguments."""

from __future__ import annotations

import inspect
import os
import struct
import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, overload

import triton
from triton.runtime.driver import driver

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

# Triton versions whose launch protocol `Kernel` knows; on others every launch takes Triton's own path.
_KNOWN = triton.__version__.split(".")[:2] in (["3", "6"], ["3", "7"])
fast_launches = _KNOWN and not INTERPRETED


class Kernel:
    """A Triton kernel, launched as ever by `kernel[grid](*args, CONSTANT=..., num_warps=...)`.

    Triton analyses every argument at every launch, which costs more host time than the launch. Here the
    compiled kernel is kept by what the analysis can depend on: dtype and alignment of tensors, and for
    integers whether they need 64 bits. Of those named in `specialize`, also whether they are 1 or a multiple of 16.
    Constants go by keyword, in order.
    """

    def __init__(self, function: Callable[..., Any], specialize: Sequence[str] = ()) -> None:
        self.function = function
        self.parameters = list(inspect.signature(function).parameters)
        unknown = set(specialize).difference(self.parameters)
        if unknown:
            raise ValueError(f"{function.__name__} has no parameter {', '.join(sorted(unknown))} to specialize on")
        self.specialized = [name in specialize for name in self.parameters]
        self.jit: Any = None
        self.bound: dict[Any, Callable[..., None]] = {}

    def jit_for(self, args: Sequence[Any]) -> Any:
        """Triton's own function. It is made at the first launch, which shows which arguments are integers."""
        if self.jit is None:
            given = zip(self.parameters, self.specialized, args, strict=False)
            counts = [name for name, specialized, a in given if type(a) is int and not specialized]
            self.jit = triton.jit(self.function, do_not_specialize=counts)
        return self.jit

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        if not fast_launches or _state.compiling:
            return lambda *args, **options: self.run(grid, args, options)

        def launch(*args: Any, **options: Any) -> None:
            key = tuple(options.values())
            bound = self.bound.get(key)
            if bound is None:
                bound = self.bound[key] = self.bind(**options)
            bound(grid, *args)

        return launch

    def run(self, grid: tuple[int, ...], args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """Launch by Triton's own path, or inside of `compiling()` compile only. -> the compiled kernel"""
        jit = self.jit_for(args)
        return jit.warmup(*args, grid=grid, **options) if _state.compiling else jit[grid](*args, **options)

    def bind(self, *last: int, **options: Any) -> Callable[..., None]:
        """`bound(grid, *args)`, for a launcher whose last arguments, constants and options are ever the same."""
        if not fast_launches:
            return lambda grid, *args: self.run(grid, (*args, *last), options)
        compiled: dict[Any, Any] = {}

        def launch(grid: tuple[int, ...], *args: Any) -> None:
            device = driver.active.get_current_device()
            seen, passed = [device], []
            for a, specialized in zip(args, self.specialized, strict=False):
                if type(a) is int:
                    seen.append(_integer_class(a) if specialized else LOWEST_INT32 <= a <= HIGHEST_INT32)
                    passed.append(a)
                else:  # an address goes through faster than a tensor, which Triton would ask the driver about
                    address = a.data_ptr()
                    seen.append(a.dtype)
                    seen.append(address & 15)
                    passed.append(address)
            key = tuple(seen)
            found = compiled.get(key)
            if found is None or _state.compiling:
                kernel = self.run(grid, (*args, *last), options)
                constants = [options[name] for name in self.parameters[len(args) + len(last) :]]
                compiled[key] = kernel, (*last, *constants)
                return
            kernel, rest = found
            kernel.run(
                grid[0], grid[1] if len(grid) > 1 else 1, grid[2] if len(grid) > 2 else 1,
                driver.active.get_current_stream(device), kernel.function, kernel.packed_metadata,
                None, None, None, *passed, *rest,
            )  # fmt: skip

        return launch


LOWEST_INT32, HIGHEST_INT32 = -(2**31), 2**31 - 1


@lru_cache(maxsize=4096)
def _integer_class(value: int) -> int:
    return (value & 15 == 0) + 2 * (value == 1) + 4 * (not LOWEST_INT32 <= value <= HIGHEST_INT32)


@overload
def kernel(function: Callable[..., Any]) -> Kernel: ...
@overload
def kernel(*, specialize: Sequence[str]) -> Callable[[Callable[..., Any]], Kernel]: ...
def kernel(function: Callable[..., Any] | None = None, *, specialize: Sequence[str] = ()) -> Any:
    """Decorator of kernels that a launcher launches; helpers called inside kernels use `triton.jit`.

    Counts must not specialise a kernel: Triton would compile it anew for an integer that is 1 or a multiple of 16, and
    a training loop would stall once for each combination. So no integer does, except those in `specialize`.

    specialize: integers that a network fixes, such as channels, where wide loads depend on a multiple of 16. One that
    is 1 becomes a constant inside: cast it with `tl.cast`, not with `.to`.
    """
    if function is None:
        return lambda f: Kernel(f, specialize)
    return Kernel(function)


class _State(threading.local):
    compiling = False


_state = _State()


@contextmanager
def compiling() -> Iterator[None]:
    """Inside this block the launches of this thread compile their kernels and launch nothing."""
    before, _state.compiling = _state.compiling, True
    try:
        yield
    finally:
        _state.compiling = before


_ready: set[Any] = set()


def compile_once(key: Hashable, launch_all: Callable[[], Any]) -> None:
    """Where a size decides between kernels, the first call of a kind compiles them all.

    key: what else decides over the kernels, such as dtypes and options.
    launch_all: launches all of them, with the arguments at hand, and does not look at the results.
    """
    if INTERPRETED:
        return
    known = driver.active.get_current_device(), key
    if known not in _ready:
        _ready.add(known)
        with compiling():
            launch_all()


def block(size: int, *, interpreted: int) -> int:
    """A block size, and the one for Triton's interpreter, which pays by the program and not by the element."""
    return interpreted if INTERPRETED else size


def bits_of(value: float) -> int:
    """A float64 as an integer argument: Triton would round a float argument to float32."""
    bits: int = struct.unpack("q", struct.pack("d", value))[0]
    return bits


def cdiv(a: int, b: int) -> int:
    """a / b rounded up. For launchers: Triton's own takes a microsecond or two of host time a call."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is not below n; 1 for 0."""
    return 1 << max(n - 1, 0).bit_length()
