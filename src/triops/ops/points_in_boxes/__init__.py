"""points_in_boxes: which 3D box holds a point, and points_in_boxes_all: every box that does."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from triops import _check, _op
from triops._geometry.box.reference import Z_ORIGINS, ZOrigin
from triops.ops.points_in_boxes import reference


def points_in_boxes(points: Tensor, boxes: Tensor, *, z_origin: ZOrigin = "center", margin: float = 0.0) -> Tensor:
    """Index of the first box that holds each point, or -1.

    A box is `(cx, cy, cz, dx, dy, dz, heading)`: centre, sizes, and the angle from x towards y seen from
    above. A point is inside when `|z - cz| <= dz / 2` and, in the axes of the box, `|x| < dx / 2 + margin`
    and `|y| < dy / 2 + margin`. The three backends agree bit for bit.

    Args:
        points: float tensor [B, M, 3]. A point with a non-finite coordinate is in no box.
        boxes: tensor [B, T, 7] of the same dtype. A box with a non-finite field holds no point.
        z_origin: "center", or "bottom" where `cz` is the bottom face of the box (mmdetection3d).
        margin: added to the half sizes in x and y.

    Returns:
        int32 tensor [B, M]. All -1 when T is 0; empty when B or M is 0.

    Raises:
        ValueError, TypeError: on a wrong rank, last dimension, batch size, dtype, device or option.

    >>> import torch, triops
    >>> boxes = torch.tensor([[[0.0, 0.0, 0.0, 4.0, 2.0, 2.0, 0.0], [1.0, 0.0, 0.0, 4.0, 2.0, 2.0, 0.0]]])
    >>> points = torch.tensor([[[0.0, 0.0, 0.0], [2.5, 0.0, 0.0], [9.0, 0.0, 0.0]]])
    >>> triops.points_in_boxes(points, boxes)
    tensor([[ 0,  1, -1]], dtype=torch.int32)
    """
    return _points_in_boxes(points, boxes, z_origin, margin)  # type: ignore[no-any-return]


def points_in_boxes_all(points: Tensor, boxes: Tensor, *, z_origin: ZOrigin = "center", margin: float = 0.0) -> Tensor:
    """Whether each point lies in each box. Arguments and the test itself as in `points_in_boxes`.

    Returns:
        bool tensor [B, M, T].

    >>> import torch, triops
    >>> boxes = torch.tensor([[[0.0, 0.0, 0.0, 4.0, 2.0, 2.0, 0.0], [1.0, 0.0, 0.0, 4.0, 2.0, 2.0, 0.0]]])
    >>> triops.points_in_boxes_all(torch.tensor([[[0.0, 0.0, 0.0], [2.5, 0.0, 0.0]]]), boxes)
    tensor([[[ True,  True],
             [False,  True]]])
    """
    return _points_in_boxes_all(points, boxes, z_origin, margin)  # type: ignore[no-any-return]


def _checker(operator: str) -> Callable[[Tensor, Tensor, str, float], None]:
    def check(points: Tensor, boxes: Tensor, z_origin: str, margin: float) -> None:
        c = _check.Checker(operator)
        c.shape("points", points, "B", "M", 3)
        c.shape("boxes", boxes, "B", "T", 7)
        c.dtype("points", points, _check.FLOATS)
        c.same_dtype(points=points, boxes=boxes)
        c.same_device(points=points, boxes=boxes)
        c.choice("z_origin", z_origin, Z_ORIGINS)
        c.finite("margin", margin)
        if _check.too_many(points.shape[1]) or _check.too_many(boxes.shape[1]):
            c.fail(
                f"points and boxes must be at most 2**30 per batch element, since indices are int32, "
                f"got {points.shape[1]} points and {boxes.shape[1]} boxes"
            )

    return check


def _fake_first(points: Tensor, boxes: Tensor, z_origin: str, margin: float) -> Tensor:
    return points.new_empty(points.shape[:2], dtype=torch.int32)


def _fake_all(points: Tensor, boxes: Tensor, z_origin: str, margin: float) -> Tensor:
    return points.new_empty((*points.shape[:2], boxes.shape[1]), dtype=torch.bool)


_points_in_boxes = _op.define(reference.points_in_boxes, check=_checker("points_in_boxes"), fake=_fake_first)
_points_in_boxes_all = _op.define(reference.points_in_boxes_all, check=_checker("points_in_boxes_all"), fake=_fake_all)
