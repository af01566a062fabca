"""The specification of nms, nms_rotated, nms_quadri and soft_nms."""

import math
from collections.abc import Callable
from typing import Literal, Optional, get_args

import torch
from torch import Tensor

from triops._dtypes import compute_dtype
from triops._geometry.polygon.reference import Polygons, make_polygons
from triops._geometry.polygon.reference import overlap as polygon_overlap
from triops._geometry.rectangle.reference import overlaps as rectangle_overlaps
from triops._geometry.rotated.reference import Frames, frames, overlap

Method = Literal["naive", "linear", "gaussian"]
METHODS: tuple[Method, ...] = get_args(Method)


def nms(boxes: Tensor, scores: Tensor, labels: Optional[Tensor], iou_threshold: float, offset: int) -> Tensor:  # noqa: UP045
    """boxes [N, 4], scores [N], labels [N] or None -> int64 [K]: the boxes that are kept, best first."""
    wide = boxes.to(compute_dtype(boxes.dtype))

    def overlaps(best: Tensor, others: Tensor) -> Tensor:
        found = rectangle_overlaps(wide[best], wide[others], "iou", False, offset)[0]
        return found if labels is None else torch.where(labels[best] == labels[others], found, 0.0)

    return kept(by_score(scores), iou_threshold, overlaps)


def nms_rotated(
    boxes: Tensor, scores: Tensor, labels: Optional[Tensor], iou_threshold: float, clockwise: bool, margin: float  # noqa: UP045
) -> Tensor:  # fmt: skip
    """boxes [N, 5], scores [N], labels [N] or None -> int64 [K]: the boxes that are kept, best first."""
    frame = frames(boxes, clockwise, margin)

    def overlaps(best: Tensor, others: Tensor) -> Tensor:
        one, rest = (Frames(*(field[index] for field in frame)) for index in (best, others))
        found = overlap(one, rest, "iou", margin)
        return found if labels is None else torch.where(labels[best] == labels[others], found, 0.0)

    return kept(by_score(scores), iou_threshold, overlaps)


def nms_quadri(boxes: Tensor, scores: Tensor, labels: Optional[Tensor], iou_threshold: float) -> Tensor:  # noqa: UP045
    """boxes [N, 8], scores [N], labels [N] or None -> int64 [K]: the boxes that are kept, best first."""
    polygons = make_polygons(boxes)

    def overlaps(best: Tensor, others: Tensor) -> Tensor:
        one, rest = (Polygons(*(field[index] for field in polygons)) for index in (best, others))
        found = polygon_overlap(one, rest, "iou")
        return found if labels is None else torch.where(labels[best] == labels[others], found, 0.0)

    return kept(by_score(scores), iou_threshold, overlaps)


def soft_nms(
    boxes: Tensor, scores: Tensor, iou_threshold: float, sigma: float, min_score: float, method: str, offset: int
) -> tuple[Tensor, Tensor]:
    """boxes [N, 4], scores [N] -> int64 [K]: the boxes in the order they are chosen; and their lowered scores [K]."""
    real = compute_dtype(boxes.dtype)
    boxes, current = boxes.to(real), scores.to(real)
    threshold, least = (torch.full_like(current, v) for v in (iou_threshold, min_score))
    waiting = current > -math.inf
    chosen: list[int] = []
    lowered: list[Tensor] = []
    while bool(waiting.any()):
        # the highest, and of equal ones the first
        best = int(torch.where(waiting, current, -math.inf).sort(descending=True, stable=True).indices[0])
        chosen.append(best)
        lowered.append(current[best])
        waiting[best] = False
        iou = rectangle_overlaps(boxes[best : best + 1], boxes, "iou", False, offset)[0]
        if method == "gaussian":
            weight = exp((iou.double() * iou.double()) / -sigma).to(real)
        else:
            weight = torch.where(iou >= threshold, 1 - iou if method == "linear" else 0.0, 1.0)
        current = current * weight
        waiting &= current >= least
    indices = torch.tensor(chosen, dtype=torch.int64, device=boxes.device)
    return indices, (torch.stack(lowered) if lowered else current[:0]).to(scores.dtype)


def by_score(scores: Tensor) -> Tensor:
    """Indices from the highest to the lowest score, equal ones as they come. Adding 0 makes -0 equal to 0."""
    return (scores + 0.0).sort(descending=True, stable=True).indices


def exp(x: Tensor) -> Tensor:
    """e to the power of a float64 tensor that is not above 0, in operations that every device rounds alike."""
    x = torch.where(x > -700, x, -700.0)
    n = torch.floor(x * 1.4426950408889634 + 0.5)
    r = (x - n * 0.6931471803691238) - n * 1.9082149292705877e-10
    result = torch.full_like(r, EXP_TERMS[0])
    for term in EXP_TERMS[1:]:
        result = result * r + term
    return result * ((n.long() + 1023) << 52).view(torch.float64)


EXP_TERMS = tuple(1 / math.factorial(k) for k in range(13, -1, -1))  # of Taylor's series: |r| is at most ln(2) / 2


def kept(order: Tensor, iou_threshold: float, overlaps: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """Those that no kept one before them overlaps by more than the threshold, which takes the overlaps' dtype."""
    kept = [order[:0]]
    while len(order):
        best, order = order[:1], order[1:]
        kept.append(best)
        found = overlaps(best, order)
        order = order[found <= torch.full_like(found, iou_threshold)]
    return torch.cat(kept)
