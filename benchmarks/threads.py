"""What a second CPU thread gains: every network-scale sample that takes one thread at least 0.4 ms.

    python benchmarks/threads.py [OPERATOR ...] [--out FOLDER] [--date YYYY-MM-DD] [--machine NAME]

One and two threads take turns in one process; a ratio is the median over the turns. Two virtual cores are at times two
halves of one real core: before and after each turn two threads that share nothing run beside each other, and where
there are turns in which those did 1.7 times the work of one, only these count. Writes `cpu-threads.json`.
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
from threading import Thread
from typing import Any

import numba
import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "src"))

from triops import _sample
from triops._launch import jit
from triops._op import OPERATORS

LEAST, MOST = 0.4e-3, 0.25  # seconds on one thread
TURNS = 25
TWO_CORES = 1.7


def median_seconds(call: Callable[[], Any], repeats: int) -> float:
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


@jit
def _busy(numbers: Any, rounds: int) -> int:
    total = 0
    for r in range(rounds):
        for i in range(numbers.shape[0]):
            total += numbers[i] ^ r
    return total


def cores() -> float:
    """How many times the work of one thread two threads get done that have nothing in common."""
    numbers, rounds = np.arange(1024), 200_000  # in the first-level cache, and all that a core can do at a time
    start = time.perf_counter()
    _busy(numbers, rounds)
    middle = time.perf_counter()
    pair = [Thread(target=_busy, args=(numbers, rounds)) for _ in range(2)]
    for thread in pair:
        thread.start()
    for thread in pair:
        thread.join()
    return 2 * (middle - start) / (time.perf_counter() - middle)


def measure(call: Callable[[], Any]) -> dict[str, float] | None:
    torch.set_num_threads(1)
    call()
    one = median_seconds(call, 3)
    if not LEAST <= one <= MOST:
        return None
    repeats = max(3, min(15, int(0.03 / one)))
    turns, before = [], cores()
    for _ in range(TURNS):
        seconds = []
        for threads in (1, 2):
            torch.set_num_threads(threads)
            seconds.append(median_seconds(call, repeats))
        after = cores()
        turns.append((*seconds, min(before, after)))
        before = after
    counted = [turn for turn in turns if turn[2] >= TWO_CORES] or turns
    first, second, found = (statistics.median(column) for column in zip(*counted, strict=True))
    return {
        "one_ms": round(first * 1e3, 2),
        "two_ms": round(second * 1e3, 2),
        "ratio": round(statistics.median(a / b for a, b, _ in counted), 2),
        "turns": len(counted),
        "cores": round(found, 2),
        "ratio_of_all_turns": round(statistics.median(a / b for a, b, _ in turns), 2),
    }


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
        if sample.scale != "network" or (options.operators and operator.name not in options.operators):
            continue
        args = sample.make(sample.dtypes[0])
        row = measure(lambda operator=operator, args=args: operator(*args))  # type: ignore[misc]
        if row is not None:
            rows.append({"operator": operator.name, "case": sample.name, **row})
            print(" | ".join(f"{key} {value}" for key, value in rows[-1].items()), flush=True)
    head = {"machine": options.machine, "date": options.date, "torch": torch.__version__, "numba": numba.__version__}
    path = options.out / "cpu-threads.json"
    path.write_text(json.dumps({**head, "must_ratio": 1.3, "threads": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
