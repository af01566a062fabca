"""Jobs on this machine: threads in this process, and processes of threads where there are more cores than a GIL feeds.

Threads are enough for a few cores, since reading, kernels and NumPy's loops release the GIL; a process costs seconds
and hundreds of megabytes to start.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from triops.data.frames import FrameRef
from triops.data.job import Job, JobError, Outcome

THREADS = 4  # per process
CHUNK = 32  # frames that a process takes at a time
WORTH_PROCESSES = 256  # frames below which starting them takes longer than the work


@dataclass(frozen=True)
class LocalEngine:
    """Runs a job on `workers` threads, in as many processes as they need; 0 for all cores."""

    workers: int = 0

    def __call__(self, job: Job, refs: Sequence[FrameRef]) -> Iterator[Outcome]:
        workers = min(self.workers or cores(), max(len(refs), 1))
        if workers == 1:
            with _one_torch_thread():
                yield from map(job, refs)
            return
        if workers <= THREADS or len(refs) < WORTH_PROCESSES:
            with _one_torch_thread(), ThreadPoolExecutor(workers, "triops-frames") as pool:
                yield from _outcomes(pool, [pool.submit(_frames, job, [ref]) for ref in refs])
            return
        processes = -(-workers // THREADS)
        chunk = min(CHUNK, -(-len(refs) // processes))
        chunks = [refs[k : k + chunk] for k in range(0, len(refs), chunk)]
        # Not forked: threads of torch and Numba do not survive a fork.
        context = multiprocessing.get_context("spawn")
        started = ProcessPoolExecutor(processes, context, _start_process, (-(-workers // processes),))
        try:
            yield from _outcomes(started, [started.submit(_spread, job, part) for part in chunks])
        except BrokenProcessPool:
            raise JobError(
                "a worker process was killed, perhaps for want of memory. Remedy: the same command goes on where "
                "it was; fewer --workers need less memory"
            ) from None
        finally:
            # Not by `with`, which waits for all that was submitted, even after it was told to drop what has not begun.
            started.shutdown(wait=True, cancel_futures=True)


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _outcomes(pool: Executor, futures: Sequence[Future[list[Outcome]]]) -> Iterator[Outcome]:
    """Outcomes as they come. What has not begun is dropped when the caller stops or a frame raises."""
    try:
        for future in as_completed(futures):
            yield from future.result()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def _frames(job: Job, refs: Sequence[FrameRef]) -> list[Outcome]:
    return [job(ref) for ref in refs]


@contextmanager
def _one_torch_thread() -> Iterator[None]:
    """Frames run side by side: a kernel that took several threads would only be in the way of the others."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


_pool: ThreadPoolExecutor | None = None  # of a worker process


def _start_process(threads: int) -> None:
    global _pool
    torch.set_num_threads(1)
    _pool = ThreadPoolExecutor(threads, "triops-frames")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to all processes of a terminal: the first one sees to it
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """End this process when the one that started it was killed: nobody would hand it work, or end it."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _spread(job: Job, refs: Sequence[FrameRef]) -> list[Outcome]:
    assert _pool is not None
    return list(_pool.map(job, refs))
