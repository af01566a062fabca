"""Facts about the supplied package `spconv`: when it is supplied, its voxel generators, functions and checkpoints."""

from __future__ import annotations

import importlib
import inspect
import io
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import triops
import triops.nn
import triops.spconv
import triops.spconv.cumm.tensorview as tv
import triops.spconv.pytorch as spconv
from triops.compat import _finder, _startup
from triops.nn import Activation
from triops.spconv import constants, test_utils, utils
from triops.spconv.pytorch import functional, ops
from triops.spconv.pytorch.core import expand_nd, scatter_nd
from triops.spconv.pytorch.hash import HashTable
from triops.spconv.pytorch.spatial import RemoveDuplicate
from triops.spconv.pytorch.utils import PointToVoxel, gather_features_by_pc_voxel_id

NAMES = ("spconv", "cumm")


def ours(name: str) -> bool:
    return name.partition(".")[0] in NAMES


@pytest.fixture
def clean(monkeypatch):
    """Nothing supplied, and nothing imported under the names that are."""
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    _finder.uninstall()
    before = {name: sys.modules.pop(name) for name in [*sys.modules] if ours(name)}
    if importlib.util.find_spec("spconv") is not None:
        pytest.skip("spconv is installed")
    yield
    for name in [n for n in sys.modules if ours(n)]:
        del sys.modules[name]
    sys.modules.update(before)


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


# when it is supplied


def test_without_activation_there_is_no_spconv(clean):
    for name in NAMES:
        with pytest.raises(ModuleNotFoundError, match=name):
            importlib.import_module(name)


def test_every_module_that_programs_import_is_there_and_says_whose_it_is(clean):
    _finder.install("spconv", "cumm")
    for name in (
        "spconv", "spconv.constants", "spconv.core", "spconv.utils", "spconv.tools", "spconv.pytorch",
        "spconv.pytorch.conv", "spconv.pytorch.core", "spconv.pytorch.functional", "spconv.pytorch.hash",
        "spconv.pytorch.identity", "spconv.pytorch.modules", "spconv.pytorch.ops", "spconv.pytorch.pool",
        "spconv.pytorch.tables", "spconv.pytorch.utils", "spconv.test_utils", "cumm", "cumm.tensorview",
        "cumm.tensorview.gemm",
    ):  # fmt: skip
        module = importlib.import_module(name)
        assert repr(module) == f"<module '{name}' (triops)>"
        assert _finder.is_ours(module)
    assert sys.modules["spconv.pytorch.conv"].SubMConv3d is spconv.SubMConv3d
    assert sys.modules["spconv"].pytorch is sys.modules["spconv.pytorch"]
    with pytest.raises(ModuleNotFoundError, match=r"spconv\.build"):
        importlib.import_module("spconv.build")


def test_openpcdet_and_mmdet3d_see_a_recent_spconv(clean):
    """The first asks for `float(version[2:])`, the second for `version >= "2.0.0"`; and it sets a constant."""
    _finder.install("spconv")
    supplied = importlib.import_module("spconv")
    assert float(supplied.__version__[2:]) >= 2.2
    assert supplied.__version__ >= "2.0.0"
    assert supplied.SPCONV_VERSION_NUMBERS == [2, 3, 8]
    supplied.constants.SPCONV_USE_DIRECT_TABLE = False
    assert importlib.import_module("spconv.constants").SPCONV_USE_DIRECT_TABLE is False


@pytest.mark.parametrize("installed", ["package", "module"])
def test_an_installed_spconv_wins_with_all_its_modules(clean, tmp_path, monkeypatch, installed):
    if installed == "package":
        (tmp_path / "spconv").mkdir()
        (tmp_path / "spconv/__init__.py").write_text("__version__ = 'real'")
    else:
        (tmp_path / "spconv.py").write_text("__version__ = 'real'")
    monkeypatch.syspath_prepend(tmp_path)
    _finder.install("spconv", "cumm")
    assert importlib.import_module("spconv").__version__ == "real"
    with pytest.raises(ModuleNotFoundError, match=r"spconv\.pytorch"):
        importlib.import_module("spconv.pytorch")
    assert any(line.startswith("spconv: spconv's own") and str(tmp_path) in line for line in _startup.status())


def test_info_says_whose_spconv_is_in_use(clean):
    assert "spconv: none. Remedy: `import triops.compat.spconv` before it, or `triops activate`" in _startup.status()
    _finder.install("spconv")
    assert "spconv: of triops" in _startup.status()


