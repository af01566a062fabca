"""Facts about the functions of `mmcv._ext` that are plain torch: answers by hand, or by a loop over every element."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch.autograd import gradcheck
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

import triops.compat.mmcv
from triops import _op
from triops._plain import bezier_align as bezier_align_module
from triops._plain import maps, regions
from triops._plain.bezier_align import bezier_align
from triops._plain.carafe import carafe, carafe_backward
from triops._plain.rotated_feature_align import rotated_feature_align
from triops._plain.temporal_shift import temporal_shift

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
    given = expected.to(dtype)
    wide = carafe_backward(given.float(), features.float(), masks.float(), **RULES)
    for mine, theirs in zip(carafe_backward(given, features, masks, **RULES), wide, strict=True):
        assert torch.equal(mine, theirs.to(dtype))


def test_carafe_takes_the_rows_of_a_large_kernel_one_after_another(monkeypatch):
    features, masks, given = drawn(1, 4, 3, 4), drawn(1, 50, 6, 8, seed=1), drawn(1, 4, 6, 8, seed=2)
    rules = RULES | {"kernel_size": 5}
    expected = carafe(features, masks, **rules), *carafe_backward(given, features, masks, **rules)
    monkeypatch.setattr("triops._plain.carafe._COPIED", 2 * 5 * features.numel())
    found = carafe(features, masks, **rules), *carafe_backward(given, features, masks, **rules)
    torch.testing.assert_close(found, expected)


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
    assert maps.active_rotated_filter_backward(torch.ones(1, 1, 1, 2), beyond).tolist() == [[[[[0, 0]]]]]


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


# correlation

SETTINGS = [  # kernel, patch, padding, dilation, patch dilation, stride
    ((1, 1), (3, 3), (0, 0), (1, 1), (1, 1), (1, 1)),
    ((3, 1), (3, 5), (2, 1), (2, 1), (2, 1), (2, 1)),
    ((2, 3), (1, 3), (1, 2), (1, 1), (1, 2), (1, 3)),
    ((1, 2), (2, 4), (0, 1), (1, 1), (1, 3), (1, 1)),  # no displacement is in the middle
]
KEYS = [("kH", "kW"), ("patchH", "patchW"), ("padH", "padW"), ("dilationH", "dilationW"),
        ("dilation_patchH", "dilation_patchW"), ("dH", "dW")]  # fmt: skip


def correlation_by_loops(first, second, kernel, patch, padding, dilation, patch_dilation, stride):
    n, _, h, w = first.shape
    size = [
        (s + 2 * p - (k - 1) * d - 1) // t + 1
        for s, p, k, d, t in zip((h, w), padding, kernel, dilation, stride, strict=True)
    ]
    output = torch.zeros(n, *patch, *size, dtype=first.dtype)
    for i, j, y, x, a, b in itertools.product(*map(range, (*patch, *size, *kernel))):
        y1, x1 = y * stride[0] - padding[0] + a * dilation[0], x * stride[1] - padding[1] + b * dilation[1]
        y2 = y1 + i * patch_dilation[0] - patch_dilation[0] * (patch[0] - 1) // 2
        x2 = x1 + j * patch_dilation[1] - patch_dilation[1] * (patch[1] - 1) // 2
        if all(0 <= value < h for value in (y1, y2)) and all(0 <= value < w for value in (x1, x2)):
            output[:, i, j, y, x] += (first[:, :, y1, x1] * second[:, :, y2, x2]).sum(1)
    return output


@pytest.mark.parametrize("settings", SETTINGS)
def test_correlation_and_its_gradients_are_the_loop_over_its_definition(ext, settings):
    first, second = drawn(2, 3, 5, 6).requires_grad_(), drawn(2, 3, 5, 6, seed=1).requires_grad_()
    expected = correlation_by_loops(first, second, *settings)
    rules = {
        key: size for keys, sizes in zip(KEYS, settings, strict=True) for key, size in zip(keys, sizes, strict=True)
    }
    output = torch.full_like(expected, torch.nan)
    ext.correlation_forward(first, second, output, **rules)
    torch.testing.assert_close(output, expected.detach())
    given = torch.randn_like(output)
    got = [torch.full_like(first, torch.nan) for _ in range(2)]
    ext.correlation_backward(given, first, second, *got, **rules)
    for mine, theirs in zip(got, torch.autograd.grad(expected, (first, second), given), strict=True):
        torch.testing.assert_close(mine, theirs)


# temporal shifts


def test_tin_shift_moves_frames_per_group_of_channels(ext):
    frames = torch.arange(1.0, 13.0).view(1, 3, 4, 1)  # frame t of channel c: 4 t + c + 1
    shift = torch.tensor([[1, -2]], dtype=torch.int32)
    output, grad = torch.full_like(frames, torch.nan), torch.full_like(frames, torch.nan)
    ext.tin_shift_forward(frames, shift, output)
    assert output.squeeze().tolist() == [[0, 0, 11, 12], [1, 2, 0, 0], [5, 6, 0, 0]]
    ext.tin_shift_backward(frames, shift, grad)  # mmcv shifts gradients as it shifts frames
    assert torch.equal(grad, output)
    assert gradcheck(lambda t: temporal_shift(t, shift), (drawn(1, 3, 4, 2).requires_grad_(),))


# PAConv's scored sums


def test_assign_score_withk_sums_over_the_weight_bank(ext):
    b, n, m, o, p, k = 2, 5, 3, 4, 2, 3
    points, centers, scores = drawn(b, n, m, o), drawn(b, n, m, o, seed=1), drawn(b, p, k, m, seed=2)
    neighbors = torch.tensor([[[0, 4, 7], [2, 2, 1]], [[3, -1, 0], [1, 0, 4]]])  # 7 and -1 are not there
    given = drawn(b, o, p, k, seed=3)
    output = torch.zeros(b, o, p, k, dtype=torch.float64)
    expected, wanted = torch.zeros_like(output), [torch.zeros_like(t) for t in (points, centers, scores)]
    for i, c, q, j, a in itertools.product(*map(range, (b, o, p, k, m))):
        neighbor, center = neighbors[i, q, j], neighbors[i, q, 0]
        if 0 <= neighbor < n:
            difference = points[i, neighbor, a, c] - centers[i, center, a, c]
            expected[i, c, q, j] += scores[i, q, j, a] * difference
            wanted[0][i, neighbor, a, c] += scores[i, q, j, a] * given[i, c, q, j]
            wanted[1][i, center, a, c] -= scores[i, q, j, a] * given[i, c, q, j]
            wanted[2][i, q, j, a] += difference * given[i, c, q, j]
    sizes = {"B": b, "N0": n, "N1": p, "M": m, "K": k, "O": o, "aggregate": 0}
    ext.assign_score_withk_forward(points, centers, scores, neighbors, output, **sizes)
    torch.testing.assert_close(output, expected)
    got = [torch.zeros_like(t) for t in wanted]
    ext.assign_score_withk_backward(given, points, centers, scores, neighbors, *got, **sizes)
    for mine, theirs in zip(got, wanted, strict=True):
        torch.testing.assert_close(mine, theirs)


# Bezier align


def straight(x1: float, y1: float, x2: float, y2: float, image: int = 0) -> list[float]:
    """A box as two straight curves: control points at thirds of its edges."""
    xs = [x1 + (x2 - x1) * i / 3 for i in range(4)]
    return [image, *(v for x in xs for v in (x, y1)), *(v for x in reversed(xs) for v in (x, y2))]


def test_bezier_align_of_a_straight_box_reads_a_ramp_where_its_bins_are(ext):
    """Bins start on the curves: with u = 0, 1/4, ... a bin's centre is the left end of what a box would have."""
    ramp = (torch.arange(8.0)[:, None] * 10 + torch.arange(10.0)).view(1, 1, 8, 10).repeat(2, 1, 1, 1)
    ramp[1] += 1000
    boxes = torch.tensor([straight(2, 1, 6, 5), straight(2, 1, 6, 5, 1)])
    output = torch.full((2, 1, 2, 4), torch.nan)
    ext.bezier_align_forward(ramp, boxes, output, aligned_height=2, aligned_width=4, spatial_scale=1.0,
                             sampling_ratio=2, aligned=False)  # fmt: skip
    expected = torch.tensor([[12.0, 13, 14, 15], [32, 33, 34, 35]])
    torch.testing.assert_close(output[0, 0], expected)
    torch.testing.assert_close(output[1, 0], expected + 1000)
    with pytest.raises(IndexError, match="images from 0 to 1"):
        bezier_align(ramp, torch.tensor([straight(2, 1, 6, 5, 2)]), 2, 4, 1.0, 2, False)


