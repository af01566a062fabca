"""Operators for detection on points, voxels and boxes: Numba on CPU, Triton on GPU, plain torch everywhere."""

from triops._op import reference_backend
from triops.ops.points_in_boxes import points_in_boxes, points_in_boxes_all

__version__ = "0.1.0"
__all__ = ["points_in_boxes", "points_in_boxes_all", "reference_backend"]