def test_activation_at_start_supplies_spconv_and_deactivation_ends_it(tmp_path):
    if importlib.util.find_spec("spconv") is not None:
        pytest.skip("spconv is installed")
    triops.compat.activate(tmp_path)
    code = f"""
import site, sys
site.addsitedir({str(tmp_path)!r})
assert "torch" not in sys.modules and "triops" not in sys.modules
try:
    import spconv.pytorch as spconv
    from cumm import tensorview
    print(spconv.SubMConv3d(1, 2, 3).weight.shape)
except ModuleNotFoundError as error:
    print(error.name)
"""
    assert run(code) == "torch.Size([2, 3, 3, 3, 1])"
    triops.compat.deactivate(tmp_path)
    assert run(code) == "spconv"


def test_importing_the_compat_module_is_enough():
    if importlib.util.find_spec("spconv") is not None:
        pytest.skip("spconv is installed")
    assert run("import triops.compat.spconv, spconv.pytorch; print(spconv)") == "<module 'spconv' (triops)>"


# voxel generators

POINTS = np.array([[2.5, 0.5, 0.5, 7], [0.5, 0.5, 0.5, 8], [2.1, 0.9, 0.1, 9], [9, 0, 0, 1], [2.2, 0.2, 0.2, 3]], "f4")
SIZE, BOUNDS = [1.0, 1.0, 1.0], [0.0, 0.0, 0.0, 4.0, 2.0, 1.0]


def test_point_to_voxel_knows_the_voxel_of_every_point():
    """Of a point that found its voxel full as well; a point outside has none."""
    generator = PointToVoxel(SIZE, BOUNDS, 4, max_num_voxels=9, max_num_points_per_voxel=2)
    voxels, indices, counts, voxel_of_point = generator.generate_voxel_with_id(torch.from_numpy(POINTS))
    assert indices.tolist() == [[0, 0, 2], [0, 0, 0]]
    assert counts.tolist() == [2, 1]
    assert voxels[:, :, 3].tolist() == [[7, 9], [8, 0]]
    assert voxel_of_point.tolist() == [0, 1, 0, -1, 0]
    assert [part.tolist() for part in generator(torch.from_numpy(POINTS))] == [
        part.tolist() for part in (voxels, indices, counts)
    ]
    assert generator.grid_size == [1, 2, 4]
    assert generator.grid_stride == [8, 4, 1]
    assert generator.coors_range == [0, 0, 0, 1, 2, 4]


def test_points_of_a_voxel_beyond_the_last_have_none():
    generator = PointToVoxel(SIZE, BOUNDS, 4, max_num_voxels=1, max_num_points_per_voxel=2)
    *_, counts, voxel_of_point = generator.generate_voxel_with_id(torch.from_numpy(POINTS))
    assert counts.tolist() == [2]
    assert voxel_of_point.tolist() == [0, -1, 0, -1, 0]


def test_free_places_take_the_mean_when_asked():
    generator = PointToVoxel(SIZE, BOUNDS, 4, max_num_voxels=9, max_num_points_per_voxel=4)
    voxels = generator(torch.from_numpy(POINTS), empty_mean=True)[0]
    assert voxels[0, :, 3].tolist() == pytest.approx([7, 9, 3, 19 / 3])
    assert voxels[1, :, 3].tolist() == [8, 8, 8, 8]


@pytest.mark.parametrize("axes", [1, 2, 3, 4])
def test_voxels_in_one_to_four_dimensions_are_those_of_a_dictionary(axes):
    points = torch.from_numpy(np.random.default_rng(0).uniform(-0.3, 2.3, (400, axes + 1)).astype("f4"))
    generator = PointToVoxel([0.5] * axes, [0.0] * axes + [2.0] * axes, axes + 1, 12, 3)
    voxels, indices, counts, voxel_of_point = generator.generate_voxel_with_id(points)
    seen: dict[tuple[int, ...], list[int]] = {}
    expected = []
    for row, point in enumerate(points):
        cell = tuple(int(c) for c in (point[:axes] / 0.5).floor().flip(0))
        if not all(0 <= c < 4 for c in cell) or (cell not in seen and len(seen) == 12):
            expected.append(-1)
            continue
        seen.setdefault(cell, []).append(row)
        expected.append(list(seen).index(cell))
    assert [tuple(row) for row in indices.tolist()] == list(seen)
    assert voxel_of_point.tolist() == expected
    assert counts.tolist() == [min(len(rows), 3) for rows in seen.values()]
    for voxel, rows in zip(voxels, seen.values(), strict=True):
        assert torch.equal(voxel[: len(rows[:3])], points[rows[:3]])
    empty = generator.generate_voxel_with_id(points[:0])
    assert [list(part.shape) for part in empty] == [[0, 3, axes + 1], [0, axes], [0], [0]]


