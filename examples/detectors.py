"""What the scripts `detect_*.py` share: whole detectors of mmdetection3d, as they are, running on triops.

Each network is built from the config that mmdetection3d ships, with random weights. The scene is synthetic, so nothing
has to be downloaded. docs/dropin/mmdetection.md says how to install mmdetection3d.
"""

from __future__ import annotations

import argparse
import copy
import math
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from pictures import draw_detections
from torch import Tensor, nn
from train_sparse_shapes import progress_bar

import triops.compat.mmcv  # noqa: F401 - supplies mmcv._ext, which mmdetection3d imports below
from triops import _op, scenes

KITTI = ("Pedestrian", "Cyclist", "Car")
NUSCENES = (
    "car", "truck", "construction_vehicle", "bus", "trailer", "barrier", "motorcycle", "bicycle", "pedestrian",
    "traffic_cone",
)  # fmt: skip
CPU_POINTS = 20_000  # of a scene, where nothing else is said: a step then takes seconds
# the classes of a synthetic scene, by the length of the box
LENGTHS = {"pedestrian": (0.0, 1.5), "car": (1.5, 7.0), "truck": (7.0, math.inf)}


@dataclass(frozen=True)
class Network:
    """A detector: where mmdetection3d keeps its config, and the scale that it is made for."""

    title: str
    config: str
    points: int  # of one scene, within the range of the config
    features: int  # of one point: x, y, z, intensity and, for nuScenes, the age of its sweep
    classes: tuple[str, ...]

    @property
    def velocities(self) -> bool:
        """nuScenes' boxes move, KITTI's do not."""
        return self.classes == NUSCENES


NETWORKS = {
    "pointpillars": Network(
        "PointPillars", "pointpillars/pointpillars_hv_secfpn_8xb6-160e_kitti-3d-3class.py", 20_000, 4, KITTI
    ),
    "second": Network("SECOND", "second/second_hv_secfpn_8xb6-80e_kitti-3d-3class.py", 20_000, 4, KITTI),
    "parta2": Network("PartA2", "parta2/parta2_hv_secfpn_8xb2-cyclic-80e_kitti-3d-3class.py", 20_000, 4, KITTI),
    "centerpoint": Network(
        "CenterPoint", "centerpoint/centerpoint_voxel0075_second_secfpn_8xb4-cyclic-20e_nus-3d.py", 300_000, 5, NUSCENES
    ),
}


def config(network: Network) -> Any:
    """The config that mmdetection3d ships, unchanged."""
    import mmdet3d
    from mmengine.config import Config

    package = Path(mmdet3d.__file__).parent
    # in the installed package, and in a checkout
    folder = next(f for f in (package / ".mim" / "configs", package.parent / "configs") if f.is_dir())
    return Config.fromfile(folder / network.config)


def build(network: Network, device: str = "cpu", seed: int = 0, changes: dict[str, Any] | None = None) -> nn.Module:
    """The network of a config, some of whose settings may be changed ("backbone.depth": 18), with random weights."""
    from mmdet3d.registry import MODELS
    from mmdet3d.utils import register_all_modules
    from mmengine.logging import MMLogger

    MMLogger.get_instance("mmengine", log_level="WARNING")  # else every weight's initialisation is a line
    warnings.filterwarnings("ignore", module="mm(cv|det|det3d|engine)")
    register_all_modules()
    settings = config(network)
    settings.merge_from_dict({f"model.{key}": value for key, value in (changes or {}).items()})
    torch.manual_seed(seed)
    model: nn.Module = MODELS.build(settings.model)
    model.init_weights()
    return model.to(device)


