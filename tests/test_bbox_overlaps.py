"""Facts about bbox_overlaps: the seed's examples, hand-computed cases, properties, gradients."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import device_of, run
from torch import Tensor

import triops
from triops._op import OPERATORS

BACKENDS = ["reference", "cpu", "gpu"]
HALVES = [torch.float16, torch.bfloat16]


def overlaps(
    backend: str, bboxes1: Tensor, bboxes2: Tensor, mode: str = "iou", aligned: bool = False, offset: int = 0
) -> Tensor:
    result: Tensor = run(backend, "bbox_overlaps", (bboxes1, bboxes2, mode, aligned, offset))
    return result.cpu()


def random_boxes(*shape: int, seed: int = 0, extent: float = 100.0) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    corner = torch.rand(*shape, 2, generator=g) * extent
    return torch.cat([corner, corner + torch.rand(*shape, 2, generator=g) * extent / 2], -1)


# --- the seed's examples


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_first_example_of_the_seed(backend: str) -> None:
    bboxes1 = torch.tensor([[0.0, 0, 10, 10], [10, 10, 20, 20], [32, 32, 38, 42]])
    bboxes2 = torch.tensor([[0.0, 0, 10, 20], [0, 10, 10, 19], [10, 10, 20, 20]])
    assert overlaps(backend, bboxes1, bboxes2).tolist() == [[0.5, 0, 0], [0, 0, 1], [0, 0, 0]]


def test_the_second_example_of_the_seed() -> None:
    empty, nonempty = torch.tensor([]), torch.tensor([[0.0, 0, 10, 9]])
    assert triops.bbox_overlaps(empty, nonempty).shape == (0, 1)
    assert triops.bbox_overlaps(nonempty, empty).shape == (1, 0)
    assert triops.bbox_overlaps(empty, empty).shape == (0, 0)
    assert triops.bbox_overlaps(empty, empty, aligned=True).shape == (0,)


def test_no_boxes_take_part_in_a_gradient() -> None:
    empty, one = torch.empty(0, requires_grad=True), torch.tensor([[0.0, 0, 10, 9]], requires_grad=True)
    triops.bbox_overlaps(empty, one).sum().backward()
    assert empty.grad is not None
    assert empty.grad.shape == (0,)
    assert torch.equal(one.grad, torch.zeros(1, 4))  # type: ignore[arg-type]


# --- hand-computed cases


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_pair_computed_by_hand(backend: str) -> None:
    first, second = torch.tensor([[0.0, 0, 4, 4]]), torch.tensor([[2.0, 1, 6, 3]])
    # common part 2 x 2; areas 16 and 8
    assert overlaps(backend, first, second).item() == pytest.approx(4 / 20)
    assert overlaps(backend, first, second, "iof").item() == 4 / 16
    assert overlaps(backend, second, first, "iof").item() == 4 / 8
    # with the last pixel inside: common part 3 x 3; areas 25 and 15
    assert overlaps(backend, first, second, offset=1).item() == pytest.approx(9 / 31)
    assert overlaps(backend, first, second, "iof", offset=1).item() == pytest.approx(9 / 25)


@pytest.mark.parametrize("backend", BACKENDS)
def test_aligned_compares_row_with_row(backend: str) -> None:
    first, second = random_boxes(40), random_boxes(40, seed=1)
    got = overlaps(backend, first, second, aligned=True)
    assert got.shape == (40,)
    torch.testing.assert_close(got, overlaps(backend, first, second).diagonal(), rtol=1e-6, atol=0)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("offset", [0, 1])
@pytest.mark.parametrize("mode", ["iou", "iof"])
def test_empty_and_inverted_boxes_overlap_nothing_and_give_no_nan(backend: str, mode: str, offset: int) -> None:
    # with offset 1 a box inverted by one pixel or more has no side left
    flat = torch.tensor([[3.0, 3, 3, 3], [3, 3, 3, 8], [8, 8, 3, 3], [8, 3, 3, 8], [3, 8, 8, 3]]) - torch.tensor(
        [0.0, 0, offset, offset]
    )
    boxes = torch.cat([flat, torch.tensor([[0.0, 0, 10, 10]])])
    got = overlaps(backend, boxes, boxes, mode, offset=offset)
    expected = torch.zeros(6, 6)
    expected[5, 5] = 1
    assert torch.equal(got, expected)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_single_pixel_is_itself_with_offset_1(backend: str) -> None:
    pixel = torch.tensor([[7.0, 7, 7, 7]])
    assert overlaps(backend, pixel, pixel, offset=1).item() == 1
    assert overlaps(backend, pixel, pixel, offset=0).item() == 0


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("field", range(4))
@pytest.mark.parametrize("mode", ["iou", "iof"])
def test_a_box_that_is_not_finite_overlaps_nothing_and_has_no_gradient(
    backend: str, value: float, field: int, mode: str
) -> None:
    boxes = torch.tensor([[0.0, 0, 10, 10], [0, 0, 10, 10]])
    boxes[0, field] = value
    good = torch.tensor([[0.0, 0, 10, 12]])
    assert overlaps(backend, boxes, good, mode)[0].item() == 0
    assert overlaps(backend, good, boxes, mode)[0, 0].item() == 0
    grad1, grad2 = run(backend, "bbox_overlaps_backward", (torch.ones(2, 1), boxes, good, mode, False, 0))
    assert torch.equal(grad1[0].cpu(), torch.zeros(4))
    assert grad2.isfinite().all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", HALVES)
def test_thousand_pixel_boxes_do_not_overflow_in_half(backend: str, dtype: torch.dtype) -> None:
    boxes = torch.tensor([[0.0, 0, 1000, 1000], [0, 0, 2000, 2000]], dtype=dtype)  # areas far beyond 65,504
    got = overlaps(backend, boxes, boxes)
    assert got.dtype == dtype
    assert torch.equal(got.float(), torch.tensor([[1, 0.25], [0.25, 1]]))


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("mode", ["iou", "iof"])
def test_half_on_cpu_is_float32_rounded_once(dtype: torch.dtype, mode: str) -> None:
    first, second = random_boxes(200, extent=1000).to(dtype), random_boxes(300, seed=1, extent=1000).to(dtype)
    expected = triops.bbox_overlaps(first.float(), second.float(), mode).to(dtype)
    assert torch.equal(triops.bbox_overlaps(first, second, mode), expected)


@pytest.mark.parametrize("dtype", HALVES)
def test_half_on_gpu_is_within_one_unit_of_float32_rounded(dtype: torch.dtype) -> None:
    first, second = random_boxes(50, extent=1000).to(dtype), random_boxes(90, seed=1, extent=1000).to(dtype)
    expected = overlaps("reference", first.float(), second.float()).to(dtype)
    steps = overlaps("gpu", first, second).view(torch.int16) - expected.view(torch.int16)
    assert steps.abs().max() <= 1


def test_leading_dimensions_broadcast() -> None:
    first, second = random_boxes(2, 1, 5), random_boxes(3, 7, seed=1)
    got = triops.bbox_overlaps(first, second)
    assert got.shape == (2, 3, 5, 7)
    for i in range(2):
        for j in range(3):
            assert torch.equal(got[i, j], triops.bbox_overlaps(first[i, 0], second[j]))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
def test_boxes_may_start_anywhere_in_memory(backend: str, dtype: torch.dtype) -> None:
    memory = torch.cat([torch.zeros(1), random_boxes(6).flatten()]).to(dtype)
    moved = memory.to(device_of(backend))[1:].view(6, 4)
    assert torch.equal(overlaps(backend, moved, moved), overlaps(backend, moved.clone(), moved.clone()))


def test_a_result_too_large_for_memory_fails_at_once_with_torchs_own_error() -> None:
    boxes = torch.zeros(1, 4).expand(2**23, 4)
    with pytest.raises(RuntimeError, match="alloc"):
        triops.bbox_overlaps(boxes, boxes)


# --- properties

coordinate = st.integers(-20, 20)
integer_box = st.tuples(coordinate, coordinate, st.integers(0, 15), st.integers(0, 15)).map(
    lambda b: (b[0], b[1], b[0] + b[2], b[1] + b[3])
)


def exact_overlap(a: tuple[int, ...], b: tuple[int, ...], mode: str, offset: int) -> Fraction:
    width = max(0, min(a[2], b[2]) - max(a[0], b[0]) + offset)
    height = max(0, min(a[3], b[3]) - max(a[1], b[1]) + offset)
    area1 = (a[2] - a[0] + offset) * (a[3] - a[1] + offset)
    area2 = (b[2] - b[0] + offset) * (b[3] - b[1] + offset)
    base = area1 + area2 - width * height if mode == "iou" else area1
    return Fraction(width * height, base) if base else Fraction(0)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(integer_box, min_size=1, max_size=5), st.lists(integer_box, min_size=1, max_size=5),
    st.sampled_from(["iou", "iof"]), st.sampled_from([0, 1]), st.sampled_from(["cpu", "reference"]),
)  # fmt: skip
def test_equals_exact_rational_arithmetic_on_small_integer_boxes(
    first: list[Any], second: list[Any], mode: str, offset: int, backend: str
) -> None:
    got = overlaps(backend, torch.tensor(first).double(), torch.tensor(second).double(), mode, offset=offset)
    # The terms are exact, so the quotient is the nearest float64 to the true one.
    assert got.tolist() == [[float(exact_overlap(a, b, mode, offset)) for b in second] for a in first]


boxes_of_any_size = st.lists(
    st.tuples(*[st.floats(-1000, 1000, width=32)] * 2, *[st.floats(0.125, 500, width=32)] * 2), min_size=1, max_size=20
).map(lambda rows: torch.tensor([(x, y, x + w, y + h) for x, y, w, h in rows]))


@settings(max_examples=40, deadline=None)
@given(boxes_of_any_size, boxes_of_any_size)
def test_symmetric_in_iou_and_one_on_itself_and_within_bounds(first: Tensor, second: Tensor) -> None:
    iou = triops.bbox_overlaps(first, second)
    assert torch.equal(iou, triops.bbox_overlaps(second, first).T)
    assert torch.equal(triops.bbox_overlaps(first, first, aligned=True), torch.ones(len(first)))
    iof = triops.bbox_overlaps(first, second, "iof")
    assert iou.min() >= 0
    assert iof.max() <= 1
    # the rounding of area1 + area2 - inter can take the union a hair below the first area
    assert (iou <= iof * (1 + 4 * torch.finfo(iof.dtype).eps)).all()


@settings(max_examples=40, deadline=None)
@given(boxes_of_any_size, boxes_of_any_size, st.integers(-1000, 1000), st.floats(0.01, 100))
def test_invariant_under_translation_and_scaling(first: Tensor, second: Tensor, shift: int, scale: float) -> None:
    first, second = first.double(), second.double()
    expected = triops.bbox_overlaps(first, second)
    moved = triops.bbox_overlaps(first + shift, second + shift)
    torch.testing.assert_close(moved, expected, rtol=1e-7, atol=1e-9)
    torch.testing.assert_close(triops.bbox_overlaps(first * scale, second * scale), expected, rtol=1e-9, atol=1e-12)


# --- gradients


def plain(bboxes1: Tensor, bboxes2: Tensor, mode: str, aligned: bool, offset: int) -> Tensor:
    """The formula as one writes it, for torch's autograd."""
    if not aligned:
        bboxes1, bboxes2 = bboxes1[:, None], bboxes2[None]
    side = (
        torch.minimum(bboxes1[..., 2:], bboxes2[..., 2:]) - torch.maximum(bboxes1[..., :2], bboxes2[..., :2]) + offset
    )
    inter = side.clamp(min=0).prod(-1)
    area1, area2 = ((b[..., 2:] - b[..., :2] + offset).prod(-1) for b in (bboxes1, bboxes2))
    return inter / (area1 + area2 - inter if mode == "iou" else area1.expand_as(inter)).clamp(min=offset)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("offset", [0, 1])
