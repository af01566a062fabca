"""Facts about extension modules that programs compile for themselves: which names are supplied, and what they do."""

from __future__ import annotations

import importlib
import math
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor
from torch.nn import functional

import triops
import triops.compat.mmcv
from triops.compat import _finder, bevfusion, mmdet3d, ms_deform_attn, pcdet, pointnet2

SUPPLIED = [
    "MultiScaleDeformableAttention", "groundingdino._C", "detrex._C", "pointnet2._ext", "pointnet2_ops._ext",
    "chamfer", "pointops._C", "pointgroup_ops", "projects.plugin.ops.deformable_aggregation_ext",
    "projects.ops.ingroup_inds.ingroup_inds_cuda", "det3d.ops.iou3d_nms.iou3d_nms_cuda",
    "mmdet3d.ops.bev_pool_v2.bev_pool_v2_ext", "mmdet3d.ops.voxel.voxel_layer",
    "projects.plugin.ops.occ_pooling.occ_pool_ext", "bevdepth.ops.voxel_pooling_train.voxel_pooling_train_ext",
    "bevdepth.ops.voxel_pooling_inference.voxel_pooling_inference_ext", "mmdet3d.ops.spconv.sparse_conv_ext",
    "mmdet3d.ops.iou3d.iou3d_cuda", "mmdet3d.ops.roiaware_pool3d.roiaware_pool3d_ext", "mmdet3d.ops.knn.knn_ext",
    "mmdet3d.ops.ball_query.ball_query_ext", "mmdet3d.ops.interpolate.interpolate_ext",
    "mmdet3d.ops.group_points.group_points_ext", "mmdet3d.ops.gather_points.gather_points_ext",
    "mmdet3d.ops.furthest_point_sample.furthest_point_sample_ext", "mmdet3d.ops.paconv.assign_score_withk_ext",
    "detectron2._C", "DCNv3", "pointops2_cuda", "sptr_cuda", "softgroup.ops.ops", "chamferdist._C",
]  # fmt: skip
TOPS = {name.partition(".")[0] for name in SUPPLIED}


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder, first on the path, with the packages that the modules belong to, and nothing supplied yet."""
    for name in SUPPLIED:
        if "." in name and not name.startswith(("pointops", "pointnet2.")):
            (tmp_path / name.replace(".", "/")).parent.mkdir(parents=True, exist_ok=True)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    _finder.uninstall()
    for name in [n for n in sys.modules if n.partition(".")[0] in TOPS]:
        monkeypatch.delitem(sys.modules, name)
    yield tmp_path
    for name in [n for n in sys.modules if n.partition(".")[0] in TOPS]:
        del sys.modules[name]


@pytest.mark.parametrize("name", SUPPLIED)
def test_modules_are_supplied_where_nobody_compiled_them(packages: Path, name: str) -> None:
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module(name)
    _finder.install(*_finder.LIBRARIES)
    found = importlib.import_module(name)
    assert _finder.is_ours(found)
    with pytest.raises(NotImplementedError, match=r"a_function_of_the_future"):
        found.a_function_of_the_future()


@pytest.mark.parametrize("name", SUPPLIED)
def test_a_compiled_module_wins(packages: Path, name: str) -> None:
    _finder.install(*_finder.LIBRARIES)
    compiled = packages / f"{name.replace('.', '/')}.py"
    compiled.parent.mkdir(parents=True, exist_ok=True)
    compiled.write_text("compiled = True\n")
    importlib.invalidate_caches()
    assert importlib.import_module(name).compiled


def test_packages_that_were_there_for_their_extension_module_alone_are_supplied_too(packages: Path) -> None:
    _finder.install("pointnet2", "pointops")
    with pytest.raises(ModuleNotFoundError, match="pointnet2_modules"):
        importlib.import_module("pointnet2.pointnet2_modules")
    assert not hasattr(importlib.import_module("pointnet2"), "pointnet2_modules")
    importlib.import_module("pointops")  # before the module in it
    assert _finder.is_ours(importlib.import_module("pointops._C"))


def test_a_folder_that_comes_onto_the_path_later_is_found_below_a_supplied_package(
    packages: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _finder.install("pointnet2")
    later = tmp_path / "later"
    supplied = importlib.import_module("pointnet2._ext")
    (later / "pointnet2" / "layers").mkdir(parents=True)
    (later / "pointnet2" / "modules.py").write_text("NAME = __name__")
    (later / "pointnet2" / "layers" / "deep.py").write_text("NAME = __name__")
    monkeypatch.syspath_prepend(later)
    for name in ("pointnet2.modules", "pointnet2.layers.deep"):
        found = importlib.import_module(name)
        assert name == found.NAME
    assert importlib.import_module("pointnet2._ext") is supplied


# attention


def test_attention_has_one_pair_of_functions_in_every_module() -> None:
    names = "MultiScaleDeformableAttention", "groundingdino._C", "detrex._C"
    for function in ("ms_deform_attn_forward", "ms_deform_attn_backward"):
        assert len({getattr(ms_deform_attn.extension(name), function).__wrapped__ for name in names}) == 1
    one, other = ms_deform_attn.extension("DCNv3"), ms_deform_attn.extension("detrex._C")
    assert one.dcnv3_forward.__wrapped__ is other.dcnv3_forward.__wrapped__
    assert one.dcnv3_backward.__wrapped__ is other.dcnv3_backward.__wrapped__


def test_deformable_aggregation_sums_what_anchors_see_in_cameras() -> None:
    """As Sparse4D's plain formulation: samples of every camera and scale, times weights of groups of channels."""
    g = torch.Generator().manual_seed(0)
    batch, anchors, points, cameras, groups, channels = 2, 3, 4, 2, 2, 6
    sizes = torch.tensor([[[4, 6], [2, 3]]] * cameras, dtype=torch.int32)
    starts = torch.tensor([[0, 24], [30, 54]], dtype=torch.int32)
    features = torch.randn(batch, 60, channels, dtype=torch.float64, generator=g).requires_grad_()
    places = torch.rand(batch, anchors, points, cameras, 2, dtype=torch.float64, generator=g) * 1.6 - 0.3
    places[0, 0, 0, 0] = torch.tensor([0.02, 0.5])  # within the image, half of its sample off it
    places[0, 0, 1, 0] = torch.tensor([-0.02, 0.5])  # off the image: nothing, though half of its sample is on it
    places.requires_grad_()
    weights = torch.randn(batch, anchors, points, cameras, 2, groups, dtype=torch.float64, generator=g).requires_grad_()

    seen = ((places > 0) & (places < 1)).all(-1)
    expected = 0
    for camera in range(cameras):
        for scale in range(2):
            height, width = sizes[camera, scale].tolist()
            first = int(starts[camera, scale])
            image = features[:, first : first + height * width].mT.unflatten(2, (height, width))
            grid = places[:, :, :, camera] * 2 - 1
            sample = functional.grid_sample(image, grid, align_corners=False).permute(0, 2, 3, 1)  # [B, A, points, C]
            part = weights[:, :, :, camera, scale] * seen[:, :, :, camera, None]
            expected = expected + (sample.unflatten(3, (groups, -1)) * part[..., None]).flatten(3).sum(2)

    module = ms_deform_attn.extension("projects.ops.deformable_aggregation_ext")
    inputs = features, sizes, starts, places, weights
    torch.testing.assert_close(module.deformable_aggregation_forward(*inputs), expected.detach())
    grad = torch.randn(expected.shape, dtype=torch.float64, generator=g)
    wanted = torch.autograd.grad(expected, (features, places, weights), grad)
    found = [torch.ones_like(t) for t in (features, places, weights)]
    module.deformable_aggregation_backward(*inputs, grad, *found)
    for got, want in zip(found, wanted, strict=True):
        torch.testing.assert_close(got, want + 1)


