"""Facts about `triops.spconv`: names, arguments and checkpoints of spconv 2.x."""

from __future__ import annotations

import inspect
from functools import partial

import pytest
import torch
from torch import nn

import triops.nn
import triops.spconv
import triops.spconv.pytorch as spconv

CONVOLUTION = (
    "in_channels, out_channels, kernel_size, stride=1, padding=0, dilation=1, groups=1, bias=True, indice_key=None, "
    "algo=None, fp32_accum=None"
)
SIGNATURES = {
    "SubMConv": f"{CONVOLUTION}, large_kernel_fast_algo=False, name=None",
    "SparseConv": f"{CONVOLUTION}, record_voxel_count=False, large_kernel_fast_algo=False, name=None",
    "SparseConvTranspose": f"{CONVOLUTION}, record_voxel_count=False, large_kernel_fast_algo=False, name=None",
    "SparseInverseConv": "in_channels, out_channels, kernel_size, indice_key, bias=True, algo=None, fp32_accum=None, "
    "large_kernel_fast_algo=False, name=None",
    "SparseMaxPool": "kernel_size, stride=None, padding=0, dilation=1, indice_key=None, algo=None, "
    "record_voxel_count=False, name=None",
    "SparseAvgPool": "kernel_size, stride=None, padding=0, dilation=1, indice_key=None, algo=None, "
    "record_voxel_count=False, name=None",
}


@pytest.mark.parametrize("dimensions", [1, 2, 3, 4])
@pytest.mark.parametrize("family", SIGNATURES)
def test_constructors_take_spconvs_arguments_in_spconvs_order(family, dimensions):
    parameters = inspect.signature(getattr(spconv, f"{family}{dimensions}d")).parameters.values()
    got = [p.name if p.default is p.empty else f"{p.name}={p.default}" for p in parameters]
    expected = SIGNATURES[family].split(", ")
    assert got == expected


def test_the_sparse_tensor_takes_spconvs_arguments_in_spconvs_order():
    assert list(inspect.signature(spconv.SparseConvTensor.__init__).parameters)[1:] == [
        "features", "indices", "spatial_shape", "batch_size", "grid", "voxel_num", "indice_dict", "benchmark",
        "permanent_thrust_allocator", "enable_timer", "force_algo",
    ]  # fmt: skip


def test_names_are_where_programs_look_for_them():
    assert triops.spconv.__version__ >= "2.0.0"
    assert spconv.core.SparseConvTensor is spconv.SparseConvTensor
    assert issubclass(spconv.SparseConvTensor, triops.nn.SparseConvTensor)
    assert issubclass(spconv.SubMConv3d, triops.nn.SubMConv3d)
    assert issubclass(spconv.SubMConv3d, spconv.conv.SparseConvolution)
    conv = spconv.SubMConv3d(1, 1, 3, algo=spconv.ConvAlgo.Native, fp32_accum=True)
    assert spconv.modules.is_spconv_module(conv)
    assert spconv.modules.is_sparse_conv(conv)
    assert not spconv.modules.is_spconv_module(nn.ReLU())
    assert triops.spconv.ConvAlgo is spconv.ops.ConvAlgo
    assert [algo.name for algo in spconv.ConvAlgo] == ["Native", "MaskImplicitGemm", "MaskSplitImplicitGemm"]
    for name in spconv.__all__:
        assert hasattr(spconv, name)
    assert spconv.ops.get_conv_output_size([41, 9], [3, 3], [2, 2], [1, 1], [1, 1]) == [21, 5]
    assert spconv.ops.get_conv_output_size([13, 7], [-1, 3], [1, 1], [0, 0], [1, 1]) == [1, 5]
    assert spconv.ops.get_deconv_output_size([5], [3], [2], [1], [1], [0]) == [9]