@pytest.mark.parametrize("aligned", [False, True])
@pytest.mark.parametrize("mode", ["iou", "iof"])
def test_gradient_is_that_of_torchs_autograd_also_at_ties(backend: str, mode: str, aligned: bool, offset: int) -> None:
    g = torch.Generator().manual_seed(0)
    # integer boxes: equal, touching and nested ones are everywhere
    corner = torch.randint(0, 6, (2, 60, 2), generator=g).double()
    boxes = torch.cat([corner, corner + torch.randint(1, 5, (2, 60, 2), generator=g)], -1)
    first, second = boxes[0].requires_grad_(), boxes[1].requires_grad_()
    result = plain(first, second, mode, aligned, offset)
    grad = torch.randn(result.shape, generator=g, dtype=torch.float64)
    expected = torch.autograd.grad(result, (first, second), grad)
    got = run(backend, "bbox_overlaps_backward", (grad, first.detach(), second.detach(), mode, aligned, offset))
    for actual, wanted in zip(got, expected, strict=True):
        torch.testing.assert_close(actual.cpu(), wanted, rtol=1e-12, atol=1e-12)


def test_a_gradient_computed_by_hand() -> None:
    # boxes [0, 4] and [2, 6] on a strip of height 1: iou = (x2 - 2) / 6 as the right side of the first moves
    first = torch.tensor([[0.0, 0, 4, 1]], requires_grad=True)
    triops.bbox_overlaps(first, torch.tensor([[2.0, 0, 6, 1]])).sum().backward()
    assert first.grad is not None
    assert first.grad[0, 2].item() == pytest.approx(1 / 6)  # inter 2 -> 2 + e, union 6 -> 6
    assert first.grad[0, 0].item() == pytest.approx(2 / 36)  # union 6 -> 6 - e


