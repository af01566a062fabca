"""Non-maximum suppression: of upright boxes, of rotated ones, of 3D boxes seen from above; and the soft form."""

from __future__ import annotations

from typing import Optional

import torch
from torch import Tensor

from triops import _check, _op
from triops._dtypes import compute_dtype
from triops._geometry.rotated.arguments import birds_eye_rectangles, check_margin
from triops.ops.nms import reference
from triops.ops.nms.reference import METHODS, Method


def nms(
    boxes: Tensor,
    scores: Tensor,
    iou_threshold: float,
    offset: int = 0,
    *,
    labels: Optional[Tensor] = None,  # noqa: UP045 - as in the schema
) -> Tensor:
    """Keep the best of boxes that overlap each other.

    Boxes are taken from the highest score to the lowest, equal scores in the order of the boxes. One that overlaps a
    box kept before it by more than `iou_threshold` is dropped. Every backend keeps the same boxes.

    Args:
        boxes: float tensor [N, 4] of `(x1, y1, x2, y2)`. A box with a non-finite coordinate overlaps nothing.
        scores: float tensor [N], ordered as by `torch.sort`.
        iou_threshold: of intersection over union, at least 0; rounded to the dtype that overlaps are computed in,
            which is float64 for float64 boxes and float32 for all others.
        offset: 0, or 1 for boxes whose last pixel is inside, as in `bbox_overlaps`.
        labels: integer tensor [N]; then only boxes of the same label drop each other.

    Returns:
        int64 tensor [K]: indices of the boxes that are kept, best first. Empty when N is 0.

    Raises:
        ValueError, TypeError: on a wrong shape, dtype, device or option.

    >>> import torch, triops
    >>> boxes = torch.tensor([[0.0, 0, 10, 10], [1, 1, 11, 11], [20, 20, 30, 30]])
    >>> triops.nms(boxes, torch.tensor([0.5, 0.9, 0.7]), iou_threshold=0.5)
    tensor([1, 2])
    """
    return _nms(boxes, scores, labels, iou_threshold, offset)  # type: ignore[no-any-return]


def batched_nms(boxes: Tensor, scores: Tensor, idxs: Tensor, iou_threshold: float) -> Tensor:
    """`nms` within each category: the signature of `torchvision.ops.batched_nms`, and its answer.

    The same as `nms(boxes, scores, iou_threshold, labels=idxs)`. Where torchvision and mmcv move the boxes of each
    category apart, which rounds their coordinates, here only boxes of one category are compared: what is kept is what
    `nms` keeps of each category alone. mmcv's `batched_nms` returns the boxes with their scores as well:
    `torch.cat([boxes, scores[:, None]], 1)[keep]`; its `max_num` is `keep[:max_num]`, and its `class_agnostic` is
    `nms` without labels. Rotated boxes: `nms_rotated(..., labels=idxs)`; 3D boxes: `nms3d(..., labels=idxs)`.

    Args:
        boxes: float tensor [N, 4] of `(x1, y1, x2, y2)`.
        scores: float tensor [N].
        idxs: integer tensor [N], the category of each box, or its image, or both in one number. Any values.
        iou_threshold: as in `nms`.

    Returns:
        int64 tensor [K]: indices of the boxes that are kept, best first, of all categories together. Empty when N is 0.

    Raises:
        ValueError, TypeError: on a wrong shape, dtype, device or threshold.

    >>> import torch, triops
    >>> boxes = torch.tensor([[0.0, 0, 10, 10], [1, 1, 11, 11], [0, 0, 10, 9]])
    >>> triops.batched_nms(boxes, torch.tensor([0.5, 0.9, 0.7]), torch.tensor([3, 8, 3]), iou_threshold=0.5)
    tensor([1, 2])
    """
    c = _check.Checker("batched_nms")  # whose words `nms` does not have
    c.tensor("boxes", boxes)
    c.tensor("idxs", idxs)
    c.shape("boxes", boxes, "N", 4)
    _check_labels(c, boxes, idxs, "idxs")
    return nms(boxes, scores, iou_threshold, labels=idxs)


def nms_rotated(
    boxes: Tensor,
    scores: Tensor,
    iou_threshold: float,
    labels: Optional[Tensor] = None,  # noqa: UP045 - as in the schema
    clockwise: bool = True,
    *,
    margin: float = 0.0,
) -> Tensor:
    """As `nms`, for rotated rectangles `(x, y, width, height, angle)`.

    Args:
        boxes: float tensor [N, 5].
        scores, iou_threshold: as in `nms`.
        labels: integer tensor [N]; then only boxes of the same label drop each other.
        clockwise, margin: as in `box_iou_rotated`.

    Returns:
        int64 tensor [K]: indices of the boxes that are kept, best first.

    >>> import torch, triops
    >>> boxes = torch.tensor([[0.0, 0, 4, 2, 0.0], [0, 0, 4, 2, 0.1], [0, 0, 4, 2, 1.5]])
    >>> scores = torch.tensor([0.5, 0.9, 0.7])
    >>> triops.nms_rotated(boxes, scores, iou_threshold=0.5)
    tensor([1, 2])
    >>> triops.nms_rotated(boxes, scores, iou_threshold=0.5, labels=torch.tensor([0, 1, 0]))
    tensor([1, 2, 0])
    """
    return _nms_rotated(boxes, scores, labels, iou_threshold, clockwise, margin)  # type: ignore[no-any-return]


