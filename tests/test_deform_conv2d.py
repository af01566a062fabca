"""Facts about deform_conv2d: by hand, and against what torch itself computes."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from support import assert_same, run
from torch.nn import functional as F

import triops
from triops.ops.deform_conv2d.samples import convolution

BACKENDS = ["reference", "cpu", "gpu"]
RAMP = torch.arange(12.0).view(1, 1, 3, 4)  # value 4 y + x
STEPS = ([1, 1], [0, 0], [1, 1])
ONE_TAP = torch.ones(1, 1, 1, 1)


def moved(y: float, x: float) -> torch.Tensor:
    return torch.tensor([y, x]).view(1, 2, 1, 1).expand(1, 2, 3, 4)


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_offset_of_half_a_pixel_reads_the_mean_of_two(backend: str) -> None:
    out = run(backend, "deform_conv2d", (RAMP, moved(0.5, 0.0), ONE_TAP, None, None, *STEPS))
    assert out[0, 0].tolist() == [
        [2, 3, 4, 5],
        [6, 7, 8, 9],
        [4, 4.5, 5, 5.5],
    ]  # half of what lies below is off the map


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_sample_a_whole_pixel_off_the_map_is_0_and_one_not_quite_so_far_is_not(backend: str) -> None:
    ones = torch.ones(1, 1, 3, 4)
    for y, expected in ((-1.0, 0.0), (-0.75, 0.25), (3.0, 0.0), (2.75, 0.25), (math.nan, 0.0), (math.inf, 0.0)):
        out = run(backend, "deform_conv2d", (ones, moved(y, 0.0), ONE_TAP, None, None, *STEPS))
        assert out[0, 0, 0].tolist() == [expected] * 4, y


@pytest.mark.parametrize("backend", BACKENDS)
def test_taps_have_offsets_y_then_x_and_masks_of_their_own(backend: str) -> None:
    offset, mask = torch.zeros(1, 4, 3, 3), torch.tensor([2.0, 3.0]).view(1, 2, 1, 1).repeat(1, 1, 3, 3)
    offset[:, 2] = 1.0  # the right one of two taps reads one row further down
    weight = torch.tensor([1.0, 10.0]).view(1, 1, 1, 2)
    out = run(backend, "deform_conv2d", (RAMP, offset, weight, mask, torch.tensor([100.0]), *STEPS))
    assert out[0, 0, 0].tolist() == [100 + 2 * x + 30 * (4 + x + 1) for x in range(3)]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_mask_off_the_map_counts_for_nothing_not_even_a_nan(backend: str) -> None:
    mask = torch.full((1, 1, 3, 4), math.nan)
    out = run(backend, "deform_conv2d", (RAMP, moved(9.0, 0.0), ONE_TAP, mask, None, *STEPS))
    assert not out.any()
    grad = torch.ones(1, 1, 3, 4)
    found = run(backend, "deform_conv2d_backward", (grad, RAMP, moved(9.0, 0.0), ONE_TAP, mask, *STEPS, True, True))
    assert not any(f.any() for f in found)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_gradient_of_an_offset_is_the_slope_of_the_map(backend: str) -> None:
    grad = torch.zeros(1, 1, 3, 4)
    grad[..., 1, 1] = 3.0
    mask = torch.full((1, 1, 3, 4), 0.5)
    args = grad, RAMP, moved(0.25, 0.5), 2 * ONE_TAP, mask, *STEPS, True, True
    grad_input, grad_offset, grad_mask, grad_weight = run(backend, "deform_conv2d_backward", args)
    value = 4 * 1.25 + 1.5
    assert grad_offset[0, :, 1, 1].tolist() == [3 * 2 * 0.5 * 4, 3 * 2 * 0.5 * 1]
    assert grad_offset.count_nonzero() == 2
    assert grad_mask[0, 0, 1, 1].item() == 3 * 2 * value
    assert grad_weight.item() == 3 * 0.5 * value
    assert grad_input[0, 0, 1:, 1:3].tolist() == [[1.125, 1.125], [0.375, 0.375]]
    assert grad_input.sum().item() == 3.0


@pytest.mark.parametrize("backend", BACKENDS)
def test_without_offsets_it_is_a_convolution_with_groups_stride_padding_and_dilation(backend: str) -> None:
    g = torch.Generator().manual_seed(0)
    input, weight = torch.randn(2, 6, 7, 8, generator=g), torch.randn(4, 3, 2, 3, generator=g)
    bias = torch.randn(4, generator=g)
    expected = F.conv2d(input, weight, bias, (2, 1), (1, 2), (1, 2), groups=2)
    offset = torch.zeros(2, 12, *expected.shape[2:])
    out = run(backend, "deform_conv2d", (input, offset, weight, None, bias, [2, 1], [1, 2], [1, 2]))
    torch.testing.assert_close(out.cpu(), expected)


@pytest.mark.parametrize("masked", [True, False])
def test_gradcheck_of_everything_with_groups(masked: bool) -> None:
    make = convolution((2, 4, 3, 4), 4, (2, 1), groups=2, offset_groups=2, masked=masked, stride=2, padding=1)
    input, offset, weight, mask, bias, *steps = make(torch.float64)
    tensors = [t.requires_grad_() for t in (input, offset, weight, bias) + ((mask,) if masked else ())]
    assert torch.autograd.gradcheck(lambda i, o, w, b, m=None: triops.deform_conv2d(i, o, w, b, *steps, m), tensors)


def test_only_the_gradients_that_are_asked_for_are_made() -> None:
    input, offset, weight, mask, _, *steps = convolution((1, 4, 5, 6), 3)(torch.float32)
    grad = torch.ones(1, 3, 5, 6)
    everything = triops.deform_conv2d_backward(grad, input, offset, weight, mask, *steps)
    of_inputs = triops.deform_conv2d_backward(grad, input, offset, weight, mask, *steps, True, False)
    of_weight = triops.deform_conv2d_backward(grad, input, offset, weight, None, 1, 1, 1, False, True)
    assert [t.numel() for t in of_inputs] == [input.numel(), offset.numel(), mask.numel(), 0]
    assert [t.numel() for t in of_weight] == [0, 0, 0, weight.numel()]
    assert all(torch.equal(a, b) for a, b in zip(of_inputs[:3], everything[:3], strict=True))
    weight.requires_grad_()
    (only,) = torch.autograd.grad(triops.deform_conv2d(input, offset, weight, None, *steps, mask).sum(), weight)
    assert torch.equal(only, everything[3])


@pytest.mark.parametrize("backend", ["cpu", "gpu"])
def test_channels_last_maps_give_channels_last_outputs_and_gradients(backend: str) -> None:
    args = convolution((2, 4, 5, 6), 3, (1, 1), padding=0, channels_last=True)(torch.float32)
    assert run(backend, "deform_conv2d", args).is_contiguous(memory_format=torch.channels_last)
    input, offset, weight, mask, _, *steps = args
    grad = torch.ones(2, 3, 5, 6)
    grads = run(backend, "deform_conv2d_backward", (grad, input, offset, weight, mask, *steps, True, True))
    assert all(g.is_contiguous(memory_format=torch.channels_last) for g in grads)


def test_half_maps_are_read_at_float32_places() -> None:
    """In float16, x + dx beyond 512 would be rounded to half a pixel and more."""
    input = torch.arange(1030.0).mul(1 / 16).view(1, 1, 1, -1)
    offset = torch.zeros(1, 2, 1, 1030)
    offset[:, 1] = 0.25
    out = triops.deform_conv2d(input.half(), offset, ONE_TAP.half())
    exact = triops.deform_conv2d(input.half().float(), offset, ONE_TAP).half()
    assert torch.equal(out, exact)
    assert out[..., 1000].item() == pytest.approx(1000.25 / 16, abs=2**-5)


def test_autocast_casts_all_but_the_offset() -> None:
    input, offset, weight, mask, bias, *steps = convolution((1, 8, 5, 6), 4)(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        out = triops.deform_conv2d(input, offset, weight, bias, *steps, mask)
    halves = [t.bfloat16() for t in (weight, bias)]
    assert torch.equal(out, triops.deform_conv2d(input.bfloat16(), offset, *halves, *steps, mask.bfloat16()))


@pytest.mark.parametrize("precision", ["split", "tf32"])
@pytest.mark.parametrize("special", [False, True])
def test_float32_in_products_of_bfloat16(precision: str, special: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter multiplies exactly what the tensor cores would get, so the splitting shows here too."""
    from triops.ops.deform_conv2d import sampling_gpu

    monkeypatch.setattr(sampling_gpu, "precision_of", lambda dtype: precision)
    input, offset, weight, mask, bias, *steps = convolution((1, 20, 5, 6), 24, (1, 2), seed=4)(torch.float32)
    if special:
        input[0, 3, 2, 2], input[0, 5, 4, 1], weight[2, 4], weight[3, 6] = math.inf, math.nan, math.inf, 0.0
    out_height, out_width = offset.shape[2:]
    grad = torch.randn(1, 24, out_height, out_width, generator=torch.Generator().manual_seed(0))
    for operator, args in (
        ("deform_conv2d", (input, offset, weight, mask, bias, *steps)),
        ("deform_conv2d_backward", (grad, input, offset, weight, mask, *steps, True, True)),
    ):
        got, expected = run("gpu", operator, args), run("reference", operator, args)
        if precision == "split":
            assert_same(got, expected, operator=operator)
            continue
        for g, e in zip(*(_several(x) for x in (got, expected)), strict=True):
            assert torch.equal(g.isnan(), e.isnan())
            assert torch.equal(g[g.isinf()], e[e.isinf()])
            difference = torch.where(e.isfinite(), g - e, 0).abs().max()
            assert difference <= 1e-3 * torch.where(e.isfinite(), e, 0).abs().max()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_maps_that_are_not_finite_spoil_what_reads_them_alone(dtype: torch.dtype) -> None:
    """What is read is split into what a half type holds and the rest, which of infinity is not a number."""
    input, offset, weight, mask, bias, *steps = convolution((1, 20, 5, 6), 24, seed=4)(dtype)
    input[0, 3, 2, 2], input[0, 5, 4, 1] = math.inf, math.nan
    args = input, offset, weight, mask, bias, *steps
    got, expected = run("gpu", "deform_conv2d", args).cpu(), run("reference", "deform_conv2d", args)
    assert 0 < expected.isinf().sum() < expected.numel()
    assert torch.equal(got.isnan(), expected.isnan())
    assert torch.equal(got[got.isinf()], expected[expected.isinf()])
    assert_same(torch.where(got.isfinite(), got, 0), torch.where(expected.isfinite(), expected, 0))


