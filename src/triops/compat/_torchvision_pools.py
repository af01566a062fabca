"""The operators of torchvision that read whole pixels or bins of their own channels, with torchvision's answers.

`ps_roi_align` is `roi_align` of all channels, of which each bin keeps its own; `roi_pool` and `ps_roi_pool` round boxes
to pixels first, which triops' own `roi_pool`, after mmcv, does not.
"""

from __future__ import annotations

import torch
from torch import Tensor

from triops._dtypes import compute_dtype
from triops._rois import check_boxes, images_of
from triops.ops.roi_align import roi_align_backward, roi_align_forward
from triops.ops.roi_pool import roi_pool_backward as whole_backward
from triops.ops.roi_pool import roi_pool_forward as whole_forward


def roi_pool(
    input: Tensor, rois: Tensor, spatial_scale: float, pooled_height: int, pooled_width: int
) -> tuple[Tensor, Tensor]:
    """-> [K, C, PH, PW], and the pixel that each of them is. Every bin is a box of its own, one bin large."""
    rows, columns, _ = _pixels(input, rois, spatial_scale, (pooled_height, pooled_width), 1)
    shape = (rois.shape[0], pooled_height, pooled_width)
    image = rois[:, 0].to(rows[0].dtype)[:, None, None].expand(shape)
    low_y, high_y = (side[:, :, None].expand(shape) for side in rows)
    low_x, high_x = (side[:, None, :].expand(shape) for side in columns)
    boxes = torch.stack((image, low_x, low_y, high_x - 1, high_y - 1), -1).flatten(0, 2)
    output, argmax = whole_forward(input, boxes, 1, 1, 1.0)
    places = (*shape, input.shape[1])
    return _channels_first(output.reshape(places)), _channels_first(argmax.reshape(places))


def roi_pool_backward(
    grad: Tensor, rois: Tensor, argmax: Tensor, spatial_scale: float, pooled_height: int, pooled_width: int,
    batch_size: int, channels: int, height: int, width: int,
) -> Tensor:  # fmt: skip
    return whole_backward(grad, _boxes(rois, grad), argmax.int(), batch_size, height, width)


def ps_roi_align(
    input: Tensor, rois: Tensor, spatial_scale: float, pooled_height: int, pooled_width: int, sampling_ratio: int
) -> tuple[Tensor, Tensor]:
    """-> [K, C / (PH * PW), PH, PW], and the channel that each of them was read from."""
    pooled = (pooled_height, pooled_width)
    _check_channels(input.shape[1], pooled)
    every, *_ = roi_align_forward(
        input.contiguous(), _boxes(rois, input), *pooled, spatial_scale, sampling_ratio, True, "avg"
    )
    return _own(every, pooled).contiguous(), _channel_mapping(input, rois, pooled)


def ps_roi_align_backward(
    grad: Tensor, rois: Tensor, channel_mapping: Tensor, spatial_scale: float, pooled_height: int, pooled_width: int,
    sampling_ratio: int, batch_size: int, channels: int, height: int, width: int,
) -> Tensor:  # fmt: skip
    pooled = (pooled_height, pooled_width)
    every = grad.new_zeros((grad.shape[0], channels, *pooled))
    _own(every, pooled).copy_(grad)
    none = grad.new_empty(0, dtype=compute_dtype(grad.dtype))
    return roi_align_backward(
        every, _boxes(rois, grad), none, none, batch_size, height, width, spatial_scale, sampling_ratio, True, "avg"
    )


def ps_roi_pool(
    input: Tensor, rois: Tensor, spatial_scale: float, pooled_height: int, pooled_width: int
) -> tuple[Tensor, Tensor]:
    """-> [K, C / (PH * PW), PH, PW], means over pixels, and the channel that each of them was read from."""
    pooled = (pooled_height, pooled_width)
    _check_channels(input.shape[1], pooled)
    check_boxes("ps_roi_pool", rois, input.shape[0])
    rows, columns, share = _members(input, rois, spatial_scale, pooled)
    image, valid = images_of(rois, input.shape[0])
    planes = input.to(rows.dtype).unflatten(1, (-1, *pooled))
    sums = rows.new_zeros((rois.shape[0], planes.shape[1], *pooled))
    for n in range(input.shape[0]):
        own = image == n
        sums[own] = torch.einsum("cpqhw,kph,kqw->kcpq", planes[n], rows[own], columns[own])
    sums *= share * valid[:, None, None, None]
    return sums.to(input.dtype), _channel_mapping(input, rois, pooled)


