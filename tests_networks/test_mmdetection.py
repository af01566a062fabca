"""Whole detectors of mmdetection, from the configs that it ships, on triops: they predict, they train, and every
backend agrees.

Backbones are a quarter as wide and convolutions behind them an eighth, transformers are two layers deep, images small,
proposals and queries few, since the reference takes boxes one by one. All else is as shipped.
"""

from __future__ import annotations

import copy
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))

import detectors
from test_networks import DEVICE, reference_in_backward

import triops

SIZE = 96, 160  # height, width of an image
MOST = {"num_layers": 2, "num_queries": 40, "num_dn_queries": 20, "nms_pre": 200, "max_per_img": 40, "num": 64}


@dataclass(frozen=True)
class Network:
    config: str
    operators: set[str]  # what it cannot do without
    masks: bool = False


NETWORKS = {
    "faster_rcnn": Network(
        "faster_rcnn/faster-rcnn_r50_fpn_1x_coco.py", {"roi_align_forward", "roi_align_backward", "nms"}
    ),
    "mask_rcnn_dcnv2": Network(
        "dcnv2/mask-rcnn_r50-mdconv-c3-c5_fpn_1x_coco.py",
        {"deform_conv2d", "deform_conv2d_backward", "roi_align_forward", "roi_align_backward", "nms"},
        masks=True,
    ),
    "reppoints": Network(
        "reppoints/reppoints-moment_r50_fpn-gn_head-gn_1x_coco.py",
        {"deform_conv2d", "deform_conv2d_backward", "nms"},
    ),
    "deformable_detr": Network(
        "deformable_detr/deformable-detr_r50_16xb2-50e_coco.py", {"ms_deform_attn", "ms_deform_attn_backward"}
    ),
    "dino": Network("dino/dino-4scale_r50_8xb2-12e_coco.py", {"ms_deform_attn", "ms_deform_attn_backward"}),
}