# PointNet++


LINE = torch.tensor([[[0.5, 0, 0], [0.001, 0, 0], [2, 0, 0], [9, 0, 0], [4, 0, 0]]])


def test_pointnet2_samples_without_the_points_next_to_the_origin() -> None:
    module = pointnet2.extension("pointnet2._ext")
    assert module.furthest_point_sampling(LINE, 4).tolist() == [[0, 3, 4, 2]]
    padded = torch.cat([LINE[:, 2:] + torch.tensor([1.0, 0, 0]), torch.zeros(1, 3, 3)], 1)
    assert module.furthest_point_sampling(padded, 3).tolist() == [[0, 1, 2]]
    assert module.furthest_point_sampling(padded - 1, 3).tolist() == [[0, 1, 3]]  # elsewhere they are points


def test_pointnet2_groups_gathers_and_interpolates_with_gradients() -> None:
    module = pointnet2.extension("pointnet2_ops._ext")
    idx = module.ball_query(LINE[:, 2:3], LINE, 2.1, 3)
    assert idx.dtype == torch.int32
    assert idx.tolist() == [[[0, 1, 2]]]
    planes = torch.arange(10.0).view(1, 2, 5)
    assert module.group_points(planes, idx).tolist() == [[[[0, 1, 2]], [[5, 6, 7]]]]
    assert module.group_points_grad(torch.ones(1, 2, 1, 3), idx, 5)[0].tolist() == [[1, 1, 1, 0, 0]] * 2
    assert module.gather_points(planes, idx[:, 0]).tolist() == [[[0, 1, 2], [5, 6, 7]]]
    assert module.gather_points_grad(torch.ones(1, 2, 3), idx[:, 0], 5)[0].tolist() == [[1, 1, 1, 0, 0]] * 2
    squares, nearest = module.three_nn(LINE[:, 3:4], LINE)
    assert nearest.tolist() == [[[3, 4, 2]]]
    assert squares.tolist() == [[[0, 25, 49]]]
    weight = torch.tensor([[[0.5, 0.25, 0.25]]])
    assert module.three_interpolate(planes, nearest, weight).flatten().tolist() == [3, 8]
    grad = module.three_interpolate_grad(torch.ones(1, 2, 1), nearest, weight, 5)
    assert grad[0].tolist() == [[0, 0, 0.25, 0.5, 0.25]] * 2


