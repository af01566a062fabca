"""COCO evaluation of `detectron2._C`: which detections find which objects, and the curves of precision over recall.

The answers are those of detectron2's C++, which are pycocotools' but for its 2**-52 beside each divisor.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
Bools = NDArray[np.bool_]

NEARLY_ONE = 1 - 1e-10  # no threshold is stricter than that


class InstanceAnnotation(NamedTuple):
    """An object or a detection. An id of 0 stands for none: what has it counts as not matched."""

    id: int
    score: float
    area: float
    is_crowd: bool
    ignore: bool


@dataclass
class ImageEvaluation:
    """One category of one image at one range of areas, D detections best first at T thresholds, and G objects."""

    detection_matches: Integers = field(default_factory=lambda: np.zeros((0, 0), np.int64))  # [T, D] ids, 0 for none
    detection_scores: Floats = field(default_factory=lambda: np.zeros(0))  # [D]
    ground_truth_ignores: Bools = field(default_factory=lambda: np.zeros(0, np.bool_))  # [G]
    detection_ignores: Bools = field(default_factory=lambda: np.zeros((0, 0), np.bool_))  # [T, D]


def evaluate_images(
    area_ranges: Sequence[Sequence[float]], max_detections: int, iou_thresholds: Sequence[float],
    ious: Sequence[Sequence[ArrayLike]], ground_truths: Sequence[Sequence[Sequence[InstanceAnnotation]]],
    detections: Sequence[Sequence[Sequence[InstanceAnnotation]]],
) -> list[ImageEvaluation]:  # fmt: skip
    """Evaluations of every category, range of areas and image, images fastest.

    `ious[image][category]` is [D, G], its detections ordered from the best and no more than `max_detections`; objects
    and detections come in any order. Detections take turns, best first; each takes the object that it overlaps most,
    of equal ones the last, among those that count, or else among those that do not.
    """
    images, categories = len(ground_truths), len(ious[0]) if len(ious) else 0
    ranges = np.asarray(area_ranges, np.float64).reshape(-1, 2)
    thresholds = np.minimum(np.asarray(iou_thresholds, np.float64), NEARLY_ONE)
    results = [ImageEvaluation()] * (categories * len(ranges) * images)  # most images have none of a category
    for image in range(images):
        for category in range(categories):
            objects, found = ground_truths[image][category], detections[image][category]
            if not len(objects) and not len(found):
                continue
            evaluations = _evaluate(ranges, max_detections, thresholds, ious[image][category], objects, found)
            for row, evaluation in enumerate(evaluations):
                results[(category * len(ranges) + row) * images + image] = evaluation
    return results


def _evaluate(
    ranges: Floats, most: int, thresholds: Floats, ious: ArrayLike, objects: Sequence[InstanceAnnotation],
    found: Sequence[InstanceAnnotation],
) -> list[ImageEvaluation]:  # fmt: skip
    """One image and category, by ranges of areas."""
    scores = np.array([d.score for d in found], np.float64)
    best = (-scores).argsort(kind="stable")[:most]
    ids = np.array([d.id for d in found], np.int64)[best]
    areas = np.array([d.area for d in found], np.float64)[best]
    object_areas = np.array([g.area for g in objects], np.float64)
    ignored = np.array([g.ignore for g in objects], np.bool_) | _outside(object_areas, ranges)  # [A, G]

    matches = np.zeros((len(ranges), len(thresholds), len(best)), np.int64)
    ignores = np.zeros(matches.shape, np.bool_)
    if len(best) and len(objects):
        crowd = np.array([g.is_crowd for g in objects], np.bool_)
        object_ids = np.array([g.id for g in objects], np.int64)
        _match(np.asarray(ious, np.float64), thresholds, ids, ignored, crowd, object_ids, matches, ignores)
    ignores |= (matches == 0) & _outside(areas, ranges)[:, None]
    return [ImageEvaluation(matches[a], scores[best], ignored[a], ignores[a]) for a in range(len(ranges))]


def _outside(areas: Floats, ranges: Floats) -> Bools:
    """[A, number of areas]"""
    return (areas < ranges[:, :1]) | (areas > ranges[:, 1:])


def _match(
    ious: Floats, thresholds: Floats, ids: Integers, ignored: Bools, crowd: Bools, object_ids: Integers,
    matches: Integers, ignores: Bools,
) -> None:  # fmt: skip
    """Fills matches and ignores, [A, T, D], for all ranges and thresholds at once."""
    taken = np.zeros((*matches.shape[:2], len(crowd)), np.bool_)
    far = ious < thresholds.min(initial=np.inf)
    for d in np.flatnonzero(~far.all(1)):
        overlaps = np.where((ious[d] >= thresholds[:, None]) & ~taken, ious[d], -1)  # [A, T, G]
        counted = np.where(ignored[:, None], -1, overlaps)
        overlaps = np.where(counted.max(2, keepdims=True) >= 0, counted, overlaps)
        match = len(crowd) - 1 - overlaps[..., ::-1].argmax(2)  # the last of equal ones
        a, t = np.nonzero(overlaps.max(2) >= 0)
        g = match[a, t]
        matches[a, t, d] = object_ids[g]
        ignores[a, t, d] = ignored[a, g]
        if ids[d] > 0:
            taken[a, t, g] = ~crowd[g]


def accumulate(params: Any, evaluations: Sequence[ImageEvaluation]) -> dict[str, Any]:
    """Precision [T, R, K, A, M], scores likewise and recall [T, K, A, M], as flat lists; -1 where there is no object.

    T thresholds, R recalls at which curves are read, K categories, A ranges of areas, M limits of detections of an
    image, as `params` has them: pycocotools' `Params`, the same as for `evaluate_images`.
    """
    recalls, limits = np.asarray(params.recThrs, np.float64), [int(limit) for limit in params.maxDets]
    images, thresholds = len(params.imgIds), len(params.iouThrs)
    categories = len(params.catIds) if params.useCats == 1 else 1
    counts = [thresholds, len(recalls), categories, len(params.areaRng), len(limits)]
    precision, scores = np.full(counts, -1.0), np.full(counts, -1.0)
    recall = np.full([counts[0], *counts[2:]], -1.0)
    for category in range(categories):
        for area in range(len(params.areaRng)):
            begin = (category * len(params.areaRng) + area) * images
            part = evaluations[begin : begin + images]
            objects = sum(int((~e.ground_truth_ignores).sum()) for e in part)
            part = [e for e in part if len(e.detection_scores)]
            for m, limit in enumerate(limits if objects else ()):
                curves = _curve(part, limit, objects, recalls, thresholds)
                for target, curve in zip((precision, scores, recall), curves, strict=True):
                    target[..., category, area, m] = curve
    return {
        "params": params, "counts": counts, "date": time.strftime("%Y-%m-%d %H:%M:%S"),
        "precision": precision.ravel().tolist(), "recall": recall.ravel().tolist(), "scores": scores.ravel().tolist(),
    }  # fmt: skip


def _curve(
    evaluations: Sequence[ImageEvaluation], limit: int, objects: int, recalls: Floats, thresholds: int
) -> tuple[Floats, Floats, Floats]:
    """Precision and scores at the recalls, [T, R], and the last recall, [T]."""
    precision, score = np.zeros((2, thresholds, len(recalls)))
    if not evaluations or limit <= 0:
        return precision, score, np.zeros(thresholds)
    scores = np.concatenate([e.detection_scores[:limit] for e in evaluations])
    order = (-scores).argsort(kind="stable")
    matched = np.concatenate([e.detection_matches[:, :limit] for e in evaluations], 1)[:, order] > 0
    counts = ~np.concatenate([e.detection_ignores[:, :limit] for e in evaluations], 1)[:, order]
    right, wrong = (matched & counts).cumsum(1), (~matched & counts).cumsum(1)
    recall = right / objects
    curve = right / np.maximum(right + wrong, 1)
    curve = np.maximum.accumulate(curve[:, ::-1], 1)[:, ::-1]
    for t in range(thresholds):
        place = recall[t].searchsorted(recalls)
        reached = place < len(order)
        precision[t, reached] = curve[t, place[reached]]
        score[t, reached] = scores[order[place[reached]]]
    return precision, score, recall[:, -1]


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "COCOevalEvaluateImages": evaluate_images,
    "COCOevalAccumulate": accumulate,
    "InstanceAnnotation": InstanceAnnotation,
    "ImageEvaluation": ImageEvaluation,
}
