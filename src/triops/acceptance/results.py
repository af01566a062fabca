"""What came of a check: one `Result` per case, one `Report` per run, and its JSON."""

from __future__ import annotations

import math
import os
import platform
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from triops import _info
from triops.acceptance.baseline import Key, Measured
from triops.acceptance.ceilings import Ceilings
from triops.acceptance.stability import Stability
from triops.acceptance.standard import Efficiency, Judgement


@dataclass(frozen=True)
class Result:
    operator: str
    case: str
    scale: str
    backend: str
    dtype: str
    judgements: list[Judgement]
    error: str = ""  # an exception that came instead of a result
    damage: list[str] = field(default_factory=list)  # what was written outside of buffers, or into inputs
    seconds: float | None = None
    eager_seconds: float | None = None
    bytes: int = 0
    ops: int = 0
    efficiency: Efficiency | None = None
    recorded: list[str] = field(default_factory=list)  # what is wrong with the outputs of a case file
    network: str = ""  # the folder of a case file
    calls: int = 1  # of the program that was recorded
    not_run: str = ""  # why a case of which only shapes are known could not be made up
    ratio: float | None = None  # of the time to the yardstick's, see `baseline`
    noise: float = 0.0
    workspace: int | None = None  # bytes beside inputs and outputs
    regressions: list[str] = field(default_factory=list)  # in what it is worse than in `--baseline`
    stability: Stability | None = None

    @property
    def failures(self) -> list[str]:
        several = len(self.judgements) > 1
        found = ([self.error] if self.error else []) + self.damage
        for i, judgement in enumerate(self.judgements):
            found += [f"output {i}: {f}" if several else f for f in judgement.failures]
        return found + (self.stability.failures if self.stability else [])

    @property
    def passed(self) -> bool:
        return not self.failures

    def worst(self, measure: str) -> float | None:
        """The largest of one measure over the outputs; diff4 by its distance from an even share."""
        found = [v for j in self.judgements if (v := getattr(j.diffs, measure)) is not None]
        if measure == "diff4":
            found = [j.diffs.diff4 for j in self.judgements if j.kind != "exact" and j.diffs.diff4 is not None]
            return max(found, key=lambda share: abs(share - 0.5), default=None)
        return max(found, default=None)

    @property
    def flips(self) -> int:
        return sum(j.flips for j in self.judgements)

    @property
    def key(self) -> Key:
        return (self.operator, self.case, self.backend, self.dtype)

    @property
    def measured(self) -> Measured | None:
        return None if self.seconds is None else Measured(self.seconds, self.ratio, self.noise, self.workspace)


@dataclass(frozen=True)
class BadCallResult:
    name: str
    error: str
    failure: str  # empty: refused as it should be


@dataclass(frozen=True)
class Network:
    """What a program has called, by the case files of one folder."""

    name: str
    results: list[Result]

    @property
    def operators(self) -> int:
        return len({r.operator for r in self.results})

    @property
    def calls(self) -> int:
        return sum(r.calls for r in self.results)

    @property
    def seconds(self) -> float:
        """Of all of its calls, those that were timed."""
        return sum(r.calls * r.seconds for r in self.results if r.seconds is not None)

    @property
    def wrong(self) -> int:
        return sum(not r.passed for r in self.results)

    @property
    def not_run(self) -> int:
        return sum(bool(r.not_run) for r in self.results)


@dataclass
class Report:
    device: str
    quick: bool
    seed: int
    environment: dict[str, str]
    ceilings: Ceilings | None
    results: list[Result] = field(default_factory=list)
    bad_calls: list[BadCallResult] = field(default_factory=list)
    baseline: str = ""  # the report that times were compared with
    interrupted_of: int | None = None  # of how many cases, where an interrupt ended the check

    @property
    def failed(self) -> list[Result]:
        return [r for r in self.results if not r.passed]

    @property
    def regressions(self) -> list[Result]:
        return [r for r in self.results if r.regressions]

    @property
    def slow(self) -> list[Result]:
        return [r for r in self.results if r.efficiency and not r.efficiency.reached]

    @property
    def networks(self) -> list[Network]:
        names = dict.fromkeys(r.network for r in self.results if r.network)
        return [Network(name, [r for r in self.results if r.network == name]) for name in names]

    @property
    def not_refused(self) -> list[BadCallResult]:
        return [b for b in self.bad_calls if b.failure]

    @property
    def passed(self) -> bool:
        return not (self.failed or self.regressions or self.not_refused)


def environment() -> dict[str, str]:
    """What a report must say about the machine; two runs with equal "machine" can be compared in time."""
    processor = platform.processor() or platform.machine()
    if Path("/proc/cpuinfo").is_file():
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        processor = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), processor)
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    machine = f"{processor}, {os.cpu_count()} cores, {torch.get_num_threads()} threads"
    return {"cpu": machine, "gpu": gpu, "system": platform.platform(), **_info.versions()}


def as_json(report: Report) -> Any:
    """Everything, as strict JSON can hold it: inf and NaN become words."""
    cases = []
    for r in report.results:
        row = asdict(r)
        row["passed"], row["failures"] = r.passed, r.failures
        if r.efficiency:
            row["efficiency"] |= {
                "bound": r.efficiency.bound,
                "best": r.efficiency.best,
                "reached": r.efficiency.reached,
            }
        cases.append(row)
    whole = {
        "format": 1, "passed": report.passed, "device": report.device, "quick": report.quick, "seed": report.seed,
        "environment": report.environment, "ceilings": asdict(report.ceilings) if report.ceilings else None,
        "baseline": report.baseline, "interrupted_of": report.interrupted_of, "cases": cases,
        "bad_calls": [asdict(b) for b in report.bad_calls],
    }  # fmt: skip
    return _plain(whole)


def show_time(seconds: float | None) -> str:
    """
    >>> show_time(0.01234), show_time(2e-6), show_time(None)
    ('12.3 ms', '2 us', '')
    """
    if seconds is None:
        return ""
    unit, scale = next(((u, s) for u, s in (("s", 1.0), ("ms", 1e3)) if seconds * s >= 1), ("us", 1e6))
    return f"{seconds * scale:.3g} {unit}" if seconds < 1000 else f"{seconds:.0f} s"


def show_bytes(count: int | None) -> str:
    """
    >>> show_bytes(12), show_bytes(1_234_567), show_bytes(None)
    ('12 B', '1.23 MB', '')
    """
    if count is None:
        return ""
    unit, scale = next(((u, s) for u, s in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)) if count >= s), ("B", 1))
    return f"{count / scale:.3g} {unit}"


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
