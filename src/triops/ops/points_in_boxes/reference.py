"""The specification of points_in_boxes and points_in_boxes_all."""

import torch
from torch import Tensor

from triops._dtypes import compute_dtype
from triops._geometry.box.reference import frames, inside


def points_in_boxes(points: Tensor, boxes: Tensor, z_origin: str, margin: float) -> Tensor:
    """points [B, M, 3], boxes [B, T, 7] -> int32 [B, M]: the lowest index of a box that holds the point, or -1."""
    points = points.to(compute_dtype(points.dtype))
    frame = frames(boxes, z_origin, margin)
    index = points.new_full(points.shape[:2], -1, dtype=torch.int32)
    for t in reversed(range(boxes.shape[1])):
        index = torch.where(inside(points, frame[:, t, None]), t, index)
    return index


def points_in_boxes_all(points: Tensor, boxes: Tensor, z_origin: str, margin: float) -> Tensor:
    """points [B, M, 3], boxes [B, T, 7] -> bool [B, M, T]."""
    points = points.to(compute_dtype(points.dtype))
    return inside(points[:, :, None], frames(boxes, z_origin, margin)[:, None])
