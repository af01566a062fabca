"""Throughput of whole detectors of mmdetection on triops, and beside it without triops.

    python benchmarks/mmdetection.py [NETWORK ...] [--device cuda] [--seconds 90] [--out FOLDER] [--date YYYY-MM-DD]

Networks are those of shipped configs at full size, with random weights and images of 800 x 1333 pixels. Predictions and
training steps are timed with one image and with two, in float32 (convolutions in TF32, as PyTorch has it) and under
autocast to float16. "Without triops" is what runs where mmcv is not compiled: torchvision's roi_align, nms and
deform_conv2d, and mmcv's formulations of attention and focal loss in torch; it is left out where torchvision is not
installed.

First each network, in a process of its own, is checked at a small size against the reference backend (boxes, losses,
gradients) and called once at full size, which compiles kernels side by side. Writes `<device>-mmdetection.json` after
each network. Figures that the time does not allow are left out; what fails is recorded, and the rest goes on.
"""

from __future__ import annotations

import argparse
import datetime
import json
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from tempfile import TemporaryFile
from types import SimpleNamespace
from typing import IO, Any

import torch
from networks import measure, results  # beside this file
from torch import Tensor
from torch.nn import functional as F

import image_detectors  # isort: skip - networks.py says where it is
from image_detectors import NETWORKS, SMALL, Network  # isort: skip

SIZE = 800, 1333  # height, width of an image
TORCHVISION = find_spec("torchvision") is not None
OBJECTS = 8  # on an image, about COCO's mean
DTYPES = {"float32": False, "autocast float16": True}
LOSSES, SCORES, GRADIENTS = 1e-4, 1e-4, 1e-3  # how far they may be from the reference's


class Case:
    """A network, its images and its training step."""

    def __init__(self, network: Network, device: str, small: bool) -> None:
        self.device = device
        self.model = image_detectors.build(network, device, small)
        self.data = [self._picture(network, SMALL if small else SIZE, seed) for seed in range(2)]
        # A rate of 0 keeps weights as they are: each step does the same work.
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.0)
        self.scaler = torch.amp.GradScaler(device, init_scale=1024.0)

    def _picture(self, network: Network, size: tuple[int, int], seed: int) -> dict[str, Any]:
        height, width = size
        g = torch.Generator().manual_seed(seed)
        center = torch.rand(OBJECTS, 2, generator=g) * torch.tensor([width, height])
        half = (torch.rand(OBJECTS, 2, generator=g) * 0.2 + 0.05) * height
        low = (center - half).clamp(min=0)
        high = (center + half).minimum(torch.tensor([width, height]))
        data = image_detectors.picture(network, size, torch.cat([low, high], 1).int().tolist(), seed)
        data["inputs"] = [image.to(self.device) for image in data["inputs"]]
        data["data_samples"] = [sample.to(self.device) for sample in data["data_samples"]]
        return data

    def batch(self, count: int) -> dict[str, Any]:
        return {key: [one[key][0] for one in self.data[:count]] for key in self.data[0]}

    def call(self, what: str, half: bool, count: int) -> Callable[[], Any]:
        data = self.batch(count)
        autocast = torch.autocast(self.device, torch.float16, enabled=half)

        def predict() -> Any:
            with autocast:
                return image_detectors.predict(self.model, data)

        def step() -> None:
            self.optimizer.zero_grad()
            with autocast:
                loss = image_detectors.losses(self.model, data)[0]
            if half:
                self.scaler.scale(loss).backward()
                self.scaler.step(self.optimizer)
                self.scaler.update()
            else:
                loss.backward()
                self.optimizer.step()

        return predict if what == "predict" else step


