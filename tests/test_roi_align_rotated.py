"""Facts about roi_align_rotated and riroi_align_rotated: by hand, by symmetry, and against what torch computes."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from support import run
from torch import Tensor

import triops
from triops.ops.roi_align_rotated import roi_align_rotated_backward
from triops.ops.roi_align_rotated.samples import by_grid_sample, maps

RAMP = torch.arange(30.0).view(1, 1, 5, 6)  # value 6 y + x
FORMATS = [torch.contiguous_format, torch.channels_last]
BACKENDS = ["reference", "cpu", "gpu"]


def box(*fields: float) -> Tensor:
    return torch.tensor([[0.0, *fields]])


def aligned_on(backend: str, *args: Any) -> Any:
    return run(backend, "roi_align_rotated", args)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("clockwise", [False, True])
def test_a_quarter_turn_on_a_ramp(backend: str, clockwise: bool) -> None:
    # aligned: half a pixel less, so the centre is x 2, y 2; two bins of one pixel along the width of the box
    output = aligned_on(backend, RAMP, box(2.5, 2.5, 2, 1, math.pi / 2), 1, 2, 1.0, 1, True, clockwise, 1)
    up, down = 6 * 1.5 + 2, 6 * 2.5 + 2  # against the clock the width points up
    assert output.flatten().tolist() == pytest.approx([up, down] if clockwise else [down, up])


@pytest.mark.parametrize("backend", BACKENDS)
def test_without_an_angle_it_is_roi_align(backend: str) -> None:
    torch.manual_seed(0)
    input, corners = torch.randn(1, 3, 8, 9), torch.rand(6, 4) * 4
    corners[:, 2:] += corners[:, :2] + 1
    straight = torch.cat([torch.zeros(6, 1), corners], 1)
    boxes = torch.cat([torch.zeros(6, 1), (corners[:, :2] + corners[:, 2:]) / 2, corners[:, 2:] - corners[:, :2],
                       torch.zeros(6, 1)], 1)  # fmt: skip
    for ratio, aligned in ((0, True), (3, False)):
        output = aligned_on(backend, input, boxes, 2, 3, 1.0, ratio, aligned, True, 1)
        torch.testing.assert_close(output.cpu(), triops.roi_align(input, straight, (2, 3), 1.0, ratio, aligned))


@pytest.mark.parametrize("backend", BACKENDS)
def test_samples_more_than_a_pixel_off_the_map_are_0_and_count(backend: str) -> None:
    # a half turn: samples at x -3, -1 (on the map: one pixel off), 1, 3 of 4
    output = aligned_on(backend, torch.ones(1, 1, 4, 4), box(0, 1, 8, 2, 0.0), 1, 1, 1.0, 4, False, False, 1)
    assert output.item() == 0.75


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_box_without_extent_is_0_or_one_pixel(backend: str) -> None:
    assert aligned_on(backend, RAMP + 1, box(2, 2, -1, 2, 1.0), 1, 1, 1.0, 0, True, False, 1).item() == 0
    assert aligned_on(backend, RAMP, box(2, 2, 0, 0, 1.0), 1, 1, 1.0, 0, False, False, 1).item() == 14


@pytest.mark.parametrize("backend", BACKENDS)
def test_boxes_that_are_not_finite_give_zeros(backend: str) -> None:
    boxes = torch.cat([box(math.nan, 0, 4, 4, 0), box(0, 0, math.inf, 4, 0), box(1, 1, 2, 2, math.inf),
                       box(1, 1, 2, 2, math.nan), box(-3e38, 0, 1, 4, 0), box(1, 1, 2, 2, 1e7)])  # fmt: skip
    assert not aligned_on(backend, RAMP + 1, boxes, 2, 2, 1.0, 0, True, False, 1).any()
    assert not aligned_on(backend, RAMP + 1, boxes, 2, 2, 1.0, 0, False, False, 1).any()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_box_of_a_million_pixels_takes_the_mean_over_all_its_samples(backend: str) -> None:
    ones = torch.ones(1, 1, 8, 8)
    output = aligned_on(backend, ones, box(4, 4, 1000, 1000, 0.6), 1, 1, 1.0, 0, True, False, 1)
    assert output.item() == pytest.approx(81e-6, rel=0.05)  # from -1 to 8 in each direction
    far = aligned_on(backend, ones, box(0, 0, 1e29, 1e29, 0.6), 1, 1, 1.0, 0, True, False, 1)
    assert 0 <= far.item() <= 1


def test_a_box_of_more_samples_than_a_buffer_of_the_cpu_holds() -> None:
    args = (torch.randn(1, 3, 60, 60), box(30, 30, 70, 80, 0.3), 1, 2, 1.0, 0, True, True, 1)
    torch.testing.assert_close(aligned_on("cpu", *args), aligned_on("reference", *args))
    given = (torch.ones(1, 3, 1, 2), args[1], 1, 60, 60, *args[4:], False)
    grads = [run(backend, "roi_align_rotated_backward", given) for backend in ("cpu", "reference")]
    torch.testing.assert_close(*grads)


def test_a_box_of_an_image_that_is_not_there_gives_zeros_and_no_gradient_in_kernels_of_the_gpu() -> None:
    boxes = torch.tensor([[7.0, 2, 2, 4, 4, 0], [-1, 2, 2, 4, 4, 0], [math.nan, 2, 2, 4, 4, 0]])
    output = aligned_on("gpu", RAMP + 1, boxes, 2, 2, 1.0, 0, True, True, 1)
    assert not output.any()
    given = (torch.ones_like(output), boxes, 1, 5, 6, 1.0, 0, True, True, 1, False)
    assert not run("gpu", "roi_align_rotated_backward", given).any()


@pytest.mark.parametrize("memory_format", FORMATS)
def test_is_what_grid_sample_computes_inside_the_map(memory_format: torch.memory_format) -> None:
    torch.manual_seed(0)
    input = torch.randn(2, 5, 12, 10).contiguous(memory_format=memory_format)
    boxes = torch.cat([torch.arange(20.0)[:, None] % 2, torch.rand(20, 2) * 12 + 14, torch.rand(20, 2) * 16,
                       torch.randn(20, 1) * 3], 1)  # fmt: skip
    output = triops.roi_align_rotated(input, boxes, 3, 0.25, 2, clockwise=True)
    assert output.is_contiguous(memory_format=memory_format)
    torch.testing.assert_close(output, by_grid_sample(input, boxes, 3, 0.25, 2))


def test_turning_map_and_box_by_a_quarter_turns_nothing() -> None:
    input, theta = torch.randn(1, 3, 8, 8, dtype=torch.float64), 0.4
    output = triops.roi_align_rotated(input, box(3, 5, 4, 2, theta).double(), (2, 3), sampling_ratio=2)
    # against the clock: what was at (x, y) is now at (y, 8 - x)
    quarter = triops.roi_align_rotated(
        input.rot90(1, (2, 3)), box(5, 8 - 3, 4, 2, theta + math.pi / 2).double(), (2, 3), sampling_ratio=2
    )
    torch.testing.assert_close(quarter, output)


@pytest.mark.parametrize("backend", BACKENDS)
def test_channels_are_turned_with_the_box(backend: str) -> None:
    channels = torch.arange(8.0).view(1, 8, 1, 1).expand(1, 8, 3, 3).contiguous()  # two groups of four
    for turns, expected in ((0, [0, 1, 2, 3]), (1, [3, 0, 1, 2]), (-1, [1, 2, 3, 0]), (6, [2, 3, 0, 1])):
        theta = turns * math.pi / 2 + 1e-6  # on the safe side of a whole step
        output = aligned_on(backend, channels, box(1, 1, 2, 2, theta), 1, 1, 1.0, 2, False, False, 4).flatten()
        assert output.tolist() == pytest.approx([*expected, *(4 + e for e in expected)], abs=1e-4)
    half = aligned_on(backend, channels, box(1, 1, 2, 2, math.pi / 4), 1, 1, 1.0, 2, False, False, 4).flatten()
    assert half[:4].tolist() == pytest.approx([0.5, 1.5, 2.5, 1.5])  # between o and o + 1


@pytest.mark.parametrize("memory_format", FORMATS)
@pytest.mark.parametrize("orientations", [1, 2])
def test_gradcheck(memory_format: torch.memory_format, orientations: int) -> None:
    input, boxes, *rest = maps((2, 4, 5, 6), 4, (2, 2), 0, orientations=orientations)(torch.float64)
    input = input.contiguous(memory_format=memory_format).requires_grad_()
    pooled = torch.ops.triops.roi_align_rotated
    assert torch.autograd.gradcheck(lambda x: pooled(x, boxes, *rest), (input,))
    (grad,) = torch.autograd.grad(pooled(input, boxes, *rest).sum(), input)
    assert grad.is_contiguous(memory_format=memory_format)


def test_the_gradient_of_boxes_on_the_map_is_conserved() -> None:
    boxes = torch.cat([torch.zeros(6, 1), torch.rand(6, 2) * 4 + 8, torch.rand(6, 2) * 6, torch.randn(6, 1)], 1)
    grad = torch.rand(6, 4, 3, 3)
    found = roi_align_rotated_backward(grad, boxes, 1, 20, 20, 1.0, 2, True, False, 4)
    torch.testing.assert_close(found.sum(), grad.sum())


def test_riroi_align_rotated_is_roi_align_rotated_where_the_angle_is_0() -> None:
    input, boxes = torch.randn(1, 16, 6, 6), torch.cat([box(3, 3, 4, 2, 0), box(2, 2, 0.1, 5, 0)])
    torch.testing.assert_close(
        triops.riroi_align_rotated(input, boxes, 2, num_samples=2),
        triops.roi_align_rotated(input, boxes, 2, sampling_ratio=2, aligned=False),
    )
