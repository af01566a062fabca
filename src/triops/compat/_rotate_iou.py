"""The overlap function of KITTI's evaluation as mmdetection3d and OpenPCDet have it, which there needs `numba.cuda`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

import triops
from triops._geometry.rotated.reference import Mode

MODES: dict[int, Mode] = {-1: "iou", 1: "iof"}


def rotate_iou_gpu_eval(boxes: Any, query_boxes: Any, criterion: int = -1, device_id: int = 0) -> Any:
    """Overlaps of rectangles `(x, y, width, height, angle)` with angles from y towards x; float32 array [N, K].

    Args:
        boxes: array [N, 5].
        query_boxes: array [K, 5].
        criterion: what the shared area is divided by: -1 the union, 0 the query box, 1 the box, 2 nothing.
        device_id: the GPU to use, where torch sees any.
    """
    device = f"cuda:{device_id}" if torch.cuda.is_available() else "cpu"
    first, second = (
        torch.as_tensor(np.asarray(b, np.float64).reshape(-1, 5), device=device) for b in (boxes, query_boxes)
    )
    if criterion == 0:
        found = triops.box_iou_rotated(second, first, "iof", clockwise=False).t()
    else:
        found = triops.box_iou_rotated(first, second, MODES.get(criterion, "area"), clockwise=False)
    return found.float().cpu().contiguous().numpy()


FUNCTIONS: dict[str, Callable[..., Any]] = {"rotate_iou_gpu_eval": rotate_iou_gpu_eval}
