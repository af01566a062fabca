"""Arguments that operators on rotated rectangles share."""

from __future__ import annotations

import torch
from torch import Tensor

from triops import _check


def birds_eye_rectangles(operator: str, name: str, boxes: Tensor) -> Tensor:
    """boxes [N, 7] -> x, y, dx, dy, heading [N, 5]."""
    c = _check.Checker(operator)
    c.tensor(name, boxes)
    c.shape(name, boxes, "N", 7)
    return torch.cat([boxes[:, :2], boxes[:, 3:5], boxes[:, 6:]], 1)


def check_margin(c: _check.Checker, margin: float) -> None:
    c.finite("margin", margin)
    c.at_least("margin", margin, 0)
