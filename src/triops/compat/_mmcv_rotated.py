"""Rotated boxes, quadrilaterals and sets of points of `mmcv._ext`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import triops
from triops._plain import polygons as plain
from triops.ops.nms.reference import by_score, kept

OVERLAP_MODES = ("iou", "iof")
ROWS = 1024  # pairs at a time, whose triangles autograd keeps


def diff_iou_rotated_sort_vertices_forward(vertices: Tensor, mask: Tensor, num_valid: Tensor) -> Tensor:
    return plain.sorted_vertices(vertices, mask.bool())


def diff_iou_rotated_2d(box1: Tensor, box2: Tensor) -> Tensor:
    """In place of mmcv's function around the one above: one operator, right for equal boxes too."""
    return triops.diff_iou_rotated_2d(*_of_one_dtype(box1, box2))


def diff_iou_rotated_3d(box3d1: Tensor, box3d2: Tensor) -> Tensor:
    return triops.diff_iou_rotated_3d(*_of_one_dtype(box3d1, box3d2))


def _of_one_dtype(first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """Autocast mixes dtypes."""
    dtype = torch.promote_types(first.dtype, second.dtype)
    return first.to(dtype), second.to(dtype)


def box_iou_quadri(boxes1: Tensor, boxes2: Tensor, ious: Tensor, mode_flag: int, aligned: bool) -> None:
    overlaps = plain.quadrilateral_overlaps(
        _points(boxes1, 4), _points(boxes2, 4), OVERLAP_MODES[mode_flag], bool(aligned)
    )
    ious.copy_(overlaps.view_as(ious))


def nms_quadri(
    dets: Tensor, scores: Tensor, order: Tensor, dets_sorted: Tensor, iou_threshold: float, multi_label: int
) -> Tensor:
    """mmcv takes labels, in column 8, and does not look at them."""
    corners = _points(dets[:, :8], 4)
    found = plain.quadrilateral_overlaps(corners, corners, "iou")
    return kept(by_score(scores), iou_threshold, lambda best, others: found[best, others])


def convex_iou(pointsets: Tensor, polygons: Tensor, ious: Tensor) -> None:
    ious.copy_(triops.convex_iou(pointsets, polygons.to(pointsets.dtype)))


def convex_giou(pointsets: Tensor, polygons: Tensor, output: Tensor) -> None:
    """Gradients of the points in the first 18 columns, the values in the last."""
    for rows in torch.arange(len(pointsets), device=pointsets.device).split(ROWS):
        with torch.enable_grad():
            points = _points(pointsets[rows], 9).detach().requires_grad_()
            values = plain.convex_giou(points, _points(polygons[rows], 4))
            (grad,) = torch.autograd.grad(values, points, torch.ones_like(values))
        output[rows] = torch.cat([grad.flatten(1), values.detach()[:, None]], 1).to(output.dtype)


def min_area_polygons(pointsets: Tensor, polygons: Tensor) -> None:
    polygons.copy_(triops.min_area_polygons(pointsets))


def _points(rows: Tensor, count: int) -> Tensor:
    """[N, 2 * count] -> [N, count, 2], in float64 as mmcv's kernels for sets of points are."""
    return rows.double().reshape(-1, count, 2)


FUNCTIONS: dict[str, Callable[..., Any]] = {
    function.__name__: function
    for function in (
        diff_iou_rotated_sort_vertices_forward, box_iou_quadri, nms_quadri, convex_iou, convex_giou, min_area_polygons,
    )
}  # fmt: skip
