"""Every argument of every public function and layer: what does not belong there is refused in a sentence of triops."""

from __future__ import annotations

import re
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

import triops
from triops import nn as tnn
from triops.spconv.pytorch import ops as spconv_ops

SITES = torch.tensor([[0, 1, 1, 1], [0, 1, 1, 2]], dtype=torch.int32)
FEATURES = torch.rand(2, 4)
RULEBOOK = triops.Rulebook.submanifold(SITES, 1, [5, 5, 5], 3)
BOXES, SCORES, ROTATED, BOXES_3D = torch.rand(5, 4).cumsum(-1), torch.rand(5), torch.rand(5, 5), torch.rand(5, 7)
MAP, BORDERS = torch.rand(1, 8, 5, 6), torch.rand(1, 3, 4)
BOXES_2D = torch.tensor([[0.0, 1, 1, 4, 4]])
ROTATED_2D = torch.cat([BOXES_2D, torch.zeros(len(BOXES_2D), 1)], 1)
POINTS, ROIS = torch.rand(10, 4) * 3, torch.tensor([[1.0, 1, 0, 3, 3, 3, 0]])
VOXELS = {"points": POINTS, "voxel_size": [1.0, 1, 1], "point_range": [0.0, 0, 0, 3, 3, 3]}
LIMITS = {"max_points": 3, "max_voxels": 4}
CELLS = torch.randint(0, 3, (10, 3))
REDUCED, _, POINT_TO_VOXEL, COUNTS = triops.dynamic_scatter_forward(POINTS, CELLS)
QUADS = torch.rand(5, 8)
POOLED, ARGMAX, LISTS = triops.roiaware_pool3d_forward(ROIS, POINTS[:, :3].contiguous(), POINTS, 2, 4)
ALIGNED, STEPS = triops.border_align_forward(MAP, BORDERS, 3)
GEOMETRY = {"stride": 1, "padding": 0, "dilation": 1, "out_padding": 0}
KINDS = {"subm": False, "transpose": False}
WINDOW = {"kernel_size": 3, "stride": 1, "padding": 0, "dilation": 1, "indice_key": "key", "name": "name"}
CHANNELS = {"in_channels": 4, "out_channels": 2, "groups": 1, "bias": True}


def sparse() -> tnn.SparseConvTensor:
    return tnn.SparseConvTensor(FEATURES, SITES, [5, 5, 5], 1)


def layer(kind: Any) -> Callable[..., Any]:
    return lambda x, **options: kind(**options)(x)