def test_chamfer_gives_four_tensors_and_takes_them_back() -> None:
    module = pointnet2.extension("chamfer")
    one, two = LINE[:, :2].contiguous(), LINE[:, 3:4].contiguous()
    found = module.forward(one, two)
    assert [t.shape for t in found] == [(1, 2), (1, 1), (1, 2), (1, 1)]
    assert found[0].tolist() == [[72.25, pytest.approx(8.999**2)]]
    grads = module.backward(one, two, *found[2:], torch.ones(1, 2), torch.zeros(1, 1))
    assert grads[0][0, 0].tolist() == [-17, 0, 0]
    assert grads[1][0, 0].tolist() == pytest.approx([17 + 2 * 8.999, 0, 0])


# mmdetection3d before 1.0


def ops(leaf: str) -> ModuleType:
    return mmdet3d.extension(f"mmdet3d.ops.x.{leaf}")


def in_old_box(point: list[float], box: list[float]) -> tuple[float, float] | None:
    """Along the length and along the width, where mmdetection3d 0.17 has a point in a box."""
    x, y, z, w, l, h, angle = box  # noqa: E741
    turn = angle + math.pi / 2
    east, north = point[0] - x, point[1] - y
    along, across = east * math.cos(turn) - north * math.sin(turn), east * math.sin(turn) + north * math.cos(turn)
    inside = 0 <= point[2] - z <= h and abs(along) < l / 2 and abs(across) < w / 2
    return (along, across) if inside else None


