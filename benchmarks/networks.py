"""Throughput of whole detectors of mmdetection3d on triops, and how much of their time the operators take.

    python benchmarks/networks.py [NETWORK ...] [--device cuda] [--out FOLDER] [--date YYYY-MM-DD]

Each network runs at its own scale: KITTI's 20,000 points or nuScenes' 300,000 a scene. Predictions take one scene at a
time, training steps the batch of the network's own config on a GPU and one scene on a CPU. Before anything is timed the
loss of a small scene is compared with that of the reference backend. Writes `<device>-networks.json`.
"""

from __future__ import annotations

import argparse
import copy
import datetime
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT / "examples"), str(ROOT / "src")]

from detectors import (
    NETWORKS,
    Clock,
    Network,
    batch,
    build,
    config,
    losses,
    make_confident,
    point_range,
    predict,
    scene,
)

import triops

CHECK_POINTS = 8_000


def measure(
    call: Callable[[], Any], device: str, count: int, seconds: float, unit: str = "scenes", shares: bool = True
) -> dict[str, Any]:
    """Median time of a call without the clock, then the operators' share of calls with it.

    count: how many scenes a call takes, or whatever the unit is.
    """

    def timed() -> float:
        wait(device)
        begin = time.perf_counter()
        call()
        wait(device)
        return time.perf_counter() - begin

    for _ in range(2):  # compiles kernels, chooses convolutions
        first = timed()
    repeats = max(3, min(50, int(seconds / first)))
    median = statistics.median(timed() for _ in range(repeats))
    row: dict[str, Any] = {
        "batch": count,
        "ms": round(median * 1000, 2),
        f"{unit}_per_second": round(count / median, 2),
        "repeats": repeats,
    }
    if shares:
        clock = Clock(device)
        with clock.on():
            watched = sum(timed() for _ in range(max(2, repeats // 4)))
        spent = clock.totals()
        row["triops_share"] = round(sum(spent.values()) / watched, 3)
        row["share_by_operator"] = {name: round(used / watched, 4) for name, used in spent.most_common()}
    return row


def loss_against_reference(model: Any, network: Network) -> tuple[float, float]:
    data = batch([scene(network, point_range(model), CHECK_POINTS)])

    def loss() -> float:
        torch.manual_seed(0)
        return losses(copy.deepcopy(model), data)[0].item()

    mine = loss()
    with triops.reference_backend():
        return mine, loss()


def run(network: Network, device: str, seconds: float) -> dict[str, Any]:
    model = build(network, device)
    make_confident(model)
    mine, theirs = loss_against_reference(model, network)
    size = config(network).train_dataloader.batch_size if device == "cuda" else 1
    data = batch([scene(network, point_range(model), seed=seed) for seed in range(size)])
    data["inputs"]["points"] = [points.to(device) for points in data["inputs"]["points"]]
    data["data_samples"] = [sample.to(device) for sample in data["data_samples"]]
    one = {"inputs": {"points": data["inputs"]["points"][:1]}, "data_samples": data["data_samples"][:1]}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step() -> None:
        optimizer.zero_grad()
        losses(model, data)[0].backward()
        optimizer.step()

    row: dict[str, Any] = {
        "network": network.title,
        "config": network.config,
        "points": network.points,
        "loss": mine,
        "loss_of_the_reference": theirs,
    }
    row["predict"] = {
        **measure(lambda: predict(model, one), device, 1, seconds),
        "boxes": _boxes(model, one),
    }
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    row["train"] = measure(step, device, size, seconds)
    if device == "cuda":
        row["train"]["peak_memory_mib"] = torch.cuda.max_memory_allocated() // 2**20
    return row


def _boxes(model: Any, data: dict[str, Any]) -> int:
    return len(predict(model, data)[0].scores_3d)


def wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or "CPU"


def results(options: argparse.Namespace, name: str) -> tuple[dict[str, Any], Path]:
    """The machine and the versions, and the file that they head."""
    machine = torch.cuda.get_device_name() if options.device == "cuda" else cpu_name()
    options.out.mkdir(parents=True, exist_ok=True)
    head = {"machine": machine, "date": options.date, "torch": torch.__version__, "threads": torch.get_num_threads()}
    return head, options.out / f"{machine.split()[-1].lower() if options.device == 'cuda' else 'cpu'}-{name}.json"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("networks", nargs="*", default=[*NETWORKS], help=f"of {', '.join(NETWORKS)}; default all")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cuda", "cpu"))
    parser.add_argument("--seconds", type=float, default=4.0, help="to spend on each figure, about")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("results"))
    parser.add_argument("--date", default=datetime.date.today().isoformat())
    options = parser.parse_args()
    head, path = results(options, "networks")
    rows: list[dict[str, Any]] = []
    agree = True
    for name in options.networks:
        begin = time.perf_counter()
        row = run(NETWORKS[name], options.device, options.seconds)
        rows.append(row)
        equal = abs(row["loss"] - row["loss_of_the_reference"]) <= 1e-3 * abs(row["loss_of_the_reference"])
        agree &= equal
        for what in ("predict", "train"):
            print(f"{row['network']} {what}: " + ", ".join(f"{k} {v}" for k, v in row[what].items()), flush=True)
        print(
            f"  loss {row['loss']:.5f}, reference {row['loss_of_the_reference']:.5f}: {'equal' if equal else 'UNEQUAL'}"
        )
        print(f"  {time.perf_counter() - begin:.0f} s in all", flush=True)
        path.write_text(json.dumps({**head, "networks": rows}, indent=1) + "\n")
    return 0 if agree else 1


if __name__ == "__main__":
    sys.exit(main())
