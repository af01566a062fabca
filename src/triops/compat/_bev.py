"""Extension modules that sum the features of lifted images by the cells of a bird's-eye grid.

`bev_pool_ext` of BEVFusion, which OpenPCDet and mmdetection3d carry too and OpenOccupancy calls `occ_pool_ext`;
`bev_pool_v2_ext` of BEVDet; `voxel_pooling_train_ext` and `voxel_pooling_inference_ext` of BEVDepth.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import triops

operators = torch.ops.triops


def bev_pool_forward(
    x: Tensor, geom_feats: Tensor, interval_lengths: Tensor, interval_starts: Tensor, b: int, d: int, h: int, w: int
) -> Tensor:
    """Features [n, c] in runs of one cell each, with cells int32 [n, 4] of (h, w, d, b) -> [b, d, h, w, c]."""
    sums = _sums_of_runs(x, interval_lengths, interval_starts)
    out = x.new_zeros((b * d * h * w, x.shape[1]))
    out[_cells(geom_feats, b, d, h, w)[interval_starts.long()]] = sums
    return out.view(b, d, h, w, x.shape[1])


def bev_pool_backward(
    out_grad: Tensor, geom_feats: Tensor, interval_lengths: Tensor, interval_starts: Tensor, b: int, d: int, h: int,
    w: int,
) -> Tensor:  # fmt: skip
    unread = out_grad.new_empty((1, 1)).expand(geom_feats.shape[0], out_grad.shape[4])
    grad: Tensor = operators.bev_pool_backward(
        out_grad.reshape(-1, out_grad.shape[4]), unread, None, _cells(geom_feats, b, d, h, w)
    )[0]
    return grad


def _cells(geom_feats: Tensor, b: int, d: int, h: int, w: int) -> Tensor:
    row, column, layer, element = geom_feats.long().unbind(1)
    return ((element * d + layer) * h + row) * w + column


def bev_pool_v2_forward(
    depth: Tensor, feat: Tensor, out: Tensor, ranks_depth: Tensor, ranks_feat: Tensor, ranks_bev: Tensor,
    interval_lengths: Tensor, interval_starts: Tensor,
) -> None:  # fmt: skip
    """Points in runs of one cell each: rows of a depth, of a feature [..., C] and of a cell of `out` [..., C]."""
    channels = feat.shape[-1]
    lifted = depth.reshape(-1, 1)[ranks_depth.long()] * feat.reshape(-1, channels)[ranks_feat.long()]
    first = ranks_bev.long()[interval_starts.long()]
    out.view(-1, channels)[first] = _sums_of_runs(lifted, interval_lengths, interval_starts).to(out.dtype)


def bev_pool_v2_backward(
    out_grad: Tensor, depth_grad: Tensor, feat_grad: Tensor, depth: Tensor, feat: Tensor, ranks_depth: Tensor,
    ranks_feat: Tensor, ranks_bev: Tensor, interval_lengths: Tensor, interval_starts: Tensor,
) -> None:  # fmt: skip
    """The points come in runs of one feature each, here."""
    channels = feat.shape[-1]
    of_cell = out_grad.reshape(-1, channels)[ranks_bev.long()]
    by_depth = (of_cell * feat.reshape(-1, channels)[ranks_feat.long()]).sum(1)
    depth_grad.view(-1)[ranks_depth.long()] = by_depth.to(depth_grad.dtype)
    lifted = of_cell * depth.reshape(-1, 1)[ranks_depth.long()]
    first = ranks_feat.long()[interval_starts.long()]
    feat_grad.view(-1, channels)[first] = _sums_of_runs(lifted, interval_lengths, interval_starts).to(feat_grad.dtype)


def voxel_pooling_train_forward(
    batch_size: int, num_points: int, num_channels: int, num_voxel_x: int, num_voxel_y: int, num_voxel_z: int,
    geom_xyz: Tensor, input_features: Tensor, output_features: Tensor, pos_memo: Tensor,
) -> int:  # fmt: skip
    """Features [B, N, C] at cells int32 [B, N, 3] of (x, y, z), added to [B, y, x, C]; `pos_memo` int32 [B, N, 3] is
    (element, y, x) where the cell lies in the grid."""
    cells, inside = _cells_of_points(geom_xyz, num_voxel_x, num_voxel_y, num_voxel_z)
    pooled = triops.bev_pool(
        input_features.reshape(-1, num_channels), cells, batch_size * int(num_voxel_y) * int(num_voxel_x)
    )
    output_features += pooled.view_as(output_features)
    points = geom_xyz.reshape(batch_size, num_points, 3)
    element = torch.arange(batch_size, device=points.device)[:, None].expand(batch_size, num_points)
    found = torch.stack([element, points[..., 1], points[..., 0]], 2).to(pos_memo.dtype)
    pos_memo.copy_(torch.where(inside.view(batch_size, num_points, 1), found, pos_memo))
    return 1


def voxel_pooling_inference_forward(
    batch_size: int, num_cams: int, num_depth: int, num_height: int, num_width: int, num_channels: int,
    num_voxel_x: int, num_voxel_y: int, num_voxel_z: int, geom_xyz: Tensor, depth_features: Tensor,
    context_features: Tensor, output_features: Tensor,
) -> int:  # fmt: skip
    """Images' features [B * cameras, C, H, W] times depths [B * cameras, D, H, W], at cells int32 [..., 3]."""
    cells, _ = _cells_of_points(geom_xyz, num_voxel_x, num_voxel_y, num_voxel_z, batch_size)
    images = batch_size * num_cams, num_depth, num_height, num_width
    pooled = triops.bev_pool(
        context_features.reshape(images[0], num_channels, num_height, num_width).permute(0, 2, 3, 1).contiguous(),
        cells.view(images), batch_size * int(num_voxel_y) * int(num_voxel_x), depth_features.reshape(images),
    )  # fmt: skip
    output_features += pooled.view_as(output_features)
    return 1


