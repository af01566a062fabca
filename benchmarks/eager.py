"""Plain calls on a GPU, forward and forward with backward: triops against mmcv's compiled operators and torchvision's.

    python benchmarks/eager.py [--mmcv FOLDER] [--only WORD ...] [--seconds N] [--json FILE] [--profile]

The calls are those a user writes, mmcv's through its Python layer, all on the same tensors. A row is the median of
short loops that take turns in one process, after 40 calls. What was slower than a peer the last time comes first. A
star: triops takes longer than the quickest of mmcv and torchvision; below 100 us, more than a tenth longer.
"""

from __future__ import annotations

import argparse
import cProfile
import importlib
import json
import multiprocessing
import pstats
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "src"))

from eager_cases import PEERS, Case, all_cases, import_peers

LAST = Path(__file__).parent / "results" / "eager" / "h200.json"
WARM_CALLS, WARM_SECONDS = 40, 0.2
ROUNDS, FEWEST_ROUNDS, ROW_SECONDS, LOOP_SECONDS, LONGEST_LOOP = 25, 5, 0.4, 0.002, 64
PROFILED_CALLS, PROFILED_LINES = 200, 12


def compile_kernels(name: str) -> None:
    """In a process of its own, which leaves them in Triton's cache."""
    case = next(case for case in all_cases() if case.name == name)
    with suppress(Exception):  # what fails is said where it is timed
        for way in case.ways:
            case.bound(way)["triops"]()
        torch.cuda.synchronize()


def timed(calls: dict[str, Callable[[], Any]]) -> dict[str, float]:
    """Microseconds of a call of each; of one that fails, none."""
    lengths, times = {}, {}
    for name, call in calls.items():
        try:
            warm(call)
            lengths[name] = max(1, min(LONGEST_LOOP, int(LOOP_SECONDS / loop_seconds(call, 2))))
        except Exception as error:
            print(f"  {name} fails: {type(error).__name__}: {str(error).splitlines()[0]}", flush=True)
            continue
        times[name] = list[float]()
    stop = time.perf_counter() + ROW_SECONDS
    for number in range(ROUNDS):
        if number >= FEWEST_ROUNDS and time.perf_counter() > stop:
            break
        for name, length in lengths.items():
            times[name].append(loop_seconds(calls[name], length))
    return {f"{name}_us": round(statistics.median(seconds) * 1e6, 1) for name, seconds in times.items()}


def warm(call: Callable[[], Any]) -> None:
    """Fewer calls where they take long; the first, which may load kernels, does not count as long."""
    loop_seconds(call, 1)
    stop = time.perf_counter() + WARM_SECONDS
    for _ in range(WARM_CALLS - 1):
        loop_seconds(call, 1)
        if time.perf_counter() > stop:
            break


