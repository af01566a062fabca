"""convex_iou: how much the convex hulls of sets of points overlap; box_iou_quadri: quadrilaterals."""

from __future__ import annotations

from torch import Tensor

from triops import _check, _op
from triops._geometry.polygon.reference import MODES, Mode
from triops.ops.convex_iou import reference

MOST_POINTS = 16  # of a set


def convex_iou(pointsets: Tensor, polygons: Tensor, mode: Mode = "iou", aligned: bool = False) -> Tensor:
    """Overlap of the convex hulls of sets of points: of every pair, or of each row with its own. No gradient flows.

    Args:
        pointsets: float tensor [N, 2K] of `(x1, y1, ..., xK, yK)`, K from 1 to 16, in any order. A set whose hull has
            no area or that is not finite overlaps nothing. Half types are computed in float32.
        polygons: tensor [M, 2L] of the same dtype.
        mode: "iou" (over the union) or "iof" (over the area of the first).
        aligned: compare row with row; then N and M must be equal.

    Returns:
        tensor [N, M] of the points' dtype, or [N] when aligned. The three backends agree bit for bit.

    Raises:
        ValueError, TypeError: on a wrong shape, dtype, device or mode, or unequal rows when aligned.

    >>> import torch, triops
    >>> triangle = torch.tensor([[0.0, 0.0, 2.0, 0.0, 0.0, 2.0]])
    >>> square = torch.tensor([[0.0, 0.0, 1.0, 0.0, 1.0, 1.0, 0.0, 1.0]])
    >>> triops.convex_iou(triangle, square)
    tensor([[0.5000]])
    """
    return _convex_iou(pointsets, polygons, mode, aligned)  # type: ignore[no-any-return]


def box_iou_quadri(bboxes1: Tensor, bboxes2: Tensor, mode: Mode = "iou", aligned: bool = False) -> Tensor:
    """Overlap of quadrilaterals `(x1, y1, ..., x4, y4)` [N, 8] and [M, 8], taken as their convex hulls.

    The rest as in `convex_iou`. mmcv's function of this name is exact for rectangles only; see its page.

    >>> import torch, triops
    >>> squares = torch.tensor([[0.0, 0, 2, 0, 2, 2, 0, 2], [1, 0, 3, 0, 3, 2, 1, 2]])
    >>> triops.box_iou_quadri(squares[:1], squares)
    tensor([[1.0000, 0.3333]])
    """
    c = _check.Checker("box_iou_quadri")
    for name, boxes, rows in (("bboxes1", bboxes1, "N"), ("bboxes2", bboxes2, "M")):
        if not isinstance(boxes, Tensor):
            raise TypeError(f"box_iou_quadri: {name} must be a Tensor, got {type(boxes).__name__}")
        c.shape(name, boxes, rows, 8)
    return convex_iou(bboxes1, bboxes2, mode, aligned)


def _check_call(pointsets: Tensor, polygons: Tensor, mode: str, aligned: bool) -> None:
    c = _check.Checker("convex_iou")
    for name, points, rows in (("pointsets", pointsets, "N"), ("polygons", polygons, "N" if aligned else "M")):
        c.shape(name, points, rows, f"2{'K' if name == 'pointsets' else 'L'}")
        columns = points.shape[1]
        if columns % 2 or not 2 <= columns <= 2 * MOST_POINTS:
            c.fail(f"{name} must have 2 to {2 * MOST_POINTS} columns, x and y of each point, got {columns}")
        if _check.too_many(points.shape[0]):
            c.fail(f"{name} must be at most 2**30, got {points.shape[0]}")
    c.dtype("pointsets", pointsets, _check.FLOATS)
    c.same_dtype(pointsets=pointsets, polygons=polygons)
    c.same_device(pointsets=pointsets, polygons=polygons)
    c.choice("mode", mode, MODES)


def _fake(pointsets: Tensor, polygons: Tensor, mode: str, aligned: bool) -> Tensor:
    return pointsets.new_empty(pointsets.shape[:1] if aligned else (pointsets.shape[0], polygons.shape[0]))


_convex_iou = _op.define(reference.convex_iou, check=_check_call, fake=_fake)

__all__ = ["box_iou_quadri", "convex_iou"]
