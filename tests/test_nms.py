"""Facts about suppression."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import GPU, run
from torch import Tensor

import triops
from triops.ops.nms import reference
from triops.ops.nms.samples import SAMPLES, predictions, upright

BOXES = torch.tensor([[6.0, 3, 8, 7], [3, 6, 9, 11], [3, 7, 10, 12], [1, 4, 13, 7]])
SCORES = torch.tensor([0.6, 0.9, 0.7, 0.2])


def by_definition(overlaps: Tensor, scores: Tensor, threshold: float) -> list[int]:
    """Kept boxes from the whole matrix of overlaps, one box at a time."""
    matrix = overlaps.tolist()
    kept: list[int] = []
    for i in sorted(range(len(scores)), key=lambda i: (-float(scores[i]), i)):
        if all(matrix[k][i] <= threshold for k in kept):
            kept.append(i)
    return kept


def test_four_boxes_by_hand() -> None:
    # boxes 1 and 2 share 24 of 41; box 3 shares 6 of 60 with box 1, and 6 of 38 with box 0
    assert triops.nms(BOXES, SCORES, 0.3).tolist() == [1, 0, 3]
    assert triops.nms(BOXES, SCORES, 0.6).tolist() == [1, 2, 0, 3]
    assert triops.nms(BOXES, SCORES, 0.12).tolist() == [1, 0]


def test_equal_scores_come_in_the_order_of_the_boxes() -> None:
    apart = torch.arange(5.0)[:, None] * 10 + torch.tensor([0.0, 0, 1, 1])
    assert triops.nms(apart, torch.tensor([0.5, 0.7, 0.5, 0.7, -0.0]), 0.5).tolist() == [1, 3, 0, 2, 4]
    assert triops.nms(apart, torch.tensor([-0.0, 0.0, -0.0, 0.0, 0.0]), 0.5).tolist() == [0, 1, 2, 3, 4]


def test_equal_boxes_leave_the_best() -> None:
    boxes = torch.tensor([[0.0, 0, 2, 2]]).repeat(5, 1)
    assert triops.nms(boxes, torch.tensor([0.1, 0.3, 0.9, 0.9, 0.5]), 0.99).tolist() == [2]
    assert triops.nms(boxes, torch.tensor([0.1, 0.3, 0.9, 0.9, 0.5]), 1.0).tolist() == [2, 3, 4, 1, 0]


def test_an_overlap_at_the_threshold_is_kept() -> None:
    halves = torch.tensor([[0.0, 0, 2, 1], [0, 0, 1, 1]])  # 1 of 2
    for threshold, kept in ((0.5, [0, 1]), (0.49, [0])):
        assert triops.nms(halves, torch.tensor([0.9, 0.1]), threshold).tolist() == kept
        rotated = torch.tensor([[1.0, 0.5, 2, 1, 0], [0.5, 0.5, 1, 1, 0]])
        assert triops.nms_rotated(rotated, torch.tensor([0.9, 0.1]), threshold).tolist() == kept


def test_the_threshold_takes_the_dtype_of_the_overlaps() -> None:
    tenths = torch.tensor([[0.0, 0, 10, 1], [0, 0, 3, 1]])  # 3 of 10, which in float32 is above the float64 0.3
    assert triops.nms(tenths, torch.tensor([0.9, 0.1]), 0.3).tolist() == [0, 1]


def test_a_dropped_box_drops_no_other() -> None:
    chain = torch.tensor([[0.0, 0, 4, 1], [2, 0, 6, 1], [4, 0, 8, 1]])
    assert triops.nms(chain, torch.tensor([0.9, 0.8, 0.7]), 0.2).tolist() == [0, 2]


def test_offset_counts_the_last_pixel() -> None:
    pixels = torch.tensor([[0.0, 0, 1, 1], [1, 1, 2, 2]])  # with it, 2 x 2 pixels each, one of them shared
    assert triops.nms(pixels, torch.tensor([0.9, 0.1]), 0.1, offset=0).tolist() == [0, 1]
    assert triops.nms(pixels, torch.tensor([0.9, 0.1]), 0.1, offset=1).tolist() == [0]


def test_labels_keep_groups_apart() -> None:
    boxes, scores = predictions(60, 3)
    labels = torch.arange(60) % 4
    kept = triops.nms_rotated(boxes, scores, 0.1, labels)
    for group in range(4):
        members = (labels == group).nonzero()[:, 0]
        alone = members[triops.nms_rotated(boxes[members], scores[members], 0.1)]
        assert kept[labels[kept] == group].tolist() == alone.tolist()


def test_categories_are_suppressed_each_alone() -> None:
    """As torchvision documents it; far from 0, too, where moving categories apart would round coordinates."""
    flat, scores = predictions(200, 5)
    boxes = upright(flat) + 70_000
    idxs = torch.arange(200) * 7 % 4 - 1
    kept = triops.batched_nms(boxes, scores, idxs, 0.3)
    assert torch.equal(scores[kept], scores[kept].sort(descending=True).values)
    for category in range(-1, 3):
        members = (idxs == category).nonzero()[:, 0]
        alone = members[triops.nms(boxes[members], scores[members], 0.3)]
        assert kept[idxs[kept] == category].tolist() == alone.tolist()
    assert torch.equal(triops.batched_nms(boxes, scores, torch.zeros(200).long(), 0.3), triops.nms(boxes, scores, 0.3))
    assert triops.batched_nms(boxes[:0], scores[:0], idxs[:0], 0.3).shape == (0,)


def test_3d_boxes_of_different_labels_do_not_meet() -> None:
    boxes = torch.tensor([[0.0, 0, 0, 4, 2, 2, 0.0], [0.5, 0, 9, 4, 2, 2, 0.1], [0.2, 0, 0, 4, 2, 2, 0.0]])
    scores, labels = torch.tensor([0.5, 0.9, 0.7]), torch.tensor([0, 1, 0])
    for function in (triops.nms3d, triops.nms3d_normal):
        assert function(boxes, scores, 0.3).tolist() == [1]
        assert function(boxes, scores, 0.3, labels=labels).tolist() == [1, 2]


def test_counter_clockwise_angles_are_the_negative_ones() -> None:
    boxes, scores = predictions(100, 5)
    flipped = boxes * torch.tensor([1.0, 1, 1, 1, -1])
    kept = triops.nms_rotated(boxes, scores, 0.3)
    assert torch.equal(triops.nms_rotated(flipped, scores, 0.3, clockwise=False), kept)


def test_3d_boxes_are_seen_from_above() -> None:
    flat, scores = predictions(200, 9)
    height = torch.rand(200, 2)
    boxes = torch.cat([flat[:, :2], height[:, :1], flat[:, 2:4], height[:, 1:], flat[:, 4:]], 1)
    assert torch.equal(triops.nms3d(boxes, scores, 0.2), triops.nms_rotated(flat, scores, 0.2))
    assert torch.equal(
        triops.nms3d(boxes, scores, 0.2, margin=0.01), triops.nms_rotated(flat, scores, 0.2, margin=0.01)
    )
    assert torch.equal(triops.nms3d_normal(boxes, scores, 0.2), triops.nms(upright(flat), scores, 0.2))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("function", [triops.nms3d, triops.nms3d_normal])
def test_3d_boxes_of_half_types_are_suppressed_as_the_same_boxes_in_float32(function: Any, dtype: torch.dtype) -> None:
    """A corner has more digits than its box: it is computed in float32."""
    for seed in range(20):
        flat, scores = predictions(300, 9, seed=seed)
        boxes = torch.cat([flat[:, :2], torch.rand(300, 1), flat[:, 2:4], torch.rand(300, 1), flat[:, 4:]], 1).to(dtype)
        assert torch.equal(function(boxes, scores, 0.2), function(boxes.float(), scores, 0.2)), seed


@pytest.mark.parametrize("dtype", [torch.bool, torch.int32], ids=str)
@pytest.mark.parametrize("function", [triops.nms3d, triops.nms3d_normal])
def test_3d_boxes_are_numbers_with_a_point(function: Any, dtype: torch.dtype) -> None:
    with pytest.raises(TypeError, match=r"boxes must be .*float"):
        function(torch.zeros(3, 7, dtype=dtype), torch.rand(3), 0.5)


def test_boxes_that_are_not_finite_are_kept_and_drop_nothing() -> None:
    boxes = torch.tensor(
        [[0.0, 0, 2, 2], [-math.inf, -math.inf, math.inf, math.inf], [0, 0, math.nan, 2], [0, 0, 2, 2]]
    )
    assert triops.nms(boxes, torch.tensor([0.5, 0.9, 0.8, 0.4]), 0.1).tolist() == [1, 2, 0]


def test_no_boxes() -> None:
    none = torch.zeros(0)
    assert triops.nms(torch.zeros(0, 4), none, 0.5).shape == (0,)
    assert triops.nms_rotated(torch.zeros(0, 5), none, 0.5).dtype == torch.int64
    assert triops.nms3d(torch.zeros(0, 7), none, 0.5).shape == (0,)
    assert triops.nms3d_normal(torch.zeros(0, 7), none, 0.5).shape == (0,)
    indices, scores = triops.soft_nms(torch.zeros(0, 4), none)
    assert indices.shape == scores.shape == (0,)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("threshold", [0.0, 0.3, 0.7])
def test_equals_the_definition(threshold: float, dtype: torch.dtype) -> None:
    boxes, scores = predictions(300, 20, seed=9)
    boxes, scores = boxes.to(dtype), (scores * 20).round().to(dtype)
    limit = float(torch.tensor(threshold, dtype=dtype))
    rotated = triops.box_iou_rotated(boxes, boxes)
    assert triops.nms_rotated(boxes, scores, threshold).tolist() == by_definition(rotated, scores, limit)
    plain = triops.bbox_overlaps(upright(boxes), upright(boxes))
    assert triops.nms(upright(boxes), scores, threshold).tolist() == by_definition(plain, scores, limit)


IN_CHUNKS = ["nms[300 boxes]", "nms[300 boxes labels]", "nms[300 boxes offset 1]", "nms[odd boxes]",
             "nms[300 boxes ties]", "nms[a chain]", "nms_rotated[a chain]"]  # fmt: skip
SLOW_IN_CHUNKS = ["nms_rotated[300 boxes labels]", "nms_rotated[odd boxes]"]


@pytest.mark.parametrize(
    "sample",
    [s for s in SAMPLES if str(s) in IN_CHUNKS]
    + [pytest.param(s, marks=pytest.mark.full) for s in SAMPLES if str(s) in SLOW_IN_CHUNKS],
    ids=str,
)
def test_on_a_gpu_boxes_that_go_through_in_several_chunks_give_the_same_answer(sample: Any, monkeypatch: Any) -> None:
    from triops.ops.nms import gpu

    for name, value in (("CHUNK", 128), ("BOX_LANES", 128), ("ROTATED_LANES", 64), ("MOST_IN_ONE_LAUNCH", 0)):
        monkeypatch.setattr(gpu, name, value)
    args = sample.make(torch.float32)
    assert torch.equal(run("gpu", sample.operator, args).cpu(), run("reference", sample.operator, args))


@pytest.mark.skipif(GPU == "cuda", reason="a GPU does nothing else")
@pytest.mark.parametrize("margin", [0.0, pytest.param(0.01, marks=pytest.mark.full)])
def test_one_box_after_the_other_as_on_a_gpu_gives_the_same_answer(margin: float, monkeypatch: Any) -> None:
    """The interpreter compares 64 at once elsewhere."""
    from triops.ops.nms import gpu

    monkeypatch.setattr(gpu, "INTERPRETED", False)
    monkeypatch.setattr(gpu, "MOST_IN_ONE_LAUNCH", 0)
    monkeypatch.setattr(gpu, "CHUNK", 64)
    monkeypatch.setattr(gpu, "BOX_LANES", 64)
    monkeypatch.setattr(gpu, "ROTATED_LANES", 64)
    boxes, scores = predictions(100, 9, seed=3)
    args = (boxes, scores, None, 0.2, True, margin)
    assert torch.equal(run("gpu", "nms_rotated", args).cpu(), run("reference", "nms_rotated", args))
    for labels in (None, torch.arange(100) % 3):
        plain = (upright(boxes), scores, labels, 0.4, 0)
        assert torch.equal(run("gpu", "nms", plain).cpu(), run("reference", "nms", plain))


@pytest.mark.parametrize("backend", ["reference", "cpu", "gpu"])
def test_scores_of_every_dtype_are_ordered_as_torch_orders_them(backend: str) -> None:
    """NaN before infinity, 0 and -0 alike, equal ones as they come."""
    scores = torch.tensor([0.0, math.nan, -math.inf, math.inf, -0.0, -1.5, math.nan, 2.5, -math.nan, 1e-30, 2.5])
    apart = torch.arange(len(scores))[:, None] * 10 + torch.tensor([0.0, 0, 1, 1])
    for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.float64):
        order = [1, 6, 8, 3, 7, 10] + ([0, 4, 9] if dtype == torch.float16 else [9, 0, 4]) + [5, 2]
        assert run(backend, "nms", (apart, scores.to(dtype), None, 0.5, 0)).tolist() == order


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**31), st.sampled_from([0.0, 0.1, 0.5, 0.9]), st.integers(0, 90))
def test_backends_keep_the_same_boxes(seed: int, threshold: float, count: int) -> None:
    boxes, scores = predictions(count, 6, seed=seed)
    for name, args in (
        ("nms", (upright(boxes), scores, None, threshold, 0)),
        ("nms", (upright(boxes), scores, (boxes[:, 0] % 3).int(), threshold, 0)),
        ("nms_rotated", (boxes, scores, None, threshold, True, 0.0)),
    ):
        assert torch.equal(run("cpu", name, args), run("reference", name, args))


SOFT = {
    "linear": ([1, 0, 2, 3], [0.9, 0.6, 0.7 * (1 - 24 / 41), 0.2]),
    "gaussian": (
        [1, 0, 2, 3],
        [0.9, 0.6 * math.exp(-((2 / 36) ** 2) / 0.5), 0.7 * math.exp(-((24 / 41) ** 2) / 0.5), 0.18650459],
    ),
    "naive": ([1, 0, 3], [0.9, 0.6, 0.2]),
}


@pytest.mark.parametrize("method", SOFT)
def test_soft_scores_by_hand(method: str) -> None:
    indices, scores = triops.soft_nms(BOXES, SCORES, 0.3, 0.5, 0.01, method)
    assert indices.tolist() == SOFT[method][0]
    assert scores.tolist() == pytest.approx(SOFT[method][1], rel=1e-6)


@pytest.mark.parametrize("backend", ["reference", "cpu", "gpu"])
def test_soft_of_equal_scores_the_first_is_chosen_and_low_ones_are_dropped(backend: str) -> None:
    apart = torch.arange(4.0)[:, None] * 10 + torch.tensor([0.0, 0, 1, 1])
    args = (apart, torch.tensor([0.5, 0.04, 0.9, 0.5]), 0.3, 0.5, 0.05, "linear", 0)
    assert run(backend, "soft_nms", args)[0].tolist() == [2, 0, 3]


def test_soft_naive_is_plain_suppression() -> None:
    boxes, scores = predictions(200, 10)
    kept, same = triops.soft_nms(upright(boxes), scores, 0.5, min_score=1e-6, method="naive")
    assert torch.equal(kept, triops.nms(upright(boxes), scores, 0.5))
    assert torch.equal(same, scores[kept])


def test_exp_is_that_of_the_library() -> None:
    x = -torch.rand(10_000, dtype=torch.float64) * torch.logspace(-8, 2.7, 10_000, dtype=torch.float64)
    assert torch.allclose(reference.exp(x), x.exp(), rtol=1e-15, atol=0)
    assert reference.exp(torch.tensor([0.0, -1e9], dtype=torch.float64)).tolist() == pytest.approx([1, 0], abs=1e-300)


def test_permuted_boxes_keep_the_same_ones() -> None:
    boxes, scores = predictions(150, 8)
    order = torch.randperm(150, generator=torch.Generator().manual_seed(0))
    for function, given_boxes in ((triops.nms, upright(boxes)), (triops.nms_rotated, boxes)):
        kept, permuted = function(given_boxes, scores, 0.3), function(given_boxes[order], scores[order], 0.3)
        assert torch.equal(order[permuted], kept)


def test_mmcv_and_openpcdet_keep_176_of_these_where_exact_areas_keep_179() -> None:
    """The count is that of mmcv's own test; its corners count as inside when 0.01 outside."""
    import numpy as np

    np.random.seed(42)
    boxes, scores = (torch.from_numpy(np.random.rand(*shape).astype(np.float32)) for shape in ((555, 7), (555,)))
    assert len(triops.nms3d(boxes, scores, 0.3, margin=0.01)) == 176
    assert len(triops.nms3d(boxes, scores, 0.3)) == 179
    assert len(triops.nms3d_normal(boxes, scores, 0.3)) == 148


