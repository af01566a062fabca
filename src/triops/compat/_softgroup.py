"""`softgroup.ops.ops`: how SoftGroup groups points into instances, scores the groups and makes voxels of points.

The functions fill the tensors that they are given. Segments are given by where they begin, [n + 1].
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from triops.compat import _pointgroup

SMALLEST = 1e-5  # of a union


def ballquery_batch_p(
    coords: Tensor, batch_idxs: Tensor, batch_offsets: Tensor, idx: Tensor, start_len: Tensor, n: int,
    meanActive: int, radius: float,
) -> int:  # fmt: skip
    """Fills the points of all balls as far as they fit, and where each ball has its own; returns how many there are."""
    return _fill(*_pointgroup.ballquery_batch_p(coords, batch_idxs, batch_offsets, radius, meanActive), idx, start_len)


def build_and_export_octree(
    points: Tensor, xyzwhl: Tensor, boxes: Tensor, pt_inds: Tensor, pt_start_len: Tensor, num_levels: int
) -> None:
    """points [n, 3] within the box xyzwhl, centre and sizes -> the boxes of all nodes, level by level, the points
    leaf by leaf, and where each leaf has its own. Eight octants to a box: z above y above x."""
    upper = torch.tensor([[i & 1, i >> 1 & 1, i >> 2 & 1] for i in range(8)], device=points.device) == 1
    level, node = xyzwhl[None], torch.zeros(len(points), dtype=torch.int64, device=points.device)
    nodes = [level]
    for _ in range(num_levels):
        sides = points >= level[node, :3]
        node = node * 8 + (sides * torch.tensor([1, 2, 4], device=points.device)).sum(1)
        size = level[:, None, 3:] / 2
        centers = torch.where(upper, level[:, None, :3] + size / 2, level[:, None, :3] - size / 2)
        level = torch.cat([centers, size.expand_as(centers)], 2).flatten(0, 1)
        nodes.append(level)
    boxes.copy_(torch.cat(nodes))
    pt_inds.copy_(node.argsort(stable=True))
    counts = node.bincount(minlength=len(level))
    pt_start_len.copy_(torch.stack([counts.cumsum(0) - counts, counts], 1))


def octree_ball_query(
    points: Tensor, boxes: Tensor, pt_inds: Tensor, pt_start_len: Tensor, out_inds: Tensor, out_start_len: Tensor,
    mean_active: int, radius: float,
) -> int:  # fmt: skip
    """As `ballquery_batch_p` of one cloud; a ball has its points leaf by leaf. The boxes of the nodes save time in the
    compiled function and nothing here."""
    whole = torch.tensor([0, len(points)], device=points.device)
    found, start_len = _pointgroup.balls(points[pt_inds.long()], points, whole, whole, radius)
    return _fill(pt_inds[found.long()], start_len, out_inds, out_start_len)


def _fill(found: Tensor, places: Tensor, idx: Tensor, start_len: Tensor) -> int:
    fitting = min(len(found), len(idx))
    idx[:fitting] = found[:fitting]
    start_len.copy_(places)
    return len(found)


def bfs_cluster(
    class_numpoint_mean: Tensor, ball_query_idxs: Tensor, start_len: Tensor, cluster_idxs: Tensor,
    cluster_offsets: Tensor, N: int, threshold: float, class_id: int,
) -> None:  # fmt: skip
    """Clusters of as many points as `threshold` times the mean of the class, or as `threshold` where that is -1."""
    mean = class_numpoint_mean[class_id].float()
    least = torch.where(mean == -1, torch.ones_like(mean), mean) * threshold
    one_class = torch.zeros(N, dtype=torch.int32)
    pairs, offsets = _pointgroup.bfs_cluster(one_class, ball_query_idxs, start_len, least.item())
    for given, made in ((cluster_idxs, pairs), (cluster_offsets, offsets)):
        given.resize_(made.shape).copy_(made)


def get_mask_iou_on_cluster(
    proposals_idx: Tensor, proposals_offset: Tensor, instance_labels: Tensor, instance_pointnum: Tensor,
    proposals_iou: Tensor, nInstance: int, nProposal: int,
) -> None:  # fmt: skip
    """How much the points of each proposal and each instance overlap, [nProposal, nInstance]."""
    counted = torch.ones_like(proposals_idx, dtype=torch.bool)
    _overlaps(proposals_idx, proposals_offset, instance_labels, instance_pointnum, proposals_iou, counted)


def get_mask_iou_on_pred(
    proposals_idx: Tensor, proposals_offset: Tensor, instance_labels: Tensor, instance_pointnum: Tensor,
    proposals_iou: Tensor, nInstance: int, nProposal: int, mask_scores_sigmoid: Tensor,
) -> None:  # fmt: skip
    """Likewise of the points with a score above one half."""
    counted = mask_scores_sigmoid.flatten() > 0.5
    _overlaps(proposals_idx, proposals_offset, instance_labels, instance_pointnum, proposals_iou, counted)


def _overlaps(points: Tensor, offsets: Tensor, labels: Tensor, sizes: Tensor, ious: Tensor, counted: Tensor) -> None:
    proposals, instances = ious.shape
    proposal = _segments(offsets)
    instance = labels[points.long()].long()
    shared = counted & (instance >= 0) & (instance < instances)
    cells = (proposal * instances + instance)[shared]
    intersection = cells.bincount(minlength=proposals * instances).view(proposals, instances)
    total = proposal[counted].bincount(minlength=proposals)
    union = total[:, None] + sizes[None] - intersection
    ious.copy_(intersection / (union.double() + SMALLEST))


def get_mask_label(
    proposals_idx: Tensor, proposals_offset: Tensor, instance_labels: Tensor, instance_cls: Tensor,
    proposals_iou: Tensor, nInstance: int, nProposal: int, iou_thr: float, mask_label: Tensor,
) -> None:  # fmt: skip
    """1 and 0 for points in and off the instance that their proposal overlaps most, the first of equal ones, by at
    least the threshold. Others keep what they have, and instances of class -100 do not count."""
    if nInstance == 0:
        return
    ious = torch.where(instance_cls != -100, proposals_iou, 0)
    best, proposal = ious.argmax(1), _segments(proposals_offset)
    chosen = (ious.amax(1) >= iou_thr)[proposal]
    inside = instance_labels[proposals_idx.long()] == best[proposal]
    mask_label.copy_(torch.where(chosen, inside.to(mask_label.dtype), mask_label))


def voxelize_idx(
    coords: Tensor, output_coords: Tensor, input_map: Tensor, output_map: Tensor, batchsize: int, mode: int
) -> None:
    """coords int64 [n, 3], or [n, 4] of (image, x, y, z) -> the voxels in the order of their first points [m, ...],
    the voxel of each point [n], and of each voxel how many points and which, [m, 1 + most]. mode: 4 and 3 for all
    points, 2 for the last, 1 for the first, 0 where each has its own."""
    if mode not in range(5):
        raise ValueError(f"voxelize_idx: mode must be 0, 1, 2, 3 or 4, got {mode}")
    voxels, voxel = torch.unique(coords, dim=0, return_inverse=True)
    points = torch.arange(len(coords), device=coords.device)
    first = points.new_full((len(voxels),), len(coords)).scatter_reduce_(0, voxel, points, "amin")
    order = first.argsort()
    voxel = order.argsort()[voxel]  # numbered by first points
    output_coords.resize_(voxels.shape).copy_(voxels[order])
    input_map.copy_(voxel)
    by_voxel, counts = voxel.argsort(stable=True), voxel.bincount(minlength=len(voxels))
    begins = counts.cumsum(0) - counts
    if mode < 3:
        kept = begins if mode < 2 else begins + counts - 1
        output_map.resize_(len(voxels), 2).copy_(torch.stack([torch.ones_like(kept), by_voxel[kept]], 1))
        return
    most = int(counts.max()) if len(counts) else 1
    output_map.resize_(len(voxels), 1 + most).zero_()
    output_map[:, 0] = counts
    sorted_voxel = voxel[by_voxel]
    output_map[sorted_voxel, 1 + points - begins[sorted_voxel]] = by_voxel.to(output_map.dtype)


def voxelize_fp(
    feats: Tensor, output_feats: Tensor, output_map: Tensor, mode: int, nActive: int, maxActive: int, nPlane: int
) -> None:
    """Adds the sums of the features of each voxel's points [m, c], or means for mode 4."""
    points, voxel, weight = _of_voxels(output_map, mode, feats)
    output_feats.index_add_(0, voxel, feats[points] * weight)


