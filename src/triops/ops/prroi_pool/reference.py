"""The specification of prroi_pool and its two backwards.

The map is a continuous surface: bilinear between the centres of its pixels, 0 from one pixel off it on. A bin is the
mean of this surface over its area. The integral of the surface is a sum over pixels, of which each has the product of
two weights: the integrals of its hat function `max(0, 1 - |t - pixel|)` along y and along x.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from triops._dtypes import compute_dtype
from triops._rois import check_boxes, empty_in_format, empty_like_format, images_of


def prroi_pool(input: Tensor, boxes: Tensor, pooled_height: int, pooled_width: int, spatial_scale: float) -> Tensor:
    """input [N, C, H, W], boxes [K, 5] -> [K, C, PH, PW]"""
    check_boxes("prroi_pool", boxes, input.shape[0])
    real, (height, width) = compute_dtype(input.dtype), input.shape[2:]
    output = empty_like_format((len(boxes), input.shape[1], pooled_height, pooled_width), input.dtype, input).zero_()
    image, valid = images_of(boxes, input.shape[0])
    bins = cut(boxes, pooled_height, pooled_width, spatial_scale, real)
    for k in (bins.area * valid).nonzero()[:, 0].tolist() if input.numel() else []:
        pixels = input[image[k]].to(real)
        for p, q, rows, columns in pieces(bins, k, height, width):
            value = (pixels[:, rows.at][:, :, columns.at] * rows.weight[:, None] * columns.weight).sum((1, 2))
            output[k, :, p, q] = value / bins.area[k]
    return output


def prroi_pool_backward(
    grad_output: Tensor, boxes: Tensor, batch: int, height: int, width: int, spatial_scale: float, channels_last: bool
) -> Tensor:
    """grad_output [K, C, PH, PW], boxes [K, 5] -> gradient of the input."""
    check_boxes("prroi_pool_backward", boxes, batch)
    channels, pooled_height, pooled_width = grad_output.shape[1:]
    real = compute_dtype(grad_output.dtype)
    grad = torch.zeros((batch, channels, height, width), dtype=real, device=grad_output.device)
    image, valid = images_of(boxes, batch)
    bins = cut(boxes, pooled_height, pooled_width, spatial_scale, real)
    for k in (bins.area * valid).nonzero()[:, 0].tolist() if grad.numel() else []:
        given = grad_output[k].to(real) / bins.area[k]
        for p, q, rows, columns in pieces(bins, k, height, width):
            share = given[:, p, q, None, None] * (rows.weight[:, None] * columns.weight)
            grad[image[k]][:, rows.at[:, None], columns.at] += share
    out = empty_in_format(grad.shape, grad_output.dtype, grad.device, channels_last)
    return out.copy_(grad)


def prroi_pool_boxes_backward(grad_output: Tensor, input: Tensor, boxes: Tensor, spatial_scale: float) -> Tensor:
    """grad_output [K, C, PH, PW], input [N, C, H, W], boxes [K, 5] -> gradient of the boxes.

    As an edge of a bin moves outwards, its integral grows by that along the edge, and its mean by how much the mean
    along the edge is above its own.
    """
    check_boxes("prroi_pool_boxes_backward", boxes, input.shape[0])
    (pooled_height, pooled_width), (height, width) = grad_output.shape[2:], input.shape[2:]
    real = compute_dtype(input.dtype)
    grad = torch.zeros(boxes.shape, dtype=real, device=boxes.device)
    image, valid = images_of(boxes, input.shape[0])
    bins = cut(boxes, pooled_height, pooled_width, spatial_scale, real)
    for k in (bins.area * valid).nonzero()[:, 0].tolist() if input.numel() else []:
        pixels, given = input[image[k]].to(real), grad_output[k].to(real)
        for p, q, rows, columns in pieces(bins, k, height, width):
            part = pixels[:, rows.at][:, :, columns.at]
            share = given[:, p, q] / bins.area[k] * spatial_scale
            x1, x2 = (
                ((part * rows.weight[:, None] * e).sum((1, 2)) * share).sum() for e in (columns.first, columns.last)
            )
            y1, y2 = (((part * e[:, None] * columns.weight).sum((1, 2)) * share).sum() for e in (rows.first, rows.last))
            x1, y1 = -x1, -y1  # outwards is down
            grad[k, 1] += x1 * (1 - q / pooled_width) + x2 * (1 - (q + 1) / pooled_width)
            grad[k, 3] += x1 * (q / pooled_width) + x2 * ((q + 1) / pooled_width)
            grad[k, 2] += y1 * (1 - p / pooled_height) + y2 * (1 - (p + 1) / pooled_height)
            grad[k, 4] += y1 * (p / pooled_height) + y2 * ((p + 1) / pooled_height)
    return grad.to(boxes.dtype)


class Bins(NamedTuple):
    """Boxes cut into bins; no area where a box has none or is not finite."""

    y: Tensor  # [K, PH], the first edges
    x: Tensor  # [K, PW]
    tall: Tensor  # [K], height of a bin
    wide: Tensor
    area: Tensor


def cut(boxes: Tensor, pooled_height: int, pooled_width: int, spatial_scale: float, real: torch.dtype) -> Bins:
    corners = boxes[:, 1:].to(real) * spatial_scale
    low, extent = corners[:, :2], corners[:, 2:] - corners[:, :2]
    finite = (low.isfinite() & extent.isfinite()).all(1)
    low, extent = torch.where(finite[:, None], low, 0.0), torch.where(finite[:, None], extent, 0.0).clamp(min=0)
    tall = extent[:, 1] / torch.full_like(extent[:, 1], pooled_height)
    wide = extent[:, 0] / torch.full_like(extent[:, 0], pooled_width)
    y = low[:, 1, None] + tall[:, None] * torch.arange(pooled_height, device=boxes.device).to(real)
    x = low[:, 0, None] + wide[:, None] * torch.arange(pooled_width, device=boxes.device).to(real)
    return Bins(y, x, tall, wide, tall * wide)


class Pixels(NamedTuple):
    """Pixels of a bin along an axis."""

    at: Tensor
    weight: Tensor  # integral of the hat function over the bin
    first: Tensor  # the hat function at its first edge, less its mean
    last: Tensor


def pixels_of(first: Tensor, length: Tensor, size: int) -> Pixels:
    """In float64: at the edges of a small bin the hat function is close to its mean."""
    real, first, last = first.dtype, first.double(), (first + length).double()
    pixel = torch.arange(size, device=first.device).double()
    weight = torch.zeros_like(pixel)
    for low, high in ((pixel - 1, pixel), (pixel, pixel + 1)):  # the two straight pieces of the hat
        begin, end = low.clamp(min=first), high.clamp(max=last)
        weight += (end - begin).clamp(min=0) * (1 - ((begin + end) / 2 - pixel).abs()).clamp(min=0)
    at = weight.nonzero()[:, 0]
    edges = ((1 - (edge - pixel).abs()).clamp(min=0) - weight / (last - first) for edge in (first, last))
    return Pixels(at, weight[at].to(real), *(edge[at].to(real) for edge in edges))


def pieces(bins: Bins, k: int, height: int, width: int) -> list[tuple[int, int, Pixels, Pixels]]:
    """Place along y and x of the bins of box k, and their pixels."""
    rows = [pixels_of(y, bins.tall[k], height) for y in bins.y[k]]
    columns = [pixels_of(x, bins.wide[k], width) for x in bins.x[k]]
    return [(p, q, row, column) for p, row in enumerate(rows) for q, column in enumerate(columns)]
