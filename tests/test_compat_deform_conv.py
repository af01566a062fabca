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
