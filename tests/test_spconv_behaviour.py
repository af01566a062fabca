"""Facts about `triops.spconv` where spconv 2.3.8 does other things than `triops.nn`: it does as spconv does."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import nn
from torch.fx import Proxy, ProxyableClassMeta

import triops.nn
import triops.spconv.pytorch as spconv

SHAPE = [6, 6, 6]


def sparse(channels: int = 4, count: int = 20, layers: Any = spconv, **options: Any) -> Any:
    generator = torch.Generator().manual_seed(0)
    cells = torch.randperm(216, generator=generator)[:count]
    sites = torch.stack([torch.zeros_like(cells), cells // 36, cells // 6 % 6, cells % 6], 1).int()
    features = torch.randn(count, channels, generator=generator)
    return layers.SparseConvTensor(features, sites, SHAPE, 1, **options)


# what is refused


def tensor(
    features: Any = None, indices: Any = None, shape: Any = SHAPE, batch_size: Any = 1
) -> spconv.SparseConvTensor:
    features = torch.zeros(5, 3) if features is None else features
    indices = torch.zeros(5, 4, dtype=torch.int32) if indices is None else indices
    return spconv.SparseConvTensor(features, indices, shape, batch_size)


def used_twice() -> None:
    x = spconv.SubMConv3d(4, 4, 3, indice_key="a")(sparse())
    spconv.SparseConv3d(4, 4, 3, stride=2, indice_key="a")(x)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: spconv.SubMConv3d(4, 8, 3, groups=2), ValueError, "groups must be 1, got 2"),
        (lambda: spconv.SparseConv3d(4, 8, 1, padding=1), ValueError, r"padding must be 0.*got \[1, 1, 1\]"),
        (lambda: spconv.SubMConv3d(8, 4, 3)(sparse(4)), ValueError, "input must have 8 channels, got 4"),
        (used_twice, ValueError, "indice_key 'a' holds a rulebook with subm True"),
        (lambda: spconv.SubMConv3d(4, 4, 3)(torch.zeros(2, 4)), TypeError, "must be a SparseConvTensor, got a dense"),
        (lambda: spconv.JoinTable()([sparse(), sparse(count=3)]), ValueError, "number of sites 20 and 3"),
        (lambda: spconv.AddTable()([sparse(), sparse(count=3)]), ValueError, "number of sites 20 and 3"),
        (lambda: tensor(indices=torch.zeros(5, 4, dtype=torch.int64)), TypeError, "must be int32, got torch.int64"),
        (lambda: tensor(shape=[6, 6]), ValueError, "spatial_shape must have 3 entries"),
        (lambda: tensor(batch_size=0), ValueError, "batch_size must be"),
        (lambda: tensor(features=torch.zeros(1, 5, 3)), ValueError, r"features must have shape \[N, C\]"),
        (lambda: tensor(features=[[1.0]]), TypeError, "features must be a Tensor"),
    ],
)
def test_what_spconv_asserts_is_an_assertion_error_that_says_what_came(call, error, message):
    with pytest.raises(AssertionError, match=message) as caught:
        call()
    assert isinstance(caught.value, error)


def test_an_even_submanifold_kernel_is_refused_when_called_and_a_stride_ignored():
    for layer in (spconv.SubMConv3d(4, 4, 2), spconv.SparseMaxPool(3, 2, subm=True)):
        with pytest.raises(AssertionError, match="needs an odd kernel_size"):
            layer(sparse())
    strided, plain = spconv.SubMConv3d(4, 4, 3, stride=2), spconv.SubMConv3d(4, 4, 3)
    strided.load_state_dict(plain.state_dict())
    assert torch.equal(strided(sparse()).features, plain(sparse()).features)
    assert spconv.SubMConv3d(4, 4, 1, stride=2).conv1x1
    for kernel, stride in ((2, 1), (3, 2)):
        with pytest.raises(ValueError, match="a submanifold layer"):
            triops.nn.SubMConv3d(4, 4, kernel, stride)


@pytest.mark.parametrize("name", ["SubMConv3d", "SparseConv3d", "SparseConvTranspose3d", "SparseMaxPool3d"])
def test_no_sites_are_refused_where_triops_nn_takes_them(name):
    arguments = (3,) if "Pool" in name else (4, 4, 3)
    x = sparse(count=0)
    with pytest.raises(ValueError, match="input has no sites"):
        getattr(spconv, name)(*arguments)(x)
    assert len(getattr(triops.nn, name)(*arguments)(x).indices) == 0
    assert len(spconv.SubMConv3d(4, 4, 1)(x).indices) == 0, "a product of matrices"


def test_sites_that_all_vanish_are_refused_where_triops_nn_gives_none():
    x = spconv.SparseConvTensor(torch.ones(1, 2), torch.tensor([[0, 2]]).int(), [4], 1)
    with pytest.raises(ValueError, match=r"no output site is left with kernel_size \[1\], stride \[4\]"):
        spconv.SparseConv1d(2, 4, 1, stride=4)(x)
    with pytest.raises(ValueError, match="no output site is left"):
        spconv.SparseAvgPool1d(1, stride=4)(x)
    assert len(triops.nn.SparseConv1d(2, 4, 1, stride=4)(x).indices) == 0


def test_a_sum_in_evaluation_mode_needs_the_native_algorithm():
    x = sparse()
    layer = spconv.SubMConv3d(4, 4, 3)
    trained = layer(x, add_input=x).features
    with pytest.raises(AssertionError, match="add_input must be None in evaluation mode"):
        layer.eval()(x, add_input=x)
    layer.algo = spconv.ConvAlgo.Native
    torch.testing.assert_close(layer(x, add_input=x).features, trained)


def test_residual_blocks_of_such_layers_are_fused_all_the_same():
    branch = spconv.SparseSequential(spconv.SubMConv3d(4, 4, 3), nn.BatchNorm1d(4))
    block = spconv.SparseSequential(spconv.ConcatTable().add(spconv.Identity()).add(branch), spconv.AddTable()).eval()
    fused = triops.nn.fuse(block)
    assert len(list(fused.modules())) < len(list(block.modules()))
    torch.testing.assert_close(fused(sparse()).features, block(sparse()).features, rtol=1e-4, atol=1e-5)


def test_rows_cannot_be_selected_by_index():
    with pytest.raises(ValueError, match=r"write SparseConvTensor\(x.features\[rows\], x.indices\[rows\]"):
        sparse().select_by_index(torch.arange(3))


# what comes out


@pytest.mark.parametrize("bias", [True, False])
def test_inside_autocast_training_is_in_half_precision_and_evaluation_is_not(bias):
    layer, x = spconv.SubMConv3d(4, 8, 3, bias=bias), sparse()
    full = layer(x).features
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert layer(x).features.dtype == torch.bfloat16
        evaluated = layer.eval()(x).features
        half = layer(x.replace_feature(x.features.bfloat16())).features
        assert spconv.SubMConv3d(4, 8, 1).eval()(x).features.dtype == torch.bfloat16, "a product of matrices"
        assert triops.nn.SubMConv3d(4, 8, 3).eval()(x).features.dtype == torch.bfloat16
    assert torch.equal(evaluated, full)
    assert half.dtype == torch.bfloat16, "half features stay what they are"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("subm", [False, True])
def test_the_gradient_of_a_mean_is_multiplied_by_the_number_of_its_sites(subm, dtype):
    sites = torch.tensor([[0, 0], [0, 1], [0, 4]], dtype=torch.int32)
    features = torch.tensor([[1.0], [3.0], [5.0]], dtype=dtype, requires_grad=True)
    x = spconv.SparseConvTensor(features, sites, [6], 1)
    options: Any = {"kernel_size": 3, "subm": True} if subm else {"kernel_size": 2, "stride": 2}
    theirs, ours = spconv.SparseAvgPool(1, **options)(x), triops.nn.SparseAvgPool(1, **options)(x)
    assert theirs.features.dtype == dtype
    assert torch.equal(theirs.features, ours.features)
    weights = torch.tensor([[1.0], [10.0], [100.0]], dtype=dtype)[: len(ours.indices)]
    (grad,) = torch.autograd.grad(theirs.features, features, weights)
    assert grad.flatten().tolist() == ([22, 22, 100] if subm else [2, 2, 10])
    (grad,) = torch.autograd.grad(ours.features, features, weights)
    assert grad.flatten().tolist() == ([5.5, 5.5, 100] if subm else [0.5, 0.5, 10])


@pytest.mark.parametrize("dimensions", [1, 2, 3, 4])
def test_every_average_pool_has_that_gradient(dimensions):
    sites = torch.zeros(2, 1 + dimensions, dtype=torch.int32)
    sites[1, -1] = 1
    features = torch.ones(2, 1, requires_grad=True)
    pool = getattr(spconv, f"SparseAvgPool{dimensions}d")(2)
    pool(spconv.SparseConvTensor(features, sites, [2] * dimensions, 1)).features.sum().backward()
    assert features.grad.tolist() == [[2], [2]]


def test_the_global_average_is_that_of_channel_0():
    sites = torch.tensor([[0, 1], [0, 3], [1, 0]], dtype=torch.int32)
    x = spconv.SparseConvTensor(torch.tensor([[4.0, 7.0], [2.0, 9.0], [5.0, 1.0]]), sites, [5], 2)
    assert spconv.SparseGlobalAvgPool()(x).tolist() == [3, 5]
    assert triops.nn.SparseGlobalAvgPool()(x).tolist() == [[3, 8], [5, 1]]


@pytest.mark.parametrize("name", ["SubMConv3d", "SparseConv3d"])
def test_there_is_a_second_derivative_in_triops_nn_alone(name):
    for layers in (spconv, triops.nn):
        x = sparse(layers=layers)
        features = x.features.requires_grad_()
        out = getattr(layers, name)(4, 4, 3)(x).features
        (grad,) = torch.autograd.grad(out.square().mean(), features, create_graph=True)
        if layers is spconv:
            with pytest.raises(RuntimeError, match="no second derivative"):
                grad.square().mean().backward()
        else:
            grad.square().mean().backward()


def test_a_gradient_with_a_graph_is_the_gradient_without():
    x = sparse()
    features = x.features.requires_grad_()
    loss = spconv.SubMConv3d(4, 4, 3)(x).features.square().mean()
    grads = [torch.autograd.grad(loss, features, create_graph=graph, retain_graph=True)[0] for graph in (False, True)]
    assert torch.equal(*grads)


# how it looks


def test_representations_are_spconvs():
    assert repr(sparse()) == "SparseConvTensor[shape=torch.Size([20, 4])]"
    window = "stride=[2, 2], padding=[1, 1], dilation=[1, 1]"
    assert repr(spconv.SparseConv2d(4, 8, 3, 2, 1, bias=False)) == (
        f"SparseConv2d(4, 8, kernel_size=[3, 3], {window}, output_padding=[0, 0], bias=False, "
        "algo=ConvAlgo.MaskImplicitGemm)"
    )
    act = spconv.conv.tv.gemm.Activation.ReLU
    assert spconv.conv.SparseConvolution(2, 4, 8, 6, 2, 1, act_type=act).extra_repr() == (
        f"4, 8, kernel_size=[6, 6], {window}, output_padding=[0, 0], algo=ConvAlgo.Native, act=Activation.ReLU"
    )
    assert (
        spconv.SparseMaxPool2d(11, 2, 1).extra_repr()
        == f"kernel_size=[11, 11], {window}, algo=ConvAlgo.MaskImplicitGemm"
    )
    assert spconv.SubMConv3d(4, 8, 3, algo=spconv.ConvAlgo.Native).algo is spconv.ConvAlgo.Native


def test_making_a_tensor_logs_nothing():
    code = """