@contextmanager
def without_triops() -> Iterator[None]:
    """What mmdetection would call where mmcv is not compiled."""
    import torchvision

    focal = import_module("mmdet.models.losses.focal_loss")
    attention = import_module("mmcv.ops.multi_scale_deform_attn")

    def aligned(
        input: Tensor, rois: Tensor, size: Any, scale: float, ratio: int, mode: str = "avg", half: bool = True
    ) -> Tensor:
        assert mode == "avg"
        found: Tensor = torchvision.ops.roi_align(input, rois, size, scale, ratio, half)
        return found.to(input.dtype)  # autocast has made it float32

    def convolved(x: Tensor, offset: Tensor, weight: Tensor, stride: Any, padding: Any, dilation: Any, *_: Any) -> Any:
        return torchvision.ops.deform_conv2d(x, offset, weight, None, stride, padding, dilation)

    def modulated(
        x: Tensor, offset: Tensor, mask: Tensor, weight: Tensor, bias: Tensor | None, stride: Any, padding: Any,
        dilation: Any, *_: Any,
    ) -> Any:  # fmt: skip
        return torchvision.ops.deform_conv2d(x, offset, weight, bias, stride, padding, dilation, mask)

    def suppressed(bboxes: Tensor, scores: Tensor, iou_threshold: float, offset: int) -> Any:
        assert offset == 0
        return torchvision.ops.nms(bboxes, scores.to(bboxes.dtype), iou_threshold)

    def attended(value: Tensor, shapes: Tensor, _: Tensor, locations: Tensor, weights: Tensor, __: int) -> Any:
        return attention.multi_scale_deformable_attn_pytorch(value, shapes, locations, weights)

    def focal_loss(pred: Tensor, target: Tensor, weight: Any = None, **keywords: Any) -> Any:
        classes = pred.shape[1]
        return focal.py_sigmoid_focal_loss(pred, F.one_hot(target, classes + 1)[:, :classes], weight, **keywords)

    places = (
        (import_module("mmcv.ops.roi_align"), "roi_align", aligned),
        (import_module("mmdet.structures.mask.structures"), "roi_align", aligned),
        (import_module("mmcv.ops.deform_conv"), "deform_conv2d", convolved),
        (import_module("mmcv.ops.modulated_deform_conv"), "modulated_deform_conv2d", modulated),
        (import_module("mmcv.ops.nms"), "ext_module", SimpleNamespace(nms=suppressed)),
        (attention, "MultiScaleDeformableAttnFunction", SimpleNamespace(apply=attended)),
        (focal, "sigmoid_focal_loss", focal_loss),
    )
    before = [getattr(module, name) for module, name, _ in places]
    for module, name, other in places:
        setattr(module, name, other)
    try:
        yield
    finally:
        for (module, name, _), own in zip(places, before, strict=True):
            setattr(module, name, own)


@contextmanager
def exactly() -> Iterator[None]:
    """Convolutions in float32, and the same sums each time."""
    cudnn = torch.backends.cudnn
    before = cudnn.allow_tf32, cudnn.deterministic
    cudnn.allow_tf32, cudnn.deterministic = False, True
    try:
        yield
    finally:
        cudnn.allow_tf32, cudnn.deterministic = before


def check(network: Network, device: str) -> dict[str, Any]:
    """A small one's predictions, losses and gradients against those of the reference backend."""
    model, data = image_detectors.build(network, device, small=True), image_detectors.picture(network)
    with exactly(), image_detectors.own_attention():
        outcome = image_detectors.run(model, data)
        expected = image_detectors.run_reference(model, data)
        gradients = image_detectors.apart(outcome.gradients(), outcome.gradients(by_reference=True))
    other = None
    if TORCHVISION:
        with exactly(), without_triops():
            other = image_detectors.run(model, data).parts["loss"]
    loss = max(abs(outcome.parts[k] - v) / max(abs(v), 0.1) for k, v in expected.parts.items())
    same_count = len(outcome.scores) == len(expected.scores)
    scores = float((outcome.scores - expected.scores).abs().max()) if same_count and len(outcome.scores) else None
    row = {
        "loss": outcome.parts["loss"],
        "loss_of_the_reference": expected.parts["loss"],
        "loss_without_triops": other,
        "losses_apart": loss,
        "boxes": len(outcome.boxes),
        "boxes_of_the_reference": len(expected.boxes),
        "boxes_unlike": len(outcome.unlike(expected)),
        "scores_apart": scores,
        "gradients_apart": gradients,
    }
    row["equal"] = bool(
        loss <= LOSSES
        and gradients <= GRADIENTS
        and scores is not None
        and scores <= SCORES
        and not row["boxes_unlike"]
    )
    return row


def prepare(network: Network, device: str, small: bool) -> dict[str, Any]:
    """The check, and one call of each kind at full size, which compiles what it needs."""
    begin = time.perf_counter()
    row = check(network, device)
    row["seconds"] = round(time.perf_counter() - begin, 1)
    print("\n" + json.dumps(row), flush=True)  # kept if what follows takes too long
    try:
        case = Case(network, device, small)
        for what, half in product(("predict", "train"), DTYPES.values()):
            case.call(what, half, 1)()
        row["seconds_with_compilation"] = round(time.perf_counter() - begin, 1)
    except Exception as error:  # the figures will say so too
        row["error"] = _line(error)
    return row


