"""The specification of roipoint_pool3d."""

from __future__ import annotations

import torch
from torch import Tensor

from triops._dtypes import compute_dtype
from triops._geometry.box.reference import frames, inside


def roipoint_pool3d(
    points: Tensor, features: Tensor, boxes: Tensor, count: int, z_origin: str, margin: float
) -> tuple[Tensor, Tensor]:
    """points [B, N, 3], features [B, N, C], boxes [B, M, 7] -> pooled [B, M, count, 3 + C], indices [B, M, count].

    The indices of a box are its lowest points, in order and over again; -1, and zeros, for a box without points.
    """
    held = inside(points.to(compute_dtype(points.dtype))[:, None], frames(boxes, z_origin, margin)[:, :, None])
    number = held.sum(2, keepdim=True)  # [B, M, 1]
    slot = torch.arange(count, device=points.device) % number.clamp(min=1)
    first = held.int().argsort(
        dim=2, descending=True, stable=True
    )  # points inside, in ascending order, then the others
    if points.shape[1] == 0:
        first = first.new_zeros((*held.shape[:2], 1))
    indices = torch.where(number > 0, first.gather(2, slot), -1)
    rows = torch.cat([points.to(features.dtype), features], 2)
    if points.shape[1] == 0:
        return features.new_zeros((*indices.shape, rows.shape[2])), indices.int()
    batch = torch.arange(len(points), device=points.device)[:, None, None]
    pooled = torch.where(indices[..., None] >= 0, rows[batch, indices.clamp(min=0)], 0)
    return pooled, indices.int()
