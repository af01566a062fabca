"""How long a call takes: medians, on a CPU by torch's own benchmark timer, on a GPU by events."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

_FLUSH_BYTES = 256 * 2**20  # more than any GPU's L2


@dataclass(frozen=True)
class Times:
    seconds: float  # on a GPU the replay of a CUDA graph where one can be captured: what the kernels cost
    eager: float  # what a plain loop of calls sees


def measure(call: Callable[[], Any], device: str, budget: float, *, capture: bool = True) -> Times:
    """Median time of one call, warm, within about `budget` seconds; capture=False where no CUDA graph can hold it."""
    if device == "cpu":
        seconds = _cpu_seconds(call, budget)
        return Times(seconds, seconds)
    eager = eager_seconds(call, budget)
    graph = graph_seconds(call, budget) if capture else None
    return Times(graph if graph is not None else events_seconds(call, budget), eager)


def _cpu_seconds(call: Callable[[], Any], budget: float) -> float:
    from torch.utils.benchmark import Timer

    timer = Timer("call()", globals={"call": call}, num_threads=torch.get_num_threads())
    return float(timer.blocked_autorange(min_run_time=budget).median)


def yardstick_ratio(call: Callable[[], Any], budget: float) -> tuple[float, float]:
    """How many times longer a call takes than the yardstick, and how much of that is noise, as a share.

    Both take turns, so that a busy machine slows both. Of each the lower quartile counts: a round in which another
    program ran says nothing about either. The noise is how far the yardstick's median lies above its lower quartile:
    1 % on an idle machine.
    """
    yardstick = _yardstick(torch.get_num_threads())
    yardstick()
    once = _seconds(call, 1)
    repeats = max(1, int(0.001 / max(once, 1e-7)))
    mine, others = list[float](), list[float]()
    stop = time.perf_counter() + budget
    while len(mine) < 8 or (time.perf_counter() < stop and len(mine) < 400):
        mine.append(_seconds(call, repeats) / repeats)
        others.append(_seconds(yardstick, 1))
    mine.sort()
    others.sort()
    quarter, half = len(mine) // 4, len(mine) // 2
    return mine[quarter] / others[quarter], others[half] / others[quarter] - 1


def _seconds(call: Callable[[], Any], repeats: int) -> float:
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    return time.perf_counter() - start


@functools.cache
def _yardstick(threads: int) -> Callable[[], None]:
    """About a millisecond of NumPy: arithmetic on what the caches hold, and reads from all over 16 MB.

    On threads of its own: torch's are in the way of a kernel's for a while after each use.
    """
    small, large = np.linspace(1, 2, 2**14, dtype=np.float32), np.zeros(2**22, np.float32)
    places = np.arange(2**15) * 40_503 % large.size
    pool = ThreadPoolExecutor(threads) if threads > 1 else None

    def part(_: int) -> None:
        for _ in range(20):
            np.sqrt(small * small + small)
        large.take(places)

    def run() -> None:
        list(map(part, range(1)) if pool is None else pool.map(part, range(threads)))

    return run


def eager_seconds(call: Callable[[], Any], budget: float) -> float:
    """Of one call in a loop that does not wait: host or device, whichever is slower."""
    for _ in range(3):
        call()
    rounds, repeats = [], 1
    while repeats < 64 and _loop_seconds(call, repeats) < budget / 5:
        repeats *= 2
    for _ in range(5):
        rounds.append(_loop_seconds(call, repeats) / repeats)
    return statistics.median(rounds)


def _loop_seconds(call: Callable[[], Any], repeats: int) -> float:
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    for _ in range(repeats):
        call()
    stop.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(stop) * 1e-3)


def graph_seconds(call: Callable[[], Any], budget: float) -> float | None:
    """Of one replay of a captured graph (an empty one reads about 4.5 us); None where the call cannot be captured."""
    current, side = torch.cuda.current_stream(), torch.cuda.Stream()
    side.wait_stream(current)
    with torch.cuda.stream(side):
        call()
    current.wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            call()
    except RuntimeError:  # a call that waits for the GPU
        torch.cuda.set_stream(current)  # a capture that fails does not put it back
        torch.cuda.synchronize()
        return None
    return events_seconds(graph.replay, budget)


def events_seconds(call: Callable[[], Any], budget: float) -> float:
    """Median over single calls, before each of which more than the caches hold is read.

    So inputs come from memory as they would in a network. Read, not written: what is left to write back would be
    charged to the call. Meanwhile the host gets ahead, and the events see the device alone.
    """
    flush = torch.zeros(_FLUSH_BYTES // 4, dtype=torch.int32, device="cuda")

    def begin() -> tuple[Any, Any]:
        flush.max()
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        stop.record()
        return start, stop

    def finish(pairs: list[tuple[Any, Any]]) -> float:
        torch.cuda.synchronize()
        return statistics.median(float(start.elapsed_time(stop)) * 1e-3 for start, stop in pairs)

    first = finish([begin()])
    count = min(200, max(5, int(budget / (first + 200e-6))))
    return finish([begin() for _ in range(count)])
