"""Facts about the supplied package `torchsparse`: by hand, and against loops over sites."""

from __future__ import annotations

import itertools
import math
import pickle
import subprocess
import sys
import warnings

import numpy as np
import pytest
import torch
from torch import nn

import triops.compat.torchsparse as ts
from triops.compat.torchsparse import _generation
from triops.compat.torchsparse import nn as spnn
from triops.compat.torchsparse.backbones import SparseResNet21D, SparseResUNet42
from triops.compat.torchsparse.nn import functional as F
from triops.compat.torchsparse.nn.utils import get_kernel_offsets
from triops.compat.torchsparse.tensor import PointTensor, SparseTensor
from triops.compat.torchsparse.utils import tensor_cache
from triops.compat.torchsparse.utils.collate import sparse_collate, sparse_collate_fn
from triops.compat.torchsparse.utils.quantize import sparse_quantize

BOTH = pytest.mark.parametrize("version", ["1.4", "2.1"])


@pytest.fixture
def version():
    return "2.1"


@pytest.fixture(autouse=True)
def generation(version, monkeypatch):
    """Every test says which torchsparse its tensors are of, and leaves nothing behind."""
    monkeypatch.setattr(_generation, "_said", version)
    monkeypatch.setattr(_generation, "_old_names_asked", False)
    monkeypatch.setattr(_generation, "_looked", True)
    return version


def cloud(count=60, size=6, batches=2, channels=3, seed=0, dtype=torch.float64, low=0):
    """Sites (batch, x, y, z) in a random order, and their features."""
    g = torch.Generator().manual_seed(seed)
    place = torch.randint(low, size, (count, 3), generator=g)
    sites = torch.cat([torch.randint(0, batches, (count, 1), generator=g), place], 1).unique(dim=0).int()
    sites = sites[torch.randperm(len(sites), generator=g)]
    return sites, torch.randn(len(sites), channels, generator=g, dtype=dtype, requires_grad=True)


def tensor(sites, feats, version, stride=1, **more):
    """Sites as batch, x, y, z in strides, in the columns and the unit of the version."""
    if version == "2.1":
        return SparseTensor(feats, sites, stride, **more)
    scaled = sites * torch.tensor([1, *[stride] * 3], dtype=torch.int32)
    return SparseTensor(feats, scaled[:, [1, 2, 3, 0]].contiguous(), stride)


