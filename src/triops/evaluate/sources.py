"""What is evaluated: frames of ground truth and predictions, from folders, mappings or sequences, and what is wrong."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from triops.data.files import reason
from triops.data.kitti_labels import Floats, LabelError, Labels, from_annotation, parse_labels, read_labels
from triops.evaluate.pickled import paired

Frame = Labels | Mapping[str, Any]
Source = str | os.PathLike[str] | Mapping[str, Frame] | Sequence[Frame]
Ints = npt.NDArray[np.int64]

LABEL_FOLDERS = ("label_2", "training/label_2")


class BadFrame(ValueError):
    """A frame that cannot be evaluated as it is; raised where the call asks to be strict."""


class Objects(NamedTuple):
    """The objects of all frames, one after another. Those of frame `f` are rows `offsets[f]` to `offsets[f + 1]`."""

    offsets: Ints
    name: npt.NDArray[np.str_]  # lower case
    truncated: Floats
    occluded: Ints
    alpha: Floats
    bbox: Floats
    dimensions: Floats
    location: Floats
    rotation_y: Floats
    score: Floats

    def frame_of(self) -> Ints:
        return np.repeat(np.arange(len(self.offsets) - 1), np.diff(self.offsets))


@dataclass
class Loaded:
    """Frames with ground truth and predictions, and a line for each that has neither or is empty."""

    steps: int  # one per frame asked for, and one for all that follows
    frames: list[str] = field(default_factory=list)
    ground_truth: list[Labels] = field(default_factory=list)
    predictions: list[Labels] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)


def load(
    ground_truth: Source, predictions: Source, frames: Iterable[str] | None, strict: bool,
    progress: Callable[[str, int], None],
) -> Loaded:  # fmt: skip
    """Every frame of the ground truth with its predictions.

    A frame that cannot be read is left out. One without predictions stays, as one in which nothing was detected: left
    out, it would make the figures better than they are.
    """
    ground_truth, predictions = paired(ground_truth, predictions)
    truth, found = _opened("ground_truth", ground_truth), _opened("predictions", predictions)
    if _is_list(ground_truth) != _is_list(predictions):
        raise ValueError("ground_truth and predictions must both name their frames (a folder, a mapping), or neither")
    if _is_list(ground_truth) and len(truth) != len(found):
        raise ValueError(f"predictions must have as many frames as ground_truth, {len(truth)}, got {len(found)}")
    chosen = list(truth) if frames is None else list(dict.fromkeys(frames))
    if not chosen:
        raise ValueError("no frames to evaluate")
    loaded = Loaded(len(chosen) + 1)

    def problem(text: str) -> None:
        if strict:
            raise BadFrame(text)
        loaded.problems.append(text)

    empty: dict[str, list[str]] = {"ground truth": [], "predictions": []}
    for frame in chosen:
        progress("reading", loaded.steps)
        if frame not in truth:
            problem(f"{frame}: no ground truth; left out")
            continue
        try:
            objects = truth[frame](None)
            detections = found[frame](True) if frame in found else parse_labels("", scored=True)
        except (LabelError, OSError) as error:
            problem(f"{reason(error) if isinstance(error, OSError) else error}; frame left out")
            continue
        if frame not in found:
            problem(f"{frame}: no predictions; counted as a frame without detections")
        elif not len(detections):
            empty["predictions"].append(frame)
        if not len(objects):
            empty["ground truth"].append(frame)
        loaded.frames.append(frame)
        loaded.ground_truth.append(objects)
        loaded.predictions.append(detections)
    if frames is None:
        for frame in found:
            if frame not in truth:
                problem(f"{frame}: predictions without ground truth; left out")
    for what, names in empty.items():
        if names:
            more = f" and {len(names) - 3:,} more" if len(names) > 3 else ""
            count = f"{len(names):,} {'frame' if len(names) == 1 else 'frames'}"
            loaded.remarks.append(f"{count} with empty {what}: {', '.join(names[:3])}{more}")
    return loaded


def _is_list(source: object) -> bool:
    return isinstance(source, Sequence) and not isinstance(source, str)


def _opened(argument: str, source: Source) -> dict[str, Callable[[bool | None], Labels]]:
    """From the name of each frame to what reads it."""
    if isinstance(source, str | os.PathLike):
        files = label_files(source)
        if not files:
            raise ValueError(f"{argument}: {os.fspath(source)} has no label files (*.txt)")
        return {name: _file_reader(path) for name, path in files.items()}
    if isinstance(source, Mapping):
        items: Iterable[tuple[str, Any]] = source.items()
    elif isinstance(source, Sequence):
        items = ((str(i), frame) for i, frame in enumerate(source))
    else:
        raise TypeError(
            f"{argument} must be a folder, or a sequence or mapping of annotation dicts, got {type(source).__name__}"
        )
    return {name: _annotation_reader(argument, name, frame) for name, frame in items}


def label_files(folder: str | os.PathLike[str]) -> dict[str, Path]:
    """The label files of a folder, by the names of their frames; `label_2` may be a folder in it."""
    path = Path(folder)
    if not path.is_dir():
        raise ValueError(f"{path} is no folder")
    for inner in (path, *(path / name for name in LABEL_FOLDERS)):
        files = sorted(inner.glob("*.txt"))
        if files:
            return {file.stem: file for file in files}
    return {}


def _file_reader(path: Path) -> Callable[[bool | None], Labels]:
    return lambda scored: read_labels(path, scored)


def _annotation_reader(argument: str, name: str, frame: Any) -> Callable[[bool | None], Labels]:
    def read(scored: bool | None) -> Labels:
        source = f"{argument}, frame {name}"
        if isinstance(frame, Labels):
            return from_annotation(frame.annotation(), source, scored)
        if not isinstance(frame, Mapping):
            raise TypeError(f"{source} must be an annotation dict or Labels, got {type(frame).__name__}")
        return from_annotation(frame, source, scored)

    return read


def concatenated(frames: Sequence[Labels]) -> Objects:
    """All frames as one. Ground truth, which has no scores, gets zeros."""
    counts = np.array([len(f) for f in frames], np.int64)
    total = int(counts.sum())

    def joined(key: str, *columns: int) -> Any:
        parts = [getattr(f, key) for f in frames if len(f)]
        return np.concatenate(parts) if parts else np.zeros((0, *columns))

    scores = [np.zeros(len(f)) if f.score is None else f.score for f in frames]
    return Objects(
        np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
        np.char.lower(joined("name").astype(np.str_)), joined("truncated"), joined("occluded").astype(np.int64),
        joined("alpha"), joined("bbox", 4), joined("dimensions", 3), joined("location", 3), joined("rotation_y"),
        np.concatenate(scores) if total else np.zeros(0),
    )  # fmt: skip
