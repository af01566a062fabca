"""box_iou_rotated: how much rotated rectangles overlap; boxes_overlap_bev, boxes_iou3d: 3D boxes."""

from __future__ import annotations

import torch
from torch import Tensor

from triops import _check, _op
from triops._dtypes import compute_dtype
from triops._geometry.box.reference import Z_ORIGINS, ZOrigin
from triops._geometry.rotated.arguments import check_boxes, check_margin
from triops._geometry.rotated.reference import MODES, Mode
from triops.ops.box_iou_rotated import reference

SMALLEST_UNION_3D = 1e-6  # of mmcv and OpenPCDet, where a margin can make the shared volume larger than both boxes


def box_iou_rotated(
    bboxes1: Tensor,
    bboxes2: Tensor,
    mode: Mode = "iou",
    aligned: bool = False,
    clockwise: bool = True,
    *,
    margin: float = 0.0,
) -> Tensor:
    """Overlap of rotated rectangles: of every pair, or of each row with its own.

    A rectangle is `(x, y, width, height, angle)`: centre, sizes, and the angle in radians from x towards y, which is
    clockwise on an image whose y points down. The three backends agree bit for bit. No gradient flows.

    Args:
        bboxes1: float tensor [N, 5]. A rectangle with a non-finite field or a size that is not above 0 overlaps
            nothing. Half types are computed in float32.
        bboxes2: tensor [M, 5] of the same dtype.
        mode: "iou" (over the union), "iof" (over the area of the first) or "area" (the shared area itself).
        aligned: compare row with row; then N and M must be equal.
        clockwise: False where angles run from y towards x.
        margin: 0 for the shared area. Above 0, a corner counts as inside the other rectangle when it is within
            `margin` of it, and the area is that of the polygon through these corners and the points where edges
            cross: the inexact form that mmcv and OpenPCDet use for boxes seen from above, with 0.01.

    Returns:
        tensor [N, M] of the boxes' dtype, or [N] when aligned.

    Raises:
        ValueError, TypeError: on a wrong shape, dtype, device or option, or unequal rows when aligned.

    >>> import torch, triops
    >>> square = torch.tensor([[0.0, 0.0, 2.0, 2.0, 0.0]])
    >>> others = torch.tensor([[0.0, 0, 2, 2, torch.pi / 4], [1, 0, 2, 2, 0], [9, 0, 2, 2, 0]])
    >>> triops.box_iou_rotated(square, others)
    tensor([[0.7071, 0.3333, 0.0000]])
    """
    if isinstance(bboxes1, Tensor) and bboxes1.shape[-1:] == (7,):  # 3D boxes, which have functions of their own
        _check.Checker("box_iou_rotated").shape("bboxes1", bboxes1, "N", 5)
    return _box_iou_rotated(bboxes1, bboxes2, mode, aligned, clockwise, margin)  # type: ignore[no-any-return]


def boxes_overlap_bev(boxes_a: Tensor, boxes_b: Tensor, *, aligned: bool = False, margin: float = 0.0) -> Tensor:
    """Area that 3D boxes share, seen from above. A box is `(x, y, z, dx, dy, dz, heading)`; z and dz are ignored.

    Args:
        boxes_a: float tensor [N, 7].
        boxes_b: tensor [M, 7] of the same dtype.
        aligned, margin: as in `box_iou_rotated`.

    Returns:
        tensor [N, M] of the boxes' dtype, or [N] when aligned.

    >>> import torch, triops
    >>> boxes = torch.tensor([[0.0, 0.0, 0.0, 4.0, 2.0, 2.0, 0.0], [1.0, 0.0, 5.0, 4.0, 2.0, 2.0, 0.0]])
    >>> triops.boxes_overlap_bev(boxes, boxes)
    tensor([[8., 6.],
            [6., 8.]])
    """
    return _seen_from_above("boxes_overlap_bev", boxes_a, boxes_b, "area", aligned, margin)


def boxes_iou_bev(boxes_a: Tensor, boxes_b: Tensor, *, aligned: bool = False, margin: float = 0.0) -> Tensor:
    """Intersection over union of 3D boxes seen from above. Arguments as in `boxes_overlap_bev`.

    >>> import torch, triops
    >>> boxes = torch.tensor([[0.0, 0.0, 0.0, 4.0, 2.0, 2.0, 0.0], [1.0, 0.0, 5.0, 4.0, 2.0, 2.0, 0.0]])
    >>> triops.boxes_iou_bev(boxes[:1], boxes)
    tensor([[1.0000, 0.6000]])
    """
    return _seen_from_above("boxes_iou_bev", boxes_a, boxes_b, "iou", aligned, margin)


