"""Facts about the sparse modules: they are convolutions, they share rulebooks, and they live with torch's tools."""

from __future__ import annotations

import copy
import runpy
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

import triops.nn as tnn
from triops.nn import (
    SparseConv3d,
    SparseConvTensor,
    SparseConvTranspose3d,
    SparseInverseConv3d,
    SparseSequential,
    SubMConv3d,
)
from triops.ops.sparse_conv.samples import random_sites

pytestmark = pytest.mark.versions


DENSE = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
DENSE_TRANSPOSE = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}


def sparse(shape: list[int], channels: int, batch: int = 2, share: float = 0.3, seed: int = 0) -> SparseConvTensor:
    """Random sites in random order, float64."""
    generator = torch.Generator().manual_seed(seed)
    active = (torch.rand(batch, *shape, generator=generator) < share).nonzero()
    active = active[torch.randperm(len(active), generator=generator)]
    features = torch.randn(len(active), channels, generator=generator, dtype=torch.float64)
    return SparseConvTensor(features.requires_grad_(), active.int(), shape, batch)


def layer(family: str, dimensions: int, *args: Any, **kwargs: Any) -> tnn.SparseConvolution:
    torch.manual_seed(1)
    return getattr(tnn, f"{family}{dimensions}d")(*args, **kwargs).double()


def dense_weight(weight: Tensor) -> Tensor:
    """[out, *k, in] as torch's convolutions want it: [out, in, *k]."""
    return weight.movedim(-1, 1)


def assert_same_with_gradients(got: Tensor, expected: Tensor, *inputs: Tensor) -> None:
    torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-9)
    direction = torch.randn_like(expected)
    grads = (
        torch.autograd.grad(got, inputs, direction, retain_graph=True),
        torch.autograd.grad(expected, inputs, direction),
    )
    for g, e in zip(*grads, strict=True):
        torch.testing.assert_close(g, e, rtol=1e-9, atol=1e-9)


def active(x: SparseConvTensor) -> Tensor:
    """1 at the active sites: [B, 1, *spatial_shape]."""
    return x.replace_feature(torch.ones_like(x.features[:, :1])).dense()


# ---------------------------------------------------------------- the same as dense convolutions

GEOMETRY = {
    "dimensions": st.integers(1, 3),
    "kernel": st.lists(st.integers(1, 4), min_size=3, max_size=3),
    "stride": st.lists(st.integers(1, 3), min_size=3, max_size=3),
    "padding": st.lists(st.integers(0, 2), min_size=3, max_size=3),
    "dilation": st.lists(st.integers(1, 2), min_size=3, max_size=3),
    "channels": st.sampled_from([(1, 1), (3, 5), (8, 4)]),
    "seed": st.integers(0, 10**6),
}


@settings(max_examples=25, deadline=None)
@given(**GEOMETRY)
def test_a_sparse_convolution_is_the_dense_one(dimensions, kernel, stride, padding, dilation, channels, seed):
    geometry = [p[:dimensions] for p in (kernel, stride, padding, dilation)]
    conv = layer("SparseConv", dimensions, *channels, *geometry, bias=False)
    x = sparse([9, 8, 7][:dimensions], channels[0], seed=seed)
    y = conv(x)
    expected = DENSE[dimensions](x.dense(), dense_weight(conv.weight), None, *geometry[1:])
    assert y.spatial_shape == list(expected.shape[2:])
    assert_same_with_gradients(y.dense(), expected, x.features, conv.weight)


@settings(max_examples=25, deadline=None)
@given(**GEOMETRY)
def test_a_transposed_convolution_is_the_dense_one(dimensions, kernel, stride, padding, dilation, channels, seed):
    kernel, stride, dilation = kernel[:dimensions], stride[:dimensions], dilation[:dimensions]
    padding = [min(p, (k - 1) * d) for p, k, d in zip(padding[:dimensions], kernel, dilation, strict=True)]
    extra = [min(p, s - 1) for p, s in zip(padding, stride, strict=True)]
    conv = layer("SparseConvTranspose", dimensions, *channels, kernel, stride, padding, dilation, bias=False,
                 output_padding=extra)  # fmt: skip
    x = sparse([5, 4, 3][:dimensions], channels[0], seed=seed)
    y = conv(x)
    weight = conv.weight.movedim(-1, 0)  # torch: [in, out, *k]
    expected = DENSE_TRANSPOSE[dimensions](x.dense(), weight, None, stride, padding, extra, 1, dilation)
    assert y.spatial_shape == list(expected.shape[2:])
    assert_same_with_gradients(y.dense(), expected, x.features, conv.weight)


