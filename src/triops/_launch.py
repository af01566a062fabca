"""How a CPU kernel is compiled and run.

A kernel is a serial Numba function over a range, `kernel(begin, end, *arrays)`, that holds no lock and
releases the GIL. `run` calls it once, or once a chunk on plain Python threads. Numba's own parallel
layers are not used: its OpenMP layer kills a forked DataLoader worker and its workqueue layer aborts
when two threads call at once; threads over nogil kernels have neither fault.
"""

from __future__ import annotations

import ctypes
import hashlib
import mmap
import os
import tempfile
import threading
from collections.abc import Callable
from functools import cache
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numba
import numpy as np
import torch
from numba import types
from numba.extending import intrinsic

HUGE_PAGE_BYTES = 4 * 2**20  # from here on huge pages pay
PAGE = mmap.PAGESIZE
MADV_HUGEPAGE: int = getattr(mmap, "MADV_HUGEPAGE", -1)  # Linux alone has it
FILL = 2**20  # bytes worth a thread
ONE_THREAD = 32_768  # elements that torch itself fills on one thread
LOOKS = 200_000  # about 0.1 ms


@cache
def cache_directory() -> str | None:
    """Where compiled kernels are kept, or None where nothing is writable.

    Numba invalidates a cached kernel when its own file changes, not when a helper in another file
    does, so the directory is keyed by a hash of every file that holds CPU code.
    """
    package = Path(__file__).parent
    digest = hashlib.sha256()
    shared = [package / "_half.py", package / "_cpu.py", Path(__file__)]
    for source in sorted([*package.rglob("cpu.py"), *shared]):
        digest.update(source.read_bytes())
    key = digest.hexdigest()[:16]
    wanted = os.environ.get("NUMBA_CACHE_DIR") or os.path.join(
        os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache"), "triops"
    )
    for base in (wanted, os.path.join(tempfile.gettempdir(), f"triops-{_user()}")):
        directory = os.path.join(base, key)
        try:
            os.makedirs(directory, mode=0o700, exist_ok=True)
            with tempfile.TemporaryFile(dir=directory):
                return directory
        except OSError:
            continue
    return None


def _user() -> str:
    return str(os.getuid()) if hasattr(os, "getuid") else os.environ.get("USERNAME", "user")


def jit(function: Callable[..., Any]) -> Callable[..., Any]:
    """`numba.njit` as every CPU kernel and helper uses it: no GIL, IEEE arithmetic, cached on disk."""
    options: dict[str, Any] = {"nogil": True, "error_model": "numpy"}
    directory = cache_directory()
    if directory is None:
        return numba.njit(**options)(function)  # type: ignore[no-any-return]
    settings: Any = numba.config
    before, settings.CACHE_DIR = settings.CACHE_DIR, directory
    try:
        return numba.njit(cache=True, **options)(function)  # type: ignore[no-any-return]
    finally:
        settings.CACHE_DIR = before


def as_numpy(tensor: torch.Tensor) -> Any:
    """A contiguous CPU tensor's memory as a NumPy array, copied only where it does not lie contiguous."""
    if tensor.requires_grad:
        tensor = tensor.detach()
    return tensor.contiguous().numpy()


