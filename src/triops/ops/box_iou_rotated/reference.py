"""The specification of box_iou_rotated."""

from torch import Tensor

from triops._geometry.rotated.arguments import rectangles
from triops._geometry.rotated.reference import frames, overlap


def box_iou_rotated(
    bboxes1: Tensor, bboxes2: Tensor, mode: str, aligned: bool, clockwise: bool, margin: float
) -> Tensor:
    """bboxes1 [N, 5], bboxes2 [M, 5] -> [N, M], or [N] when aligned.

    Or 3D boxes [N, 7] and [M, 7], seen from above.
    """
    first, second = (frames(rectangles(boxes), clockwise, margin) for boxes in (bboxes1, bboxes2))
    return overlap(first if aligned else first.rows(), second, mode, margin).to(bboxes1.dtype)
