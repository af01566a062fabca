"""The specification of box_iou_rotated."""

from torch import Tensor

from triops._geometry.rotated.reference import frames, overlap


def box_iou_rotated(
    bboxes1: Tensor, bboxes2: Tensor, mode: str, aligned: bool, clockwise: bool, margin: float
) -> Tensor:
    """bboxes1 [N, 5], bboxes2 [M, 5] -> [N, M], or [N] when aligned."""
    first, second = frames(bboxes1, clockwise, margin), frames(bboxes2, clockwise, margin)
    return overlap(first if aligned else first.rows(), second, mode, margin).to(bboxes1.dtype)
