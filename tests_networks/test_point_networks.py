"""Networks of mmdetection3d on point sets, from the configs that it ships, on triops: they predict, they train, and
every backend agrees.

Clouds are small. PointNet++ predicts in patches of 3 m with 1,500 points, where the config has 1.5 m and 8,192;
PV-RCNN suppresses 1,000 boxes to 300 proposals, in prediction 300 to 50, where it has 9,000 to 512 and 1,024 to 100.
FCAF3D has 18 layers and keeps 300 sites of a cloud and level, where it has 34 and 100,000; it and MinkUNet run on the
MinkowskiEngine that triops supplies. All else, the numbers of sampled points too, is as shipped.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))

import detectors
from test_networks import DEVICE, assert_same_boxes, car_park, gradients, run, shift_norms
from test_networks import Outcome as Detection

import triops
import triops.compat.minkowski_engine  # supplies MinkowskiEngine, which FCAF3D and a MinkUNet import
import triops.compat.torchsparse  # supplies torchsparse, which SPVCNN and the other MinkUNet import

SAMPLED = {"furthest_point_sample", "ball_query", "gather_points", "gather_points_backward"}
SPARSE = {"submanifold_neighbors", "sparse_neighbors", "packed_pairs", "sparse_conv", "sparse_conv_backward_weight"}


def network(config: str, *classes: str) -> detectors.Network:
    return detectors.Network(Path(config).stem, config, points=0, features=4, classes=classes)


def road(points: int) -> dict[str, Any]:
    """A sweep within the range of KITTI, and the cars in it."""
    from mmdet3d.structures import PointData

    bounds = torch.tensor([[0.0, -40.0, -3.0], [70.4, 40.0, 1.0]])
    made = detectors.scene(network("", "Car"), bounds, points)
    made["sample"].gt_pts_seg = PointData()
    return made


def full_road(points: int) -> dict[str, Any]:
    """The same with cars everywhere, so that proposals of random weights meet some."""
    made = road(points)
    made["sample"].gt_instances_3d = car_park()
    return made


def room(points: int, features: int, seed: int) -> dict[str, Any]:
    """A floor of 4 m by 4 m and the surfaces of six pieces of furniture: points, boxes and a class for each point."""
    from mmdet3d.structures import DepthInstance3DBoxes, Det3DDataSample, PointData
    from mmengine.structures import InstanceData

    g = torch.Generator().manual_seed(seed)
    places = torch.cartesian_prod(torch.tensor([-1.2, 0.0, 1.2]), torch.tensor([-1.0, 1.0]))
    sizes = torch.rand(6, 3, generator=g) * 0.5 + 0.5
    boxes = torch.cat([places, torch.zeros(6, 1), sizes, torch.rand(6, 1, generator=g)], 1)
    labels = torch.arange(6)

    of = torch.randint(0, 9, (points,), generator=g)  # the object of a point; from 6 on it is the floor
    within = torch.rand(points, 3, generator=g) - 0.5
    side = torch.randint(0, 3, (points, 1), generator=g)
    within = within.scatter(1, side, within.gather(1, side).sign() * 0.45)  # a little inside the box
    box = boxes[of.clamp(max=5)]
    x, y, z = (within * box[:, 3:6]).unbind(1)
    cos, sin = box[:, 6].cos(), box[:, 6].sin()
    on_box = torch.stack([box[:, 0] + x * cos - y * sin, box[:, 1] + x * sin + y * cos, z + box[:, 5] / 2], 1)
    on_floor = (torch.rand(points, 3, generator=g) - 0.5) * torch.tensor([4.0, 4.0, 0.02])
    xyz = torch.where((of < 6)[:, None], on_box, on_floor)
    more = torch.rand(points, features - 3, generator=g) if features > 4 else xyz[:, 2:]  # colors, or the height

    sample = Det3DDataSample()
    sample.set_metainfo({"box_type_3d": DepthInstance3DBoxes, "box_mode_3d": 2, "sample_idx": seed})
    sample.gt_instances_3d = InstanceData(bboxes_3d=DepthInstance3DBoxes(boxes), labels_3d=labels)
    sample.gt_pts_seg = PointData(pts_semantic_mask=of)
    return {"points": torch.cat([xyz, more], 1), "sample": sample}


def labelled_road(points: int) -> dict[str, Any]:
    """A sweep with a class for each point."""
    made = road(points)
    made["sample"].gt_pts_seg.pts_semantic_mask = torch.arange(points) % 19
    return made


@dataclass(frozen=True)
class Case:
    network: detectors.Network
    scenes: Callable[[], list[dict[str, Any]]]
    operators: set[str]  # what it cannot do without
    changes: dict[str, Any] = field(default_factory=dict)  # of the shipped config


CASES = {
    "votenet": Case(
        network("votenet/votenet_8xb16_sunrgbd-3d.py"),
        lambda: [room(3_000, 4, seed) for seed in range(2)],
        SAMPLED | {"three_nn", "three_interpolate", "three_interpolate_backward", "points_in_boxes_all"},
    ),
    "pointnet2_ssg": Case(
        network("pointnet2/pointnet2_ssg_2xb16-cosine-200e_scannet-seg.py"),
        lambda: [room(1_500, 6, seed) for seed in range(2)],
        SAMPLED | {"three_nn", "three_interpolate", "three_interpolate_backward"},
        {"test_cfg.num_points": 1_500, "test_cfg.block_size": 3.0},
    ),
    "3dssd": Case(
        network("3dssd/3dssd_4xb4_kitti-3d-car.py", "Car"),
        lambda: [road(5_000)],
        SAMPLED | {"furthest_point_sample_with_dist", "points_in_boxes_all", "nms"},
    ),
    "pv_rcnn": Case(
        network("pv_rcnn/pv_rcnn_8xb2-80e_kitti-3d-3class.py", *detectors.KITTI),
        lambda: [full_road(2_000)],
        {
            "voxelize_padded",
            "packed_pairs",
            "sparse_conv",
            "furthest_point_sample",
            "ball_query",
            "gather_points",
            "gather_points_backward",
            "points_in_boxes",
            "box_iou_rotated",
            "nms_rotated",
        },
        {
            "train_cfg.rpn_proposal.nms_pre": 1_000,
            "train_cfg.rpn_proposal.nms_post": 300,
            "train_cfg.rpn_proposal.max_num": 300,
            "test_cfg.rpn.nms_pre": 300,
            "test_cfg.rpn.nms_post": 50,
            "test_cfg.rpn.max_num": 50,
        },
    ),
    "spvcnn": Case(
        network("spvcnn/spvcnn_w16_8xb2-amp-15e_semantickitti.py"),
        lambda: [room(600, 4, seed) for seed in range(2)],
        SPARSE | {"three_interpolate", "three_interpolate_backward"},
    ),
    "minkunet_torchsparse": Case(
        network("minkunet/minkunet18_w16_torchsparse_8xb2-amp-15e_semantickitti.py"),
        lambda: [room(600, 4, seed) for seed in range(2)],
        SPARSE,
    ),
    "fcaf3d": Case(
        network("fcaf3d/fcaf3d_2xb8_sunrgbd-3d-10class.py"),
        lambda: [room(800, 6, seed) for seed in range(2)],
        {"site_neighbors", "packed_pairs", "sparse_conv", "sparse_max_pool", "gather_points", "nms_rotated"},
        {"backbone.depth": 18, "bbox_head.pts_prune_threshold": 300},
    ),
    "minkunet_minkowski": Case(
        network("minkunet/minkunet34_w32_minkowski_8xb2-laser-polar-mix-3x_semantickitti.py"),
        lambda: [labelled_road(1_500)],
        {"site_neighbors", "packed_pairs", "sparse_conv"},
    ),
}


@dataclass
class Segmentation:
    parts: dict[str, float]  # of the loss
    logits: Tensor  # [classes, points]
    loss: Tensor  # to be differentiated
    model: Any


def segment(model: Any, data: dict[str, Any]) -> Segmentation:
    """A prediction and a loss, from the same state each time."""
    model = copy.deepcopy(model)
    torch.manual_seed(0)  # of patches and of dropout
    with torch.no_grad():
        model.eval()
        prepared = model.data_preprocessor(data, training=False)
        found = model(**prepared, mode="predict")[0].pts_seg_logits.pts_seg_logits
    loss, parts = detectors.losses(model, data)
    return Segmentation({name: float(value.detach()) for name, value in parts.items()}, found, loss, model)


def outcome_of(model: Any, data: dict[str, Any]) -> Detection | Segmentation:
    return segment(model, data) if hasattr(model, "decode_head") else run(model, data)


@contextmanager
def proposals_of_the_first_run(kept: dict[str, Any]) -> Iterator[None]:
    """Rounding decides which of two proposals with all but one score survives: all runs of PV-RCNN go on with those of
    the first, so that their second stages can be compared."""
    from mmdet3d.models import PVRCNNRoiHead

    def given(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(head: Any, features: Any, proposals: Any, *rest: Any, **options: Any) -> Any:
            first = kept.setdefault(method.__name__, proposals)
            torch.testing.assert_close(proposals[0].scores_3d, first[0].scores_3d, rtol=0, atol=1e-4)
            return method(head, features, copy.deepcopy(first), *rest, **options)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for method in (PVRCNNRoiHead.loss, PVRCNNRoiHead.predict):
            patch.setattr(PVRCNNRoiHead, method.__name__, given(method))
        yield


def take_background(model: Any) -> None:
    """mmdet's focal loss in plain torch, for a CPU, refuses FCAF3D's label of background, -1: give it the last one."""
    from mmdet.models.losses import FocalLoss

    class WithBackground(FocalLoss):
        def forward(self, pred: Tensor, target: Tensor, *args: Any, **options: Any) -> Tensor:
            return super().forward(pred, target.where(target >= 0, pred.shape[1]), *args, **options)

    model.bbox_head.cls_loss.__class__ = WithBackground


@pytest.fixture(scope="module", autouse=True)
def tensors_stay_on_cpu() -> Iterator[None]:
    """The voxels of SPVCNN and MinkUNet are moved by `.cuda()`, whatever the device of the network is."""
    with pytest.MonkeyPatch.context() as patch:
        if DEVICE == "cpu":
            patch.setattr(Tensor, "cuda", lambda tensor, *_, **__: tensor)
        yield


@pytest.fixture(scope="module")
def kept() -> dict[str, Any]:
    return {}


@pytest.fixture(scope="module", params=CASES)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def case(name: str) -> tuple[Any, dict[str, Any]]:
    made = CASES[name]
    model: Any = detectors.build(made.network, DEVICE, changes=made.changes)
    detectors.make_confident(model)
    shift_norms(model)
    if name == "fcaf3d":
        take_background(model)
    if name == "minkunet_minkowski":  # else all points are of one class, whose bias is the highest
        torch.nn.init.normal_(model.decode_head.conv_seg.weight)
    if name == "pv_rcnn":  # its second stage learns from proposals that meet an object
        torch.nn.init.normal_(model.rpn_head.conv_reg.weight, std=1e-4)
    data = detectors.batch(made.scenes())
    if name in ("spvcnn", "minkunet_torchsparse"):  # else biases decide every point's class
        torch.nn.init.normal_(model.decode_head.conv_seg.weight, std=0.1)
        detectors.settle_norms(model, data)
    return model, data


@pytest.fixture(scope="module")
def clock() -> detectors.Clock:
    return detectors.Clock(DEVICE)


@pytest.fixture(scope="module")
def outcome(case: tuple[Any, dict[str, Any]], clock: detectors.Clock, kept: dict[str, Any]) -> Detection | Segmentation:
    with clock.on(), proposals_of_the_first_run(kept):
        return outcome_of(*case)


@pytest.fixture(scope="module")
def grads(outcome: Detection, clock: detectors.Clock) -> dict[str, Tensor | None]:
    with clock.on():
        return gradients(outcome)


@pytest.fixture(scope="module")
def expected(
    case: tuple[Any, dict[str, Any]], outcome: Detection | Segmentation, kept: dict[str, Any]
) -> Detection | Segmentation:
    with triops.reference_backend(), proposals_of_the_first_run(kept):
        return outcome_of(*case)


def test_it_predicts(outcome: Detection | Segmentation) -> None:
    if isinstance(outcome, Segmentation):
        assert outcome.logits.isfinite().all()
        assert len(outcome.logits.argmax(0).unique()) > 1
        return
    assert len(outcome.boxes) > 0
    assert outcome.boxes.isfinite().all()
    assert ((outcome.scores >= 0) & (outcome.scores <= 1)).all()


def test_every_weight_gets_a_finite_gradient(outcome: Detection, grads: dict[str, Tensor]) -> None:
    assert all(np.isfinite(value) and value > 0 for value in outcome.parts.values())
    assert [name for name, grad in grads.items() if grad is None] == []
    assert [name for name, grad in grads.items() if not grad.isfinite().all()] == []
    assert sum(bool(grad.any()) for grad in grads.values()) > 0.7 * len(grads)


@pytest.mark.usefixtures("outcome", "grads")
def test_it_runs_on_the_operators_of_triops(name: str, clock: detectors.Clock) -> None:
    assert CASES[name].operators - {operator for operator, _, _ in clock.calls} == set()


def test_losses_and_predictions_are_those_of_the_reference(
    outcome: Detection | Segmentation, expected: Detection | Segmentation
) -> None:
    assert outcome.parts == pytest.approx(expected.parts, rel=1e-4, abs=1e-5)
    if isinstance(outcome, Segmentation):
        torch.testing.assert_close(outcome.logits, expected.logits, rtol=1e-4, atol=1e-4)
    else:
        assert_same_boxes(outcome, expected)


def test_gradients_are_those_of_the_reference(outcome: Detection, grads: dict[str, Tensor]) -> None:
    """Of one forward pass: where a ReLU's input is within rounding of 0, two passes may differ in all that follows."""
    with detectors.reference_in_backward():
        expected = gradients(outcome)
    largest = max(float(grad.norm()) for grad in expected.values())
    least = max(1e-6, 1e-5 * largest)  # a bias before a norm has no gradient but rounding
    apart = {
        name: float((grad - expected[name]).norm() / expected[name].norm().clamp(min=least))
        for name, grad in grads.items()
    }
    assert max(apart.values()) < 1e-3
