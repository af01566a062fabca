"""RoI align whose bins are moved, each by an offset that a network learns (deformable RoI pooling)."""

from __future__ import annotations

import torch
from torch import Tensor

from triops._plain import wide
from triops._rois import check_boxes, images_of, neighbors

MOST_SAMPLES = 1024  # of a bin along an axis, where their number is adaptive


def deform_roi_pool(
    input: Tensor, boxes: Tensor, offset: Tensor | None, pooled_height: int, pooled_width: int, spatial_scale: float,
    sampling_ratio: int, gamma: float,
) -> Tensor:  # fmt: skip
    """input [N, C, H, W], boxes [K, 5] of (image, x1, y1, x2, y2), offset [K, 2, PH, PW] -> [K, C, PH, PW].

    The mean of bilinear samples in each bin, as of `roi_align` with `aligned=True`; bin (p, q) is moved by
    `gamma * width * offset[:, 0, p, q]` along x and `gamma * height * offset[:, 1, p, q]` along y. A sample more than
    one pixel off the map is 0, and counts. A box or an offset that is not finite gives 0; a box of an image that is
    not there raises IndexError on CPU and gives 0 on GPU. Differentiable in input and offset.
    """
    check_boxes("deform_roi_pool", boxes, input.shape[0])
    image, valid = images_of(boxes, input.shape[0])
    pixels = wide(input).movedim(1, 0).reshape(input.shape[1], -1)
    corners = boxes[:, 1:].detach().to(pixels.dtype) * spatial_scale - 0.5
    low, extent = corners[:, :2], corners[:, 2:] - corners[:, :2]
    valid = valid & (low.isfinite() & extent.isfinite()).all(1)
    low, extent = (torch.where(valid[:, None], t, 0.0) for t in (low, extent))
    bins = extent / extent.new_tensor([pooled_width, pooled_height])
    samples = torch.full_like(bins, sampling_ratio) if sampling_ratio > 0 else bins.ceil().clamp(0, MOST_SAMPLES)

    sizes = input.shape[3], input.shape[2]
    axes = []  # along x and y: samples near the map, with the neighbors of each bin's
    for axis, pooled in ((0, pooled_width), (1, pooled_height)):
        place = torch.arange(pooled, device=input.device).to(bins.dtype)
        place = place if axis == 0 else place[:, None]
        start = low[:, axis, None, None].expand(-1, pooled_height, pooled_width)
        if offset is not None:
            start = start + gamma * extent[:, axis, None, None] * offset[:, axis].to(bins.dtype)
        base, length, count = start + place * bins[:, axis, None, None], bins[:, axis], samples[:, axis]
        found = []
        for i in range(int(count.max()) if len(boxes) and input.numel() else 0):
            position = base + ((i + 0.5) * length / count.clamp(min=1))[:, None, None]
            on_map, *rest = neighbors(position, sizes[axis])
            on_map = on_map & (valid & (count > i))[:, None, None]
            if bool(on_map.any()):
                found.append((on_map, *rest))
        axes.append(found)

    first = (image * (sizes[0] * sizes[1]))[:, None, None]
    total = pixels.new_zeros(input.shape[1], len(boxes), pooled_height, pooled_width)
    for in_rows, top, bottom, down in axes[1]:
        for in_columns, left, right, along in axes[0]:
            value = torch.zeros((), dtype=pixels.dtype, device=pixels.device)
            for row, weight_y in ((top, 1 - down), (bottom, down)):
                for column, weight_x in ((left, 1 - along), (right, along)):
                    value = value + pixels[:, first + row * sizes[0] + column] * (weight_y * weight_x)
            total = total + torch.where(in_rows & in_columns, value, 0)
    mean = total / samples.prod(1).clamp(min=1)[:, None, None]
    return mean.movedim(0, 1).to(input.dtype)