def build(network: Network) -> Any:
    import mmdet
    from mmdet.registry import MODELS
    from mmdet.utils import register_all_modules
    from mmengine.config import Config
    from mmengine.logging import MMLogger

    MMLogger.get_instance("mmengine", log_level="WARNING")  # else every weight's initialisation is a line
    warnings.filterwarnings("ignore", module="mm(cv|det|engine)")
    register_all_modules()
    settings = Config.fromfile(Path(mmdet.__file__).parent / ".mim" / "configs" / network.config).model
    backbone = settings.pop("backbone")
    shrink(settings, channels=1 if "encoder" in settings else 8)
    backbone.update(base_channels=16, init_cfg=None)  # where a ResNet has 64
    settings.neck.in_channels = [channels // 4 for channels in settings.neck.in_channels]
    settings.backbone = backbone
    torch.manual_seed(0)
    model = MODELS.build(settings)
    model.init_weights()
    make_confident(model)
    return model.to(DEVICE)


def shrink(settings: Any, channels: int) -> None:
    """Divides numbers of channels and limits those of layers, proposals and queries, wherever they stand."""
    for key, value in settings.items():
        if isinstance(value, dict):
            shrink(value, channels)
        elif isinstance(value, list | tuple):
            for one in value:
                if isinstance(one, dict):
                    shrink(one, channels)
        elif isinstance(value, int) and value > 1:
            if key.endswith("channels"):
                settings[key] = value // channels
            else:
                settings[key] = min(value, MOST.get(key, value))


def make_confident(model: Any) -> None:
    """An untrained network is sure of nothing; with this its scores vary, as those of a trained one do."""
    for name, parameter in model.named_parameters():
        if name.endswith(("fc_cls.weight", "reppoints_cls_out.weight")):
            torch.nn.init.normal_(parameter, std=0.2)


def picture(network: Network) -> dict[str, Any]:
    """A noisy image with three bright rectangles, as mmdetection takes it."""
    from mmdet.structures import DetDataSample
    from mmdet.structures.mask import BitmapMasks
    from mmengine.structures import InstanceData

    height, width = SIZE
    boxes = torch.tensor([[10.0, 12.0, 50.0, 60.0], [60.0, 20.0, 120.0, 90.0], [20.0, 64.0, 50.0, 92.0]])
    image = torch.randint(0, 80, (3, height, width), generator=torch.Generator().manual_seed(0))
    masks = np.zeros((len(boxes), height, width), np.uint8)
    for i, (x1, y1, x2, y2) in enumerate(boxes.int().tolist()):
        image[i, y1:y2, x1:x2] += 150
        masks[i, y1:y2, x1:x2] = 1
    sample = DetDataSample()
    sample.set_metainfo({"img_shape": SIZE, "ori_shape": SIZE, "scale_factor": (1.0, 1.0), "img_id": 0})
    sample.gt_instances = InstanceData(bboxes=boxes, labels=torch.tensor([0, 2, 7]))
    if network.masks:
        sample.gt_instances.masks = BitmapMasks(masks, height, width)
    return {"inputs": [image.to(torch.uint8)], "data_samples": [sample]}


@dataclass
class Outcome:
    parts: dict[str, float]  # of the loss
    boxes: Tensor  # [K, 4]
    scores: Tensor
    labels: Tensor
    loss: Tensor  # to be differentiated
    model: Any


def run(model: Any, data: dict[str, Any]) -> Outcome:
    """A prediction and a loss, from the same state each time."""
    model = copy.deepcopy(model)
    torch.manual_seed(0)
    np.random.seed(0)
    with torch.no_grad():
        model.eval()
        prepared = model.data_preprocessor(copy.deepcopy(data), training=False)
        found = model(**prepared, mode="predict")[0].pred_instances
    model.train()
    torch.manual_seed(0)
    loss, parts = model.parse_losses(model(**model.data_preprocessor(copy.deepcopy(data), training=True), mode="loss"))
    values = {name: float(value.detach()) for name, value in parts.items()}
    return Outcome(values, found.bboxes, found.scores, found.labels, loss, model)


def gradients(outcome: Outcome) -> dict[str, Tensor | None]:
    outcome.model.zero_grad()
    outcome.loss.backward(retain_graph=True)
    return {name: p.grad for name, p in outcome.model.named_parameters() if p.requires_grad}


@pytest.fixture(scope="module", params=NETWORKS)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def attention(value: Tensor, shapes: Tensor, locations: Tensor, weights: Tensor) -> Tensor:
    """What mmcv does on a GPU. On a CPU it takes a formulation in torch, which knows nothing of its extension."""
    from mmcv.ops.multi_scale_deform_attn import MultiScaleDeformableAttnFunction

    sizes = shapes.prod(1)
    return MultiScaleDeformableAttnFunction.apply(value, shapes, sizes.cumsum(0) - sizes, locations, weights, 64)


@pytest.fixture(scope="module", autouse=True)
def own_attention() -> Iterator[Callable[..., Tensor]]:
    """mmcv's attention through its extension; yields the formulation that it would take on a CPU."""
    from mmcv.ops import multi_scale_deform_attn as module

    before = module.multi_scale_deformable_attn_pytorch
    module.multi_scale_deformable_attn_pytorch = attention
    yield before
    module.multi_scale_deformable_attn_pytorch = before


@pytest.fixture(scope="module")
def case(name: str) -> tuple[Any, dict[str, Any]]:
    return build(NETWORKS[name]), picture(NETWORKS[name])


@pytest.fixture(scope="module")
def clock() -> detectors.Clock:
    return detectors.Clock(DEVICE)


@pytest.fixture(scope="module")
def outcome(case: tuple[Any, dict[str, Any]], clock: detectors.Clock) -> Outcome:
    with clock.on():
        return run(*case)


@pytest.fixture(scope="module")
def grads(outcome: Outcome, clock: detectors.Clock) -> dict[str, Tensor | None]:
    with clock.on():
        return gradients(outcome)


@pytest.fixture(scope="module")
def expected(case: tuple[Any, dict[str, Any]]) -> Outcome:
    with triops.reference_backend():
        return run(*case)


def test_it_predicts_boxes(outcome: Outcome) -> None:
    assert len(outcome.boxes) > 0
    assert len(outcome.boxes) == len(outcome.scores) == len(outcome.labels)
    assert outcome.boxes.isfinite().all()
    assert ((outcome.scores >= 0) & (outcome.scores <= 1)).all()


def test_every_weight_gets_a_finite_gradient(outcome: Outcome, grads: dict[str, Tensor]) -> None:
    assert outcome.parts["loss"] > 0
    assert all(np.isfinite(value) for value in outcome.parts.values())
    assert [name for name, grad in grads.items() if grad is None] == []
    assert [name for name, grad in grads.items() if not grad.isfinite().all()] == []


@pytest.mark.usefixtures("outcome", "grads")
def test_it_runs_on_the_operators_of_triops(name: str, clock: detectors.Clock) -> None:
    called = {operator for operator, _, _ in clock.calls}
    assert NETWORKS[name].operators - called == set()


def test_losses_and_boxes_are_those_of_the_reference(outcome: Outcome, expected: Outcome) -> None:
    assert outcome.parts == pytest.approx(expected.parts, rel=1e-4, abs=1e-5)
    torch.testing.assert_close(outcome.scores, expected.scores, rtol=0, atol=1e-4)
    for box, label in zip(outcome.boxes, outcome.labels, strict=True):
        alike = (expected.boxes - box).abs().amax(1) < 1e-2
        assert (alike & (expected.labels == label)).any(), f"no such box: {box.tolist()}, label {label}"


def test_gradients_are_those_of_the_reference(outcome: Outcome, grads: dict[str, Tensor]) -> None:
    """Of one forward pass: where a ReLU's input is within rounding of 0, two passes may differ in all that follows."""
    with reference_in_backward():
        expected = gradients(outcome)
    apart = {
        name: float((grad - expected[name]).norm() / expected[name].norm().clamp(min=1e-6))
        for name, grad in grads.items()
    }
    assert max(apart.values()) < 1e-3


def test_attention_is_mmcvs_own_formulation(own_attention: Callable[..., Tensor]) -> None:
    shapes = torch.tensor([[6, 5], [3, 2]], device=DEVICE)
    g = torch.Generator().manual_seed(0)
    value = torch.randn(2, 36, 4, 8, generator=g).to(DEVICE).requires_grad_()
    locations = (torch.rand(2, 7, 4, 2, 3, 2, generator=g) * 1.2 - 0.1).to(DEVICE).requires_grad_()
    weights = torch.rand(2, 7, 4, 2, 3, generator=g).to(DEVICE).requires_grad_()
    results = [function(value, shapes, locations, weights) for function in (attention, own_attention)]
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)
    first, second = (torch.autograd.grad(result.square().sum(), (value, locations, weights)) for result in results)
    for mine, theirs in zip(first, second, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-3)
