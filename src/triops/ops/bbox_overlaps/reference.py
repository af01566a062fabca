"""The specification of bbox_overlaps and of its gradient."""

import torch
from torch import Tensor

from triops._geometry.rectangle.reference import denominator_of, finite, intersection, overlaps, pairs


def bbox_overlaps(bboxes1: Tensor, bboxes2: Tensor, mode: str, aligned: bool, offset: int) -> Tensor:
    """bboxes1 [..., M, 4], bboxes2 [..., N, 4] -> [..., M, N], or [..., M] when aligned."""
    return overlaps(bboxes1, bboxes2, mode, aligned, offset)


def bbox_overlaps_backward(
    grad: Tensor, bboxes1: Tensor, bboxes2: Tensor, mode: str, aligned: bool, offset: int
) -> tuple[Tensor, Tensor]:
    """The gradient of sum(grad * bbox_overlaps(...)) with respect to bboxes1 and bboxes2.

    Where the derivative jumps it is what torch's autograd makes of the formula: two equal
    coordinates get half each; boxes that touch count as overlapping; a denominator equal to `offset`
    counts as above it.
    """
    first, second = pairs(bboxes1, bboxes2, aligned)
    width, height = intersection(first, second, offset)
    inter = width.clamp(min=0) * height.clamp(min=0)
    base = denominator_of(first, second, inter, mode, offset)
    denominator = base.clamp(min=offset)
    ratio = inter / denominator
    overlapping = finite(first, second) & (width >= 0) & (height >= 0) & (denominator > 0) & denominator.isfinite()

    by_inter = grad.to(first.dtype) / denominator
    by_area = torch.where(base >= offset, -ratio * by_inter, 0.0)
    if mode == "iou":  # the denominator is area1 + area2 - inter
        by_inter = by_inter - by_area
    by_width, by_height = by_inter * height.clamp(min=0), by_inter * width.clamp(min=0)

    def gradient(boxes: Tensor, others: Tensor, *, through_area: bool) -> Tensor:
        x1, y1, x2, y2 = boxes.unbind(-1)
        other_x1, other_y1, other_x2, other_y2 = others.unbind(-1)
        by_x = by_area * (y2 - y1 + offset) if through_area else 0.0  # through the box's own area
        by_y = by_area * (x2 - x1 + offset) if through_area else 0.0
        parts = [
            -by_width * _share(other_x1, x1) - by_x,
            -by_height * _share(other_y1, y1) - by_y,
            by_width * _share(x2, other_x2) + by_x,
            by_height * _share(y2, other_y2) + by_y,
        ]
        gradients = torch.stack([torch.where(overlapping, part, 0.0) for part in parts], -1)
        return gradients.sum_to_size(boxes.shape).to(bboxes1.dtype)

    return (
        gradient(first, second, through_area=True).reshape(bboxes1.shape),
        gradient(second, first, through_area=mode == "iou").reshape(bboxes2.shape),
    )


def _share(low: Tensor, high: Tensor) -> Tensor:
    """How far `low` is the lesser of the two: 1 where it is, 1/2 where they are equal, else 0."""
    return ((low < high).to(low.dtype) + (low <= high).to(low.dtype)) / 2