@pytest.mark.parametrize("family", ["SubMConv", "SparseConv"])
@pytest.mark.parametrize(("inputs", "outputs"), [(2, 3), (2, 2)])
def test_pointwise_weights_are_read_as_spconv_reads_them(family, inputs, outputs):
    """spconv multiplies features by `weight.view(in, out)`, though the shape of the weight is [out, 1, 1, 1, in]."""
    conv = getattr(spconv, f"{family}3d")(inputs, outputs, 1)
    conv.weight.data = torch.arange(1.0, 1 + inputs * outputs).reshape(outputs, 1, 1, 1, inputs)
    conv.bias.data.zero_()
    x = spconv.SparseConvTensor(torch.eye(2), torch.tensor([[0, 0, 0, 0], [0, 1, 1, 1]]).int(), [2, 2, 2], 1)
    assert torch.equal(conv(x).features, torch.arange(1.0, 1 + inputs * outputs).view(inputs, outputs))
    clean = getattr(triops.nn, f"{family}3d")(inputs, outputs, 1)
    clean.load_state_dict(conv.state_dict())
    assert torch.equal(clean(x).features, conv.weight.view(outputs, inputs).t()), "triops.nn takes the shape's word"


def test_a_strided_kernel_of_one_offset_is_read_by_its_shape():
    conv = spconv.SparseConv3d(2, 3, 1, stride=2, bias=False)
    x = spconv.SparseConvTensor(torch.eye(2), torch.tensor([[0, 0, 0, 0], [0, 2, 0, 0]]).int(), [4, 4, 4], 1)
    assert torch.equal(conv(x).features, conv.weight.view(3, 2).t())


class Block(spconv.SparseModule):
    """A residual block as detectors write it."""

    def __init__(self, channels: int, norm: partial[nn.BatchNorm1d], indice_key: str) -> None:
        super().__init__()
        self.conv1 = spconv.SubMConv3d(channels, channels, kernel_size=3, padding=1, bias=True, indice_key=indice_key)
        self.bn1 = norm(channels)
        self.relu = nn.ReLU()
        self.conv2 = spconv.SubMConv3d(channels, channels, kernel_size=3, padding=1, bias=True, indice_key=indice_key)
        self.bn2 = norm(channels)

    def forward(self, x: spconv.SparseConvTensor) -> spconv.SparseConvTensor:
        out = self.conv1(x)
        out = out.replace_feature(self.relu(self.bn1(out.features)))
        out = self.conv2(out)
        out = out.replace_feature(self.bn2(out.features))
        return out.replace_feature(self.relu(out.features + x.features))


