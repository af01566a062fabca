"""Detection metrics in the manner of nuScenes: matches by distance of centres, five errors of what is found, NDS."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from triops._cpu.threads import run
from triops.data.kitti_labels import Floats
from triops.evaluate import cpu
from triops.evaluate.sources import Ints

ERRORS = ("translation", "scale", "orientation", "velocity", "attribute")
UNDEFINED = {"traffic_cone": ("orientation", "velocity", "attribute"), "barrier": ("velocity", "attribute")}
HALF_TURN = ("barrier",)  # front and back look alike
RECALLS = np.linspace(0, 1, 101)


@dataclass(frozen=True, eq=False)
class NuscenesResult:
    """Average precision and errors, per class and overall.

    Attributes:
        classes: their names.
        distances: the limits for a match in metres.
        ap [C, D]: average precision, from 0 to 1, per class and distance.
        errors [C, 5]: translation (m), scale (1 - IoU of aligned boxes), orientation (rad), velocity (m/s) and
            attribute (1 - accuracy) of matched detections; 1 for a class that finds nothing, NaN where an error has no
            meaning, as the heading of a traffic cone.
        precision [C, D, 101]: precision at recalls 0, 0.01, ... 1.
        objects [C]: how many there are.
    """

    classes: tuple[str, ...]
    distances: tuple[float, ...]
    ap: Floats
    errors: Floats
    precision: Floats
    objects: Ints

    @property
    def mean_ap(self) -> float:
        return float(self.ap.mean())

    @property
    def mean_errors(self) -> dict[str, float]:
        """Over the classes for which each has a meaning; NaN where it has for none."""
        valid = ~np.isnan(self.errors)
        sums, counts = np.where(valid, self.errors, 0).sum(0), valid.sum(0)
        return {name: float(sums[i] / counts[i]) if counts[i] else float("nan") for i, name in enumerate(ERRORS)}

    @property
    def nds(self) -> float:
        """nuScenes detection score: half mean AP, half 1 - error, each at most 1. An error without meaning counts 1."""
        scores = [0.0 if np.isnan(e) else 1 - min(1.0, e) for e in self.mean_errors.values()]
        return (5 * self.mean_ap + sum(scores)) / (5 + len(scores))

    def as_json(self) -> dict[str, Any]:
        """The figures as plain containers; NaN as None."""

        def plain(value: float) -> float | None:
            return None if np.isnan(value) else float(value)

        return {
            "protocol": "nuScenes style", "mAP": self.mean_ap, "NDS": self.nds,
            "errors": {name: plain(value) for name, value in self.mean_errors.items()},
            "classes": {
                name: {
                    "objects": int(self.objects[c]),
                    "AP": {str(distance): float(self.ap[c, k]) for k, distance in enumerate(self.distances)},
                    "errors": {error: plain(self.errors[c, i]) for i, error in enumerate(ERRORS)},
                }
                for c, name in enumerate(self.classes)
            },
        }  # fmt: skip


@dataclass(frozen=True, eq=False)
class _Boxes:
    """The boxes of all frames."""

    frame: Ints
    name: npt.NDArray[np.str_]
    boxes: Floats  # [N, 9], velocities NaN where not given
    score: Floats
    attribute: npt.NDArray[np.str_]

    def only(self, rows: Any) -> _Boxes:
        return _Boxes(*(value[rows] for value in vars(self).values()))


def nuscenes_style(
    ground_truth: Sequence[Mapping[str, Any]], predictions: Sequence[Mapping[str, Any]], *,
    classes: Sequence[str] | None = None, distances: Sequence[float] = (0.5, 1.0, 2.0, 4.0), tp_distance: float = 2.0,
    max_range: float | Mapping[str, float] | None = None, min_recall: float = 0.1, min_precision: float = 0.1,
) -> NuscenesResult:  # fmt: skip
    """Mean average precision, the five errors of true positives, and the detection score of nuScenes.

    Detections in falling order of score each take the nearest free object of their class in their frame, where it is
    nearer than the limit in the ground plane. Precision is averaged over recalls above `min_recall`, as far as it is
    above `min_precision`; errors over the recalls from there to the highest that is reached.

    Args:
        ground_truth: for each frame a mapping with `boxes` [N, 7] of x, y, z, dx, dy, dz, heading, or [N, 9] with vx,
            vy behind; `names` [N]; and optionally `attributes` [N], "" where not known, and `num_points` [N]: objects
            with 0 points are left out. Arrays, lists or CPU tensors.
        predictions: the same frames in the same order, with `scores` [N].
        classes: names to evaluate; those of the ground truth by default.
        distances: limits for a match in metres; average precision is the mean over all.
        tp_distance: the one of them at which errors are taken.
        max_range: objects and detections at this distance from the origin or further are left out; one for all
            classes, or one for each.
        min_recall, min_precision: as above.

    Raises:
        ValueError, TypeError: a frame with a field missing, of a wrong shape or not finite (velocities may be NaN, for
            not known), or arguments that make no sense.

    >>> car = {"boxes": [[10.0, 0, 0, 4, 2, 1.5, 0, 1, 0]], "names": ["car"], "attributes": ["moving"]}
    >>> result = nuscenes_style([car], [{**car, "scores": [0.9]}])
    >>> round(result.mean_ap, 6), result.mean_errors["velocity"], round(result.nds, 6)
    (1.0, 0.0, 1.0)
    """
    limits = tuple(float(d) for d in distances)
    if not limits or not all(d > 0 for d in limits) or tp_distance not in limits:
        raise ValueError(f"distances must be positive and contain tp_distance, {tp_distance}, got {list(distances)}")
    for argument, value in (("min_recall", min_recall), ("min_precision", min_precision)):
        if not 0 <= value < 1:
            raise ValueError(f"{argument} must be at least 0 and less than 1, got {value}")
    if len(ground_truth) != len(predictions):
        raise ValueError(f"predictions must have {len(ground_truth)} frames as ground_truth, got {len(predictions)}")
    truth, found = _joined("ground_truth", ground_truth, False), _joined("predictions", predictions, True)
    chosen = tuple(classes) if classes is not None else tuple(np.unique(truth.name).tolist())
    if not chosen:
        raise ValueError("classes: none given, and no objects in ground_truth")
    curves = []
    for name in chosen:
        reach = max_range.get(name) if isinstance(max_range, Mapping) else max_range
        curves.append(
            _evaluated(
                _of_class(truth, name, reach), _of_class(found, name, reach), len(ground_truth), limits,
                limits.index(tp_distance), name, min_recall,
            )
        )  # fmt: skip
    precision = np.stack([c[0] for c in curves])
    above = np.maximum(precision[..., _first(min_recall) :] - min_precision, 0)
    return NuscenesResult(
        chosen, limits, above.mean(-1) / (1 - min_precision), np.stack([c[1] for c in curves]), precision,
        np.array([c[2] for c in curves], np.int64),
    )  # fmt: skip


def _first(min_recall: float) -> int:
    """The first recall above the smallest that counts."""
    return round(100 * min_recall) + 1


def _joined(argument: str, frames: Sequence[Mapping[str, Any]], scored: bool) -> _Boxes:
    parts = [_frame(f"{argument}[{i}]", i, frame, scored) for i, frame in enumerate(frames)]
    parts.append(_frame(argument, 0, {"boxes": np.zeros((0, 9)), "names": [], "scores": []}, scored))
    return _Boxes(*(np.concatenate([vars(p)[key] for p in parts]) for key in vars(parts[0])))


def _frame(source: str, index: int, frame: Mapping[str, Any], scored: bool) -> _Boxes:
    for key in ("boxes", "names", *(["scores"] if scored else [])):
        if frame.get(key) is None:
            raise ValueError(f"{source}: {key} is missing")
    names = np.asarray(frame["names"], np.str_).reshape(-1)
    count = len(names)

    def column(key: str, kind: Any) -> Any:
        try:
            values = np.asarray(frame[key], kind)
        except (TypeError, ValueError):
            raise ValueError(f"{source}: {key} must be numbers") from None
        if values.shape != (count,):
            raise ValueError(f"{source}: {key} must have shape {[count]} as names, got {list(values.shape)}")
        return values

    try:
        boxes = np.asarray(frame["boxes"], np.float64)
    except (TypeError, ValueError):
        raise ValueError(f"{source}: boxes must be numbers") from None
    if boxes.size == 0 and count == 0:
        boxes = np.zeros((0, 9))
    if boxes.ndim != 2 or boxes.shape[0] != count or boxes.shape[1] not in (7, 9):
        raise ValueError(f"{source}: boxes must have shape [{count}, 7] or [{count}, 9], got {list(boxes.shape)}")
    if not np.isfinite(boxes[:, :7]).all() or np.isinf(boxes).any():
        row = int(np.flatnonzero(~np.isfinite(boxes[:, :7]).all(1) | np.isinf(boxes).any(1))[0])
        raise ValueError(f"{source}: box {row} must be finite, got {boxes[row].tolist()}")
    if boxes.shape[1] == 7:
        boxes = np.column_stack([boxes, np.full((count, 2), np.nan)])
    scores = column("scores", np.float64) if scored else np.zeros(count)
    if not np.isfinite(scores).all():
        raise ValueError(f"{source}: scores must be finite")
    attributes = column("attributes", np.str_) if frame.get("attributes") is not None else np.full(count, "")
    found = _Boxes(np.full(count, index), names, boxes, scores, attributes)
    if not scored and frame.get("num_points") is not None:
        return found.only(column("num_points", np.int64) > 0)
    return found


def _of_class(boxes: _Boxes, name: str, reach: float | None) -> _Boxes:
    rows = boxes.name == name
    if reach is not None:
        rows &= np.hypot(boxes.boxes[:, 0], boxes.boxes[:, 1]) < reach
    return boxes.only(rows)


def _evaluated(
    truth: _Boxes, found: _Boxes, frames: int, limits: tuple[float, ...], at: int, name: str, min_recall: float
) -> tuple[Floats, Floats, int]:
    """Precision [D, 101], errors [5] and the number of objects of one class."""
    count = len(truth.frame)
    precision = np.zeros((len(limits), len(RECALLS)))
    errors = np.where([e in UNDEFINED.get(name, ()) for e in ERRORS], np.nan, 1.0)
    # falling score; of equal ones the later first, as in nuScenes' own program
    found = found.only(np.lexsort((np.arange(len(found.score)), found.score))[::-1])
    matches = _matches(truth, found, frames, limits)
    for k in range(len(limits)):
        hit = matches[k] >= 0
        if not hit.any():
            continue
        right, wrong = np.cumsum(hit), np.cumsum(~hit)
        recall = right / count
        precision[k] = np.interp(RECALLS, recall, right / (right + wrong), right=0)
        if k == at:
            confidence = np.interp(RECALLS, recall, found.score, right=0)
            errors = _errors(truth.only(matches[k][hit]), found.only(hit), confidence, name, min_recall)
    return precision, errors, count


def _matches(truth: _Boxes, found: _Boxes, frames: int, limits: tuple[float, ...]) -> Ints:
    """The object that each detection finds at each limit, or -1, [D, M]."""
    order = np.argsort(found.frame, kind="stable")
    matches = np.full((len(limits), len(order)), -1, np.int64)
    offsets = [np.searchsorted(f, np.arange(frames + 1)).astype(np.int64) for f in (truth.frame, found.frame[order])]
    centers = [np.ascontiguousarray(b[:, :2]) for b in (truth.boxes, found.boxes[order])]
    run(
        cpu.match_centers, frames, 1000, np.array(limits), offsets[0], centers[0], offsets[1], centers[1], matches
    )  # fmt: skip
    back = np.empty_like(matches)
    back[:, order] = matches
    return back


def _errors(truth: _Boxes, found: _Boxes, confidence: Floats, name: str, min_recall: float) -> Floats:
    """Mean errors [5] of matched pairs, in falling order of score, over the recalls that count."""
    a, b = truth.boxes, found.boxes
    shared = np.minimum(a[:, 3:6], b[:, 3:6]).prod(1)
    period = np.pi if name in HALF_TURN else 2 * np.pi
    turn = np.abs((a[:, 6] - b[:, 6] + period / 2) % period - period / 2)
    right = np.where(truth.attribute == "", np.nan, truth.attribute == found.attribute)
    each = (
        np.hypot(*(a[:, :2] - b[:, :2]).T), 1 - shared / (a[:, 3:6].prod(1) + b[:, 3:6].prod(1) - shared), turn,
        np.hypot(*(a[:, 7:] - b[:, 7:]).T), 1 - right,
    )  # fmt: skip
    reached = np.flatnonzero(confidence)
    first, last = _first(min_recall), int(reached[-1]) if len(reached) else 0
    means = np.ones(len(ERRORS))
    for i, (error, values) in enumerate(zip(ERRORS, each, strict=True)):
        if error in UNDEFINED.get(name, ()):
            means[i] = np.nan
        elif first <= last and not np.isnan(values).all():
            # the mean so far at each score, read at the scores of the recalls
            so_far = _running_mean(values)
            at_recall = np.interp(confidence[::-1], found.score[::-1], so_far[::-1])[::-1]
            means[i] = at_recall[first : last + 1].mean()
    return means


def _running_mean(values: Floats) -> Floats:
    """The mean of all values up to each, without NaN; 0 before the first."""
    known = ~np.isnan(values)
    counts = np.cumsum(known)
    means = np.zeros(len(values))
    np.divide(np.cumsum(np.where(known, values, 0)), counts, out=means, where=counts > 0)
    return means
