"""CPU kernels that get tensors as addresses: what does not lie dense is copied, and the copy lives while they run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import triops
from triops._cpu.addresses import ELEMENTS, array_at, laid
from triops._cpu.jit import jit
from triops._cpu.row_products import by_lanes
from triops.ops.deform_conv2d import cpu as deform_conv2d
from triops.ops.deform_conv2d.reference import Sizes


@jit
def _double(address: int, count: int, like: Any) -> None:
    numbers = array_at(address, count, like)
    for i in range(count):
        numbers[i] *= 2


@pytest.mark.parametrize("dtype", ELEMENTS)
def test_an_address_is_read_and_written_as_the_given_elements(dtype: torch.dtype) -> None:
    tensor = torch.arange(6, dtype=dtype)
    _double(tensor[2:].data_ptr(), 3, ELEMENTS[dtype])
    assert tensor.tolist() == [0, 1, 4, 6, 8, 5]


def test_what_lies_as_it_should_is_not_copied_and_all_else_is() -> None:
    maps = torch.rand(2, 3, 4, 5)
    assert laid(maps, torch.float32) is maps
    last = maps.contiguous(memory_format=torch.channels_last)
    assert laid(last, torch.float32, torch.channels_last).data_ptr() == last.data_ptr()
    for other in (laid(last, torch.float32), laid(maps[:, :, :, :4], torch.float32), laid(maps, torch.float64)):
        assert other.is_contiguous()
    assert laid(maps[:, :, ::2], torch.float32, torch.channels_last).stride(1) == 1
    assert torch.equal(laid(last, torch.float32), maps)


def _apart(tensor: Tensor) -> Tensor:
    """The same numbers, none beside another."""
    return tensor.new_zeros((*tensor.shape, 3))[..., 1].copy_(tensor)


BOXES = torch.tensor([[0, 1.0, 1, 5, 6], [1, 0, 2, 7, 7], [0, 3, 0, 6, 4]])
MAPS = torch.randn(2, 20, 8, 9, generator=torch.Generator().manual_seed(0))
OFFSET, MASK, WEIGHT, BIAS = torch.randn(2, 18, 8, 9), torch.rand(2, 9, 8, 9), torch.randn(6, 20, 3, 3), torch.randn(6)


@pytest.mark.parametrize(
    ("function", "tensors"),
    [
        (lambda maps, boxes: triops.roi_align(maps, boxes, 3, sampling_ratio=2), (MAPS, BOXES)),
        (lambda maps, boxes: triops.roi_align(maps, boxes, 3, mode="max"), (MAPS, BOXES)),
        (lambda maps, boxes: triops.roi_pool(maps, boxes, 3), (MAPS, BOXES)),
        (
            lambda maps, offset, weight, bias, mask: triops.deform_conv2d(maps, offset, weight, bias, 1, 1, 1, mask),
            (MAPS, OFFSET, WEIGHT, BIAS, MASK),
        ),
    ],
    ids=["roi_align", "roi_align max", "roi_pool", "deform_conv2d"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_strided_operands_and_gradients_give_what_dense_ones_give(
    function: Callable[..., Tensor], tensors: tuple[Tensor, ...], dtype: torch.dtype
) -> None:
    results = []
    for place in (Tensor.clone, _apart):
        operands = [place(t.to(dtype)).requires_grad_() for t in tensors]
        out = function(*operands)
        grad = place(torch.linspace(-1, 1, out.numel()).view(out.shape).to(dtype))
        wanted = [t for t in operands if t.dim() > 1]  # the gradient of the bias is a sum that torch makes
        results.append((out, *torch.autograd.grad(out, wanted, grad, allow_unused=True)))
    for dense, strided in zip(*results, strict=True):
        assert (dense is None and strided is None) or torch.equal(dense, strided)


@pytest.mark.parametrize(("groups", "outputs", "own"), [(1, 4, 4), (1, 37, 5), (3, 16, 20), (2, 50, 33)])
def test_a_weight_is_laid_out_as_by_lanes_does(groups: int, outputs: int, own: int) -> None:
    weight, channels = torch.randn(groups * outputs, own, 3, 2), groups * own
    sizes = Sizes.of(torch.empty(1, channels, 4, 4), torch.empty(1, 12, 2, 3), weight)
    expected = by_lanes(deform_conv2d._matrices(weight, sizes, torch.float32))
    assert np.array_equal(deform_conv2d._in_lanes(weight, sizes, torch.float32), expected.reshape(-1))