class Backbone(nn.Module):
    """The first stages of a voxel backbone in the manner of OpenPCDet."""

    def __init__(self) -> None:
        super().__init__()
        norm = partial(nn.BatchNorm1d, eps=1e-3, momentum=0.01)
        self.conv_input = spconv.SparseSequential(
            spconv.SubMConv3d(4, 16, 3, padding=1, bias=False, indice_key="subm1"), norm(16), nn.ReLU()
        )
        self.conv1 = spconv.SparseSequential(Block(16, norm, "res1"))
        self.conv2 = spconv.SparseSequential(
            spconv.SparseSequential(
                spconv.SparseConv3d(16, 32, 3, stride=2, padding=[0, 1, 1], bias=False, indice_key="spconv2"),
                norm(32),
                nn.ReLU(),
            ),
            Block(32, norm, "res2"),
        )
        self.inverse = spconv.SparseInverseConv3d(32, 16, 3, indice_key="spconv2", bias=False)

    def forward(self, features: torch.Tensor, indices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = spconv.SparseConvTensor(features, indices.int(), [11, 20, 20], batch_size=2)
        x = self.conv2(self.conv1(self.conv_input(x)))
        dense = x.dense()
        n, c, d, h, w = dense.shape
        return dense.view(n, c * d, h, w), self.inverse(x).features


def test_a_detectors_backbone_runs_and_trains():
    torch.manual_seed(0)
    net = Backbone()
    indices = torch.cat([torch.randint(0, size, (300, 1)) for size in (2, 11, 20, 20)], 1).unique(dim=0)
    bev, points = net(torch.randn(len(indices), 4), indices)
    assert bev.shape == (2, 32 * 5, 10, 10)
    assert points.shape == (len(indices), 16)
    (bev.square().mean() + points.square().mean()).backward()
    assert all(parameter.grad is not None and parameter.grad.isfinite().all() for parameter in net.parameters())


def test_a_checkpoint_of_spconv_loads_by_name_and_shape():
    """Names and shapes as spconv 2.x saves this network."""
    saved = {
        "conv_input.0.weight": (16, 3, 3, 3, 4),
        "conv1.0.conv1.weight": (16, 3, 3, 3, 16),
        "conv1.0.conv1.bias": (16,),
        "conv1.0.conv2.weight": (16, 3, 3, 3, 16),
        "conv1.0.conv2.bias": (16,),
        "conv2.0.0.weight": (32, 3, 3, 3, 16),
        "conv2.1.conv1.weight": (32, 3, 3, 3, 32),
        "conv2.1.conv1.bias": (32,),
        "conv2.1.conv2.weight": (32, 3, 3, 3, 32),
        "conv2.1.conv2.bias": (32,),
        "inverse.weight": (16, 3, 3, 3, 32),
    }
    net = Backbone()
    state = {key: value for key, value in net.state_dict().items() if value.dim() == 5 or key in saved}
    assert {key: tuple(value.shape) for key, value in state.items()} == saved
    result = net.load_state_dict({key: torch.zeros(shape) for key, shape in saved.items()}, strict=False)
    assert result.unexpected_keys == []
    assert all(".bn" in key or ".1." in key for key in result.missing_keys), "batch norms alone"


def test_merging_branches_by_replacing_sites():
    """As VoxelNeXt does: features and sites of two tensors become one."""
    x = spconv.SparseConvTensor(torch.ones(1, 2), torch.tensor([[0, 1, 1]]).int(), [4, 4], 1)
    y = x.replace_feature(torch.cat([x.features, x.features]))
    y.indices = torch.cat([x.indices, x.indices + torch.tensor([0, 1, 0]).int()])
    assert len(spconv.SubMConv2d(2, 3, 3, indice_key="out")(y).features) == 2


@pytest.mark.parametrize("subm", [False, True])
def test_max_pooling_starts_at_0_and_gives_every_equal_input_the_gradient_as_spconv_does(subm):
    """`triops.nn` gives the true maximum, and its gradient to the first."""
    sites = torch.tensor([[0, 0], [0, 1], [0, 4], [0, 5]], dtype=torch.int32)
    features = torch.tensor([[-3.0], [-1.0], [2.0], [2.0]], requires_grad=True)
    x = spconv.SparseConvTensor(features, sites, [6], 1)
    options = {"kernel_size": 3, "subm": True} if subm else {"kernel_size": 2, "stride": 2}
    theirs, ours = spconv.SparseMaxPool(1, **options)(x), triops.nn.SparseMaxPool(1, **options)(x)
    assert theirs.features.flatten().tolist() == ([0, 0, 2, 2] if subm else [0, 2])
    assert ours.features.flatten().tolist() == ([-1, -1, 2, 2] if subm else [-1, 2])
    (grad,) = torch.autograd.grad(theirs.features.sum(), features)
    assert grad.flatten().tolist() == ([0, 0, 2, 2] if subm else [0, 0, 1, 1])
    (grad,) = torch.autograd.grad(ours.features.sum(), features)
    assert grad.flatten().tolist() == ([0, 2, 2, 0] if subm else [0, 1, 1, 0])


@pytest.mark.parametrize("dimensions", [1, 2, 3, 4])
def test_every_max_pool_of_spconvs_names_starts_at_0(dimensions):
    sites = torch.zeros(1, 1 + dimensions, dtype=torch.int32)
    x = spconv.SparseConvTensor(torch.tensor([[-1.0]]), sites, [2] * dimensions, 1)
    pool = getattr(spconv, f"SparseMaxPool{dimensions}d")(2)
    assert pool(x).features.item() == 0
    assert type(pool) in spconv.pool.ALL_POOL_LAYERS
