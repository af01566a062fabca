"""Timing for the command line: a call against its reference and its peers, interleaved in one process."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from triops import _sample
from triops._compare import difference
from triops._op import OPERATORS


@dataclass
class Row:
    """One sample of one operator, measured."""

    operator: str
    case: str
    dtype: str
    device: str
    right: bool  # equal to the reference; no speed-up is worth a word where it is not
    seconds: float
    bytes: int
    ops: int
    others: dict[str, float] = field(default_factory=dict)  # seconds of the reference and of each peer

    @property
    def gigabytes_per_second(self) -> float:
        return self.bytes / self.seconds / 1e9

    def speed_up(self, other: str) -> float | None:
        return self.others[other] / self.seconds if self.right and other in self.others else None


def interleaved(calls: dict[str, Callable[[], Any]], budget: float) -> dict[str, float]:
    """Median seconds of each call. They take turns, so that a noisy machine disturbs all of them alike."""
    for call in calls.values():
        call()
    times: dict[str, list[float]] = {name: [] for name in calls}
    stop = time.perf_counter() + budget
    while len(next(iter(times.values()))) < 3 or time.perf_counter() < stop:
        for name, call in calls.items():
            # a slow reference is run three times and no more; a fast kernel takes its place in the meantime
            if len(times[name]) >= 3 and times[name][-1] > budget / 10:
                continue
            _synchronise()
            start = time.perf_counter()
            call()
            _synchronise()
            times[name].append(time.perf_counter() - start)
            if len(times[name]) >= 2000:
                return {n: statistics.median(t) for n, t in times.items()}
    return {name: statistics.median(t) for name, t in times.items()}


def _synchronise() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def rows(operators: list[str], device: str, *, budget: float = 1.0) -> Iterator[Row]:
    """Measure the network-scale samples of the chosen operators one by one, in float32 where they take it."""
    for sample in chosen(operators):
        operator = OPERATORS[sample.operator]
        module = _sample.module_of(operator)
        use = torch.float32 if torch.float32 in sample.dtypes else sample.dtypes[0]
        args = _sample.to_device(sample.make(use), device)
        peer_calls = {"reference": operator.reference, **module.baselines(operator.name)}
        calls: dict[str, Callable[[], Any]] = {"triops": lambda o=operator, a=args: o(*a)}  # type: ignore[misc]
        seconds: dict[str, float] = {}
        got, right = operator(*args), True
        for name, peer in peer_calls.items():
            _synchronise()
            start = time.perf_counter()
            answer = peer(*args)
            _synchronise()
            once = time.perf_counter() - start
            if name == "reference":
                ours, theirs = (_sample.specified(operator, args, r) for r in (got, answer))
                right = not difference(ours, theirs, _sample.standard_of(operator).error_scale)
            if once > 2 * budget:
                seconds[name] = once  # so slow that one run says enough
            else:
                calls[name] = lambda p=peer, a=args: p(*a)  # type: ignore[misc]
        seconds.update(interleaved(calls, budget))
        work = module.work(operator.name, args)
        yield Row(
            operator.name, sample.name, str(use).removeprefix("torch."), device, right,
            seconds.pop("triops"), work.bytes, work.ops, seconds,
        )  # fmt: skip


def chosen(operators: list[str]) -> list[_sample.Sample]:
    """The samples that `rows` will measure."""
    return [s for s in _sample.all_samples() if s.scale == "network" and (not operators or s.operator in operators)]