def loop_seconds(call: Callable[[], Any], length: int) -> float:
    """Of one call, host and device: the last is waited for."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(length):
        call()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / length


def ratio(row: dict[str, Any]) -> float:
    """How many times longer triops takes than the quickest peer."""
    return float(row["triops_us"] / min(row[f"{name}_us"] for name in PEERS if f"{name}_us" in row))


def is_lost(row: dict[str, Any]) -> bool:
    return ratio(row) > (1.1 if row["triops_us"] < 100 else 1.0)


def in_turn(cases: list[Case]) -> list[tuple[Case, str]]:
    """All rows, the ones that were lost the last time first, the worst of them at the head."""
    last = {(row["case"], row["way"]): row for row in json.loads(LAST.read_text())["rows"]}
    before = {key: ratio(row) for key, row in last.items() if is_lost(row)}
    rows = [(case, way) for case in cases for way in case.ways]
    return sorted(rows, key=lambda row: -before.get((row[0].name, row[1]), 0.0))


def line(row: dict[str, Any]) -> str:
    times = [f"{row.get(f'{name}_us', ''):>10}" for name in ("triops", *PEERS)]
    return f"{row['case']:56} {row['way']:8}{' '.join(times)} {ratio(row):7.2f}{' *' if is_lost(row) else ''}"


def profile(case: Case, way: str) -> None:
    """Where the host's time goes, the backward's too, which torch would otherwise run on a thread of its own."""
    call = case.bound(way)["triops"]
    profiler = cProfile.Profile()
    with torch.autograd.set_multithreading_enabled(False):
        warm(call)
        profiler.enable()
        for _ in range(PROFILED_CALLS):
            call()
        profiler.disable()
    print(f"\n{case.name}, {way}: us a call, in the function itself and with what it calls; calls")
    entries = [(key, *numbers[1:4]) for key, numbers in pstats.Stats(profiler).stats.items()]  # type: ignore[attr-defined]
    for (file, number, name), count, own, total in sorted(entries, key=lambda entry: -entry[2])[:PROFILED_LINES]:
        where = f"{'/'.join(Path(file).parts[-2:])}:{number} {name}" if number else name
        times = " ".join(f"{seconds * 1e6 / PROFILED_CALLS:8.1f}" for seconds in (own, total))
        print(f"{times} {count / PROFILED_CALLS:6.1f}  {where}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mmcv", type=Path, metavar="FOLDER", help="where mmcv lies, unless it is installed")
    parser.add_argument("--only", nargs="+", default=[""], metavar="WORD", help="cases whose name holds one of these")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="no row begins after these")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--profile", action="store_true", help="where the host's time goes in the rows that are lost")
    parser.add_argument("--jobs", type=int, default=8, help="processes that compile kernels before anything is timed")
    options = parser.parse_args()
    begun = time.perf_counter()
    if not torch.cuda.is_available():
        print("benchmarks/eager.py needs a GPU")
        return 0
    torch.backends.cuda.matmul.allow_tf32 = False
    cases = [case for case in all_cases() if any(word in case.name for word in options.only)]
    if options.jobs > 1 and cases:
        with ProcessPoolExecutor(options.jobs, multiprocessing.get_context("spawn")) as pool:
            list(pool.map(compile_kernels, [case.name for case in cases]))
        print(f"compiled in {time.perf_counter() - begun:.0f} s", flush=True)
    versions = import_peers(options.mmcv)
    facts = {"machine": torch.cuda.get_device_name(), "date": time.strftime("%Y-%m-%d")}
    facts["torch"], facts["triton"] = torch.__version__, importlib.import_module("triton").__version__
    for name in PEERS:
        facts[name] = versions.get(name, "none")
    facts["mmcv"] += ", its CUDA kernels and its Python layer" if "mmcv" in versions else ""
    facts["note"] = "median of interleaved short loops in one process, peers in turns, 40 calls before"
    places = {(case.name, way): number for number, (case, way) in enumerate((c, w) for c in cases for w in c.ways)}
    found: dict[int, dict[str, Any]] = {}
    lost, left = [], 0
    print(f"{'case':56} {'way':8}{'triops':>10} {'mmcv':>10} {'torchvision':>11} {'ratio':>6}")
    for case, way in in_turn(cases):
        if time.perf_counter() - begun > options.seconds:
            left += 1
            continue
        try:
            times = timed(case.bound(way))
        except Exception as error:
            print(f"{case.name}, {way}: {type(error).__name__}: {str(error).splitlines()[0]}", flush=True)
            continue
        if "triops_us" not in times or not any(f"{name}_us" in times for name in PEERS):
            continue
        row = {"case": case.name, "way": way, **times}
        found[places[case.name, way]] = row
        print(line(row), flush=True)
        if is_lost(row):
            lost.append((case, way))
        if options.json:  # after every row: a run that is cut off keeps what it has
            rows = [found[number] for number in sorted(found)]
            options.json.write_text(json.dumps({**facts, "rows": rows}, indent=1) + "\n")
    print(f"{len(lost)} of {len(found)} rows lost, {left} left out, {time.perf_counter() - begun:.0f} s")
    if options.profile:
        for case, way in lost:
            profile(case, way)
    return 0


if __name__ == "__main__":
    sys.exit(main())
