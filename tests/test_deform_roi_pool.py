"""Facts about deform_roi_pool: by hand, against roi_align, and by finite differences."""

from __future__ import annotations

import math

import pytest
import torch
from support import run

import triops
from triops.ops.deform_roi_pool import deform_roi_pool_backward
from triops.ops.deform_roi_pool.samples import by_grid_sample, maps

BACKENDS = ["reference", "cpu", "gpu"]
RAMP = torch.arange(60.0).view(1, 1, 6, 10)  # value 10 y + x
BOX = torch.tensor([[0.0, 2.5, 1.5, 6.5, 3.5]])  # two bins of 2 x 2 pixels, from (2, 1) on
RULES = (1, 2, 1.0, 2)  # bins, scale, samples


def offsets(*of_bins: tuple[float, float]) -> torch.Tensor:
    """(x, y) of each bin of one row."""
    return torch.tensor(of_bins).t().reshape(1, 2, 1, -1)


@pytest.mark.parametrize("backend", BACKENDS)
def test_each_bin_moves_by_a_share_of_the_box(backend: str) -> None:
    output = run(backend, "deform_roi_pool", (RAMP, BOX, offsets((1.0, 0.0), (0.0, 2.5)), *RULES, 0.2))
    assert output.flatten().tolist() == pytest.approx([23 + 0.2 * 4, 25 + 10 * 0.2 * 2 * 2.5])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("ratio", [0, 3])
def test_without_offsets_it_is_roi_align(backend: str, ratio: int) -> None:
    input, boxes, _, *bins, scale, _, gamma = maps((2, 3, 8, 9), 6, (2, 3))(torch.float64)
    expected = triops.roi_align(input, boxes, bins, scale, ratio, aligned=True)
    for offset in (None, torch.zeros(6, 2, 2, 3, dtype=torch.float64)):
        output = run(backend, "deform_roi_pool", (input, boxes, offset, *bins, scale, ratio, gamma))
        torch.testing.assert_close(output, expected)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_gradient_of_an_offset_is_the_slope_by_gamma_and_the_size_of_the_box(backend: str) -> None:
    grad = torch.tensor([3.0, 0.0]).view(1, 1, 1, 2)
    args = grad, RAMP, BOX, offsets((0.0, 0.0), (0.0, 0.0)), 1.0, 2, 0.2, True, True
    to_input, to_offset = run(backend, "deform_roi_pool_backward", args)
    assert to_offset.flatten().tolist() == pytest.approx([3 * 0.2 * 4 * 1, 0, 3 * 0.2 * 2 * 10, 0])
    assert to_input.sum().item() == pytest.approx(3)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_bin_whose_offset_is_not_finite_lies_off_the_map(backend: str) -> None:
    offset = offsets((math.nan, 0.0), (0.0, -math.inf))
    assert not run(backend, "deform_roi_pool", (RAMP + 1, BOX, offset, *RULES, 0.2)).any()
    grads = run(backend, "deform_roi_pool_backward", (torch.ones(1, 1, 1, 2), RAMP, BOX, offset, 1.0, 2, 0.2, 1, 1))
    assert not any(g.any() for g in grads)


@pytest.mark.parametrize("backend", BACKENDS)
def test_within_a_pixel_off_the_map_the_border_is_read_and_has_no_slope_across(backend: str) -> None:
    """mmcv extends the slope of the first two pixels there, and has none along the last row and column."""
    box = torch.tensor([[0.0, 3.0, 0.0, 5.0, 0.0]])  # 2 x 0, its only sample at (3.5, -0.5)
    grad, offset = torch.ones(1, 1, 1, 1), torch.zeros(1, 2, 1, 1)
    assert run(backend, "deform_roi_pool", (RAMP, box, offset, 1, 1, 1.0, 1, 1.0)).item() == 3.5
    _, slopes = run(backend, "deform_roi_pool_backward", (grad, RAMP, box, offset, 1.0, 1, 1.0, False, True))
    assert slopes.flatten().tolist() == [2, 0]
    box = torch.tensor([[0.0, 3.0, 5.0, 5.0, 6.5]])  # 2 x 1.5, its only sample at (3.5, 5.25)
    _, slopes = run(backend, "deform_roi_pool_backward", (grad, RAMP, box, offset, 1.0, 1, 1.0, False, True))
    assert slopes.flatten().tolist() == [2, 0]