# name -> the callable and a good call of it
CALLS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "bbox_overlaps": (triops.bbox_overlaps, {
        "bboxes1": BOXES, "bboxes2": BOXES, "mode": "iou", "aligned": False, "offset": 0}),
    "border_align": (triops.border_align, {"input": MAP, "boxes": BORDERS, "pool_size": 3}),
    "border_align_forward": (triops.border_align_forward, {"input": MAP, "boxes": BORDERS, "pool_size": 3}),
    "border_align_backward": (triops.border_align_backward, {
        "grad_output": ALIGNED, "boxes": BORDERS, "argmax": STEPS, "input_shape": (1, 8, 5, 6), "pool_size": 3}),
    "box_iou_rotated": (triops.box_iou_rotated, {
        "bboxes1": ROTATED, "bboxes2": ROTATED, "mode": "iou", "aligned": False, "clockwise": True, "margin": 0.0}),
    "box_iou_quadri": (triops.box_iou_quadri, {"bboxes1": QUADS, "bboxes2": QUADS, "mode": "iou", "aligned": False}),
    "boxes_iou_bev": (triops.boxes_iou_bev, {
        "boxes_a": BOXES_3D, "boxes_b": BOXES_3D, "aligned": False, "margin": 0.0}),
    "boxes_overlap_bev": (triops.boxes_overlap_bev, {
        "boxes_a": BOXES_3D, "boxes_b": BOXES_3D, "aligned": False, "margin": 0.0}),
    "deform_conv2d": (triops.deform_conv2d, {
        "input": MAP, "offset": torch.rand(1, 8, 4, 5), "weight": torch.rand(2, 4, 2, 2), "bias": torch.rand(2),
        "stride": 1, "padding": [0, 0], "dilation": 1, "mask": torch.rand(1, 4, 4, 5)}),
    "convex_iou": (triops.convex_iou, {"pointsets": QUADS, "polygons": QUADS, "mode": "iof", "aligned": False}),
    "diff_iou_rotated": (triops.diff_iou_rotated, {"boxes1": BOXES_3D, "boxes2": BOXES_3D, "mode": "giou"}),
    "diff_iou_rotated_2d": (triops.diff_iou_rotated_2d, {"box1": ROTATED, "box2": ROTATED}),
    "diff_iou_rotated_3d": (triops.diff_iou_rotated_3d, {"box3d1": BOXES_3D, "box3d2": BOXES_3D}),
    "dynamic_scatter": (triops.dynamic_scatter, {"features": POINTS, "coords": CELLS, "reduce": "mean"}),
    "dynamic_scatter_forward": (triops.dynamic_scatter_forward, {
        "features": POINTS, "coords": CELLS, "reduce": "mean"}),
    "dynamic_scatter_backward": (triops.dynamic_scatter_backward, {
        "grad_reduced": REDUCED, "features": POINTS, "reduced": REDUCED, "point_to_voxel": POINT_TO_VOXEL,
        "counts": COUNTS, "reduce": "mean"}),
    "dynamic_voxelize": (triops.dynamic_voxelize, VOXELS),
    "voxelize": (triops.voxelize, {**VOXELS, **LIMITS}),
    "voxelize_padded": (triops.voxelize_padded, {**VOXELS, **LIMITS}),
    "get_indice_pairs": (triops.get_indice_pairs, {
        "indices": SITES, "batch_size": 1, "spatial_shape": [5, 5, 5], "kernel_size": 3, **GEOMETRY, **KINDS}),
    "sparse_output_shape": (triops.sparse_output_shape, {
        "spatial_shape": [5, 5, 5], "kernel_size": 3, **GEOMETRY, **KINDS}),
    "nms": (triops.nms, {"boxes": BOXES, "scores": SCORES, "iou_threshold": 0.5, "offset": 0}),
    "batched_nms": (triops.batched_nms, {
        "boxes": BOXES, "scores": SCORES, "idxs": torch.zeros(5, dtype=torch.int64), "iou_threshold": 0.5}),
    "boxes_iou3d": (triops.boxes_iou3d, {
        "boxes_a": BOXES_3D, "boxes_b": BOXES_3D, "aligned": False, "z_origin": "center", "margin": 0.0}),
    "nms_rotated": (triops.nms_rotated, {
        "boxes": ROTATED, "scores": SCORES, "iou_threshold": 0.5, "labels": torch.zeros(5, dtype=torch.int64),
        "clockwise": True, "margin": 0.0}),
    "min_area_polygons": (triops.min_area_polygons, {"pointsets": QUADS}),
    "nms_quadri": (triops.nms_quadri, {
        "boxes": QUADS, "scores": SCORES, "iou_threshold": 0.5, "labels": torch.zeros(5, dtype=torch.int64)}),
    "nms3d": (triops.nms3d, {"boxes": BOXES_3D, "scores": SCORES, "iou_threshold": 0.5, "margin": 0.0}),
    "nms3d_normal": (triops.nms3d_normal, {"boxes": BOXES_3D, "scores": SCORES, "iou_threshold": 0.5}),
    "soft_nms": (triops.soft_nms, {
        "boxes": BOXES, "scores": SCORES, "iou_threshold": 0.3, "sigma": 0.5, "min_score": 1e-3, "method": "linear",
        "offset": 0}),
    "points_in_boxes": (triops.points_in_boxes, {
        "points": POINTS[None, :, :3], "boxes": BOXES_3D[None], "z_origin": "center", "margin": 0.0}),
    "points_in_boxes_all": (triops.points_in_boxes_all, {
        "points": POINTS[None, :, :3], "boxes": BOXES_3D[None], "z_origin": "center", "margin": 0.0}),
    "roi_align": (triops.roi_align, {
        "input": MAP, "boxes": BOXES_2D, "output_size": 2, "spatial_scale": 1.0, "sampling_ratio": 0, "aligned": True,
        "mode": "avg"}),
    "roi_align_rotated": (triops.roi_align_rotated, {
        "input": MAP, "boxes": ROTATED_2D, "output_size": 2, "spatial_scale": 1.0, "sampling_ratio": 0,
        "aligned": True, "clockwise": True}),
    "riroi_align_rotated": (triops.riroi_align_rotated, {
        "input": MAP, "boxes": ROTATED_2D, "output_size": 2, "spatial_scale": 1.0, "num_samples": 0,
        "num_orientations": 4, "clockwise": True}),
    "deform_roi_pool": (triops.deform_roi_pool, {
        "input": MAP, "boxes": BOXES_2D, "offset": torch.zeros(len(BOXES_2D), 2, 2, 2), "output_size": 2,
        "spatial_scale": 1.0, "sampling_ratio": 0, "gamma": 0.1}),
    "prroi_pool": (triops.prroi_pool, {
        "input": MAP, "boxes": BOXES_2D, "output_size": 2, "spatial_scale": 1.0}),
    "roi_pool": (triops.roi_pool, {
        "input": MAP, "boxes": BOXES_2D, "output_size": 2, "spatial_scale": 1.0}),
    "roiaware_pool3d": (triops.roiaware_pool3d, {
        "rois": ROIS, "points": POINTS[:, :3], "features": POINTS, "out_size": 2, "max_points_per_voxel": 4,
        "mode": "max", "z_origin": "bottom", "margin": 0.0}),
    "roiaware_pool3d_forward": (triops.roiaware_pool3d_forward, {
        "rois": ROIS, "points": POINTS[:, :3], "features": POINTS, "out_size": 2, "max_points_per_voxel": 4,
        "mode": "max", "z_origin": "bottom", "margin": 0.0}),
    "roiaware_pool3d_backward": (triops.roiaware_pool3d_backward, {
        "point_indices": LISTS, "argmax": ARGMAX, "grad_out": POOLED, "num_points": 10, "mode": "max"}),
    "sigmoid_focal_loss": (triops.sigmoid_focal_loss, {
        "input": torch.rand(4, 3), "target": torch.tensor([0, 1, 2, 3]), "gamma": 2.0, "alpha": 0.25,
        "weight": torch.rand(3), "reduction": "mean"}),
    "sparse_conv": (triops.sparse_conv, {
        "features": FEATURES, "weight": torch.rand(2, 3, 3, 3, 4), "rulebook": RULEBOOK, "bias": torch.rand(2)}),
    "sparse_max_pool": (triops.sparse_max_pool, {"features": FEATURES, "rulebook": RULEBOOK}),
    "sparse_avg_pool": (triops.sparse_avg_pool, {"features": FEATURES, "rulebook": RULEBOOK}),
    "Rulebook.submanifold": (triops.Rulebook.submanifold, {
        "indices": SITES, "batch_size": 1, "spatial_shape": [5, 5, 5], "kernel_size": 3, "dilation": 1}),
    "Rulebook.sparse": (triops.Rulebook.sparse, {
        "indices": SITES, "batch_size": 1, "spatial_shape": [5, 5, 5], "kernel_size": 3, **GEOMETRY,
        "transpose": False}),
    "SparseConvTensor": (tnn.SparseConvTensor, {
        "features": FEATURES, "indices": SITES, "spatial_shape": [5, 5, 5], "batch_size": 1}),
    "SparseConvTensor.from_dense": (tnn.SparseConvTensor.from_dense, {"x": torch.rand(1, 3, 3, 3, 2)}),
    "SparseConvTensor.replace_feature": (lambda features: sparse().replace_feature(features), {"features": FEATURES}),
    "BorderAlign": (lambda pool_size, input, boxes: tnn.BorderAlign(pool_size)(input, boxes), {
        "pool_size": 3, "input": MAP, "boxes": BORDERS}),
    "RoIAwarePool3d": (lambda rois, points, features, **given: tnn.RoIAwarePool3d(**given)(rois, points, features), {
        "rois": ROIS, "points": POINTS[:, :3], "features": POINTS, "out_size": 2, "max_points_per_voxel": 4,
        "mode": "max"}),
    "SubMConv3d": (layer(tnn.SubMConv3d), {"x": sparse(), **CHANNELS, **WINDOW}),
    "SparseConv3d": (layer(tnn.SparseConv3d), {"x": sparse(), **CHANNELS, **WINDOW, "record_voxel_count": False}),
    "SparseConvTranspose3d": (layer(tnn.SparseConvTranspose3d), {
        "x": sparse(), **CHANNELS, **WINDOW, "output_padding": 0}),
    "SparseConvolution": (layer(tnn.SparseConvolution), {
        "x": sparse(), "ndim": 3, **CHANNELS, **WINDOW, "subm": False, "transposed": False, "inverse": False}),
    "SparseMaxPool3d": (layer(tnn.SparseMaxPool3d), {"x": sparse(), **WINDOW}),
    "SparseAvgPool3d": (layer(tnn.SparseAvgPool3d), {"x": sparse(), **WINDOW}),
    "SparseGlobalMaxPool": (layer(tnn.SparseGlobalMaxPool), {"x": sparse()}),
    "SparseGlobalAvgPool": (layer(tnn.SparseGlobalAvgPool), {"x": sparse()}),
    "JoinTable": (layer(tnn.JoinTable), {"x": [sparse(), sparse()]}),
    "AddTable": (layer(tnn.AddTable), {"x": [sparse(), sparse()]}),
    "ToDense": (layer(tnn.ToDense), {"x": sparse()}),
    "get_conv_output_size": (spconv_ops.get_conv_output_size, {
        "input_size": [5, 5], "kernel_size": [3, 3], "stride": [1, 1], "padding": [0, 0], "dilation": [1, 1]}),
}  # fmt: skip
STRANGERS = [
    None, "nonsense", "1", "444", b"12", 1.9, True, np.True_, -5, [], [1.5, 2, 3], ["a", "b", "c"], [[1], [2], [3]], {},
    {1, 2, 3}, 3 + 4j, object(), range(1, 4), 2**31, 2**62, 2**70, 10**400, -(10**400), [10**400, 1, 1],
    [0, 0, -(10**400), 3, 3, 10**400], float("nan"), float("inf"), [float("nan")] * 3, np.float64(1.9), np.int64(1),
    np.array([1, 2, 3]), np.array([1.5, 2, 2]), np.array([[1, 2, 3]]), Decimal("1.5"), Fraction(1, 3), torch.tensor(1),
    torch.tensor(1.5), torch.tensor([1, 2, 3]), torch.rand(2), torch.rand(0), torch.zeros(2, 4, dtype=torch.bool),
    torch.zeros(2, 4, dtype=torch.complex64), torch.zeros(2, 4).to_sparse(), iter([1]), int,
]  # fmt: skip
SENTENCE = re.compile(r"[A-Za-z_0-9.]+( '\w+')?: .*", re.DOTALL)