def bezier_by_loops(input, row, height, width, scale, ratio, aligned):
    points = [(row[1 + 2 * i] * scale, row[2 + 2 * i] * scale) for i in range(8)]
    upper, lower = points[:4], points[4:][::-1]

    def curve(p, u, axis):
        weights = (1 - u) ** 3, 3 * u * (1 - u) ** 2, 3 * u**2 * (1 - u), u**3
        return sum(w * q[axis] for w, q in zip(weights, p, strict=True))

    def read(y, x):
        h, w = input.shape[-2:]
        if not (-1 <= y <= h and -1 <= x <= w):
            return 0
        y, x = min(max(y, 0), h - 1), min(max(x, 0), w - 1)
        top, left = int(y), int(x)
        below, right = min(top + 1, h - 1), min(left + 1, w - 1)
        pixels, x, y = input[int(row[0])], x - left, y - top
        above = pixels[:, top, left] * (1 - x) + pixels[:, top, right] * x
        return above * (1 - y) + (pixels[:, below, left] * (1 - x) + pixels[:, below, right] * x) * y

    extent = [max(abs(c[0][axis] - c[3][axis]) for c in (upper, lower)) for axis in (0, 1)]
    extent = extent if aligned else [max(e, 1) for e in extent]
    bins = extent[0] / width, extent[1] / height
    count = [ratio or math.ceil(size) for size in bins]
    output = torch.zeros(input.shape[1], height, width, dtype=input.dtype)
    for i, j, a, b in itertools.product(range(height), range(width), range(count[1]), range(count[0])):
        u, v = j / width, i / height
        x, y = (curve(lower, u, axis) * v + curve(upper, u, axis) * (1 - v) - aligned / 2 for axis in (0, 1))
        x, y = x - bins[0] / 2 + (b + 0.5) * bins[0] / count[0], y - bins[1] / 2 + (a + 0.5) * bins[1] / count[1]
        output[:, i, j] += read(y, x)
    return output / max(count[0] * count[1], 1)


