"""What a second CPU thread gains: every network-scale sample that takes one thread at least 0.4 ms.

    python benchmarks/threads.py [OPERATOR ...] [--out FOLDER] [--date YYYY-MM-DD] [--machine NAME]

One and two threads take turns in one process. The turns of a sample are spread over the whole run, since two virtual
cores may be two halves of one real core for a while; a ratio is the median over them. Writes `cpu-threads.json`.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba
import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "src"))

from triops import _sample
from triops._op import OPERATORS, Operator

LEAST, MOST = 0.4e-3, 0.25  # seconds on one thread
TURNS = 25


def median_seconds(call: Callable[[], Any], repeats: int) -> float:
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


class Row:
    """One sample, and the seconds it took on one and on two threads, turn by turn."""

    def __init__(self, operator: Operator, sample: _sample.Sample) -> None:
        args = sample.make(sample.dtypes[0])
        self.operator, self.case, self.call = operator.name, sample.name, lambda: operator(*args)
        torch.set_num_threads(1)
        self.call()
        self.seconds = median_seconds(self.call, 3)
        self.turns: list[tuple[float, float]] = []

    def take_turn(self) -> None:
        repeats = max(3, min(15, int(0.03 / self.seconds)))
        torch.set_num_threads(1)
        one = median_seconds(self.call, repeats)
        torch.set_num_threads(2)
        self.turns.append((one, median_seconds(self.call, repeats)))

    def result(self) -> dict[str, Any]:
        one, two = (statistics.median(column) for column in zip(*self.turns, strict=True))
        ratio = statistics.median(a / b for a, b in self.turns)
        times = {"one_ms": round(one * 1e3, 2), "two_ms": round(two * 1e3, 2), "ratio": round(ratio, 2)}
        return {"operator": self.operator, "case": self.case, **times}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("operators", nargs="*")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("results"))
    parser.add_argument("--date", default=datetime.date.today().isoformat())
    parser.add_argument("--machine", default=platform.processor() or platform.machine())
    options = parser.parse_args()
    rows = []
    for sample in _sample.all_samples():
        operator = OPERATORS[sample.operator]
        if sample.scale == "network" and (not options.operators or operator.name in options.operators):
            row = Row(operator, sample)
            if LEAST <= row.seconds <= MOST:
                rows.append(row)
    for turn in range(TURNS):
        print(f"turn {turn + 1} of {TURNS}, {len(rows)} samples", flush=True)
        for row in rows:
            row.take_turn()
    results = [row.result() for row in rows]
    for result in results:
        print(" | ".join(f"{key} {value}" for key, value in result.items()))
    head = {"machine": options.machine, "date": options.date, "torch": torch.__version__, "numba": numba.__version__}
    path = options.out / "cpu-threads.json"
    path.write_text(json.dumps({**head, "must_ratio": 1.3, "threads": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