def _seen_from_above(
    operator: str, boxes_a: Tensor, boxes_b: Tensor, mode: Mode, aligned: bool, margin: float
) -> Tensor:
    # Kernels take the columns that they need: to copy them would take longer than a small call.
    boxes_a, boxes_b = check_boxes(operator, "boxes_a", boxes_a), check_boxes(operator, "boxes_b", boxes_b)
    return _box_iou_rotated(boxes_a, boxes_b, mode, aligned, True, margin)  # type: ignore[no-any-return]


def boxes_iou3d(
    boxes_a: Tensor, boxes_b: Tensor, *, aligned: bool = False, z_origin: ZOrigin = "center", margin: float = 0.0
) -> Tensor:
    """Intersection over union of the volumes of 3D boxes `(x, y, z, dx, dy, dz, heading)`.

    The area shared seen from above, as of `boxes_overlap_bev`, times the height shared. No gradient flows: the loss
    over the same ratio is `diff_iou_rotated_3d`.

    Args:
        boxes_a: float tensor [N, 7]. A box with a non-finite field or a size that is not above 0 overlaps nothing.
            Half types are computed in float32.
        boxes_b: tensor [M, 7] of the same dtype.
        aligned: compare row with row; then N and M must be equal.
        z_origin: "center", or "bottom" where `z` is the bottom face of the box (mmdetection3d).
        margin: as in `box_iou_rotated`.

    Returns:
        tensor [N, M] of the boxes' dtype, or [N] when aligned. Empty where N or M is 0.

    Raises:
        ValueError, TypeError: on a wrong shape, dtype, device or option, or unequal rows when aligned.

    >>> import torch, triops
    >>> boxes = torch.tensor([[0.0, 0, 0, 4, 2, 2, 0], [0.0, 0, 1, 4, 2, 2, 0], [0.0, 0, 5, 4, 2, 2, 0]])
    >>> triops.boxes_iou3d(boxes[:1], boxes)
    tensor([[1.0000, 0.3333, 0.0000]])
    """
    c = _check.Checker("boxes_iou3d")
    c.word("z_origin", z_origin, Z_ORIGINS)
    c.tensor("boxes_a", boxes_a)
    c.tensor("boxes_b", boxes_b)
    c.dtype("boxes_a", boxes_a, _check.FLOATS)
    c.same_dtype(boxes_a=boxes_a, boxes_b=boxes_b)
    a, b = (boxes.detach().to(compute_dtype(boxes.dtype)) for boxes in (boxes_a, boxes_b))
    area = boxes_overlap_bev(a, b, aligned=aligned, margin=margin)
    if not aligned:
        a, b = a[:, None], b[None]
    below, above = (0.5, 0.5) if z_origin == "center" else (0.0, 1.0)
    # A small call takes as long as its launches: each line is one or two. `fmax` gives 0 for what is not a number. It
    # takes no number either, and FakeTensorMode takes no tensor that was there before.
    zero = torch.scalar_tensor(0.0, device="cpu")
    top = torch.minimum(*(torch.add(x[..., 2], x[..., 5], alpha=above) for x in (a, b)))
    bottom = torch.maximum(*(torch.sub(x[..., 2], x[..., 5], alpha=below) for x in (a, b)))
    shared = area.mul_(torch.fmax(top.sub_(bottom), zero))
    union = (a[..., 3:6].prod(-1) + b[..., 3:6].prod(-1)).sub_(shared)
    ratio = shared / (union.clamp_(min=SMALLEST_UNION_3D) if margin > 0 else union)
    return torch.fmax(ratio, zero).to(boxes_a.dtype)


def _check_call(bboxes1: Tensor, bboxes2: Tensor, mode: str, aligned: bool, clockwise: bool, margin: float) -> None:
    c = _check.Checker("box_iou_rotated")
    columns = 7 if bboxes1.dim() == 2 and bboxes1.shape[1] == 7 else 5
    c.shape("bboxes1", bboxes1, "N", columns)
    c.shape("bboxes2", bboxes2, "N" if aligned else "M", columns)
    c.dtype("bboxes1", bboxes1, _check.FLOATS)
    c.same_dtype(bboxes1=bboxes1, bboxes2=bboxes2)
    c.same_device(bboxes1=bboxes1, bboxes2=bboxes2)
    c.choice("mode", mode, MODES)
    check_margin(c, margin)


def _fake(bboxes1: Tensor, bboxes2: Tensor, mode: str, aligned: bool, clockwise: bool, margin: float) -> Tensor:
    return bboxes1.new_empty(bboxes1.shape[:1] if aligned else (bboxes1.shape[0], bboxes2.shape[0]))


_box_iou_rotated = _op.define(reference.box_iou_rotated, check=_check_call, fake=_fake)