import torch, triops.spconv.pytorch as spconv
spconv.SparseConvTensor(torch.zeros(1, 1), torch.zeros(1, 2).int(), [1], 1)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


def test_torch_fx_traces_the_making_of_a_tensor():
    class Net(nn.Module):
        def forward(self, features: torch.Tensor, indices: torch.Tensor) -> Any:
            return spconv.SparseConvTensor(features, indices, SHAPE, 1)

    assert type(spconv.SparseConvTensor) is ProxyableClassMeta
    graph = torch.fx.symbolic_trace(Net())
    assert [node.target for node in graph.graph.nodes if node.op == "call_function"] == [spconv.SparseConvTensor]
    x = sparse()
    assert torch.equal(graph(x.features, x.indices).features, x.features)
    assert not isinstance(x.features, Proxy)


# records of times


def test_a_benchmark_needs_names_and_records_every_layer():
    net = spconv.SparseSequential(
        spconv.SubMConv3d(4, 8, 3, indice_key="a"), nn.ReLU(), spconv.SubMConv3d(8, 8, 3, indice_key="a"),
        spconv.SparseMaxPool3d(2),
    )  # fmt: skip
    for layer in (net[0], net[3]):
        with pytest.raises(ValueError, match="needs a name"):
            layer(sparse(benchmark=True))
    spconv.assign_name_for_sparse_modules(net)
    x = sparse(benchmark=True)
    out = net(x)
    record = out.benchmark_record
    assert list(record) == ["0", "2", "3"]
    assert [len(record[name]["indice_gen_time"]) for name in record] == [1, 0, 1], "the second layer reads a rulebook"
    for name in record:
        assert [len(record[name][key]) for key in ("time", "num_points", "num_out_points")] == [1, 1, 1]
        assert record[name]["time"][0] >= 0
    assert record["3"]["num_points"] == [20]
    assert record["3"]["num_out_points"] == [len(out.indices)]
    assert record["0"]["type"] == "SparseConvolution"
    assert record["0"]["params"] == {
        "kernel_size": [3, 3, 3], "stride": [1, 1, 1], "padding": [0, 0, 0], "dilation": [1, 1, 1],
        "output_padding": [0, 0, 0], "subm": True, "transposed": False, "input_channels": 4, "out_channels": 8,
    }  # fmt: skip
    assert record["3"]["type"] == "SparseMaxPool"
    assert record["3"]["params"]["channels"] == 8


# torch.compile


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down = spconv.SparseConv3d(4, 8, 3, stride=2, padding=1)
        self.pool = spconv.SparseAvgPool3d(2)

    def forward(self, features: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        return self.pool(self.down(spconv.SparseConvTensor(features, indices, SHAPE, 1))).features


@pytest.mark.parametrize("training", [True, False])
def test_a_network_of_such_layers_compiles_in_one_graph(training):
    torch.manual_seed(0)
    net, x = Net().train(training), sparse()
    compiled = torch.compile(net, fullgraph=True, backend="aot_eager")
    grads = []
    for run in (net, compiled):
        net.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = run(x.features, x.indices)
        assert out.dtype == (torch.bfloat16 if training else torch.float32)
        out.float().square().sum().backward()
        grads.append(net.down.weight.grad)
    torch.testing.assert_close(*grads, rtol=2e-2, atol=2e-2)
