"""What GPU launchers share: fast launches, block sizes for the interpreter, float64 arguments."""

from __future__ import annotations

import inspect
import os
import struct
import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, lru_cache
from typing import Any, NamedTuple, overload

import triton
from triton.runtime.driver import driver

from triops import _compiling

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

fast_launches = not INTERPRETED  # False: every launch takes Triton's own path

LOWEST_INT32, HIGHEST_INT32 = -(2**31), 2**31 - 1


class Kernel:
    """A Triton kernel, launched as ever by `kernel[grid](*args, CONSTANT=..., num_warps=...)`.

    Triton analyses every argument at every launch, which costs more host time than the launch. Here the
    compiled kernel is kept by what the analysis can depend on: dtype and alignment of tensors, and for
    integers whether they need 64 bits. Of those named in `specialize`, also whether they are 1 or a multiple of 16;
    of tensors named in `unaligned`, not the alignment.
    Arguments are tensors, the first of them always, and integers; constants go by keyword, in order.

    How Triton calls a compiled kernel is nowhere promised, so the first launch of each kind is watched, and repeated by
    itself only where Triton called it as expected; see `Repeat`.
    """

    def __init__(
        self, function: Callable[..., Any], specialize: Sequence[str] = (), unaligned: Sequence[str] = ()
    ) -> None:
        self.function, self.unaligned = function, list(unaligned)
        self.parameters = list(inspect.signature(function).parameters)
        unknown = {*specialize, *unaligned}.difference(self.parameters)
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
            options = {"do_not_specialize_on_alignment": self.unaligned} if self.unaligned else {}
            self.jit = triton.jit(self.function, do_not_specialize=counts, **options)
        return self.jit

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        if not fast_launches or _state.compiling:
            return lambda *args, **options: self.run(grid, args, options)

        def launch(*args: Any, **options: Any) -> None:
            key = tuple(options.values())
            bound = self.bound.get(key)
            if bound is None:  # what the arguments are is seen at the first launch
                bound = self.bound[key] = self._launch_like(grid, args, (), options)
            bound(grid, *args)

        return launch

    def _kind(self, position: int, argument: Any) -> str:
        if type(argument) is int:
            return "specialized" if self.specialized[position] else "integer"
        return "unaligned" if self.parameters[position] in self.unaligned else "aligned"

    def run(self, grid: tuple[int, ...], args: tuple[Any, ...], options: dict[str, Any]) -> None:
        """Launch by Triton's own path, or inside of `compiling()` compile only."""
        jit = self.jit_for(args)
        if _state.compiling:
            with _compiling.compiling(self.function.__module__, "GPU"):
                jit.warmup(*args, grid=grid, **options)
        else:
            jit[grid](*args, **options)

    def bind(self, *last: int, **options: Any) -> Callable[..., None]:
        """`bound(grid, *args)`, for a launcher whose last arguments, constants and options are ever the same."""
        if not fast_launches:
            return lambda grid, *args: self.run(grid, (*args, *last), options)
        made: list[Callable[..., None]] = []

        def launch(grid: tuple[int, ...], *args: Any) -> None:
            if not made:
                made.append(self._launch_like(grid, args, last, options))
            made[0](grid, *args)

        return launch

    def _launch_like(
        self, grid: tuple[int, ...], args: tuple[Any, ...], last: tuple[int, ...], options: dict[str, Any]
    ) -> Callable[..., None]:
        """`launch(grid, *args)` for arguments like these."""
        repeats: dict[Any, Repeat | None] = {}

        def first(grid: tuple[int, ...], key: Any, *args: Any) -> None:
            """A launch that is not a repeat: the first of its kind, or one that cannot be repeated."""
            if _state.recording is not None and not _state.compiling:
                _state.recording.launched(repeats.get(key), grid, args)
            if key in repeats or _state.compiling:
                self.run(grid, (*args, *last), options)
            else:
                with _compiling.compiling(self.function.__module__, "GPU"):
                    repeats[key] = Repeat.of_launch(self.jit_for((*args, *last)), grid, args, last, options)

        kinds = tuple(self._kind(i, a) for i, a in enumerate(args))
        return _launcher(len(grid), kinds)(repeats, first, _state)


@cache
def _launcher(dimensions: int, kinds: tuple[str, ...]) -> Callable[..., Callable[..., None]]:
    """Makes `launch(grid, *args)` from `repeats`, `first` and `_state`, for arguments of these kinds.

    Its code is written out for them: a loop over the arguments takes three times as long, and a network launches
    hundreds of kernels. An address goes through faster than a tensor, which Triton would ask the driver about.
    """
    names = [f"a{i}" for i in range(len(kinds))]
    aligned, unaligned, integers, specialized = (
        [n for n, kind in zip(names, kinds, strict=True) if kind == wanted]
        for wanted in ("aligned", "unaligned", "integer", "specialized")
    )
    tensors = aligned + unaligned
    arguments = ", ".join(names)
    passed = ", ".join(f"p_{n}" if n in tensors else n for n in names)
    key = ", ".join(["device", *(f"{n}.dtype" for n in tensors), *(f"integer_class({n})" for n in specialized)])
    grid = ", ".join(f"grid[{i}]" if i < dimensions else "1" for i in range(3))
    fits = [f"{LOWEST_INT32} <= {n} <= {HIGHEST_INT32}" for n in integers]
    usual = " and ".join([f"not ({' | '.join(f'p_{n}' for n in aligned)}) & 15", *fits])
    unusual = ", ".join([*(f"p_{n} & 15" for n in aligned), *fits])
    source = f"""
def make(repeats, first, state):
    def launch(grid, {arguments}):
        {"; ".join(f"p_{n} = {n}.data_ptr()" for n in tensors)}
        device = {aligned[0]}.get_device()
        key = ({key},)
        if not ({usual}):
            key = (*key, {unusual})
        repeat = repeats.get(key)
        if repeat is None or state.special:
            return first(grid, key, {arguments})
        run, stream, function, metadata, rest = repeat
        run({grid}, stream(device), function, metadata, None, None, None, {passed}, *rest)
    return launch
"""
    scope: dict[str, Any] = {"integer_class": _integer_class}
    exec(source, scope)
    return scope["make"]  # type: ignore[no-any-return]


