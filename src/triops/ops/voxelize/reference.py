"""The specification of dynamic_voxelize and voxelize_padded."""

import torch
from torch import Tensor

from triops._dtypes import compute_dtype
from triops.ops.voxelize.geometry import grid_size


def dynamic_voxelize(points: Tensor, voxel_size: list[float], point_range: list[float]) -> Tensor:
    """points [N, C] -> the cell of each, int32 [N, 3] of (z, y, x), or -1, -1, -1 outside the range.

    The operator has three axes; this function has as many as there are voxel sizes.
    """
    real, axes = compute_dtype(points.dtype), len(voxel_size)
    low, size, grid = (
        torch.tensor(values, dtype=real, device=points.device)
        for values in (point_range[:axes], voxel_size, grid_size(voxel_size, point_range))
    )
    position = points[:, :axes].to(real)
    # Compared before the division, whose result a GPU may flush to 0. False for NaN.
    above = position >= low
    position = ((position - low) / size).floor()
    inside = (above & (position < grid)).all(1, keepdim=True)
    return torch.where(inside, position, -1).flip(1).int()


def voxelize_padded(
    points: Tensor, voxel_size: list[float], point_range: list[float], max_points: int, max_voxels: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """points [N, C] -> with R = min(max_voxels, N), zero above the last voxel:

    voxels [R, max_points, C], coords int32 [R, 3], num_points int32 [R], slots int32 [N]: voxel * max_points + place
    of each point, or -1; count int32 []: the number of voxels.
    """
    total, rows = points.shape[0], min(max_voxels, points.shape[0])
    cell = dynamic_voxelize(points, voxel_size, point_range)
    held = (cell[:, 0] >= 0).nonzero()[:, 0]
    cells, voxel = cell[held].unique(dim=0, return_inverse=True)
    # Voxels are numbered by their first points.
    first = held.new_full((len(cells),), total).scatter_reduce_(0, voxel, held, "amin")
    order = first.argsort()
    number = torch.empty_like(order)
    number[order] = torch.arange(len(order), device=order.device)
    voxel = number[voxel]

    ascending, by_voxel = voxel.sort(stable=True)
    place = torch.empty_like(voxel)
    begin = torch.searchsorted(ascending, ascending)
    place[by_voxel] = torch.arange(len(voxel), device=voxel.device) - begin
    kept = (voxel < rows) & (place < max_points)
    held, voxel, place = held[kept], voxel[kept], place[kept]

    voxels = points.new_zeros((rows, max_points, points.shape[1]))
    voxels[voxel, place] = points[held]
    coords = cell.new_zeros((rows, cell.shape[1]))
    coords[: len(order)] = cells[order[:rows]]
    num_points = cell.new_zeros(rows).index_add_(0, voxel, torch.ones_like(voxel, dtype=torch.int32))
    slots = cell.new_full((total,), -1)
    slots[held] = (voxel * max_points + place).int()
    count = torch.tensor(min(len(order), rows), dtype=torch.int32, device=points.device)
    return voxels, coords, num_points, slots, count
