"""Measure operators on one thread of this machine's CPU against what one writes in torch or NumPy.

    python benchmarks/cpu.py [FOLDER ...] [--out FOLDER] [--seconds 2] [--date YYYY-MM-DD] [--machine NAME]

FOLDER names an operator's folder; without any, those below. Takes the network-scale samples of each operator and the
larger cases of this file, compares the answer with the reference, then times ours and theirs in turn. A time is
processor time, the fastest of all turns: other work on the machine makes both slower, and either may be hit.
Writes `cpu-<folder>.json`; prints a line per case.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numba
import numpy as np
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent.parent / "src"))

import triops
from triops import _sample, scenes
from triops._compare import difference
from triops._op import OPERATORS

FOLDERS = [
    "ball_query", "batch_norm_act", "bev_pool", "chamfer_distance", "convex_iou", "deform_roi_pool",
    "diff_iou_rotated", "furthest_point_sample", "gather_points", "ingroup_inds", "knn", "min_area_polygons",
    "ms_deform_attn", "points_in_polygons", "prroi_pool", "roi_align_rotated", "roipoint_pool3d", "site_neighbors",
    "sparse_dense", "three_interpolate", "vector_pool", "voxel_query",
]  # fmt: skip
# How many times longer theirs has to take.
BARS = {
    "ball_query": 20, "knn": 20, "three_nn": 20, "furthest_point_sample": 3, "ms_deform_attn": 3,
    "ms_deform_attn_backward": 3, "roi_align_rotated": 3, "roi_align_rotated_backward": 3, "prroi_pool": 3,
    "prroi_pool_backward": 3, "prroi_pool_boxes_backward": 3, "deform_roi_pool": 3, "deform_roi_pool_backward": 3,
}  # fmt: skip
LARGE_BARS = {"100,000 LiDAR points to 4,096": 10, "100,000 uniform points to 4,096": 10}
WORDS = {"torch": "composed torch", "reference": "plain torch"}


@dataclass
class Case:
    operator: str
    name: str
    call: Callable[[], Any]
    others: dict[str, Callable[[], Any]]  # what each is called, and the call
    check: Callable[[], bool]

    def result(self, seconds: float) -> Iterator[dict[str, Any]]:
        """A row per peer, or one without a peer."""
        assert self.check(), f"{self.operator}, {self.name}: not the reference's answer"
        fastest = _fastest({"triops": self.call, **self.others}, seconds)
        ours = fastest.pop("triops")
        row = {"operator": self.operator, "case": self.name, "dtype": "float32", "threads": 1, "triops_us": _us(ours)}
        bar = LARGE_BARS.get(self.name, BARS.get(self.operator))
        for against, theirs in fastest.items():
            found = {**row, "against": against, "against_us": _us(theirs), "ratio": float(f"{theirs / ours:.3g}")}
            yield {**found, "must_ratio": bar} if bar else found
        if not fastest:
            yield row


def _fastest(calls: dict[str, Callable[[], Any]], seconds: float) -> dict[str, float]:
    best: dict[str, float] = {}
    spent = dict.fromkeys(calls, 0.0)
    stop = time.perf_counter() + seconds * len(calls)
    turns = 0
    while turns < 3 or time.perf_counter() < stop:
        for name, call in calls.items():
            if turns >= 3 and spent[name] > seconds:  # a slow one is run three times and no more
                continue
            start = time.process_time()
            call()
            took = time.process_time() - start
            best[name] = min(took, best.get(name, took))
            spent[name] += took
        turns += 1
    return best


def _us(seconds: float) -> float:
    return float(f"{seconds * 1e6:.4g}")


def of_samples(folder: str) -> Iterator[Case]:
    for sample in _sample.all_samples():
        operator = OPERATORS[sample.operator]
        module = _sample.module_of(operator)
        if sample.scale != "network" or sample.gpu_only or module.__name__.split(".")[-2] != folder:
            continue
        args = sample.make(torch.float32 if torch.float32 in sample.dtypes else sample.dtypes[0])
        peers = module.baselines(operator.name) or {"reference": operator.reference}
        others = {WORDS.get(name, name): partial(peer, *args) for name, peer in peers.items()}

        def check(operator: Any = operator, args: tuple[Any, ...] = args) -> bool:
            answers = operator(*args), operator.reference(*args)
            ours, theirs = (_sample.specified(operator, args, answer) for answer in answers)
            return not difference(ours, theirs, _sample.standard_of(operator).error_scale)

        yield Case(operator.name, sample.name, partial(operator, *args), others, check)


def neighbors(folder: str) -> Iterator[Case]:
    """knn and ball_query among 16,384 points, and how both grow with the number of points."""
    for cloud, points in (("LiDAR", scenes.lidar_scene(16_384).points), ("uniform", scenes.uniform_points(16_384))):
        points = points[None]
        queries = points[:, torch.randperm(16_384, generator=torch.Generator().manual_seed(1))[:1024]].contiguous()
        name = f"16,384 {cloud} points, 1,024 queries"
        if folder == "knn":
            for k in (3, 16, 32, 64, 128):
                args = points, queries, k
                yield _against(partial(triops.knn, *args), "cdist, topk", partial(_by_topk, *args), f"{name}, k {k}")
        else:
            args = points, queries, 0.8, 32
            others = partial(_in_ball_by_topk, *args)
            yield _against(partial(triops.ball_query, *args), "cdist, where, topk", others, f"{name}, radius 0.8, k 32")
    for count in (10_000, 100_000, 1_000_000):
        points = scenes.lidar_scene(count).points[None]
        radius = 0.8 * (10_000 / count) ** 0.5
        call = partial(triops.knn, points, points, 16)
        name = f"{count:,} LiDAR points, each a query, k 16"
        if folder == "ball_query":
            call = partial(triops.ball_query, points, points, radius, 32)
            name = f"{count:,} LiDAR points, each a center, radius {radius:.2g}, k 32"
        yield Case(folder, name, call, {}, lambda: True)


def _against(call: Callable[[], Any], against: str, other: Callable[[], Any], name: str) -> Case:
    function = call.func  # type: ignore[attr-defined]
    return Case(function.__name__, name, call, {against: other}, lambda: _same(call(), other()))


def _same(ours: Any, theirs: Any) -> bool:
    """Indices alone; where distances round to equal ones, a sort may take either."""
    ours, theirs = (answer[0] if isinstance(answer, tuple) else answer for answer in (ours, theirs))
    return bool((ours == theirs).float().mean() > 0.99)


def _by_topk(points: Tensor, queries: Tensor, k: int) -> tuple[Tensor, Tensor]:
    distances, indices = torch.cdist(queries, points).topk(k, largest=False)
    return indices.int(), distances


def _in_ball_by_topk(points: Tensor, centers: Tensor, radius: float, k: int) -> Tensor:
    count = points.shape[1]
    near = torch.cdist(centers, points) < radius
    found = torch.where(near, torch.arange(count, dtype=torch.int32), count).topk(k, largest=False).values
    found = found.sort().values
    return torch.where(found == count, found[..., :1], found)


def furthest_points(_: str) -> Iterator[Case]:
    for cloud, make in (("LiDAR", lambda n: scenes.lidar_scene(n).points), ("uniform", scenes.uniform_points)):
        for count, wanted in ((16_384, 4_096), (100_000, 4_096), (1_000_000, 16_384)):
            points = make(count)
            name = f"{count:,} {cloud} points to {wanted:,}"
            call = partial(triops.furthest_point_sample, points[None], wanted)
            if count < 1_000_000:
                yield _against(call, "a loop in NumPy", partial(_by_loop, points.numpy(), wanted), name)
            else:
                yield Case("furthest_point_sample", name, call, {}, lambda: True)


def _by_loop(points: Any, count: int) -> Tensor:
    x, y, z = (np.ascontiguousarray(column) for column in points.T)
    nearest, found = np.full(len(x), np.inf, np.float32), np.zeros(count, np.int32)
    for k in range(1, count):
        last = found[k - 1]
        np.minimum(nearest, (x - x[last]) ** 2 + (y - y[last]) ** 2 + (z - z[last]) ** 2, out=nearest)
        found[k] = nearest.argmax()
    return torch.from_numpy(found)[None]


LARGE = {"knn": neighbors, "ball_query": neighbors, "furthest_point_sample": furthest_points}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="*", default=FOLDERS)
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("results"))
    parser.add_argument("--seconds", type=float, default=2.0, help="processor time for each call")
    parser.add_argument("--date", default=datetime.date.today().isoformat())
    parser.add_argument("--machine", default=platform.processor() or platform.machine())
    options = parser.parse_args()
    torch.set_num_threads(1)
    timer = "processor time of one thread, fastest of calls in turn: benchmarks/cpu.py"
    options.out.mkdir(parents=True, exist_ok=True)
    head = {"machine": options.machine, "date": options.date, "torch": torch.__version__, "numba": numba.__version__}
    for folder in options.folders:
        cases = []
        for case in (*of_samples(folder), *LARGE.get(folder, lambda _: ())(folder)):
            for row in case.result(options.seconds):
                print(" | ".join(str(value) for value in row.values()), flush=True)
                cases.append(row)
        path = options.out / f"cpu-{folder}.json"
        path.write_text(json.dumps({**head, "timer": timer, "cases": cases}, indent=1) + "\n")


if __name__ == "__main__":
    main()
