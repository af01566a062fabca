"""Facts about the area that rotated rectangles share."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import assert_same, run, small
from torch import Tensor

import triops
from triops._geometry.rotated.reference import MODES
from triops._op import OPERATORS
from triops.ops.box_iou_rotated.samples import SAMPLES, not_finite_boxes, rotated_boxes, special_boxes

Box = tuple[float, float, float, float, float]
Point = tuple[float, float]
QUARTER = math.pi / 2


def corners(box: Box) -> list[Point]:
    x, y, width, height, angle = box
    cos, sin = math.cos(angle), math.sin(angle)
    return [
        (x + u * width / 2 * cos - v * height / 2 * sin, y + u * width / 2 * sin + v * height / 2 * cos)
        for u, v in ((-1, -1), (1, -1), (1, 1), (-1, 1))
    ]


def clipped_area(first: Box, second: Box) -> float:
    """The shared area by Sutherland and Hodgman: the first polygon, cut by the lines along the second, in float64."""
    polygon = corners((0.0, 0.0, *first[2:]))
    cutter = corners((second[0] - first[0], second[1] - first[1], *second[2:]))
    for (x0, y0), (x1, y1) in zip(cutter, cutter[1:] + cutter[:1], strict=True):
        kept: list[Point] = []
        for begin, end in zip(polygon, polygon[1:] + polygon[:1], strict=True):
            side0, side1 = ((x1 - x0) * (y - y0) - (y1 - y0) * (x - x0) for x, y in (begin, end))
            if side0 >= 0:
                kept.append(begin)
            if side0 * side1 < 0:
                t = side0 / (side0 - side1)
                kept.append((begin[0] + t * (end[0] - begin[0]), begin[1] + t * (end[1] - begin[1])))
        polygon = kept
        if not polygon:
            return 0.0
    return abs(sum(a[0] * b[1] - a[1] * b[0] for a, b in zip(polygon, polygon[1:] + polygon[:1], strict=True))) / 2


def area(first: Any, second: Any, dtype: torch.dtype = torch.float64) -> float:
    boxes = (torch.tensor([box], dtype=torch.float64).to(dtype) for box in (first, second))
    return float(triops.box_iou_rotated(*boxes, mode="area"))


UNIT = (0.0, 0.0, 2.0, 2.0, 0.0)
BY_HAND = [
    ("the same", UNIT, 4.0),
    ("half a side along", (1, 0, 2, 2, 0), 2.0),
    ("a quarter of it", (1, 1, 2, 2, 0), 1.0),
    ("an octagon", (0, 0, 2, 2, math.pi / 4), 8 * (math.sqrt(2) - 1)),
    ("a quarter turn", (0, 0, 2, 2, QUARTER), 4.0),
    ("a turn and a half", (0, 0, 2, 2, 3 * math.pi), 4.0),
    ("a cross", (0, 0, 6, 1, 0), 2.0),
    ("a cross, turned", (0, 0, 1, 6, QUARTER), 2.0),
    ("contained", (0.25, -0.25, 0.5, 1, 1.0), 0.5),
    ("containing", (0.5, 0.5, 20, 30, 2.0), 4.0),
    ("a corner of a diamond", (math.sqrt(2), 0, 2, 2, math.pi / 4), 1.0),
    ("touching an edge", (2, 0, 2, 2, 0), 0.0),
    ("touching a corner", (2, 2, 2, 2, 0), 0.0),
    ("a diamond that touches", (1 + math.sqrt(2), 0, 2, 2, math.pi / 4), 0.0),
    ("apart only along its own axis", (1.9, 1.9, 2, 2, math.pi / 4), 0.0),
    ("far away", (1e6, 0, 2, 2, 0.5), 0.0),
    ("a line", (0, 0, 2, 0, 0.3), 0.0),
    ("a point", (0, 0, 0, 0, 0.3), 0.0),
    ("a negative size", (0, 0, -2, 2, 0), 0.0),
]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize(("other", "expected"), [case[1:] for case in BY_HAND], ids=[case[0] for case in BY_HAND])
def test_areas_by_hand(other: Box, expected: float, dtype: torch.dtype) -> None:
    tolerance = 1e-14 if dtype == torch.float64 else 1e-6
    assert area(UNIT, other, dtype) == pytest.approx(expected, rel=tolerance, abs=tolerance)
    assert area(other, UNIT, dtype) == pytest.approx(expected, rel=tolerance, abs=tolerance)


@pytest.mark.parametrize("name", ["far away", "apart only along its own axis", "a line", "touching an edge"])
def test_what_is_apart_shares_exactly_nothing(name: str) -> None:
    other = next(case[1] for case in BY_HAND if case[0] == name)
    assert area(UNIT, other, torch.float32) == 0.0


def test_iou_and_iof_are_over_the_union_and_the_first() -> None:
    first, second = torch.tensor([[0.0, 0, 2, 2, 0]]), torch.tensor([[1.0, 0, 2, 4, QUARTER]])  # 4 wide, 2 high
    assert triops.box_iou_rotated(first, second).item() == pytest.approx(4 / 8)
    assert triops.box_iou_rotated(first, second, mode="iof").item() == pytest.approx(4 / 4)
    assert triops.box_iou_rotated(second, first, mode="iof").item() == pytest.approx(4 / 8)


def test_counter_clockwise_angles_are_the_negative_ones() -> None:
    g = torch.Generator().manual_seed(0)
    first, second = rotated_boxes(20, g, 6.0), rotated_boxes(30, g, 6.0)
    flip = torch.tensor([1.0, 1, 1, 1, -1])
    mirrored = triops.box_iou_rotated(first * flip, second * flip, clockwise=False)
    assert torch.equal(triops.box_iou_rotated(first, second), mirrored)


def test_aligned_is_the_diagonal() -> None:
    g = torch.Generator().manual_seed(1)
    first, second = rotated_boxes(50, g, 4.0), rotated_boxes(50, g, 4.0)
    for mode in MODES:
        for margin in (0.0, 0.01):
            full = triops.box_iou_rotated(first, second, mode, margin=margin)
            assert torch.equal(triops.box_iou_rotated(first, second, mode, True, margin=margin), full.diagonal())


@pytest.mark.parametrize("backend", ["cpu", "gpu"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("sample", [s for s in SAMPLES if s.scale != "network"], ids=str)
def test_backends_agree_bit_for_bit(sample: Any, dtype: torch.dtype, backend: str) -> None:
    args = sample.make(dtype)
    got, expected = run(backend, sample.operator, args).cpu(), run("reference", sample.operator, args)
    assert torch.equal(got, expected)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-13), (torch.float32, 3e-6)])
@pytest.mark.parametrize("boxes", [rotated_boxes(60, torch.Generator().manual_seed(2), 8.0), special_boxes()[::2]])
def test_equals_polygon_clipping(boxes: Tensor, dtype: torch.dtype, tolerance: float) -> None:
    boxes = boxes[(boxes[:, 2:4] > 0).all(1)].to(dtype)
    rows = boxes.double().tolist()
    expected = torch.tensor([[clipped_area(a, b) for b in rows] for a in rows], dtype=torch.float64)
    got = triops.box_iou_rotated(boxes, boxes, mode="area").double()
    scale = (boxes[:, 2] * boxes[:, 3]).double()
    assert ((got - expected).abs() <= tolerance * torch.maximum(scale[:, None], scale)).all()


def test_a_small_box_in_a_large_one_keeps_its_precision() -> None:
    large, small = torch.tensor([[0.0, 0, 1000, 1000, 0.3]]), torch.tensor([[300.0, -200, 1, 0.5, 1.1]])
    assert triops.box_iou_rotated(small, large, mode="iof").item() == pytest.approx(1, abs=1e-6)


def test_a_box_overlaps_itself_fully() -> None:
    boxes = rotated_boxes(1000, torch.Generator().manual_seed(3), 100.0)
    ious = triops.box_iou_rotated(boxes, boxes, aligned=True)
    assert ious.max() <= 1
    assert ious.min() > 1 - 2e-6


@pytest.mark.parametrize("mode", MODES)
def test_what_is_not_finite_overlaps_nothing(mode: str) -> None:
    boxes = not_finite_boxes()
    for margin in (0.0, 0.01):
        overlaps = triops.box_iou_rotated(boxes, boxes, mode, margin=margin)
        assert overlaps[-1, -1] > 0.9
        overlaps[-1, -1] = 0
        assert torch.equal(overlaps, torch.zeros_like(overlaps))


numbers: Callable[..., Any] = lambda low, high: st.floats(low, high, width=32)  # noqa: E731
boxes_strategy = st.tuples(numbers(-4, 4), numbers(-4, 4), numbers(0.125, 6), numbers(0.125, 6), numbers(-7, 7))


@settings(max_examples=300, deadline=None)
@given(boxes_strategy, boxes_strategy)
def test_any_two_rectangles(first: Box, second: Box) -> None:
    got, expected = area(first, second), clipped_area(first, second)
    assert got == pytest.approx(expected, abs=1e-11)
    assert got == pytest.approx(area(second, first), abs=1e-11)
    assert 0 <= got <= min(first[2] * first[3], second[2] * second[3])


@settings(max_examples=100, deadline=None)
@given(boxes_strategy, boxes_strategy, numbers(-100, 100), numbers(-100, 100), numbers(-3, 3))
def test_moving_and_turning_both_changes_nothing(first: Box, second: Box, dx: float, dy: float, turn: float) -> None:
    cos, sin = math.cos(turn), math.sin(turn)

    def moved(box: Box) -> Box:
        x, y, width, height, angle = box
        return (x * cos - y * sin + dx, x * sin + y * cos + dy, width, height, angle + turn)

    assert area(moved(first), moved(second)) == pytest.approx(area(first, second), abs=1e-10)


def test_a_margin_lets_corners_count_that_are_outside() -> None:
    first, second = torch.tensor([[0.0, 0, 2, 2, 0]]), torch.tensor([[2.005, 0.0, 2, 2, 0]])
    assert triops.box_iou_rotated(first, second, "area").item() == 0
    # all four corners of the gap between them count: the gap itself is the polygon
    assert triops.box_iou_rotated(first, second, "area", margin=0.01).item() == pytest.approx(2 * 0.005, rel=1e-3)


def test_with_a_margin_the_area_is_nearly_the_same_away_from_touching() -> None:
    boxes = rotated_boxes(40, torch.Generator().manual_seed(4), 8.0).double()
    exact = triops.box_iou_rotated(boxes, boxes, "area")
    polygon = triops.box_iou_rotated(boxes, boxes, "area", margin=1e-9)
    assert torch.allclose(exact, polygon, atol=1e-8)


def test_from_above_height_plays_no_part() -> None:
    g = torch.Generator().manual_seed(5)
    flat = rotated_boxes(20, g, 8.0)
    boxes = torch.cat([flat[:, :2], torch.rand(20, 1, generator=g), flat[:, 2:4], torch.rand(20, 1), flat[:, 4:]], 1)
    assert torch.equal(triops.boxes_overlap_bev(boxes, boxes), triops.box_iou_rotated(flat, flat, "area"))
    assert torch.equal(triops.boxes_iou_bev(boxes, boxes), triops.box_iou_rotated(flat, flat))
    assert torch.equal(
        triops.boxes_overlap_bev(boxes, boxes, aligned=True, margin=0.01),
        triops.box_iou_rotated(flat, flat, "area", aligned=True, margin=0.01),
    )


def test_half_types_are_computed_in_float32_and_rounded_once() -> None:
    boxes = rotated_boxes(30, torch.Generator().manual_seed(6), 8.0)
    for dtype in (torch.float16, torch.bfloat16):
        narrow = boxes.to(dtype)
        expected = triops.box_iou_rotated(narrow.float(), narrow.float()).to(dtype)
        assert torch.equal(triops.box_iou_rotated(narrow, narrow), expected)


def test_no_gradient_flows() -> None:
    assert not OPERATORS["box_iou_rotated"].differentiable
    boxes = rotated_boxes(3, torch.Generator().manual_seed(7), 2.0).requires_grad_()
    assert not triops.box_iou_rotated(boxes, boxes).requires_grad


def test_volumes_by_hand() -> None:
    box = torch.tensor([[0.0, 0, 0, 4, 2, 2, 0]])
    others = torch.tensor(
        [[0.0, 0, 1, 4, 2, 2, 0], [2, 0, 0, 4, 2, 4, 0], [0, 0, 2, 4, 2, 2, 0], [0, 0, 0, 2, 4, 2, QUARTER]]
    )
    # 8 of 24; with z at the centre 8 of 16 + 32 - 8, with z at the bottom the same; they touch; the same box, turned
    assert triops.boxes_iou3d(box, others).tolist()[0] == pytest.approx([1 / 3, 8 / 40, 0, 1], abs=1e-6)
    assert triops.boxes_iou3d(box, others, z_origin="bottom").tolist()[0] == pytest.approx(
        [1 / 3, 8 / 40, 0, 1], abs=1e-6
    )
    tall = torch.tensor([[0.0, 0, 1, 4, 2, 4, 0]])  # from -1 to 3, or from 1 to 5
    assert triops.boxes_iou3d(box, tall).item() == pytest.approx(16 / 32)
    assert triops.boxes_iou3d(box, tall, z_origin="bottom").item() == pytest.approx(8 / 40)
    tiny = torch.tensor([[0.0, 0, 0, 1e-3, 1e-3, 1e-3, 0]])
    assert triops.boxes_iou3d(tiny, tiny, aligned=True).tolist() == pytest.approx([1])
    assert triops.boxes_iou3d(box, others[:0]).shape == (1, 0)


def test_volumes_are_numbers_without_a_gradient() -> None:
    good = torch.tensor([[0.0, 0, 0, 4, 2, 2, 0]]).requires_grad_()
    odd = good.detach().repeat(22, 1)
    for i in range(7):
        for k, value in enumerate((math.nan, math.inf, -math.inf)):
            odd[3 * i + k, i] = value
    odd[21, 5] = -2.0
    for found in (triops.boxes_iou3d(odd, good), triops.boxes_iou3d(good, odd).t()):
        assert found.tolist() == [[0.0]] * 22
        assert not found.requires_grad
    boxes = torch.rand(9, 7, generator=torch.Generator().manual_seed(1)) + 0.5
    half = triops.boxes_iou3d(boxes.half(), boxes.half())
    assert torch.equal(half, triops.boxes_iou3d(boxes.half().float(), boxes.half().float()).half())
    differentiable = triops.diff_iou_rotated_3d(boxes[None], boxes.flip(0)[None])[0]
    assert torch.allclose(triops.boxes_iou3d(boxes, boxes.flip(0), aligned=True), differentiable, atol=1e-5)


@pytest.mark.parametrize("few", [0, 2**40], ids=["frames first", "one launch"])
def test_both_ways_of_a_gpu_give_the_answer(few: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from triops.ops.box_iou_rotated import gpu

    monkeypatch.setattr(gpu, "FEW_PAIRS", few)
    for sample in small(SAMPLES)[:8]:
        args = sample.make(torch.float32)
        assert_same(*(run(backend, sample.operator, args) for backend in ("gpu", "reference")), str(sample))


def test_volumes_are_traced_without_a_tensor_of_the_module() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():  # which takes no other tensors
        found = triops.boxes_iou3d(torch.empty(4, 7), torch.empty(5, 7))
    assert found.shape == (4, 5)