class Preparation:
    """This script once more, to check one network and to compile its kernels."""

    def __init__(self, name: str) -> None:
        self.out, self.errors = TemporaryFile("w+"), TemporaryFile("w+")  # noqa: SIM115 - a pipe would fill
        command = [sys.executable, *sys.orig_argv[1:], "--only", name]
        self.process = subprocess.Popen(command, stdout=self.out, stderr=self.errors, text=True)

    def result(self, seconds: float) -> dict[str, Any]:
        error = None
        try:
            if self.process.wait(timeout=max(1.0, seconds)):
                error = _text(self.errors).strip()[-2000:]
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            error = "stopped, for want of time"
        lines = [line for line in _text(self.out).splitlines() if line.startswith("{")]
        found: dict[str, Any] = json.loads(lines[-1]) if lines else {"equal": False}
        return found if error is None else {**found, "error": error}


def _text(file: IO[str]) -> str:
    file.seek(0)
    return file.read()


def figures(case: Case, seconds: float) -> Iterator[dict[str, Any]]:
    deadline = time.perf_counter() + seconds
    plan = list(product((True, False) if TORCHVISION else (True,), (1, 2), DTYPES.items(), ("predict", "train")))
    for number, (ours, count, (dtype, half), what) in enumerate(plan):
        left = deadline - time.perf_counter()
        if left <= 0:
            return
        row: dict[str, Any] = {"what": what, "operators": "triops" if ours else "without triops", "dtype": dtype}
        if case.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        try:
            with image_detectors.own_attention() if ours else without_triops():
                share = 0.6 * left / (len(plan) - number)  # the rest is for warming up and the operators' shares
                row |= measure(case.call(what, half, count), case.device, count, share, "images", shares=ours)
                if what == "predict":
                    row["boxes"] = sum(len(one.scores) for one in case.call(what, half, count)())
        except Exception as error:
            traceback.print_exc()
            row |= {"batch": count, "error": _line(error)}
        if case.device == "cuda":
            row["peak_memory_mib"] = torch.cuda.max_memory_allocated() // 2**20
        yield row


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:500]


def show(row: dict[str, Any]) -> None:
    done = row["check"]
    print(f"\n{row['network']}: {'equal to' if done.get('equal') else 'UNEQUAL to'} the reference")
    for key, value in done.items():
        print(f"  {key}: {value}")
    others = {(f["what"], f["dtype"], f["batch"]): f for f in row["figures"] if f["operators"] != "triops"}
    print(f"  {'':7} {'':16} batch      ms images/s  triops  without    ratio")
    for mine in row["figures"]:
        if mine["operators"] != "triops":
            continue
        other = others.get((mine["what"], mine["dtype"], mine["batch"]), {})
        ratio = f"{other['ms'] / mine['ms']:.2f}x" if "ms" in other and "ms" in mine else ""
        print(
            f"  {mine['what']:7} {mine['dtype']:16} {mine['batch']:5} {mine.get('ms', 'failed'):>7} "
            f"{mine.get('images_per_second', ''):>8} {mine.get('triops_share', ''):>7} "
            f"{other.get('ms', ''):>8} {ratio:>8}",
            flush=True,
        )


def main() -> int:
    begin = time.perf_counter()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("networks", nargs="*", default=[*NETWORKS], help=f"of {', '.join(NETWORKS)}; default all")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cuda", "cpu"))
    parser.add_argument("--seconds", type=float, default=90.0, help="for everything, about")
    parser.add_argument("--small", action="store_true", help="small networks and images for the figures too")
    parser.add_argument("--only", help=argparse.SUPPRESS)  # checks this network, prints what it found as JSON
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("results"))
    parser.add_argument("--date", default=datetime.date.today().isoformat())
    options = parser.parse_args()
    if options.only:
        print("\n" + json.dumps(prepare(NETWORKS[options.only], options.device, options.small)))
        return 0

    preparations = {name: Preparation(name) for name in options.networks}
    checks = {}
    for name, preparation in preparations.items():
        checks[name] = preparation.result(0.6 * options.seconds - (time.perf_counter() - begin))
    head, path = results(options, "mmdetection")
    rows: list[dict[str, Any]] = []
    for number, name in enumerate(options.networks):
        network = NETWORKS[name]
        row: dict[str, Any] = {
            "network": network.title,
            "config": network.config,
            "image": list(SMALL if options.small else SIZE),
            "check": checks[name],
            "figures": [],
        }
        rows.append(row)
        since = time.perf_counter()
        left = (options.seconds - (since - begin)) / (len(options.networks) - number)
        try:
            case = Case(network, options.device, options.small)
            row["figures"] = list(figures(case, left - (time.perf_counter() - since)))
            del case
        except Exception as error:
            traceback.print_exc()
            row["error"] = _line(error)
        path.write_text(json.dumps({**head, "image_networks": rows}, indent=1) + "\n")
        show(row)
    print(f"{time.perf_counter() - begin:.0f} s in all")
    failed = any("error" in figure for row in rows for figure in [row, row["check"], *row["figures"]])
    return int(failed or not all(row["check"]["equal"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