def test_the_generators_of_both_spconvs_give_the_same_voxels():
    new = utils.Point2VoxelCPU3d(
        vsize_xyz=SIZE, coors_range_xyz=BOUNDS, num_point_features=4, max_num_points_per_voxel=2, max_num_voxels=9
    )
    voxels, indices, counts = (part.numpy() for part in new.point_to_voxel(tv.from_numpy(POINTS)))
    assert new.grid_size == [1, 2, 4]
    old = utils.VoxelGeneratorV2(voxel_size=SIZE, point_cloud_range=BOUNDS, max_num_points=2, max_voxels=9)
    found = old.generate(POINTS)
    assert np.array_equal(found["voxels"], voxels)
    assert np.array_equal(found["coordinates"], indices)
    assert np.array_equal(found["num_points_per_voxel"], counts)
    assert found["voxel_point_mask"][:, :, 0].tolist() == [[1, 1], [1, 0]]
    oldest = utils.VoxelGenerator(SIZE, BOUNDS, 2, 9, full_mean=False).generate(POINTS)
    assert all(np.array_equal(a, b) for a, b in zip(oldest, (voxels, indices, counts), strict=True))
    assert old.grid_size.tolist() == [4, 2, 1]
    assert old.point_cloud_range.tolist() == BOUNDS
    padded = old.generate_multi_gpu(POINTS)
    assert padded["voxels"].shape == (9, 2, 4)
    assert padded["voxel_num"] == 2


def test_spconv_1_fills_voxels_with_their_mean_unless_told_otherwise():
    voxels, *_ = utils.VoxelGenerator(SIZE, BOUNDS, 2, 9).generate(POINTS)
    assert voxels[1, :, 3].tolist() == [8, 8]
    mean = utils.Point2VoxelCPU3d(SIZE, BOUNDS, 4, 9, 2).point_to_voxel_empty_mean(tv.from_numpy(POINTS))[0]
    assert np.array_equal(mean.numpy(), voxels)


def test_voxels_of_float64_points_are_float32():
    voxels, *_ = utils.Point2VoxelCPU3d(SIZE, BOUNDS, 4, 9, 2).point_to_voxel(tv.from_numpy(POINTS.astype("f8")))
    assert voxels.numpy().dtype == np.float32


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([1.0, 1.0], BOUNDS, 4, 9, 2), "3 numbers, got 2"),
        (([1.0, 1.0, 0.0], BOUNDS, 4, 9, 2), "above 0"),
        ((SIZE, BOUNDS[:4], 4, 9, 2), "twice as many, got 3 and 4"),
        ((SIZE, BOUNDS[3:] + BOUNDS[:3], 4, 9, 2), "at least one voxel"),
    ],
)
def test_a_bad_grid_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        utils.Point2VoxelCPU3d(*arguments)


def test_points_of_another_width_are_refused():
    with pytest.raises(ValueError, match=r"points must have shape \[N, 4\].*got \[5, 3\]"):
        PointToVoxel(SIZE, BOUNDS, 4, 9, 2)(torch.from_numpy(POINTS)[:, :3])


def test_features_of_voxels_go_back_to_points():
    features = torch.tensor([[1.0, 2.0], [3.0, 4.0]], requires_grad=True)
    back = gather_features_by_pc_voxel_id(features, torch.tensor([1, -1, 0, 1]), invalid_value=-7)
    assert back.tolist() == [[3, 4], [-7, -7], [1, 2], [3, 4]]
    back.sum().backward()
    assert features.grad.tolist() == [[1, 1], [2, 2]]


def test_tensorview_holds_arrays():
    array = np.zeros((2, 3), "f4")
    tensor = tv.from_numpy(array)
    array[0, 0] = 5
    assert tensor.numpy_view()[0, 0] == 5, "memory is shared"
    copied = tensor.numpy()
    array[0, 0] = 6
    assert copied[0, 0] == 5
    assert (tensor.shape, tensor.ndim, tensor.dtype, tensor.device, tensor.size) == ([2, 3], 2, tv.float32, -1, 6)
    assert tv.zeros([2], np.int32).numpy().dtype == np.int32
    assert tv.full([2], 3, tv.int64).numpy().tolist() == [3, 3]


# overlaps by corners


def corners(x: float, y: float, width: float, height: float, angle: float) -> list[list[float]]:
    along = np.array([np.cos(angle), np.sin(angle)]) * width / 2
    across = np.array([-np.sin(angle), np.cos(angle)]) * height / 2
    return [([x, y] + i * along + j * across).tolist() for i, j in ((-1, -1), (1, -1), (1, 1), (-1, 1))]