@pytest.mark.parametrize(("ratio", "aligned"), [(2, True), (0, True), (0, False)])
def test_bezier_align_and_its_gradient_are_the_loop_over_its_definition(ext, ratio, aligned):
    input = drawn(2, 2, 6, 7).requires_grad_()
    rows = drawn(3, 17, seed=1).abs() * 5
    rows[:, 0] = torch.tensor([0, 1, 1])
    expected = torch.stack([bezier_by_loops(input, row.tolist(), 2, 3, 1.5, ratio, aligned) for row in rows])
    rules = {"aligned_height": 2, "aligned_width": 3, "spatial_scale": 1.5, "sampling_ratio": ratio, "aligned": aligned}
    output, grad = torch.full_like(expected, torch.nan), torch.ones_like(input)
    ext.bezier_align_forward(input, rows, output, **rules)
    torch.testing.assert_close(output, expected.detach())
    given = torch.randn_like(output)
    ext.bezier_align_backward(given, rows, grad, **rules)
    torch.testing.assert_close(grad, 1 + torch.autograd.grad(expected, input, given)[0])


def test_bezier_align_in_parts_is_what_it_is_at_once(monkeypatch):
    """Boxes of very different sizes, of which few samples are read together."""
    input = drawn(1, 3, 20, 24).requires_grad_()
    rows = torch.tensor([straight(2, 1, 22, 19), straight(2, 1, 3, 2), straight(1, 1, 9, 4), straight(5, 0, 5, 0)])
    rows[:, 2:9:2] += torch.tensor([0.0, 2, 4, 6])  # a slope, which is what a bin has its height of
    rules = rows.to(input.dtype), 2, 3, 1.0, 0, True
    expected = bezier_align(input, *rules)
    for at_once in (1, 8, 100):
        monkeypatch.setattr(bezier_align_module, "AT_ONCE", at_once)
        got = bezier_align(input, *rules)
        torch.testing.assert_close(got, expected)
        given = torch.randn_like(got)
        mine, theirs = (torch.autograd.grad(out, input, given, retain_graph=True)[0] for out in (got, expected))
        torch.testing.assert_close(mine, theirs)


