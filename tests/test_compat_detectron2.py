"""Facts about `detectron2._C` and `torch.ops.detectron2`."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from triops.compat import _mmcv_deform, detectron2

MODULE = detectron2.extension("detectron2._C")
OPS: Any = torch.ops.detectron2


def test_angles_are_degrees_against_the_clock_of_an_image_whose_y_points_down() -> None:
    bar = torch.tensor([[0.0, 0, 10, 1, 45]])
    ends = torch.tensor([[3.0, -3, 1, 1, 0], [-3, 3, 1, 1, 90], [3, 3, 1, 1, 0], [-3, -3, 1, 1, 0]])
    found = OPS.box_iou_rotated(bar, ends)
    # The bar covers the middle of a unit square askew: the square less two corner triangles.
    corner = (math.sqrt(0.5) - 0.5) ** 2
    shared = 1 - 2 * corner
    torch.testing.assert_close(found, torch.tensor([[shared / (11 - shared)] * 2 + [0, 0]]))
    assert OPS.nms_rotated(torch.cat([bar, ends]), torch.tensor([0.9, 0.8, 0.7, 0.6, 0.5]), 0.05).tolist() == [0, 3, 4]


def test_overlaps_are_float32_and_whole_turns_lose_nothing() -> None:
    boxes = torch.tensor([[100.0, 200, 30, 4, 10]], dtype=torch.float64)
    turned = boxes + torch.tensor([0, 0, 0, 0, 360.0 * 1000])
    found = OPS.box_iou_rotated(boxes.float(), turned.float())
    assert found.dtype == OPS.box_iou_rotated(boxes, turned).dtype == torch.float32
    assert torch.equal(found, OPS.box_iou_rotated(boxes.float(), boxes.float()))
    torch.testing.assert_close(found, torch.ones(1, 1))
    assert OPS.box_iou_rotated(boxes[:0], boxes).shape == (0, 1)
    assert OPS.nms_rotated(boxes[:0], boxes[:0, 0], 0.5).shape == (0,)


def plain_roi_align(input: Tensor, rois: Tensor, scale: float, size: tuple[int, int], ratio: int) -> Tensor:
    """Of boxes within the map: `grid_sample` at the samples of every bin, turned about the centre."""
    rows = []
    for image, x, y, w, h, degrees in rois.tolist():
        bins = [
            (torch.arange(n * ratio, dtype=input.dtype) + 0.5) / (n * ratio) * side * scale - side * scale / 2
            for n, side in zip(size, (h, w), strict=True)
        ]
        down, right = torch.meshgrid(*bins, indexing="ij")
        cos, sin = math.cos(math.radians(degrees)), math.sin(math.radians(degrees))
        px, py = right * cos + down * sin + x * scale, down * cos - right * sin + y * scale
        grid = torch.stack([px / input.shape[3], py / input.shape[2]], -1)[None] * 2 - 1
        sampled = functional.grid_sample(input[int(image)][None], grid, align_corners=False)
        rows.append(functional.avg_pool2d(sampled, ratio)[0])
    return torch.stack(rows)


def test_rotated_pooling_is_that_of_turned_samples_with_gradients() -> None:
    g = torch.Generator().manual_seed(0)
    input = torch.randn(2, 3, 20, 24, dtype=torch.float64, generator=g).requires_grad_()
    rois = torch.tensor([[0.0, 24, 20, 12, 8, 30], [1, 20, 22, 10, 14, -100], [1, 30, 18, 6, 6, 725]]).double()
    expected = plain_roi_align(input, rois, 0.5, (2, 3), 2)
    torch.testing.assert_close(OPS.roi_align_rotated_forward(input.detach(), rois, 0.5, 2, 3, 2), expected.detach())
    grad = torch.randn(expected.shape, dtype=torch.float64, generator=g)
    wanted = torch.autograd.grad(expected, input, grad)[0]
    torch.testing.assert_close(OPS.roi_align_rotated_backward(grad, rois, 0.5, 2, 3, 2, 3, 20, 24, 2), wanted)
    half = OPS.roi_align_rotated_forward(input.detach().half(), rois.float(), 0.5, 2, 3, 2)
    torch.testing.assert_close(half.double(), expected.detach(), rtol=2e-3, atol=2e-3)


def test_operators_are_called_from_scripts() -> None:
    @torch.jit.script
    def kept(boxes: Tensor, scores: Tensor) -> Tensor:
        return torch.ops.detectron2.nms_rotated(boxes, scores, 0.5)

    boxes = torch.tensor([[0.0, 0, 4, 2, 0], [0, 0, 4, 2, 6], [0, 0, 4, 2, 90]])
    assert kept(boxes, torch.tensor([0.5, 0.9, 0.7])).tolist() == [1, 2]


def test_deformable_convolution_is_mmcvs() -> None:
    names = {name: name for name in _mmcv_deform.FUNCTIONS}
    names["deform_conv_backward_parameters"] = "deform_conv_backward_filter"
    for theirs, name in names.items():
        assert getattr(MODULE, name).__wrapped__ is _mmcv_deform.FUNCTIONS[theirs]
    g = torch.Generator().manual_seed(0)
    image, weight = torch.randn(1, 2, 5, 6, generator=g), torch.randn(3, 2, 3, 3, generator=g)
    out, none = torch.zeros(1, 3, 5, 6), torch.empty(0)
    MODULE.deform_conv_forward(
        image, weight, torch.zeros(1, 18, 5, 6), out, none, none, 3, 3, 1, 1, 1, 1, 1, 1, 1, 1, 1
    )
    torch.testing.assert_close(out, functional.conv2d(image, weight, padding=1))


def test_versions_say_that_nothing_was_compiled() -> None:
    assert MODULE.has_cuda() is False
    assert "triops" in MODULE.get_compiler_version()
    assert isinstance(MODULE.get_cuda_version(), str)


# COCO evaluation


def plain_matches(
    ious: list[list[float]], objects: list[Any], found: list[Any], threshold: float, area: tuple[float, float]
) -> tuple[list[int], list[bool], list[bool]]:
    """As the protocol words it: ids that detections match, best first, whether they and the objects are ignored."""
    ignored = [g.ignore or not area[0] <= g.area <= area[1] for g in objects]
    order = sorted(range(len(objects)), key=lambda g: ignored[g])
    taken, ids, skipped = set[int](), [], []
    for row, detection in zip(ious, found, strict=True):
        best, match = min(threshold, 1 - 1e-10), None
        for g in order:
            if g in taken and not objects[g].is_crowd:
                continue
            if match is not None and not ignored[match] and ignored[g]:
                break
            if row[g] >= best:
                best, match = row[g], g
        ids.append(0 if match is None else objects[match].id)
        if match is not None:
            taken.add(match)
        skipped.append(not area[0] <= detection.area <= area[1] if match is None else ignored[match])
    return ids, skipped, [ignored[g] for g in order]


def test_detections_match_objects_by_turns() -> None:
    g = torch.Generator().manual_seed(0)
    areas = [(0.0, 1e5), (0.0, 50.0), (50.0, 1e5)]
    thresholds = [0.5, 0.75, 1.0]
    ignored = 0
    for objects, detections in [(5, 8), (3, 1), (0, 3), (4, 0), (1, 20)] * 5:
        truth = [
            MODULE.InstanceAnnotation(k + 1, 0.0, float(a), bool(c), bool(i))
            for k, (a, c, i) in enumerate((torch.rand(objects, 3, generator=g) * torch.tensor([100, 1.3, 1.3])).int())
        ]
        scores = torch.randint(0, 5, (detections,), generator=g) / 5  # with equal ones
        sizes = torch.rand(detections, generator=g) * 100
        found = [
            MODULE.InstanceAnnotation(k + 1, s, a, False, False)
            for k, (s, a) in enumerate(zip(scores.tolist(), sizes.tolist(), strict=True))
        ]
        ious = (torch.randint(0, 9, (min(detections, 10), objects), generator=g) / 8).tolist()  # with equal ones
        best = sorted(found, key=lambda d: -d.score)[:10]
        results = MODULE.COCOevalEvaluateImages(areas, 10, thresholds, [[ious]], [[truth]], [[found]])
        assert len(results) == 3
        for area, result in zip(areas, results, strict=True):
            assert result.detection_scores.tolist() == [d.score for d in best]
            for t, threshold in enumerate(thresholds):
                ids, skipped, of_objects = plain_matches(ious, truth, best, threshold, area)
                ignored += sum(skipped)
                if found:
                    assert result.detection_matches[t].tolist() == ids
                    assert result.detection_ignores[t].tolist() == skipped
                assert sorted(result.ground_truth_ignores.tolist()) == of_objects
    assert ignored > 100


def test_curves_are_read_at_recalls_and_empty_categories_are_minus_one() -> None:
    annotation = MODULE.InstanceAnnotation
    truth = [[[annotation(1, 0, 9, False, False), annotation(2, 0, 9, False, False)], []], [[], []]]
    found = [[[annotation(1, 0.5, 9, False, False), annotation(2, 0.9, 9, False, False)], []]]
    found.append([[annotation(3, 0.7, 9, False, False)], []])
    ious = [[[[0.8, 0.0], [0.0, 0.6]], []], [[[]], []]]  # the best first: 0.9 finds one well, 0.5 the other one less
    results = MODULE.COCOevalEvaluateImages([(0, 1e9)], 100, [0.5, 0.75], ious, truth, found)
    params = SimpleNamespace(
        recThrs=[0.0, 0.5, 0.6, 1.0], maxDets=[1, 100], iouThrs=[0.5, 0.75], useCats=1, catIds=[1, 2],
        areaRng=[(0, 1e9)], imgIds=[1, 2],
    )  # fmt: skip
    found = MODULE.COCOevalAccumulate(params, results)
    assert found["counts"] == [2, 4, 2, 1, 2]
    precision = torch.tensor(found["precision"]).view(2, 4, 2, 2)
    assert (precision[:, :, 1] == -1).all()  # nothing of the second category
    third = pytest.approx(2 / 3)
    assert precision[0, :, 0, 1].tolist() == [1, 1, third, third]  # found, not, found
    assert precision[1, :, 0, 1].tolist() == precision[0, :, 0, 0].tolist() == [1, 1, 0, 0]
    scores = torch.tensor(found["scores"]).view(2, 4, 2, 2)
    assert scores[0, :, 0, 1].tolist() == pytest.approx([0.9, 0.9, 0.5, 0.5])
    assert torch.tensor(found["recall"]).view(2, 2, 2)[:, 0].tolist() == [[0.5, 1], [0.5, 0.5]]
