"""The specification of roi_pool_forward and roi_pool_backward.

A box reaches from its first corner to one unit behind its second. Its extent is cut into equal bins, and a bin holds
the pixels from the floor of its first edge to the ceiling of its last, so that neighboring bins may share pixels.
"""

from __future__ import annotations

import torch
from torch import Tensor

from triops._dtypes import compute_dtype
from triops._rois import check_boxes, empty_in_format, format_of, images_of

LOWEST = torch.finfo(torch.float32).min  # the maximum where no pixel of a bin is higher, in every dtype
NONE = -1  # the pixel of a maximum that is none


def roi_pool_forward(
    input: Tensor, boxes: Tensor, pooled_height: int, pooled_width: int, spatial_scale: float
) -> tuple[Tensor, Tensor]:
    """input [N, C, H, W], boxes [K, 5] -> output [K, C, PH, PW]; pixels of the maxima, int32, likewise."""
    check_boxes("roi_pool", boxes, input.shape[0])
    output, argmax = empty_outputs(input, boxes, pooled_height, pooled_width)
    output.zero_()
    argmax.fill_(NONE)
    if input.numel() == 0 or output.numel() == 0:
        return output, argmax
    height, width = input.shape[2:]
    image, valid = images_of(boxes, input.shape[0])
    tops, bottoms, lefts, rights = (
        edges.tolist() for edges in bins(boxes, pooled_height, pooled_width, spatial_scale, height, width, input.dtype)
    )
    for k in range(len(boxes)):
        if not valid[k]:
            continue
        pixels = input[image[k]].to(compute_dtype(input.dtype))
        for p, (top, bottom) in enumerate(zip(tops[k], bottoms[k], strict=True)):
            for q, (left, right) in enumerate(zip(lefts[k], rights[k], strict=True)):
                if top >= bottom or left >= right:
                    continue
                part = pixels[:, top:bottom, left:right].flatten(1)
                best, at = torch.where(part.isnan(), LOWEST, part).max(1)  # the first of equal ones
                pixel = (top + at // (right - left)) * width + left + at % (right - left)
                output[k, :, p, q] = best.clamp(min=LOWEST)
                argmax[k, :, p, q] = torch.where(best > LOWEST, pixel, NONE).int()
    return output, argmax


def roi_pool_backward(
    grad_output: Tensor, boxes: Tensor, argmax: Tensor, batch: int, height: int, width: int, channels_last: bool
) -> Tensor:
    """grad_output, argmax [K, C, PH, PW], boxes [K, 5] -> gradient of the input."""
    check_boxes("roi_pool_backward", boxes, batch)
    channels, plane = grad_output.shape[1], height * width
    real = compute_dtype(grad_output.dtype)
    grad = torch.zeros((batch, channels, height, width), dtype=real, device=grad_output.device)
    image, valid = images_of(boxes, batch)
    found = (argmax >= 0) & (argmax < plane) & valid[:, None, None, None]
    if grad.numel():
        first = (image[:, None] * channels + torch.arange(channels, device=grad.device)) * plane
        at = torch.where(found, first[..., None, None] + argmax, 0)
        grad.view(-1).index_add_(0, at.flatten(), torch.where(found, grad_output.to(real), 0.0).flatten())
    out = empty_in_format(grad.shape, grad_output.dtype, grad.device, channels_last)
    return out.copy_(grad)


def bins(
    boxes: Tensor, pooled_height: int, pooled_width: int, spatial_scale: float, height: int, width: int,
    dtype: torch.dtype,
) -> list[Tensor]:  # fmt: skip
    """First rows [K, PH] of the bins and the rows behind their last, first columns [K, PW] and likewise.

    No pixels for a box without extent and for one that is not finite.
    """
    real = compute_dtype(dtype)
    low = boxes[:, 1:3].to(real) * spatial_scale
    extent = (boxes[:, 3:].to(real) + 1) * spatial_scale - low
    readable = (low.isfinite() & extent.isfinite() & (extent > 0)).all(1, keepdim=True)
    found = []
    for axis, pooled, size in ((1, pooled_height, height), (0, pooled_width, width)):
        start = low[:, axis, None]
        length = extent[:, axis, None] / torch.full_like(start, pooled)
        number = torch.arange(pooled, device=boxes.device).to(real)
        for edge in ((number * length + start).float().floor(), ((number + 1) * length + start).float().ceil()):
            found.append(torch.where(readable, edge.clamp(0, size), 0.0).long())
    return found


def empty_outputs(input: Tensor, boxes: Tensor, pooled_height: int, pooled_width: int) -> tuple[Tensor, Tensor]:
    """Output and pixels of the maxima, lying in memory as the input does."""
    shape = (boxes.shape[0], input.shape[1], pooled_height, pooled_width)
    place = input.device, format_of(input) == torch.channels_last
    return empty_in_format(shape, input.dtype, *place), empty_in_format(shape, torch.int32, *place)
