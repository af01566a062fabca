"""Facts about the differentiable overlap of rotated boxes, by hand and against a clipped polygon in float64."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import run
from torch import Tensor

import triops
from triops.ops.diff_iou_rotated.reference import MODES
from triops.ops.diff_iou_rotated.samples import SAMPLES, pairs

BACKENDS = ["reference", "cpu", "gpu"]
SQUARE = [0.0, 0.0, 2.0, 2.0, 0.0]
CUBE = [0.0, 0.0, 0.0, 2.0, 2.0, 2.0, 0.0]


def value(first: list[float], second: list[float], mode: str = "iou", backend: str = "reference") -> float:
    boxes = (torch.tensor([b], dtype=torch.float64) for b in (first, second))
    return float(run(backend, "diff_iou_rotated", (*boxes, mode)))


def gradients(first: list[float], second: list[float], mode: str = "iou", backend: str = "reference") -> list[Any]:
    boxes = (torch.tensor([b], dtype=torch.float64) for b in (first, second))
    grads = run(backend, "diff_iou_rotated_backward", (torch.ones(1, dtype=torch.float64), *boxes, mode))
    return [g[0].tolist() for g in grads]


BY_HAND = [
    ("the same", SQUARE, SQUARE, (1, 1, 1)),
    # shares 2 of 6; the box around both is 3 x 2, of which nothing is in neither; centres 1 apart, diagonal^2 13
    ("half a side along", SQUARE, [1, 0, 2, 2, 0], (1 / 3, 1 / 3, 1 / 3 - 1 / 13)),
    ("a quarter of it", SQUARE, [1, 1, 2, 2, 0], (1 / 7, 1 / 7 - 2 / 9, 1 / 7 - 2 / 18)),
    ("touching", SQUARE, [2, 0, 2, 2, 0], (0, 0, -4 / 20)),
    ("apart", SQUARE, [4, 0, 2, 2, 0], (0, -4 / 12, -16 / 40)),
    ("an octagon", SQUARE, [0, 0, 2, 2, math.pi / 4], (math.sqrt(0.5), None, math.sqrt(0.5))),
    ("a cube half a side up", CUBE, [0, 0, 1, 2, 2, 2, 0], (1 / 3, 1 / 3, 1 / 3 - 1 / 17)),
    ("a cube on top", CUBE, [0, 0, 2, 2, 2, 2, 0], (0, 0, -4 / 24)),
    ("a cube above", CUBE, [0, 0, 4, 2, 2, 2, 0], (0, -1 / 3, -16 / 44)),
    ("a flat one inside", CUBE, [0, 0, 0.5, 2, 2, 1, math.pi / 2], (1 / 2, 1 / 2, 1 / 2 - 0.25 / 12)),
    ("no width", SQUARE, [0, 0, 0, 2, 0], (0, 0, 0)),
    ("a negative height", CUBE, [0, 0, 0, 2, 2, -1, 0], (0, 0, 0)),
    ("not finite", SQUARE, [math.nan, 0, 2, 2, 0], (0, 0, 0)),
]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("first", "second", "expected"), [c[1:] for c in BY_HAND], ids=[c[0] for c in BY_HAND])
def test_values_by_hand(first: list[float], second: list[float], expected: tuple[Any, ...], backend: str) -> None:
    for mode, right in zip(MODES, expected, strict=True):
        if right is not None:
            assert value(first, second, mode, backend) == pytest.approx(right, abs=1e-14)
            assert value(second, first, mode, backend) == pytest.approx(right, abs=1e-14)


@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients_by_hand(backend: str) -> None:
    # iou = s / (8 - s) with s = 2 (2 - x): by x, -2 * 8 / 6^2
    first, second = gradients([1, 0, 2, 2, 0], SQUARE, backend=backend)
    assert first == pytest.approx([-16 / 36, 0, 1 / 9, 0, 0], abs=1e-14)
    assert second == pytest.approx([16 / 36, 0, 1 / 9, 0, 0], abs=1e-14)
    # one inside of the other, 1 x 1 in 2 x 2: iou = w h / 4 by the inner one, 1 / (W H) by the outer one
    first, second = gradients([0.3, 0.2, 1, 1, 0.1], SQUARE, backend=backend)
    assert first == pytest.approx([0, 0, 1 / 4, 1 / 4, 0], abs=1e-14)
    assert second == pytest.approx([0, 0, -1 / 8, -1 / 8, 0], abs=1e-14)


@pytest.mark.parametrize("mode", MODES)
def test_at_two_equal_boxes_the_gradient_is_0(mode: str) -> None:
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.float64, 1e-14)):
        boxes = pairs((200,), 7)(dtype)[1]
        first, second = boxes.clone().requires_grad_(), boxes.clone().requires_grad_()
        values = triops.diff_iou_rotated(first, second, mode)
        assert (values - 1).abs().max() < tolerance
        values.sum().backward()
        assert first.grad is not None
        assert second.grad is not None
        assert max(first.grad.abs().max(), second.grad.abs().max()) < 10 * tolerance


def test_where_boxes_touch_the_gradient_is_the_mean_of_both_hands() -> None:
    # pushed together the iou grows by 2 / 8 per unit, pulled apart it stays 0
    first, second = gradients([2, 0, 2, 2, 0], SQUARE)
    assert (first[0], second[0]) == (-1 / 8, 1 / 8)


def test_boxes_that_lie_apart_are_pulled_together_by_giou_and_diou_alone() -> None:
    first, second = [5.0, 3, 0, 4, 2, 1.5, 0.3], [0.0, 0, 1, 4, 2, 1.5, 1.0]
    assert gradients(first, second, "iou") == [[0.0] * 7] * 2
    for mode in ("giou", "diou"):
        by_first, by_second = gradients(first, second, mode)
        assert by_first[0] < 0 < by_second[0]
        assert by_first[1] < 0 < by_second[1]
        assert by_first[2] > 0 > by_second[2]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("fields", [5, 7])
def test_gradcheck_of_many_pairs(mode: str, fields: int) -> None:
    first, second, _ = pairs((60,), fields, spread=1.5, seed=fields)(torch.float64)
    inputs = first.requires_grad_(), second.requires_grad_()
    assert torch.autograd.gradcheck(lambda a, b: triops.diff_iou_rotated(a, b, mode), inputs)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("sample", [s for s in SAMPLES if s.scale == "boundary" and "backward" in s.operator], ids=str)
def test_gradients_are_finite_everywhere(sample: Any, backend: str) -> None:
    for grad in run(backend, sample.operator, sample.make(torch.float32)):
        assert grad.isfinite().all()


@pytest.mark.parametrize("backend", ["cpu", "gpu"])
@pytest.mark.parametrize("sample", [s for s in SAMPLES if s.scale != "network"], ids=str)
def test_backends_agree_bit_for_bit(sample: Any, backend: str) -> None:
    args = sample.make(torch.float32)
    got, expected = run(backend, sample.operator, args), run("reference", sample.operator, args)
    for g, e in zip((got,) if isinstance(got, Tensor) else got, (expected,) if isinstance(got, Tensor) else expected,
                    strict=True):  # fmt: skip
        assert torch.equal(g.cpu(), e)


def clipped_iou(first: list[float], second: list[float]) -> float:
    """The first rectangle, cut by the lines along the second, in float64."""
    second = [second[0] - first[0], second[1] - first[1], *second[2:]]
    first = [0.0, 0.0, *first[2:]]

    def corners(box: list[float]) -> list[tuple[float, float]]:
        x, y, width, height, angle = box
        cos, sin = math.cos(angle), math.sin(angle)
        return [(x + u * width / 2 * cos - v * height / 2 * sin, y + u * width / 2 * sin + v * height / 2 * cos)
                for u, v in ((-1, -1), (1, -1), (1, 1), (-1, 1))]  # fmt: skip

    polygon, cutter = corners(first), corners(second)
    for (x0, y0), (x1, y1) in zip(cutter, cutter[1:] + cutter[:1], strict=True):
        kept = []
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
    shared = abs(sum(a[0] * b[1] - a[1] * b[0] for a, b in zip(polygon, polygon[1:] + polygon[:1], strict=True))) / 2
    return shared / (first[2] * first[3] + second[2] * second[3] - shared)


numbers: Any = lambda low, high: st.floats(low, high, width=32)  # noqa: E731
rectangles = st.tuples(numbers(-3, 3), numbers(-3, 3), numbers(0.25, 5), numbers(0.25, 5), numbers(-7, 7)).map(list)


@settings(max_examples=50, deadline=None)
@given(rectangles, rectangles)
def test_any_two_rectangles(first: list[float], second: list[float]) -> None:
    assert value(first, second) == pytest.approx(clipped_iou(first, second), abs=1e-12)
    iou, giou, diou = (value(first, second, mode) for mode in MODES)
    assert -1 <= giou <= iou + 1e-12 <= 1 + 2e-12
    assert iou - 1 <= diou <= iou
    for mode in MODES:
        assert value(second, first, mode) == pytest.approx(value(first, second, mode), abs=1e-11)


def test_angles_of_0_give_the_usual_giou_and_diou() -> None:
    g = torch.Generator().manual_seed(5)
    first, second = (torch.cat([torch.rand(50, 2, generator=g) * 4, torch.rand(50, 2, generator=g) * 3 + 0.1,
                                torch.zeros(50, 1)], 1).double() for _ in range(2))  # fmt: skip
    low1, high1, low2, high2 = (b[:, :2] + s * b[:, 2:4] / 2 for b in (first, second) for s in (-1, 1))
    shared = (torch.minimum(high1, high2) - torch.maximum(low1, low2)).clamp(min=0).prod(1)
    around = torch.maximum(high1, high2) - torch.minimum(low1, low2)
    union = first[:, 2:4].prod(1) + second[:, 2:4].prod(1) - shared
    giou = shared / union - 1 + union / around.prod(1)
    diou = shared / union - (first - second)[:, :2].square().sum(1) / around.square().sum(1)
    torch.testing.assert_close(triops.diff_iou_rotated(first, second, "giou"), giou)
    torch.testing.assert_close(triops.diff_iou_rotated(first, second, "diou"), diou)


@pytest.mark.parametrize("mode", MODES)
def test_turning_and_moving_both_turns_the_gradient(mode: str) -> None:
    first, second, _ = pairs((40,), 5, spread=1.5)(torch.float64)
    turn, cos, sin = 0.7, math.cos(0.7), math.sin(0.7)
    matrix = torch.eye(5, dtype=torch.float64)
    matrix[:2, :2] = torch.tensor([[cos, -sin], [sin, cos]])
    moved = [b @ matrix.t() + torch.tensor([3.0, -2, 0, 0, turn]) for b in (first, second)]
    grads = triops.ops.diff_iou_rotated.diff_iou_rotated_backward(torch.ones(40).double(), first, second, mode)
    moved_grads = triops.ops.diff_iou_rotated.diff_iou_rotated_backward(torch.ones(40).double(), *moved, mode)
    for grad, moved_grad in zip(grads, moved_grads, strict=True):
        torch.testing.assert_close(moved_grad, grad @ matrix.t())


def test_names_and_shapes_of_mmcv() -> None:
    boxes = pairs((2, 3), 7)(torch.float32)
    flat = [b[..., [0, 1, 3, 4, 6]] for b in boxes[:2]]
    assert torch.equal(triops.diff_iou_rotated_3d(*boxes[:2]), triops.diff_iou_rotated(*boxes))
    assert torch.equal(triops.diff_iou_rotated_2d(*flat), triops.diff_iou_rotated(*flat))
    assert triops.diff_iou_rotated_2d(*flat).shape == (2, 3)


def test_gradient_descent_on_giou_moves_a_box_onto_another() -> None:
    target = torch.tensor([[0.0, 0, 0, 4, 2, 1.5, 0.4]])
    box = torch.tensor([[6.0, 3, 1, 3, 3, 2, 1.0]], requires_grad=True)
    optimizer = torch.optim.Adam([box], 0.1)
    for _ in range(200):
        optimizer.zero_grad()
        (1 - triops.diff_iou_rotated(box, target, "giou")).sum().backward()
        optimizer.step()
    assert triops.diff_iou_rotated(box, target).item() > 0.7


def test_a_second_derivative_is_refused() -> None:
    box = torch.tensor([CUBE], requires_grad=True)
    (grad,) = torch.autograd.grad(triops.diff_iou_rotated(box, box.detach() + 0.3), box, create_graph=True)
    with pytest.raises(RuntimeError, match="second time"):
        grad.sum().backward()