def test_overlaps_of_rotated_boxes_by_their_corners():
    boxes = np.array([corners(0, 0, 2, 2, 0.0), corners(5, 5, 4, 2, 0.3)])
    queries = np.array([corners(1, 0, 2, 2, np.pi / 2), corners(5, 5, 2, 4, 0.3 + np.pi / 2)])
    near = np.ones((2, 2))
    assert utils.rbbox_iou(boxes, queries, near, 0.0) == pytest.approx(np.array([[1 / 3, 0], [0, 1]]), abs=1e-6)
    assert utils.rbbox_intersection(boxes, queries, near, 0.0) == pytest.approx(np.array([[2, 0], [0, 8]]), abs=1e-5)
    assert utils.rbbox_iou_loss(boxes, queries) == pytest.approx(np.array([1 / 3, 1]), abs=1e-6)
    assert utils.rbbox_iou(boxes, queries, near * 0, 0.0).max() == 0, "pairs that were ruled out beforehand"


def test_suppression_by_order():
    boxes = np.array([[0.0, 0, 2, 2], [0, 0, 2, 2.2], [5, 5, 6, 6]])
    assert utils.non_max_suppression_cpu(boxes, np.array([1, 0, 2]), 0.5) == [1, 2]
    assert utils.non_max_suppression_cpu(boxes, np.array([2, 0, 1]), 0.95) == [2, 0, 1]
    rotated = np.array([corners(0, 0, 2, 2, 0.1), corners(0.1, 0, 2, 2, 0.1), corners(9, 9, 2, 2, 0.0)])
    assert utils.rotate_non_max_suppression_cpu(rotated, np.array([1, 0, 2]), np.ones((3, 3)), 0.5) == [1, 2]
    assert utils.rotate_non_max_suppression_cpu(rotated, np.array([1, 0, 2]), np.eye(3), 0.5) == [1, 0, 2]


# functions

SHAPE = [5, 6, 7]


def sites(seed: int, count: int = 40) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    rows = torch.cat([torch.randint(0, size, (count, 1), generator=generator) for size in (2, *SHAPE)], 1)
    unique = rows.unique(dim=0)
    return unique[torch.randperm(len(unique), generator=generator)].int()


def sparse(seed: int, channels: int = 3, count: int = 40) -> spconv.SparseConvTensor:
    indices = sites(seed, count)
    features = torch.randn(len(indices), channels, generator=torch.Generator().manual_seed(seed))
    return spconv.SparseConvTensor(features, indices, SHAPE, 2)


@pytest.mark.parametrize("add", [functional.sparse_add, functional.sparse_add_hash_based])
def test_the_sum_of_tensors_with_different_sites_is_the_sum_of_the_grids(add):
    tensors = [sparse(seed) for seed in range(3)]
    total = add(*tensors)
    torch.testing.assert_close(total.dense(), sum(x.dense() for x in tensors))
    assert len(total.indices) == len(torch.cat([x.indices for x in tensors]).unique(dim=0))
    assert total.indice_dict == {}


def test_a_tensor_that_has_all_sites_keeps_their_order_and_its_rulebooks():
    whole = spconv.SubMConv3d(3, 3, 3, indice_key="a")(sparse(0))
    part = spconv.SparseConvTensor(torch.ones(5, 3), whole.indices[3:8], SHAPE, 2)
    total = functional.sparse_add(part, whole)
    assert total.indices is whole.indices
    assert "a" in total.indice_dict
    torch.testing.assert_close(total.dense(), whole.dense() + part.dense())


def test_gradients_flow_through_the_sum():
    a, b = sparse(0), sparse(1)
    features = [x.features.clone().requires_grad_() for x in (a, b)]
    total = spconv.AddTableMisaligned()([a.replace_feature(features[0]), b.replace_feature(features[1])])
    total.features.sum().backward()
    assert all(torch.equal(f.grad, torch.ones_like(f)) for f in features)


@pytest.mark.parametrize("kind", ["subm", "strided", "inverse"])
def test_a_convolution_by_pairs_is_the_layer(kind):
    x = sparse(0)
    stride, padding = ([1] * 3, [1] * 3) if kind == "subm" else ([2] * 3, [1] * 3)
    out_indices, pairs, number = ops.get_indice_pairs(
        x.indices, 2, SHAPE, spconv.ConvAlgo.Native, [3] * 3, stride, padding, [1] * 3, [0] * 3, kind == "subm"
    )
    assert list(pairs.shape) == [2, 27, len(x.indices)]
    features = x.features.clone().requires_grad_()
    if kind == "subm":
        layer = spconv.SubMConv3d(3, 4, 3)
        expected = layer(x).features
        got = functional.indice_subm_conv(features, layer.weight, pairs, number, len(out_indices), bias=layer.bias)
    else:
        down = spconv.SparseConv3d(3, 4, 3, stride=2, padding=1, indice_key="down")
        y = down(x)
        assert torch.equal(y.indices, out_indices)
        expected = y.features
        got = functional.indice_conv(features, down.weight, pairs, number, len(out_indices), bias=down.bias)
        if kind == "inverse":
            back = spconv.SparseInverseConv3d(4, 3, 3, "down", bias=False)
            expected = back(y).features
            got = functional.indice_inverse_conv(got, back.weight, pairs, number, len(x.indices))
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
    got.sum().backward()
    assert features.grad.isfinite().all()


