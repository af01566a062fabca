"""Overlap of axis-aligned rectangles in plain torch."""

import torch
from torch import Tensor

from triops._dtypes import compute_dtype


def overlaps(bboxes1: Tensor, bboxes2: Tensor, mode: str, aligned: bool, offset: int) -> Tensor:
    """bboxes1 [..., M, 4], bboxes2 [..., N, 4] -> [..., M, N], or [..., M] when aligned."""
    first, second = pairs(bboxes1, bboxes2, aligned)
    width, height = intersection(first, second, offset)
    inter = width.clamp(min=0) * height.clamp(min=0)
    ratio = inter / denominator_of(first, second, inter, mode, offset).clamp(min=offset)
    # Also 0 where the ratio is NaN: 0 / 0, or areas beyond the largest float.
    found = torch.where(finite(first, second) & (ratio > 0), ratio, 0.0)
    return found.to(bboxes1.dtype)


def pairs(bboxes1: Tensor, bboxes2: Tensor, aligned: bool) -> tuple[Tensor, Tensor]:
    """Both sets in the dtype to compute in, shaped to broadcast to one box per pair."""
    real = compute_dtype(bboxes1.dtype)
    bboxes1, bboxes2 = bboxes1.to(real), bboxes2.to(real)
    return (bboxes1, bboxes2) if aligned else (bboxes1[..., :, None, :], bboxes2[..., None, :, :])


def finite(first: Tensor, second: Tensor) -> Tensor:
    return first.isfinite().all(-1) & second.isfinite().all(-1)


def intersection(first: Tensor, second: Tensor, offset: int) -> tuple[Tensor, Tensor]:
    """Width and height of the common part; negative where there is none."""
    low = torch.maximum(first[..., :2], second[..., :2])
    high = torch.minimum(first[..., 2:], second[..., 2:])
    width, height = (high - low + offset).unbind(-1)
    return width, height


def area(boxes: Tensor, offset: int) -> Tensor:
    width, height = (boxes[..., 2:] - boxes[..., :2] + offset).unbind(-1)
    return width * height


def denominator_of(first: Tensor, second: Tensor, inter: Tensor, mode: str, offset: int) -> Tensor:
    """What the intersection is divided by, before it is clamped to at least `offset`."""
    if mode == "iou":
        return area(first, offset) + area(second, offset) - inter
    return area(first, offset).expand_as(inter)
