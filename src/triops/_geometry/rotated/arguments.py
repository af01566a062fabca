"""Arguments that operators on rotated rectangles share."""

from __future__ import annotations

import torch
from torch import Tensor

from triops import _check


def check_boxes(operator: str, name: str, boxes: Tensor) -> Tensor:
    """boxes [N, 7], as they are."""
    c = _check.Checker(operator)
    c.tensor(name, boxes)
    c.shape(name, boxes, "N", 7)
    return boxes


def birds_eye_rectangles(operator: str, name: str, boxes: Tensor) -> Tensor:
    """boxes [N, 7] -> x, y, dx, dy, heading [N, 5]."""
    return rectangles(check_boxes(operator, name, boxes))


def rectangles(boxes: Tensor) -> Tensor:
    """Rectangles [..., 5] as they are; of 3D boxes [..., 7] what is seen from above."""
    return boxes if boxes.shape[-1] == 5 else torch.cat([boxes[..., :2], boxes[..., 3:5], boxes[..., 6:]], -1)


def check_margin(c: _check.Checker, margin: float) -> None:
    c.finite("margin", margin)
    c.at_least("margin", margin, 0)