def test_the_gradient_of_a_perfect_match_is_zero() -> None:
    boxes = random_boxes(9).requires_grad_()
    triops.bbox_overlaps(boxes, boxes.detach(), aligned=True).sum().backward()
    torch.testing.assert_close(boxes.grad, torch.zeros(9, 4), rtol=0, atol=1e-6)


@pytest.mark.parametrize("backend", ["cpu", "gpu"])
def test_a_gradient_that_is_not_finite_stays_with_its_pair(backend: str) -> None:
    boxes = torch.tensor([[0.0, 0, 4, 4], [50, 50, 60, 60]])
    grad = torch.tensor([[1.0, float("nan")], [float("inf"), 1.0]])  # on the pairs that do not overlap
    grads = run(backend, "bbox_overlaps_backward", (grad, boxes, boxes, "iou", False, 0))
    assert all(g.isfinite().all() for g in grads)


def test_gradient_of_broadcast_boxes_is_summed_in_float32_and_rounded_once() -> None:
    first, second = random_boxes(64, 3, extent=1000).half(), random_boxes(4, seed=1, extent=1000).half()
    grad = torch.randn(64, 3, 4, generator=torch.Generator().manual_seed(0)).half()
    args = (grad, first, second, "iou", False, 0)
    _, got = run("cpu", "bbox_overlaps_backward", args)
    _, wide = run("cpu", "bbox_overlaps_backward", tuple(a.float() if isinstance(a, Tensor) else a for a in args))
    assert torch.equal(got, wide.half())