def test_old_boxes_turn_clockwise_and_have_their_width_along_x() -> None:
    g = torch.Generator().manual_seed(0)
    points = (torch.rand(100, 3, generator=g) - 0.5) * 6
    boxes = torch.cat([(torch.rand(5, 3, generator=g) - 0.5) * 3, torch.rand(5, 3, generator=g) * 4 + 0.5], 1)
    boxes = torch.cat([boxes, torch.randn(5, 1, generator=g) * 2], 1)
    where = [[in_old_box(p, b) for p in points.tolist()] for b in boxes.tolist()]
    expected = torch.tensor([[place is not None for place in row] for row in where])
    assert 20 < expected.sum() < 480
    module = ops("roiaware_pool3d_ext")
    held = torch.zeros(5, 100, dtype=torch.int32)
    assert module.points_in_boxes_cpu(boxes, points, held) == 1
    assert torch.equal(held.bool(), expected)
    first = torch.full((1, 100), -1, dtype=torch.int32)
    module.points_in_boxes_gpu(boxes[None], points[None], first)
    assert torch.equal(first[0].long(), torch.where(expected.any(0), expected.int().argmax(0), -1))
    each = torch.zeros(1, 100, 5, dtype=torch.int32)
    module.points_in_boxes_batch(boxes[None], points[None], each)
    assert torch.equal(each[0].T.bool(), expected)

    pooled, lists = torch.zeros(5, 2, 3, 1, 1), torch.zeros(5, 2, 3, 1, 100, dtype=torch.int32)
    winners = torch.zeros(5, 2, 3, 1, 1, dtype=torch.int32)
    module.forward(boxes, points, torch.ones(100, 1), winners, lists, pooled, 0)
    counts = torch.zeros(5, 2, 3, dtype=torch.int32)
    for row, (_, _, _, w, l, _, _) in enumerate(boxes.tolist()):  # noqa: E741
        for place in where[row]:
            if place is not None:
                counts[row, int((place[0] / l + 0.5) * 2), int((place[1] / w + 0.5) * 3)] += 1
    assert torch.equal(lists[..., 0, 0], counts)
    grad = torch.zeros(100, 1)
    module.backward(lists, winners, torch.ones_like(pooled), grad, 0)
    assert grad.sum() == (counts > 0).sum()


def test_old_boxes_seen_from_above_are_corners_and_a_heading() -> None:
    quarter = math.pi / 2
    boxes = torch.tensor([[0.0, 0, 4, 2, 0], [1, -1, 3, 3, quarter], [0, 0, 2, 2, 0]])  # the first two are one
    module, shared, ious = ops("iou3d_cuda"), torch.zeros(3, 3), torch.zeros(3, 3)
    module.boxes_overlap_bev_gpu(boxes, boxes, shared)
    torch.testing.assert_close(shared, torch.tensor([[8.0, 8, 4], [8, 8, 4], [4, 4, 4]]))
    module.boxes_iou_bev_gpu(boxes, boxes, ious)
    torch.testing.assert_close(ious, torch.tensor([[1, 1, 0.5], [1, 1, 0.5], [0.5, 0.5, 1]]))
    keep = torch.full((3,), -1)
    assert module.nms_gpu(boxes, keep, 0.6, None) == 2
    assert keep.tolist() == [0, 2, -1]
    assert module.nms_normal_gpu(boxes, keep, 0.6, 0) == 3  # without their headings
    eighth = torch.tensor([[-2.0, -0.1, 2, 0.1, math.pi / 4], [1.2, -1.6, 1.6, -1.2, 0]])
    module.boxes_overlap_bev_gpu(eighth, eighth, shared[:2, :2])
    assert shared[0, 1] > 0.05  # the first lies along x = -y: clockwise


