"""Facts about the functions of `mmcv._ext` that are plain torch: answers by hand, or by a loop over every element."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch.autograd import gradcheck
from torch.nn import functional

import triops.compat.mmcv
from triops._plain import gradients, maps
from triops._plain.carafe import carafe

HALVES = [torch.float16, torch.bfloat16]


@pytest.fixture
def ext():
    return triops.compat.mmcv.extension("mmcv._ext")


def drawn(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))


# CARAFE

RULES = {"kernel_size": 3, "group_size": 2, "scale_factor": 2}


def carafe_by_loops(features: torch.Tensor, masks: torch.Tensor) -> torch.Tensor:
    n, c, h, w = features.shape
    output = torch.zeros(n, c, 2 * h, 2 * w, dtype=features.dtype)
    for b, channel, y, x, i, j in itertools.product(*map(range, (n, c, 2 * h, 2 * w, 3, 3))):
        row, column = y // 2 + i - 1, x // 2 + j - 1
        if 0 <= row < h and 0 <= column < w:
            tap = channel // (c // 2) * 9 + i * 3 + j
            output[b, channel, y, x] += features[b, channel, row, column] * masks[b, tap, y, x]
    return output


def test_carafe_sums_the_window_of_the_pixel_that_an_output_comes_from(ext):
    features, masks = drawn(1, 4, 2, 3), drawn(1, 18, 4, 6, seed=1)
    expected, output = carafe_by_loops(features, masks), torch.zeros(1, 4, 4, 6, dtype=torch.float64)
    ext.carafe_naive_forward(features, masks, output, **RULES)
    torch.testing.assert_close(output, expected)
    buffers = [torch.zeros_like(t) for t in (features, output, masks)]
    filled = torch.zeros_like(output)
    ext.carafe_forward(features, masks, *buffers, filled, **RULES)
    torch.testing.assert_close(filled, expected)
    torch.testing.assert_close(buffers[0], features.permute(0, 2, 3, 1))


def test_a_mask_of_ones_sums_and_a_mask_of_one_tap_copies(ext):
    features, masks, output = torch.arange(4.0).view(1, 1, 2, 2), torch.zeros(1, 9, 4, 4), torch.zeros(1, 1, 4, 4)
    masks[:, 4] = 1
    rules = RULES | {"group_size": 1}
    ext.carafe_naive_forward(features, masks, output, **rules)
    assert output[0, 0].tolist() == [[0, 0, 1, 1], [0, 0, 1, 1], [2, 2, 3, 3], [2, 2, 3, 3]]
    ext.carafe_naive_forward(features, torch.ones_like(masks), output, **rules)
    assert output.unique().tolist() == [6]  # every window holds all four pixels


def test_carafe_gives_its_gradients_to_features_and_masks(ext):
    features, masks = drawn(1, 4, 2, 3).requires_grad_(), drawn(1, 18, 4, 6, seed=1).requires_grad_()
    assert gradcheck(lambda *tensors: carafe(*tensors, **RULES), (features, masks))
    grad = drawn(1, 4, 4, 6, seed=2)
    expected = torch.autograd.grad(carafe_by_loops(features, masks), (features, masks), grad)
    got = [torch.zeros_like(features), torch.zeros_like(masks)]
    ext.carafe_naive_backward(grad, features, masks, *got, **RULES)
    scratch = [torch.zeros(0)] * 4
    again = [torch.zeros_like(features), torch.zeros_like(masks)]
    ext.carafe_backward(grad, features.detach().permute(0, 2, 3, 1), masks, *scratch, *again, **RULES)
    for mine, other, theirs in zip(got, again, expected, strict=True):
        torch.testing.assert_close(mine, theirs)
        torch.testing.assert_close(other, theirs)


@pytest.mark.parametrize("dtype", HALVES)
def test_carafe_in_half_precision_is_rounded_once(dtype):
    features, masks = drawn(1, 4, 2, 3, dtype=dtype), drawn(1, 18, 4, 6, dtype=dtype, seed=1)
    expected = carafe(features.float(), masks.float(), **RULES)
    assert torch.equal(carafe(features, masks, **RULES), expected.to(dtype))
    wide = gradients(lambda *tensors: carafe(*tensors, **RULES), (features.float(), masks.float()), expected)
    narrow = gradients(lambda *tensors: carafe(*tensors, **RULES), (features, masks), expected.to(dtype))
    for mine, theirs in zip(narrow, wide, strict=True):
        assert mine.dtype == dtype
        torch.testing.assert_close(mine.float(), theirs, rtol=0.02, atol=0.02)


# PSANet's masks

PSA = {"num_": 1, "h_feature": 2, "w_feature": 3, "h_mask": 3, "w_mask": 5, "half_h_mask": 1, "half_w_mask": 2}


@pytest.mark.parametrize("kind", ["collect", "distribute"])
def test_psamask_spreads_each_pixels_mask_over_the_map(ext, kind):
    psa_type = ["collect", "distribute"].index(kind)
    masks = torch.arange(1.0, 1 + 15 * 6).view(1, 15, 2, 3)
    expected, grad = torch.zeros(1, 6, 2, 3), torch.zeros_like(masks)
    given = drawn(1, 6, 2, 3, dtype=torch.float32)
    for h, w, q, r in itertools.product(range(2), range(3), range(2), range(3)):
        i, j = q - h + 1, r - w + 2  # of the mask of (h, w), the entry that stands for (q, r)
        if 0 <= i < 3 and 0 <= j < 5:
            at = (0, q * 3 + r, h, w) if kind == "collect" else (0, h * 3 + w, q, r)
            expected[at] = masks[0, i * 5 + j, h, w]
            grad[0, i * 5 + j, h, w] = given[at]
    output, got = torch.full_like(expected, torch.nan), torch.full_like(masks, torch.nan)
    ext.psamask_forward(masks, output, psa_type=psa_type, **PSA)
    assert torch.equal(output, expected)
    ext.psamask_backward(given, got.zero_(), psa_type=psa_type, **PSA)
    assert torch.equal(got, grad)


def test_psamask_is_differentiable_and_takes_half_precision():
    masks = drawn(1, 15, 2, 3).requires_grad_()
    assert gradcheck(lambda t: maps.psa_mask(t, True, 3, 5, 1, 2), (masks,))
    half = masks.detach().half()
    assert torch.equal(maps.psa_mask(half, False, 3, 5, 1, 2).double(), maps.psa_mask(half.double(), False, 3, 5, 1, 2))


# masked convolution


def test_masked_columns_times_weights_is_a_convolution_at_the_masked_pixels(ext):
    image, weight = drawn(1, 2, 5, 6), drawn(3, 2, 3, 3, seed=1)
    rows, columns = torch.tensor([0, 2, 4]), torch.tensor([0, 3, 5])
    window, output = torch.zeros(18, 3, dtype=torch.float64), torch.zeros(1, 3, 5, 6, dtype=torch.float64)
    ext.masked_im2col_forward(image, rows, columns, window, kernel_h=3, kernel_w=3, pad_h=1, pad_w=1)
    ext.masked_col2im_forward(weight.view(3, 18) @ window, rows, columns, output, height=5, width=6, channels=3)
    expected = functional.conv2d(image, weight, padding=1)
    torch.testing.assert_close(output[..., rows, columns], expected[..., rows, columns])
    assert output.count_nonzero() == 9


def test_masked_pixels_outside_of_a_smaller_output_are_left_out(ext):
    output = torch.zeros(1, 2, 3, 3)
    rows = torch.tensor([1, 3, -1, 2])
    ext.masked_col2im_forward(torch.ones(2, 4), rows, rows.clone(), output, height=3, width=3, channels=2)
    assert output.nonzero().tolist() == [[0, c, i, i] for c in range(2) for i in (1, 2)]


def test_masked_columns_are_differentiable():
    at = torch.tensor([0, 2]), torch.tensor([1, 0])
    assert gradcheck(lambda t: maps.masked_columns(t, *at, 2, 3, 1, 0), (drawn(2, 3, 4).requires_grad_(),))


# rotated filters


def test_active_rotated_filter_puts_each_entry_where_its_rotation_says(ext):
    # one orientation of 2 x 2, not turned and turned by a quarter: entries 0 1 2 3 go to 1 3 0 2
    filters = torch.tensor([[[[[10.0, 20.0], [30.0, 40.0]]]]])
    indices = torch.tensor([[1, 2], [2, 4], [3, 1], [4, 3]], dtype=torch.int32).view(1, 2, 2, 2)
    output, grad = torch.zeros(2, 1, 2, 2), torch.zeros_like(filters)
    ext.active_rotated_filter_forward(filters, indices, output)
    assert output.flatten(1).tolist() == [[10, 20, 30, 40], [30, 10, 40, 20]]
    ext.active_rotated_filter_backward(torch.arange(8.0).view(2, 1, 2, 2), indices, grad)
    assert grad.flatten().tolist() == [0 + 5, 1 + 7, 2 + 4, 3 + 6]


def test_active_rotated_filter_is_differentiable_and_ignores_places_that_are_not_there():
    indices = torch.stack([torch.randperm(8, generator=torch.Generator().manual_seed(s)) + 1 for s in range(3)], 1)
    indices = indices.view(2, 2, 2, 3).int()
    assert gradcheck(lambda t: maps.active_rotated_filter(t, indices), (drawn(2, 3, 2, 2, 2).requires_grad_(),))
    beyond = torch.tensor([0, 9]).view(1, 1, 2, 1).int()
    assert maps.active_rotated_filter(torch.ones(1, 1, 1, 1, 2), beyond).tolist() == [[[[0, 0]]]]


# synchronised batch normalisation


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_sync_bn_of_one_process_is_batch_norm(ext, dtype):
    input = drawn(3, 4, 5, dtype=torch.float32).to(dtype).requires_grad_()
    weight, bias = drawn(4, dtype=torch.float32, seed=1).requires_grad_(), torch.ones(4, requires_grad=True)
    mean, var, std = (torch.zeros(4) for _ in range(3))
    running = torch.zeros(4), torch.ones(4)
    norm, output = torch.zeros(3, 4, 5), torch.zeros(3, 4, 5, dtype=dtype)
    ext.sync_bn_forward_mean(input, mean)
    ext.sync_bn_forward_var(input, mean, var)
    ext.sync_bn_forward_output(
        input, mean, var, weight, bias, *running, norm, std, output, eps=1e-5, momentum=torch.tensor([0.1]),
        group_size=1,
    )  # fmt: skip
    other = torch.zeros(4), torch.ones(4)
    expected = functional.batch_norm(input.float(), *other, weight, bias, True, 0.1, 1e-5)
    close = {"rtol": 1e-3, "atol": 1e-3} if dtype == torch.float16 else {}
    torch.testing.assert_close(output.float(), expected.detach(), **close)
    for mine, theirs in zip(running, other, strict=True):
        torch.testing.assert_close(mine, theirs)

    given = drawn(3, 4, 5, dtype=torch.float32, seed=2).to(dtype)
    of_weight, of_bias, of_input = torch.zeros(4), torch.zeros(4), torch.zeros(3, 4, 5, dtype=dtype)
    ext.sync_bn_backward_param(given, norm, of_weight, of_bias)
    ext.sync_bn_backward_data(given, weight, of_weight, of_bias, norm, std, of_input)
    theirs = torch.autograd.grad(expected, (input, weight, bias), given.float())
    for mine, other in zip((of_input, of_weight, of_bias), theirs, strict=True):
        torch.testing.assert_close(mine, other.to(mine.dtype), **(close or {"rtol": 1e-4, "atol": 1e-5}))


def test_sync_bn_by_hand_with_two_processes_and_without_weights(ext):
    """Two values a process, 4 and 6 here: the mean of all is 3 and the variance around it 10."""
    input, mean, var = torch.tensor([[[4.0, 6.0]]]), torch.tensor([3.0]), torch.zeros(1)
    ext.sync_bn_forward_var(input, mean, var)
    assert var.item() == (1 + 9) / 2
    var.fill_(10.0)
    running, norm, std, output = (
        [torch.zeros(1), torch.ones(1)],
        torch.zeros(1, 1, 2),
        torch.zeros(1),
        torch.zeros(1, 1, 2),
    )
    ext.sync_bn_forward_output(
        input, mean, var, None, None, *running, norm, std, output, eps=0.0, momentum=0.5, group_size=2
    )
    assert std.item() == pytest.approx(math.sqrt(10))
    assert output.flatten().tolist() == pytest.approx([1 / math.sqrt(10), 3 / math.sqrt(10)])
    assert running[0].item() == 1.5
    assert running[1].item() == pytest.approx(0.5 * 10 * 4 / 3 + 0.5)  # of four values, three are free
