"""Facts about the supplied package `MinkowskiEngine`: by hand, and against loops over dictionaries of sites."""

from __future__ import annotations

import copy
import itertools
import subprocess
import sys

import numpy as np
import pytest
import torch

import triops.compat.minkowski_engine as ME
from triops.compat.minkowski_engine import sites
from triops.compat.minkowski_engine.kernels import kernel_offsets
from triops.compat.minkowski_engine.modules.resnet_block import BasicBlock
from triops.compat.minkowski_engine.modules.senet_block import SEBasicBlock
from triops.compat.minkowski_engine.utils.gradcheck import gradcheck

Mode = ME.SparseTensorQuantizationMode


def ints(rows):
    return torch.tensor(rows, dtype=torch.int32)


def cloud(axes=3, count=60, channels=4, batch=2, span=5, stride=1, seed=0):
    """Distinct sites around the origin, and features that want a gradient, float64."""
    g = torch.Generator().manual_seed(seed)
    places = torch.randint(-span, span, (count, axes), generator=g) * stride
    numbers = torch.randint(0, batch, (count, 1), generator=g)
    coordinates = torch.cat([numbers, places], 1).unique(dim=0).int()
    coordinates = coordinates[torch.randperm(len(coordinates), generator=g)]
    features = torch.randn(len(coordinates), channels, generator=g, dtype=torch.float64)
    return ME.SparseTensor(features.requires_grad_(), coordinates, tensor_stride=stride)