@pytest.mark.parametrize("few", [0, 10**6])
def test_programs_of_a_gpu_may_share_the_taps_of_a_tile(few: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from triops.ops.deform_conv2d import forward_gpu

    monkeypatch.setattr(forward_gpu, "FEW", few)
    for channels_last in (False, True):
        args = convolution((2, 12, 5, 6), 20, (2, 2), groups=2, offset_groups=3, channels_last=channels_last)(
            torch.float32
        )
        got, expected = (run(backend, "deform_conv2d", args) for backend in ("gpu", "reference"))
        torch.testing.assert_close(got.cpu(), expected)


def _several(tensors: Any) -> Any:
    return (tensors,) if isinstance(tensors, torch.Tensor) else tensors


def test_the_weight_gradient_of_a_gpu_is_the_sum_of_its_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    from triops.ops.deform_conv2d import backward_gpu

    # blocks as on a GPU: more than one part
    monkeypatch.setattr(backward_gpu._gpu, "block", lambda size, interpreted: size)
    input, offset, weight, mask, _, *steps = convolution((2, 16, 9, 11), 8, (1, 1), padding=0)(torch.float32)
    backward_gpu._weight_config.cache_clear()
    args = torch.ones(2, 8, 9, 11), input, offset, weight, mask, *steps, False, True
    got, expected = (run(backend, "deform_conv2d_backward", args)[3] for backend in ("gpu", "reference"))
    backward_gpu._weight_config.cache_clear()
    torch.testing.assert_close(got.cpu(), expected)


def test_compiles_and_differentiates() -> None:
    input, offset, weight, mask, bias, *_ = convolution((1, 4, 5, 6), 3)(torch.float32)
    tensors = [t.requires_grad_() for t in (input, offset, weight, bias, mask)]

    def layer(i: Any, o: Any, w: Any, b: Any, m: Any) -> Any:
        return triops.deform_conv2d(i, o, w, b, 1, (1, 1), 1, m)

    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)(*tensors)
    assert torch.equal(compiled, layer(*tensors))
    got, expected = (torch.autograd.grad(f.square().sum(), tensors) for f in (compiled, layer(*tensors)))
    assert all(torch.equal(g, e) for g, e in zip(got, expected, strict=True))


@pytest.mark.parametrize("backend", BACKENDS)
def test_where_there_is_no_map_nothing_is_multiplied(backend: str) -> None:
    nowhere, no_weight = torch.zeros(1, 1, 0, 4), torch.full((1, 1, 1, 1), math.nan)
    bias = torch.tensor([3.0])
    out = run(backend, "deform_conv2d", (nowhere, moved(0.0, 0.0), no_weight, None, bias, *STEPS))
    assert out.unique().tolist() == [3.0]
    given = torch.full((1, 1, 3, 4), math.inf)
    args = given, nowhere, moved(0.0, 0.0), no_weight, None, *STEPS, True, True
    _, of_offset, _, of_weight = run(backend, "deform_conv2d_backward", args)
    assert of_offset.count_nonzero() == of_weight.count_nonzero() == 0
