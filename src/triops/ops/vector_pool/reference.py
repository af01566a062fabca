"""The specification of vector_pool_pairs: which points lie in which cell of the grid around each center."""

from __future__ import annotations

import torch
from torch import Tensor

from triops import _check
from triops._clouds import check_ascending
from triops._dtypes import compute_dtype


def vector_pool_pairs(
    points: Tensor, centers: Tensor, offsets: Tensor, center_offsets: Tensor, radius: float, grid: list[int], k: int,
    ball: bool,
) -> Tensor:  # fmt: skip
    """points [N, 3], centers [M, 3] -> int32 [P, 3]: point, center, cell, by center, then by point.

    Points of the center's cloud no further than `radius` along each axis, or in all for a ball; the first k of them
    where k is positive. Cells are `floor((p - c + radius) / (2 * radius / cells))`, z fastest, clamped to the grid as
    one number: a point on the upper border falls into the next row of cells.
    """
    if points.device.type == "cpu" or _check.strict():
        check_ascending("vector_pool", "offsets", offsets, len(points))
        check_ascending("vector_pool", "center_offsets", center_offsets, len(centers))
    begin, end = ranges_of_centers(len(points), len(centers), offsets, center_offsets)
    reach = torch.full((), radius, dtype=compute_dtype(points.dtype), device=points.device)
    cells = torch.tensor(grid, dtype=reach.dtype, device=points.device)
    found = [torch.empty((0, 3), dtype=torch.int32, device=points.device)]
    for m, (first, last) in enumerate(zip(begin.tolist(), end.tolist(), strict=True)):
        local = points[first:last].to(reach.dtype) - centers[m].to(reach.dtype)
        if ball:
            x, y, z = local.square().unbind(1)
            near = (x + y) + z <= reach * reach
        else:
            near = (local.abs() <= reach).all(1)
        index = near.nonzero()[:, 0][: k if k > 0 else None]
        x, y, z = ((local[index] + reach) / (reach * 2 / cells)).floor().long().unbind(1)
        cell = ((x * grid[1] + y) * grid[2] + z).clamp(0, grid[0] * grid[1] * grid[2] - 1)
        found.append(torch.stack([index + first, torch.full_like(index, m), cell], 1).int())
    return torch.cat(found)


def ranges_of_centers(points: int, centers: int, offsets: Tensor, center_offsets: Tensor) -> tuple[Tensor, Tensor]:
    """Where the cloud of each center begins and ends, int64 [M]; in bounds, whatever the offsets hold."""
    number = torch.arange(centers, device=offsets.device)
    cloud = torch.searchsorted(center_offsets[1:].long().contiguous(), number, right=True).clamp(
        max=max(len(offsets) - 2, 0)
    )
    if len(offsets) < 2:
        return torch.zeros_like(number), torch.zeros_like(number)
    begin = offsets[:-1].long().clamp(0, points)[cloud]
    return begin, torch.maximum(offsets[1:].long().clamp(0, points)[cloud], begin)