def test_bezier_align_of_more_samples_makes_no_more_calls():
    class Count(TorchDispatchMode):
        calls = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.calls += 1
            return func(*args, **(kwargs or {}))

    calls = []
    for size in (6, 60):
        with Count() as count:
            bezier_align(torch.ones(1, 2, 64, 64), torch.tensor([straight(1, 1, size, 9)]), 2, 3, 1.0, 0, False)
        calls.append(count.calls)
    assert calls[0] == calls[1]


def test_bezier_align_of_curves_that_the_scale_makes_infinite_is_0():
    rows = torch.tensor([straight(-3e38, 0, 3e38, 3), straight(0, 0, 3, 3)])
    output = bezier_align(torch.ones(1, 2, 16, 16), rows, 2, 3, 4.0, 0, False)
    assert [bool(part.any()) for part in output] == [False, True]
    assert output.isfinite().all()


def test_bezier_align_without_curves_and_with_curves_that_are_not_finite(ext):
    rules = {"aligned_height": 2, "aligned_width": 3, "spatial_scale": 1.0, "sampling_ratio": 0, "aligned": False}
    empty = torch.zeros(0, 2, 2, 3)
    ext.bezier_align_forward(torch.ones(1, 2, 4, 4), torch.zeros(0, 17), empty, **rules)
    rows = torch.tensor([straight(0, 0, 3, 3), straight(0, 0, float("inf"), 3), straight(0, float("nan"), 3, 3)])
    output = torch.full((3, 2, 2, 3), torch.nan)
    ext.bezier_align_forward(torch.ones(1, 2, 4, 4), rows, output, **rules)
    assert [bool(part.any()) for part in output] == [True, False, False]


# regions that grow over a mask


def test_contour_expand_gives_each_pixel_to_the_region_that_reaches_it_first(ext):
    labels = torch.zeros(3, 9, dtype=torch.int32)
    labels[1, 1], labels[1, 6:8], labels[2, 0] = 1, 2, 3
    mask = torch.zeros(3, 9, dtype=torch.uint8)
    mask[1], mask[0, 4] = 1, 1
    masks = torch.stack([mask, (labels > 0).to(torch.uint8)])
    grown = ext.contour_expand(masks, labels, min_kernel_area=1, kernel_num=3)
    # 1 and 3 both reach the first pixel of the middle row in one step, and 1 stands before 3
    assert grown == [[0, 0, 0, 0, 2, 0, 0, 0, 0], [1, 1, 1, 1, 2, 2, 2, 2, 2], [3, 0, 0, 0, 0, 0, 0, 0, 0]]
    large_ones = ext.contour_expand(masks, labels, min_kernel_area=2, kernel_num=3)
    assert large_ones == [[0, 0, 0, 0, 2, 0, 0, 0, 0], [2] * 9, [0] * 9]
    assert ext.contour_expand(masks[1:], labels, 1, 3) == labels.tolist()


def test_pixel_group_takes_pixels_whose_features_are_like_the_regions(ext):
    labels = torch.tensor([[1, 0, 0, 0, 0, 2]], dtype=torch.int32)
    features = torch.tensor([[[0.0, 0.0], [0.1, 0.0], [0.0, 0.2], [1.0, 1.0], [0.9, 1.0], [1.0, 1.0]]])
    score = torch.tensor([[0.5, 0.25, 0.75, 1.0, 0.5, 0.0]])
    mask, contour = torch.ones(1, 6, dtype=torch.bool), (labels > 0).to(torch.uint8)
    groups = ext.pixel_group(score, mask, features, labels, contour, 3, 0.5)
    assert groups[0] == [0, 0]
    assert groups[1] == [0.5, 3, 0, 0, 1, 0, 2, 0]
    assert groups[2] == [0.5, 3, 3, 0, 4, 0, 5, 0]
    mask[0, 1] = False  # nothing passes
    assert ext.pixel_group(score, mask, features, labels, contour, 3, 0.5)[1] == [0.5, 1, 0, 0]
    assert ext.pixel_group(score, mask, features, labels, contour * 0, 3, 0.5)[2] == [0, 1, 5, 0]


