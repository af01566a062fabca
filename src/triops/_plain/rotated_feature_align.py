"""The feature refinement of R3Det: what lies under the refined box of each pixel is added to its feature."""

from __future__ import annotations

import torch
from torch import Tensor

from triops._plain import wide
from triops._rois import neighbors


def rotated_feature_align(features: Tensor, boxes: Tensor, spatial_scale: float, points: int) -> Tensor:
    """features [N, C, H, W], one box (y, x, w, h, angle) per pixel [N, H, W, 5] -> [N, C, H, W].

    Each pixel's own feature, plus those read bilinearly at the centre of its box and, with 5 points, at its corners.
    Up to one pixel off the map a point reads the border pixel, further away and where it is not finite nothing.
    Differentiable in the features.
    """
    if points not in (1, 5):
        raise ValueError(f"rotated_feature_align: points must be 1 or 5, got {points}")
    channels, height, width = features.shape[1:]
    source = wide(features).flatten(2)
    boxes = boxes.detach().to(source.dtype)
    y, x = boxes[..., 0] * spatial_scale, boxes[..., 1] * spatial_scale
    places = [(y, x)]
    if points == 5:
        half_w, half_h = boxes[..., 2] * spatial_scale / 2, boxes[..., 3] * spatial_scale / 2
        cos, sin = boxes[..., 4].cos(), boxes[..., 4].sin()
        along_x, along_y, across_x, across_y = cos * half_w, sin * half_w, -sin * half_h, cos * half_h
        places += [
            (y + a * along_y + b * across_y, x + a * along_x + b * across_x)
            for a, b in ((1, 1), (-1, 1), (-1, -1), (1, -1))
        ]
    total = source
    for place_y, place_x in places if features.numel() else []:
        on_y, low_y, high_y, part_y = neighbors(place_y, height)
        on_x, low_x, high_x, part_x = neighbors(place_x, width)
        for row, weight_y in ((low_y, 1 - part_y), (high_y, part_y)):
            for column, weight_x in ((low_x, 1 - part_x), (high_x, part_x)):
                weight = torch.where(on_y & on_x, weight_y * weight_x, 0.0).flatten(1)[:, None]
                pixel = (row * width + column).flatten(1)[:, None].expand(-1, channels, -1)
                total = total + torch.where(weight > 0, weight * source.gather(2, pixel), 0.0)
    return total.view(features.shape).to(features.dtype)
