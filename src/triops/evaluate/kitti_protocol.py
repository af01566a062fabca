"""KITTI's object detection protocol: average precision in the image, from above, in space, and of orientation."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from triops._cpu.threads import run
from triops.data.kitti_labels import Floats
from triops.evaluate import cpu
from triops.evaluate.overlaps import KINDS, candidates, covered_by_dont_care
from triops.evaluate.sources import Ints, Objects, Source, concatenated, load

DIFFICULTIES = ("easy", "moderate", "hard")
MIN_HEIGHT = (40, 25, 25)  # pixels
MAX_OCCLUSION = (0, 1, 2)
MAX_TRUNCATION = (0.15, 0.3, 0.5)

# Strict and loose smallest overlaps. Those of the image are the strict ones in both sets.
OVERLAP_SETS = ("strict", "loose")
OVERLAPS = {
    "Car": (0.7, 0.5), "Pedestrian": (0.5, 0.25), "Cyclist": (0.5, 0.25), "Van": (0.7, 0.5),
    "Person_sitting": (0.5, 0.25), "Truck": (0.7, 0.5),
}  # fmt: skip
NEIGHBORS = {"car": "van", "pedestrian": "person_sitting"}  # to find one of these is neither right nor wrong

METRICS = (*KINDS, "AOS")
POINTS = (40, 11)
NO_ALPHA = -10


@dataclass(frozen=True, eq=False)
class KittiResult:
    """Average precision in percent, and the curves behind it.

    Axes are class (as in `classes`), metric ("2D", "BEV", "3D", "AOS"), overlap set ("strict", "loose") and difficulty
    ("easy", "moderate", "hard").

    Attributes:
        r40 [C, 4, 2, 3]: average precision at 40 recall positions. AOS is NaN where either side has no observation
            angles.
        r11 [C, 4, 2, 3]: the same at 11.
        precision [C, 4, 2, 3, 41]: precision, or for AOS the orientation similarity, at recalls 0, 1/40, ... 1; 0 where
            the recall is not reached. Each value is the largest from there on.
        recall [C, 4, 2, 3, 41]: the recall at the score of each of these samples.
        objects [C, 3]: objects that count, per class and difficulty. Without any, average precision is 0.
        min_overlaps [C, 4, 2]: the smallest overlap for a match.
        frames: how many frames were evaluated.
        problems: a line for each frame that was left out or had no predictions.
        remarks: what else is worth knowing, such as empty frames.
    """

    classes: tuple[str, ...]
    r40: Floats
    r11: Floats
    precision: Floats
    recall: Floats
    objects: Ints
    min_overlaps: Floats
    frames: int
    problems: tuple[str, ...] = ()
    remarks: tuple[str, ...] = ()

    def ap(
        self, class_name: str, metric: str = "3D", difficulty: str = "moderate", overlap: str = "strict",
        points: int = 40,
    ) -> float:  # fmt: skip
        """One average precision in percent."""
        where = []
        for argument, value, known in (
            ("class_name", class_name, self.classes), ("metric", metric, METRICS), ("overlap", overlap, OVERLAP_SETS),
            ("difficulty", difficulty, DIFFICULTIES), ("points", points, POINTS),
        ):  # fmt: skip
            if value not in known:
                raise ValueError(f"{argument} must be one of {', '.join(map(str, known))}, got {value}")
            where.append(tuple(known).index(value))
        return float((self.r40, self.r11)[where.pop()][tuple(where)])

    def as_json(self) -> dict[str, Any]:
        """Everything, as plain containers; NaN as None."""
        classes: dict[str, Any] = {}
        for c, name in enumerate(self.classes):
            sets: dict[str, Any] = {}
            for s, overlap in enumerate(OVERLAP_SETS):
                sets[overlap] = {
                    "min_overlap": dict(zip(METRICS, self.min_overlaps[c, :, s].tolist(), strict=True)),
                    "R40": _table(self.r40[c, :, s]), "R11": _table(self.r11[c, :, s]),
                    "precision": _table(self.precision[c, :, s]), "recall": _table(self.recall[c, :, s]),
                }  # fmt: skip
            objects = dict(zip(DIFFICULTIES, self.objects[c].tolist(), strict=True))
            classes[name] = {"objects": objects, **sets}
        return {
            "protocol": "KITTI", "frames": self.frames, "classes": classes, "problems": list(self.problems),
            "remarks": list(self.remarks),
        }  # fmt: skip


def _table(values: Floats) -> dict[str, Any]:
    def plain(value: Any) -> Any:
        if isinstance(value, list):
            return [plain(v) for v in value]
        return None if np.isnan(value) else value

    return {
        metric: {difficulty: plain(values[m, d].tolist()) for d, difficulty in enumerate(DIFFICULTIES)}
        for m, metric in enumerate(METRICS)
    }


def kitti(
    ground_truth: Source, predictions: Source, *, classes: Sequence[str] = ("Car", "Pedestrian", "Cyclist"),
    overlaps: Mapping[str, tuple[float, float]] | None = None, frames: Iterable[str] | None = None,
    device: str | torch.device = "cpu", strict: bool = False, progress: Callable[[str, int], None] | None = None,
) -> KittiResult:  # fmt: skip
    """Average precision of predictions by KITTI's protocol, of every class, metric, difficulty and overlap at once.

    Args:
        ground_truth: a folder of label files; a pickle, such as an info file of mmdetection3d or OpenPCDet; or, in a
            mapping by frame name or in a sequence, `Labels` or annotation dicts as the two have them: `name, truncated,
            occluded, alpha, bbox, dimensions, location, rotation_y`, in the camera's frame.
        predictions: the same with scores: of the same names, or a sequence in the same order.
        classes: what to evaluate. Names are compared without regard to case.
        overlaps: strict and loose smallest overlap of further classes, or others for the known ones, which are Car, Van
            and Truck 0.7 and 0.5, Pedestrian, Person_sitting and Cyclist 0.5 and 0.25.
        frames: names of the frames to evaluate, such as those of a split; all of the ground truth by default.
        device: where overlaps are computed. Matching is done on CPU, on as many threads as torch is set to.
        strict: raise `BadFrame` for the first frame that is malformed or has no predictions. Otherwise a frame that
            cannot be read is left out, one without predictions counts as one without detections, and both are named
            in the result's `problems`.
        progress: called with what is being done and the number of steps, at the begin of each step.

    Raises:
        ValueError, TypeError: arguments that make no sense, such as a folder without label files.
        BadFrame: see `strict`.

    >>> from triops.data.kitti_labels import parse_labels
    >>> car = "Car 0 0 -1.5 600 150 650 200 1.5 1.6 3.9 1 1.7 20 -1.5"
    >>> result = kitti([parse_labels(car)], [parse_labels(car + " 0.9")])
    >>> result.ap("Car", "3D", "easy", points=11)
    9.090909090909092

    One object gives one sample of the curve, at recall 0: an eleventh of 100.
    """
    names = tuple(classes)
    sets = {**OVERLAPS, **(overlaps or {})}
    if not names or isinstance(classes, str):
        raise ValueError(f"classes must be a sequence of names, got {classes!r}")
    if unknown := [name for name in names if name not in sets]:
        raise ValueError(f"overlaps: none known for {', '.join(unknown)}; known are {', '.join(sets)}")
    for name in names:
        if len(sets[name]) != 2 or not all(0 < limit < 1 for limit in sets[name]):
            raise ValueError(f"overlaps must be two numbers between 0 and 1 per class, got {name}: {sets[name]}")
    limits = np.array([sets[name] for name in names], np.float64)
    chosen = torch.device(device)
    say = progress or (lambda what, total: None)
    loaded = load(ground_truth, predictions, frames, strict, say)
    say("matching", loaded.steps)
    truth, found = concatenated(loaded.ground_truth), concatenated(loaded.predictions)

    # [C, 4, 2]: AOS goes with the matches of 2D
    min_overlaps = np.stack([limits[:, [0, 0]], limits, limits, limits[:, [0, 0]]], 1)
    counts, objects = _counts(truth, found, names, min_overlaps[:, : len(KINDS)], str(chosen))
    precision, recall = _curves(counts)
    if not ((truth.alpha != NO_ALPHA).any() and (found.alpha != NO_ALPHA).any()):
        precision[:, METRICS.index("AOS")] = np.nan
    return KittiResult(
        names, precision[..., 1:].mean(-1) * 100, precision[..., ::4].mean(-1) * 100, precision, recall, objects,
        min_overlaps, len(loaded.frames), tuple(loaded.problems), tuple(loaded.remarks),
    )  # fmt: skip


def truth_states(truth: Objects, classes: Sequence[str]) -> Any:
    """int8 [C, 3, N]: 0 for an object that counts, 1 for one that may be found or not, -1 for one of no concern."""
    height = truth.bbox[:, 3] - truth.bbox[:, 1]
    states = np.full((len(classes), len(DIFFICULTIES), len(truth.name)), -1, np.int8)
    for c, name in enumerate(classes):
        own = truth.name == name.lower()
        neighbor = truth.name == NEIGHBORS.get(name.lower(), "")
        for d in range(len(DIFFICULTIES)):
            harder = truth.occluded > MAX_OCCLUSION[d]
            harder |= (truth.truncated > MAX_TRUNCATION[d]) | (height <= MIN_HEIGHT[d])
            states[c, d, neighbor | (own & harder)] = 1
            states[c, d, own & ~harder] = 0
    return states


def found_states(found: Objects, classes: Sequence[str]) -> Any:
    """int8 [C, 3, N]: 0 for a detection that counts, 1 for one too small to, -1 for one of another class."""
    height = np.abs(found.bbox[:, 3] - found.bbox[:, 1])
    states = np.full((len(classes), len(DIFFICULTIES), len(found.name)), -1, np.int8)
    for c, name in enumerate(classes):
        for d in range(len(DIFFICULTIES)):
            states[c, d, found.name == name.lower()] = 0
            states[c, d, height < MIN_HEIGHT[d]] = 1  # of whatever class, as in KITTI's own program
    return states


def _counts(
    truth: Objects, found: Objects, classes: Sequence[str], min_overlaps: Floats, device: str
) -> tuple[Floats, Ints]:  # fmt: skip
    """What `cpu.match` counts, [C, kind, set, difficulty, SAMPLES, 4], and the objects that count, [C, difficulty]."""
    lowest = min_overlaps.min((0, 2))
    near = candidates(truth, found, (lowest[0], lowest[1], lowest[2]), device)
    covered = covered_by_dont_care(truth, found, device)
    wanted, had = truth_states(truth, classes), found_states(found, classes)
    shape = (len(classes), len(KINDS), len(OVERLAP_SETS), len(DIFFICULTIES))
    c, kind, s, d = (axis.reshape(-1) for axis in np.indices(shape))
    cells = np.stack([kind, c * len(DIFFICULTIES) + d], 1)
    limits = np.ascontiguousarray(min_overlaps[c, kind, s])
    counts = np.zeros((len(cells), cpu.SAMPLES, 4))
    rows = len(classes) * len(DIFFICULTIES)
    run(
        cpu.match, len(cells), 1, cells, limits, near.starts, near.detection, near.overlap,
        wanted.reshape(rows, -1), had.reshape(rows, -1), np.ascontiguousarray(found.score), covered,
        np.ascontiguousarray(truth.alpha), np.ascontiguousarray(found.alpha), counts,
    )  # fmt: skip
    return counts.reshape(*shape, cpu.SAMPLES, 4), (wanted == 0).sum(-1)


def _curves(counts: Floats) -> tuple[Floats, Floats]:
    """Precision (and orientation similarity) and recall, [C, 4, 2, 3, SAMPLES]; 0 where a curve has ended."""
    hits, wrong, missed, similarity = np.moveaxis(counts, -1, 0)

    def share(part: Floats, whole: Floats) -> Floats:
        return np.divide(part, whole, out=np.zeros_like(part), where=whole > 0)

    precision, recall = share(hits, hits + wrong), share(hits, hits + missed)
    orientation = share(similarity[:, :1], (hits + wrong)[:, :1])
    falling = np.maximum.accumulate(np.concatenate([precision, orientation], 1)[..., ::-1], -1)[..., ::-1]
    return falling, np.concatenate([recall, recall[:, :1]], 1)
