"""Timers for GPU benchmarks: CUDA-graph replay (what the kernels cost) and eager calls (what a user sees)."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch


def graph_us(call: Callable[[], Any], repeats: int = 200) -> float:
    """Median microseconds of one replay. An empty graph reads about 4.5 us, which every figure contains."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return _median_us(graph.replay, repeats)


def eager_us(call: Callable[[], Any], repeats: int = 200) -> float:
    """Median microseconds of a call in a loop that does not wait: host or device, whichever is slower."""
    for _ in range(min(repeats, 10)):
        call()
    torch.cuda.synchronize()
    rounds = []
    for _ in range(5):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(repeats // 5):
            call()
        stop.record()
        torch.cuda.synchronize()
        rounds.append(start.elapsed_time(stop) * 1000 / (repeats // 5))
    return statistics.median(rounds)


def copy_bytes_per_second() -> float:
    """Bytes read and written per second by a large device-to-device copy."""
    source = torch.empty(2**30, dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(source)
    return 2 * source.numel() / (_median_us(lambda: target.copy_(source), 20) * 1e-6)


def _median_us(call: Callable[[], Any], repeats: int) -> float:
    # More than the caches hold is read between runs, so that inputs come from memory as they would in a network.
    # Read, not written: what is left to write back would be charged to the call.
    flush = torch.zeros(64 * 2**20, dtype=torch.int32, device="cuda")
    pairs = []
    for _ in range(repeats):
        flush.max()
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        call()
        stop.record()
        pairs.append((start, stop))
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(stop) * 1000 for start, stop in pairs)