def test_submanifold_pairs_are_counted_as_spconv_counts_them_before_the_centre_alone():
    """Sites 0, 1 and 3 of a line: at offset 0 site 1 reads site 0, at offset 2 site 0 reads site 1."""
    sites = torch.tensor([[0, 0], [0, 1], [0, 3]]).int()
    _, pairs, number = ops.get_indice_pairs(sites, 1, [5], spconv.ConvAlgo.Native, [3], [1], [1], [1], [0], True)
    assert number.tolist() == [1, 0, 0]
    assert (pairs[:, 0, 0].tolist(), pairs[:, 2, 0].tolist()) == ([0, 1], [1, 0])
    features, filters = torch.tensor([[1.0], [2.0], [3.0]]), torch.tensor([[[100.0], [1.0], [10.0]]])
    convolved = functional.indice_subm_conv(features, filters, pairs, number, 3)
    assert convolved.flatten().tolist() == [1 + 20, 2 + 100, 3]
    grad_features, grad_filters = ops.indice_conv_backward(
        features, filters, torch.ones(3, 1), pairs, number, subm=True
    )
    assert grad_features.flatten().tolist() == [1 + 100, 1 + 10, 1]
    assert grad_filters.flatten().tolist() == [1, 6, 2]


@pytest.mark.parametrize(("kernel", "rows", "message"), [(2, 3, "odd kernel"), (3, 4, "num_activate_out must be")])
def test_a_submanifold_convolution_by_pairs_needs_a_centre_and_keeps_its_rows(kernel, rows, message):
    pairs, number = torch.zeros(2, kernel, 3).int(), torch.zeros(kernel).int()
    with pytest.raises(ValueError, match=message):
        functional.indice_subm_conv(torch.zeros(3, 1), torch.zeros(1, kernel, 1), pairs, number, rows)


def test_the_raw_backward_is_autograds():
    x = sparse(0)
    out_indices, pairs, number = ops.get_indice_pairs(
        x.indices, 2, SHAPE, spconv.ConvAlgo.Native, [3] * 3, [2] * 3, [1] * 3, [1] * 3, [0] * 3
    )
    weight, grad = torch.randn(4, 3, 3, 3, 3), torch.randn(len(out_indices), 4)
    features = x.features.clone().requires_grad_()
    functional.indice_conv(features, weight, pairs, number, len(out_indices)).backward(grad)
    grad_features, grad_filters = ops.indice_conv_backward(x.features, weight, grad, pairs, number)
    torch.testing.assert_close(grad_features, features.grad)
    assert grad_filters.shape == weight.shape


def test_the_raw_maximum_starts_at_0_and_shares_the_gradient():
    pairs, number = torch.tensor([[[0, 1, 2]], [[0, 0, 1]]]).int(), torch.tensor([3]).int()
    features = torch.tensor([[2.0], [2.0], [-1.0]], requires_grad=True)
    out = functional.indice_maxpool(features, pairs, number, 2)
    assert out.tolist() == [[2], [0]]
    out.sum().backward()
    assert features.grad.tolist() == [[1], [1], [0]]


def test_what_only_cuda_layers_use_raises_by_name():
    with pytest.raises(NotImplementedError, match="get_indice_pairs_implicit_gemm"):
        ops.get_indice_pairs_implicit_gemm(torch.zeros(1, 4))


def test_a_tensor_knows_the_pairs_of_a_layer_by_its_key() -> None:
    """SphereFormer moves coordinates down its network by them."""
    sites = torch.tensor([[0, 1], [0, 2], [0, 6], [1, 3]], dtype=torch.int32)
    x = spconv.SparseConvTensor(torch.ones(4, 2), sites, [8], 2)
    for key, layer in (("down", spconv.SparseConv1d(2, 2, 2, stride=2, indice_key="down")),
                       ("same", spconv.SubMConv1d(2, 2, 3, indice_key="same"))):  # fmt: skip
        data = layer(x).indice_dict[key]
        steps = data.ksize, data.stride, data.padding, data.dilation, [0]
        pairs, numbers = ops.get_indice_pairs(sites, 2, [8], spconv.ConvAlgo.Native, *steps, data.is_subm)[1:]
        assert torch.equal(data.indice_pairs, pairs)
        assert torch.equal(data.indice_pair_num, numbers)