class Repeat(NamedTuple):
    """How Triton called a compiled kernel, for further launches with other tensors and numbers of the same kind:

    `run(*grid, stream, function, metadata, launch_metadata, enter_hook, exit_hook, *args, *rest)`
    """

    run: Callable[..., Any]
    stream: Callable[[int], int]  # the current one of a device
    function: Any
    metadata: Any
    rest: tuple[Any, ...]  # behind the arguments: those that are ever the same, and constants where Triton passes them

    @classmethod
    def of_launch(
        cls, jit: Any, grid: tuple[int, ...], args: tuple[Any, ...], last: tuple[int, ...], options: dict[str, Any]
    ) -> Repeat | None:
        """Launch by Triton's own path, and watch. None where the compiled kernel is not called as described above."""
        kernel = jit.warmup(*args, *last, grid=grid, **options)
        calls: list[tuple[Any, ...]] = []
        with _watching:
            run = _watch(kernel, calls)
            try:
                jit[grid](*args, *last, **options)
            finally:
                if run is not None:
                    _replace_run(kernel, run)
        for call in calls:
            current = driver.active.get_current_stream
            made = cls(run, current, kernel.function, kernel.packed_metadata, call[9 + len(args) :])  # type: ignore[arg-type]
            stream = current(args[0].get_device())
            expected = (*grid, *(1, 1)[len(grid) - 1 :], stream, made.function, made.metadata, *call[6:9], *args)
            hooked = any(hook is not None and getattr(hook, "calls", hook) for hook in call[7:9])
            if len(call) >= len(expected) and all(map(_same, call, expected)) and not hooked:
                return made
        return None


_watching = threading.Lock()


def _watch(kernel: Any, calls: list[tuple[Any, ...]]) -> Callable[..., Any] | None:
    """Note the calls of `kernel.run` from now on. -> what it was, None where that is not possible"""
    try:
        run: Callable[..., Any] = kernel.run
        kernel.function, kernel.packed_metadata  # noqa: B018 - must be there

        def noted(*args: Any, **options: Any) -> Any:
            if not options:
                calls.append(args)
            return run(*args, **options)

        _replace_run(kernel, noted)
    except Exception:  # whatever is wrong with it, Triton's own launch will say
        return None
    return run


def _replace_run(kernel: Any, run: Callable[..., Any]) -> None:
    setattr(kernel, "_run" if "_run" in vars(kernel) else "run", run)  # in some versions `run` is a property


def _same(a: Any, b: Any) -> bool:
    return a is b or (type(a) is type(b) is int and a == b)


@lru_cache(maxsize=4096)
def _integer_class(value: int) -> int:
    return (value & 15 == 0) + 2 * (value == 1) + 4 * (not LOWEST_INT32 <= value <= HIGHEST_INT32)


@overload
def kernel(function: Callable[..., Any]) -> Kernel: ...
@overload
def kernel(
    *, specialize: Sequence[str] = (), unaligned: Sequence[str] = ()
) -> Callable[[Callable[..., Any]], Kernel]: ...
def kernel(
    function: Callable[..., Any] | None = None, *, specialize: Sequence[str] = (), unaligned: Sequence[str] = ()
) -> Any:
    """Decorator of kernels that a launcher launches; helpers called inside kernels use `triton.jit`.

    Counts must not specialise a kernel: Triton would compile it anew for an integer that is 1 or a multiple of 16, and
    a training loop would stall once for each combination. So no integer does, except those in `specialize`.

    specialize: integers that a network fixes, such as channels, where wide loads depend on a multiple of 16. One that
    is 1 becomes a constant inside: cast it with `tl.cast`, not with `.to`.
    unaligned: tensors that may begin anywhere, such as one row of a table: their alignment would depend on a count.
    """
    if function is None:
        return lambda f: Kernel(f, specialize, unaligned)
    return Kernel(function)


class _State(threading.local):
    compiling = False
    recording: Any = None  # what `watching` was given
    special = False  # either of these: launches are not simply repeated


_state = _State()


@contextmanager
def compiling() -> Iterator[None]:
    """Inside this block the launches of this thread compile their kernels and launch nothing."""
    before = _state.compiling, _state.special
    _state.compiling = _state.special = True
    try:
        yield
    finally:
        _state.compiling, _state.special = before


@contextmanager
def watching(recording: Any) -> Iterator[None]:
    """Inside this block `recording.launched(repeat, grid, args)` hears of the launches of this thread."""
    _state.recording, _state.special = recording, True
    try:
        yield
    finally:
        _state.recording, _state.special = None, _state.compiling


def watcher() -> Any:
    """What `watching` was given in this thread, else None."""
    return _state.recording


def is_compiling() -> bool:
    """Whether launches of this thread compile and do nothing else."""
    return _state.compiling


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
    bits: int = _as_integer(_as_double(value))[0]
    return bits


_as_integer, _as_double = struct.Struct("q").unpack, struct.Struct("d").pack  # half the time of struct.unpack and pack


def cdiv(a: int, b: int) -> int:
    """a / b rounded up. For launchers: Triton's own takes a microsecond or two of host time a call."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is not below n; 1 for 0."""
    return 1 << max(n - 1, 0).bit_length()
