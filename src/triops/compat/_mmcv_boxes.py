"""The overlaps and suppressions of `mmcv._ext`: of upright, rotated and bird's-eye boxes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import triops
from triops.ops.bbox_overlaps import Mode as OverlapMode
from triops.ops.nms.reference import METHODS, by_score

MARGIN = 1e-2  # by which a corner may lie outside and count as inside, in mmcv's functions for boxes seen from above
OVERLAP_MODES: tuple[OverlapMode, ...] = ("iou", "iof")


def nms(boxes: Tensor, scores: Tensor, iou_threshold: float, offset: int) -> Tensor:
    return triops.nms(boxes, scores, iou_threshold, offset)


def softnms(
    boxes: Tensor, scores: Tensor, dets: Tensor, iou_threshold: float, sigma: float, min_score: float, method: int,
    offset: int,
) -> Tensor:  # fmt: skip
    inds, lowered = triops.soft_nms(boxes, scores, iou_threshold, sigma, min_score, METHODS[method], offset)
    dets[: len(inds)] = torch.cat([boxes[inds], lowered[:, None]], 1)
    return inds


def nms_match(dets: Tensor, iou_threshold: float) -> list[list[int]]:
    """Groups of a box that is kept and those it drops, which here are the ones at the threshold too."""
    boxes, order = dets[:, :4], by_score(dets[:, 4])
    groups = []
    while len(order):
        overlaps = triops.bbox_overlaps(boxes[order[:1]], boxes[order[1:]])[0]
        dropped = overlaps >= torch.full_like(overlaps, iou_threshold)
        groups.append([int(order[0]), *order[1:][dropped].tolist()])
        order = order[1:][~dropped]
    return groups


def nms_rotated(
    dets: Tensor, scores: Tensor, order: Tensor, dets_sorted: Tensor, labels: Tensor, iou_threshold: float,
    multi_label: bool,
) -> Tensor:  # fmt: skip
    """mmcv takes labels and does not look at them; nor do its `order` and `dets_sorted` say more than the scores do."""
    return triops.nms_rotated(dets[:, :5], scores, iou_threshold)


def box_iou_rotated(boxes1: Tensor, boxes2: Tensor, ious: Tensor, mode_flag: int, aligned: bool) -> None:
    ious.copy_(triops.box_iou_rotated(boxes1, boxes2, OVERLAP_MODES[mode_flag], bool(aligned)).view_as(ious))


def iou3d_boxes_overlap_bev_forward(boxes_a: Tensor, boxes_b: Tensor, ans_iou: Tensor) -> None:
    ans_iou.copy_(triops.boxes_overlap_bev(boxes_a, boxes_b, margin=MARGIN))


def iou3d_nms3d_forward(boxes: Tensor, keep: Tensor, num_out: Tensor, nms_overlap_thresh: float) -> None:
    _write(triops.nms3d(boxes, falling(boxes), nms_overlap_thresh, margin=MARGIN), keep, num_out)


def iou3d_nms3d_normal_forward(boxes: Tensor, keep: Tensor, num_out: Tensor, nms_overlap_thresh: float) -> None:
    _write(triops.nms3d_normal(boxes, falling(boxes), nms_overlap_thresh), keep, num_out)


def falling(boxes: Tensor) -> Tensor:
    """Scores for boxes that come best first."""
    return -torch.arange(len(boxes), dtype=torch.float64, device=boxes.device)


def _write(kept: Tensor, keep: Tensor, num_out: Tensor) -> None:
    keep[: len(kept)] = kept
    num_out.fill_(len(kept))


FUNCTIONS: dict[str, Callable[..., Any]] = {
    function.__name__: function
    for function in (
        nms, softnms, nms_match, nms_rotated, box_iou_rotated, iou3d_boxes_overlap_bev_forward, iou3d_nms3d_forward,
        iou3d_nms3d_normal_forward,
    )
}  # fmt: skip