def offsets_by_loop(size, axes, cross=False):
    """The first axis is the fastest; odd sizes are centred, even ones begin at 0; a cross begins with its centre."""
    sizes = [size] * axes if isinstance(size, int) else size
    if not cross:
        ranges = [range(-(s // 2), s // 2 + 1) if s % 2 else range(s) for s in sizes]
        return [tuple(reversed(o)) for o in itertools.product(*reversed(ranges))]
    steps = [(0,) * axes]
    for axis, s in enumerate(sizes):
        for step in [*range(1, s // 2 + 1), *range(-(s // 2), 0)]:
            steps.append(tuple(step if a == axis else 0 for a in range(axes)))
    return steps


def convolution_by_loop(x, out_coordinates, kernel, offsets, step, transposed=False):
    """Rows by dictionary, products one by one: what every convolution should be."""
    rows = {tuple(c): i for i, c in enumerate(x.C.tolist())}
    sign = -1 if transposed else 1
    out = []
    for batch, *place in out_coordinates.tolist():
        total = torch.zeros(kernel.shape[-1], dtype=kernel.dtype)
        for k, offset in enumerate(offsets):
            at = tuple(p + sign * o * s for p, o, s in zip(place, offset, step, strict=True))
            if (batch, *at) in rows:
                total = total + x.F[rows[(batch, *at)]] @ kernel[k]
        out.append(total)
    return torch.stack(out)


def assert_same(found, expected, *leaves):
    """Values, and gradients of everything that has one."""
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
    weights = torch.randn(found.shape, generator=torch.Generator().manual_seed(1), dtype=found.dtype)
    theirs = torch.autograd.grad((expected * weights).sum(), leaves)
    for mine, their in zip(torch.autograd.grad((found * weights).sum(), leaves), theirs, strict=True):
        torch.testing.assert_close(mine, their, rtol=1e-10, atol=1e-10)


# Sites


def test_a_strided_map_has_the_sites_rounded_down_in_the_order_of_their_first_rows():
    manager = ME.CoordinateManager(D=1)
    key, _ = manager.insert_and_map(ints([[0, 3], [0, -3], [0, -2], [0, -1], [0, 0], [1, 2]]))
    coarse = manager.stride(key, 2)
    assert manager.get_coordinates(coarse).tolist() == [[0, 2], [0, -4], [0, -2], [0, 0], [1, 2]]
    assert [rows.tolist() for rows in manager.stride_map(key, coarse)] == [[0, 1, 2, 3, 4, 5], [0, 1, 2, 2, 3, 4]]
    assert manager.stride(key, [2]) == coarse
    assert coarse.get_tensor_stride() == [2]


def test_coordinates_are_copies_of_those_in_the_manager():
    x = ME.SparseTensor(torch.ones(2, 1), ints([[0, 3], [0, 4]]))
    x.C.mul_(2)
    assert x.C.tolist() == [[0, 6], [0, 8]]
    assert x.coordinate_manager.get_coordinates(x.coordinate_map_key).tolist() == [[0, 3], [0, 4]]


def test_coordinates_that_come_twice_are_one_site():
    coordinates = ints([[0, 7], [0, 5], [0, 7], [1, 7]])
    features = torch.tensor([[1.0], [2.0], [4.0], [8.0]])
    expected = {
        Mode.RANDOM_SUBSAMPLE: [1, 2, 8], Mode.UNWEIGHTED_SUM: [5, 2, 8], Mode.UNWEIGHTED_AVERAGE: [2.5, 2, 8],
        Mode.MAX_POOL: [4, 2, 8],
    }  # fmt: skip
    for mode, values in expected.items():
        x = ME.SparseTensor(features, coordinates, quantization_mode=mode)
        assert x.F.flatten().tolist() == values
        assert x.C.tolist() == [[0, 7], [0, 5], [1, 7]]
        assert (x.unique_index.tolist(), x.inverse_mapping.tolist()) == ([0, 1, 3], [0, 1, 0, 2])
    with pytest.raises(ValueError, match="come twice"):
        ME.SparseTensor(features, coordinates, quantization_mode=Mode.NO_QUANTIZATION)


@pytest.mark.parametrize(("size", "axes"), [(3, 2), (2, 3), ([3, 2, 5], 3), (1, 4)])
def test_the_first_axis_of_a_cube_is_the_fastest(size, axes):
    sizes = [size] * axes if isinstance(size, int) else size
    assert kernel_offsets(sizes, ME.RegionType.HYPER_CUBE).tolist() == [list(o) for o in offsets_by_loop(size, axes)]


def test_a_fifth_axis_is_looked_up_by_the_fourth():
    g = torch.Generator().manual_seed(0)
    here = torch.cat([torch.randint(0, 2, (200, 1)), torch.randint(-2, 2, (200, 6), generator=g)], 1).unique(dim=0)
    one = torch.eye(6).long()
    steps = torch.cat([0 * one[:1], one, -one, one.sum(0, keepdim=True)])
    rows = {tuple(c): i for i, c in enumerate(here.tolist())}
    expected = [
        [rows.get((c[0], *(p + o for p, o in zip(c[1:], offset, strict=True))), -1) for c in here.tolist()]
        for offset in steps.tolist()
    ]
    assert sites.neighbors(here.int(), here.int(), steps.int()).tolist() == expected


# Convolutions


@pytest.mark.parametrize(
    ("axes", "size", "stride", "dilation", "cross"),
    [
        (3, 3, 1, 1, False), (3, 3, 2, 1, False), (3, 2, 2, 1, False), (3, 1, 2, 1, False), (2, 5, 1, 2, False),
        (1, 3, 3, 1, False), (4, 3, 2, 1, False), (5, 2, 1, 1, False), (3, [3, 1, 2], [2, 1, 1], 1, False),
        (3, 3, 1, 1, True), (3, 5, 2, 2, True), (2, 2, 1, 1, False),
    ],
)  # fmt: skip
def test_a_convolution_is_that_of_a_loop(axes, size, stride, dilation, cross):
    x = cloud(axes, stride=2)
    region = ME.RegionType.HYPER_CROSS if cross else ME.RegionType.HYPER_CUBE
    generator = ME.KernelGenerator(size, stride, dilation, region_type=region, dimension=axes)
    conv = ME.MinkowskiConvolution(4, 3, bias=True, kernel_generator=generator, dimension=axes).double()
    y = conv(x)
    offsets = offsets_by_loop(size, axes, cross)
    assert conv.kernel.shape == (len(offsets), 4, 3)
    strides = [stride] * axes if isinstance(stride, int) else stride
    assert y.tensor_stride == [2 * s for s in strides]
    floored = torch.tensor([1, *y.tensor_stride])
    assert {tuple(c) for c in y.C.tolist()} == {
        tuple(c) for c in (torch.div(x.C, floored, rounding_mode="floor") * floored).tolist()
    }
    expected = convolution_by_loop(x, y.C, conv.kernel, offsets, [2 * dilation] * axes) + conv.bias
    assert_same(y.F, expected, x.F, conv.kernel, conv.bias)


@pytest.mark.parametrize(("size", "stride"), [(2, 2), (3, 2), (3, 1), (4, 2)])
def test_a_transposed_convolution_goes_back_to_the_map_that_is_there(size, stride):
    x = cloud()
    down = ME.MinkowskiConvolution(4, 4, kernel_size=2, stride=stride, dimension=3).double()
    up = ME.MinkowskiConvolutionTranspose(4, 3, kernel_size=size, stride=stride, bias=True, dimension=3).double()
    coarse = down(x)
    y = up(coarse)
    assert y.coordinate_map_key == x.coordinate_map_key
    assert torch.equal(y.C, x.C)
    expected = convolution_by_loop(coarse, x.C, up.kernel, offsets_by_loop(size, 3), [1] * 3, transposed=True)
    assert_same(y.F, expected + up.bias, coarse.F, up.kernel)


@pytest.mark.parametrize("size", [2, 3])
def test_a_generative_one_makes_every_site_that_the_kernel_reaches(size):
    x = cloud(stride=4, count=10)
    up = ME.MinkowskiGenerativeConvolutionTranspose(4, 3, kernel_size=size, stride=2, dimension=3).double()
    y = up(x)
    offsets = offsets_by_loop(size, 3)
    assert {tuple(c) for c in y.C.tolist()} == {
        (b, *(p + 2 * o for p, o in zip(place, offset, strict=True)))
        for b, *place in x.C.tolist()
        for offset in offsets
    }
    assert y.tensor_stride == [2, 2, 2]
    assert_same(y.F, convolution_by_loop(x, y.C, up.kernel, offsets, [2] * 3, transposed=True), x.F, up.kernel)
    assert up(x).coordinate_map_key != y.coordinate_map_key  # made anew each time


def test_expanded_coordinates_are_those_of_the_kernel_too():
    x = ME.SparseTensor(torch.ones(1, 1), ints([[0, 4]]))
    conv = ME.MinkowskiConvolution(1, 1, kernel_size=3, expand_coordinates=True, dimension=1)
    assert conv(x).C.tolist() == [[0, 3], [0, 4], [0, 5]]
    assert conv(x).F.tolist() == [[conv.kernel[k].item()] for k in (2, 1, 0)]


def test_results_at_coordinates_that_are_asked_for():
    x, wanted = cloud(axes=2), ints([[0, 0, 0], [1, 1, -1], [0, 90, 0]])
    conv = ME.MinkowskiConvolution(4, 3, kernel_size=3, dimension=2).double()
    y = conv(x, wanted)
    assert y.C.tolist() == wanted.tolist()
    assert_same(y.F, convolution_by_loop(x, wanted, conv.kernel, offsets_by_loop(3, 2), [1, 1]), x.F, conv.kernel)
    assert torch.equal(conv(x, y).F, y.F)
    assert torch.equal(conv(x, y.coordinate_map_key).F, y.F)


def test_a_kernel_of_one_offset_is_a_matrix():
    x = cloud()
    conv = ME.MinkowskiConvolution(4, 3, kernel_size=1, bias=True, dimension=3).double()
    assert conv.kernel.shape == (4, 3)
    assert_same(conv(x).F, x.F @ conv.kernel + conv.bias, x.F, conv.kernel, conv.bias)
    assert ME.MinkowskiConvolution(4, 3, kernel_size=1, stride=2, dimension=3).kernel.shape == (1, 4, 3)


def test_a_channelwise_convolution_is_one_with_a_diagonal_kernel():
    x = cloud()
    conv = ME.MinkowskiChannelwiseConvolution(4, kernel_size=3, stride=2, bias=True, dimension=3).double()
    y = conv(x)
    expected = convolution_by_loop(x, y.C, torch.diag_embed(conv.kernel), offsets_by_loop(3, 3), [1] * 3) + conv.bias
    assert_same(y.F, expected, x.F, conv.kernel, conv.bias)


def test_gradients_are_those_of_differences():
    x = cloud(axes=2, count=8, span=2, channels=2)
    conv = ME.MinkowskiConvolution(2, 2, kernel_size=3, stride=2, dimension=2).double()
    y = conv(x)
    arguments = conv.kernel_generator, conv.convolution_mode
    keys = x.coordinate_map_key, y.coordinate_map_key, x.coordinate_manager
    assert gradcheck(ME.MinkowskiConvolutionFunction(), (x.F, conv.kernel, *arguments, *keys))
    assert gradcheck(ME.MinkowskiInstanceNormFunction(), (x.F, x.coordinate_map_key, None, x.coordinate_manager))
    for pool in (ME.MinkowskiMaxPooling, ME.MinkowskiAvgPooling, ME.MinkowskiSumPooling):
        layer = pool(kernel_size=3, stride=2, dimension=2)
        assert gradcheck(ME.MinkowskiLocalPoolingFunction(), (x.F, layer.pooling_mode, layer.kernel_generator, *keys))


def test_maps_are_worked_out_once_and_go_with_their_manager():
    x = cloud()
    conv = ME.MinkowskiConvolution(4, 4, kernel_size=3, dimension=3).double()
    y = conv(conv(x))
    assert len(y.coordinate_manager.kernel_maps) == 1
    assert list(y.coordinate_manager.maps) == [((1, 1, 1), "")]
    assert cloud().coordinate_manager is not x.coordinate_manager


def test_pairs_of_a_kernel_by_hand():
    """Five coarse sites; 3 x 3 around them hold 2, 2, 1, 4 and 4 sites."""
    places = [(0, 3), (1, 2), (1, 4), (2, 1), (2, 2), (2, 3), (2, 4), (2, 5)]
    x = ME.SparseTensor(torch.ones(8, 1), ints([[0, *place] for place in places]))
    manager, key = x.coordinate_manager, x.coordinate_manager.stride(x.coordinate_map_key, 2)
    pairs = manager.kernel_map(1, 2, stride=2, kernel_size=3)
    assert sum(p.shape[1] for p in pairs.values()) == 13
    offsets = offsets_by_loop(3, 2)
    for k, (rows_in, rows_out) in pairs.items():
        moved = x.C[rows_in.long(), 1:] - manager.get_coordinates(key)[rows_out.long(), 1:]
        assert (moved == torch.tensor(offsets[k])).all()
    whole = manager.kernel_map(1, 2, stride=2, kernel_size=2, is_pool=True)
    assert list(whole) == [0]
    assert sorted(whole[0][0].tolist()) == list(range(8))


# Poolings


def pools_by_loop(x, y, size, step, whole):
    rows = {tuple(c): i for i, c in enumerate(x.C.tolist())}
    ranges = [range(size) if whole else range(-(size // 2), size // 2 + 1) if size % 2 else range(size)] * x.D
    found = []
    for batch, *place in y.C.tolist():
        steps = itertools.product(*ranges)
        at = [(batch, *(p + o * step for p, o in zip(place, offset, strict=True))) for offset in steps]
        found.append([rows[c] for c in at if c in rows])
    return found


@pytest.mark.parametrize(("size", "stride"), [(2, 2), (3, 2), (3, 3), (3, 1)])
def test_poolings_are_those_of_a_loop(size, stride):
    x = cloud(stride=2)
    for pool, reduce in (
        (ME.MinkowskiMaxPooling, lambda f: f.max(0).values), (ME.MinkowskiAvgPooling, lambda f: f.mean(0)),
        (ME.MinkowskiSumPooling, lambda f: f.sum(0)),
    ):  # fmt: skip
        y = pool(kernel_size=size, stride=stride, dimension=3)(x)
        expected = torch.stack([reduce(x.F[rows]) for rows in pools_by_loop(x, y, size, 2, size == stride)])
        assert_same(y.F, expected, x.F)


def test_a_transposed_pooling_hands_features_down():
    x = ME.SparseTensor(torch.ones(4, 1), ints([[0, 0], [0, 1], [0, 2], [1, 3]]))
    y = ME.MinkowskiSumPooling(kernel_size=2, stride=2, dimension=1)(x)
    assert y.F.flatten().tolist() == [2, 1, 1]
    z = ME.MinkowskiPoolingTranspose(kernel_size=2, stride=2, dimension=1)(y)
    assert z.coordinate_map_key == x.coordinate_map_key
    assert z.F.flatten().tolist() == [2, 2, 1, 1]
    wide = ME.MinkowskiPoolingTranspose(kernel_size=3, stride=2, dimension=1)(y)
    assert wide.F.flatten().tolist() == [2, 3, 1, 1]  # 1 lies within a step of 0 and of 2


def test_a_cloud_as_a_whole_and_back():
    x = ME.SparseTensor(torch.tensor([[1.0], [2], [5], [8]]), ints([[2, 0], [0, 1], [2, 1], [0, 2]]))
    for pool, values in (
        (ME.MinkowskiGlobalAvgPooling, [5, 3]), (ME.MinkowskiGlobalSumPooling, [10, 6]),
        (ME.MinkowskiGlobalMaxPooling, [8, 5]), (ME.MinkowskiGlobalPooling, [5, 3]),
    ):  # fmt: skip
        y = pool()(x)
        assert y.C.tolist() == [[0, 0], [2, 0]]
        assert y.F.flatten().tolist() == values
    assert ME.MinkowskiBroadcast()(x, y).F.flatten().tolist() == [3, 5, 3, 5]
    assert ME.MinkowskiBroadcastAddition()(x, y).F.flatten().tolist() == [4, 7, 8, 13]
    assert ME.MinkowskiBroadcastMultiplication()(x, y).F.flatten().tolist() == [3, 10, 15, 40]
    assert ME.MinkowskiBroadcastConcatenation()(x, y).F.tolist() == [[1, 3], [2, 5], [5, 3], [8, 5]]


# Tensors


def test_clouds_one_by_one():
    x = ME.SparseTensor(torch.tensor([[1.0], [2], [5], [8]]), ints([[2, 0], [0, 1], [2, 1], [0, 2]]))
    assert [rows.tolist() for rows in x.decomposition_permutations] == [[1, 3], [], [0, 2]]
    assert [c.tolist() for c in x.decomposed_coordinates] == [[[1], [2]], [], [[0], [1]]]
    assert [f.flatten().tolist() for f in x.decomposed_features] == [[2, 8], [], [1, 5]]
    assert x.features_at(2).flatten().tolist() == [1, 5]
    assert x.coordinates_at(0).tolist() == [[1], [2]]
    kept = ME.MinkowskiPruning()(x, torch.tensor([True, False, True, False]))
    assert [len(rows) for rows in kept.decomposition_permutations] == [0, 0, 2]  # the batch stays as it was


def test_tensors_of_other_places_meet_at_their_union():
    x = ME.SparseTensor(torch.tensor([[1.0], [2]]), ints([[0, 0], [0, 1]]), requires_grad=True)
    y = ME.SparseTensor(torch.tensor([[10.0], [20]]), ints([[0, 1], [0, 5]]), coordinate_manager=x.coordinate_manager)
    for z, values in (
        (x + y, [1, 12, 20]), (x - y, [1, -8, -20]), (x * y, [1, 20, 0]), (x / y, [1, 0.2, 0]),
        (ME.MinkowskiUnion()(x, y), [1, 12, 20]),
    ):  # fmt: skip
        assert z.C.tolist() == [[0, 0], [0, 1], [0, 5]]
        assert z.F.flatten().tolist() == pytest.approx(values)
    (x * y).F.sum().backward()
    assert x.F.grad.tolist() == [[1], [10]]
    assert (x * x).F.flatten().tolist() == [1, 4]
    assert (x * torch.tensor([[3.0]])).F.flatten().tolist() == [3, 6]
    other = ME.SparseTensor(torch.ones(2, 1), ints([[0, 0], [0, 1]]))
    with pytest.raises(ValueError, match="share a coordinate manager"):
        x + other
    with pytest.raises(ValueError, match="same coordinate_map_key"):
        ME.cat(x, y)


def test_managers_are_shared_where_it_is_asked_for():
    try:
        ME.set_sparse_tensor_operation_mode(ME.SparseTensorOperationMode.SHARE_COORDINATE_MANAGER)
        x, y = cloud(), cloud(seed=1)
        assert x.coordinate_manager is y.coordinate_manager is ME.global_coordinate_manager()
        assert x.coordinate_map_key != y.coordinate_map_key
        ME.clear_global_coordinate_manager()
        assert cloud().coordinate_manager is not x.coordinate_manager
    finally:
        ME.clear_global_coordinate_manager()
        ME.set_sparse_tensor_operation_mode(ME.SparseTensorOperationMode.SEPARATE_COORDINATE_MANAGER)


def test_dense_grids_and_back():
    grid = torch.randn(2, 3, 4, 5) * (torch.rand(2, 1, 4, 5) < 0.5)
    x = ME.to_sparse(grid.requires_grad_())
    assert torch.equal(x.dense(shape=grid.shape)[0], grid)
    assert len(ME.to_sparse_all(grid)) == 40
    assert ME.to_sparse(grid.movedim(1, -1), format="BXXC").F.equal(x.F)
    y = ME.SparseTensor(torch.tensor([[7.0]]), ints([[0, -4, 2]]), tensor_stride=2)
    dense, low, stride = y.dense(min_coordinate=torch.IntTensor([-4, 0]))
    assert (dense.tolist(), low.tolist(), stride.tolist()) == ([[[[0, 7]]]], [[-4, 0]], [2, 2])
    with pytest.raises(ValueError, match="min_coordinate must be given"):
        y.dense()
    sparse, low, _ = y.sparse()
    assert (sparse.to_dense().tolist(), low.tolist()) == ([[[[7]]]], [[-2, 1]])


def test_features_between_sites_are_interpolated():
    x = ME.SparseTensor(torch.tensor([[1.0], [3.0], [5.0]]), ints([[0, 0, 0], [0, 2, 0], [0, 0, 2]]), tensor_stride=2)
    x.requires_grad_()
    points = torch.tensor([[0, 0.5, 0], [0, 1, 1], [0, -1, 0], [1, 0, 0]])
    found = x.features_at_coordinates(points)
    assert found.flatten().tolist() == [1.5, 0.25 * 9, 0.5, 0]
    found.sum().backward()
    assert x.F.grad.flatten().tolist() == [0.75 + 0.25 + 0.5, 0.25 + 0.25, 0.25]
    out, (rows, at), weights = ME.MinkowskiInterpolation(return_kernel_map=True, return_weights=True)(x, points)
    again = torch.zeros_like(out).index_add(0, at.long(), x.F[rows.long()] * weights[:, None])
    assert torch.equal(out, again)


def test_a_field_becomes_cells_and_cells_become_a_field():
    points = torch.tensor([[0, 0.1], [1, 0.2], [0, 0.9], [0, -0.1], [0, 3.7]])
    field = ME.TensorField(torch.arange(1.0, 6)[:, None], points)
    x = field.sparse()
    assert x.C.tolist() == [[0, 0], [1, 0], [0, -1], [0, 3]]
    assert x.F.flatten().tolist() == [2, 2, 4, 5]
    assert x.slice(field).F.flatten().tolist() == [2, 2, 2, 4, 5]
    assert x.cat_slice(field).F.tolist() == [[2, 1], [2, 2], [2, 3], [4, 4], [5, 5]]
    coarse = ME.MinkowskiSumPooling(kernel_size=4, stride=4, dimension=1)(x)
    assert coarse.slice(field).F.flatten().tolist() == [7, 2, 7, 4, 7]
    assert field.sparse(tensor_stride=4).C.tolist() == [[0, 0], [1, 0], [0, -4]]
    assert field.sparse(coordinate_map_key=x.coordinate_map_key).F.equal(x.F)
    assert ME.MinkowskiGlobalMaxPooling()(field).F.flatten().tolist() == [5, 2]
    assert [len(c) for c in field.decomposed_coordinates] == [4, 1]
    assert ME.MinkowskiReLU()(field - 3).F.flatten().tolist() == [0, 0, 0, 1, 2]


def test_splat_and_interpolate_are_transposes():
    points = torch.tensor([[0, 0.25, 0.5], [0, 1.5, -0.25]])
    field = ME.TensorField(torch.tensor([[4.0], [8.0]]), points)
    x = field.splat()
    assert float(x.F.sum()) == 12  # weights of a point sum up to 1
    assert len(x) == 7  # of 8 corners two are one
    back = x.interpolate(field)
    table, weights = x.coordinate_manager.corners(x.coordinate_map_key, points)
    dense = torch.zeros(2, 7)
    for k in range(4):
        dense[torch.arange(2), table[k].long()] += weights[k]
    torch.testing.assert_close(back.F, dense @ dense.t() @ field.F)


def test_norms():
    x = cloud(count=200, span=20)
    for norm, eps in ((ME.MinkowskiInstanceNorm, 1e-8), (ME.MinkowskiStableInstanceNorm, 1e-6)):
        layer = norm(4).double()
        found = layer(x)
        for rows in x.decomposition_permutations:
            f = x.F[rows]
            expected = (f - f.mean(0)) / (f.var(0, unbiased=False) + eps).sqrt()
            torch.testing.assert_close(found.F[rows], expected)
    bn = ME.MinkowskiBatchNorm(4).double()
    plain = torch.nn.BatchNorm1d(4).double()
    torch.testing.assert_close(bn(x).F, plain(x.F))
    assert sorted(bn.state_dict()) == sorted(f"bn.{name}" for name in plain.state_dict())
    synced = ME.MinkowskiSyncBatchNorm.convert_sync_batchnorm(torch.nn.Sequential(bn, ME.MinkowskiReLU()))
    assert isinstance(synced[0], ME.MinkowskiSyncBatchNorm)
    assert isinstance(synced[0].bn, torch.nn.SyncBatchNorm)
    assert synced[0].bn.weight is bn.bn.weight


def test_names_of_a_checkpoint():
    block = BasicBlock(4, 4, dimension=3)
    assert {name: list(p.shape) for name, p in block.named_parameters()} == {
        "conv1.kernel": [27, 4, 4], "norm1.bn.weight": [4], "norm1.bn.bias": [4], "conv2.kernel": [27, 4, 4],
        "norm2.bn.weight": [4], "norm2.bn.bias": [4],
    }  # fmt: skip
    assert ME.MinkowskiConvolution(4, 3, kernel_size=2, bias=True, dimension=3).bias.shape == (1, 3)
    copied = copy.deepcopy(block)
    x = cloud()
    x.float()
    assert torch.equal(copied(x).F, block(x).F)


def test_stacks_and_blocks_run():
    x = cloud()
    stack = ME.MinkowskiStackSum(torch.nn.Identity(), ME.MinkowskiReLU(), ME.MinkowskiReLU())
    torch.testing.assert_close(stack(x).F, x.F + 2 * x.F.relu())
    for both, function in ((ME.mean, torch.mean), (ME.var, lambda t, d: t.var(d, unbiased=False)), (ME.sum, torch.sum)):
        torch.testing.assert_close(both(x, x * 2, x * 5).F, function(torch.stack([x.F, x.F * 2, x.F * 5]), 0))
    block = SEBasicBlock(4, 4, reduction=2, D=3).double()
    block(x).F.sum().backward()
    assert all(p.grad is not None for p in block.parameters())


# Utilities


def test_collation():
    clouds = [torch.tensor([[0.5, 1.5]]), torch.tensor([[-0.5, 2.0], [3.0, 3.0]])]
    coordinates, features, labels = ME.utils.sparse_collate(
        clouds, [torch.ones(1, 2), torch.zeros(2, 2)], [np.array([1]), np.array([2, 3])]
    )
    assert coordinates.tolist() == [[0, 0, 1], [1, -1, 2], [1, 3, 3]]
    assert coordinates.dtype == torch.int32
    assert features.shape == (3, 2)
    assert labels.tolist() == [1, 2, 3]
    pairs = [(clouds[0], torch.ones(1, 2)), (clouds[1], torch.zeros(2, 2))]
    exact = ME.utils.batch_sparse_collate(pairs, dtype=torch.float32)[0]
    assert exact.tolist() == [[0, 0.5, 1.5], [1, -0.5, 2], [1, 3, 3]]
    limited = ME.utils.SparseCollation(limit_numpoints=2)
    triples = [(*pair, torch.zeros(len(pair[0]))) for pair in pairs]
    assert limited(triples)[0].tolist() == [[0, 0, 1]]


@pytest.mark.parametrize("kind", ["array", "tensor"])
def test_quantization(kind):
    points = np.array([[0.05, -0.05], [0.06, -0.01], [0.15, 0.0], [0.01, -0.09]])
    features = np.arange(4.0)[:, None]
    labels = np.array([1, 2, 3, 1], dtype=np.int32)
    if kind == "tensor":
        points, features, labels = (torch.from_numpy(t) for t in (points, features, labels))
    cells, kept, index, inverse = ME.utils.sparse_quantize(
        points, features, return_index=True, return_inverse=True, quantization_size=0.1
    )
    assert (cells.tolist(), kept.tolist()) == ([[0, -1], [1, 0]], [[0], [2]])
    assert (index.tolist(), inverse.tolist()) == ([0, 2], [0, 0, 1, 0])
    cells, found = ME.utils.sparse_quantize(points, labels=labels, ignore_label=-7, quantization_size=[0.1, 0.1])
    assert (type(cells), found.tolist()) == (type(points), [-7, 3])
    assert ME.utils.sparse_quantize(points, return_maps_only=True, quantization_size=0.1).tolist() == [0, 2]


def test_hashes():
    rows = np.array([[0, 0], [1, 0], [0, 5], [1, 5], [-1, 2]])
    assert ME.utils.ravel_hash_vec(rows).tolist() == [6, 12, 11, 17, 2]
    assert len(set(ME.utils.fnv_hash_vec(rows).tolist())) == 5


def test_products_with_sparse_matrices():
    rows, cols = torch.tensor([1, 0, 1]), torch.tensor([0, 2, 2])
    vals, mat = torch.tensor([2.0, 3, 5]), torch.randn(3, 4, requires_grad=True)
    dense = torch.zeros(3, 3).index_put((rows, cols), vals)
    torch.testing.assert_close(ME.spmm(rows, cols, vals, [3, 3], mat), dense @ mat)
    mean = ME.MinkowskiSPMMAverageFunction().apply(rows, cols, [3, 3], mat)
    torch.testing.assert_close(mean, torch.stack([mat[2], (mat[0] + mat[2]) / 2, torch.zeros(4)]))


def test_a_summary_counts_parameters(capsys):
    conv = ME.MinkowskiConvolution(4, 3, kernel_size=2, bias=True, dimension=3).double()
    assert ME.utils.summary(torch.nn.Sequential(conv, ME.MinkowskiReLU()), cloud()) == (99, 99)
    assert "MinkowskiConvolution" in capsys.readouterr().out


def test_bad_calls_say_what_is_wrong():
    x = cloud()
    for call, words in (
        (lambda: ME.SparseTensor(torch.ones(2, 1), ints([[0, 1]])), "coordinates must have shape"),
        (lambda: ME.SparseTensor(torch.ones(1), ints([[0, 1]])), "features must have shape"),
        (lambda: ME.SparseTensor(torch.ones(1, 1)), "either coordinates"),
        (lambda: ME.SparseTensor(torch.ones(1, 1), ints([[-1, 1]])), "must not be negative"),
        (lambda: ME.MinkowskiConvolution(4, 3, kernel_size=3), "dimension must be positive"),
        (lambda: ME.MinkowskiConvolution(4, 3, kernel_size=3, dimension=2)(x), "input must have 2 axes"),
        (lambda: ME.MinkowskiConvolution(5, 3, kernel_size=3, dimension=3).double()(x), "Cin"),
        (lambda: ME.MinkowskiPruning()(x, torch.ones(2, dtype=torch.bool)), "mask must have shape"),
        (lambda: ME.MinkowskiConvolutionTranspose(4, 3, kernel_size=2, stride=2, dimension=3)(x), "divisible"),
        (lambda: ME.KernelGenerator([3, 3], dimension=3), "3 axes"),
        (lambda: ME.utils.sparse_quantize(torch.ones(2, 2), return_inverse=True), "goes with return_index"),
    ):
        with pytest.raises((ValueError, TypeError), match=words):
            call()


def test_nothing_to_pool_is_zero():
    x = ME.SparseTensor(torch.tensor([[1.0], [2], [3]]), ints([[0, 0], [1, 1], [1, 3]]))
    ME.MinkowskiGlobalAvgPooling()(x)
    gone = ME.MinkowskiPruning()(x, torch.tensor([False, True, True]))
    for pool, value in ((ME.MinkowskiGlobalAvgPooling, 2.5), (ME.MinkowskiGlobalMaxPooling, 3)):
        assert pool()(gone).F.tolist() == [[0], [value]]
    for pool in (ME.MinkowskiMaxPooling, ME.MinkowskiAvgPooling, ME.MinkowskiSumPooling):
        y = pool(kernel_size=1, stride=2, dimension=1)(x - 9)
        assert (y.C.tolist(), y.F.tolist()) == ([[0, 0], [1, 0], [1, 2]], [[-8], [0], [0]])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_types_and_autocast(dtype):
    x = cloud()
    x.float()
    net = torch.nn.Sequential(
        ME.MinkowskiConvolution(4, 8, kernel_size=3, stride=2, bias=True, dimension=3),
        ME.MinkowskiInstanceNorm(8),
        ME.MinkowskiReLU(),
        ME.MinkowskiConvolutionTranspose(8, 4, kernel_size=2, stride=2, dimension=3),
    )
    expected = net(x).F
    with torch.autocast("cpu", dtype=dtype):
        found = net(x).F
    assert found.dtype == dtype
    torch.testing.assert_close(found.float(), expected, rtol=0.05, atol=0.05)
    halves = net.to(dtype)(x._like(x.F.detach().to(dtype))).F
    torch.testing.assert_close(halves.float(), expected, rtol=0.05, atol=0.05)


def test_tensors_without_sites():
    x = ME.SparseTensor(torch.empty(0, 4), torch.empty(0, 4, dtype=torch.int32))
    conv = ME.MinkowskiConvolution(4, 3, kernel_size=3, stride=2, dimension=3)
    pool = ME.MinkowskiMaxPooling(kernel_size=2, stride=2, dimension=3)
    up = ME.MinkowskiGenerativeConvolutionTranspose(3, 2, kernel_size=2, stride=2, dimension=3)
    assert (conv(x).shape, pool(x).shape, up(conv(x)).shape) == ((0, 3), (0, 4), (0, 2))


SUPPLIED = """
import triops.compat.minkowski_engine
import MinkowskiEngine as ME
from MinkowskiEngine.MinkowskiConvolution import MinkowskiConvolutionBase
import MinkowskiEngine.MinkowskiOps as me
import MinkowskiEngineBackend._C as _C
import MinkowskiFunctional
from MinkowskiCommon import convert_to_int_list
from MinkowskiEngine.modules.resnet_block import BasicBlock
from MinkowskiEngine.utils import sparse_quantize
assert issubclass(ME.MinkowskiConvolution, MinkowskiConvolutionBase)  # not hidden by the module of its name
assert me.cat is ME.cat and _C.RegionType.HYPER_CUBE == 0 and ME.__version__.startswith("0.5.4")
assert MinkowskiFunctional.relu is ME.MinkowskiFunctional.relu
"""


def test_it_is_found_under_the_names_that_programs_import():
    subprocess.run([sys.executable, "-c", SUPPLIED], check=True)
