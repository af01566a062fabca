"""Facts about the overlap of convex hulls and quadrilaterals, and about their suppression."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from support import run
from torch import Tensor

import triops
from triops.ops.convex_iou.samples import SAMPLES, quadrilaterals
from triops.ops.nms.samples import corners, predictions

BACKENDS = ["reference", "cpu", "gpu"]
SQUARE = [0.0, 0, 2, 0, 2, 2, 0, 2]
TRIANGLE = [0.0, 0, 2, 0, 0, 2]
BY_HAND = [
    ("the same", SQUARE, SQUARE, 1, 1),
    ("the same, the other way round", SQUARE, [0.0, 2, 2, 2, 2, 0, 0, 0], 1, 1),
    ("corners in a wrong order", SQUARE, [0.0, 0, 2, 2, 2, 0, 0, 2], 1, 1),
    ("half a side along", SQUARE, [1.0, 0, 3, 0, 3, 2, 1, 2], 1 / 3, 1 / 2),
    ("touching", SQUARE, [2.0, 0, 4, 0, 4, 2, 2, 2], 0, 0),
    ("a diamond inside", SQUARE, [1.0, 0, 2, 1, 1, 2, 0, 1], 1 / 2, 1 / 2),
    ("a triangle", SQUARE, TRIANGLE, 1 / 2, 1 / 2),
    ("a triangle across", TRIANGLE, [1.0, 0, 3, 0, 3, 2, 1, 2], 0.5 / 5.5, 0.5 / 2),
    ("points inside do not count", SQUARE, [0.0, 0, 2, 0, 2, 2, 0, 2, 1, 1, 0.5, 1], 1, 1),
    ("a line", SQUARE, [0.0, 0, 1, 1, 2, 2], 0, 0),
    ("a point", SQUARE, [1.0, 1], 0, 0),
    ("not finite", SQUARE, [0.0, 0, 2, 0, math.nan, 2, 0, 2], 0, 0),
]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("first", "second", "iou", "iof"), [c[1:] for c in BY_HAND], ids=[c[0] for c in BY_HAND])
def test_by_hand(first: list[float], second: list[float], iou: float, iof: float, backend: str) -> None:
    one, two = torch.tensor([first]), torch.tensor([second])
    assert run(backend, "convex_iou", (one, two, "iou", False)).item() == pytest.approx(iou, abs=1e-6)
    assert run(backend, "convex_iou", (one, two, "iof", True)).item() == pytest.approx(iof, abs=1e-6)


@pytest.mark.parametrize("backend", ["cpu", "gpu"])
@pytest.mark.parametrize("sample", [s for s in SAMPLES if s.scale != "network"], ids=str)
def test_backends_agree_bit_for_bit(sample: Any, backend: str) -> None:
    args = sample.make(torch.float32)
    assert torch.equal(run(backend, sample.operator, args).cpu(), run("reference", sample.operator, args))


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-5), (torch.float64, 1e-12)])
def test_rectangles_overlap_as_box_iou_rotated_says(dtype: torch.dtype, tolerance: float) -> None:
    boxes = predictions(100, 8)[0].to(dtype)
    quads = corners(boxes.float()).to(dtype) if dtype == torch.float32 else _corners64(boxes)
    expected = triops.box_iou_rotated(boxes, boxes)
    torch.testing.assert_close(triops.box_iou_quadri(quads, quads), expected, rtol=0, atol=tolerance)


def _corners64(boxes: Tensor) -> Tensor:
    cos, sin = boxes[:, 4:].cos(), boxes[:, 4:].sin()
    x, y = boxes[:, 2:3] / 2 * boxes.new_tensor([-1, 1, 1, -1]), boxes[:, 3:4] / 2 * boxes.new_tensor([-1, -1, 1, 1])
    return (boxes[:, None, :2] + torch.stack([x * cos - y * sin, x * sin + y * cos], -1)).flatten(1)


def test_overlaps_are_the_share_of_random_places() -> None:
    g = torch.Generator().manual_seed(0)
    quads = quadrilaterals(6, g, 2.0).double()
    places = torch.rand(200_000, 2, generator=g, dtype=torch.float64) * 8 - 3
    inside = []
    for points in quads.view(-1, 4, 2):
        ordered = points[torch.atan2(*(points - points.mean(0)).unbind(1)).argsort(descending=True)]
        step, apart = ordered.roll(-1, 0) - ordered, places[:, None] - ordered
        inside.append((step[:, 0] * apart[..., 1] - step[:, 1] * apart[..., 0] >= 0).all(1))
    held = torch.stack(inside).double()
    shared = held @ held.t()
    expected = shared / (held.sum(1)[:, None] + held.sum(1) - shared)
    torch.testing.assert_close(triops.box_iou_quadri(quads, quads), expected, rtol=0, atol=0.02)


def test_suppression_of_rectangles_keeps_what_nms_rotated_keeps() -> None:
    boxes, scores = predictions(200, 20)
    kept = triops.nms_quadri(corners(boxes), scores, 0.2)
    assert kept.tolist() == triops.nms_rotated(boxes, scores, 0.2).tolist()
    labels = torch.arange(200) % 3
    kept = triops.nms_quadri(corners(boxes), scores, 0.2, labels)
    assert kept.tolist() == triops.nms_rotated(boxes, scores, 0.2, labels).tolist()


@pytest.mark.parametrize("backend", ["cpu", "gpu"])
def test_boxes_of_one_chunk_drop_those_of_the_next(backend: str) -> None:
    place = torch.arange(520) % 515  # each far from all others but the one 515 places before it, which it equals
    square = torch.tensor([0.0, 0, 1, 0, 1, 1, 0, 1])
    boxes = square + torch.stack([place % 25, place // 25], 1).repeat(1, 4) * 2.0
    kept = run(backend, "nms_quadri", (boxes, 1 - torch.arange(520) / 1000, None, 0.5))
    assert kept.tolist() == list(range(515))
