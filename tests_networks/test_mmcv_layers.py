"""Layers of mmcv, unmodified, over the functions of `mmcv._ext` that are plain torch.

Some of these layers take torch's own functions on a CPU; their classes for CUDA are then called directly, which compute
on whatever device their tensors are.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import gradcheck, gradgradcheck
from torch.nn import functional

import triops.compat.mmcv  # noqa: F401 - supplies mmcv._ext, which mmcv.ops imports

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def drawn(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def variable(*shape: int, seed: int = 0) -> Tensor:
    return drawn(*shape, seed=seed).requires_grad_()


# feature maps


def unfolded_carafe(features: Tensor, masks: Tensor, kernel: int, groups: int, scale: int) -> Tensor:
    """All windows side by side, then a product of tensors."""
    n, c, h, w = features.shape
    windows = functional.unfold(features, kernel, padding=kernel // 2).view(n, groups, c // groups, kernel**2, h, w)
    weights = masks.view(n, groups, kernel**2, h, scale, w, scale)
    return torch.einsum("ngckhw,ngkhswt->ngchswt", windows, weights).reshape(n, c, h * scale, w * scale)


def test_carafe() -> None:
    from mmcv.ops import CARAFE, CARAFENaive

    features, masks = variable(2, 4, 2, 3), variable(2, 18, 4, 6, seed=1)
    expected = unfolded_carafe(features, masks, 3, 2, 2)
    torch.testing.assert_close(CARAFE(3, 2, 2)(features, masks), expected)
    torch.testing.assert_close(CARAFENaive(3, 2, 2)(features, masks), expected)
    for layer in (CARAFE, CARAFENaive):
        assert gradcheck(layer(3, 2, 2), (features[:1, :, :1, :2], masks[:1, :, :2, :4]))


def test_a_carafe_upsampler_trains() -> None:
    from mmcv.ops.carafe import CARAFEPack

    torch.manual_seed(0)
    layer = CARAFEPack(channels=8, scale_factor=2, compressed_channels=4).to(DEVICE)
    output = layer(drawn(1, 8, 4, 4, dtype=torch.float32))
    assert output.shape == (1, 8, 8, 8)
    output.square().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in layer.parameters())


@pytest.mark.parametrize("kind", ["collect", "distribute"])
def test_psamask(kind: str) -> None:
    from mmcv.ops import PSAMask

    assert gradcheck(PSAMask(kind, (3, 5)), (variable(2, 15, 2, 3),))
    same = PSAMask(kind, (3, 5))(drawn(1, 15, 2, 3)).view(6, 6).diagonal()
    assert torch.equal(same, drawn(1, 15, 2, 3)[0, 7].flatten())  # the middle of a mask speaks of its own pixel


def test_masked_convolution() -> None:
    from mmcv.ops import MaskedConv2d

    torch.manual_seed(0)
    layer = MaskedConv2d(3, 4, 3, padding=1).to(DEVICE)
    image = drawn(1, 3, 5, 6, dtype=torch.float32)
    mask = drawn(1, 5, 6, seed=1) > 0
    torch.testing.assert_close(layer(image, mask), layer(image) * mask)


def test_active_rotated_filter() -> None:
    from mmcv.ops import active_rotated_filter

    places = [torch.randperm(8, generator=torch.Generator().manual_seed(s)) + 1 for s in range(3)]
    indices = torch.stack(places, 1).view(2, 2, 2, 3).int().to(DEVICE)
    assert gradcheck(active_rotated_filter, (variable(2, 3, 2, 2, 2), indices))


# normalisation over processes


@pytest.fixture
def process_group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("mode", ["default", "N"])
def test_sync_batch_norm_of_one_process_is_batch_norm(mode: str) -> None:
    from mmcv.ops import SyncBatchNorm

    mine, theirs = SyncBatchNorm(4, stats_mode=mode).to(DEVICE), nn.BatchNorm2d(4).to(DEVICE)
    with torch.no_grad():
        theirs.weight.copy_(mine.weight)
    image = drawn(2, 4, 3, 5, dtype=torch.float32)
    first, second = image.clone().requires_grad_(), image.clone().requires_grad_()
    weights = drawn(2, 4, 3, 5, dtype=torch.float32, seed=1)
    (mine(first) * weights).sum().backward()
    (theirs(second) * weights).sum().backward()
    torch.testing.assert_close(first.grad, second.grad, rtol=1e-4, atol=1e-5)
    for name, parameter in theirs.named_parameters():
        torch.testing.assert_close(dict(mine.named_parameters())[name].grad, parameter.grad, rtol=1e-4, atol=1e-5)
    for name, buffer in theirs.named_buffers():
        torch.testing.assert_close(dict(mine.named_buffers())[name], buffer)


PROCESS = """
import sys
import torch, torch.distributed as dist
import triops.compat.mmcv
from mmcv.ops import SyncBatchNorm