def nms_quadri(
    boxes: Tensor,
    scores: Tensor,
    iou_threshold: float,
    labels: Optional[Tensor] = None,  # noqa: UP045 - as in the schema
) -> Tensor:
    """As `nms`, for quadrilaterals `(x1, y1, ..., x4, y4)`, with the overlaps of `box_iou_quadri`.

    Args:
        boxes: float tensor [N, 8].
        scores, iou_threshold: as in `nms`.
        labels: integer tensor [N]; then only boxes of the same label drop each other.

    Returns:
        int64 tensor [K]: indices of the boxes that are kept, best first.

    >>> import torch, triops
    >>> boxes = torch.tensor([[0.0, 0, 4, 0, 4, 2, 0, 2], [0, 0, 4, 0.5, 4, 2, 0, 2], [9, 0, 12, 1, 11, 3, 9, 2]])
    >>> triops.nms_quadri(boxes, torch.tensor([0.5, 0.9, 0.7]), iou_threshold=0.5)
    tensor([1, 2])
    """
    return _nms_quadri(boxes, scores, labels, iou_threshold)  # type: ignore[no-any-return]


def nms3d(
    boxes: Tensor,
    scores: Tensor,
    iou_threshold: float,
    *,
    labels: Optional[Tensor] = None,  # noqa: UP045 - as in the schema
    margin: float = 0.0,
) -> Tensor:
    """As `nms`, for 3D boxes `(x, y, z, dx, dy, dz, heading)` [N, 7] seen from above: z and dz play no part.

    Args:
        boxes: float tensor [N, 7].
        scores, iou_threshold, labels: as in `nms`.
        margin: as in `box_iou_rotated`.

    Returns:
        int64 tensor [K]: indices of the boxes that are kept, best first.

    >>> import torch, triops
    >>> boxes = torch.tensor([[0.0, 0, 0, 4, 2, 2, 0.0], [0.5, 0, 9, 4, 2, 2, 0.1], [9, 0, 0, 4, 2, 2, 0.0]])
    >>> triops.nms3d(boxes, torch.tensor([0.5, 0.9, 0.7]), iou_threshold=0.3)
    tensor([1, 2])
    """
    return nms_rotated(birds_eye_rectangles("nms3d", "boxes", boxes), scores, iou_threshold, labels, margin=margin)


def nms3d_normal(
    boxes: Tensor,
    scores: Tensor,
    iou_threshold: float,
    *,
    labels: Optional[Tensor] = None,  # noqa: UP045 - as in the schema
) -> Tensor:
    """As `nms3d`, with every heading taken as 0.

    >>> import torch, triops
    >>> boxes = torch.tensor([[0.0, 0, 0, 4, 2, 2, 0.0], [0.5, 0, 9, 4, 2, 2, 1.5], [9, 0, 0, 4, 2, 2, 0.0]])
    >>> triops.nms3d_normal(boxes, torch.tensor([0.5, 0.9, 0.7]), iou_threshold=0.3)
    tensor([1, 2])
    """
    seen = birds_eye_rectangles("nms3d_normal", "boxes", boxes)
    _check.Checker("nms3d_normal").dtype("boxes", seen, _check.FLOATS)
    seen = seen.to(compute_dtype(seen.dtype))  # corners do not fit in half types
    centre, half = seen[:, :2], seen[:, 2:4] * 0.5
    return nms(torch.cat([centre - half, centre + half], 1), scores, iou_threshold, labels=labels)