def voxelize_bp(
    d_output_feats: Tensor, d_feats: Tensor, output_map: Tensor, mode: int, nActive: int, maxActive: int, nPlane: int
) -> None:
    points, voxel, weight = _of_voxels(output_map, mode, d_feats)
    d_feats.index_add_(0, points, d_output_feats[voxel] * weight)


def _of_voxels(output_map: Tensor, mode: int, feats: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Points, their voxels, and their weights [..., 1]."""
    counts = output_map[:, 0].long()
    held = torch.arange(output_map.shape[1] - 1, device=output_map.device) < counts[:, None]
    voxel = torch.arange(len(counts), device=output_map.device).repeat_interleave(counts)
    share = counts.to(feats.dtype).reciprocal() if mode == 4 else torch.ones_like(counts, dtype=feats.dtype)
    return output_map[:, 1:][held].long(), voxel, share[voxel][:, None]


def global_avg_pool_fp(feats: Tensor, proposals_offset: Tensor, output_feats: Tensor, nProposal: int, C: int) -> None:
    """The means of all segments, [nProposal, C]; that of none is not a number."""
    output_feats.copy_(_sums(feats, proposals_offset) / _sizes(proposals_offset, feats))


def global_avg_pool_bp(
    d_feats: Tensor, proposals_offset: Tensor, d_output_feats: Tensor, nProposal: int, C: int
) -> None:
    d_feats += (d_output_feats / _sizes(proposals_offset, d_feats))[_segments(proposals_offset)]


def sec_mean(inp: Tensor, offsets: Tensor, out: Tensor, nProposal: int, C: int) -> None:
    """The means of all segments; that of none is 0."""
    out.copy_(_sums(inp, offsets) / _sizes(offsets, inp).clamp(min=1))


def sec_min(inp: Tensor, offsets: Tensor, out: Tensor, nProposal: int, C: int) -> None:
    _extremes(inp, offsets, out, "amin", torch.inf)


def sec_max(inp: Tensor, offsets: Tensor, out: Tensor, nProposal: int, C: int) -> None:
    _extremes(inp, offsets, out, "amax", -torch.inf)


def _extremes(inp: Tensor, offsets: Tensor, out: Tensor, which: str, of_none: float) -> None:
    index = _segments(offsets)[:, None].expand_as(inp)
    out.copy_(torch.full_like(out, of_none).scatter_reduce_(0, index, inp, which))


def _segments(offsets: Tensor) -> Tensor:
    """The segment of each row."""
    counts = offsets.diff().long()
    return torch.arange(len(counts), device=offsets.device).repeat_interleave(counts)


def _sizes(offsets: Tensor, like: Tensor) -> Tensor:
    return offsets.diff()[:, None].to(like.dtype)


def _sums(rows: Tensor, offsets: Tensor) -> Tensor:
    return rows.new_zeros(len(offsets) - 1, rows.shape[1]).index_add_(0, _segments(offsets), rows)


FUNCTIONS: dict[str, Callable[..., Any]] = {
    function.__name__: function
    for function in (
        ballquery_batch_p, build_and_export_octree, octree_ball_query, bfs_cluster, get_mask_iou_on_cluster,
        get_mask_iou_on_pred, get_mask_label, voxelize_idx, voxelize_fp, voxelize_bp, global_avg_pool_fp,
        global_avg_pool_bp, sec_mean, sec_min, sec_max,
    )
}  # fmt: skip
