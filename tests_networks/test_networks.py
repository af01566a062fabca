"""Whole detectors of mmdetection3d, unmodified, on triops: they predict, they train, and every backend agrees.

Run by `make test-networks`, in an environment that has mmdetection3d and no compiled mmcv.
"""

from __future__ import annotations

import copy
import inspect
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))

import detectors

import triops

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
POINTS = 8_000
# what each network cannot do without
OPERATORS = {
    "pointpillars": {"voxelize_padded", "nms_rotated"},
    "second": {"voxelize_padded", "packed_pairs", "sparse_conv", "sparse_conv_backward_weight", "nms_rotated"},
    "parta2": {
        "voxelize_padded", "packed_pairs", "sparse_conv", "sparse_max_pool_from_zero", "points_in_boxes",
        "box_iou_rotated", "roiaware_pool3d_forward", "roiaware_pool3d_backward", "nms", "nms_rotated",
    },
    "centerpoint": {"voxelize_padded", "packed_pairs", "sparse_conv", "sparse_conv_backward_weight", "nms_rotated"},
}  # fmt: skip


@dataclass
class Outcome:
    parts: dict[str, float]  # of the loss
    boxes: Tensor  # [K, 7 or 9]
    scores: Tensor
    labels: Tensor
    loss: Tensor  # to be differentiated
    model: Any


def run(model: Any, data: dict[str, Any]) -> Outcome:
    """A prediction and a loss, from the same state each time."""
    model = copy.deepcopy(model)
    torch.manual_seed(0)
    np.random.seed(0)  # heads draw samples
    found = detectors.predict(model, data)[0]
    loss, parts = detectors.losses(model, data)
    values = {name: float(value.detach()) for name, value in parts.items()}
    return Outcome(values, found.bboxes_3d.tensor, found.scores_3d, found.labels_3d, loss, model)


def gradients(outcome: Outcome) -> dict[str, Tensor | None]:
    outcome.model.zero_grad()
    outcome.loss.backward(retain_graph=True)
    return {name: p.grad for name, p in outcome.model.named_parameters()}


@pytest.fixture(scope="module", params=detectors.NETWORKS)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def case(name: str) -> tuple[Any, dict[str, Any]]:
    network = detectors.NETWORKS[name]
    model = detectors.build(network, DEVICE)
    detectors.make_confident(model)
    shift_norms(model)
    made = detectors.scene(network, detectors.point_range(model), POINTS)
    if name == "parta2":  # its second stage learns from proposals that meet an object: let there be some
        torch.nn.init.normal_(model.rpn_head.conv_reg.weight, std=1e-4)
        made["sample"].gt_instances_3d = car_park()
    return model, detectors.batch([made])


def car_park() -> Any:
    """Cars as the anchors have them, so many that they overlap."""
    from mmdet3d.structures import LiDARInstance3DBoxes
    from mmengine.structures import InstanceData

    places = torch.cartesian_prod(torch.arange(3.0, 20.0), torch.arange(-15.0, 15.0))
    boxes = torch.cat([places, torch.tensor([-1.78, 3.9, 1.6, 1.56, 0.0]).expand(len(places), 5)], 1)
    labels = torch.full((len(boxes),), detectors.KITTI.index("Car"))
    return InstanceData(bboxes_3d=LiDARInstance3DBoxes(boxes), labels_3d=labels)


def shift_norms(model: Any) -> None:
    """Fresh norms put empty ground, most of any map, at the kink of the ReLU behind them: rounding would decide."""
    for module in model.modules():
        if isinstance(module, torch.nn.modules.batchnorm._BatchNorm):
            torch.nn.init.uniform_(module.bias, -0.5, 0.5)


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


def test_every_part_of_the_loss_is_finite(outcome: Outcome) -> None:
    assert outcome.parts["loss"] > 0
    assert all(np.isfinite(value) for value in outcome.parts.values())


def test_every_weight_gets_a_finite_gradient(grads: dict[str, Tensor]) -> None:
    assert [name for name, grad in grads.items() if grad is None] == []
    assert [name for name, grad in grads.items() if not grad.isfinite().all()] == []
    # the boxes of a class that the scene does not have teach nothing
    assert sum(bool(grad.any()) for grad in grads.values()) > 0.7 * len(grads)


@pytest.mark.usefixtures("outcome", "grads")
def test_it_runs_on_the_operators_of_triops(name: str, clock: detectors.Clock) -> None:
    assert OPERATORS[name] - {operator for operator, _, _ in clock.calls} == set()


def test_the_losses_are_those_of_the_reference(outcome: Outcome, expected: Outcome) -> None:
    assert outcome.parts == pytest.approx(expected.parts, rel=1e-4, abs=1e-5)


