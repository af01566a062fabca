"""RoI align between two Bezier curves, as text spotters read curved text."""

from __future__ import annotations

import torch
from torch import Tensor

from triops._plain import wide
from triops._rois import check_boxes, images_of, neighbors

MOST_SAMPLES = 1024  # of a bin along an axis, where their number is adaptive: more than any map has pixels


def bezier_align(
    input: Tensor, beziers: Tensor, pooled_height: int, pooled_width: int, spatial_scale: float, sampling_ratio: int,
    aligned: bool,
) -> Tensor:  # fmt: skip
    """input [N, C, H, W], beziers [K, 17] -> [K, C, PH, PW].

    A row of beziers: the image, four control points (x, y) of the upper curve from left to right, four of the lower
    curve from right to left. Bin (v, u) is centred at the point v of the way from the upper curve at u to the lower;
    it is as large as the larger of the curves' end to end distances divided by the bins, and read at a grid of
    samples, whose mean it is. A sample more than one pixel off the map is 0. A row that is not finite gives 0; one
    of an image that is not there raises IndexError on CPU and gives 0 on GPU.
    """
    check_boxes("bezier_align", beziers, input.shape[0])
    image, valid = images_of(beziers, input.shape[0])
    valid = valid & beziers.isfinite().all(1)
    curves = torch.where(valid[:, None], beziers[:, 1:].to(wide(input).dtype), 0) * spatial_scale
    upper, lower = curves.view(-1, 2, 4, 2)[:, 0], curves.view(-1, 2, 4, 2)[:, 1].flip(1)  # [K, 4, 2], left to right
    u = torch.arange(pooled_width, device=input.device).to(curves.dtype) / pooled_width
    v = torch.arange(pooled_height, device=input.device).to(curves.dtype)[:, None, None] / pooled_height
    top, bottom = (_curve(points, u)[:, None] for points in (upper, lower))  # [K, 1, PW, 2]
    center = bottom * v + top * (1 - v) - (0.5 if aligned else 0.0)  # [K, PH, PW, 2]

    extent = torch.maximum((upper[:, 0] - upper[:, 3]).abs(), (lower[:, 0] - lower[:, 3]).abs())  # [K, 2]
    extent = extent if aligned else extent.clamp(min=1)
    bin_size = extent / extent.new_tensor([pooled_width, pooled_height])
    if sampling_ratio > 0:
        samples = torch.full_like(bin_size, sampling_ratio)
    else:
        samples = bin_size.detach().ceil().clamp(max=MOST_SAMPLES)
    most_x, most_y = samples.amax(0).int().tolist() if len(samples) else (0, 0)

    channels, height, width = input.shape[1:]
    pixels = wide(input).movedim(1, 0).reshape(channels, -1)
    first = (image * (height * width))[:, None, None]
    total = pixels.new_zeros(channels, len(beziers), pooled_height, pooled_width)
    for i in range(most_y):
        for j in range(most_x):
            step = torch.tensor([j + 0.5, i + 0.5], dtype=curves.dtype, device=curves.device)
            place = center + (step * bin_size / samples.clamp(min=1) - 0.5 * bin_size)[:, None, None]
            taken = (valid & (samples[:, 0] > j) & (samples[:, 1] > i))[:, None, None]
            total = total + _bilinear(pixels, first, place[..., 0], place[..., 1], taken, height, width)
    mean = total / samples.prod(1).clamp(min=1)[:, None, None]
    return mean.movedim(0, 1).to(input.dtype)


def _curve(points: Tensor, u: Tensor) -> Tensor:
    """Cubic curves of control points [K, 4, 2] at u [U] -> [K, U, 2]."""
    weights = torch.stack([(1 - u) ** 3, 3 * u * (1 - u) ** 2, 3 * u**2 * (1 - u), u**3], 1)
    return (weights[:, :, None] * points[:, None]).sum(2)


def _bilinear(pixels: Tensor, first: Tensor, x: Tensor, y: Tensor, taken: Tensor, height: int, width: int) -> Tensor:
    """pixels [C, N * H * W], those of an image from `first` on, at (x, y) [K, PH, PW] -> [C, K, PH, PW]."""
    in_rows, top, bottom, down = neighbors(y, height)
    in_columns, left, right, along = neighbors(x, width)
    value = torch.zeros((), dtype=pixels.dtype, device=pixels.device)
    for row, weight_y in ((top, 1 - down), (bottom, down)):
        for column, weight_x in ((left, 1 - along), (right, along)):
            value = value + pixels[:, first + row * width + column] * (weight_y * weight_x)
    return torch.where(taken & in_rows & in_columns, value, 0)