def soft_nms(
    boxes: Tensor,
    scores: Tensor,
    iou_threshold: float = 0.3,
    sigma: float = 0.5,
    min_score: float = 1e-3,
    method: Method = "linear",
    offset: int = 0,
) -> tuple[Tensor, Tensor]:
    """Lower the scores of boxes that overlap better ones, instead of dropping them.

    Again and again the box with the highest score is chosen, of equal ones the first, and the scores of those that
    are left are multiplied by a weight: with an overlap of `iou`, "naive" 0 and "linear" `1 - iou` where
    `iou >= iou_threshold` and else 1, "gaussian" `exp(-iou**2 / sigma)`. Scores below `min_score` are then dropped.

    Args:
        boxes: float tensor [N, 4] of `(x1, y1, x2, y2)`.
        scores: float tensor [N]. Boxes with a score of NaN or minus infinity are dropped.
        iou_threshold, sigma, min_score, method: see above.
        offset: as in `nms`.

    Returns:
        int64 tensor [K] with the indices of the boxes in the order they were chosen, and their scores [K].

    >>> import torch, triops
    >>> boxes = torch.tensor([[0.0, 0, 10, 10], [0, 0, 10, 5], [20, 20, 30, 30]])
    >>> triops.soft_nms(boxes, torch.tensor([0.5, 0.9, 0.7]))
    (tensor([1, 2, 0]), tensor([0.9000, 0.7000, 0.2500]))
    """
    return _soft_nms(boxes, scores, iou_threshold, sigma, min_score, method, offset)  # type: ignore[no-any-return]


def _checked(operator: str, boxes: Tensor, scores: Tensor, columns: int, iou_threshold: float) -> _check.Checker:
    c = _check.Checker(operator)
    c.shape("boxes", boxes, "N", columns)
    c.shape("scores", scores, "N")
    c.dtype("boxes", boxes, _check.FLOATS)
    c.dtype("scores", scores, _check.FLOATS)
    c.same_device(boxes=boxes, scores=scores)
    c.finite("iou_threshold", iou_threshold)
    c.at_least("iou_threshold", iou_threshold, 0)
    return c


def _check_nms(boxes: Tensor, scores: Tensor, labels: Tensor | None, iou_threshold: float, offset: int) -> None:
    c = _checked("nms", boxes, scores, 4, iou_threshold)
    c.choice("offset", offset, (0, 1))
    _check_labels(c, boxes, labels)


def _check_rotated(
    boxes: Tensor, scores: Tensor, labels: Tensor | None, iou_threshold: float, clockwise: bool, margin: float
) -> None:
    c = _checked("nms_rotated", boxes, scores, 5, iou_threshold)
    check_margin(c, margin)
    _check_labels(c, boxes, labels)


def _check_quadri(boxes: Tensor, scores: Tensor, labels: Tensor | None, iou_threshold: float) -> None:
    _check_labels(_checked("nms_quadri", boxes, scores, 8, iou_threshold), boxes, labels)


def _check_labels(c: _check.Checker, boxes: Tensor, labels: Tensor | None, name: str = "labels") -> None:
    if labels is not None:
        c.shape(name, labels, "N")
        c.dtype(name, labels, _check.INDICES)
        c.same_device(**{"boxes": boxes, name: labels})


def _check_soft(
    boxes: Tensor, scores: Tensor, iou_threshold: float, sigma: float, min_score: float, method: str, offset: int
) -> None:
    c = _checked("soft_nms", boxes, scores, 4, iou_threshold)
    c.choice("offset", offset, (0, 1))
    c.choice("method", method, METHODS)
    c.finite("sigma", sigma)
    c.finite("min_score", min_score)
    if sigma <= 0:
        c.fail(f"sigma must be above 0, got {sigma}")


def _some(boxes: Tensor) -> int:
    return torch.library.get_ctx().new_dynamic_size()  # type: ignore[return-value]


def _fake_nms(boxes: Tensor, scores: Tensor, labels: Tensor | None, iou_threshold: float, offset: int) -> Tensor:
    return boxes.new_empty(_some(boxes), dtype=torch.int64)


def _fake_rotated(
    boxes: Tensor, scores: Tensor, labels: Tensor | None, iou_threshold: float, clockwise: bool, margin: float
) -> Tensor:
    return boxes.new_empty(_some(boxes), dtype=torch.int64)


def _fake_quadri(boxes: Tensor, scores: Tensor, labels: Tensor | None, iou_threshold: float) -> Tensor:
    return boxes.new_empty(_some(boxes), dtype=torch.int64)


def _fake_soft(
    boxes: Tensor, scores: Tensor, iou_threshold: float, sigma: float, min_score: float, method: str, offset: int
) -> tuple[Tensor, Tensor]:
    count = _some(boxes)
    return boxes.new_empty(count, dtype=torch.int64), scores.new_empty(count)


_nms = _op.define(reference.nms, check=_check_nms, fake=_fake_nms)
_nms_rotated = _op.define(reference.nms_rotated, check=_check_rotated, fake=_fake_rotated)
_nms_quadri = _op.define(reference.nms_quadri, check=_check_quadri, fake=_fake_quadri)
_soft_nms = _op.define(reference.soft_nms, check=_check_soft, fake=_fake_soft)
for _operator in (_nms, _nms_rotated, _nms_quadri, _soft_nms):
    _operator.dynamic_output = True