def test_regions_beyond_their_number_are_refused(ext):
    labels = torch.tensor([[0, 4]], dtype=torch.int32)
    with pytest.raises(ValueError, match="internal_kernel_label must be from 0 to 3"):
        ext.contour_expand(torch.ones(2, 1, 2, dtype=torch.uint8), labels, 1, 3)
    with pytest.raises(ValueError, match="kernel_label must be at most 2"):
        ext.pixel_group(torch.ones(1, 2), labels > 0, torch.ones(1, 2, 3), labels, labels > 0, 3, 0.5)


# rotated_feature_align


def test_rotated_feature_align_adds_what_lies_under_centre_and_corners(ext):
    ramp = torch.arange(30.0, dtype=torch.float64).view(1, 1, 5, 6)  # value 6 y + x
    boxes = torch.tensor([4.0, 6.0, 4.0, 2.0, 0.0], dtype=torch.float64).expand(1, 5, 6, 5)  # y, x, w, h, angle
    for points in (1, 5):
        output = torch.ones_like(ramp)
        ext.rotated_feature_align_forward(ramp, boxes, output, spatial_scale=0.5, points=points)
        # centre (3, 2); on a ramp the corners around it add to four times its value
        torch.testing.assert_close(output, ramp + points * (6 * 2 + 3))


def test_rotated_feature_align_turns_the_corners_and_reads_nothing_off_the_map(ext):
    features = drawn(1, 2, 5, 6)
    boxes, output = torch.zeros(1, 5, 6, 5, dtype=torch.float64), torch.zeros_like(features)
    boxes[..., 0], boxes[..., 1], boxes[..., 2], boxes[..., 4] = 2, 3, 4, math.pi / 2
    ext.rotated_feature_align_forward(features, boxes, output, spatial_scale=1.0, points=5)
    column = features[:, :, :, 3]  # width turned into y: (3, 0) and (3, 4), twice each
    expected = column[:, :, 2] + 2 * column[:, :, 0] + 2 * column[:, :, 4]
    torch.testing.assert_close(output, features + expected[:, :, None, None])
    for far in (-1.5, 7.0, math.nan, math.inf):
        boxes[..., 1] = far
        ext.rotated_feature_align_forward(features, boxes, output, spatial_scale=1.0, points=1)
        assert torch.equal(output, features)


@pytest.mark.parametrize("points", [1, 5])
def test_rotated_feature_align_gives_its_gradient_to_the_features(ext, points):
    features, boxes, grad = drawn(2, 3, 4, 5), drawn(2, 4, 5, 5, seed=1).abs() * 2, drawn(2, 3, 4, 5, seed=2)
    assert gradcheck(lambda x: rotated_feature_align(x, boxes, 0.7, points), (features.requires_grad_(),))
    (expected,) = torch.autograd.grad(rotated_feature_align(features, boxes, 0.7, points), features, grad)
    got = torch.ones_like(features)
    ext.rotated_feature_align_backward(grad, boxes, got, spatial_scale=0.7, points=points)
    torch.testing.assert_close(got, 1 + expected)
    with pytest.raises(ValueError, match="points must be 1 or 5, got 3"):
        rotated_feature_align(features, boxes, 0.7, 3)