@pytest.mark.parametrize("name", CALLS)
def test_a_stranger_in_the_place_of_an_argument_is_answered_or_refused_in_a_sentence(name: str) -> None:
    function, good = CALLS[name]
    function(**good)
    for argument in good:
        for stranger in STRANGERS:
            error = outcome(function, {**good, argument: stranger})
            clear = error is None or (
                isinstance(error, ValueError | TypeError | IndexError) and SENTENCE.fullmatch(str(error))
            )
            # torch's own word, where no machine could hold the answer
            assert clear or "memory" in str(error), f"{argument}={stranger!r}: {type(error).__name__}: {error}"


def outcome(function: Callable[..., Any], arguments: dict[str, Any]) -> Exception | None:
    try:
        function(**arguments)
    except Exception as error:
        return error
    return None


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"batch_size": 1.9}, TypeError, "batch_size must be an integer, got float"),
        ({"batch_size": "1"}, TypeError, "batch_size must be an integer, got str"),
        ({"batch_size": torch.tensor(1.5)}, TypeError, "batch_size must be an integer, got a tensor of shape []"),
        ({"batch_size": 2**31}, ValueError, "batch_size must be at most 2147483647, got 2147483648"),
        ({"spatial_shape": "444"}, TypeError, "spatial_shape must be a sequence of integers, got str"),
        ({"spatial_shape": [4, 4.5, 4]}, TypeError, "spatial_shape must be integers, got float in it"),
        ({"features": FEATURES.to_sparse()}, ValueError, "features must be a dense tensor, got one of layout"),
    ],
)  # fmt: skip
def test_a_sparse_tensor_takes_integers_only(change: dict[str, Any], error: type[Exception], message: str) -> None:
    good = {"features": FEATURES, "indices": SITES, "spatial_shape": [5, 5, 5], "batch_size": 1}
    with pytest.raises(error, match="^" + re.escape(f"SparseConvTensor: {message}")):
        tnn.SparseConvTensor(**{**good, **change})  # type: ignore[arg-type]