@pytest.mark.parametrize("kernel", [1, 3, 5, [3, 1, 5]])
@pytest.mark.parametrize("dilation", [1, 2])
def test_a_submanifold_convolution_is_the_dense_one_at_the_inputs_sites(kernel, dilation):
    conv = layer("SubMConv", 3, 3, 5, kernel, dilation=dilation)
    x = sparse([7, 6, 8], 3)
    y = conv(x)
    padding = [k // 2 * dilation for k in conv.kernel_size]
    expected = F.conv3d(x.dense(), dense_weight(conv.weight), conv.bias, 1, padding, dilation)
    assert y.indices is x.indices
    assert_same_with_gradients(y.dense(), expected * active(x), x.features, conv.weight, conv.bias)


def test_the_bias_is_added_at_active_sites_only():
    conv = layer("SparseConv", 2, 3, 5, 3, 2)
    x = sparse([9, 9], 3, share=0.05)
    y = conv(x)
    expected = F.conv2d(x.dense(), dense_weight(conv.weight), conv.bias, 2) * active(y)
    assert 0 < active(y).sum() < active(y).numel()
    assert_same_with_gradients(y.dense(), expected, x.features, conv.weight, conv.bias)


def test_an_inverse_convolution_is_the_transposed_one_at_the_first_layers_sites():
    down = layer("SparseConv", 3, 3, 6, 3, 2, 1, indice_key="down")
    up = layer("SparseInverseConv", 3, 6, 5, 3, "down", bias=False)
    x = sparse([8, 7, 9], 3)
    middle = down(x)
    y = up(middle)
    weight = up.weight.movedim(-1, 0)
    expected = F.conv_transpose3d(middle.dense(), weight, None, 2, 1, [1, 0, 0])
    assert y.indices is x.indices
    assert y.spatial_shape == x.spatial_shape
    assert_same_with_gradients(y.dense(), expected * active(x), x.features, up.weight, down.weight)


def test_four_dimensions_with_a_flat_first_axis_are_three():
    flat = layer("SubMConv", 4, 2, 4, [1, 3, 3, 3])
    x = sparse([3, 5, 4, 5], 2, batch=1)
    together = x.indices[:, 1:]  # the first axis as the batch
    three = layer("SubMConv", 3, 2, 4, 3)
    three.load_state_dict({"weight": flat.weight[:, 0], "bias": flat.bias})
    expected = three(SparseConvTensor(x.features, together, [5, 4, 5], 3)).features
    torch.testing.assert_close(flat(x).features, expected)


@pytest.mark.parametrize("dimensions", [1, 2, 3, 4])
def test_every_family_works_in_every_dimension(dimensions):
    net = SparseSequential(
        layer("SubMConv", dimensions, 2, 4, 3, indice_key="subm"),
        layer("SparseConv", dimensions, 4, 6, 3, 2, 1, indice_key="down"),
        layer("SparseInverseConv", dimensions, 6, 4, 3, "down"),
        layer("SubMConv", dimensions, 4, 4, 3, indice_key="subm"),
        getattr(tnn, f"SparseMaxPool{dimensions}d")(2),
        layer("SparseConvTranspose", dimensions, 4, 3, 2, 2),
        getattr(tnn, f"SparseAvgPool{dimensions}d")(2),
    )
    y = net(sparse([4] * dimensions, 2))
    assert y.spatial_shape == [2] * dimensions
    y.features.sum().backward()
    assert all(parameter.grad is not None for parameter in net.parameters())


# ---------------------------------------------------------------- pooling


def test_max_pooling_is_the_dense_one_over_active_sites():
    x = sparse([8, 6, 7], 3)
    y = tnn.SparseMaxPool3d(3, 2, 1)(x)
    filled = torch.where(active(x) > 0, x.dense(), -torch.inf)
    expected = F.max_pool3d(filled, 3, 2, 1)
    assert_same_with_gradients(y.dense(), torch.where(expected.isinf(), 0.0, expected), x.features)
    assert (y.features < 0).any(), "negative maxima survive"


def test_average_pooling_divides_by_the_active_sites():
    x = sparse([8, 6], 3)
    y = tnn.SparseAvgPool2d(2)(x)
    counts = F.avg_pool2d(active(x), 2) * 4
    expected = F.avg_pool2d(x.dense(), 2) * 4 / counts.clamp(min=1)
    assert_same_with_gradients(y.dense(), expected, x.features)


def test_an_inverse_convolution_may_undo_a_pool():
    x = sparse([8, 8, 8], 3)
    y = layer("SparseInverseConv", 3, 3, 2, 2, "pool")(tnn.SparseMaxPool3d(2, indice_key="pool")(x))
    assert y.indices is x.indices


def test_global_pooling_is_per_element_and_zero_where_there_is_nothing():
    features = torch.tensor([[1.0, -5.0], [3.0, -4.0], [7.0, 7.0], [9.0, 9.0]], requires_grad=True)
    sites = torch.tensor([[0, 0], [0, 1], [2, 0], [2, 99]])  # the last one lies outside
    x = SparseConvTensor(features, sites, [4], 3)
    assert tnn.SparseGlobalMaxPool()(x).tolist() == [[3, -4], [0, 0], [7, 7]]
    assert tnn.SparseGlobalAvgPool()(x).tolist() == [[2, -4.5], [0, 0], [7, 7]]
    tnn.SparseGlobalMaxPool()(x).sum().backward()
    assert features.grad is not None
    assert features.grad.tolist() == [[0, 0], [1, 1], [1, 1], [0, 0]]


def test_global_pools_count_the_lowest_row_of_a_site_alone():
    sites = torch.tensor([[0, 1, 1], [0, 2, 2], [0, 1, 1], [0, 9, 0], [1, 1, 1]], dtype=torch.int32)
    features = torch.tensor([[1.0], [3.0], [100.0], [50.0], [5.0]], requires_grad=True)
    x = SparseConvTensor(features, sites, [4, 4], 2)
    assert tnn.SparseGlobalMaxPool()(x).tolist() == [[3], [5]]
    assert tnn.SparseGlobalAvgPool()(x).tolist() == [[2], [5]]
    tnn.SparseGlobalAvgPool()(x).sum().backward()
    assert features.grad.flatten().tolist() == [0.5, 0.5, 0, 0, 1]
    dense = x.dense().flatten(2)
    assert tnn.SparseGlobalMaxPool()(x).tolist() == dense.amax(2).tolist()


def test_global_max_pooling_gives_a_tie_to_the_first_site_and_keeps_nan():
    features = torch.tensor([[2.0], [2.0], [torch.nan]], requires_grad=True)
    x = SparseConvTensor(features, torch.tensor([[0, 3], [0, 1], [1, 0]]), [4], 2)
    out = tnn.SparseGlobalMaxPool()(x)
    assert out[0].item() == 2
    assert out[1].isnan().all()
    assert torch.autograd.grad(out[0].sum(), features)[0].tolist() == [[1], [0], [0]]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_global_average_of_many_half_sites_does_not_stall(dtype):
    sites = torch.stack([torch.zeros(5000, dtype=torch.int32), torch.arange(5000, dtype=torch.int32)], 1)
    x = SparseConvTensor(torch.ones(5000, 1, dtype=dtype), sites, [5000], 1)
    assert tnn.SparseGlobalAvgPool()(x).item() == 1


# ---------------------------------------------------------------- the tensor


def test_dense_and_from_dense_are_inverse():
    dense = torch.randn(2, 4, 3, 5, 2) * (torch.rand(2, 4, 3, 5, 1) < 0.3)
    x = SparseConvTensor.from_dense(dense.requires_grad_())
    assert x.indices.dtype == torch.int32
    assert (x.spatial_shape, x.batch_size, x.spatial_size) == ([4, 3, 5], 2, 60)
    assert torch.equal(x.dense(channels_first=False), dense)
    assert torch.equal(x.dense(), dense.movedim(-1, 1))
    x.dense().sum().backward()
    assert dense.grad is not None
    assert torch.equal(dense.grad, (dense != 0).any(-1, keepdim=True).expand_as(dense).float())


def test_dense_drops_sites_outside_and_takes_the_lowest_of_equal_rows():
    features = torch.tensor([[1.0], [2.0], [3.0], [4.0], [5.0]], requires_grad=True)
    sites = torch.tensor([[0, 2], [0, 2], [0, -1], [1, 0], [0, 4]])
    dense = SparseConvTensor(features, sites, [4], 1).dense()
    assert dense.tolist() == [[[0, 0, 1, 0]]]
    dense.sum().backward()
    assert features.grad is not None
    assert features.grad.flatten().tolist() == [1, 0, 0, 0, 0]


def test_features_are_replaced_not_assigned():
    x = sparse([4], 2)
    with pytest.raises(ValueError, match="replace_feature"):
        x.features = x.features  # type: ignore[misc]
    y = x.replace_feature(x.features[:, :1])
    assert y.indices is x.indices
    assert y.indice_dict is x.indice_dict
    assert y.features.shape[1] == 1
    assert x.features.shape[1] == 2
    assert x.shadow_copy().features is x.features


def test_sparse_tensors_add():
    x = sparse([4], 2)
    torch.testing.assert_close((x + x).features, 2 * x.features)
    torch.testing.assert_close((x + x.features).features, 2 * x.features)
    torch.testing.assert_close(x.minus().features, -x.features)


def test_a_numpy_shape_and_a_tensor_batch_size_are_read():
    numpy = pytest.importorskip("numpy")
    x = SparseConvTensor(torch.zeros(1, 1), torch.zeros(1, 4).int(), numpy.array([4, 5, 6]), torch.tensor(2))  # type: ignore[arg-type]
    assert (x.spatial_shape, x.batch_size) == ([4, 5, 6], 2)
    assert all(type(size) is int for size in x.spatial_shape)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"features": torch.zeros(2, 3, 4)}, ValueError, r"features must have shape \[N, C\], got \[2, 3, 4\]"),
        ({"features": [[1.0]]}, TypeError, "features must be a Tensor, got list"),
        ({"indices": torch.zeros(2, 4)}, TypeError, "indices must be int32 or int64, got float32"),
        ({"indices": torch.zeros(2, 7).int()}, ValueError, "D from 1 to 4"),
        ({"indices": torch.zeros(3, 4).int()}, ValueError, "one row a site, got 2 and 3"),
        ({"spatial_shape": [4, 4]}, ValueError, r"spatial_shape must have 3 entries.*got \[4, 4\]$"),
        ({"spatial_shape": [4] * 4}, ValueError, r"got \[4, 4, 4, 4\]; is the column of the batch element missing"),
        ({"spatial_shape": [4, 0, 4]}, ValueError, "at least 1 on every axis"),
        ({"batch_size": 0}, ValueError, "batch_size must be at least 1, got 0"),
    ],
)
def test_a_malformed_tensor_is_refused(change, error, message):
    good = {
        "features": torch.zeros(2, 3),
        "indices": torch.zeros(2, 4).int(),
        "spatial_shape": [4, 4, 4],
        "batch_size": 1,
    }
    SparseConvTensor(**good)  # type: ignore[arg-type]
    with pytest.raises(error, match=message):
        SparseConvTensor(**{**good, **change})