def test_rotated_feature_align_takes_the_boxes_of_all_pixels_as_rows(ext):
    """As R3Det of mmrotate gives them."""
    features, boxes = drawn(2, 3, 4, 5), drawn(2, 4, 5, 5, seed=1).abs() * 2
    for function in (ext.rotated_feature_align_forward, ext.rotated_feature_align_backward):
        outputs = torch.zeros_like(features), torch.zeros_like(features)
        for given, output in zip((boxes, boxes.view(-1, 5)), outputs, strict=True):
            function(features, given, output, spatial_scale=0.7, points=5)
        assert torch.equal(*outputs)
        assert outputs[0].any()


# points


def test_stack_group_points_reads_zeros_where_an_index_is_beyond_its_own_cloud(ext):
    features = torch.arange(1.0, 6.0)[:, None]  # two points of the first cloud, three of the second
    counts, groups = torch.tensor([2, 3], dtype=torch.int32), torch.tensor([1, 2], dtype=torch.int32)
    indices = torch.tensor([[1, 2], [2, 3], [0, -1]], dtype=torch.int32)
    output, grad = torch.full((3, 1, 2), torch.nan), torch.zeros(5, 1)
    ext.stack_group_points_forward(features, counts, indices, groups, output, b=2, c=1, m=3, nsample=2)
    assert output.squeeze(1).tolist() == [[2, 0], [5, 0], [3, 0]]
    ext.stack_group_points_backward(
        torch.ones_like(output), indices, groups, counts, grad, b=2, c=1, m=3, n=5, nsample=2
    )
    assert grad.flatten().tolist() == [0, 1, 1, 0, 1]


# deform_roi_pool

POOLED = {"pooled_height": 2, "pooled_width": 3, "spatial_scale": 0.5, "gamma": 0.1}
BOXES = torch.tensor(
    [[0.0, 1, 2, 8, 7], [1, -3, 0, 30, 9], [1, 4, 4, 2, 2], [0, 9e5, 0, 9.1e5, 3]], dtype=torch.float64
)


@pytest.mark.parametrize("ratio", [0, 2])
def test_deform_roi_pool_without_an_offset_is_roi_align(ext, ratio):
    input, output = drawn(2, 3, 6, 7), torch.ones(4, 3, 2, 3, dtype=torch.float64)
    ext.deform_roi_pool_forward(input, BOXES, input.new_zeros(0), output, sampling_ratio=ratio, **POOLED)
    torch.testing.assert_close(output, triops.roi_align(input, BOXES, (2, 3), 0.5, ratio, aligned=True))


def test_deform_roi_pool_gives_its_gradients_to_input_and_offset(ext):
    input, offset, grad = drawn(2, 3, 6, 7), drawn(2, 2, 2, 3, seed=1), drawn(2, 3, 2, 3, seed=2)

    def pooled(x, o):
        return triops.deform_roi_pool(x, BOXES[:2], o, (2, 3), 0.5, 2, 0.1)

    leaves = input.requires_grad_(), offset.requires_grad_()
    expected = torch.autograd.grad(pooled(*leaves), leaves, grad)
    got = torch.ones_like(input), torch.ones_like(offset)
    ext.deform_roi_pool_backward(grad, input, BOXES[:2], offset, *got, sampling_ratio=2, **POOLED)
    torch.testing.assert_close(got, tuple(1 + e for e in expected))
    none = torch.zeros(0, dtype=torch.float64)
    ext.deform_roi_pool_backward(grad, input, BOXES[:2], none, got[0], none, sampling_ratio=2, **POOLED)


def test_regions_grow_alike_without_numba(monkeypatch):
    g = torch.Generator().manual_seed(0)
    labels = torch.randint(-40, 4, (17, 13), generator=g).clamp(min=0).int()
    mask = torch.rand(17, 13, generator=g) < 0.8
    features = torch.rand(17, 13, 2, generator=g)
    score, contour = torch.rand(17, 13, generator=g), labels > 0

    def grown():
        expanded = regions.expand_regions(labels, mask, 1).tolist()
        return expanded, regions.group_pixels(score, mask, features, labels, contour, 4, 0.6)

    compiled = grown()
    monkeypatch.setattr(_op, "why_unusable", lambda backend: "numba is not installed")
    monkeypatch.setattr(_op, "_warned", set())
    with pytest.warns(RuntimeWarning, match="numba is not installed"):
        assert grown() == compiled