def places(x):
    """Of a tensor: (batch, x, y, z) in strides, as a list."""
    coords = x.coords if x.generation == "2.1" else x.coords[:, [3, 0, 1, 2]]
    unit = [1, 1, 1] if x.generation == "2.1" else x.stride
    return [(b, *(v // s for v, s in zip(place, unit, strict=True))) for b, *place in coords.tolist()]


def offsets_of_weights(first, kernel):
    """The offset of each row of a weight: x goes fastest where their number is odd, z where it is even."""
    ranges = [range(f, f + k) for f, k in zip(first, kernel, strict=True)]
    if math.prod(kernel) % 2:
        return [(x, y, z) for z in ranges[2] for y in ranges[1] for x in ranges[0]]
    return [(x, y, z) for x in ranges[0] for y in ranges[1] for z in ranges[2]]


def convolution_by_loop(sites, feats, outputs, weight, offsets, stride=(1, 1, 1)):
    """Every output meets the input at its place times the stride plus an offset."""
    row = {}
    for number, site in enumerate(sites):
        row.setdefault(site, number)
    found = []
    for b, *place in outputs:
        total = feats.new_zeros(weight.shape[2])
        for matrix, offset in zip(weight, offsets, strict=True):
            at = (b, *(p * s + d for p, s, d in zip(place, stride, offset, strict=True)))
            if at in row:
                total = total + feats[row[at]] @ matrix
        found.append(total)
    return torch.stack(found)


def assert_same_with_gradients(got, expected, *inputs):
    torch.testing.assert_close(got, expected)
    weights = torch.randn(got.shape, generator=torch.Generator().manual_seed(9), dtype=got.dtype)
    mine = torch.autograd.grad((got * weights).sum(), inputs, retain_graph=True)
    theirs = torch.autograd.grad((expected * weights).sum(), inputs, retain_graph=True)
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a, b)


def center(kernel):
    return tuple(-((k - 1) // 2) for k in kernel)


def test_kernels_of_odd_volume_have_x_fastest_and_others_z():
    assert get_kernel_offsets(3)[:4].tolist() == [[-1, -1, -1], [0, -1, -1], [1, -1, -1], [-1, 0, -1]]
    assert get_kernel_offsets(2, stride=4)[:3].tolist() == [[0, 0, 0], [0, 0, 4], [0, 4, 0]]
    assert get_kernel_offsets((3, 1, 2))[:3].tolist() == [[-1, 0, 0], [-1, 0, 1], [0, 0, 0]]
    assert get_kernel_offsets(4)[-1].tolist() == [2, 2, 2]
    assert get_kernel_offsets(3, 2, 2)[0].tolist() == [-4, -4, -4]
    for kernel in [(3, 3, 3), (2, 3, 4), (1, 5, 3)]:
        expected = offsets_of_weights(center(kernel), kernel)
        assert [tuple(row) for row in get_kernel_offsets(kernel).tolist()] == expected


def hash_by_hand(row):
    key = 14695981039346656037
    for value in row:
        key = ((key ^ (value % 2**32)) * 1099511628211) % 2**64
    return (key >> 60) ^ (key % 2**60)


def test_a_hash_is_fnv_of_the_columns_folded_to_60_bits():
    rows = torch.tensor([[0, 0, 0, 0], [1, -2, 3, 4], [2**31 - 1, -(2**31), 7, 0]], dtype=torch.int32)
    assert F.sphash(rows).tolist() == [hash_by_hand(row) for row in rows.tolist()]
    offsets = torch.tensor([[0, 0, 0], [1, 2, -3]], dtype=torch.int32)
    moved = [
        [hash_by_hand([a + x, b + y, c + z, d]) for a, b, c, d in rows[:2].tolist()] for x, y, z in offsets.tolist()
    ]
    assert F.sphash(rows[:2], offsets).tolist() == moved
    with pytest.raises(ValueError, match="coords must be int32"):
        F.sphash(rows.long())
    with pytest.raises(ValueError, match="offsets must be int32"):
        F.sphash(rows, offsets.long())


def test_a_query_finds_the_first_of_equal_references():
    assert F.sphashquery(torch.tensor([[5, 9], [7, 6]]), torch.tensor([7, 5, 7])).tolist() == [[1, -1], [0, -1]]
    assert F.sphashquery(torch.tensor([5]), torch.tensor([], dtype=torch.int64)).tolist() == [-1]
    assert ts.backend.hash_query_cpu(torch.tensor([5, 6]), torch.tensor([7, 5]), torch.tensor([10, 20])).tolist() == [
        21,
        0,
    ]


def test_voxels_are_means_of_their_points_and_share_the_gradient():
    feats = torch.tensor([[1.0, 2], [3, 4], [10, 20], [7, 7]], requires_grad=True)
    index = torch.tensor([2, 2, 0, -1])
    counts = F.spcount(index.int(), 3)
    assert counts.tolist() == [1, 0, 2]
    assert counts.dtype == torch.int32
    made = F.spvoxelize(feats, index, counts)
    assert made.tolist() == [[10, 20], [0, 0], [2, 3]]
    made.backward(torch.tensor([[1.0, 1], [5, 5], [4, 8]]))
    assert feats.grad.tolist() == [[2, 4], [2, 4], [1, 1], [0, 0]]
    grad = ts.backend.voxelize_backward_cpu(torch.tensor([[1.0, 1], [5, 5], [4, 8]]), index, counts, 4)
    assert torch.equal(grad, feats.grad)
    double = feats.detach().double().requires_grad_()
    assert torch.autograd.gradcheck(lambda f: F.spvoxelize(f, index, counts), double)
    assert F.spvoxelize(torch.full((3000, 1), 0.1).half(), torch.zeros(3000), torch.tensor([3000]))[0].item() == (
        pytest.approx(0.1, abs=1e-4)
    )


def test_points_between_voxels_take_weighted_sums():
    feats = torch.tensor([[1.0], [10.0]], requires_grad=True)
    rows = torch.tensor([[0, 1, -1, -1, -1, -1, -1, 0], [-1] * 8])
    weights = torch.tensor([[0.5, 0.25, 9, 9, 9, 9, 9, 0.25], [1.0] * 8])
    made = F.spdevoxelize(feats, rows, weights)
    assert made.tolist() == [[3.25], [0]]
    made.sum().backward()
    assert feats.grad.tolist() == [[0.75], [0.25]]
    assert torch.equal(ts.backend.devoxelize_backward_cpu(torch.ones(2, 1), rows.int(), weights, 2), feats.grad)
    double = feats.detach().double().requires_grad_()
    assert torch.autograd.gradcheck(lambda f: F.spdevoxelize(f, rows, weights), double)


def test_trilinear_weights_lie_as_their_rows_do():
    """The corners of a voxel, z fastest: of [8, N] in 1.4, of [N, 8] in 2.1."""
    points = torch.tensor([[4.5, 2.0, 0.0, 1.0], [1.0, 1.5, 0.5, 0.0]])
    rows = torch.zeros(2, 8, dtype=torch.int64)
    weights = F.calc_ti_weights(points, rows, scale=2)
    # x is a quarter of the way from 4 to 6; y and z are at the voxel's corner
    torch.testing.assert_close(weights[0], torch.tensor([0.75, 0, 0, 0, 0.25, 0, 0, 0]))
    # half in x, three quarters in y, a quarter in z
    expected = [a * b * c for a in (0.5, 0.5) for b in (0.25, 0.75) for c in (0.75, 0.25)]
    torch.testing.assert_close(weights[1], torch.tensor(expected))
    torch.testing.assert_close(F.calc_ti_weights(points, rows.T.contiguous(), scale=2), weights.T)
    rows[1, 4:] = -1
    kept = F.calc_ti_weights(points[:, :3], rows, scale=2)
    torch.testing.assert_close(kept[1], torch.tensor([2 * w for w in expected[:4]] + [0.0] * 4))
    with pytest.raises(ValueError, match="idx_query must have shape"):
        F.calc_ti_weights(points, rows[:, :7])


@pytest.mark.parametrize("kernel", [(3, 3, 3), (1, 3, 5), (3, 1, 1)])
@pytest.mark.parametrize("stride", [1, 2])
@BOTH
def test_a_submanifold_convolution_is_a_loop(version, stride, kernel):
    sites, feats = cloud(low=-2)
    layer = spnn.Conv3d(3, 4, kernel, bias=True).double()
    x = tensor(sites, feats, version, stride)
    made = layer(x)
    assert made.stride == x.stride
    assert torch.equal(made.coords, x.coords)
    where = places(x)
    offsets = offsets_of_weights(center(kernel), kernel)
    expected = convolution_by_loop(where, feats, where, layer.kernel, offsets) + layer.bias
    assert_same_with_gradients(made.feats, expected, feats, layer.kernel, layer.bias)


@BOTH
def test_an_even_submanifold_kernel_begins_where_that_torchsparse_has_it(version):
    """In 2.1 at the site itself, in 1.4 and in 2.1 with kmap_mode "hashmap" one before it."""
    sites, feats = cloud()
    weight = torch.randn(64, 3, 2, dtype=torch.float64)
    where = places(tensor(sites, feats, version))
    centered = convolution_by_loop(where, feats, where, weight, offsets_of_weights((-1,) * 3, (4,) * 3))
    ahead = convolution_by_loop(where, feats, where, weight, offsets_of_weights((0,) * 3, (4,) * 3))
    made = F.conv3d(tensor(sites, feats, version), weight, 4).feats
    torch.testing.assert_close(made, centered if version == "1.4" else ahead)
    if version == "2.1":
        config = F.conv_config.get_default_conv_config().copy()
        config.kmap_mode = "hashmap"
        torch.testing.assert_close(F.conv3d(tensor(sites, feats, version), weight, 4, config=config).feats, centered)


@pytest.mark.parametrize(
    ("kernel", "stride", "padding"),
    [
        ((3, 3, 3), (2, 2, 2), (1, 1, 1)), ((3, 3, 3), (2, 2, 2), (0, 0, 0)), ((2, 2, 2), (2, 2, 2), (0, 0, 0)),
        ((1, 3, 1), (1, 2, 1), (0, 0, 0)), ((3, 2, 1), (2, 1, 1), (1, 0, 0)), ((1, 1, 1), (2, 2, 2), (0, 0, 0)),
        ((5, 3, 3), (3, 3, 3), (2, 0, 1)),
    ],
)  # fmt: skip
def test_a_strided_convolution_of_2_1_is_a_dense_one_at_the_sites_it_reaches(kernel, stride, padding):
    sites, feats = cloud(size=7)
    spatial_range = (2, 8, 8, 8)
    layer = spnn.Conv3d(3, 4, kernel, stride, padding=padding).double()
    made = layer(SparseTensor(feats, sites, spatial_range=spatial_range))
    b, *place = sites.long().T
    dense = torch.zeros(2, 3, 8, 8, 8, dtype=torch.float64).index_put(
        (b[:, None], torch.arange(3), *(p[:, None] for p in place)), feats
    )
    shaped = layer.kernel.view(*kernel[::-1], 3, 4).permute(4, 3, 2, 1, 0)
    if math.prod(kernel) % 2 == 0:
        shaped = layer.kernel.view(*kernel, 3, 4).permute(4, 3, 0, 1, 2)
    expected = nn.functional.conv3d(dense, shaped, stride=stride, padding=layer.padding)
    reached = nn.functional.conv3d(
        (dense != 0).any(1, keepdim=True).double(), torch.ones(1, 1, *kernel).double(), stride=stride,
        padding=layer.padding,
    )  # fmt: skip
    assert made.spatial_range == (2, *expected.shape[2:])
    assert [list(p) for p in made.coords.tolist()] == (reached[:, 0] > 0.5).nonzero().tolist()
    at = tuple(made.coords.long().T)
    assert_same_with_gradients(made.feats, expected.movedim(1, -1)[at], feats, layer.kernel)
    assert torch.equal(made.dense()[at], made.feats)


def test_without_a_range_the_highest_site_bounds_the_outputs():
    """As in spconv: of sites 0..4 a kernel of 2 at stride 2 reaches 0 and 1, the site at 4 none."""
    sites = torch.tensor([[0, v, 0, 0] for v in (0, 3, 4)], dtype=torch.int32)
    layer = spnn.Conv3d(1, 1, (2, 1, 1), (2, 1, 1))
    nn.init.ones_(layer.kernel)
    made = layer(SparseTensor(torch.tensor([[1.0], [2], [4]]), sites))
    assert (made.coords[:, 1].tolist(), made.feats.flatten().tolist()) == ([0, 1], [1, 2])
    ranged = layer(SparseTensor(torch.tensor([[1.0], [2], [4]]), sites, spatial_range=(1, 6, 1, 1)))
    assert (ranged.coords[:, 1].tolist(), ranged.feats.flatten().tolist()) == ([0, 1, 2], [1, 2, 4])
    for mode in ("spconv", "minkowski"):
        layer._config = {"kmap_mode": "hashmap", "downsample_mode": mode}
        whole = layer(SparseTensor(torch.tensor([[1.0], [2], [4]]), sites))
        assert (whole.coords[:, 1].tolist(), whole.feats.flatten().tolist()) == ([0, 1, 2], [1, 2, 4])


@pytest.mark.parametrize("kernel", [(2, 2, 2), (3, 3, 3), (3, 1, 2)])
@pytest.mark.parametrize("scale", [1, 2])
@BOTH
def test_a_strided_convolution_by_cells_and_its_way_back_are_loops(version, scale, kernel):
    """In 1.4, and in 2.1 with kmap_mode "hashmap" and downsample_mode "minkowski"."""
    sites, feats = cloud(low=-3)
    config = {"kmap_mode": "hashmap", "downsample_mode": "minkowski"}
    stride = tuple(2 if k > 1 else 1 for k in kernel)
    down = spnn.Conv3d(3, 4, kernel, stride, config=config).double()
    up = spnn.Conv3d(4, 2, kernel, stride, transposed=True, bias=True).double()
    x = tensor(sites, feats, version, scale)
    made = down(x)
    assert made.stride == tuple(scale * s for s in stride)
    where, found = places(x), places(made)
    cells = sorted({(b, *(p // s for p, s in zip(place, stride, strict=True))) for b, *place in where})
    if version == "2.1" or kernel == (2, 2, 2):
        assert found == cells
    else:  # 1.4: what the kernel reaches, from the first site of every axis on
        lowest = [min(site[axis] for site in where) for axis in (1, 2, 3)]
        moved = _reached(where, kernel)
        kept = [m for m in moved if all(v % s == 0 and v >= lo for v, s, lo in zip(m[1:], stride, lowest, strict=True))]
        assert found == sorted((b, *(v // s for v, s in zip(place, stride, strict=True))) for b, *place in kept)
    offsets = offsets_of_weights(center(kernel), kernel)
    expected = convolution_by_loop(where, feats, found, down.kernel, offsets, stride)
    assert_same_with_gradients(made.feats, expected, feats, down.kernel)

    back = up(made)
    assert (back.stride, places(back)) == (x.stride, where)
    total = up.bias.expand(len(where), 2).clone()
    row = {site: number for number, site in enumerate(where)}
    for number, (b, *place) in enumerate(found):
        for matrix, offset in zip(up.kernel, offsets, strict=True):
            at = (b, *(p * s + d for p, s, d in zip(place, stride, offset, strict=True)))
            if at in row:
                total = total.index_add(0, torch.tensor([row[at]]), (expected[number] @ matrix)[None])
    assert_same_with_gradients(back.feats, total, feats, down.kernel, up.kernel, up.bias)


def _reached(where, kernel):
    """Every site plus every offset of a kernel."""
    around = list(itertools.product(*(range(f, f + k) for f, k in zip(center(kernel), kernel, strict=True))))
    return {(b, *(p + d for p, d in zip(place, offset, strict=True))) for offset in around for b, *place in where}


@BOTH
def test_sites_of_spdownsample_are_those_of_the_convolution(version):
    sites, feats = cloud(size=8)
    x = tensor(sites, feats, version, 2)
    for kernel, padding in ((2, 0), (3, 1)):
        config = {"kmap_mode": "hashmap"}
        made = spnn.Conv3d(3, 1, kernel, 2, padding=padding, config=config).double()(x)
        named = {"tensor_stride": 2} if version == "1.4" else {"padding": padding}
        assert torch.equal(F.spdownsample(x.coords, 2, kernel, **named), made.coords)
        assert torch.equal(F.spdownsample(x.coords, 2, kernel, *named.values()), made.coords)


def test_kernel_maps_are_kept_and_shared():
    sites, feats = cloud()
    x = tensor(sites, feats, "2.1")
    first, second = spnn.Conv3d(3, 3, 3).double(), spnn.Conv3d(3, 3, 3).double()
    y = second(spnn.ReLU()(first(x)))
    assert len(y.kmaps) == 1
    assert y.kmaps is x.kmaps
    assert y.cmaps[(1, 1, 1)][0] is x.coords
    spnn.Conv3d(3, 3, 3, 2, padding=1).double()(y)
    spnn.Conv3d(3, 3, 3, 2).double()(y)  # of another padding, and so another
    assert len(y.kmaps) == 3
    moved = y.to("cpu")
    assert len(moved.kmaps) == 3
    tensor_cache.set_tensor_cache_mode(tensor_cache.TensorCacheMode.GLOBAL_TENSOR_CACHE)
    try:
        assert tensor(sites, feats, "2.1")._caches is tensor(sites, feats, "2.1")._caches
    finally:
        tensor_cache.clear_global_tensor_cache()
        tensor_cache.set_tensor_cache_mode(tensor_cache.TensorCacheMode.SEPARATE_TENSOR_CACHE)


@BOTH
def test_a_way_back_that_nothing_came_is_refused(version):
    sites, feats = cloud()
    with pytest.raises(ValueError, match=r"came from stride \(1, 1, 1\) with kernel size \(2, 2, 2\)"):
        spnn.Conv3d(3, 3, 2, 2, transposed=True).double()(tensor(sites, feats, version, 2))


def test_a_generative_convolution_makes_the_sites_of_its_kernel():
    sites, feats = cloud(20, 3)
    layer = spnn.Conv3d(3, 2, 3, 2, padding=1, transposed=True, generative=True).double()
    made = layer(SparseTensor(feats, sites, 2, spatial_range=(2, 12, 12, 12)))
    last = (12 + 2 - 3) // 2  # as torchsparse has it: the range is that of a strided convolution
    doubled = [(b, *(2 * v for v in place)) for b, *place in sites.tolist()]
    assert places(made) == sorted(
        {(b, *(min(max(v, 0), last) for v in place)) for b, *place in _reached(doubled, (3,) * 3)}
    )
    expected = convolution_by_loop(doubled, feats, places(made), layer.kernel, offsets_of_weights((-1,) * 3, (3,) * 3))
    assert_same_with_gradients(made.feats, expected, feats, layer.kernel)
    assert made.stride == (1, 1, 1)
    with pytest.raises(ValueError, match="spatial_range must be given"):
        layer(SparseTensor(feats, sites, 2))
    with pytest.raises(ValueError, match="must be transposed"):
        spnn.Conv3d(3, 2, 3, 2, generative=True)


def test_gradcheck():
    sites, feats = cloud(8, 3, channels=2)
    weight = torch.randn(8, 2, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(
        lambda f, w: F.conv3d(SparseTensor(f, sites, spatial_range=(2, 4, 4, 4)), w, 2, stride=2).feats, (feats, weight)
    )


@BOTH
def test_a_kernel_of_one_is_a_matrix(version):
    sites, feats = cloud()
    layer = spnn.Conv3d(3, 4, 1, bias=True).double()
    assert layer.kernel.shape == (3, 4)
    made = layer(tensor(sites, feats, version))
    torch.testing.assert_close(made.feats, feats @ layer.kernel + layer.bias)
    with pytest.raises(ValueError, match=r"weight must have shape \[27, Cin, Cout\]"):
        F.conv3d(tensor(sites, feats, version), layer.kernel, 3)


def test_dilation_is_ignored_aloud(monkeypatch):
    from triops.compat.torchsparse.nn.functional.conv import conv

    monkeypatch.setattr(conv, "_warned", False)
    sites, feats = cloud()
    layer = spnn.Conv3d(3, 4, 3, dilation=2).double()
    with pytest.warns(RuntimeWarning, match="dilation is ignored"):
        made = layer(tensor(sites, feats, "2.1"))
    torch.testing.assert_close(made.feats, F.conv3d(tensor(sites, feats, "2.1"), layer.kernel, 3).feats)


def test_arguments_without_names_are_those_of_the_version_they_fit():
    old = spnn.Conv3d(4, 5, 2, 2, 1, False, True)  # dilation, bias, transposed
    assert (old.transposed, old.bias, old.dilation) == (True, None, 1)
    new = spnn.Conv3d(4, 5, 3, 2, 1, 1, True, True)  # padding, dilation, bias, transposed
    assert (new.transposed, new.padding) == (True, (1, 1, 1))
    assert new.bias is not None
    assert spnn.Conv3d(4, 5, 3, 1, 0).padding == (1, 1, 1)  # 2.1: a submanifold kernel is always padded
    ts.use("1.4")
    assert spnn.Conv3d(4, 5, 3, 2, 7).dilation == 7
    with pytest.raises(TypeError, match="several values for dilation"):
        spnn.Conv3d(4, 5, 3, 2, 1, dilation=1)
    with pytest.raises(TypeError, match="unexpected arguments groups"):
        spnn.Conv3d(4, 5, groups=2)


def test_weights_are_drawn_and_named_as_torchsparse_does():
    layer = spnn.Conv3d(6, 5, (3, 1, 3), 2, bias=True)
    assert {name: tuple(p.shape) for name, p in layer.named_parameters()} == {"kernel": (9, 6, 5), "bias": (5,)}
    bound = 1 / math.sqrt(6 * 9)
    assert 0.9 * bound < layer.kernel.abs().max() <= bound
    back = spnn.Conv3d(6, 5, 2, 2, transposed=True)
    assert 0.9 / math.sqrt(40) < back.kernel.abs().max() <= 1 / math.sqrt(40)
    torch.manual_seed(3)
    drawn = spnn.Conv3d(2, 3, 2).kernel
    torch.manual_seed(3)
    assert torch.equal(drawn, torch.empty(8, 2, 3).uniform_(-0.25, 0.25))
    assert repr(back) == "Conv3d(6, 5, kernel_size=(2, 2, 2), stride=(2, 2, 2), bias=False, transposed=True)"
    assert spnn.Conv3d(6, 5, 1, 2).kernel.shape == (1, 6, 5)


@BOTH
def test_norms_and_pools_of_samples(version):
    sites, feats = cloud(channels=4)
    x = tensor(sites, feats, version)
    norm = spnn.GroupNorm(2, 4).double()
    made = norm(x)
    for number in range(2):
        rows = sites[:, 0] == number
        expected = nn.functional.group_norm(feats[rows].T[None], 2, norm.weight, norm.bias)[0].T
        torch.testing.assert_close(made.feats[rows], expected)
    torch.testing.assert_close(spnn.BatchNorm(4).double()(x).feats, nn.BatchNorm1d(4).double()(feats))
    means = torch.stack([feats[sites[:, 0] == b].mean(0) for b in range(2)])
    torch.testing.assert_close(spnn.GlobalAvgPool()(x), means)
    assert torch.equal(spnn.GlobalMaxPool()(x), torch.stack([feats[sites[:, 0] == b].amax(0) for b in range(2)]))
    made.feats.sum().backward()


def test_activations_and_what_joins_tensors():
    sites, feats = cloud()
    x = tensor(sites, feats, "2.1", spatial_range=(2, 6, 6, 6))
    assert torch.equal(spnn.LeakyReLU(0.1)(x).feats, nn.functional.leaky_relu(feats, 0.1))
    assert torch.equal(spnn.SiLU()(x).F, nn.functional.silu(feats))
    assert torch.equal(F.relu(x, inplace=False).F, feats.relu())
    both = ts.cat([x, x])
    assert both.F.shape[1] == 6
    assert torch.equal((x + x).F, 2 * feats)
    assert (x + x)._caches is x._caches is both._caches
    assert x.dense().shape == (2, 6, 6, 6, 3)
    b, *place = sites.long().T
    assert torch.equal(x.dense()[b, place[0], place[1], place[2]], feats)
    with pytest.raises(ValueError, match="must have a spatial_range"):
        tensor(sites, feats, "2.1").dense()
    other = SparseTensor(torch.ones(1, 3, dtype=torch.float64), torch.tensor([[5, 0, 0, 0]], dtype=torch.int32))
    total = ts.generative_add(other, x)
    assert total.C.shape == (len(sites) + 1, 4)
    torch.testing.assert_close(total.F.sum(0), feats.sum(0) + 1)


@BOTH
def test_crop_keeps_what_is_in_the_box(version):
    sites, feats = cloud()
    x = tensor(sites, feats, version)
    made = spnn.SparseCrop((1, 0, 2), (4, 5, 6))(x)
    kept = [n for n, (_, i, j, k) in enumerate(places(x)) if 1 <= i < 4 and 0 <= j < 5 and 2 <= k < 6]
    assert torch.equal(made.coords, x.coords[kept])
    assert torch.equal(made.feats, feats[kept])


@pytest.mark.parametrize("dim", [0, 1, 2])
@BOTH
def test_planes_seen_from_above_are_loops(version, dim):
    sites, feats = cloud()
    x = tensor(sites, feats, version, 2)
    shape = [6, 7, 8]
    plane = [axis for axis in range(3) if axis != dim]
    size = [shape[axis] for axis in plane]
    dense, tall = torch.zeros(2, 4, *size).double(), torch.zeros(2, shape[dim] * 3, *size).double()
    layer = spnn.ToDenseBEVConvolution(3, 4, shape, dim=dim, bias=True).double()
    nn.init.ones_(layer.bias)
    sums: dict[tuple[int, ...], list[torch.Tensor]] = {}
    for (b, *place), row in zip(places(x), feats, strict=True):
        i, j = (place[axis] for axis in plane)
        dense[b, :, i, j] += row @ layer.kernel[place[dim]] + 1
        tall[b, 3 * place[dim] : 3 * place[dim] + 3, i, j] += row
        sums.setdefault((b, *(0 if axis == dim else v for axis, v in enumerate(place))), []).append(row)
    torch.testing.assert_close(layer(x), dense)
    torch.testing.assert_close(spnn.ToBEVHeightCompression(3, shape, dim=dim)(x), tall)
    flat = spnn.ToBEVReduction(dim)(x)
    means = {site: torch.stack(rows).mean(0) for site, rows in sums.items()}
    assert sorted(places(flat)) == sorted(means)
    torch.testing.assert_close(flat.feats, torch.stack([means[site] for site in places(flat)]))
    sparse = spnn.ToBEVConvolution(3, 4, shape[dim], stride=2, dim=dim).double()
    made = sparse(x)
    assert made.stride == (4, 4, 4)
    expected = sum(row @ sparse.kernel[site[dim + 1]] for site, row in zip(places(x), feats, strict=True))
    torch.testing.assert_close(made.feats.sum(0), expected)
    assert sorted(places(made)) == sorted({(b, *(v // 2 for v in place)) for b, *place in means})
    with pytest.raises(IndexError, match=r"heights must be in 0\.\.1"):
        spnn.ToBEVConvolution(3, 4, 2, dim=dim).double()(x)


@BOTH
def test_samples_become_batches(version):
    coords = np.array([[0.4, 0.1, 0], [2.2, 0.1, 0.3], [0.3, 0.2, 0.1]])
    voxels, index, inverse = sparse_quantize(coords, 0.5, return_index=True, return_inverse=True)
    assert voxels.dtype == np.int32
    assert (voxels.tolist(), index.tolist(), inverse.tolist()) == ([[0, 0, 0], [4, 0, 0]], [0, 1], [0, 1, 0])
    assert sparse_quantize(-coords, (0.5, 1, 1)).tolist() == [[-5, -1, -1], [-1, -1, -1], [-1, -1, 0]]
    samples = [{"lidar": SparseTensor(coords[index], voxels), "name": "a", "x": np.ones(2)} for _ in range(2)]
    samples = pickle.loads(pickle.dumps(samples))  # as workers of a data loader send them
    batch = sparse_collate_fn(samples)
    assert batch["name"] == ["a", "a"]
    assert batch["x"].shape == (2, 2)
    made = batch["lidar"]
    assert made.batch.tolist() == [0, 0, 1, 1]
    assert made.C[3].tolist() == ([4, 0, 0, 1] if version == "1.4" else [1, 4, 0, 0])
    assert sparse_collate_fn([1, 2]) == [1, 2]
    with pytest.raises(ValueError, match="one stride"):
        sparse_collate([SparseTensor(coords, voxels), SparseTensor(coords, voxels, 2)])


def test_a_hash_table_finds_sites_around_places():
    sites, _ = cloud()
    table = ts.backend.GPUHashTable(torch.zeros(1), torch.zeros(1))
    table.insert_coords(sites[:, [1, 2, 3, 0]])
    places_, kernel = sites[:5], (2, 3, 1)
    found = table.lookup_coords(places_[:, [1, 2, 3, 0]], torch.tensor(kernel), torch.tensor([1, 1, 1]), 6)
    assert found.shape == (128, 6)
    row = {tuple(site): number + 1 for number, site in enumerate(sites.tolist())}
    offsets = offsets_of_weights(center(kernel), kernel)
    expected = [[row.get((b, x + i, y + j, z + k), 0) for i, j, k in offsets] for b, x, y, z in places_.tolist()]
    assert found[:5].tolist() == expected
    assert not found[5:].any()
    table.insert_vals(torch.tensor([7, 5]))
    assert table.lookup_vals(torch.tensor([5, 6]))[:2].tolist() == [2, 0]
    with pytest.raises(NotImplementedError, match="conv_forward_implicit_gemm_cuda"):
        ts.backend.conv_forward_implicit_gemm_cuda()


def test_a_kernel_map_as_tensors():
    sites, _ = cloud()
    made = F.build_kernel_map(sites, len(sites), 3, 1, spatial_range=(2, 6, 6, 6))
    expected = torch.full((len(sites), 27), -1)
    row = {tuple(site): number for number, site in enumerate(sites.tolist())}
    for number, (b, *place) in enumerate(sites.tolist()):
        for k, offset in enumerate(get_kernel_offsets(3).tolist()):
            expected[number, k] = row.get((b, *(p + d for p, d in zip(place, offset, strict=True))), -1)
    assert torch.equal(made["out_in_map"].long(), expected)
    assert made["nbsizes"].tolist() == (expected >= 0).sum(0).tolist()
    assert made["sizes"] == (len(sites), len(sites))


def test_backbones_have_the_names_of_torchsparse_and_train():
    sites, feats = cloud(80, 12, channels=4, dtype=torch.float32)
    for network, outputs in ((SparseResUNet42, 9), (SparseResNet21D, 5)):
        model = network(width_multiplier=0.25)
        made = model(SparseTensor(feats, sites, spatial_range=(2, 32, 32, 32)))
        assert len(made) == outputs
        made[-1].feats.square().sum().backward()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    names = set(SparseResUNet42(width_multiplier=0.25).state_dict())
    assert {"stem.3.kernel", "encoders.2.1.main.0.kernel", "decoders.0.fuse.0.shortcut.0.kernel"} <= names
    assert {"encoders.0.0.1.running_mean", "decoders.3.upsample.0.kernel"} <= names
    assert {"0.0.0.kernel", "3.1.main.3.kernel", "4.0.1.weight"} <= set(SparseResNet21D().state_dict())


def made_in(module, code):
    """What `made` is after this code has run in a module of that name."""
    names = {"__name__": module, "ts": ts, "torch": torch}
    exec(code, names)
    return names.get("made")


MAKE = "made = ts.SparseTensor(torch.ones(1, 1), torch.zeros(1, 4))"


@pytest.mark.parametrize("version", [None])
def test_who_makes_a_tensor_tells_its_version():
    assert made_in("program.data", MAKE).generation == "2.1"
    assert made_in("mmdet3d.models.backbones", MAKE).generation == "1.4"
    assert made_in("mmdet3d.models", MAKE.replace("4))", "4), spatial_range=(1, 1, 1, 1))")).generation == "2.1"
    assert made_in("mmdet3d.models", "made = ts.nn.Conv3d(1, 1, 3, 2, 3)").dilation == 3
    assert made_in("program.models", "made = ts.PointTensor") is PointTensor  # a name of 1.4 alone at the top
    assert made_in("data", MAKE).generation == "1.4"
    ts.use("2.1")
    assert made_in("data", MAKE).generation == "2.1"
    assert made_in("mmdet3d.models", MAKE).generation == "2.1"
    with pytest.raises(ValueError, match="version must be"):
        ts.use("2")
    with pytest.raises(AttributeError, match="no attribute 'Point'"):
        _ = ts.Point


@pytest.mark.parametrize("version", [None])
def test_columns_that_look_exchanged_are_a_warning(monkeypatch):
    sites = torch.tensor([[5, 1, 2, 0], [3, 1, 2, 0], [4, 1, 1, 1]], dtype=torch.int32)
    layer = spnn.Conv3d(1, 1, 3)
    for coords, warned in ((sites, True), (sites[:, [3, 0, 1, 2]], False)):
        monkeypatch.setattr(_generation, "_looked", False)
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            layer(SparseTensor(torch.ones(3, 1), coords))
        assert any("TRIOPS_TORCHSPARSE=1.4" in str(w.message) for w in found) == warned


@pytest.mark.parametrize(("imports", "found"), [("", False), ("import triops.compat.torchsparse", True)])
def test_it_is_supplied_when_asked_for(imports, found):
    program = f"""
{imports}
from importlib.util import find_spec
assert (find_spec("torchsparse") is not None) == {found}
if {found}:
    import torchsparse
    import torchsparse.nn as spnn
    import torchsparse.nn.functional as F
    from torchsparse import PointTensor, SparseTensor
    from torchsparse.backbones import SparseResUNet42
    from torchsparse.nn.functional.devoxelize import calc_ti_weights
    from torchsparse.nn.utils import fapply, get_kernel_offsets
    from torchsparse.tensor import SparseTensor as same
    from torchsparse.utils.collate import sparse_collate_fn
    from torchsparse.utils.quantize import sparse_quantize
    from torchsparse.utils.tensor_cache import TensorCache
    assert same is SparseTensor
    assert torchsparse.__version__ == "1.4.0"
    assert SparseTensor(1, 1).generation == "1.4"
    assert torchsparse.backends.benchmark is False
"""
    environment = {"TRIOPS_TORCHSPARSE": "1.4", "PYTHONPATH": ":".join(sys.path)}
    subprocess.run([sys.executable, "-c", program], check=True, env=environment)


@pytest.mark.parametrize("version", ["1.4"])
def test_sites_of_1_4_may_lie_between_those_of_their_stride():
    """Sites that no convolution made: kernels lie at strides from each, and cells begin at multiples of the stride."""
    sites, feats = cloud()
    x = SparseTensor(feats, sites[:, [1, 2, 3, 0]], 2)
    layer, down = spnn.Conv3d(3, 4, 3).double(), spnn.Conv3d(3, 4, 2, 2).double()
    where = [tuple(row) for row in sites.tolist()]
    offsets = [tuple(2 * v for v in offset) for offset in offsets_of_weights((-1,) * 3, (3,) * 3)]
    expected = convolution_by_loop(where, feats, where, layer.kernel, offsets)
    assert_same_with_gradients(layer(x).feats, expected, feats, layer.kernel)
    made = down(x)
    found = [(b, *place) for *place, b in made.coords.tolist()]
    assert found == sorted({(b, *(v // 4 * 4 for v in place)) for b, *place in where})
    offsets = [tuple(2 * v for v in offset) for offset in offsets_of_weights((0,) * 3, (2,) * 3)]
    torch.testing.assert_close(made.feats, convolution_by_loop(where, feats, found, down.kernel, offsets))