# ---------------------------------------------------------------- indice_key


def test_layers_with_one_key_share_one_rulebook(monkeypatch):
    built = []
    original = tnn.sparse_conv.sparse_conv  # counts what the convolutions read
    monkeypatch.setattr("triops.nn.sparse_conv.sparse_conv", lambda *args: built.append(args[2]) or original(*args))
    net = SparseSequential(*(layer("SubMConv", 3, 3, 3, 3, indice_key="subm") for _ in range(3)))
    x = sparse([6, 6, 6], 3)
    y = net(x)
    assert built[0] is built[1] is built[2]
    assert list(y.indice_dict) == ["subm"]
    assert x.indice_dict == {}, "a layer leaves its input as it was"
    known = y.find_indice_pair("subm")
    assert known is not None
    assert (known.is_subm, known.ksize, known.spatial_shape) == (True, [3, 3, 3], [6, 6, 6])
    assert y.find_indice_pair(None) is None
    assert y.find_indice_pair("other") is None


def test_a_second_batch_on_the_same_sites_may_bring_the_rulebooks_along():
    conv = layer("SparseConv", 3, 3, 4, 3, 2, indice_key="down")
    x = sparse([6, 6, 6], 3)
    first = conv(x)
    again = conv(SparseConvTensor(x.features, x.indices, x.spatial_shape, 2, indice_dict=first.indice_dict))
    assert again.indices is first.indices
    torch.testing.assert_close(again.features, first.features)


