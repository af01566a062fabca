"""Measure operators on this machine's GPU: every network-scale sample, judged by the acceptance standard, then timed.

    python benchmarks/gpu.py [OPERATOR ...] [--out FOLDER] [--date YYYY-MM-DD]

Prints one table and writes `<gpu>-<folder of the operator>.json`. Needs torch and triton only.
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
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


def graph_us(call: Callable[[], Any]) -> float:
    """The median replay of a CUDA graph: what the kernels cost."""
    seconds = graph_seconds(call, budget=0.2)
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


def measure(
    operator: Operator, sample: _sample.Sample, name: str, dtype: torch.dtype, bandwidth: float
) -> dict[str, Any]:
    torch.backends.cuda.matmul.allow_tf32 = name == TF32
    args = _sample.to_device(sample.make(dtype), "cuda")
    work = _sample.module_of(operator).work(operator.name, args)
    bar = BARS.get(operator.name, {}).get(sample.name, {}).get(name, [])
    row: dict[str, Any] = {"operator": operator.name, "case": sample.name, "dtype": name}
    # Times come before the references, which leave the allocator with blocks that a later call may be slower in.
    rounds = 40 if len(bar) > 2 else 5
    row["eager_us"], row["python_us"] = eager_and_host_us(lambda: operator(*args), rounds)
    if operator.name == "get_indice_pairs":
        row["graph_us"] = graph_us(lambda: _without_waiting(operator, args))
    elif not operator.dynamic_output:
        row["graph_us"] = graph_us(lambda: operator(*args))
    for peer, call in _sample.module_of(operator).baselines(operator.name).items():
        if peer in PEERS:
            row[f"{peer}_us"] = peer_us(call, args)
    row["floor_us"] = round(work.bytes / bandwidth * 1e6, 1)
    row["workspace_mib"] = workspace_mib(lambda: operator(*args))
    result = operator(*args)
    torch.backends.cuda.matmul.allow_tf32 = False
    row["reference_us"] = round(reference_us(operator, args), 1)
    standard = _sample.standard_of(operator)
    if name == TF32:
        standard = replace(standard, floats="static", float32=standard.half)
    judgements = judge(_sample.specified(operator, args, result), *references(operator, args), standard)
    row["equals_reference"] = all(j.passed for j in judgements)
    peaks = [j.diffs.peak for j in judgements if j.kind != "exact"]
    if peaks:  # the largest error as a share of the largest value
        row["peak_error"] = float(f"{max(peaks):.2g}")
    if not row["equals_reference"]:
        row["failures"] = [f for j in judgements for f in j.failures]
    if bar:
        row["must_us"], row["aim_us"] = bar[:2]
        if len(bar) > 2:
            row["eager_must_us"] = bar[2]
    return row


def peer_us(call: Callable[..., Any], args: tuple[Any, ...]) -> float | None:
    """What a peer takes, in a graph where one can hold it; None where it refuses the call."""
    try:
        seconds = graph_seconds(lambda: call(*args), budget=0.2)
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
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("operators", nargs="*")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("results"))
    parser.add_argument("--date", default=datetime.date.today().isoformat())
    options = parser.parse_args()
    bandwidth = measured("cuda").bandwidth
    machine = torch.cuda.get_device_name()
    print(f"{machine}: copy {bandwidth / 1e12:.2f} TB/s, torch {torch.__version__}, triton {triton.__version__}")
    head = {"machine": machine, "date": options.date, "torch": torch.__version__, "triton": triton.__version__}
    head["copy_bytes_per_second"] = bandwidth
    options.out.mkdir(parents=True, exist_ok=True)
    files: dict[str, list[dict[str, Any]]] = {}

    def write(name: str) -> None:
        """After every sample: a run that is cut off keeps what it has."""
        path = options.out / f"{machine.split()[-1].lower()}-{name}.json"
        path.write_text(json.dumps({**head, "cases": files[name]}, indent=1) + "\n")

    for sample in _sample.all_samples():
        operator = OPERATORS[sample.operator]
        if sample.scale != "network" or (options.operators and operator.name not in options.operators):
            continue
        for name, dtype in formats(sample):
            row = measure(operator, sample, name, dtype, bandwidth)
            files.setdefault(operator.package.rpartition(".")[2], []).append(row)
            print(" | ".join(f"{key} {value}" for key, value in row.items()), flush=True)
        write(operator.package.rpartition(".")[2])
    if not options.operators or "sparse_conv" in options.operators:
        files["sparse_conv"].append(row := preparation())
        print(" | ".join(f"{key} {value}" for key, value in row.items()))
    for row in files.get("get_indice_pairs", []):
        for sample in _sample.all_samples():
            if row["operator"] == sample.operator == "get_indice_pairs" and row["case"] == sample.name:
                row["kernels_us"] = kernels_us(sample)
    for name in {"sparse_conv", "get_indice_pairs"} & files.keys():
        write(name)
    return 0 if all(row.get("equals_reference", True) for rows in files.values() for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
