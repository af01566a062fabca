"""Whether a call gives the same bits again: on every run, and with any number of CPU threads.

Sums in another order round differently, so a kernel that adds with atomics, or cuts its work by the number of threads,
may give other floats each time. That is measured and reported, not judged. An index that changes is a failure.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from triops.acceptance.diffs import compare

REPEATS = 2
THREADS = (1, 3)  # beside the number that torch is set to


@dataclass(frozen=True)
class Stability:
    """The largest change of a float as a share of the largest value of its output; 0: the same bits."""

    run_to_run: float
    across_threads: float | None = None  # None: not on a CPU
    failures: list[str] = field(default_factory=list)  # of outputs that must not change

    @property
    def worst(self) -> float:
        return max(self.run_to_run, self.across_threads or 0.0)


def measure_stability(
    call: Callable[[], list[Tensor]], first: Sequence[Tensor], *, threads: bool, exact: bool = False
) -> Stability:
    """Call again and compare with what the first call gave.

    threads: also with other numbers of CPU threads.
    exact: floats must not change either.
    """
    failures: list[str] = []
    run_to_run = max(_change(first, call(), exact, "from run to run", failures) for _ in range(REPEATS))
    if not threads:
        return Stability(run_to_run, None, failures)
    across = 0.0
    for count in THREADS:
        with _threads(count):
            across = max(across, _change(first, call(), exact, f"with {count} threads", failures))
    return Stability(run_to_run, across, failures)


def _change(first: Sequence[Tensor], again: Sequence[Tensor], exact: bool, when: str, failures: list[str]) -> float:
    worst = 0.0
    for i, (a, b) in enumerate(zip(first, again, strict=True)):
        if (a.shape, a.dtype) != (b.shape, b.dtype):
            failures.append(f"output {i} changes {when}: {list(b.shape)} instead of {list(a.shape)}")
            return math.inf
        if torch.equal(a, b):
            continue
        found = compare(b, a)
        changed = found.unequal + found.wrong_nan + found.wrong_inf
        worst = max(worst, math.inf if found.wrong_nan or found.wrong_inf else found.peak)
        if changed and (exact or not a.is_floating_point()):
            failures.append(f"output {i} changes {when}: {changed:,} of {a.numel():,} values")
    return worst


@contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