def test_branches_may_use_one_key_for_other_sites():
    x = sparse([6, 6, 6], 3)
    for shift in (1, 2):
        layer("SubMConv", 3, 3, 3, 3, indice_key="a")(tnn.SparseMaxPool3d(2, shift)(x))


@pytest.mark.parametrize(
    ("second", "message"),
    [
        (lambda: tnn.SubMConv3d(3, 3, 5, indice_key="a"), r"kernel_size \[3, 3, 3\], and here it is \[5, 5, 5\]"),
        (lambda: tnn.SubMConv3d(3, 3, 3, dilation=2, indice_key="a"), "dilation"),
        (lambda: tnn.SparseConv3d(3, 3, 3, indice_key="a"), "subm True, and here it is False"),
        (lambda: tnn.SparseInverseConv3d(3, 3, 3, "a"), "submanifold layer, which has no inverse"),
        (lambda: tnn.SparseInverseConv3d(3, 3, 3, "b"), "no layer before.*'b'.*known keys: 'a'"),
        (lambda: tnn.SparseInverseConv3d(3, 3, 3, None), "no layer before.*None"),
        (
            lambda: SparseSequential(tnn.SparseMaxPool3d(2), tnn.SubMConv3d(3, 3, 3, indice_key="a")),
            r"spatial_shape \[6, 6, 6\], and here it is \[3, 3, 3\]",
        ),
    ],
)
def test_a_key_that_does_not_fit_says_what_differs(second, message):
    x = tnn.SubMConv3d(3, 3, 3, indice_key="a").double()(sparse([6, 6, 6], 3))
    with pytest.raises(ValueError, match=message):
        second().double()(x)


def test_an_inverse_needs_the_kernel_and_the_sites_of_its_key():
    down = layer("SparseConv", 3, 3, 3, 3, 2, indice_key="down")(sparse([7, 7, 7], 3))
    with pytest.raises(ValueError, match=r"SparseInverseConv3d: indice_key .down..*kernel_size"):
        layer("SparseInverseConv", 3, 3, 3, 2, "down")(down)
    with pytest.raises(ValueError, match="spatial_shape"):
        layer("SparseInverseConv", 3, 3, 3, 3, "down")(tnn.SparseMaxPool3d(2)(down))
    fewer = down.replace_feature(down.features[1:])
    fewer.indices = down.indices[1:]
    with pytest.raises(ValueError, match="number of sites"):
        layer("SparseInverseConv", 3, 3, 3, 3, "down")(fewer)


# ---------------------------------------------------------------- wrong use


def test_wrong_inputs_are_named():
    conv = tnn.SubMConv3d(3, 4, 3)
    with pytest.raises(TypeError, match=r"SubMConv3d: input must be a SparseConvTensor, got a dense tensor of shape"):
        conv(torch.zeros(1, 3, 4, 4, 4))
    with pytest.raises(TypeError, match="got NoneType"):
        conv(None)
    with pytest.raises(ValueError, match="must have 3 channels, got 5"):
        conv(sparse([4, 4, 4], 5))
    with pytest.raises(ValueError, match=r"3 spatial dimensions, got 2 \(spatial_shape \[4, 4\]\)"):
        conv(sparse([4, 4], 3))
    with pytest.raises(TypeError, match="SparseMaxPool2d"):
        tnn.SparseMaxPool2d(2)(torch.zeros(1, 3, 4, 4))
    x = sparse([4, 4, 4], 3)
    with pytest.raises(ValueError, match="one row of features a site"):
        conv(x.replace_feature(x.features[1:]))
    with pytest.raises(TypeError, match="dtype"):
        conv(x)  # float64 features, float32 weights


def test_errors_carry_the_name_of_the_layer():
    net = SparseSequential(conv=tnn.SubMConv3d(3, 4, 3))
    tnn.assign_name_for_sparse_modules(net)
    with pytest.raises(ValueError, match="SubMConv3d 'conv': input must have 3 channels"):
        net(sparse([4, 4, 4], 5))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: tnn.SubMConv3d(4, 4, 3, groups=2), "groups must be 1, got 2"),
        (lambda: tnn.SubMConv3d(4, 4, 2), r"odd kernel_size.*\[2, 2, 2\]"),
        (lambda: tnn.SubMConv3d(4, 4, 3, stride=2), "stride 1"),
        (lambda: tnn.SparseConv3d(4, 4, [3, 3]), r"kernel_size must be an integer or 3 integers, got \[3, 3\]"),
        (lambda: tnn.SparseConv3d(4, 4, 3, stride=0), "stride must be at least 1"),
        (lambda: tnn.SparseConv3d(4, 4, 3, padding=-1), "padding must be at least 0"),
        (lambda: tnn.SparseConv3d(0, 4, 3), "in_channels must be at least 1"),
        (lambda: tnn.SparseConvTranspose3d(4, 4, 3, output_padding=1), "output_padding must be smaller"),
        (lambda: tnn.SparseConvolution(3, 4, 4, subm=True, inverse=True), "at most one"),
        (lambda: tnn.SparseMaxPool3d(0), "kernel_size must be at least 1"),
    ],
)
def test_impossible_layers_are_refused_when_they_are_made(make, message):
    with pytest.raises(ValueError, match=message):
        make()


