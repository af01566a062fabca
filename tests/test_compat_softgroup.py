"""Facts about `softgroup.ops.ops`, beside those of `pointgroup_ops`, and about `chamferdist._C`."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from triops.compat import pointnet2, pointops

MODULE = pointops.extension("softgroup.ops.ops")
OFFSETS = torch.tensor([0, 2, 2, 5], dtype=torch.int32)
ROWS = torch.tensor([[1.0, -2], [3, 4], [5, 0], [-1, 1], [2, 2]])


def ints(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.int32)


def test_segments_have_means_and_extremes() -> None:
    out = torch.zeros(3, 2)
    MODULE.sec_mean(ROWS, OFFSETS, out, 3, 2)
    assert out.tolist() == [[2, 1], [0, 0], [2, 1]]
    MODULE.sec_min(ROWS, OFFSETS, out, 3, 2)
    assert out.tolist() == [[1, -2], [math.inf, math.inf], [-1, 0]]
    MODULE.sec_max(ROWS, OFFSETS, out, 3, 2)
    assert out.tolist() == [[3, 4], [-math.inf, -math.inf], [5, 2]]
    MODULE.global_avg_pool_fp(ROWS, OFFSETS, out, 3, 2)
    assert out[[0, 2]].tolist() == [[2, 1], [2, 1]]
    assert out[1].isnan().all()
    grad = torch.zeros(5, 2)
    MODULE.global_avg_pool_bp(grad, OFFSETS, torch.tensor([[2.0, 4], [7, 7], [3, 6]]), 3, 2)
    assert grad.tolist() == [[1, 2], [1, 2], [1, 2], [1, 2], [1, 2]]


def test_proposals_overlap_instances_by_points() -> None:
    points = torch.tensor([0, 1, 2, 3, 4], dtype=torch.int32)  # the first proposal has two of them, the last three
    labels, sizes = torch.tensor([1, 1, 0, -100, 1, 1]), torch.tensor([1, 4], dtype=torch.int32)
    ious = torch.full((3, 2), -1.0)
    MODULE.get_mask_iou_on_cluster(points, OFFSETS, labels, sizes, ious, 2, 3)
    torch.testing.assert_close(ious, torch.tensor([[0, 2 / 4], [0, 0], [1 / 3, 1 / 6]]), rtol=1e-4, atol=0)
    scores = torch.tensor([[0.9], [0.5], [0.6], [0.6], [0.1]])  # one half does not count
    MODULE.get_mask_iou_on_pred(points, OFFSETS, labels, sizes, ious, 2, 3, scores)
    torch.testing.assert_close(ious, torch.tensor([[0, 1 / 4], [0, 0], [1 / 2, 0]]), rtol=1e-4, atol=0)

    mask = torch.full((5,), -1.0)
    classes = torch.tensor([3, 5])
    MODULE.get_mask_label(points, OFFSETS, labels, classes, ious, 2, 3, 0.4, mask)
    assert mask.tolist() == [-1, -1, 1, 0, 0]
    MODULE.get_mask_label(points, OFFSETS, labels, torch.tensor([-100, 5]), ious, 2, 3, 0.2, mask.fill_(-1))
    assert mask.tolist() == [1, 1, -1, -1, -1]


def test_voxels_come_in_the_order_of_their_points_with_features_and_gradients() -> None:
    coords = torch.tensor([[1, 5, 0, 0], [0, 2, 2, 2], [1, 5, 0, 0], [0, 0, 0, 0], [1, 5, 0, 0], [0, 2, 2, 2]])
    voxels, of_point, of_voxel = torch.empty(0).long(), ints(6), ints(0)
    MODULE.voxelize_idx(coords, voxels, of_point, of_voxel, 2, 4)
    assert voxels.tolist() == [[1, 5, 0, 0], [0, 2, 2, 2], [0, 0, 0, 0]]
    assert of_point.tolist() == [0, 1, 0, 2, 0, 1]
    assert of_voxel.tolist() == [[3, 0, 2, 4], [2, 1, 5, 0], [1, 3, 0, 0]]
    features, out = torch.arange(12.0).view(6, 2), torch.zeros(3, 2)
    MODULE.voxelize_fp(features, out, of_voxel, 4, 3, 3, 2)
    torch.testing.assert_close(out, torch.tensor([[4.0, 5], [6, 7], [6, 7]]))
    MODULE.voxelize_fp(features, out.zero_(), of_voxel, 3, 3, 3, 2)
    assert out.tolist() == [[12, 15], [12, 14], [6, 7]]
    grad = torch.zeros(6, 2)
    MODULE.voxelize_bp(torch.tensor([[3.0, 6], [2, 4], [5, 5]]), grad, of_voxel, 4, 3, 3, 2)
    torch.testing.assert_close(grad, torch.tensor([[1.0, 2], [1, 2], [1, 2], [5, 5], [1, 2], [1, 2]]))
    for mode, rows in ((1, [0, 1, 3]), (2, [4, 5, 3])):
        MODULE.voxelize_idx(coords, voxels, of_point, of_voxel, 2, mode)
        assert of_voxel.tolist() == [[1, row] for row in rows]
    with pytest.raises(ValueError, match="mode"):
        MODULE.voxelize_idx(coords, voxels, of_point, of_voxel, 2, 5)


def test_balls_grow_into_clusters_of_a_share_of_the_mean() -> None:
    x = torch.tensor([0.0, 1, 2, 10, 11, 20])
    points = torch.stack([x, torch.zeros(6), torch.zeros(6)], 1)
    batches, offsets = ints(6), torch.tensor([0, 6], dtype=torch.int32)
    idx, start_len = ints(12), ints(6, 2)
    assert MODULE.ballquery_batch_p(points, batches, offsets, idx, start_len, 6, 2, 1.5) == 12
    assert idx.tolist() == [0, 1, 0, 1, 2, 1, 2, 3, 4, 3, 4, 5]
    assert start_len[:, 1].tolist() == [2, 3, 2, 2, 2, 1]
    assert MODULE.ballquery_batch_p(points, batches, offsets, ints(6), start_len, 6, 1, 1.5) == 12  # too many to fit

    clusters, ends = ints(0), ints(0)
    means = torch.tensor([-1.0, 4.0])
    MODULE.bfs_cluster(means, idx, start_len, clusters, ends, 6, 2, 0)
    assert clusters.tolist() == [[0, 0], [0, 1], [0, 2], [1, 3], [1, 4]]
    assert ends.tolist() == [0, 3, 5]
    MODULE.bfs_cluster(means, idx, start_len, clusters, ends, 6, 0.6, 1)  # 2.4 points
    assert ends.tolist() == [0, 3]
    MODULE.bfs_cluster(means, idx, start_len, clusters, ends, 6, 0.05, 1)
    assert ends.tolist() == [0, 3, 5, 6]


def test_an_octree_has_the_same_balls_leaf_by_leaf() -> None:
    g = torch.Generator().manual_seed(0)
    points = torch.rand(200, 3, generator=g) * torch.tensor([4, 2, 1])
    lowest, highest = points.amin(0), points.amax(0)
    boxes, order, leaves = torch.zeros(585, 6), ints(200), ints(512, 2)
    whole = torch.cat([(highest + lowest) / 2, highest - lowest])
    MODULE.build_and_export_octree(points, whole, boxes, order, leaves, 3)
    assert torch.equal(boxes[0], whole)
    assert order.sort().values.tolist() == list(range(200))
    for leaf, (begin, count) in enumerate(leaves.tolist()):
        center, size = boxes[73 + leaf].split(3)
        held = order[begin : begin + count]
        assert held.tolist() == sorted(held.tolist())
        assert ((points[held.long()] - center).abs() <= size / 2 + 1e-6).all()
    torch.testing.assert_close(boxes[8, :3], whole[:3] + whole[3:] / 4)
    torch.testing.assert_close(boxes[2, :3], whole[:3] + whole[3:] / 4 * torch.tensor([1.0, -1, -1]))

    idx, start_len = ints(200 * 40), ints(200, 2)
    total = MODULE.octree_ball_query(points, boxes, order, leaves, idx, start_len, 40, 0.4)
    near = (points[:, None] - points).square().sum(2) < 0.4**2
    assert start_len[:, 1].tolist() == near.sum(1).tolist()
    assert total == near.sum()
    for row, (begin, count) in enumerate(start_len.tolist()):
        assert idx[begin : begin + count].tolist() == order[near[row, order.long()]].tolist()


@pytest.mark.parametrize("dimensions", [2, 3])
def test_vidars_neighbors_of_clouds_of_any_length_with_gradients(dimensions: int) -> None:
    g = torch.Generator().manual_seed(0)
    p1, p2 = torch.randn(2, 6, dimensions, generator=g), torch.randn(2, 5, dimensions, generator=g)
    lengths1, lengths2 = torch.tensor([6, 4]), torch.tensor([2, 5])
    module = pointnet2.extension("chamferdist._C")
    idx, dists = module.knn_points_idx(p1, p2, lengths1, lengths2, 3, -1)
    assert idx.dtype == torch.int64
    a, b = p1.clone().requires_grad_(), p2.clone().requires_grad_()
    grad = torch.randn(2, 6, 3, generator=g)
    total = torch.zeros(())
    for image, row in torch.cartesian_prod(torch.arange(2), torch.arange(6)).tolist():
        if row >= lengths1[image]:
            assert not idx[image, row].any()
            assert not dists[image, row].any()
            continue
        squares = (a[image, row] - b[image, : lengths2[image]]).square().sum(1)
        nearest = squares.argsort()[:3]
        assert idx[image, row].tolist() == nearest.tolist() + [0] * (3 - len(nearest))
        torch.testing.assert_close(dists[image, row, : len(nearest)], squares[nearest].detach())
        assert not dists[image, row, len(nearest) :].any()
        total = total + (squares[nearest] * grad[image, row, : len(nearest)]).sum()
    for got, want in zip(
        module.knn_points_backward(p1, p2, lengths1, lengths2, idx, grad),
        torch.autograd.grad(total, (a, b)),
        strict=True,
    ):
        torch.testing.assert_close(got, want)
    with pytest.raises(ValueError, match=r"D from 1 to 3, got \[1, 2, 4\]"):
        module.knn_points_idx(torch.zeros(1, 2, 4), torch.zeros(1, 2, 4), lengths1[:1], lengths2[:1], 1, -1)
