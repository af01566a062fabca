"""RoI align between two Bezier curves, as text spotters read curved text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from triops._plain import wide
from triops._rois import check_boxes, images_of, neighbors

MOST_SAMPLES = 1024  # of a bin along an axis, where their number is adaptive: more than any map has pixels
AT_ONCE = 1 << 18  # samples that are read by one call


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
    samples = torch.where(valid[:, None] & extent.isfinite().all(1, keepdim=True), samples, 0).long()
    counts = samples.prod(1).tolist()

    channels, height, width = input.shape[1:]
    pixels = wide(input).permute(0, 2, 3, 1).reshape(-1, channels)
    pixels = torch.cat([pixels, pixels.new_zeros(1, channels)])  # the last is what a sample off the map reads
    first = (image * (height * width))[:, None, None, None]
    means = [pixels.new_zeros(0, pooled_height, pooled_width, channels)]
    for boxes, at_once in _parts(counts, pooled_height * pooled_width):
        total, most = pixels.new_zeros(()), max(counts[boxes])
        size, columns, count = bin_size[boxes, None], samples[boxes, :1].clamp(min=1), samples[boxes].prod(1)[:, None]
        for begin in range(0, max(most, 1), at_once):
            number = torch.arange(begin, min(begin + at_once, max(most, 1)), device=input.device)  # [S], row by row
            step = torch.stack([number % columns, number // columns], 2) + 0.5  # [K, S, 2]
            step = step.to(size.dtype) * size / samples[boxes, None].clamp(min=1) - 0.5 * size
            place = center[boxes, :, :, None] + step[:, None, None]  # [K, PH, PW, S, 2]
            read = _bilinear(first[boxes], place[..., 0], place[..., 1], height, width)
            total = total + _sum(pixels, *read, (number < count)[:, None, None])
        means.append(total / count.clamp(min=1)[:, None, None])
    return torch.cat(means).permute(0, 3, 1, 2).to(input.dtype)


def _parts(counts: Sequence[int], bins: int) -> Iterator[tuple[slice, int]]:
    """Boxes side by side that are read together, and how many samples of each of their bins at once."""
    begin = 0
    while begin < len(counts):
        end, most = begin + 1, max(counts[begin], 1)
        while end < len(counts) and (end + 1 - begin) * bins * max(most, counts[end]) <= AT_ONCE:
            most = max(most, counts[end])
            end += 1
        yield slice(begin, end), max(min(most, AT_ONCE // max(bins, 1)), 1)
        begin = end


def _curve(points: Tensor, u: Tensor) -> Tensor:
    """Cubic curves of control points [K, 4, 2] at u [U] -> [K, U, 2]."""
    weights = torch.stack([(1 - u) ** 3, 3 * u * (1 - u) ** 2, 3 * u**2 * (1 - u), u**3], 1)
    return (weights[:, :, None] * points[:, None]).sum(2)


def _bilinear(first: Tensor, x: Tensor, y: Tensor, height: int, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """Whether (x, y) is on the map, and the four pixels around it, of images from `first` on, with their shares."""
    in_rows, top, bottom, down = neighbors(y, height)
    in_columns, left, right, along = neighbors(x, width)
    pixels = [first + row * width + column for row in (top, bottom) for column in (left, right)]
    shares = [v * u for v in (1 - down, down) for u in (1 - along, along)]
    return in_rows & in_columns, torch.stack(pixels, -1), torch.stack(shares, -1)


def _sum(pixels: Tensor, on_map: Tensor, places: Tensor, shares: Tensor, taken: Tensor) -> Tensor:
    """Rows of pixels [P, C] at places [K, PH, PW, S, 4], times shares, summed over all samples taken -> [K, PH, PW, C].

    One call of torch that keeps nothing per sample and channel. The last row is 0.
    """
    places = torch.where((on_map & taken)[..., None], places, len(pixels) - 1).flatten(3)
    found = functional.embedding_bag(
        places.flatten(0, 2), pixels, mode="sum", per_sample_weights=shares.flatten(3).flatten(0, 2)
    )
    return found.view(*places.shape[:3], -1)