def test_the_gradients_are_those_of_the_reference(outcome: Outcome, grads: dict[str, Tensor]) -> None:
    """Of one forward pass: where a ReLU's input is within rounding of 0, two passes may differ in all that follows."""
    with detectors.reference_in_backward():
        expected = gradients(outcome)
    apart = {
        name: (grad - expected[name]).norm() / expected[name].norm().clamp(min=1e-6) for name, grad in grads.items()
    }
    assert max(apart.values()) < 1e-3


def test_the_boxes_are_those_of_the_reference(outcome: Outcome, expected: Outcome) -> None:
    assert_same_boxes(outcome, expected)


def assert_same_boxes(outcome: Outcome, expected: Outcome) -> None:
    """Empty ground looks alike everywhere: of boxes on it that have one score, size and heading, either may be kept."""
    assert outcome.labels.bincount().tolist() == expected.labels.bincount().tolist()
    torch.testing.assert_close(outcome.scores, expected.scores, rtol=0, atol=1e-4)
    for box, score, label in zip(outcome.boxes, outcome.scores, outcome.labels, strict=True):
        here = (expected.boxes[:, :2] - box[:2]).norm(dim=1) < 1e-2
        twins = (expected.scores - score).abs() < 1e-6
        alike = ((expected.boxes[:, 2:] - box[2:]).norm(dim=1) < 1e-2) & (expected.labels == label)
        assert (alike & (here | twins)).any(), f"no such box: {box.tolist()}, label {label}, score {score}"


# mmdetection3d takes spconv's layers where it finds spconv, and mmcv's where it does not

WITH_SPCONV = """
import sys

sys.path.insert(0, {folder!r})
import triops.compat.spconv
import spconv.pytorch, torch
import test_networks
from mmdet3d.models.layers.spconv import IS_SPCONV2_AVAILABLE

assert IS_SPCONV2_AVAILABLE
network = test_networks.detectors.NETWORKS[{name!r}]
model = test_networks.detectors.build(network, test_networks.DEVICE)
weights, data = torch.load({inputs!r}, weights_only=False)
model.load_state_dict(weights)
outcome = test_networks.run(model, data)
torch.save((outcome.parts, outcome.boxes, outcome.scores, outcome.labels), {outputs!r})
print(sum(isinstance(m, spconv.pytorch.SparseConvolution) for m in model.modules()))
"""


def test_with_spconv_supplied_the_same_weights_give_the_same_answers(
    name: str, case: tuple[Any, dict[str, Any]], outcome: Outcome, tmp_path: Path
) -> None:
    """The weights are those of mmcv's layers, which mmdetection3d turns into spconv's as it loads them."""
    from mmdet3d.models.layers.spconv import IS_SPCONV2_AVAILABLE

    assert not IS_SPCONV2_AVAILABLE
    inputs, outputs = tmp_path / "inputs.pt", tmp_path / "outputs.pt"
    model, data = case
    torch.save((model.state_dict(), data), inputs)
    folder = str(Path(__file__).parent)
    code = WITH_SPCONV.format(folder=folder, name=name, inputs=str(inputs), outputs=str(outputs))
    layers = int(in_a_new_process(code).splitlines()[-1])
    assert (layers > 0) == (name != "pointpillars")
    parts, *found = torch.load(outputs, weights_only=False)
    assert parts == pytest.approx(outcome.parts, rel=1e-4, abs=1e-5)
    assert_same_boxes(Outcome(parts, *found, outcome.loss, outcome.model), outcome)


# what activation does to mmcv, and what it leaves alone


def in_a_new_process(code: str) -> str:
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_importing_triops_alone_leaves_mmcv_without_operators() -> None:
    code = """
import triops, triops.nn
try:
    import mmcv.ops
except ModuleNotFoundError as error:
    print(error.name)
"""
    assert in_a_new_process(code) == "mmcv._ext"


def test_six_functions_of_mmcv_are_replaced_and_no_more() -> None:
    import mmcv.ops  # noqa: F401

    ours = Path(triops.__file__).parent  # a checkout may have "triops" anywhere else in its path
    replaced = {
        f"{module}.{name}"
        for module, members in [(m, vars(sys.modules[m])) for m in sys.modules if m.partition(".")[0] == "mmcv"]
        for name, function in members.items()
        if inspect.isfunction(function) and module not in ("mmcv._ext",)
        and Path(function.__code__.co_filename).is_relative_to(ours)
    }  # fmt: skip
    assert {name.rpartition(".")[2] for name in replaced} == {
        "points_in_boxes_part", "points_in_boxes_all", "diff_iou_rotated_2d", "diff_iou_rotated_3d",
        "furthest_point_sample", "knn",
    }  # fmt: skip


def test_mmdetection3d_and_mmcv_say_that_they_are_complete() -> None:
    from mmcv.utils.ext_loader import check_ops_exist

    assert check_ops_exist()