# ---------------------------------------------------------------- containers and tables


def test_sequential_names_its_modules_as_given():
    by_number = SparseSequential(tnn.SubMConv3d(2, 4, 3, bias=False), nn.BatchNorm1d(4))
    assert list(by_number.state_dict())[:2] == ["0.weight", "1.weight"]
    by_dict = SparseSequential(OrderedDict(conv=tnn.SubMConv3d(2, 4, 3), act=nn.ReLU()))
    assert list(by_dict.state_dict()) == ["conv.weight", "conv.bias"]
    by_keyword = SparseSequential(nn.ReLU(), conv=tnn.SubMConv3d(2, 4, 3))
    by_keyword.add(nn.ReLU())
    assert list(by_keyword._modules) == ["0", "conv", "2"]
    assert len(by_keyword) == 3
    assert by_keyword[1] is by_keyword.conv
    assert by_keyword[-1] is list(by_keyword)[2]
    assert list(by_keyword[:2]._modules) == ["0", "conv"]
    with pytest.raises(ValueError, match="'conv' already"):
        by_keyword.add(nn.ReLU(), "conv")
    with pytest.raises(IndexError):
        by_keyword[3]


def test_sequential_gives_dense_modules_the_features_and_goes_on_densely():
    x = sparse([4, 4, 4], 2)
    net = SparseSequential(nn.Linear(2, 5), nn.ReLU(), tnn.ToDense(), nn.Flatten(), nn.Linear(5 * 64, 1)).double()
    relu = F.relu(net[0](x.features))
    assert torch.equal(net[:3](x), x.replace_feature(relu).dense())
    assert net(x).shape == (2, 1)


def test_tables():
    x = sparse([4, 4, 4], 3)
    branches = tnn.ConcatTable().add(tnn.Identity()).add(layer("SubMConv", 3, 3, 3, 3, indice_key="subm"))
    outputs = branches(x)
    assert outputs[0] is x
    added = tnn.AddTable()(outputs)
    torch.testing.assert_close(added.features, x.features + outputs[1].features)
    assert list(added.indice_dict) == ["subm"], "rulebooks of all branches stay known"
    joined = tnn.JoinTable()([x, outputs[1].replace_feature(outputs[1].features[:, :2])])
    assert torch.equal(joined.features, torch.cat([x.features, outputs[1].features[:, :2]], 1))
    with pytest.raises(ValueError, match="AddTable: inputs must have the same sites, got number of channels 3 and 2"):
        tnn.AddTable()([x, x.replace_feature(x.features[:, :2])])
    with pytest.raises(ValueError, match="spatial_shape"):
        tnn.JoinTable()([x, sparse([5, 4, 4], 3)])
    with pytest.raises(TypeError, match="list of SparseConvTensors"):
        tnn.AddTable()(x)


def test_remove_grid_and_sparse_forms_of_dense_layers():
    x = sparse([4, 4, 4], 3)
    x.grid = torch.zeros(1)
    assert tnn.RemoveGrid()(x).grid is None
    assert torch.equal(tnn.SparseReLU()(x).features, F.relu(x.features))
    norm = tnn.SparseBatchNorm(3).double()
    assert torch.equal(norm(x).features, copy.deepcopy(norm)(x.features))
    assert tnn.SparseIdentity()(x) is x
    assert all(map(tnn.is_spconv_module, (norm, tnn.SparseReLU(), tnn.Identity(), tnn.SubMConv3d(1, 1, 1))))
    assert not tnn.is_spconv_module(nn.ReLU())


# ---------------------------------------------------------------- nothing there


def network() -> SparseSequential:
    torch.manual_seed(3)
    return SparseSequential(
        tnn.SubMConv3d(4, 8, 3, bias=False, indice_key="subm1"),
        nn.BatchNorm1d(8),
        nn.ReLU(),
        tnn.SparseConv3d(8, 16, 3, 2, indice_key="down"),
        nn.BatchNorm1d(16),
        nn.ReLU(),
        tnn.SubMConv3d(16, 16, 3, indice_key="subm2"),
        tnn.SparseInverseConv3d(16, 8, 3, "down"),
        tnn.SparseBatchNorm(8),
        tnn.SparseReLU(),
    )


@pytest.mark.parametrize("training", [True, False])
def test_a_network_whose_points_all_vanish_gives_an_empty_tensor(training):
    # Extent 6, kernel 3, stride 2: windows start at 0 and 2, so nothing reads the last plane.
    x = SparseConvTensor(torch.ones(2, 4), torch.tensor([[0, 5, 1, 1], [0, 5, 3, 2]]), [6, 6, 6], 1)
    net = network().train(training)
    down = net[:7](x)
    assert down.features.shape == (0, 16)
    assert down.indices.shape == (0, 4)
    assert down.spatial_shape == [2, 2, 2]
    assert down.dense().shape == (1, 16, 2, 2, 2)
    y = net(x)
    assert y.features.shape == (2, 8)
    y.features.sum().backward()
    assert all(parameter.grad is not None for parameter in net.parameters())
    assert all(buffer.isfinite().all() for buffer in net.buffers())


