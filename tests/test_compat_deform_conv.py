"""mmcv's functions of deformable convolution: keyword names, tensors that are filled and tensors that are added to."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import triops
import triops.compat.mmcv
from triops.ops.deform_conv2d.samples import convolution

EXTENSION = triops.compat.mmcv.extension("mmcv._ext")
OF_V1 = {"kW": 2, "kH": 3, "dW": 1, "dH": 1, "padW": 1, "padH": 1, "dilationW": 1, "dilationH": 1, "group": 2,
         "deformable_group": 2, "im2col_step": 32}  # fmt: skip
OF_V2 = {"kernel_h": 3, "kernel_w": 2, "stride_h": 1, "stride_w": 1, "pad_h": 1, "pad_w": 1, "dilation_h": 1,
         "dilation_w": 1, "group": 2, "deformable_group": 2, "with_bias": True}  # fmt: skip


def layer(batch: int = 2) -> tuple[Any, ...]:
    make = convolution((batch, 4, 4, 5), 6, (3, 2), groups=2, offset_groups=2)
    return make(torch.float32)[:5]


def empty() -> torch.Tensor:
    return torch.zeros(0)


def test_version_1_fills_its_output_whatever_the_batch() -> None:
    input, offset, weight, _, _ = layer(33)  # mmcv refuses what 32 does not divide
    expected = triops.deform_conv2d(input, offset, weight, None, 1, 1)
    output = torch.full_like(expected, 7.0)
    EXTENSION.deform_conv_forward(input, weight, offset, output, empty(), empty(), **OF_V1)
    assert torch.equal(output, expected)


def test_version_1_adds_to_the_gradients_of_input_and_weight() -> None:
    input, offset, weight, _, _ = layer()
    tensors = [t.clone().requires_grad_() for t in (input, offset, weight)]
    out = triops.deform_conv2d(*tensors, None, 1, 1)
    expected = torch.autograd.grad(out.square().sum(), tensors)
    grad = 2 * out.detach()
    grad_input, grad_offset, grad_weight = torch.ones_like(input), torch.ones_like(offset), torch.ones_like(weight)
    EXTENSION.deform_conv_backward_input(input, offset, grad, grad_input, grad_offset, weight, empty(), **OF_V1)
    EXTENSION.deform_conv_backward_parameters(
        input, offset, grad, grad_weight, empty(), empty(), **OF_V1, scale=0.5
    )  # fmt: skip
    torch.testing.assert_close(grad_input, 1 + expected[0])
    torch.testing.assert_close(grad_offset, expected[1])
    torch.testing.assert_close(grad_weight, 1 + 0.5 * expected[2])


@pytest.mark.parametrize("with_bias", [True, False])
def test_version_2_forward_and_backward(with_bias: bool) -> None:
    input, offset, weight, mask, bias = layer()
    rules = {**OF_V2, "with_bias": with_bias}
    tensors = [t.clone().requires_grad_() for t in (input, offset, weight, bias, mask)]
    out = triops.deform_conv2d(*tensors[:3], tensors[3] if with_bias else None, 1, 1, 1, tensors[4])
    expected = torch.autograd.grad(out.sum(), tensors, allow_unused=True)
    output = torch.empty_like(out)
    shift = bias if with_bias else empty()
    EXTENSION.modulated_deform_conv_forward(input, weight, shift, empty(), offset, mask, output, empty(), **rules)
    assert torch.equal(output, out)
    grads = [torch.ones_like(t) for t in (input, weight, shift, offset, mask)]
    EXTENSION.modulated_deform_conv_backward(
        input, weight, shift, empty(), offset, mask, empty(), *grads, torch.ones_like(out), **rules
    )
    torch.testing.assert_close(grads[0], 1 + expected[0])
    torch.testing.assert_close(grads[1], 1 + expected[2])
    torch.testing.assert_close(grads[3], expected[1])
    torch.testing.assert_close(grads[4], expected[4])
    if with_bias:
        torch.testing.assert_close(grads[2], 1 + expected[3])


@pytest.mark.parametrize("size", [(7, 9), (5, 4)])
def test_version_2_reads_offsets_of_another_size_in_their_order_as_mmcv_does(size: tuple[int, int]) -> None:
    input, _, weight, _, bias = layer()
    shape = (2, 6, 4, 6)  # of the output, of fewer pixels than the offsets
    if size == (5, 4):  # as many pixels
        input, shape = input[:, :, :, :4], (2, 6, 4, 5)
    g = torch.Generator().manual_seed(0)
    both = torch.randn(2, 37, *size, generator=g)
    offset, mask = both[:, :24], both[:, 24:36].sigmoid()  # the offsets are a slice, one image's numbers lie together
    pixels = shape[2] * shape[3]
    read = [torch.stack([row.reshape(-1)[: row.shape[0] * pixels] for row in t]) for t in (offset, mask)]
    inputs = [t.clone().requires_grad_() for t in (input, weight, bias, *read)]
    as_read = [t.view(2, -1, *shape[2:]) for t in inputs[3:]]
    expected = triops.deform_conv2d(inputs[0], as_read[0], inputs[1], inputs[2], 1, 1, 1, as_read[1])
    output = torch.empty(shape)
    EXTENSION.modulated_deform_conv_forward(input, weight, bias, empty(), offset, mask, output, empty(), **OF_V2)
    torch.testing.assert_close(output, expected.detach())
    wanted = torch.autograd.grad(expected.sum(), inputs)
    grads = [torch.zeros_like(t) for t in (input, weight, bias, offset, mask)]
    EXTENSION.modulated_deform_conv_backward(
        input, weight, bias, empty(), offset, mask, empty(), *grads, torch.ones_like(output), **OF_V2
    )
    for grad, want in zip(grads[:3], wanted[:3], strict=True):
        torch.testing.assert_close(grad, want)
    for grad, want in zip(grads[3:], wanted[3:], strict=True):
        in_order = grad.flatten(1)
        torch.testing.assert_close(in_order[:, : want.shape[1]], want)
        assert not in_order[:, want.shape[1] :].any()  # numbers that were not read


def test_version_2_refuses_too_few_offsets() -> None:
    input, offset, weight, mask, bias = layer()
    output = torch.empty(2, 6, *offset.shape[2:])
    with pytest.raises(ValueError, match=r"OH of offset must be 4 .* got 3"):
        EXTENSION.modulated_deform_conv_forward(
            input, weight, bias, empty(), offset[:, :, 1:], mask[:, :, 1:], output, empty(), **OF_V2
        )


def test_half_features_keep_float32_offsets() -> None:
    input, offset, weight, mask, bias = layer()
    halves = [t.half() for t in (input, weight, bias)]
    output = torch.empty(2, 6, *offset.shape[2:], dtype=torch.float16)
    EXTENSION.modulated_deform_conv_forward(
        halves[0], halves[1], halves[2], empty(), offset, mask, output, empty(), **OF_V2
    )
    assert torch.equal(output, triops.deform_conv2d(halves[0], offset, halves[1], halves[2], 1, 1, 1, mask))


def test_groups_that_do_not_fit_the_tensors_are_refused() -> None:
    input, offset, weight, _, _ = layer()
    output = torch.empty(2, 6, *offset.shape[2:])
    with pytest.raises(ValueError, match="deformable_group = 1, got 24"):
        EXTENSION.deform_conv_forward(
            input, weight, offset, output, empty(), empty(), **{**OF_V1, "deformable_group": 1}
        )