def test_old_searches_and_samples_have_their_sizes_first() -> None:
    points, centers = LINE.clone(), LINE[:, 2:3]
    idx = torch.zeros(1, 1, 3, dtype=torch.int32)
    ops("ball_query_ext").ball_query_wrapper(1, 5, 1, 1.7, 2.1, 3, centers, points, idx)
    assert idx.tolist() == [[[1, 2, 4]]]  # from 1.7 on, and the center itself
    squares = torch.zeros(1, 1, 3)
    ops("knn_ext").knn_wrapper(1, 5, 1, 3, points, centers, idx, squares)
    assert idx.tolist() == [[[2, 0, 1]]]
    ops("interpolate_ext").three_nn_wrapper(1, 1, 5, centers, points, squares, idx)
    assert idx.tolist() == [[[2, 0, 1]]]
    assert squares[0, 0].tolist() == pytest.approx([0, 2.25, 1.999**2])
    between, grad = torch.zeros(1, 1, 1), torch.zeros(1, 1, 5)
    weight = torch.tensor([[[0.5, 0.25, 0.25]]])
    ops("interpolate_ext").three_interpolate_wrapper(1, 1, 5, 1, torch.arange(5.0)[None, None], idx, weight, between)
    assert between.item() == 1.25
    ops("interpolate_ext").three_interpolate_grad_wrapper(1, 1, 1, 5, torch.ones(1, 1, 1), idx, weight, grad)
    assert grad[0, 0].tolist() == [0.25, 0.25, 0.5, 0, 0]
    chosen = torch.zeros(1, 2, dtype=torch.int32)
    ops("furthest_point_sample_ext").furthest_point_sampling_wrapper(1, 5, 2, points, torch.zeros(1, 5), chosen)
    assert chosen.tolist() == [[0, 3]]
    distances = torch.cdist(-points, -points)
    sample = ops("furthest_point_sample_ext").furthest_point_sampling_with_dist_wrapper
    sample(1, 5, 2, distances, torch.zeros(1, 5), chosen.zero_())
    assert chosen.tolist() == [[0, 3]]
    out = torch.zeros(1, 3, 2)
    ops("gather_points_ext").gather_points_wrapper(1, 3, 5, 2, points.mT.contiguous(), chosen, out)
    assert out[0, 0].tolist() == [0.5, 9]
    grouped = torch.zeros(1, 3, 1, 3)
    ops("group_points_ext").forward(1, 3, 5, 1, 3, points.mT.contiguous(), idx, grouped)
    assert grouped[0, 0, 0].tolist() == pytest.approx([2, 0.5, 0.001])
    grad = torch.zeros(1, 3, 5)
    ops("group_points_ext").backward(1, 3, 5, 1, 3, torch.ones(1, 3, 1, 3), idx, grad)
    ops("gather_points_ext").gather_points_grad_wrapper(1, 3, 5, 2, torch.ones(1, 3, 2), chosen, grad)
    assert grad[0, 0].tolist() == [2, 1, 1, 1, 0]


def test_old_scores_are_assigned_as_mmcv_does() -> None:
    g = torch.Generator().manual_seed(0)
    points, centers = torch.randn(2, 1, 4, 2, 3, generator=g)
    scores, neighbors = torch.randn(1, 3, 2, 2, generator=g), torch.randint(0, 4, (1, 3, 2), generator=g)
    sizes = 1, 4, 3, 2, 2, 3, 0
    out, expected = torch.zeros(2, 1, 3, 3, 2)
    module, of_mmcv = ops("assign_score_withk_ext"), triops.compat.mmcv.extension("mmcv._ext")
    module.assign_score_withk_forward_wrapper(*sizes, points, centers, scores, neighbors, out)
    of_mmcv.assign_score_withk_forward(points, centers, scores, neighbors, expected, *sizes)
    assert torch.equal(out, expected)
    assert out.any()
    grads, wanted = ([torch.zeros_like(t) for t in (points, centers, scores)] for _ in range(2))
    inputs = torch.ones_like(out), points, centers, scores, neighbors
    module.assign_score_withk_backward_wrapper(*sizes, *inputs, *grads)
    of_mmcv.assign_score_withk_backward(*inputs, *wanted, *sizes)
    assert all(torch.equal(*pair) for pair in zip(grads, wanted, strict=True))