def test_no_input_sites_are_fine_everywhere():
    x = SparseConvTensor(torch.zeros(0, 4, requires_grad=True), torch.zeros(0, 4, dtype=torch.int32), [9, 9, 9], 2)
    y = network()(x)
    assert y.features.shape == (0, 8)
    assert tnn.SparseMaxPool3d(2)(y).features.shape == (0, 8)
    assert tnn.SparseConvTranspose3d(8, 2, 3, 2)(y).features.shape == (0, 2)
    for pool in (tnn.SparseGlobalMaxPool(), tnn.SparseGlobalAvgPool()):
        assert pool(y).tolist() == [[0.0] * 8] * 2
    y.dense().sum().backward()


# ---------------------------------------------------------------- torch's tools


def test_parameters_are_laid_out_and_initialised_as_in_spconv():
    conv = tnn.SparseConv3d(16, 32, [3, 1, 5])
    assert list(conv.state_dict()) == ["weight", "bias"]
    assert conv.weight.shape == (32, 3, 1, 5, 16)
    bound = (16 * 15) ** -0.5  # kaiming_uniform with a = sqrt(5)
    for parameter in conv.parameters():
        assert bound * 0.8 < parameter.abs().max() <= bound * (1 + 1e-6)
    assert tnn.SubMConv3d(2, 3, 3, bias=False).bias is None
    half = tnn.SparseConvolution(3, 2, 3, dtype=torch.bfloat16)
    assert half.weight.dtype == half.bias.dtype == torch.bfloat16


def test_kernel_first_weights_give_the_same_answer():
    class SubMConv3d(tnn.KernelFirstWeight, tnn.SubMConv3d):
        pass

    x = sparse([5, 5, 5], 3)
    ours, theirs = layer("SubMConv", 3, 3, 4, 3), SubMConv3d(3, 4, 3).double()
    assert theirs.weight.shape == (3, 3, 3, 3, 4)
    theirs.load_state_dict({"weight": ours.weight.detach().permute(1, 2, 3, 4, 0), "bias": ours.bias})
    torch.testing.assert_close(theirs(x).features, ours(x).features)
    theirs(x).features.sum().backward()
    assert theirs.weight.grad is not None


def test_the_largest_number_of_sites_is_recorded_on_request():
    pool, x = tnn.SparseMaxPool3d(2, record_voxel_count=True), sparse([6, 6, 6], 1)
    sites = len(pool(x).indices)
    pool(sparse([6, 6, 6], 1, share=0.02))
    count = pool.get_max_num_voxels()
    assert count is not None
    assert count.tolist() == [sites]
    assert "max_num_voxels_during_training" in pool.state_dict()
    pool.load_state_dict({})  # a checkpoint without the count
    assert pool.get_max_num_voxels().tolist() == [0]
    assert tnn.SparseConv3d(1, 1, 3).get_max_num_voxels() is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_runs_convolutions_in_its_dtype(dtype):
    net, x = network(), sparse([7, 7, 7], 4)
    x = x.replace_feature(x.features.detach().float())
    expected = net(x).features
    with torch.autocast("cpu", dtype=dtype):
        half = tnn.SubMConv3d(4, 8, 3)(x)
        pointwise = tnn.SubMConv3d(4, 8, 1)(x)
        y = net(x)
    assert half.features.dtype == pointwise.features.dtype == dtype
    assert (y.features - expected).abs().max() < 0.1 * expected.abs().max()
    y.features.float().sum().backward()
    assert all(parameter.grad is not None and parameter.grad.dtype == torch.float32 for parameter in net.parameters())


