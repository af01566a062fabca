"""Compile kernels ahead of time, into the caches of Numba and Triton, on all cores."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed

import torch


def devices() -> list[str]:
    """Those that have kernels to compile here."""
    return ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


def warm(operator: str, device: str) -> int:
    """Run the small samples of one operator in every dtype. -> how many calls that took"""
    import triops  # noqa: F401
    from triops import _sample
    from triops._op import OPERATORS

    calls = 0
    for sample in _sample.all_samples():
        if sample.operator == operator and sample.scale != "network":
            for dtype in sample.dtypes:
                OPERATORS[operator](*_sample.to_device(sample.make(dtype), device))
                calls += 1
    return calls


def warm_all(chosen: list[str], workers: int | None = None) -> Iterator[tuple[str, str, int]]:
    """Warm every operator on the chosen devices, each in a process of its own. Yields operator, device and calls."""
    import triops  # noqa: F401
    from triops._op import OPERATORS

    context = multiprocessing.get_context("spawn")  # a forked process cannot use CUDA
    with ProcessPoolExecutor(workers or os.cpu_count() or 1, mp_context=context) as pool:
        tasks = {pool.submit(warm, name, device): (name, device) for device in chosen for name in OPERATORS}
        for task in as_completed(tasks):
            yield *tasks[task], task.result()