def ps_roi_pool_backward(
    grad: Tensor, rois: Tensor, channel_mapping: Tensor, spatial_scale: float, pooled_height: int, pooled_width: int,
    batch_size: int, channels: int, height: int, width: int,
) -> Tensor:  # fmt: skip
    pooled = (pooled_height, pooled_width)
    like = grad.new_empty((0, 0, height, width))
    rows, columns, share = _members(like, rois, spatial_scale, pooled)
    image, valid = images_of(rois, batch_size)
    parts = grad.to(rows.dtype) * share * valid[:, None, None, None]
    planes = rows.new_zeros((batch_size, parts.shape[1], *pooled, height, width))
    for n in range(batch_size):
        own = image == n
        planes[n] = torch.einsum("kcpq,kph,kqw->cpqhw", parts[own], rows[own], columns[own])
    return planes.flatten(1, 3).to(grad.dtype)


def _boxes(rois: Tensor, maps: Tensor) -> Tensor:
    """Boxes of a half type as the float32 numbers that they hold."""
    return rois.to(compute_dtype(maps.dtype))


def _check_channels(channels: int, pooled: tuple[int, int]) -> None:
    if channels % (pooled[0] * pooled[1]):
        raise ValueError(
            "input channels must be a multiple of pooling height * pooling width, "
            f"got {channels} channels for {pooled[0]} x {pooled[1]} bins"
        )


def _own(every: Tensor, pooled: tuple[int, int]) -> Tensor:
    """[K, C, PH, PW] -> a view [K, C / (PH * PW), PH, PW]: of bin (p, q) the channels p * PW + q of each group."""
    bins: Tensor = every.unflatten(1, (-1, *pooled))
    return bins.diagonal(dim1=2, dim2=4).diagonal(dim1=2, dim2=3)


def _channel_mapping(input: Tensor, rois: Tensor, pooled: tuple[int, int]) -> Tensor:
    channels = torch.arange(input.shape[1], dtype=torch.int32, device=input.device).view(-1, *pooled)
    return channels.expand(rois.shape[0], -1, -1, -1).contiguous()


def _channels_first(values: Tensor) -> Tensor:
    return values.permute(0, 3, 1, 2).contiguous()


def _pixels(
    input: Tensor, rois: Tensor, scale: float, pooled: tuple[int, int], inclusive: int
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor], Tensor]:
    """The first pixels of bins and those behind the last, along y [K, PH] and x [K, PW], and the bins' areas.

    Whole numbers in the dtype that boxes are computed in. A box ends at its rounded corner, plus `inclusive`, and is
    one pixel large at least; not clipped to the map.
    """
    real = compute_dtype(input.dtype)
    corners = _rounded(rois[:, 1:].to(real) * scale)
    sides = []
    for axis, bins in ((1, pooled[0]), (0, pooled[1])):
        start = corners[:, axis, None]
        length = (corners[:, 2 + axis, None] - start + inclusive).clamp(min=1) / torch.full_like(start, bins)
        edges = torch.arange(bins + 1, dtype=real, device=rois.device) * length
        low, high = edges[:, :-1].floor() + start, edges[:, 1:].ceil() + start
        limit = input.shape[3 - axis] - (1 - inclusive)  # a mean leaves out the last pixel of the map, as torchvision's
        sides.append((low.clamp(0, limit), high.clamp(0, limit)))
    rows, columns = sides
    area = (rows[1] - rows[0])[:, :, None] * (columns[1] - columns[0])[:, None, :]
    return rows, columns, area


def _members(input: Tensor, rois: Tensor, scale: float, pooled: tuple[int, int]) -> tuple[Tensor, Tensor, Tensor]:
    """Which rows [K, PH, H] and columns [K, PW, W] belong to bins, and one over the bins' areas [K, 1, PH, PW]."""
    rows, columns, area = _pixels(input, rois, scale, pooled, 0)
    members = []
    for (low, high), size in ((rows, input.shape[2]), (columns, input.shape[3])):
        place = torch.arange(size, device=rois.device)
        members.append(((place >= low[..., None]) & (place < high[..., None])).to(low.dtype))
    return members[0], members[1], torch.where(area > 0, 1 / area, 0)[:, None]


def _rounded(values: Tensor) -> Tensor:
    """Halves away from zero, as in C."""
    whole = values.trunc()
    return whole + (values - whole).abs().ge(0.5) * values.sign()
