"""Whole sparse networks on a GPU, triops plain, fused and captured against spconv: time, launches and memory.

    python benchmarks/encoders.py [--json FILE] [--only WORDS]
    python benchmarks/encoders.py --cpu [--json FILE]   # on a CPU, plain against fused, on one and on two threads
    python benchmarks/encoders.py --first           # seconds of a first inference; TRITON_CACHE_DIR says how cold it is
    python benchmarks/encoders.py --counts 1000     # random numbers of sites: captured is eager, and nothing compiles

The encoder of SECOND (12 convolutions with batch norm and ReLU, 4 stages), a residual one and a UNet, the same weights
and voxels for every library. Wall time is one synchronised call, median of interleaved rounds; GPU time and launches
come from torch's profiler, which runs last, since it slows every later launch.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1] / "src"))

import triops.nn
from triops import scenes
from triops.acceptance.results import environment

# A synthetic sweep in the grid of CenterPoint on nuScenes.
HERE = Path(__file__).parent
ROUNDS = 25
VOXEL_SIZE, RANGE, SHAPE = [0.075, 0.075, 0.2], [-54, -54, -5, 54, 54, 3], [41, 1440, 1440]
# Voxels wanted of one sweep: points that a sweep needs for them.
POINTS = {19_414: 22_000, 41_054: 51_000, 46_304: 59_000, 46_305: 59_000, 59_563: 83_000, 119_761: 272_414}


def layer(lib: Any, kind: str, inputs: int, outputs: int, key: str, **options: Any) -> nn.Module:
    conv = lib.SubMConv3d if kind == "subm" else lib.SparseConv3d
    return lib.SparseSequential(
        conv(inputs, outputs, bias=False, indice_key=key, **{"kernel_size": 3, "padding": 1, **options}),
        nn.BatchNorm1d(outputs, eps=1e-3, momentum=0.01),
        nn.ReLU(),
    )


def second(lib: Any) -> nn.Module:
    """The middle encoder of SECOND, up to its dense bird's-eye map."""
    stages = [layer(lib, "subm", 4, 16, "subm1"), layer(lib, "subm", 16, 16, "subm1")]
    widths = [(16, 32, 1), (32, 64, 1), (64, 64, [0, 1, 1])]
    for number, (inputs, outputs, padding) in enumerate(widths, 2):
        stages += [
            layer(lib, "sparse", inputs, outputs, f"spconv{number}", stride=2, padding=padding),
            layer(lib, "subm", outputs, outputs, f"subm{number}"),
            layer(lib, "subm", outputs, outputs, f"subm{number}"),
        ]
    last = {"kernel_size": [3, 1, 1], "stride": [2, 1, 1], "padding": 0}
    return lib.SparseSequential(*stages, layer(lib, "sparse", 64, 128, "down", **last), lib.ToDense())


class Residual(nn.Module):
    def __init__(self, lib: Any, width: int, key: str) -> None:
        super().__init__()
        self.first = layer(lib, "subm", width, width, key)
        self.second = lib.SparseSequential(
            lib.SubMConv3d(width, width, 3, padding=1, bias=False, indice_key=key), nn.BatchNorm1d(width, eps=1e-3)
        )

    def forward(self, x: Any) -> Any:
        y = self.second(self.first(x))
        return y.replace_feature(torch.relu(y.features + x.features))