def make_confident(model: nn.Module) -> None:
    """An untrained network calls everything background; with this it has boxes to suppress, as a trained one has."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("conv_cls.bias", "heatmap.1.bias")):
                parameter.zero_()


def point_range(model: Any) -> Tensor:
    """x, y and z of the near and of the far corner, float32 [2, 3]."""
    return torch.tensor(model.data_preprocessor.voxel_layer.point_cloud_range).view(2, 3)


def scene(network: Network, bounds: Tensor, points: int | None = None, seed: int = 0) -> dict[str, Any]:
    """One synthetic sweep as mmdetection3d takes it: points within the range, and the boxes that stand in it."""
    from mmdet3d.structures import Det3DDataSample, LiDARInstance3DBoxes
    from mmengine.structures import InstanceData

    count = points or network.points
    near, far = bounds
    fired = count
    while True:  # a sweep goes all around and far, the range need not
        sweep = scenes.lidar_scene(fired, 60, seed=seed)
        inside = ((sweep.points > near) & (sweep.points < far)).all(1)
        if int(inside.sum()) >= count:
            break
        fired *= 2
    g = torch.Generator().manual_seed(seed)
    kept = sweep.points[inside]
    kept = kept[torch.randperm(len(kept), generator=g)[:count].sort().values]
    more = torch.rand(count, network.features - 3, generator=g)

    labels = torch.full((len(sweep.boxes),), -1)
    for name, (least, most) in LENGTHS.items():
        for label, known in enumerate(network.classes):
            if known.lower() == name:
                labels[(sweep.boxes[:, 3] >= least) & (sweep.boxes[:, 3] < most)] = label
    stands = (labels >= 0) & ((sweep.boxes[:, :2] > near[:2]) & (sweep.boxes[:, :2] < far[:2])).all(1)
    boxes = sweep.boxes[stands]
    if network.velocities:
        boxes = torch.cat([boxes, torch.zeros(len(boxes), 2)], 1)
    sample = Det3DDataSample()
    sample.set_metainfo({"box_type_3d": LiDARInstance3DBoxes, "box_mode_3d": 0, "sample_idx": seed})
    truth = LiDARInstance3DBoxes(boxes, box_dim=boxes.shape[1], origin=(0.5, 0.5, 0.5))
    sample.gt_instances_3d = InstanceData(bboxes_3d=truth, labels_3d=labels[stands])
    sample.gt_instances = InstanceData()
    return {"points": torch.cat([kept, more], 1), "sample": sample}


def batch(made: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return {"inputs": {"points": [one["points"] for one in made]}, "data_samples": [one["sample"] for one in made]}


def losses(model: Any, data: dict[str, Any]) -> tuple[Tensor, dict[str, Any]]:
    """The loss to differentiate, and its parts by name."""
    model.train()
    # PartA2 writes into the truth that it is given
    data = {**data, "data_samples": [copy.deepcopy(sample) for sample in data["data_samples"]]}
    prepared = model.data_preprocessor(data, training=True)
    total, parts = model.parse_losses(model(**prepared, mode="loss"))
    return total, parts


@torch.no_grad()
def predict(model: Any, data: dict[str, Any]) -> list[Any]:
    """For each scene bboxes_3d, scores_3d and labels_3d."""
    model.eval()
    prepared = model.data_preprocessor(data, training=False)
    return [sample.pred_instances_3d for sample in model(**prepared, mode="predict")]


class Clock:
    """How long the operators of triops take, by name, while it is on."""

    def __init__(self, device: str) -> None:
        self.cuda = torch.device(device).type == "cuda"
        self.calls: list[tuple[str, Any, Any]] = []

    @contextmanager
    def on(self) -> Iterator[None]:
        before, _op.recorder = _op.recorder, self._run
        try:
            yield
        finally:
            _op.recorder = before

    def _run(self, operator: Any, kernel: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        begin = self.now()
        result = kernel(*args)
        self.calls.append((operator.name, begin, self.now()))
        return result

    def now(self) -> Any:
        if not self.cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, begin: Any, end: Any) -> float:
        """Between two results of `now`; on a GPU the device must have got there."""
        return begin.elapsed_time(end) / 1000 if self.cuda else end - begin

    def totals(self) -> Counter[str]:
        """Seconds by operator."""
        if self.cuda:
            torch.cuda.synchronize()
        total: Counter[str] = Counter()
        for name, begin, end in self.calls:
            total[name] += self.seconds(begin, end)
        return total


@contextmanager
def reference_in_backward() -> Iterator[None]:
    """Also behind a forward pass by kernels, and on autograd's threads, neither of which `reference_backend` covers."""
    before, _op.recorder = _op.recorder, lambda operator, kernel, args: operator.reference(*args)
    try:
        yield
    finally:
        _op.recorder = before