def test_faces() -> None:
    from triops.compat import mmcv, pcdet

    flat, scores = predictions(80, 6)
    boxes = torch.cat([flat[:, :2], torch.rand(80, 1), flat[:, 2:4], torch.rand(80, 1) + 1, flat[:, 4:]], 1)
    kept = triops.nms3d(boxes, scores, 0.2, margin=0.01)
    assert torch.equal(pcdet.nms_gpu(boxes, scores, 0.2)[0], kept)
    assert pcdet.nms_gpu(boxes, scores, 0.2, pre_maxsize=10)[0].tolist() == [
        i for i in kept.tolist() if i in set(scores.topk(10).indices.tolist())
    ]
    assert torch.equal(pcdet.nms_normal_gpu(boxes, scores, 0.2)[0], triops.nms3d_normal(boxes, scores, 0.2))
    ious = pcdet.boxes_iou3d_gpu(boxes, boxes)
    assert torch.allclose(ious.diagonal(), torch.ones(80), atol=1e-5)
    assert torch.equal(pcdet.boxes_aligned_iou3d_gpu(boxes, boxes)[:, 0], ious.diagonal())
    assert isinstance(pcdet.boxes_bev_iou_cpu(boxes.numpy(), boxes.numpy()), type(boxes.numpy()))

    order = scores.sort(descending=True).indices
    extension = pcdet.extension("pcdet.ops.iou3d_nms.iou3d_nms_cuda")
    keep = torch.zeros(80, dtype=torch.int64)
    count = extension.nms_gpu(boxes[order], keep, 0.2)
    assert torch.equal(order[keep[:count]], kept)
    found = torch.zeros(80, 1)
    assert extension.boxes_aligned_overlap_bev_gpu(boxes, boxes, found) == 1
    assert torch.allclose(found[:, 0], boxes[:, 3] * boxes[:, 4], rtol=1e-4)

    number = torch.zeros((), dtype=torch.int64)
    mmcv.extension("mmcv._ext").iou3d_nms3d_forward(boxes[order], keep, number, nms_overlap_thresh=0.2)
    assert torch.equal(order[keep[:number]], kept)
    groups = mmcv.extension("mmcv._ext").nms_match(torch.cat([BOXES, SCORES[:, None]], 1), iou_threshold=0.3)
    assert groups == [[1, 2], [0], [3]]
    flattened = sorted(itertools.chain(*groups))
    assert flattened == [0, 1, 2, 3]


@pytest.mark.parametrize("backend", ["reference", "cpu", "gpu"])
def test_boxes_of_negative_size_overlap_nothing(backend: str) -> None:
    """Of two of them, intersection and union as computed are both negative, and the quotient is not."""
    boxes, scores = torch.tensor([[0.0, 10, 10, 0], [0, 10, 10, 0], [3, 3, 2, 2]]), torch.tensor([0.9, 0.8, 0.7])
    assert run(backend, "nms", (boxes, scores, None, 0.3, 0)).tolist() == [0, 1, 2]
    assert run(backend, "soft_nms", (boxes, scores, 0.3, 0.5, 1e-3, "naive", 0))[0].tolist() == [0, 1, 2]