def test_an_iou_loss_pulls_boxes_together() -> None:
    target = torch.tensor([[10.0, 10, 30, 30]])
    boxes = torch.tensor([[14.0, 6, 38, 25]], requires_grad=True)
    optimiser = torch.optim.SGD([boxes], lr=5.0)
    for _ in range(300):
        optimiser.zero_grad()
        (1 - triops.bbox_overlaps(boxes, target, aligned=True)).sum().backward()
        optimiser.step()
    assert triops.bbox_overlaps(boxes, target).item() > 0.9


def test_a_second_derivative_is_refused() -> None:
    boxes = random_boxes(3).requires_grad_()
    (grad,) = torch.autograd.grad(triops.bbox_overlaps(boxes, boxes).sum(), boxes, create_graph=True)
    with pytest.raises(RuntimeError, match="second time"):
        grad.sum().backward()


@pytest.mark.parametrize("backend", ["cpu", "gpu"])
@pytest.mark.parametrize("name", ["bbox_overlaps", "bbox_overlaps_backward"])
def test_kernels_follow_the_device_of_their_boxes(backend: str, name: str) -> None:
    boxes = random_boxes(3)
    args = (
        (boxes, boxes, "iou", False, 0)
        if name == "bbox_overlaps"
        else (torch.ones(3, 3), boxes, boxes, "iou", False, 0)
    )
    result = run(backend, name, args)
    first = result if isinstance(result, Tensor) else result[0]
    assert first.device.type == device_of(backend)
    assert OPERATORS[name].backends == ["reference", "cpu", "gpu"]
