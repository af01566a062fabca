"""Facts about the image filters and activations of `mmcv._ext`, by hand and by loops over every pixel."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck

import triops.compat.mmcv
from triops._plain import images

NONE = torch.empty(0, dtype=torch.float64)
INFINITE = float("inf")


@pytest.fixture
def ext():
    return triops.compat.mmcv.extension("mmcv._ext")


def drawn(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))


# upfirdn2d

FACTORS = {  # up x, up y, down x, down y, padding left, right, top, bottom
    "plain": (1, 1, 1, 1, 0, 0, 0, 0),
    "up": (2, 3, 1, 1, 2, 1, 1, 3),
    "down": (1, 1, 3, 2, 2, 2, 1, 2),
    "cropped": (3, 2, 2, 1, -1, 2, 1, -2),
}


def filtered_by_loops(image: Tensor, taps: Tensor, factors: tuple[int, ...], flip: bool, gain: float) -> Tensor:
    up_x, up_y, down_x, down_y, left, right, top, bottom = factors
    h, w = image.shape
    rows, columns = h * up_y + top + bottom, w * up_x + left + right
    padded = torch.zeros(rows, columns, dtype=image.dtype)
    for y, x in itertools.product(range(h), range(w)):
        if 0 <= y * up_y + top < rows and 0 <= x * up_x + left < columns:
            padded[y * up_y + top, x * up_x + left] = image[y, x]
    taps = (taps if flip else taps.flip(0, 1)) * gain
    fh, fw = taps.shape
    steps = range(0, rows - fh + 1, down_y), range(0, columns - fw + 1, down_x)
    return torch.stack(
        [torch.stack([(padded[y : y + fh, x : x + fw] * taps).sum() for x in steps[1]]) for y in steps[0]]
    )


@pytest.mark.parametrize("flip", [False, True])
@pytest.mark.parametrize("kind", FACTORS)
def test_upfirdn2d_is_the_loop_over_its_definition(ext, kind, flip):
    image, taps = drawn(2, 2, 4, 5), drawn(2, 3, dtype=torch.float32)
    got = ext.upfirdn2d(image, taps, *FACTORS[kind], flip=flip, gain=1.5)
    for n, c in itertools.product(range(2), range(2)):
        expected = filtered_by_loops(image[n, c], taps.double(), FACTORS[kind], flip, 1.5)
        torch.testing.assert_close(got[n, c], expected)


def test_upfirdn2d_by_hand(ext):
    image = torch.tensor([[[[1.0, 2.0]]]])
    taps = torch.tensor([[1.0, 10.0]])
    up = ext.upfirdn2d(image, taps, 2, 1, 1, 1, 1, 0, 0, 0, flip=False, gain=1)  # 0 1 0 2 0, turned taps: 10 1
    assert up.tolist() == [[[[1, 10, 2, 20]]]]


@pytest.mark.parametrize("kind", FACTORS)
def test_upfirdn2d_takes_the_parameters_and_images_of_mmcv_1(ext, kind):
    image, taps = drawn(2, 4, 5, 3), drawn(2, 3)
    names = ["up_x", "up_y", "down_x", "down_y", "pad_x0", "pad_x1", "pad_y0", "pad_y1"]
    got = ext.upfirdn2d(image, taps, **dict(zip(names, FACTORS[kind], strict=True)))
    assert got.is_contiguous()  # callers view it
    for n, c in itertools.product(range(2), range(3)):
        expected = filtered_by_loops(image[n, ..., c], taps, FACTORS[kind], False, 1.0)
        torch.testing.assert_close(got[n, ..., c], expected)


def test_upfirdn2d_is_differentiable_and_takes_half_precision():
    taps, rules = drawn(2, 3, dtype=torch.float32), ((2, 1), (1, 2), (1, 2, 2, 1), False, 2.0)
    assert gradcheck(lambda t: images.upfirdn2d(t, taps, *rules), (drawn(1, 2, 3, 4).requires_grad_(),))
    half = drawn(1, 2, 3, 4).half()
    expected = images.upfirdn2d(half.float(), taps, *rules).half()
    assert torch.equal(images.upfirdn2d(half, taps, *rules), expected)


# bias_act


@pytest.mark.parametrize("clamp", [-1.0, 0.7])
@pytest.mark.parametrize("act", images.ACTIVATIONS)
def test_bias_act_has_the_derivatives_of_its_value(ext, act, clamp):
    """Autograd differentiates the value; mmcv asks for both orders by number."""
    number = [*images.ACTIVATIONS].index(act) + 1
    rules = {"dim": 1, "act": number, "alpha": 0.2, "gain": 1.3, "clamp": clamp}
    x, bias, given = drawn(2, 3, 4).requires_grad_(), drawn(3, seed=1), drawn(2, 3, 4, seed=2).requires_grad_()
    y = images.bias_act(x, bias, 1, act, 0.2, 1.3, clamp)
    assert torch.equal(ext.bias_act(x, bias, NONE, NONE, NONE, grad=0, **rules), y)
    (first,) = torch.autograd.grad(y, x, given, create_graph=True)
    got = ext.bias_act(given, bias, x, y, NONE, grad=1, **rules)
    torch.testing.assert_close(got, first)
    # of the sum of first * other, with respect to x
    other = drawn(2, 3, 4, seed=3)
    second = torch.autograd.grad(first, x, other, allow_unused=True)[0] if first.requires_grad else None
    got = ext.bias_act(other, bias, x, y, given.detach(), grad=2, **rules)
    torch.testing.assert_close(got, torch.zeros_like(x) if second is None else second)


def test_bias_act_by_hand(ext):
    x, bias = torch.tensor([[-1.0, 3.0]]), torch.tensor([0.5, 1.0])
    none = torch.empty(0)
    got = ext.bias_act(x, bias, none, none, none, grad=0, dim=1, act=3, alpha=0.2, gain=2.0, clamp=5.0)
    assert got.flatten().tolist() == pytest.approx([-0.2, 5.0])


@pytest.mark.parametrize("act", ["softplus", "tanh", "swish", "sigmoid"])
def test_activations_of_huge_values_are_finite(act):
    x = torch.tensor([-1e4, -100.0, 100.0, 1e4])
    y = images.bias_act(x, None, 0, act, 0, 1, -1)
    assert y.isfinite().all()
    for order in (1, 2):
        assert images.bias_act_derivative(torch.ones(4), x, None, y, None, order, 0, act, 0, 1, -1).isfinite().all()


def test_bias_act_in_half_precision_keeps_its_layout_and_is_rounded_once(ext):
    x = drawn(2, 3, 4, 5).half().contiguous(memory_format=torch.channels_last)
    bias, none = drawn(3, seed=1).half(), torch.empty(0).half()
    got = ext.bias_act(x, bias, none, none, none, grad=0, dim=1, act=9, alpha=0, gain=1.4, clamp=-1)
    assert got.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(got, images.bias_act(x.float(), bias.float(), 1, "swish", 0, 1.4, -1).half())


# fused_bias_leakyrelu


def test_fused_bias_leakyrelu_and_its_gradient_by_hand(ext):
    x, bias, none = torch.tensor([[[-3.0], [1.0]]]), torch.tensor([1.0, 1.0]), torch.empty(0)
    rules = {"act": 3, "alpha": 0.5, "scale": 2.0}
    output = ext.fused_bias_leakyrelu(x, bias, none, grad=0, **rules)
    assert output.flatten().tolist() == [-2, 4]
    grad = ext.fused_bias_leakyrelu(torch.tensor([[[10.0], [10.0]]]), none, output, grad=1, **rules)
    assert grad.flatten().tolist() == [10, 20]
    assert ext.fused_bias_leakyrelu(x, bias, output, grad=2, **rules).count_nonzero() == 0
    assert ext.fused_bias_leakyrelu(x, bias, none, act=1, grad=0, alpha=0.5, scale=2.0).flatten().tolist() == [-4, 4]


# filtered_lrelu


def test_the_signs_of_a_leaky_relu_are_packed_four_to_a_byte(ext):
    x = torch.tensor([[[[-1.0, 2.0, 9.0, -30.0, -1.0]]]])
    value = x.clone()
    signs = ext.filtered_lrelu_act_(value, torch.empty(0), 0, 0, gain=1.0, slope=0.5, clamp=4.0, writeSigns=True)
    assert value.flatten().tolist() == [-0.5, 2, 4, -4, -0.5]
    assert signs.shape == (1, 1, 1, 4)
    assert signs.flatten().tolist() == [1 + (2 << 4) + (2 << 6), 1, 0, 0]
    grad = torch.ones_like(x)
    assert ext.filtered_lrelu_act_(grad, signs, 0, 0, gain=1.0, slope=0.5, clamp=4.0, writeSigns=False).numel() == 0
    assert grad.flatten().tolist() == [0.5, 1, 0, 0, 0.5]
    shifted = torch.ones(1, 1, 2, 3)
    ext.filtered_lrelu_act_(shifted, signs, -1, -1, gain=2.0, slope=0.5, clamp=4.0, writeSigns=False)
    assert shifted.tolist() == [[[[2, 2, 2], [2, 1, 2]]]]  # outside nothing is noted
    plain = x.clone()
    ext.filtered_lrelu_act_(plain, torch.empty(0), 0, 0, gain=1.0, slope=0.5, clamp=INFINITE, writeSigns=False)
    assert plain.flatten().tolist() == [-0.5, 2, 9, -15, -0.5]


@pytest.mark.parametrize("separable", [False, True])
def test_filtered_lrelu_is_its_parts_and_its_signs_give_its_gradient(ext, separable):
    """The gradient is the same function with the filters exchanged, as mmcv's Python layer calls it."""
    up, down, pads = 2, 2, (2, 1, 1, 2)
    fu, fd = (drawn(3), drawn(4, seed=1)) if separable else (drawn(3, 3), drawn(4, 4, seed=1))
    x, bias = drawn(2, 2, 4, 5, seed=2).requires_grad_(), drawn(2, seed=3).requires_grad_()
    rules = {"gain": 1.4, "slope": 0.2}

    full_up, full_down = ((f[:, None] * f if separable else f) for f in (fu, fd))
    middle = images.upfirdn2d(x + bias[:, None, None], full_up, (up, up), (1, 1), pads, False, 4.0)
    middle = images.bias_act(middle, None, 1, "lrelu", 0.2, 1.4, 1.0)
    expected = images.upfirdn2d(middle, full_down, (1, 1), (down, down), (0, 0, 0, 0), False, 1.0)

    output, signs, code = ext.filtered_lrelu(
        x, fu, fd, bias, torch.empty(0), up, down, *pads, 0, 0, **rules, clamp=1.0, flip_filters=False, writeSigns=True
    )
    assert code == 0
    torch.testing.assert_close(output, expected)
    again, nothing, _ = ext.filtered_lrelu(
        x, fu, fd, bias, torch.empty(0), up, down, *pads, 0, 0, **rules, clamp=1.0, flip_filters=False, writeSigns=False
    )
    assert torch.equal(again, output)
    assert nothing.numel() == 0

    given = torch.randn_like(expected)
    wanted = torch.autograd.grad(expected, x, given)[0]
    (xh, xw), (yh, yw) = x.shape[2:], expected.shape[2:]
    back = (2 + 3 - pads[0], xw * up - yw * down + pads[0] - 1, 2 + 3 - pads[2], xh * up - yh * down + pads[2] - 1)
    gain = 1.4 * up**2 / down**2
    grad, _, _ = ext.filtered_lrelu(
        given, fd, fu, torch.zeros(2, dtype=torch.float64), signs, down, up, *back, pads[0] - 2, pads[2] - 2,
        gain=gain, slope=0.2, clamp=INFINITE, flip_filters=True, writeSigns=False,
    )  # fmt: skip
    torch.testing.assert_close(grad, wanted)
