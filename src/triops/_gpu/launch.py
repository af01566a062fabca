"""What GPU launchers share: fast launches, block sizes for the interpreter, float64 arguments."""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Sequence
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
    integers whether they are 1, a multiple of 16, or beyond 32 bits. Constants go by keyword, in order.
    """

    def __init__(self, function: Callable[..., Any], varying: Sequence[str] = ()) -> None:
        self.jit = triton.jit(function, do_not_specialize=list(varying))
        self.bound: dict[Any, Callable[..., None]] = {}

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        if not fast_launches:
            return self.jit[grid]  # type: ignore[no-any-return]

        def launch(*args: Any, **options: Any) -> None:
            key = tuple(options.values())
            bound = self.bound.get(key)
            if bound is None:
                bound = self.bound[key] = self.bind(**options)
            bound(grid, *args)

        return launch

    def bind(self, *last: int, **options: Any) -> Callable[..., None]:
        """`bound(grid, *args)`, for a launcher whose last arguments, constants and options are ever the same."""
        if not fast_launches:
            return lambda grid, *args: self.jit[grid](*args, *last, **options)
        compiled: dict[Any, Any] = {}

        def launch(grid: tuple[int, ...], *args: Any) -> None:
            device = driver.active.get_current_device()
            seen, passed = [device], []
            for a in args:
                if type(a) is int:
                    seen.append(_integer_class(a))
                    passed.append(a)
                else:  # an address goes through faster than a tensor, which Triton would ask the driver about
                    address = a.data_ptr()
                    seen.append(a.dtype)
                    seen.append(address & 15)
                    passed.append(address)
            key = tuple(seen)
            found = compiled.get(key)
            if found is None:
                kernel = self.jit[grid](*args, *last, **options)
                constants = [options[name] for name in self.jit.arg_names[len(args) + len(last) :]]
                compiled[key] = kernel, (*last, *constants)
                return
            kernel, rest = found
            kernel.run(
                grid[0], grid[1] if len(grid) > 1 else 1, grid[2] if len(grid) > 2 else 1,
                driver.active.get_current_stream(device), kernel.function, kernel.packed_metadata,
                None, None, None, *passed, *rest,
            )  # fmt: skip

        return launch


@lru_cache(maxsize=4096)
def _integer_class(value: int) -> int:
    return (value & 15 == 0) + 2 * (value == 1) + 4 * (not -(2**31) <= value < 2**31)


@overload
def kernel(function: Callable[..., Any]) -> Kernel: ...
@overload
def kernel(*, varying: Sequence[str]) -> Callable[[Callable[..., Any]], Kernel]: ...
def kernel(function: Callable[..., Any] | None = None, *, varying: Sequence[str] = ()) -> Any:
    """Decorator of kernels that a launcher launches; helpers called inside kernels use `triton.jit`.

    varying: integers that differ from call to call, such as the number of sites. Triton compiles a kernel anew for
    an integer that is 1 or a multiple of 16, and a training loop would stumble over each combination once.
    """
    if function is None:
        return lambda f: Kernel(f, varying)
    return Kernel(function)


def block(size: int, *, interpreted: int) -> int:
    """A block size, and the one for Triton's interpreter, which pays by the program and not by the element."""
    return interpreted if INTERPRETED else size


def bits_of(value: float) -> int:
    """A float64 as an integer argument: Triton would round a float argument to float32."""
    bits: int = struct.unpack("q", struct.pack("d", value))[0]
    return 0 if bits == 1 else bits  # Triton turns an argument of 1 into a constant without a dtype; 5e-324 is 0


def cdiv(a: int, b: int) -> int:
    """a / b rounded up. For launchers: Triton's own takes a microsecond or two of host time a call."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is not below n; 1 for 0."""
    return 1 << max(n - 1, 0).bit_length()