def test_what_is_not_wanted_is_empty() -> None:
    input, boxes, offset, *bins, scale, ratio, gamma = maps((1, 2, 5, 6), 2, (2, 2))(torch.float32)
    args = torch.ones(2, 2, *bins), input, boxes
    full = deform_roi_pool_backward(*args, offset, scale, ratio, gamma)
    assert [g.numel() for g in deform_roi_pool_backward(*args, offset, scale, ratio, gamma, False)] == [0, 16]
    assert [g.numel() for g in deform_roi_pool_backward(*args, None, scale, ratio, gamma)] == [60, 0]
    only, none = deform_roi_pool_backward(*args, offset, scale, ratio, gamma, True, False)
    assert torch.equal(only, full[0])
    assert none.numel() == 0


@pytest.mark.parametrize("ratio", [0, 2])
@pytest.mark.parametrize("channels_last", [False, True])
def test_gradcheck(ratio: int, channels_last: bool) -> None:
    input, boxes, offset, *bins, scale, _, gamma = maps((2, 2, 5, 6), 3, (2, 2), channels_last=channels_last)(
        torch.float64
    )
    leaves = input.requires_grad_(), offset.requires_grad_()
    assert torch.autograd.gradcheck(lambda x, o: triops.deform_roi_pool(x, boxes, o, bins, scale, ratio, gamma), leaves)


def test_inside_the_map_it_is_grid_sample() -> None:
    input = torch.randn(2, 3, 20, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    boxes = torch.tensor([[0, 6.0, 5, 15, 14], [1, 8, 6, 14, 12]], dtype=torch.float64)
    offset = torch.rand(2, 2, 3, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    expected = by_grid_sample(input, boxes, offset, 3, 2, 1.0, 2, 0.1)
    torch.testing.assert_close(triops.deform_roi_pool(input, boxes, offset, (3, 2), 1.0, 2, 0.1), expected)


def test_boxes_may_be_a_list() -> None:
    input, boxes = torch.rand(2, 3, 8, 8), torch.tensor([[1.0, 1, 5, 6]])
    joined = torch.tensor([[0.0, 1, 1, 5, 6], [1, 1, 1, 5, 6]])
    assert torch.equal(
        triops.deform_roi_pool(input, [boxes, boxes], None, 2), triops.deform_roi_pool(input, joined, None, 2)
    )


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_offset_along_which_the_border_is_read_has_no_gradient_whatever_is_given(backend: str) -> None:
    input, given = torch.rand(1, 1, 4, 4), torch.full((1, 1, 1, 1), math.nan)
    boxes, offset = torch.tensor([[0.0, 1, -0.5, 3, 0.5]]), torch.zeros(1, 2, 1, 1)  # one sample, at y = -0.5
    args = given, input, boxes, offset, 1.0, 1, 0.1, False, True
    _, slopes = run(backend, "deform_roi_pool_backward", args)
    assert slopes[0, 0].isnan().all()
    assert slopes[0, 1].item() == 0


def test_thousands_of_samples_in_a_bin_lose_no_digits_on_cpu() -> None:
    """One by one the sums of 64 x 64 samples were off by 8e-7 of themselves."""
    input = torch.rand(1, 4, 40, 40, generator=torch.Generator().manual_seed(0)).cumsum(2)
    tensors = torch.ones(1, 4, 2, 2), input, torch.tensor([[0.0, 8.0, 8.0, 90.0, 90.0]]), torch.zeros(1, 2, 2, 2)
    found, exact = (
        run("cpu", "deform_roi_pool_backward", (*(t.to(real) for t in tensors), 1.0, 64, 0.1, False, True))[1]
        for real in (torch.float32, torch.float64)
    )
    assert (found - exact).abs().max() < 3e-7 * exact.abs().max()