class ResidualEncoder(nn.Module):
    def __init__(self, lib: Any) -> None:
        super().__init__()
        stages: list[nn.Module] = [layer(lib, "subm", 4, 16, "input")]
        for number, width in enumerate((16, 32, 64, 128), 1):
            if number > 1:
                stages.append(layer(lib, "sparse", width // 2, width, f"down{number}", stride=2))
            stages += [Residual(lib, width, f"res{number}"), Residual(lib, width, f"res{number}")]
        self.stages = nn.ModuleList(stages)

    def forward(self, x: Any) -> Any:
        for stage in self.stages:
            x = stage(x)
        return x.dense()


class UNet(nn.Module):
    def __init__(self, lib: Any, widths: tuple[int, ...] = (32, 64, 96, 128)) -> None:
        super().__init__()
        self.input = layer(lib, "subm", 4, widths[0], "level0")
        self.down, self.up, self.join = nn.ModuleList(), nn.ModuleList(), nn.ModuleList()
        for n, (width, deeper) in enumerate(itertools.pairwise(widths)):
            self.down.append(nn.ModuleList([
                Residual(lib, width, f"level{n}"), layer(lib, "sparse", width, deeper, f"down{n}", stride=2),
            ]))  # fmt: skip
            self.up.append(lib.SparseInverseConv3d(deeper, width, 3, indice_key=f"down{n}", bias=False))
            self.join.append(layer(lib, "subm", 2 * width, width, f"level{n}"))
        self.deepest = Residual(lib, widths[-1], f"level{len(widths) - 1}")

    def forward(self, x: Any) -> Any:
        x, skipped = self.input(x), []
        for block, down in self.down:  # type: ignore[misc]
            x = block(x)
            skipped.append(x)
            x = down(x)
        x = self.deepest(x)
        for up, join, skip in zip(reversed(self.up), reversed(self.join), reversed(skipped), strict=True):
            x = up(x)
            x = join(x.replace_feature(torch.cat([x.features, skip.features], 1)))
        return x.features


def voxels(count: int, batch: int) -> torch.Tensor:
    """The first `count` voxels of `batch` sweeps: int32 [count, 4], in the order of the points."""
    found = []
    for b in range(batch):
        wanted = count // batch + (b < count % batch)
        points = scenes.lidar_scene(POINTS[wanted], seed=b).points
        coords = triops.voxelize(points, VOXEL_SIZE, RANGE, 1, wanted)[1]
        assert len(coords) == wanted, f"{len(coords)} voxels, {wanted} wanted: POINTS needs more"
        found.append(torch.cat([torch.full_like(coords[:, :1], b), coords], 1))
    return torch.cat(found)


class Case:
    """One network of one library on one input."""

    def __init__(self, lib: Any, make: Callable[[Any], nn.Module], sites: torch.Tensor, batch: int, half: bool,
                 train: bool, state: dict[str, Any] | None) -> None:  # fmt: skip
        torch.manual_seed(0)
        self.lib, self.sites, self.batch, self.half, self.train = lib, sites, batch, half, train
        self.network = make(lib).to(sites.device)
        self.features = torch.randn(len(sites), 4, generator=torch.Generator().manual_seed(1)).to(sites.device)
        if state is None:
            self._settle()
        else:
            self.network.load_state_dict(state, strict=False)
        self.network.train(train)
        if half and not train:
            self.network, self.features = self.network.half(), self.features.half()
        self.run: Callable[[Any], Any] = self.network

    def _settle(self) -> None:
        """Running statistics as training leaves them: without, values shrink layer by layer below what fp16 holds."""
        norms = [m for m in self.network.modules() if isinstance(m, nn.BatchNorm1d)]
        with torch.no_grad():
            for norm in norms:
                norm.momentum = 1.0
            self.network(self.tensor())
        for norm in norms:
            norm.momentum = 0.01

    def tensor(self) -> Any:
        return self.lib.SparseConvTensor(self.features, self.sites, SHAPE, self.batch)

    def __call__(self) -> torch.Tensor:
        if not self.train:
            with torch.no_grad():
                return self.run(self.tensor())  # type: ignore[no-any-return]
        self.network.zero_grad(set_to_none=True)
        with torch.autocast("cuda", torch.float16, enabled=self.half):
            out = self.network(self.tensor())
            loss = out.float().square().mean()
        loss.backward()
        return out.detach()  # type: ignore[no-any-return]


def fused(case: Case) -> Case:
    case.run = case.network = triops.nn.fuse(case.network)
    return case


def captured(case: Case) -> Case:
    case.run = triops.nn.capture(case.network, [case.tensor()])
    return case


def rows(options: argparse.Namespace) -> list[dict[str, Any]]:
    libraries = {"triops": importlib.import_module("triops.spconv.pytorch")}
    try:
        libraries["spconv"] = importlib.import_module("spconv.pytorch")
    except Exception as error:  # a compiled peer may fail in any way while it loads
        print(f"no spconv here ({type(error).__name__}: {error})")
    plans: list[tuple[str, Any, int, int, bool, bool]] = [
        ("SECOND inference fp16", second, 19_414, 1, True, False),
        ("SECOND inference fp16", second, 59_563, 1, True, False),
        ("SECOND inference fp16", second, 119_761, 1, True, False),
        ("SECOND inference fp32", second, 119_761, 1, False, False),
        ("SECOND training amp", second, 164_216, 4, True, True),
        ("SECOND training fp32", second, 164_216, 4, False, True),
        ("residual training amp", ResidualEncoder, 164_216, 4, True, True),
        ("UNet training amp", UNet, 185_219, 4, True, True),
    ]
    found = []
    for name, make, count, batch, half, train in plans:
        if options.only not in name:
            continue
        sites = voxels(count, batch).cuda()
        cases: dict[str, Case] = {}
        state: dict[str, Any] | None = None
        for library, lib in libraries.items():
            cases[library] = Case(lib, make, sites, batch, half, train, state)
            state = state or {k: v.float() for k, v in cases[library].network.state_dict().items()}
        if not train:
            same = libraries["triops"], make, sites, batch, half, train, state
            cases["fused"] = fused(Case(*same))
            cases["captured"] = captured(fused(Case(*same)))
        found.append({"network": name, "voxels": count, **measured(cases)})
        print(json.dumps(found[-1]), flush=True)
    return found


def measured(cases: dict[str, Case]) -> dict[str, Any]:
    result: dict[str, Any] = {name: {} for name in cases}
    outputs = {}
    for name, case in cases.items():
        for _ in range(3):
            case()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        outputs[name] = case().float()
        torch.cuda.synchronize()
        result[name]["peak_mib"] = round((torch.cuda.max_memory_allocated() - before) / 2**20, 1)
    expected = outputs["triops"]
    for name, output in outputs.items():
        difference = (
            (output - expected).norm() / expected.norm() if output.shape == expected.shape else torch.tensor(9.9)
        )
        result[name]["difference"] = float(f"{float(difference):.2g}")
    times: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(ROUNDS):
        for name, case in cases.items():
            torch.cuda.synchronize()
            start = time.perf_counter()
            case()
            torch.cuda.synchronize()
            times[name].append((time.perf_counter() - start) * 1e3)
    for name, samples in times.items():
        result[name]["wall_ms"] = round(statistics.median(samples), 3)
    for name, case in cases.items():
        result[name]["busy_ms"], result[name]["launches"] = busy(case)
    return result


def busy(case: Case) -> tuple[float, int]:
    """GPU time of one call, and how many kernels, copies and fills it takes."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        case()
        torch.cuda.synchronize()
    kernels = [event for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    return round(sum(event.device_time for event in kernels) / 1e3, 3), len(kernels)


def cpu_rows() -> list[dict[str, Any]]:
    """SECOND's encoder on a CPU: ms of a plain and of a fused call, medians of calls in turn, and plain over fused."""
    library = importlib.import_module("triops.spconv.pytorch")
    found = []
    for threads, count in itertools.product((1, 2), (19_414, 59_563, 119_761)):
        torch.set_num_threads(threads)
        plain = Case(library, second, voxels(count, 1), 1, False, False, None)
        both = {"plain": plain.network, "fused": triops.nn.fuse(plain.network)}
        times: dict[str, list[float]] = {name: [] for name in both}
        for turn in range(3 + ROUNDS):
            for name, plain.run in both.items():
                start = time.perf_counter()
                plain()
                if turn >= 3:
                    times[name].append((time.perf_counter() - start) * 1e3)
        wall = {f"{name}_ms": round(statistics.median(samples), 1) for name, samples in times.items()}
        ratio = round(statistics.median(p / f for p, f in zip(times["plain"], times["fused"], strict=True)), 2)
        found.append({"network": "SECOND inference fp32", "voxels": count, "threads": threads, **wall, "ratio": ratio})
        print(json.dumps(found[-1]), flush=True)
    return found


def first() -> None:
    """Seconds of the first inference of a process, and of the second."""
    library = importlib.import_module("triops.spconv.pytorch")
    network = second(library).cuda().half().eval()
    sites = _random_sites(19_414)
    torch.cuda.synchronize()
    for words in ("first inference", "second"):
        start = time.perf_counter()
        with torch.no_grad():
            network(library.SparseConvTensor(_features(sites), sites, SHAPE, 1))
        torch.cuda.synchronize()
        print(f"{words}: {time.perf_counter() - start:.3f} s", flush=True)


def counts(number: int) -> None:
    """SECOND's encoder over random numbers of sites: compilations after the first call, captured against eager."""
    from triton.compiler import compiler

    compiled: list[str] = []
    known = compiler.CompiledKernel.__init__

    def note(self: Any, *args: Any, **options: Any) -> None:
        known(self, *args, **options)
        compiled.append(self.metadata.name)

    library = importlib.import_module("triops.spconv.pytorch")
    torch.manual_seed(0)
    case = Case(library, second, _random_sites(50_000), 1, True, False, None)
    network = triops.nn.fuse(case.network)
    fast = triops.nn.capture(network, [case.tensor()])
    fast(case.tensor())
    case()
    compiler.CompiledKernel.__init__ = note
    different = []
    for done, count in enumerate(torch.randint(1, 300_001, (number,)).tolist(), 1):
        sites = _random_sites(count)
        case.features, case.sites = _features(sites), sites
        with torch.no_grad():
            case.network(case.tensor())
            if not torch.equal(fast(case.tensor()), network(case.tensor())):
                different.append(count)
        if done % 100 == 0 or done == number:
            print(f"{done} counts: {len(compiled)} compilations after the first {compiled}, "
                  f"captured differs from eager for {len(different)} {different[:5]}", flush=True)  # fmt: skip


def _random_sites(count: int) -> torch.Tensor:
    """As many random voxels, some of them more than once, of a part of the grid: int32 [count, 4] on the GPU."""
    return torch.stack([torch.randint(0, size, (count,)) for size in (1, SHAPE[0], 400, 400)], 1).int().cuda()


def _features(sites: torch.Tensor) -> torch.Tensor:
    return torch.randn(len(sites), 4, device=sites.device, dtype=torch.float16)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", default="", help="rows whose name holds this, such as inference or training amp")
    parser.add_argument("--first", action="store_true", help="time a first inference and no more")
    parser.add_argument("--counts", type=int, help="so many random numbers of sites and no more")
    parser.add_argument("--cpu", action="store_true", help="plain against fused on a CPU")
    options = parser.parse_args()
    if options.cpu:
        store(options.json, environment()["cpu"], cpu_rows())
        return 0
    if not torch.cuda.is_available():
        print("benchmarks/encoders.py needs a GPU")
        return 0
    torch.backends.cuda.matmul.allow_tf32 = False
    if options.first:
        first()
        return 0
    if options.counts:
        counts(options.counts)
        return 0
    store(options.json, torch.cuda.get_device_name(), rows(options))
    return 0


def store(file: Path | None, machine: str, found: list[dict[str, Any]]) -> None:
    if file:
        facts = {"machine": machine, "torch": torch.__version__, "date": time.strftime("%Y-%m-%d")}
        file.write_text(json.dumps({**facts, "rows": found}, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