def test_a_sparse_tensor_takes_the_integers_that_networks_have() -> None:
    for shape in (np.array([5, 5, 5]), torch.Size([5, 5, 5]), torch.tensor([5, 5, 5]), (np.int64(5),) * 3):
        for batch_size in (1, np.int32(1), torch.tensor(1), SITES[-1, 0] + 1):
            x = tnn.SparseConvTensor(FEATURES, SITES, shape, batch_size)  # type: ignore[arg-type]
            assert (x.spatial_shape, x.batch_size, type(x.batch_size)) == ([5, 5, 5], 1, int)


def test_a_number_beyond_every_float_is_not_finite() -> None:
    with pytest.raises(ValueError, match=r"^nms: iou_threshold must be finite, got inf$"):
        triops.nms(BOXES, SCORES, 10**400)
    with pytest.raises(ValueError, match=r"^voxelize: voxel_size must be finite, got inf$"):
        triops.voxelize(POINTS, [10**400, 1, 1], VOXELS["point_range"], 3, 4)
    with pytest.raises(ValueError, match=r"^voxelize: point_range must be finite, got -inf$"):
        triops.voxelize(POINTS, [1, 1, 1], [-(10**400), 0, 0, 3, 3, 3], 3, 4)


@pytest.mark.parametrize("pool", [tnn.SparseGlobalMaxPool(), tnn.SparseGlobalAvgPool()])
def test_global_pools_refuse_integers(pool: torch.nn.Module) -> None:
    x = tnn.SparseConvTensor(FEATURES.int(), SITES, [5, 5, 5], 1)
    with pytest.raises(TypeError, match=r"Pool: features must be float32, float16, bfloat16 or float64, got int32$"):
        pool(x)