def test_the_table_finds_replaces_and_numbers_keys():
    table = HashTable(torch.device("cpu"), torch.int32, torch.int64, max_size=16)
    table.insert(torch.tensor([5, 9, 5]).int(), torch.tensor([1, 2, 3]))
    values, missing = table.query(torch.tensor([9, 4, 5]).int())
    assert (values.tolist(), missing.tolist()) == ([2, 0, 3], [False, True, False])
    assert table.insert_exist_keys(torch.tensor([9, 4]).int(), torch.tensor([7, 8])).tolist() == [0, 1]
    keys, values, count = table.items()
    assert (keys.tolist(), values.tolist(), count.tolist()) == ([5, 9], [3, 7], [2])
    table.insert(torch.tensor([2]).int())
    assert table.assign_arange_().item() == 3
    assert table.query(torch.tensor([2, 5, 9]).int())[0].tolist() == [0, 1, 2]
    empty = HashTable("cpu", torch.int64, torch.int32)
    assert empty.query(torch.tensor([1]))[1].tolist() == [True]


def test_small_helpers():
    assert expand_nd(3, 2) == [2, 2, 2]
    assert expand_nd(2, (1, 3)) == [1, 3]
    assert scatter_nd(torch.tensor([[1], [0]]), torch.tensor([[2.0], [3.0]]), [3, 1]).tolist() == [[3], [2], [0]]
    rows, counts = ops.global_pool_rearrange(torch.tensor([[1, 0], [0, 0], [1, 1]]), 2)
    assert (rows[1, :2].tolist(), counts.tolist()) == ([0, 2], [1, 2])
    twice = spconv.SparseConvTensor(torch.arange(3.0)[:, None], torch.tensor([[0, 2], [0, 1], [0, 2]]).int(), [4], 1)
    assert RemoveDuplicate()(twice).features.tolist() == [[0], [1]]


def test_random_sparse_data_are_sites_of_a_dense_array():
    np.random.seed(0)
    made = test_utils.generate_sparse_data([4, 6], [5, 3], 2, shape_scale=2)
    *site, element = made["indices"].T
    assert made["indices"].dtype == np.int32
    assert np.bincount(element).tolist() == [5, 3]
    assert len(np.unique(made["indices"], axis=0)) == 8
    assert not (made["indices"][:, :2] % 2).any()
    assert made["features_dense"].shape == (2, 2, 4, 6)
    np.testing.assert_array_equal(made["features_dense"][element, :, site[0], site[1]], made["features"])
    assert np.count_nonzero(made["features_dense"]) == 16


@pytest.mark.parametrize(("left", "right"), [([1.0], [1.1]), ([1.0, 1.0], [1.0]), ({"a": 1}, {"b": 1}), (1, [1])])
def test_comparisons_of_arrays_see_values_shapes_and_keys(left, right):
    case = test_utils.TestCase()
    case.assertAllClose(left, left)
    with pytest.raises(AssertionError):
        case.assertAllClose(left, right)
    with pytest.raises(AssertionError):
        case.assertAllEqual(left, right)


def test_tables_know_the_grid_of_their_inputs():
    branches = spconv.ConcatTable().add(spconv.Identity()).add(spconv.Identity())
    for module in (spconv.JoinTable(), spconv.AddTable(), spconv.AddTableMisaligned(), spconv.Identity(), branches):
        assert module.input_spatial_size([4, 5]) == [4, 5]


def test_printing_modules_return_their_input(capsys):
    x = spconv.SparseConvTensor(torch.tensor([[1.0], [4.0]]), torch.tensor([[0, 2], [0, 1]]).int(), [4], 1)
    assert spconv.modules.PrintTensorMeta()(x) is x
    assert spconv.modules.PrintCurrentTime()(x, "later", reset=True) is x
    printed = capsys.readouterr().out
    assert "tensor(1.) tensor(4.) tensor(2.5000)" in printed
    assert "later" in printed


# layers


@pytest.mark.parametrize(
    ("activation", "alpha", "expected"),
    [
        (Activation.None_, 0.0, lambda x: x),
        (Activation.ReLU, 0.0, torch.relu),
        (Activation.Sigmoid, 0.0, torch.sigmoid),
        (Activation.LeakyReLU, 0.25, lambda x: nn.functional.leaky_relu(x, 0.25)),
    ],
)
def test_an_activation_comes_behind_bias_and_sum(activation, alpha, expected):
    torch.manual_seed(0)
    x = sparse(0)
    plain = spconv.conv.SparseConvolution(3, 3, 3, 3, subm=True)
    fused = spconv.conv.SparseConvolution(3, 3, 3, 3, subm=True, act_type=activation, act_alpha=alpha)
    fused.load_state_dict(plain.state_dict())
    assert torch.equal(fused(x).features, expected(plain(x).features))
    assert torch.equal(fused(x, add_input=x).features, expected(plain(x, add_input=x).features))
    fused(x).features.sum().backward()
    assert fused.weight.grad.isfinite().all()


