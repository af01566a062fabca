"""Measure operators on this machine's GPU: every network-scale sample, judged by the acceptance standard, then timed.

    python benchmarks/gpu.py [OPERATOR ...] [--jobs 8] [--seconds 300] [--out FOLDER] [--date YYYY-MM-DD]

Prints a line per case and writes `<gpu>-<folder of the operator>.json`. Needs torch and triton only.

Everything is done in steps: inputs are made and kernels compiled; calls are timed, one at a time; answers are compared
with the reference; the reference is timed, one call at a time. With --jobs the steps that are not timed run side by
side. What --seconds leave no time for is taken from the file that is there (the time of the reference), or left out.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import multiprocessing
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from queue import Empty
from threading import BrokenBarrierError
from typing import Any
from unittest import mock

import torch
import triton

sys.path.insert(0, str(Path(__file__).parent.parent / "src"))

from triops import _sample
from triops._op import OPERATORS, Operator
from triops.acceptance.ceilings import measured
from triops.acceptance.runner import references
from triops.acceptance.standard import judge
from triops.acceptance.timing import eager_seconds, graph_seconds

# {operator: {case: {dtype: [must, aim]}}}, and a third number where an eager call has a bar of its own
BARS = json.loads(Path(__file__).with_name("bars.json").read_text())
TF32 = "float32 (TF32)"
PEERS = ("torchvision", "mmcv")  # compiled libraries that are timed where they are installed
KEY = ("operator", "case", "dtype")
Key = tuple[str, str, str]


def graph_us(call: Callable[[], Any]) -> float:
    """The median replay of a CUDA graph: what the kernels cost."""
    seconds = graph_seconds(call, budget=0.1)
    if seconds is None:
        raise RuntimeError("no CUDA graph can hold this call")
    return round(seconds * 1e6, 1)


def eager_us(call: Callable[[], Any], rounds: int = 5) -> float:
    return eager_and_host_us(call, rounds)[0]


def eager_and_host_us(call: Callable[[], Any], rounds: int) -> tuple[float, float]:
    """What a user sees in a plain loop where nobody else is on the core, and a yardstick: a loop of plain Python.

    Eager calls are host time, and on a shared machine the same line of Python may take twice as long a second later.
    So of several rounds the one counts that had the quickest yardstick before and after it, whatever the call took.
    """
    found, before = [], _python_seconds()
    for _ in range(rounds):
        seconds = eager_seconds(call, budget=0.05)
        after = _python_seconds()
        found.append((before + after, seconds))
        before = after
    host, seconds = min(found)
    return round(seconds * 1e6, 1), round(host / 2 * 1e6)


def _python_seconds() -> float:
    start = time.perf_counter()
    for _ in range(50_000):
        pass
    return time.perf_counter() - start


def formats(sample: _sample.Sample) -> list[tuple[str, torch.dtype]]:
    """The names and dtypes to measure: products of matrices come in all that a GPU multiplies."""
    wanted = [torch.float32, torch.float16]
    is_matrix = _sample.standard_of(OPERATORS[sample.operator]).arithmetic == "matrix"
    if is_matrix:
        wanted.append(torch.bfloat16)
    found = [d for d in wanted if d in sample.dtypes] or list(sample.dtypes[:1])
    named = [(str(d).removeprefix("torch."), d) for d in found]
    return [*named, (TF32, torch.float32)] if is_matrix else named


@dataclass
class Case:
    """A sample in one dtype, from input to result."""

    operator: Operator
    sample: _sample.Sample
    name: str  # of the dtype
    dtype: torch.dtype
    args: tuple[Any, ...] = ()

    @property
    def key(self) -> Key:
        return self.operator.name, self.sample.name, self.name

    @property
    def bar(self) -> list[float]:
        found: list[float] = BARS.get(self.operator.name, {}).get(self.sample.name, {}).get(self.name, [])
        return found

    def call(self) -> Any:
        return self.operator(*self.args)

    @contextmanager
    def on_gpu(self) -> Iterator[None]:
        """Inputs lie there in the steps that read them alone: the other cases, and processes, need the memory too."""
        kept, self.args = self.args, _sample.to_device(self.args, "cuda")
        try:
            yield
        finally:
            self.args = kept
            torch.cuda.synchronize()
            torch.cuda.empty_cache()

    @contextmanager
    def as_named(self) -> Iterator[None]:
        torch.backends.cuda.matmul.allow_tf32 = self.name == TF32
        try:
            yield
        finally:
            torch.backends.cuda.matmul.allow_tf32 = False

    def prepare(self, bandwidth: float) -> dict[str, Any]:
        self.args = self.sample.make(self.dtype)
        with self.on_gpu(), self.as_named():
            self.call()
        work = _sample.module_of(self.operator).work(self.operator.name, self.args)
        return {"floor_us": round(work.bytes / bandwidth * 1e6, 1)}

    def time(self) -> dict[str, Any]:
        with self.on_gpu(), self.as_named():
            return self._time()

    def _time(self) -> dict[str, Any]:
        operator, bar = self.operator, self.bar
        row: dict[str, Any] = {}
        row["eager_us"], row["python_us"] = eager_and_host_us(self.call, 40 if len(bar) > 2 else 3)
        if operator.name == "get_indice_pairs":
            row["graph_us"] = graph_us(lambda: _without_waiting(operator, self.args))
        elif not operator.dynamic_output:
            row["graph_us"] = graph_us(self.call)
        for peer, call in _sample.module_of(operator).baselines(operator.name).items():
            if peer in PEERS:
                row[f"{peer}_us"] = peer_us(call, self.args)
        row["workspace_mib"] = workspace_mib(self.call)
        if bar:
            row["must_us"], row["aim_us"] = bar[:2]
            if len(bar) > 2:
                row["eager_must_us"] = bar[2]
        return row

    def check(self) -> dict[str, Any]:
        with self.on_gpu():
            return self._check()

    def _check(self) -> dict[str, Any]:
        operator, args = self.operator, self.args
        with self.as_named():
            result = self.call()
        standard = _sample.standard_of(operator)
        if self.name == TF32:
            standard = replace(standard, floats="static", float32=standard.half)
        judgements = judge(_sample.specified(operator, args, result), *references(operator, args), standard)
        row: dict[str, Any] = {"equals_reference": all(j.passed for j in judgements)}
        peaks = [j.diffs.peak for j in judgements if j.kind != "exact"]
        if peaks:  # the largest error as a share of the largest value
            row["peak_error"] = float(f"{max(peaks):.2g}")
        if not row["equals_reference"]:
            row["failures"] = [f for j in judgements for f in j.failures]
        return row

    def time_reference(self) -> dict[str, Any]:
        with self.on_gpu():
            return {"reference_us": round(reference_us(self.operator, self.args), 1)}


def cases(operators: list[str]) -> list[Case]:
    found = [
        Case(OPERATORS[sample.operator], sample, name, dtype)
        for sample in _sample.all_samples()
        if sample.scale == "network" and (not operators or sample.operator in operators)
        for name, dtype in formats(sample)
    ]
    return sorted(found, key=lambda case: not case.bar)  # those with a bar first, should the time end


def run_cases(
    operators: list[str], bandwidth: float, seconds: float, report: Callable[[Key, dict[str, Any]], None],
    take: Callable[[], int], alone: AbstractContextManager[Any], wait: Callable[[], Any],
) -> None:  # fmt: skip
    """All steps for the cases that `take` gives this process."""
    begun, everything, mine = time.perf_counter(), cases(operators), list[Case]()
    while (number := take()) < len(everything):
        found = attempt(lambda case: case.prepare(bandwidth), everything[number])
        report(everything[number].key, found)
        if "failures" not in found:
            mine.append(everything[number])
    steps: list[tuple[Callable[[Case], dict[str, Any]], AbstractContextManager[Any], float]] = [
        (Case.time, alone, 0.7), (Case.check, nullcontext(), 0.9), (Case.time_reference, alone, 1.0),
    ]  # fmt: skip
    for step, turn, share in steps:
        torch.cuda.empty_cache()  # a reference leaves blocks behind that a later call may be slower in
        wait()
        for case in mine:
            if time.perf_counter() < begun + share * seconds:
                with turn:
                    report(case.key, attempt(step, case))
    wait()


def attempt(step: Callable[[Case], dict[str, Any]], case: Case) -> dict[str, Any]:
    """What a step finds; one case that fails is no reason to measure nothing else."""
    for more in (*range(4), None):
        try:
            return step(case)
        except torch.OutOfMemoryError as error:  # others hold it; they are done with it soon
            failure = repr(error)
        except Exception as error:
            return {"equals_reference": False, "failures": [repr(error)[:500]]}
        if more is not None:
            torch.cuda.empty_cache()
            time.sleep(1 + more)
    return {"failures": [failure[:500]]}


def run_beside(operators: list[str], bandwidth: float, seconds: float, shared: Any) -> None:
    """`run_cases` as one of several processes."""
    queue, counter, lock, barrier = shared

    def take() -> int:
        with counter.get_lock():
            counter.value += 1
            return int(counter.value) - 1

    def wait() -> None:
        with suppress(BrokenBarrierError):  # another process has ended: what is left is measured all the same
            barrier.wait()

    try:
        run_cases(operators, bandwidth, seconds, lambda *found: queue.put(found), take, lock, wait)
    except Exception as error:
        barrier.abort()
        queue.put((None, repr(error)))
        raise
    queue.put((None, ""))


def peer_us(call: Callable[..., Any], args: tuple[Any, ...]) -> float | None:
    """What a peer takes, in a graph where one can hold it; None where it refuses the call."""
    try:
        seconds = graph_seconds(lambda: call(*args), budget=0.1)
        return round(seconds * 1e6, 1) if seconds is not None else eager_us(lambda: call(*args))
    except (RuntimeError, TypeError, ValueError):
        return None


def _without_waiting(operator: Operator, args: tuple[Any, ...]) -> Any:
    """All kernels of a rulebook. A graph cannot wait for the number of outputs, so they are not cut to it."""
    from triops._gpu.pinned import PinnedCounter

    def pass_by(counter: PinnedCounter) -> int:
        counter.awaited = False
        return 1

    with mock.patch.object(PinnedCounter, "wait", pass_by):
        return operator.kernel("gpu")(*args)


def kernels_us(sample: _sample.Sample, repeats: int = 10) -> dict[str, float]:
    """How the time on the device divides among kernels, with warm caches.

    After everything else: eager calls read some 20 us more in a process in which the profiler had run before.
    """
    args = _sample.to_device(sample.make(sample.dtypes[0]), "cuda")
    call = partial(OPERATORS[sample.operator], *args)
    call()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(repeats):
            call()
        torch.cuda.synchronize()
    found = [(e.key, e.self_device_time_total / repeats) for e in profile.key_averages()]
    return {key.strip("_")[:40]: round(us, 1) for key, us in found if us > 0}


def workspace_mib(call: Callable[[], Any]) -> float:
    """The most memory that a call holds above what it returns."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    result = call()
    torch.cuda.synchronize()
    return round((torch.cuda.max_memory_allocated() - before - _sample.bytes_of(result)) / 2**20, 1)