rank, path = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method="file://" + path, rank=rank, world_size=2)
image = torch.randn(4, 3, 5, 2, generator=torch.Generator().manual_seed(0))[2 * rank : 2 * rank + 2].requires_grad_()
layer = SyncBatchNorm(3)
torch.nn.init.ones_(layer.weight)
output = layer(image)
(output ** 3).sum().backward()
torch.save((output.detach(), image.grad, layer.running_var), path + str(rank))
dist.destroy_process_group()
"""


def test_sync_batch_norm_of_two_processes_is_batch_norm_of_both_halves(tmp_path: Path) -> None:
    path = str(tmp_path / "store")
    started = [subprocess.Popen([sys.executable, "-W", "ignore", "-c", PROCESS, str(r), path]) for r in range(2)]
    assert [process.wait(120) for process in started] == [0, 0]
    image = torch.randn(4, 3, 5, 2, generator=torch.Generator().manual_seed(0)).requires_grad_()
    layer = nn.BatchNorm2d(3)
    expected = layer(image)
    (expected**3).sum().backward()
    halves = [torch.load(path + str(rank)) for rank in range(2)]
    torch.testing.assert_close(torch.cat([half[0] for half in halves]), expected.detach(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(torch.cat([half[1] for half in halves]), image.grad, rtol=1e-3, atol=1e-4)
    for half in halves:
        torch.testing.assert_close(half[2], layer.running_var)


# flow, video, points


def test_correlation() -> None:
    from mmcv.ops import Correlation

    first, second = variable(1, 2, 4, 4), variable(1, 2, 4, 4, seed=1)
    assert gradcheck(Correlation(kernel_size=3, max_displacement=1, stride=2, padding=1, dilation=1), (first, second))
    middle = Correlation(max_displacement=2)(first, second)[:, 2, 2]  # no displacement
    torch.testing.assert_close(middle, (first * second).sum(1))


def test_tin_shift() -> None:
    from mmcv.ops import tin_shift

    frames, shift = variable(1, 3, 4, 2), torch.tensor([[1, -1]], dtype=torch.int32, device=DEVICE)
    output = tin_shift(frames, shift)
    torch.testing.assert_close(output[:, 1:, :2], frames[:, :2, :2])
    torch.testing.assert_close(output[:, :2, 2:], frames[:, 1:, 2:])
    assert output[:, 0, :2].count_nonzero() == output[:, 2, 2:].count_nonzero() == 0


def test_assign_score_withk() -> None:
    from mmcv.ops import assign_score_withk

    neighbors = torch.tensor([[[0, 3, 2], [1, 0, 3]]], device=DEVICE)
    scores, points, centers = variable(1, 2, 3, 2), variable(1, 4, 2, 3, seed=1), variable(1, 4, 2, 3, seed=2)
    assert gradcheck(lambda *t: assign_score_withk(*t, neighbors, "sum"), (scores, points, centers))
    difference = points[0, neighbors[0]] - centers[0, neighbors[0, :, :1]]  # [P, K, M, O]
    expected = torch.einsum("pkm,pkmo->opk", scores[0], difference)
    torch.testing.assert_close(assign_score_withk(scores, points, centers, neighbors, "sum")[0], expected)


# text


def test_bezier_align() -> None:
    from mmcv.ops import BezierAlign

    layer = BezierAlign((2, 3), 1.0, 2, aligned=True)
    rows = torch.cat([torch.zeros(2, 1, dtype=torch.float64, device=DEVICE), drawn(2, 16, seed=1).abs() * 3], 1)
    assert gradcheck(lambda t: layer(t, rows), (variable(1, 2, 5, 5),))
    inside = drawn(2, 16, seed=2).sigmoid() * 4 + 4  # curves well within a map of ones
    rows = torch.cat([rows[:, :1], inside], 1)
    output = layer(torch.ones(1, 2, 12, 12, dtype=torch.float64, device=DEVICE), rows)
    torch.testing.assert_close(output, torch.ones_like(output))


def test_regions() -> None:
    from mmcv.ops import contour_expand, pixel_group

    labels = torch.tensor([[0, 1, 0, 0, 0, 2]], dtype=torch.int32)
    mask = torch.ones(1, 6, dtype=torch.uint8)
    assert contour_expand(torch.stack([mask, mask]), labels, 1, 3) == [[1, 1, 1, 1, 2, 2]]
    embedding = torch.tensor([0.0, 0.0, 0.0, 1.0, 1.0, 1.0]).view(1, 6, 1)
    groups = pixel_group(torch.full((1, 6), 0.5), mask.bool(), embedding, labels, (labels > 0).to(torch.uint8), 3, 0.5)
    assert groups == [[0, 0], [0.5, 3, 0, 0, 1, 0, 2, 0], [0.5, 3, 3, 0, 4, 0, 5, 0]]


# StyleGAN: against mmcv's own formulations in torch


@pytest.mark.parametrize("act", ["linear", "relu", "lrelu", "tanh", "sigmoid", "elu", "selu", "softplus", "swish"])
def test_bias_act(act: str) -> None:
    from mmcv.ops.bias_act import _bias_act_cuda, _bias_act_ref

    layer = _bias_act_cuda(act=act, gain=1.3, clamp=1.5 if act != "linear" else None).apply
    x, bias = variable(2, 3, 4), variable(3, seed=1)
    expected = _bias_act_ref(x, bias, act=act, gain=1.3, clamp=1.5 if act != "linear" else None)
    torch.testing.assert_close(layer(x, bias), expected)
    assert gradcheck(layer, (x, bias))
    assert gradgradcheck(layer, (x, bias))


@pytest.mark.parametrize("separable", [False, True])
def test_upfirdn2d(separable: bool) -> None:
    from mmcv.ops.upfirdn2d import _upfirdn2d_cuda, _upfirdn2d_ref

    rules = {"up": 2, "down": 3, "padding": [2, 1, 3, 2], "gain": 1.5}
    taps = drawn(3, dtype=torch.float32) if separable else drawn(2, 3, dtype=torch.float32)
    image, layer = variable(2, 2, 3, 4), _upfirdn2d_cuda(**rules).apply
    # mmcv multiplies filters by the root of the gain in float32
    torch.testing.assert_close(layer(image, taps), _upfirdn2d_ref(image, taps, **rules), rtol=1e-6, atol=1e-5)
    assert gradcheck(lambda t: layer(t, taps), (image[:1],))
    assert gradgradcheck(lambda t: layer(t, taps), (image[:1, :1],))


def test_filtered_lrelu() -> None:
    """In float64 mmcv takes `filtered_lrelu_act_` between its filters; in float32, which wants a stream, the whole."""
    from mmcv.ops.filtered_lrelu import _filtered_lrelu_cuda, _filtered_lrelu_ref

    rules = {"up": 2, "down": 2, "padding": [2, 1, 1, 2], "gain": 1.4, "slope": 0.2, "clamp": 1.0}
    up, down = drawn(3, dtype=torch.float32), drawn(4, dtype=torch.float32, seed=1)
    image, bias, layer = variable(1, 2, 4, 3), variable(2, seed=1), _filtered_lrelu_cuda(**rules).apply
    expected = _filtered_lrelu_ref(image, up, down, bias, **rules)
    with pytest.warns(RuntimeWarning, match="generic fallback"):
        output = layer(image, up, down, bias, None, 0, 0)
    torch.testing.assert_close(output, expected)
    given = torch.randn_like(output)
    wanted = torch.autograd.grad(expected, (image, bias), given)
    with pytest.warns(RuntimeWarning, match="generic fallback"):
        got = torch.autograd.grad(output, (image, bias), given)
    for mine, theirs in zip(got, wanted, strict=True):
        torch.testing.assert_close(mine, theirs)


def test_fused_bias_leakyrelu() -> None:
    from mmcv.ops.fused_bias_leakyrelu import FusedBiasLeakyReLUFunction, bias_leakyrelu_ref

    x, bias = variable(2, 3, 4), variable(3, seed=1)
    torch.testing.assert_close(
        FusedBiasLeakyReLUFunction.apply(x, bias, 0.2, 1.4), bias_leakyrelu_ref(x, bias, 0.2, 1.4)
    )
    assert gradcheck(lambda *t: FusedBiasLeakyReLUFunction.apply(*t, 0.2, 1.4), (x, bias))