def test_an_unknown_activation_is_refused():
    with pytest.raises(ValueError, match=r"act_type must be one of None_, ReLU, Sigmoid, LeakyReLU, .*got 'tanh'"):
        spconv.conv.SparseConvolution(3, 3, 3, act_type="tanh")


def test_the_base_class_takes_spconvs_arguments_in_spconvs_order():
    assert list(inspect.signature(spconv.conv.SparseConvolution).parameters) == [
        "ndim", "in_channels", "out_channels", "kernel_size", "stride", "padding", "dilation", "groups", "bias", "subm",
        "output_padding", "transposed", "inverse", "indice_key", "algo", "fp32_accum", "record_voxel_count", "act_type",
        "act_alpha", "act_beta", "large_kernel_fast_algo", "name", "device", "dtype",
    ]  # fmt: skip


def test_members_that_programs_copy_travel_with_the_tensor():
    x = sparse(0)
    y = spconv.SparseConvTensor(
        x.features, x.indices, x.spatial_shape, x.batch_size, x.grid, x.voxel_num, x.indice_dict
    )
    for name in ("benchmark", "benchmark_record", "thrust_allocator", "_timer", "force_algo", "int8_scale"):
        setattr(y, name, getattr(x, name))
    y._timer = timer = triops.spconv.tools.CUDAKernelTimer(True)
    y.int8_scale = 0.5
    z = spconv.SparseConv3d(3, 4, 3, stride=2)(y).replace_feature(torch.zeros(1, 4))
    assert z._timer is timer
    assert z.int8_scale == 0.5
    with timer.namespace("layer"), timer.record("product"):
        pass
    assert timer.get_all_pair_time() == {}


def test_names_for_layers_and_what_a_rulebook_was_made_for():
    net = spconv.SparseSequential(spconv.SparseConv3d(3, 4, 3, stride=2, padding=1, indice_key="down"))
    spconv.assign_name_for_sparse_modules(net)
    assert net[0]._sparse_unique_name == "0"
    data = net(sparse(0)).find_indice_pair("down")
    assert (data.ksize, data.stride, data.padding, data.dilation) == ([3] * 3, [2] * 3, [1] * 3, [1] * 3)


# checkpoints


class Net(nn.Module):
    """Layers of every kind, with a kernel of one offset, and channels that do and do not differ."""

    def __init__(self, layers=spconv) -> None:
        super().__init__()
        self.stem = layers.SubMConv3d(3, 8, 3, bias=False, indice_key="a")
        self.same = layers.SubMConv3d(8, 8, 3, indice_key="a")
        self.point = layers.SubMConv3d(8, 4, 1)
        self.down = layers.SparseConv3d(4, 6, (3, 1, 1), stride=(2, 1, 1), indice_key="b")
        self.up = layers.SparseInverseConv3d(6, 5, (3, 1, 1), indice_key="b")

    def forward(self, x):
        return self.up(self.down(self.point(self.same(self.stem(x)))))


def features_of(state: dict[str, torch.Tensor]) -> torch.Tensor:
    net = Net()
    net.load_state_dict(state)
    return net(sparse(0)).features


def rewritten(state: dict[str, torch.Tensor], layout: str) -> dict[str, torch.Tensor]:
    """The file that another version saves for the same network: kernels first."""
    last = {"RSCK": lambda w: w.movedim(0, -1), "RSKC": lambda w: w.movedim(0, -2)}[layout]
    saved = {key: last(value).contiguous() if value.dim() == 5 else value for key, value in state.items()}
    # all versions read a kernel of one offset as [in, out]
    saved["point.weight"] = state["point.weight"].reshape(1, 1, 1, *((8, 4) if layout == "RSCK" else (4, 8)))
    return saved


def test_a_state_dict_of_spconv_2_loads_as_it_is():
    net = Net()
    stream = io.BytesIO()
    torch.save(net.state_dict(), stream)
    stream.seek(0)
    assert torch.equal(features_of(torch.load(stream, weights_only=True)), net(sparse(0)).features)


def test_a_state_dict_of_spconv_1_or_mmcv_loads_by_its_shapes():
    net = Net()
    saved = rewritten(net.state_dict(), "RSCK")
    assert saved["stem.weight"].shape == (3, 3, 3, 3, 8)
    before = {key: value.clone() for key, value in saved.items()}
    assert torch.equal(features_of(saved), net(sparse(0)).features)
    assert all(torch.equal(saved[key], before[key]) for key in saved), "the caller's dictionary stays as it was"


def test_a_state_dict_of_spconv_1_loads_into_the_layers_that_store_weights_so():
    class KernelFirst:
        def __getattr__(self, name):
            return type(name, (triops.nn.KernelFirstWeight, getattr(triops.nn, name)), {})

    net, theirs = Net(), Net(KernelFirst())
    theirs.load_state_dict(rewritten(net.state_dict(), "RSCK"))
    torch.testing.assert_close(theirs(sparse(0)).features, net(sparse(0)).features, rtol=1e-5, atol=1e-6)