def train(model: Any, data: dict[str, Any], steps: int, rate: float) -> list[float]:
    """The losses of a few steps on one scene."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.01)
    history = []
    with progress_bar(steps) as show:
        for step in range(1, steps + 1):
            loss, _ = losses(model, data)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 10)
            optimizer.step()
            history.append(loss.item())
            show(step, f"loss {history[-1]:.3f}")
    return history


@torch.no_grad()
def settle_norms(model: Any, data: dict[str, Any]) -> None:
    """Running means of a few steps are those of random weights; this makes them the scene's."""
    norms = [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    before = [norm.momentum for norm in norms]
    for norm in norms:
        norm.momentum = 1.0
    losses(model, data)
    for norm, momentum in zip(norms, before, strict=True):
        norm.momentum = momentum


def main(name: str, arguments: Sequence[str] | None = None) -> bool:
    """Builds, trains, predicts, and says what happened. True when the loss fell."""
    network = NETWORKS[name]
    parser = argparse.ArgumentParser(description=f"{network.title} of mmdetection3d on triops: {network.config}")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--points", type=int, help=f"of the scene; default {network.points}, on a CPU {CPU_POINTS}")
    parser.add_argument("--rate", type=float, default=1e-3, help="learning rate")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--picture", type=Path, default=Path(f"{name}.png"), help="of what was found, from above")
    options = parser.parse_args(arguments)
    if find_spec("mmdet3d") is None:
        raise SystemExit(
            "mmdetection3d is not installed: pip install 'triops[mmdet3d]', then "
            "pip install --no-deps mmdet3d nuscenes-devkit lyft-dataset-sdk pyquaternion trimesh "
            "(docs/dropin/mmdetection.md)"
        )
    count = options.points or (CPU_POINTS if options.device == "cpu" else network.points)
    model = build(network, options.device, options.seed)
    weights = sum(p.numel() for p in model.parameters())
    data = batch([scene(network, point_range(model), count, options.seed)])
    points, truth = data["inputs"]["points"][0], data["data_samples"][0].gt_instances_3d
    print(f"{network.title}: {weights / 1e6:.1f} million weights, {len(points)} points, {len(truth)} objects")

    clock = Clock(options.device)
    begin = time.perf_counter()
    with clock.on():
        history = train(model, data, options.steps, options.rate)
        spent = clock.totals()
        trained = time.perf_counter() - begin
        settle_norms(model, data)
        boxes = predict(model, data)[0]
    print(f"loss {history[0]:.3f} -> {history[-1]:.3f} in {options.steps} steps, {trained:.1f} s on {options.device}")
    print(f"of that in triops {sum(spent.values()) / trained:.0%}: " + _most(spent, trained))
    print(f"{len(boxes.scores_3d)} boxes predicted, the best with a score of {_best(boxes.scores_3d):.2f}")
    # Scores of a few steps are low, and so is the threshold of a config: as many of the best as there are objects.
    best = boxes.scores_3d.argsort(descending=True)[: len(truth)]
    title = f"{network.title}, {options.steps} steps on this scene: the {len(best)} boxes of the highest scores"
    found = boxes.bboxes_3d[best].tensor
    draw_detections(points, truth.bboxes_3d.tensor, found, title, options.picture)
    print(f"{options.picture}: the objects of the scene and what was found")
    return history[-1] < history[0]


def _most(spent: Counter[str], whole: float) -> str:
    return ", ".join(f"{name} {seconds / whole:.1%}" for name, seconds in spent.most_common(4))


def _best(scores: Tensor) -> float:
    return scores.max().item() if len(scores) else 0.0
