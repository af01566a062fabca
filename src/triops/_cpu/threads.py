"""How a CPU kernel runs on several threads.

A kernel is a serial Numba function over a range, `kernel(begin, end, *arrays)`, that takes no lock and releases the
GIL. `run` calls it once, or once per chunk on plain Python threads. Numba's own parallel layers are not used: its
OpenMP layer kills a forked DataLoader worker and its workqueue layer aborts when two threads call at once; threads over
nogil kernels do neither.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from queue import SimpleQueue
from typing import Any

import numpy as np
import torch
from numba import types
from numba.extending import intrinsic

from triops._cpu.jit import jit

SPINS = 200_000  # about 0.1 ms


def run(kernel: Callable[..., Any], count: int, grain: int, *args: Any) -> None:
    """Call `kernel(begin, end, *args)` so that the ranges cover `range(count)`.

    grain: the fewest items worth a thread (about 100 us of work).
    One call on this thread when the work is small or torch is set to one thread, as in a DataLoader worker; else chunks
    of at least `grain` on up to `torch.get_num_threads()` threads, of which the caller is one:

        caller   queue one job per helper | take chunks until none is left | withdraw unclaimed jobs | spin | collect
        helper   asleep ........ claim a job | take chunks until none is left | set its done flag | asleep

    A helper that the system has not woken by the time the chunks are gone finds its job withdrawn, so the caller waits
    only for helpers inside a chunk. It spins for 0.1 ms before it blocks: waking up takes longer than most waits.

    When it returns or raises, no kernel runs any more, also where an interrupt ends the wait: kernels may have been
    given addresses, whose memory the caller then frees.
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

    jobs = list(range(threads - 1))  # unclaimed
    done = np.zeros(threads - 1, np.int64)  # by job

    entered: list[None] = []
    left: list[None] = []

    def help_out() -> None:
        entered.append(None)
        job = _claim(jobs)
        if job is not None:
            work()
            done[job] = 1
        left.append(None)

    try:
        _workers.submit(help_out, threads - 1)
        work()
        running = threads
        while (job := _claim(jobs)) is not None:
            done[job] = 1
            running -= 1
        if running > 1:
            _spin(done, SPINS)
        errors = [finished.get() for _ in range(running)]
    except BaseException:
        _abandon(jobs, chunks, entered, left)
        raise
    for error in errors:
        if error is not None:
            raise error


def _abandon(jobs: list[int], chunks: Iterator[tuple[int, int]], entered: list[None], left: list[None]) -> None:
    """Return when all helpers are outside of chunks, and will stay so; interrupts cannot shorten it."""
    while True:
        try:
            jobs.clear()  # who enters from now on leaves at once
            for _ in chunks:
                pass
            while len(left) < len(entered):
                time.sleep(1e-4)
        except KeyboardInterrupt:
            continue
        return


def _chunks(count: int, grain: int, threads: int) -> list[tuple[int, int]]:
    """Large ones first, small ones last: threads finish together where the work is uneven or one starts late."""
    chunks, begin = [], 0
    while begin < count:
        end = min(count, begin + max(grain, (count - begin) // (2 * threads)))
        chunks.append((begin, end))
        begin = end
    return chunks


def _claim(jobs: list[int]) -> int | None:
    """Atomic under the GIL. None when every job is claimed."""
    try:
        return jobs.pop()
    except IndexError:
        return None


@intrinsic
def _load_acquire(typing_context: Any, array: Any, index: Any) -> Any:
    """array[index] as another thread left it: a plain read might be moved out of a loop."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, args[0]).data
        return builder.load_atomic(builder.gep(data, [args[1]]), "acquire", 8)

    return types.int64(array, types.intp), generate


@jit
def _spin(flags: Any, spins: int) -> None:
    """Return when no flag is 0, or after so many reads."""
    k = 0
    for _ in range(spins):
        if _load_acquire(flags, k):  # type: ignore[call-arg]
            k += 1
            if k == flags.shape[0]:
                break


class _Workers:
    """Daemon threads that take jobs from one queue: a job costs less than in a ThreadPoolExecutor."""

    def __init__(self) -> None:
        self.jobs: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self.count = 0

    def submit(self, job: Callable[[], None], copies: int) -> None:
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