def test_kernels_first_with_outputs_before_inputs_load_only_when_said(monkeypatch):
    net = Net()
    saved = rewritten(net.state_dict(), "RSKC")
    with pytest.raises(ValueError, match=r"SubMConv3d: weight must have shape \[8, 3, 3, 3, 3\].*LAYOUT=RSKC"):
        features_of(saved)
    monkeypatch.setattr(constants, "SAVED_WEIGHT_LAYOUT", "RSKC")
    assert torch.equal(features_of(saved), net(sparse(0)).features)


def test_a_layout_that_shapes_cannot_tell_is_told_by_the_environment(monkeypatch):
    conv = spconv.SubMConv3d(3, 3, 3, bias=False)
    old = {"weight": conv.weight.detach().movedim(0, -1).contiguous()}
    assert old["weight"].shape == conv.weight.shape
    same = spconv.SubMConv3d(3, 3, 3, bias=False)
    same.load_state_dict(old)
    assert torch.equal(same.weight, old["weight"]), "taken for a file of spconv 2"
    monkeypatch.setattr(constants, "SAVED_WEIGHT_LAYOUT", "RSCK")
    same.load_state_dict(old)
    assert torch.equal(same.weight, conv.weight)


def test_a_weight_that_fits_no_layout_is_torchs_error():
    with pytest.raises(RuntimeError, match="size mismatch"):
        spconv.SubMConv3d(3, 4, 3).load_state_dict({"weight": torch.zeros(3, 4, 3), "bias": torch.zeros(4)})


def test_quantised_weights_are_refused():
    weight = torch.zeros(4, 3, 3, 3, 3, dtype=torch.int8)
    with pytest.raises(TypeError, match="no quantised layers"):
        spconv.SubMConv3d(3, 4, 3).load_state_dict({"weight": weight, "bias": torch.zeros(4)})


def test_whole_modules_that_spconv_pickled_are_refused_and_ours_load():
    conv = spconv.SubMConv3d(3, 4, 3)
    assert torch.equal(pickle.loads(pickle.dumps(conv)).weight, conv.weight)
    conv.__dict__["conv1x1"] = False  # as spconv's own class has it
    with pytest.raises(TypeError, match="state_dict"):
        pickle.loads(pickle.dumps(conv))


def test_the_environment_variable_takes_known_layouts_only(monkeypatch):
    monkeypatch.setenv("SPCONV_SAVED_WEIGHT_LAYOUT", "HWIO")
    code = compile(Path(constants.__file__).read_text(), constants.__file__, "exec")
    with pytest.raises(ValueError, match="KRSC, RSKC or RSCK, got 'HWIO'"):
        exec(code, {"__file__": constants.__file__})


def test_a_reader_that_mmdetection3d_puts_into_sparse_modules_is_the_only_one(monkeypatch):
    """It turns weights of mmcv, which have no version, and leaves those of spconv 2 as they are."""

    def read(self, state_dict, prefix, local_metadata, *args):
        weight = state_dict[prefix + "weight"]
        self.weight.data.copy_(weight if local_metadata.get("version") == 2 else weight.movedim(-1, 0))

    theirs = torch.randn(3, 3, 3, 3, 3)  # as many channels as offsets along an axis: any order fits
    monkeypatch.setattr(spconv.SparseModule, "_version", 2, raising=False)
    monkeypatch.setattr(spconv.SparseModule, "_load_from_state_dict", read)
    layer = spconv.SubMConv3d(3, 3, 3, bias=False)
    layer.load_state_dict({"weight": theirs})
    assert torch.equal(layer.weight, theirs.movedim(-1, 0))
    again = spconv.SubMConv3d(3, 3, 3, bias=False)
    again.load_state_dict(layer.state_dict())
    assert torch.equal(again.weight, layer.weight)
    plain = triops.nn.SubMConv3d(3, 3, 3, bias=False)  # which no program expects to change
    plain.load_state_dict({"weight": theirs})
    assert torch.equal(plain.weight, theirs)


def test_every_module_of_spconvs_names_is_a_sparse_module():
    made = [
        spconv.SubMConv3d(1, 1, 3), spconv.SparseMaxPool3d(2), spconv.SparseAvgPool3d(2), spconv.SparseGlobalAvgPool(),
        spconv.SparseSequential(), spconv.JoinTable(), spconv.AddTable(), spconv.ConcatTable(), spconv.Identity(),
        spconv.ToDense(), spconv.RemoveGrid(),
    ]  # fmt: skip
    assert [type(m).__name__ for m in made if not isinstance(m, spconv.SparseModule)] == []
