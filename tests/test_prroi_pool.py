"""Facts about prroi_pool: by hand, and against dense products."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from support import run
from torch import Tensor

import triops
from triops.ops.prroi_pool import prroi_pool_boxes_backward
from triops.ops.prroi_pool.samples import by_products, maps

RAMP = torch.arange(30.0).view(1, 1, 5, 6)  # value 6 y + x
FORMATS = [torch.contiguous_format, torch.channels_last]
BACKENDS = ["reference", "cpu", "gpu"]


def box(*corners: float) -> Tensor:
    return torch.tensor([[0.0, *corners]])


def pooled_on(backend: str, *args: Any) -> Any:
    return run(backend, "prroi_pool", args)


@pytest.mark.parametrize("backend", BACKENDS)
def test_on_a_ramp_a_bin_is_the_value_at_its_centre(backend: str) -> None:
    output = pooled_on(backend, RAMP, box(0.2, 0.5, 4.2, 2.5), 2, 2, 1.0)
    assert output.flatten().tolist() == pytest.approx([6 + 1.2, 6 + 3.2, 12 + 1.2, 12 + 3.2])


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_bin_that_only_grazes_a_pixel_gives_it_its_share_to_all_digits(backend: str) -> None:
    """The hat function is 0.001 there, and places on the map are multiples of 2**-18: the middle of the bin is none."""
    narrow = box(34.0, 0.0, 34 + 525 * 2**-18, 1.0)
    grad = run(backend, "prroi_pool_backward", (torch.ones(1, 1, 1, 1), narrow, 1, 2, 40, 1.0, False))
    exact = (narrow[0, 3].double() - 34) / 2  # the mean of the hat of pixel 35 over the bin
    assert grad[0, 0, :, 35].sum().item() == pytest.approx(exact.item(), rel=1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_bin_that_reaches_a_hundred_millionth_into_a_pixel_reads_it(backend: str) -> None:
    """By rounding the last of seven bins from -0.5 to 0 ends above 0, where the hat of pixel 1 begins."""
    map = RAMP.clone()
    map[:, :, 1] = -math.inf
    output = pooled_on(backend, map, box(0, -1, 2, 0), 7, 1, 0.5)
    assert output.isinf().flatten().tolist() == [False] * 6 + [True]


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_surface_falls_to_0_within_a_pixel_off_the_map(backend: str) -> None:
    ones = torch.ones(1, 1, 4, 4)
    assert pooled_on(backend, ones, box(-1, 0, 0, 3), 1, 1, 1.0).item() == pytest.approx(0.5)
    assert pooled_on(backend, ones, box(-2, 0, 2, 3), 1, 2, 1.0).flatten().tolist() == pytest.approx([0.25, 1])
    assert pooled_on(backend, ones, box(3, 3, 5, 5), 1, 1, 1.0).item() == pytest.approx(1 / 16)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_tiny_box_reads_the_surface_at_a_point(backend: str) -> None:
    output = pooled_on(backend, RAMP, box(1.25, 2.5, 1.2501, 2.5001), 1, 1, 1.0)
    assert output.item() == pytest.approx(6 * 2.5 + 1.25, rel=1e-4)


@pytest.mark.parametrize("backend", BACKENDS)
def test_boxes_without_area_or_not_finite_are_0_and_take_no_gradient(backend: str) -> None:
    boxes = torch.cat([box(4, 0, 3, 4), box(2, 2, 2, 4), box(math.nan, 0, 4, 4), box(0, -math.inf, 4, 4),
                       box(-3e38, 0, 3e38, 4)])  # fmt: skip
    output = pooled_on(backend, RAMP + 1, boxes, 2, 2, 1.0)
    assert not output.any()
    ones = torch.ones_like(output)
    assert not run(backend, "prroi_pool_backward", (ones, boxes, 1, 5, 6, 1.0, False)).any()
    assert not run(backend, "prroi_pool_boxes_backward", (ones, RAMP, boxes, 1.0)).any()


@pytest.mark.parametrize("backend", BACKENDS)
def test_on_a_ramp_each_corner_moves_the_centre_by_half(backend: str) -> None:
    grad = run(backend, "prroi_pool_boxes_backward", (torch.ones(1, 1, 1, 1), RAMP, box(2, 2, 6.4, 4.4), 0.5))
    assert grad.flatten().tolist() == pytest.approx([0, 0.25, 1.5, 0.25, 1.5], rel=1e-4)


def test_a_box_of_an_image_that_is_not_there_gives_zeros_and_no_gradient_in_kernels_of_the_gpu() -> None:
    boxes = torch.tensor([[7.0, 0, 0, 4, 4], [-1, 0, 0, 4, 4], [math.nan, 0, 0, 4, 4]])
    output = pooled_on("gpu", RAMP + 1, boxes, 2, 2, 1.0)
    assert not output.any()
    ones = torch.ones_like(output)
    assert not run("gpu", "prroi_pool_backward", (ones, boxes, 1, 5, 6, 1.0, False)).any()
    assert not run("gpu", "prroi_pool_boxes_backward", (ones, RAMP, boxes, 1.0)).any()


@pytest.mark.parametrize("memory_format", FORMATS)
def test_is_what_dense_products_compute(memory_format: torch.memory_format) -> None:
    torch.manual_seed(0)
    input, boxes, rows, _, scale = maps((2, 5, 12, 10), 20, (3, 3))(torch.float64)
    input = input.contiguous(memory_format=memory_format).requires_grad_()
    boxes.requires_grad_()
    output, expected = triops.prroi_pool(input, boxes, rows, scale), by_products(input, boxes, rows, scale)
    assert output.is_contiguous(memory_format=memory_format)
    torch.testing.assert_close(output, expected)
    grad = torch.randn_like(output)
    for got, wanted in zip(*(torch.autograd.grad(o, (input, boxes), grad) for o in (output, expected)), strict=True):
        torch.testing.assert_close(got, wanted)


@pytest.mark.parametrize("memory_format", FORMATS)
def test_gradcheck(memory_format: torch.memory_format) -> None:
    input, boxes, rows, columns, scale = maps((2, 3, 5, 6), 4, (2, 2))(torch.float64)
    input = input.contiguous(memory_format=memory_format).requires_grad_()
    image, corners = boxes[:, :1], boxes[:, 1:].clone().requires_grad_()  # the image is no continuous argument

    def pooled(x: Tensor, c: Tensor) -> Tensor:
        return triops.prroi_pool(x, torch.cat([image, c], 1), (rows, columns), scale)

    assert torch.autograd.gradcheck(pooled, (input, corners))
    (grad,) = torch.autograd.grad(triops.prroi_pool(input, boxes, 2, scale).sum(), input)
    assert grad.is_contiguous(memory_format=memory_format)


def test_a_list_of_boxes_takes_gradients_too() -> None:
    input, boxes = torch.randn(2, 3, 5, 6), [torch.rand(3, 4).cumsum(1).requires_grad_() for _ in range(2)]
    triops.prroi_pool(input, boxes, 2).sum().backward()
    joined = torch.cat([torch.cat([torch.full((3, 1), float(n)), b.detach()], 1) for n, b in enumerate(boxes)])
    expected = prroi_pool_boxes_backward(torch.ones(6, 3, 2, 2), input, joined, 1.0)
    torch.testing.assert_close(torch.cat([b.grad for b in boxes if b.grad is not None]), expected[:, 1:])
