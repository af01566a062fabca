"""Facts about roi_pool: by hand, and against a loop over bins."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from support import run
from torch import Tensor

import triops
from triops.ops.roi_pool import roi_pool_backward, roi_pool_forward
from triops.ops.roi_pool.samples import maps

RAMP = torch.arange(30.0).view(1, 1, 5, 6)  # value 6 y + x, which is also the number of the pixel
FORMATS = [torch.contiguous_format, torch.channels_last]
BACKENDS = ["reference", "cpu", "gpu"]


def box(*corners: float) -> Tensor:
    return torch.tensor([[0.0, *corners]])


def pooled_on(backend: str, *args: Any) -> Any:
    return run(backend, "roi_pool_forward", args)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_box_reaches_one_unit_behind_its_second_corner(backend: str) -> None:
    output, argmax = pooled_on(backend, RAMP, box(0, 0, 3, 1), 2, 2, 1.0)
    assert output.flatten().tolist() == argmax.flatten().tolist() == [1, 3, 7, 9]


@pytest.mark.parametrize("backend", BACKENDS)
def test_neighboring_bins_share_the_pixel_that_both_touch(backend: str) -> None:
    # 0..3 in two bins of 1.5 pixels: 0 and 1, 1 and 2
    output, _ = pooled_on(backend, RAMP.flip(3), box(0, 0, 2, 0), 1, 2, 1.0)
    assert output.flatten().tolist() == [5, 4]


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_scale_also_shrinks_the_unit_behind_the_second_corner(backend: str) -> None:
    # 0 .. (6 + 1) / 4 = 1.75, rounded up
    assert pooled_on(backend, RAMP, box(0, 0, 6, 6), 1, 1, 0.25)[0].item() == 6 + 1


@pytest.mark.parametrize("backend", BACKENDS)
def test_bins_off_the_map_are_0_and_come_from_no_pixel(backend: str) -> None:
    output, argmax = pooled_on(backend, RAMP - 100, box(-3, 0, 2, 0), 1, 3, 1.0)  # bins -3..-1, -1..1, 1..3
    assert output.flatten().tolist() == [0, -100, -98]
    assert argmax.flatten().tolist() == [-1, 0, 2]


@pytest.mark.parametrize("backend", BACKENDS)
def test_boxes_turned_around_or_not_finite_are_0_and_come_from_no_pixel(backend: str) -> None:
    boxes = torch.cat([box(4, 0, 3, 4), box(4, 4, 5, 1), box(math.nan, 0, 4, 4), box(0, -math.inf, 4, 4),
                       box(-3e38, 0, 3e38, 4)])  # fmt: skip
    output, argmax = pooled_on(backend, RAMP + 1, boxes, 2, 2, 1.0)
    assert not output.any()
    assert (argmax == -1).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_first_of_equal_maxima_wins_and_nan_never_does(backend: str) -> None:
    flat = torch.tensor([[math.nan, 2.0, 2.0], [1.0, 2.0, math.nan]])[None, None]
    output, argmax = pooled_on(backend, flat, box(0, 0, 2, 1), 1, 1, 1.0)
    assert (output.item(), argmax.item()) == (2.0, 1)
    output, argmax = pooled_on(backend, torch.full((1, 1, 2, 2), math.nan), box(0, 0, 1, 1), 1, 1, 1.0)
    assert (output.item(), argmax.item()) == (torch.finfo(torch.float32).min, -1)


def test_a_box_of_an_image_that_is_not_there_gives_zeros_and_no_gradient_in_kernels_of_the_gpu() -> None:
    boxes = torch.tensor([[7.0, 0, 0, 4, 4], [-1, 0, 0, 4, 4], [math.nan, 0, 0, 4, 4]])
    output, argmax = pooled_on("gpu", RAMP + 1, boxes, 2, 2, 1.0)
    assert not output.any()
    assert (argmax == -1).all()
    hostile = torch.zeros_like(argmax)
    assert not run("gpu", "roi_pool_backward", (torch.ones_like(output), boxes, hostile, 1, 5, 6, False)).any()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_pixel_that_is_not_on_the_map_takes_no_gradient(backend: str) -> None:
    hostile = torch.tensor([-1, -(2**31), 30, 2**31 - 1, 29]).int().view(1, 1, 1, 5)
    grad = run(backend, "roi_pool_backward", (torch.ones(1, 1, 1, 5), box(0, 0, 1, 1), hostile, 1, 5, 6, False))
    assert grad.sum() == grad[0, 0, 4, 5] == 1


def test_a_list_of_boxes_is_one_tensor_with_the_images_in_front() -> None:
    input, boxes = torch.randn(2, 3, 5, 6, dtype=torch.bfloat16), [torch.rand(3, 4) * 5, torch.rand(2, 4) * 5]
    joined = torch.cat([torch.cat([torch.full((len(b), 1), float(n)), b], 1) for n, b in enumerate(boxes)])
    assert torch.equal(triops.roi_pool(input, boxes, (2, 3)), triops.roi_pool(input, joined, (2, 3)))


@pytest.mark.parametrize("memory_format", FORMATS)
def test_gradcheck(memory_format: torch.memory_format) -> None:
    input, boxes, *rest = maps((2, 3, 5, 6), 4, (2, 2))(torch.float64)
    input = input.contiguous(memory_format=memory_format).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: roi_pool_forward(x, boxes, *rest)[0], (input,))
    output, argmax = roi_pool_forward(input, boxes, *rest)
    assert output.is_contiguous(memory_format=memory_format)
    assert argmax.is_contiguous(memory_format=memory_format)
    (grad,) = torch.autograd.grad(output.sum(), input)
    assert grad.is_contiguous(memory_format=memory_format)


def test_the_gradient_of_maxima_is_conserved() -> None:
    input, boxes, *rest = maps((1, 2, 20, 20), 6, (3, 3), scale=1.0)(torch.float32)
    output, argmax = roi_pool_forward(input, boxes, *rest)
    grad = torch.rand(output.shape)
    found = roi_pool_backward(grad, boxes, argmax, 1, 20, 20)
    torch.testing.assert_close(found.sum((0, 2, 3)), torch.where(argmax >= 0, grad, 0).sum((0, 2, 3)))
