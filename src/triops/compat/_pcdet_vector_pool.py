"""The vector pooling of OpenPCDet's `pointnet2_stack_cuda` (PV-RCNN++), over triops."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import triops
from triops._clouds import counts_to_offsets
from triops.ops.vector_pool import Shape, first_of_cells, vector_pool_pairs

MOST_NEIGHBORS = 1000  # OpenPCDet's own limit of `query_stacked_local_neighbor_idxs`
AT_ONCE = 2**24  # distances in memory


def _shape(neighbor_type: int) -> Shape:
    return "ball" if neighbor_type == 1 else "cube"


def _vector_pool(
    support_xyz: Tensor, xyz_batch_cnt: Tensor, support_features: Tensor, new_xyz: Tensor, new_xyz_batch_cnt: Tensor,
    new_features: Tensor, new_local_xyz: Tensor, point_cnt_of_grid: Tensor, grouped_idxs: Tensor, num_grid_x: int,
    num_grid_y: int, num_grid_z: int, max_neighbour_distance: float, use_xyz: int, num_max_sum_points: int,
    nsample: int, neighbor_type: int, pooling_type: int,
) -> int:  # fmt: skip
    """Sums by cell; the caller divides. -> how many pairs there are, of which `grouped_idxs` gets those that fit"""
    number, cells = point_cnt_of_grid.shape
    first_alone = pooling_type == 1
    pairs = vector_pool_pairs(
        support_xyz, new_xyz, max_neighbour_distance, (num_grid_x, num_grid_y, num_grid_z),
        shape=_shape(neighbor_type), k=-1 if first_alone else nsample, offsets=counts_to_offsets(xyz_batch_cnt),
        center_offsets=counts_to_offsets(new_xyz_batch_cnt),
    )  # fmt: skip
    if first_alone:
        pairs = first_of_cells(pairs, cells, nsample)
    point, row = pairs[:, 0], pairs[:, 1].long() * cells + pairs[:, 2]
    channels = new_features.shape[1] // cells
    folded = support_features.unflatten(1, (support_features.shape[1] // channels, channels)).sum(1)
    new_features.view(number * cells, channels).index_add_(0, row, triops.gather_points(folded, point))
    if use_xyz:
        local = triops.gather_points(support_xyz, point) - new_xyz[pairs[:, 1].long()]
        new_local_xyz.view(number * cells, 3).index_add_(0, row, local)
    point_cnt_of_grid += row.bincount(minlength=number * cells).view(number, cells).to(point_cnt_of_grid.dtype)
    some = pairs[:num_max_sum_points]
    grouped_idxs[: len(some)] = some
    return len(pairs)


def _vector_pool_grad(
    grad_new_features: Tensor, point_cnt_of_grid: Tensor, grouped_idxs: Tensor, grad_support_features: Tensor
) -> int:
    number, cells = point_cnt_of_grid.shape
    channels = grad_new_features.shape[1] // cells
    row = grouped_idxs[:, 1].long() * cells + grouped_idxs[:, 2]
    shares = grad_new_features.reshape(number * cells, channels) / point_cnt_of_grid.view(-1, 1).clamp(min=1)
    points, width = grad_support_features.shape
    grad = triops.gather_points_backward(shares[row][None], grouped_idxs[:, 0].contiguous()[None], points, True)[0]
    grad_support_features += grad.repeat(1, width // channels)
    return 1


def _query_stacked_local_neighbor_idxs(
    support_xyz: Tensor, xyz_batch_cnt: Tensor, new_xyz: Tensor, new_xyz_batch_cnt: Tensor, stack_neighbor_idxs: Tensor,
    start_len: Tensor, cumsum: Tensor, avg_length_of_neighbor_idxs: int, max_neighbour_distance: float, nsample: int,
    neighbor_type: int,
) -> int:  # fmt: skip
    pairs = vector_pool_pairs(
        support_xyz, new_xyz, max_neighbour_distance, (1, 1, 1), shape=_shape(neighbor_type),
        k=min(nsample, MOST_NEIGHBORS) if nsample > 0 else MOST_NEIGHBORS, offsets=counts_to_offsets(xyz_batch_cnt),
        center_offsets=counts_to_offsets(new_xyz_batch_cnt),
    )  # fmt: skip
    counts = pairs[:, 1].bincount(minlength=len(new_xyz))
    start_len[:, 0] = counts.cumsum(0) - counts
    start_len[:, 1] = counts
    cumsum[0] = len(pairs)
    some = pairs[: avg_length_of_neighbor_idxs * len(new_xyz), 0]
    stack_neighbor_idxs[: len(some)] = some
    return 0


def _query_three_nn_by_stacked_local_idxs(
    support_xyz: Tensor, new_xyz: Tensor, new_xyz_grid_centers: Tensor, new_xyz_grid_idxs: Tensor,
    new_xyz_grid_dist2: Tensor, stack_neighbor_idxs: Tensor, start_len: Tensor, M: int, num_total_grids: int,
) -> int:  # fmt: skip
    """The three nearest of each center's list, for every cell; the first stands in for those that are missing."""
    longest = int(start_len[:, 1].max()) if M else 0
    new_xyz_grid_idxs.fill_(-1)
    new_xyz_grid_dist2.fill_(torch.inf)
    if longest == 0 or len(stack_neighbor_idxs) == 0:
        return 0
    slot = torch.arange(longest, device=support_xyz.device)
    step = max(1, AT_ONCE // (longest * num_total_grids))
    for begin in range(0, M, step):
        rows = slice(begin, begin + step)
        start, length = start_len[rows].long().unsqueeze(-1).unbind(1)  # [m, 1]
        listed = stack_neighbor_idxs[(start + slot).clamp(max=len(stack_neighbor_idxs) - 1)].long()
        difference = new_xyz_grid_centers[rows][:, :, None] - support_xyz[listed][:, None]
        x, y, z = difference.square().unbind(-1)
        squares, order = torch.where((slot < length)[:, None], (x + y) + z, torch.inf).sort(dim=2, stable=True)
        squares, order = squares[:, :, :3], order[:, :, :3]
        three = torch.arange(3, device=slot.device)
        taken = torch.where(three < length[:, None], three, 0).expand(*squares.shape[:2], 3)
        found = listed[:, None].expand(-1, num_total_grids, -1).gather(2, order.gather(2, taken))
        has_any = (length > 0)[:, None]
        new_xyz_grid_idxs[rows] = torch.where(has_any, found, -1).to(new_xyz_grid_idxs.dtype)
        new_xyz_grid_dist2[rows] = torch.where(has_any, squares.gather(2, taken), torch.inf)
    return 0


FUNCTIONS: dict[str, dict[str, Callable[..., Any]]] = {
    "pointnet2_stack_cuda": {
        "vector_pool_wrapper": _vector_pool,
        "vector_pool_grad_wrapper": _vector_pool_grad,
        "query_stacked_local_neighbor_idxs_wrapper_stack": _query_stacked_local_neighbor_idxs,
        "query_three_nn_by_stacked_local_idxs_wrapper_stack": _query_three_nn_by_stacked_local_idxs,
    }
}