@pytest.mark.parametrize("kernel", [1, 3])
@pytest.mark.parametrize("kind", ["SubMConv", "SparseConv", "SparseConvTranspose"])
def test_autocast_leaves_layers_of_float64_alone(kind, kernel):
    conv, x = layer(kind, 3, 4, 8, kernel), sparse([5, 5, 5], 4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = conv(x).features
    assert inside.dtype == torch.float64
    assert torch.equal(inside, conv(x).features)


def test_add_input_is_added():
    conv, x = layer("SubMConv", 3, 3, 3, 3), sparse([4, 4, 4], 3)
    torch.testing.assert_close(conv(x, add_input=x).features, conv(x).features + x.features)


def test_features_of_other_sites_or_of_another_order_are_not_added_up():
    x = sparse([4, 4, 4], 3)
    order = torch.arange(len(x.indices)).flip(0)
    copied = SparseConvTensor(x.features, x.indices.clone(), x.spatial_shape, x.batch_size)
    turned = SparseConvTensor(x.features[order], x.indices[order], x.spatial_shape, x.batch_size)
    fewer = SparseConvTensor(x.features[1:], x.indices[1:], x.spatial_shape, x.batch_size)
    conv, point = layer("SubMConv", 3, 3, 3, 3), layer("SparseConv", 3, 3, 3, 1)
    merged = {
        "SparseConvTensor: tensors that are added": lambda y: x + y,
        "SubMConv3d: add_input": lambda y: conv(x, add_input=y),
        "SparseConv3d: add_input": lambda y: point(x, add_input=y),
        "AddTable: inputs": lambda y: tnn.AddTable()([x, y]),
        "JoinTable: inputs": lambda y: tnn.JoinTable()([x, y]),
    }
    for start, merge in merged.items():
        assert torch.equal(merge(copied).features, merge(x).features)
        for other in (turned, fewer):
            with pytest.raises(ValueError, match=f"^{start} .*must have the same sites"):
                merge(other)
        with torch.no_grad(), pytest.raises(ValueError, match=f"^{start} .*must have the same sites in the same order"):
            merge(turned)


def test_a_bias_that_alone_is_trained_gets_its_gradient():
    x = sparse([4, 4, 4], 3)
    x.features.requires_grad_(False)
    torch.manual_seed(0)
    conv = tnn.SubMConv3d(3, 5, 3).double()
    conv.act_type = tnn.Activation.ReLU  # as spconv's layers have it
    conv.weight.requires_grad_(False)
    conv(x).features.sum().backward()
    assert torch.equal(conv.bias.grad, (conv(x).features > 0).sum(0).double())


def test_layers_print_what_they_are():
    assert repr(tnn.SparseConv3d(4, 8, 3, [2, 2, 1], 1, bias=False, indice_key="d")) == (
        "SparseConv3d(4, 8, kernel_size=[3, 3, 3], stride=[2, 2, 1], padding=[1, 1, 1], indice_key='d', bias=False)"
    )
    assert repr(tnn.SparseMaxPool2d(2)) == "SparseMaxPool2d(kernel_size=[2, 2], stride=[2, 2])"


def test_networks_copy_and_save(tmp_path: Path):
    net, x = network().double().eval(), sparse([7, 7, 7], 4)
    torch.save(net.state_dict(), tmp_path / "net.pt")
    other = network().double().eval()
    other.load_state_dict(torch.load(tmp_path / "net.pt"))
    for twin in (other, copy.deepcopy(net)):
        assert torch.equal(twin(x).features, net(x).features)


def test_a_network_compiles_without_a_graph_break():
    """Forward, backward and running statistics, for several numbers of sites, down to none."""
    eager, compiled = network().double(), network().double()
    torch._dynamo.reset()

    def run(net: nn.Module, features: Tensor, indices: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y = net(SparseConvTensor(features, indices, [6, 6, 6], 2))
        return y.features, y.dense(), tnn.SparseGlobalMaxPool()(tnn.SparseMaxPool3d(2)(y))

    traced = torch.compile(lambda f, i: run(compiled, f, i), fullgraph=True, dynamic=True, backend="aot_eager")
    x = sparse([6, 6, 6], 4)
    vanishing = torch.tensor([[0, 5, 1, 1], [0, 5, 3, 2]], dtype=torch.int32)
    for sites in (x.indices, x.indices[:50], vanishing):
        features = torch.randn(len(sites), 4, dtype=torch.float64)
        ours, theirs = features.clone().requires_grad_(), features.clone().requires_grad_()
        got, expected = traced(ours, sites), run(eager, theirs, sites)
        for g, e in zip(got, expected, strict=True):
            torch.testing.assert_close(g, e, rtol=1e-9, atol=1e-9)
        for out in (got, expected):
            sum((o * o).sum() for o in out).backward()
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-7, atol=1e-9)
    for (name, g), e in zip(compiled.named_parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(g.grad, e.grad, rtol=1e-7, atol=1e-9, msg=name)
    for (name, g), e in zip(compiled.named_buffers(), eager.buffers(), strict=True):
        torch.testing.assert_close(g, e, rtol=1e-9, atol=1e-12, msg=name)


def test_a_compiled_network_takes_and_gives_sparse_tensors():
    net, x = network().double().eval(), sparse([6, 6, 6], 4)
    torch._dynamo.reset()
    y = torch.compile(net, fullgraph=True, backend="aot_eager")(x)
    torch.testing.assert_close(y.features, net(x).features)
    assert list(y.indice_dict) == ["subm1", "down", "subm2"]
    assert x.indice_dict == {}


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.backbone = network()[:7]
        self.head = SparseSequential(tnn.SparseGlobalAvgPool(), nn.Linear(16, 3))

    def forward(self, features: Tensor, indices: Tensor) -> Tensor:
        return self.head(self.backbone(SparseConvTensor(features, indices, [6, 6, 6], 2)))


def rank_input(rank: int, step: int) -> tuple[Tensor, Tensor]:
    """In the second step all points of rank 1 vanish at the strided layer."""
    if (rank, step) == (1, 1):
        indices = torch.tensor([[0, 5, 1, 1], [0, 5, 3, 2]], dtype=torch.int32)
    else:
        indices = sparse([6, 6, 6], 1, seed=2 * rank + step).indices
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(len(indices), 4, generator=generator), indices


def train_on_rank(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    model = nn.parallel.DistributedDataParallel(Classifier(), broadcast_buffers=False)
    for step in range(2):
        model(*rank_input(rank, step)).square().sum().backward()
    torch.save([parameter.grad for parameter in model.parameters()], f"{folder}/{rank}.pt")
    torch.distributed.destroy_process_group()


@pytest.mark.full
@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without torch.distributed")
def test_two_processes_share_gradients(tmp_path: Path):
    """The gradients of DistributedDataParallel are the mean of each process's own, also when one has no points left."""
    torch.multiprocessing.spawn(train_on_rank, (str(tmp_path),), nprocs=2)
    own = []
    for rank in range(2):
        model = Classifier()
        for step in range(2):
            model(*rank_input(rank, step)).square().sum().backward()
        own.append([parameter.grad for parameter in model.parameters()])
    for rank in range(2):
        for shared, *grads in zip(torch.load(tmp_path / f"{rank}.pt"), *own, strict=True):
            torch.testing.assert_close(shared, (grads[0] + grads[1]) / 2, rtol=1e-4, atol=1e-5)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_network_gives_the_same_on_a_gpu():
    x = sparse([9, 9, 9], 4)
    net = network().double()
    expected = net(x)
    there = copy.deepcopy(net).cuda()(SparseConvTensor(x.features.cuda(), x.indices.cuda(), [9, 9, 9], 2))
    torch.testing.assert_close(there.features.cpu(), expected.features, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(there.dense().cpu(), expected.dense(), rtol=1e-6, atol=1e-6)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_submanifold_blocks_with_a_known_rulebook_are_captured_in_a_cuda_graph():
    torch.manual_seed(0)
    net = SparseSequential(
        tnn.SubMConv3d(4, 16, 3, indice_key="a"), nn.ReLU(), tnn.SubMConv3d(16, 16, 3, indice_key="a")
    ).cuda()
    sites = sparse([12, 12, 12], 1).indices.cuda()
    features = torch.randn(len(sites), 4, device="cuda")

    def run(indice_dict: dict[str, Any]) -> SparseConvTensor:
        return net(SparseConvTensor(features, sites, [12, 12, 12], 2, indice_dict=indice_dict))

    with torch.no_grad():
        known = run({}).indice_dict
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = run(known).features
        features.copy_(torch.randn_like(features))
        graph.replay()
        torch.testing.assert_close(captured, run({}).features, rtol=1e-4, atol=1e-5)


# ---------------------------------------------------------------- what the documentation says

ROOT = Path(__file__).parents[1]


def test_the_examples_of_the_documentation_run():
    text = (ROOT / "docs" / "sparse.md").read_text(encoding="utf-8")
    code = "\n".join(block.split("```")[0] for block in text.split("```python\n")[1:])
    torch._dynamo.reset()
    exec(compile(code, "docs/sparse.md", "exec"), {"__name__": "docs"})


@pytest.mark.full
def test_the_example_learns_in_a_few_steps():
    example = runpy.run_path(str(ROOT / "examples" / "train_sparse_shapes.py"))
    assert example["main"](["--steps", "60", "--batch", "16", "--test-batches", "2", "--device", "cpu"]) > 0.6


def unordered_tensor(channels: int = 4) -> SparseConvTensor:
    sites = random_sites(60, 2, [5, 6, 7])  # in random order
    return SparseConvTensor(torch.randn(60, channels), sites, [5, 6, 7], 2)


def test_a_kernel_of_one_offset_keeps_the_sites_and_their_order():
    x = unordered_tensor()
    for layer in (SubMConv3d(4, 8, 1), SparseConv3d(4, 8, 1), SparseConvTranspose3d(4, 8, 1)):
        assert layer(x).indices is x.indices
    keyed = SparseConv3d(4, 8, 1, indice_key="down")
    back = SparseInverseConv3d(8, 3, 1, "down")(keyed(x))
    assert torch.equal(back.indices, x.indices)
    expected = keyed(x).features @ SparseInverseConv3d(8, 3, 1, "down").weight.flatten(1).t()
    assert back.features.shape == expected.shape
    assert not torch.equal(SparseConv3d(4, 8, 1, stride=2)(x).indices[:3], x.indices[:3])


def test_a_key_whose_sites_come_in_another_order_is_looked_up_anew():
    first, last = SubMConv3d(4, 4, 3, indice_key="a"), SubMConv3d(4, 4, 3, indice_key="a")
    x = first(unordered_tensor())
    order = torch.randperm(60)
    shuffled = SparseConvTensor(x.features[order], x.indices[order], x.spatial_shape, x.batch_size)
    shuffled.indice_dict = x.indice_dict
    torch.testing.assert_close(last(shuffled).features, last(x).features[order])


def test_the_way_back_from_other_sites_is_refused():
    x = SparseConv3d(4, 4, 3, 2, 1, indice_key="down")(unordered_tensor())
    order = torch.randperm(len(x.indices))
    shuffled = x._with(x.features[order], x.indices[order], x.spatial_shape, x.indice_dict)
    with pytest.raises(ValueError, match="leads back from other sites"):
        SparseInverseConv3d(4, 4, 3, "down")(shuffled)
    copied = x._with(x.features, x.indices.clone(), x.spatial_shape, x.indice_dict)
    assert SparseInverseConv3d(4, 4, 3, "down")(copied).features.shape == (60, 4)


def test_layers_pass_prepared_rulebooks_on():
    x = unordered_tensor()
    x = SubMConv3d(4, 4, 3, indice_key="a")(x)
    first = x.indice_dict["a"].rulebook
    assert first.tables.pairs is not None
    x = SubMConv3d(4, 4, 3, indice_key="a")(x)
    assert x.indice_dict["a"].rulebook is first
    x = SparseConv3d(4, 4, 3, 2, 1, indice_key="down")(x)
    assert x.indice_dict["down"].rulebook.tables.transposed_pairs is not None
    with torch.no_grad():
        y = SparseConv3d(4, 4, 3, 2, 1, indice_key="quiet")(unordered_tensor())
    assert y.indice_dict["quiet"].rulebook.tables.transposed_pairs is None
