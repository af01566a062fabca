"""Facts about the point sets of OpenPCDet's and Pointcept's extension modules: small clouds, counted by hand."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch import Tensor

import triops
from triops.compat import pcdet, pointops

LINE = torch.tensor([[x, 0.0, 0.0] for x in (0, 1, 2, 3, 10, 11, 14)])  # two clouds: rows 0 to 3, and 4 to 6
ENDS = torch.tensor([4, 7], dtype=torch.int32)
COUNTS = torch.tensor([4, 3], dtype=torch.int32)
FEATURES = torch.arange(14.0).view(7, 2)
batch, stack = (pcdet.extension(f"pcdet.ops.pointnet2.pointnet2_{kind}_cuda") for kind in ("batch", "stack"))
compiled = pointops.extension("pointops._C")
public = pointops.extension("pointops")


def integers(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.int32)


def test_openpcdet_samples_padded_and_stacked_clouds() -> None:
    found, temp = integers(1, 2), torch.zeros(1, 4)
    assert batch.farthest_point_sampling_wrapper(1, 4, 2, LINE[None, :4], temp, found) == 1
    assert found.tolist() == [[0, 3]]
    rows, numbers = integers(5), torch.tensor([3, 2], dtype=torch.int32)
    stack.stack_farthest_point_sampling_wrapper(LINE, torch.zeros(7), COUNTS, rows, numbers)
    assert rows.tolist() == [0, 3, 1, 4, 6]


def test_openpcdet_gathers_groups_and_interpolates_with_gradients() -> None:
    planes, index = FEATURES.T[None].contiguous(), torch.tensor([[[6, 0, 0]]], dtype=torch.int32)
    out, grad = torch.zeros(1, 2, 3), torch.zeros(1, 2, 7)
    batch.gather_points_wrapper(1, 2, 7, 3, planes, index[:, 0], out)
    assert out.tolist() == [[[12, 0, 0], [13, 1, 1]]]
    batch.gather_points_grad_wrapper(1, 2, 7, 3, torch.ones(1, 2, 3), index[:, 0], grad)
    assert grad[0, 0].tolist() == [2, 0, 0, 0, 0, 0, 1]
    grouped = torch.zeros(1, 2, 1, 3)
    batch.group_points_wrapper(1, 2, 7, 1, 3, planes, index, grouped)
    assert torch.equal(grouped[:, :, 0], out)
    batch.group_points_grad_wrapper(1, 2, 7, 1, 3, torch.ones(1, 2, 1, 3), index, grad)
    assert grad[0, 0].tolist() == [4, 0, 0, 0, 0, 0, 2]
    weight, between = torch.tensor([[[0.5, 0.25, 0.25]]]), torch.zeros(1, 2, 1)
    batch.three_interpolate_wrapper(1, 2, 7, 1, planes, index, weight, between)
    assert between.flatten().tolist() == [6, 7]
    batch.three_interpolate_grad_wrapper(1, 2, 1, 7, torch.ones(1, 2, 1), index, weight, grad.zero_())
    assert grad[0, 1].tolist() == [0.5, 0, 0, 0, 0, 0, 0.5]


def test_openpcdet_counts_within_stacked_clouds_and_interpolates_by_rows() -> None:
    index, per_cloud = torch.tensor([[3, 0], [0, 2]], dtype=torch.int32), torch.tensor([1, 1], dtype=torch.int32)
    out, grad = torch.zeros(2, 2, 2), torch.zeros(7, 2)
    stack.group_points_wrapper(2, 2, 2, 2, FEATURES, COUNTS, index, per_cloud, out)
    assert out.tolist() == [[[6, 0], [7, 1]], [[8, 12], [9, 13]]]
    stack.group_points_grad_wrapper(2, 2, 2, 7, 2, torch.ones(2, 2, 2), index, per_cloud, COUNTS, grad)
    assert grad[:, 0].tolist() == [1, 0, 0, 1, 1, 0, 1]
    rows, weight = torch.tensor([[0, 1, 6]], dtype=torch.int32), torch.tensor([[0.5, 0.25, 0.25]])
    between = torch.zeros(1, 2)
    stack.three_interpolate_wrapper(FEATURES, rows, weight, between)
    assert between.tolist() == [[3.5, 4.5]]
    stack.three_interpolate_grad_wrapper(torch.ones(1, 2), rows, weight, grad.zero_())
    assert grad[:, 0].tolist() == [0.5, 0.25, 0, 0, 0, 0, 0.25]


def test_openpcdets_boxes_for_point_pooling_have_their_origin_in_the_middle() -> None:
    box = torch.tensor([[[1.5, 0, 0, 2, 1, 1, 0], [50, 0, 0, 1, 1, 1, 0]]])
    pooled, empty = torch.zeros(1, 2, 3, 5), integers(1, 2)
    pcdet.extension("pcdet.ops.roipoint_pool3d.roipoint_pool3d_cuda").forward(
        LINE[None], box, FEATURES[None], pooled, empty
    )
    assert pooled[0, 0, :, 0].tolist() == [1, 2, 1]
    assert empty.tolist() == [[0, 1]]


def test_pointops_samples_and_finds_neighbors_within_clouds() -> None:
    assert public.farthest_point_sampling(LINE, ENDS, torch.tensor([2, 4])).tolist() == [0, 3, 4, 6]
    index, distance = public.knn_query(4, LINE, ENDS)
    assert index[1].tolist() == [1, 0, 2, 3]
    assert index[4].tolist() == [4, 5, 6, -1]
    assert distance[4].tolist() == [0, 1, 4, 1e5]


def test_pointops_balls_are_sorted_by_distance_and_thinned_evenly() -> None:
    index, distance = public.ball_query(3, 2.5, 0.0, LINE, ENDS)
    assert index[0].tolist() == [0, 1, 2]
    assert index[1].tolist() == [1, 0, 2]  # 4 within reach: numbers 0, 1 and 2 of 1, 0, 2, 3
    assert index[6].tolist() == [6, -1, -1]
    assert distance[6].tolist() == [0, 1e5, 1e5]
    ring, _ = public.ball_query(2, 2.5, 1.5, LINE, ENDS)
    assert ring[0].tolist() == [0, 2]
    found, _ = public.random_ball_query(3, 1.5, 0.0, LINE, ENDS)
    assert sorted(found[5].tolist()) == [-1, 4, 5]


def test_pointops_groups_with_offsets_and_zeros_where_there_is_no_neighbor() -> None:
    index = torch.tensor([[1, -1]], dtype=torch.int32)
    grouped = public.grouping(index, FEATURES, LINE, LINE[:1], with_xyz=True)
    assert grouped.tolist() == [[[1, 0, 0, 2, 3], [0, 0, 0, 0, 0]]]
    assert public.query_and_group(2, LINE, LINE, FEATURES, None, ENDS, ENDS)[0].shape == (7, 2, 5)
    dilated = public.query_and_group(2, LINE, LINE, FEATURES, None, ENDS, ENDS, dilation=1, with_feat=False)
    assert dilated[0].tolist() == [0, 2]


def test_pointops_interpolates_by_inverse_distance() -> None:
    place = torch.tensor([[0.25, 0, 0]])
    found = public.interpolation(LINE, place, FEATURES, ENDS, torch.tensor([1, 1]), k=2)
    torch.testing.assert_close(found, torch.tensor([[0.5, 1.5]]))  # weights 3/4 and 1/4


def test_pointops_offsets_and_batches_are_two_ways_to_say_the_same() -> None:
    assert public.offset2batch(ENDS).tolist() == [0, 0, 0, 0, 1, 1, 1]
    assert public.batch2offset(public.offset2batch(ENDS)).tolist() == [4, 7]


@pytest.mark.parametrize("name", ["grouping2", "subtraction", "aggregation", "relation", "fusion"])
def test_pointops_gradients_are_what_its_extension_computes(name: str) -> None:
    draw = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draw, dtype=torch.float64, requires_grad=True)

    index = torch.randint(0, 5, (5, 3), generator=draw).int()
    target, refer = index[:, 0], index[:, 1]
    inputs, call, backward = {
        "grouping2": ((random(5, 4),), lambda f: public.grouping2(f, index),
                      lambda g, f, gf: compiled.grouping_backward_cuda(5, 3, 4, g, index, gf)),
        "subtraction": ((random(5, 4), random(5, 4)), lambda a, b: public.subtraction(a, b, index),
                        lambda g, a, b, ga, gb: compiled.subtraction_backward_cuda(5, 3, 4, index, g, ga, gb)),
        "aggregation": (
            (random(5, 4), random(5, 3, 4), random(5, 3, 2)), lambda f, p, w: public.aggregation(f, p, w, index),
            lambda g, f, p, w, *grads: compiled.aggregation_backward_cuda(5, 3, 4, 2, f, p, w, index, g, *grads),
        ),
        "relation": (
            (random(5, 2, 4), random(5, 2, 4)),
            lambda q, k: public.attention_relation_step(q, k, torch.ones(4), target, refer),
            lambda g, q, k, gq, gk: compiled.attention_relation_step_backward_cuda(
                5, 2, 4, q, gq, k, gk, torch.ones(4).double(), torch.zeros(4).double(), target, refer, g),
        ),
        "fusion": (
            (random(5, 2), random(5, 2, 4)), lambda w, v: public.attention_fusion_step(w, v, target, refer),
            lambda g, w, v, gw, gv: compiled.attention_fusion_step_backward_cuda(
                5, 2, 4, w, gw, v, gv, target, refer, g),
        ),
    }[name]  # fmt: skip
    assert torch.autograd.gradcheck(call, inputs)
    output = call(*inputs)
    grad = torch.randn(output.shape, generator=draw, dtype=torch.float64)
    expected = torch.autograd.grad(output, inputs, grad)
    filled = [torch.zeros_like(t) for t in inputs]
    backward(grad, *(t.detach() for t in inputs), *filled)
    for got, want in zip(filled, expected, strict=True):
        torch.testing.assert_close(got, want)


def test_pointops_extension_has_the_parameters_of_pointcept() -> None:
    for name, count in {
        "knn_query_cuda": 8, "ball_query_cuda": 10, "random_ball_query_cuda": 11, "farthest_point_sampling_cuda": 7,
        "grouping_forward_cuda": 6, "grouping_backward_cuda": 6, "interpolation_forward_cuda": 7,
        "interpolation_backward_cuda": 7, "subtraction_forward_cuda": 7, "subtraction_backward_cuda": 7,
        "aggregation_forward_cuda": 9, "aggregation_backward_cuda": 12, "attention_relation_step_forward_cuda": 9,
        "attention_relation_step_backward_cuda": 12, "attention_fusion_step_forward_cuda": 8,
        "attention_fusion_step_backward_cuda": 10,
    }.items():  # fmt: skip
        assert len(inspect.signature(getattr(compiled, name)).parameters) == count
    assert triops.compat.pointops is pointops


# pointgroup_ops

group = pointops.extension("pointgroup_ops")


def test_pointgroup_finds_all_points_of_a_ball_in_its_cloud() -> None:
    of, ends = torch.tensor([0, 0, 0, 0, 1, 1, 1]), torch.tensor([0, 4, 7])
    points, balls = group.ballquery_batch_p(LINE, of.int(), ends.int(), 1.5, 300)
    assert points.tolist() == [0, 1, 0, 1, 2, 1, 2, 3, 2, 3, 4, 5, 4, 5, 6]
    assert balls.tolist() == [[0, 2], [2, 3], [5, 3], [8, 2], [10, 2], [12, 2], [14, 1]]
    strict, _ = group.ballquery_batch_p(LINE, of.int(), ends.int(), 1.0, 300)  # nearer than the radius
    assert strict.tolist() == [0, 1, 2, 3, 4, 5, 6]
    assert [t.shape for t in group.ballquery_batch_p(LINE[:0], of[:0], ends * 0, 1.0, 1)] == [(0,), (0, 2)]


def test_pointgroup_takes_the_first_thousand_points_and_any_number_of_balls(monkeypatch: pytest.MonkeyPatch) -> None:
    from triops.compat import _pointgroup

    heap, of = torch.zeros(1200, 3), torch.zeros(1200, dtype=torch.int32)
    points, balls = group.ballquery_batch_p(heap, of, torch.tensor([0, 1200]), 1.0, 50)
    assert points.view(1200, 1000).unique(dim=0).tolist() == [[*range(1000)]]
    assert balls[:, 1].tolist() == [1000] * 1200
    monkeypatch.setattr(_pointgroup, "AT_ONCE", 2 * _pointgroup.MOST)  # two balls at a time, over the ends of clouds
    start, count = group.ballquery_batch_p(LINE, of[:7], torch.tensor([0, 3, 3, 7]), 1.5, 1)[1].T
    assert count.tolist() == [2, 3, 2, 1, 2, 2, 1]
    assert start.tolist() == [0, 2, 5, 7, 8, 10, 12]


def test_pointgroup_clusters_points_of_one_label_in_the_order_of_a_queue() -> None:
    labels = torch.tensor([0, 0, 1, 0, 0, 0, 0], dtype=torch.int32)
    # in any order; 2 has another label, and 1 is alone before 4 reaches it
    balls = [[3, 0], [1], [2, 3], [0, 3, 6, 5], [4, 1], [3, 5], [2, 3, 6]]
    lengths = torch.tensor([len(ball) for ball in balls])
    order = [6, 5, 4, 3, 2, 1, 0]  # balls lie in memory in any order, as atomic counters leave them
    lie = torch.zeros(7, dtype=torch.int64)
    rows: list[int] = []
    for ball in order:
        lie[ball] = len(rows)
        rows += balls[ball]
    neighbors, starts = torch.tensor(rows, dtype=torch.int32), torch.stack([lie, lengths], 1).int()
    pairs, offsets = group.bfs_cluster(labels, neighbors, starts, 2)
    assert pairs.tolist() == [[0, 0], [0, 3], [0, 6], [0, 5]]
    assert offsets.tolist() == [0, 4]
    pairs, offsets = group.bfs_cluster(labels, neighbors, starts, 1)
    assert pairs[:, 1].tolist() == [0, 3, 6, 5, 1, 2, 4]
    assert offsets.tolist() == [0, 4, 5, 6, 7]
    pairs, offsets = group.bfs_cluster(labels, neighbors, starts, 5)
    assert (pairs.shape, offsets.tolist()) == ((0, 2), [0])
    assert pairs.dtype == offsets.dtype == torch.int32
