"""Measure operators on this machine's GPU: every network-scale sample, checked, then timed.

    python benchmarks/gpu.py [OPERATOR ...] [--out FOLDER] [--date YYYY-MM-DD]

Prints one table and writes `<gpu>-<folder of the operator>.json`. Needs torch and triton only.
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
from pathlib import Path
from typing import Any

import torch
import triton

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent / "src")]

from timing import copy_bytes_per_second, eager_us, graph_us

from triops import _sample
from triops._op import OPERATORS, Operator

BARS = json.loads(Path(__file__).with_name("bars.json").read_text())


def equal(got: Any, expected: Any) -> bool:
    """Integers bit for bit, floats within the rounding of their dtype."""
    for g, e in zip(_sample.tensors_of(got), _sample.tensors_of(expected), strict=True):
        if not e.is_floating_point():
            if not torch.equal(g, e):
                return False
        elif not torch.allclose(g.double(), e.double(), rtol=4 * torch.finfo(e.dtype).eps, atol=1e-5, equal_nan=True):
            return False
    return True


def measure(operator: Operator, sample: _sample.Sample, dtype: torch.dtype, bandwidth: float) -> dict[str, Any]:
    args = _sample.to_device(sample.make(dtype), "cuda")
    right = equal(operator(*args), operator.reference(*args))
    work = _sample.module_of(operator).work(operator.name, args)
    row: dict[str, Any] = {
        "operator": operator.name,
        "case": sample.name,
        "dtype": str(dtype).removeprefix("torch."),
        "equals_reference": right,
        "floor_us": round(work.bytes / bandwidth * 1e6, 1),
        "eager_us": round(eager_us(lambda: operator(*args)), 1),
    }
    if not operator.dynamic_output:
        row["graph_us"] = round(graph_us(lambda: operator(*args)), 1)
    bar = BARS.get(operator.name, {}).get(sample.name, {}).get(row["dtype"])
    if bar:
        row["must_us"], row["aim_us"] = bar
    return row


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("operators", nargs="*")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("results"))
    parser.add_argument("--date", default=datetime.date.today().isoformat())
    options = parser.parse_args()
    bandwidth = copy_bytes_per_second()
    machine = torch.cuda.get_device_name()
    print(f"{machine}: copy {bandwidth / 1e12:.2f} TB/s, torch {torch.__version__}, triton {triton.__version__}")
    files: dict[str, list[dict[str, Any]]] = {}
    for sample in _sample.all_samples():
        operator = OPERATORS[sample.operator]
        if sample.scale != "network" or (options.operators and operator.name not in options.operators):
            continue
        for dtype in [d for d in sample.dtypes if d in (torch.float32, torch.float16)] or sample.dtypes[:1]:
            row = measure(operator, sample, dtype, bandwidth)
            files.setdefault(operator.package.rpartition(".")[2], []).append(row)
            print(" | ".join(f"{key} {value}" for key, value in row.items()), flush=True)
    options.out.mkdir(parents=True, exist_ok=True)
    for name, cases in files.items():
        head = {"machine": machine, "date": options.date, "torch": torch.__version__, "triton": triton.__version__}
        head["copy_bytes_per_second"] = bandwidth
        path = options.out / f"{machine.split()[-1].lower()}-{name}.json"
        path.write_text(json.dumps({**head, "cases": cases}, indent=1) + "\n")
    return 0 if all(row["equals_reference"] for rows in files.values() for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