def _cells_of_points(geom_xyz: Tensor, x: int, y: int, z: int, batch_size: int | None = None) -> tuple[Tensor, Tensor]:
    """Cells of all elements [B * N], -1 off the grid, and whether a point lies in it. Layers of z are one."""
    points = geom_xyz.reshape(geom_xyz.shape[0] if batch_size is None else batch_size, -1, 3).long()
    column, row, layer = points.unbind(2)
    inside = (column >= 0) & (column < x) & (row >= 0) & (row < y) & (layer >= 0) & (layer < z)
    element = torch.arange(points.shape[0], device=points.device)[:, None]
    cells = (element * int(y) + row) * int(x) + column
    return torch.where(inside, cells, -1).flatten(), inside


def _sums_of_runs(rows: Tensor, interval_lengths: Tensor, interval_starts: Tensor) -> Tensor:
    """[runs, C] of rows [P, C] that come in runs."""
    points, runs = rows.shape[0], interval_starts.shape[0]
    numbers = torch.arange(runs, device=rows.device)
    run_of_point = numbers.repeat_interleave(interval_lengths.long(), output_size=points).int()
    order = torch.arange(points, dtype=torch.int32, device=rows.device)
    starts = torch.cat([interval_starts.int(), order.new_full((1,), points)])
    sums: Tensor = operators.bev_pool_forward(rows, None, run_of_point, order, starts)
    return sums


FUNCTIONS: dict[str, dict[str, Callable[..., Any]]] = {
    "bev_pool_ext": {"bev_pool_forward": bev_pool_forward, "bev_pool_backward": bev_pool_backward},
    "occ_pool_ext": {"occ_pool_forward": bev_pool_forward, "occ_pool_backward": bev_pool_backward},
    "bev_pool_v2_ext": {"bev_pool_v2_forward": bev_pool_v2_forward, "bev_pool_v2_backward": bev_pool_v2_backward},
    "voxel_pooling_train_ext": {"voxel_pooling_train_forward_wrapper": voxel_pooling_train_forward},
    "voxel_pooling_inference_ext": {"voxel_pooling_inference_forward_wrapper": voxel_pooling_inference_forward},
}