def test_old_sparse_convolutions_are_mmcvs() -> None:
    module, of_mmcv = ops("sparse_conv_ext"), triops.compat.mmcv.extension("mmcv._ext")
    sites = torch.tensor([[0, 1, 1, 1], [0, 1, 1, 2], [0, 3, 3, 3]], dtype=torch.int32)
    three = [[3, 3, 3], [2, 2, 2], [1, 1, 1], [1, 1, 1], [0, 0, 0]]
    args = sites, 1, [2, 2, 2], [4, 4, 4], *three, 0, 0
    outputs, pairs, numbers = module.get_indice_pairs_3d(*args)
    for one, other in zip(of_mmcv.get_indice_pairs_3d_forward(*args), (outputs, pairs, numbers), strict=True):
        assert torch.equal(one, other)
    features, filters = torch.randn(3, 2), torch.randn(3, 3, 3, 2, 4)
    conv = features, filters, pairs, numbers, len(outputs), 0, 0
    found = module.indice_conv_fp32(*conv)
    assert torch.equal(found, of_mmcv.indice_conv_forward(*conv))
    back = features, filters, torch.ones_like(found), pairs, numbers, 0, 0
    for one, other in zip(module.indice_conv_backward_fp32(*back), of_mmcv.indice_conv_backward(*back), strict=True):
        assert torch.equal(one, other)
    pool = features, pairs, numbers, len(outputs)
    assert torch.equal(module.indice_maxpool_fp32(*pool), of_mmcv.indice_maxpool_forward(*pool))
    grid = torch.zeros(8, dtype=torch.int32)
    assert torch.equal(module.get_indice_pairs_grid_3d(sites, grid, *args[1:])[1], pairs)


@pytest.mark.parametrize(
    ("package", "line", "cell"),
    [
        ("mmdet3d.ops.voxel", "coor[ndim_minus_1 - j] = c;", [0, 1, 2]),
        ("mmdet3d.ops.voxel", "coor[j] = c;", [2, 1, 0]),
        ("mmdet3d.ops.voxel", None, [0, 1, 2]),
        ("projects.bevfusion.ops.voxel", "coor[j] = c;", [2, 1, 0]),
        ("projects.bevfusion.ops.voxel", None, [2, 1, 0]),
    ],
)
def test_cells_have_their_axes_in_the_order_of_the_sources(
    packages: Path, package: str, line: str | None, cell: list[int]
) -> None:
    folder = packages / package.replace(".", "/")
    (folder / "src").mkdir(parents=True)
    if line is not None:
        (folder / "src" / "voxelization_cpu.cpp").write_text(f"const int ndim_minus_1 = NDim - 1;\n{line}\n")
    _finder.install("bevfusion")
    module = importlib.import_module(f"{package}.voxel_layer")
    point, size, bounds = torch.tensor([[2.5, 1.5, 0.5]]), [1.0] * 3, [0.0, 0.0, 0.0, 4.0, 4.0, 4.0]
    voxels, cells, numbers = torch.zeros(1, 2, 3), torch.zeros(1, 3).int(), torch.zeros(1).int()
    assert module.hard_voxelize(point, voxels, cells, numbers, size, bounds, 2, 1, 3, True) == 1
    assert cells.tolist() == [cell]
    module.dynamic_voxelize(point, cells.zero_(), size, bounds, 3)
    assert cells.tolist() == [cell]


# pooling of lifted images


def runs(ranks: Tensor) -> tuple[Tensor, Tensor]:
    """Starts and lengths of the runs of equal numbers."""
    starts = (ranks.diff(prepend=ranks[:1] - 1) != 0).nonzero()[:, 0].int()
    return starts, torch.cat([starts, torch.tensor([len(ranks)]).int()]).diff()


