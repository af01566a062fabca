"""Facts about roi_align: by hand, by symmetry, and against what torch itself computes."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from support import run
from torch import Tensor

import triops
from triops.ops.roi_align import roi_align_backward, roi_align_forward
from triops.ops.roi_align.samples import by_grid_sample, maps

RAMP = torch.arange(30.0).view(1, 1, 5, 6)  # value 6 y + x
FORMATS = [torch.contiguous_format, torch.channels_last]
BACKENDS = ["reference", "cpu", "gpu"]


def box(*corners: float) -> Tensor:
    return torch.tensor([[0.0, *corners]])


def aligned_on(backend: str, *args: Any) -> Any:
    return run(backend, "roi_align_forward", args)


@pytest.mark.parametrize("backend", BACKENDS)
def test_on_a_ramp_a_bin_is_the_value_at_its_centre(backend: str) -> None:
    output = aligned_on(backend, RAMP, box(0.5, 0.5, 4.5, 2.5), 2, 2, 1.0, 0, True, "avg")[0]
    # aligned: half a pixel less, so the box is 0..4 x 0..2 and its bins have centres x 1, 3 and y 0.5, 1.5
    assert output.flatten().tolist() == [4.0, 6.0, 10.0, 12.0]


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_maximum_is_the_last_sample_of_a_ramp_and_says_where_it_lies(backend: str) -> None:
    output, y, x = aligned_on(backend, RAMP, box(0, 0, 4, 2), 1, 1, 1.0, 2, False, "max")
    assert (output.item(), y.item(), x.item()) == (6 * 1.5 + 3, 1.5, 3.0)


@pytest.mark.parametrize("backend", BACKENDS)
def test_samples_more_than_a_pixel_off_the_map_are_0_and_count(backend: str) -> None:
    ones = torch.ones(1, 1, 4, 4)
    # samples at x -3, -1 (on the map: one pixel off), 1, 3; all on the map along y
    assert aligned_on(backend, ones, box(-4, 0, 4, 2), 1, 1, 1.0, 4, False, "avg")[0].item() == 0.75
    values, y, x = aligned_on(backend, -ones, box(-4, 0, 4, 2), 1, 1, 1.0, 4, False, "max")
    assert (values.item(), y.item(), x.item()) == (0.0, -2.0, -2.0)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("ratio", [0, 1])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_pixel_that_is_read_with_weight_0_counts(backend: str, ratio: int, format: torch.memory_format) -> None:
    """One bin, with samples half a pixel above the map: they read row 0 with weight 1, and row 1 with weight 0."""
    map = RAMP.repeat(1, 2, 1, 1).contiguous(memory_format=format)
    map[:, :, 1] = math.nan
    above = box(0, -0.5, 0.75, 0.5)
    assert aligned_on(backend, map, above, 1, 1, 1.0, ratio, True, "avg")[0].isnan().all()
    none, last = torch.zeros(0), format == torch.channels_last
    args = torch.full((1, 2, 1, 1), math.nan), above, none, none, 1, 5, 6, 1.0, ratio, True, "avg", last
    lost = run(backend, "roi_align_backward", args).isnan()
    assert lost.any(3).tolist() == [[[True, True, False, False, False]] * 2]
    turned = above[:, [0, 2, 1, 4, 3]]
    args = torch.full((1, 2, 1, 1), math.nan), turned, none, none, 1, 5, 6, 1.0, ratio, True, "avg", last
    assert run(backend, "roi_align_backward", args).isnan().any(2).tolist() == [[[True, True] + [False] * 4] * 2]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_box_without_samples_is_0_or_the_lowest_float(backend: str) -> None:
    turned = box(4, 4, 2, 2)
    assert aligned_on(backend, RAMP, turned, 1, 1, 1.0, 0, True, "avg")[0].item() == 0
    assert aligned_on(backend, RAMP, turned, 1, 1, 1.0, 0, True, "max")[0].item() == torch.finfo(torch.float32).min
    # not aligned, it has one pixel: 4..5 in both directions
    assert aligned_on(backend, RAMP, turned, 1, 1, 1.0, 0, False, "avg")[0].item() == 6 * 4 + 4.5


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("mode", ["avg", "max"])
def test_boxes_that_are_not_finite_give_zeros(backend: str, mode: str) -> None:
    boxes = torch.cat([box(math.nan, 0, 4, 4), box(0, -math.inf, 4, 4), box(-3e38, 0, 3e38, 4)])
    assert not aligned_on(backend, RAMP + 1, boxes, 2, 2, 1.0, 0, True, mode)[0].any()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_box_of_a_million_pixels_takes_the_mean_over_all_its_samples(backend: str) -> None:
    ones = torch.ones(1, 1, 4, 4)
    output = aligned_on(backend, ones, box(0, 0, 1000, 1000), 1, 1, 1.0, 0, False, "avg")[0]
    assert output.item() == pytest.approx(16e-6)  # samples at 0.5 .. 3.5 of 1,000 in each direction
    far = aligned_on(backend, ones, box(-1e30, -1e30, 1e30, 1e30), 1, 1, 1.0, 0, False, "max")[0]
    assert far.item() in (0.0, 1.0)


def test_a_box_of_an_image_that_is_not_there_gives_zeros_and_no_gradient_in_kernels_of_the_gpu() -> None:
    boxes = torch.tensor([[7.0, 0, 0, 4, 4], [-1, 0, 0, 4, 4], [math.nan, 0, 0, 4, 4]])
    for mode in ("avg", "max"):
        output, *places = aligned_on("gpu", RAMP + 1, boxes, 2, 2, 1.0, 0, True, mode)
        assert not output.any()
        grad = run("gpu", "roi_align_backward",
                   (torch.ones_like(output), boxes, *places, 1, 5, 6, 1.0, 0, True, mode, False))  # fmt: skip
        assert not grad.any()


@pytest.mark.parametrize("memory_format", FORMATS)
def test_is_what_grid_sample_computes_inside_the_map(memory_format: torch.memory_format) -> None:
    torch.manual_seed(0)
    input = torch.randn(2, 5, 12, 10).contiguous(memory_format=memory_format)
    low = torch.rand(20, 2) * 20 + 4
    boxes = torch.cat([torch.arange(20.0)[:, None] % 2, low, low + torch.rand(20, 2) * 12], 1)
    output = triops.roi_align(input, boxes, 3, 0.25, 2, aligned=True)
    assert output.is_contiguous(memory_format=memory_format)
    torch.testing.assert_close(output, by_grid_sample(input, boxes, 3, 0.25, 2))


def test_a_list_of_boxes_is_one_tensor_with_the_images_in_front() -> None:
    input, boxes = torch.randn(2, 3, 5, 6, dtype=torch.bfloat16), [torch.rand(3, 4) * 5, torch.rand(2, 4) * 5]
    joined = torch.cat([torch.cat([torch.full((len(b), 1), float(n)), b], 1) for n, b in enumerate(boxes)])
    assert torch.equal(triops.roi_align(input, boxes, (2, 3)), triops.roi_align(input, joined, (2, 3)))


@pytest.mark.parametrize("mode", ["avg", "max"])
@pytest.mark.parametrize("memory_format", FORMATS)
def test_gradcheck(mode: str, memory_format: torch.memory_format) -> None:
    input, boxes, *rest = maps((2, 3, 5, 6), 4, (2, 2), 0, mode=mode)(torch.float64)
    input = input.contiguous(memory_format=memory_format).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: roi_align_forward(x, boxes, *rest)[0], (input,))
    output, *places = roi_align_forward(input, boxes, *rest)
    assert output.requires_grad
    assert not any(p.requires_grad for p in places)
    (grad,) = torch.autograd.grad(output.sum(), input)
    assert grad.is_contiguous(memory_format=memory_format)


def test_the_gradient_of_boxes_on_the_map_is_conserved() -> None:
    _, boxes, rows, columns, *rest = maps((1, 2, 20, 20), 6, (3, 3), 2, scale=1.0)(torch.float32)
    boxes[:, 1:] = boxes[:, 1:].clamp(2, 18)
    grad = torch.rand(6, 2, rows, columns)
    none = torch.empty(0)
    found = roi_align_backward(grad, boxes, none, none, 1, 20, 20, *rest)
    torch.testing.assert_close(found.sum((0, 2, 3)), grad.sum((0, 2, 3)))


def test_compiles_and_differentiates_from_a_list_of_boxes() -> None:
    def pooled(x: Tensor, b: Tensor) -> Tensor:
        return triops.roi_align(x, [b, b + 1], 2, 0.5, aligned=True, mode="max")

    input, boxes = torch.randn(2, 3, 5, 6, requires_grad=True), torch.tensor([[0.0, 1, 7, 8]])
    compiled = torch.compile(pooled, backend="aot_eager", fullgraph=True)(input, boxes)
    assert torch.equal(compiled, pooled(input, boxes))
    (got,), (expected,) = (torch.autograd.grad(f.sum(), input) for f in (compiled, pooled(input, boxes)))
    assert torch.equal(got, expected)
