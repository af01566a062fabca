"""The specification of voxel_query."""

import torch
from torch import Tensor

from triops._dtypes import compute_dtype

ENTRIES = 2**22  # of all windows, held at a time


def voxel_query(
    points: Tensor, centers: Tensor, coords: Tensor, voxel_rows: Tensor, radius: float, k: int, max_range: list[int]
) -> Tensor:
    """points [N, 3], centers [M, 3], coords [M, 4] of (batch, z, y, x), voxel_rows [B, Z, Y, X] -> int32 [M, k]."""
    check_values(points, coords, voxel_rows)
    real = compute_dtype(points.dtype)
    points, centers = points.to(real), centers.to(real)
    far = torch.tensor(radius, dtype=real, device=points.device).square()
    steps = torch.cartesian_prod(*(torch.arange(-r, r + 1, device=points.device) for r in max_range))  # z slowest
    sizes = torch.tensor(voxel_rows.shape[1:], device=points.device)
    out = centers.new_empty((centers.shape[0], k), dtype=torch.int32)
    window = steps.shape[0]
    number = torch.arange(window, device=points.device)
    for begin in range(0, centers.shape[0], max(1, ENTRIES // window)):
        part = slice(begin, begin + max(1, ENTRIES // window))
        batch, sites = coords[part, :1].long(), coords[part, None, 1:].long() + steps
        inside = ((sites >= 0) & (sites < sizes)).all(2)
        z, y, x = torch.where(inside[..., None], sites, 0).unbind(2)
        rows = torch.where(inside, voxel_rows[batch, z, y, x].long(), -1) if voxel_rows.numel() else -inside.long() - 1
        filled = rows >= 0
        dx, dy, dz = (
            (points[torch.where(filled, rows, 0)] - centers[part, None]).unbind(2) if len(points) else [rows] * 3
        )
        near = filled & ((dx * dx + dy * dy) + dz * dz <= far)
        first = torch.where(near, number, window).topk(min(k, window), largest=False, sorted=True).values
        first = torch.nn.functional.pad(first, (0, k - first.shape[1]), value=window)
        first = torch.where(first < window, first, first[:, :1])  # fill with the first
        found = rows.gather(1, first.clamp(max=window - 1))
        out[part] = torch.where(first < window, found, -1).int()
    return out


def check_values(points: Tensor, coords: Tensor, voxel_rows: Tensor) -> None:
    """IndexError for a voxel whose point, or a center whose batch, is not there."""
    if voxel_rows.numel() and int(voxel_rows.max()) >= points.shape[0]:
        raise IndexError(f"voxel_query: voxel_rows must be rows of points, below {points.shape[0]}, and are not")
    batch = coords[:, 0]
    if len(batch) and (int(batch.min()) < 0 or int(batch.max()) >= voxel_rows.shape[0]):
        raise IndexError(
            f"voxel_query: coords must name batches from 0 to {voxel_rows.shape[0] - 1} in column 0, and do not"
        )