def reference_us(operator: Operator, args: tuple[Any, ...]) -> float:
    """A slow reference runs once, and once before, so that no set-up is charged to it."""
    operator.reference(*args)
    torch.cuda.synchronize()
    start = time.perf_counter()
    operator.reference(*args)
    torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    return seconds * 1e6 if seconds > 0.05 else eager_us(lambda: operator.reference(*args))


def preparation() -> dict[str, Any]:
    """What `Rulebook.prepared()` costs, once per rulebook."""
    from triops.ops.rulebook import row_tiles
    from triops.ops.sparse_conv.samples import lidar

    table = lidar().gather.cuda()
    return {
        "operator": "sparse_conv", "case": "preparing a rulebook, submanifold, 248636 sites", "dtype": "int32",
        "graph_us": graph_us(lambda: row_tiles(table, table.shape[1])),
        "eager_us": eager_us(lambda: row_tiles(table, table.shape[1])), "must_us": 80, "aim_us": 50,
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("operators", nargs="*")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("results"))
    parser.add_argument("--date", default=datetime.date.today().isoformat())
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="no step begins after these")
    options = parser.parse_args()
    bandwidth = measured("cuda").bandwidth
    machine = torch.cuda.get_device_name()
    print(f"{machine}: copy {bandwidth / 1e12:.2f} TB/s, torch {torch.__version__}, triton {triton.__version__}")
    head = {"machine": machine, "date": options.date, "torch": torch.__version__, "triton": triton.__version__}
    head["copy_bytes_per_second"] = bandwidth
    options.out.mkdir(parents=True, exist_ok=True)
    places = {c.key: c.operator.package.rpartition(".")[2] for c in cases(options.operators)}
    rows: dict[Key, dict[str, Any]] = {key: dict(zip(KEY, key, strict=True)) for key in places}

    def path(name: str) -> Path:
        return options.out / f"{machine.split()[-1].lower()}-{name}.json"

    before = {name: json.loads(path(name).read_text()) for name in {*places.values()} if path(name).exists()}
    earlier = {tuple(row.get(k) for k in KEY): row for file in before.values() for row in file["cases"]}

    def write(name: str, more: list[dict[str, Any]] | None = None) -> None:
        """After every step of a case: a run that is cut off keeps what it has."""
        found = [rows[key] for key, place in places.items() if place == name and "eager_us" in rows[key]]
        for row in found:
            old = earlier.get(tuple(row[k] for k in KEY), {})
            if "reference_us" in old:
                row.setdefault("reference_us", old["reference_us"])
        if found:
            path(name).write_text(json.dumps({**head, "cases": [*found, *(more or [])]}, indent=1) + "\n")

    def report(key: Key, found: dict[str, Any]) -> None:
        rows[key].update(found)
        if "eager_us" in found or "equals_reference" in found:
            print(" | ".join([*key, *(f"{k} {v}" for k, v in found.items())]), flush=True)
        write(places[key])

    if options.jobs == 1:
        numbers = itertools.count()
        run_cases(
            options.operators, bandwidth, options.seconds, report, lambda: next(numbers), nullcontext(), lambda: None
        )
    else:
        beside(options, bandwidth, report)
    preparations = [preparation()] if not options.operators or "sparse_conv" in options.operators else []
    for row in (r for key, r in rows.items() if key[0] == "get_indice_pairs"):
        for sample in _sample.all_samples():
            if row["operator"] == sample.operator and row["case"] == sample.name:
                row["kernels_us"] = kernels_us(sample)
    for name in {"sparse_conv", "get_indice_pairs"} & {*places.values()}:
        write(name, preparations if name == "sparse_conv" else None)
    return 0 if all(row.get("equals_reference", True) for row in rows.values()) else 1


def beside(options: Any, bandwidth: float, report: Callable[[Key, dict[str, Any]], None]) -> None:
    """`run_cases` in several processes; only one at a time times calls."""
    context = multiprocessing.get_context("spawn")
    shared = context.Queue(), context.Value("i", 0), context.Lock(), context.Barrier(options.jobs)
    arguments = options.operators, bandwidth, options.seconds, shared
    processes = [context.Process(target=run_beside, args=arguments) for _ in range(options.jobs)]
    for process in processes:
        process.start()
    left = options.jobs
    while left:
        try:
            key, found = shared[0].get(timeout=5.0)
        except Empty:
            if any(process.exitcode for process in processes):  # killed, without a word
                shared[3].abort()
            if all(process.exitcode is not None for process in processes):
                break
            continue
        if key is None:
            left -= 1
            if found:
                print(f"a process ended with {found}", flush=True)
        else:
            report(key, found)
    for process in processes:
        process.join()


if __name__ == "__main__":
    sys.exit(main())