def in_huge_pages(tensor: torch.Tensor) -> None:
    """Ask Linux to back a large tensor that is about to be written with huge pages, as NumPy does for its arrays.

    A fresh 16 MB result otherwise costs 4,096 page faults, several times what a fast kernel needs to fill it.
    """
    size = tensor.numel() * tensor.element_size()
    if size >= HUGE_PAGE_BYTES and _madvise is not None:
        begin = -(-tensor.data_ptr() // PAGE) * PAGE
        _madvise(begin, (tensor.data_ptr() + size - begin) // PAGE * PAGE, MADV_HUGEPAGE)


def _find_madvise() -> Callable[[int, int, int], int] | None:
    try:
        function: Any = ctypes.CDLL(None, use_errno=True).madvise
        function.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    except (OSError, AttributeError, TypeError):
        return None
    return function if MADV_HUGEPAGE >= 0 else None


_madvise = _find_madvise()


def run(kernel: Callable[..., Any], count: int, grain: int, *args: Any) -> None:
    """Call `kernel(begin, end, *args)` so that the ranges cover `range(count)`.

    grain: the fewest items worth a thread of their own (about 100 us of work).
    One call on this thread when the work is small or torch is set to one thread, as in a DataLoader
    worker; else chunks of at least `grain` on up to `torch.get_num_threads()` threads.
    """
    threads = min(torch.get_num_threads(), count // grain) if count > grain else 1
    if threads <= 1:
        kernel(0, count, *args)
        return
    chunks = iter(_chunks(count, grain, threads))
    finished: SimpleQueue[BaseException | None] = SimpleQueue()

    def work() -> None:
        error = None
        try:
            for begin, end in chunks:  # next() on a list's iterator is atomic under the GIL
                kernel(begin, end, *args)
        except BaseException as caught:
            error = caught
        finished.put(error)

    # A helper takes a ticket before it begins; when all is done the caller takes those that are left, so that it
    # never waits for a helper that the system has not woken yet.
    tickets = list(range(threads - 1))
    done = np.zeros(threads - 1, np.int64)  # by ticket

    def help_out() -> None:
        ticket = _take(tickets)
        if ticket is not None:
            work()
            done[ticket] = 1

    _workers.hand_out(help_out, threads - 1)
    work()
    running = threads
    while (ticket := _take(tickets)) is not None:
        done[ticket] = 1
        running -= 1
    if running > 1:
        _look_out(done, LOOKS)  # mostly the others are about to finish: to sleep and be woken would take longer
    errors = [finished.get() for _ in range(running)]
    for error in errors:
        if error is not None:
            raise error


def _chunks(count: int, grain: int, threads: int) -> list[tuple[int, int]]:
    """Large ones first, small ones last: threads finish together where the work is uneven or one starts late."""
    chunks, begin = [], 0
    while begin < count:
        end = min(count, begin + max(grain, (count - begin) // (2 * threads)))
        chunks.append((begin, end))
        begin = end
    return chunks


def zeros(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """`torch.zeros` on the threads of `run`.

    torch's own threads are in the way of a kernel's for a while after they have filled a tensor: on two cores, calls
    that used torch's took up to twice as long on two threads as on one.
    """
    return _filled(shape, dtype, 0)


def minus_ones(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    """Integers -1, filled as `zeros` are."""
    return _filled(shape, dtype, 255)


def _filled(shape: tuple[int, ...], dtype: torch.dtype, byte: int) -> torch.Tensor:
    tensor = torch.empty(shape, dtype=dtype)
    if tensor.numel() <= ONE_THREAD:
        return tensor.fill_(-1 if byte else 0)
    in_huge_pages(tensor)
    run(_fill, tensor.numel() * tensor.element_size(), FILL, tensor.view(-1).view(torch.uint8).numpy(), byte)
    return tensor


@jit
def _fill(begin: int, end: int, flat: Any, byte: int) -> None:
    flat[begin:end] = byte


def _take(tickets: list[int]) -> int | None:
    try:
        return tickets.pop()
    except IndexError:
        return None


@intrinsic
def _now(typing_context: Any, array: Any, index: Any) -> Any:
    """array[index] as another thread left it: a plain read might be moved out of a loop."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, args[0]).data
        return builder.load_atomic(builder.gep(data, [args[1]]), "acquire", 8)

    return types.int64(array, types.intp), generate


@jit
def _look_out(flags: Any, looks: int) -> None:
    """Return when no flag is 0 any more, or after so many looks."""
    k = 0
    for _ in range(looks):
        if _now(flags, k):  # type: ignore[call-arg]
            k += 1
            if k == flags.shape[0]:
                break


class _Workers:
    """Daemon threads that take jobs from one queue: less to do at each hand-over than a ThreadPoolExecutor has."""

    def __init__(self) -> None:
        self.jobs: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self.count = 0

    def hand_out(self, job: Callable[[], None], copies: int) -> None:
        while self.count < copies:
            self.count += 1
            threading.Thread(target=self._serve, name=f"triops-{self.count}", daemon=True).start()
        for _ in range(copies):
            self.jobs.put(job)

    def _serve(self) -> None:
        while True:
            self.jobs.get()()


_workers = _Workers()


def _after_fork() -> None:
    """A forked child has none of its parent's threads."""
    global _workers
    _workers = _Workers()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