def test_bevdets_pooling_multiplies_by_depth_and_sums_by_cell() -> None:
    g = torch.Generator().manual_seed(0)
    depth = torch.rand(1, 2, 3, 2, 2, generator=g).requires_grad_()  # [b, n, d, h, w]
    features = torch.randn(1, 2, 2, 2, 5, generator=g).requires_grad_()
    of_depth = torch.randperm(24, generator=g)[:20]
    of_feature = of_depth // 12 * 4 + of_depth % 4
    of_cell = torch.randint(0, 6, (20,), generator=g).sort().values
    expected = torch.zeros(6, 5).index_add(0, of_cell, depth.view(-1, 1)[of_depth] * features.view(-1, 5)[of_feature])
    module = bevfusion.extension("mmdet3d.ops.bev_pool_v2.bev_pool_v2_ext")
    starts, lengths = runs(of_cell)
    ranks = of_depth.int(), of_feature.int(), of_cell.int()
    out = torch.zeros(1, 1, 2, 3, 5)
    module.bev_pool_v2_forward(depth, features, out, *ranks, lengths, starts)
    torch.testing.assert_close(out.view(6, 5), expected.detach())
    grad = torch.randn(1, 1, 2, 3, 5, generator=g)
    wanted = torch.autograd.grad(expected, (depth, features), grad.view(6, 5))
    order = of_feature.argsort()
    starts, lengths = runs(of_feature[order])
    found = torch.zeros_like(depth), torch.zeros_like(features)
    module.bev_pool_v2_backward(grad, *found, depth, features, *(r[order] for r in ranks), lengths, starts)
    for got, want in zip(found, wanted, strict=True):
        torch.testing.assert_close(got, want)


def test_openoccupancys_pooling_is_bevfusions() -> None:
    one = bevfusion.extension("projects.ops.occ_pooling.occ_pool_ext")
    other = bevfusion.extension("mmdet3d.ops.bev_pool.bev_pool_ext")
    assert one.occ_pool_forward.__wrapped__ is other.bev_pool_forward.__wrapped__
    assert one.occ_pool_backward.__wrapped__ is other.bev_pool_backward.__wrapped__


def test_bevdepths_pooling_leaves_points_off_the_grid_out() -> None:
    cells = torch.tensor([[[0, 0, 0], [2, 1, 0], [3, 0, 0], [2, 1, 0]], [[0, -1, 0], [1, 1, 1], [1, 1, 0], [0, 0, 0]]])
    cells, features = cells.int(), torch.arange(1.0, 9).view(2, 4, 1)
    out, places = torch.zeros(2, 2, 3, 1), torch.full((2, 4, 3), -1, dtype=torch.int32)
    sizes = torch.tensor([3, 2, 1])  # x, y, z, as tensors
    module = bevfusion.extension("bevdepth.ops.voxel_pooling_train.voxel_pooling_train_ext")
    module.voxel_pooling_train_forward_wrapper(2, 4, 1, *sizes, cells, features, out, places)
    assert out[..., 0].tolist() == [[[1, 0, 0], [0, 0, 6]], [[8, 0, 0], [0, 7, 0]]]
    gone = [-1, -1, -1]
    assert places.tolist() == [[[0, 0, 0], [0, 1, 2], gone, [0, 1, 2]], [gone, gone, [1, 1, 1], [1, 0, 0]]]

    module = bevfusion.extension("bevdepth.ops.voxel_pooling_inference.voxel_pooling_inference_ext")
    depth, context = torch.rand(4, 1, 2, 1), torch.rand(4, 1, 2, 1)  # two cameras of two pixels each
    found = torch.zeros(2, 2, 3, 1)
    geometry = cells.view(2, 2, 1, 2, 1, 3)
    module.voxel_pooling_inference_forward_wrapper(2, 2, 1, 2, 1, 1, *sizes, geometry, depth, context, found)
    product = (depth * context).view(2, 4, 1)
    train = bevfusion.extension("bevdepth.ops.voxel_pooling_train.voxel_pooling_train_ext")
    train.voxel_pooling_train_forward_wrapper(2, 4, 1, *sizes, cells, product, out.zero_(), places)
    torch.testing.assert_close(found, out)


def test_centerpoints_boxes_are_openpcdets() -> None:
    one = pcdet.extension("det3d.ops.iou3d_nms.iou3d_nms_cuda")
    other = pcdet.extension("pcdet.ops.iou3d_nms.iou3d_nms_cuda")
    assert one.nms_gpu.__wrapped__ is other.nms_gpu.__wrapped__
