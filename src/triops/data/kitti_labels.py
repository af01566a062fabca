"""KITTI's label files: one object per line, its type and 14 numbers, 15 with a score.

Fields are kept in the order and the camera frame of the annotation dicts of mmdetection3d and OpenPCDet: a box is
`(length, height, width)`, while a line says height, width, length.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

FIELDS = (
    "type", "truncated", "occluded", "alpha", "left", "top", "right", "bottom", "height", "width", "length", "x", "y",
    "z", "rotation_y", "score",
)  # fmt: skip
COLUMNS = len(FIELDS) - 1  # of a line without a score


class LabelError(ValueError):
    """A label file that cannot be read. The message names the file, the line and the field."""


@dataclass(frozen=True, eq=False)
class Labels:
    """The objects of one frame.

    Attributes:
        name [N]: type of each object, such as "Car" or "DontCare".
        truncated [N]: from 0 to 1; -1 where it is not known.
        occluded [N]: 0 visible, 1 partly, 2 largely, 3 unknown; -1 where it is not known. int64, the others float64.
        alpha [N]: observation angle; -10 where it is not known.
        bbox [N, 4]: left, top, right and bottom in the image.
        dimensions [N, 3]: length, height and width.
        location [N, 3]: x, y and z of the middle of the bottom, in the camera's frame.
        rotation_y [N]: around the camera's y axis; 0 looks along x.
        score [N]: of predictions; None for ground truth.
    """

    name: npt.NDArray[np.str_]
    truncated: Floats
    occluded: npt.NDArray[np.int64]
    alpha: Floats
    bbox: Floats
    dimensions: Floats
    location: Floats
    rotation_y: Floats
    score: Floats | None = None

    def __len__(self) -> int:
        return len(self.name)

    def annotation(self) -> dict[str, Any]:
        """The annotation dict that mmdetection3d's and OpenPCDet's evaluations read."""
        fields: dict[str, Any] = {k: v for k, v in vars(self).items() if k != "score"}
        return fields if self.score is None else {**fields, "score": self.score}


def parse_labels(text: str, source: str = "labels", scored: bool | None = None) -> Labels:
    """The objects of a label file's text; empty text has none.

    Args:
        text: lines of 15 fields, or 16 with a score. Empty lines are skipped.
        source: what messages call it.
        scored: True asks for a score on every line, False for none; None takes either, the same on all lines.

    Raises:
        LabelError: a line with too few or too many fields, or one that is not a finite number where there must be one.

    >>> line = "Car 0.00 1 -1.57 600.0 150.0 650.0 200.0 1.5 1.6 3.9 1.0 1.7 20.0 -1.52"
    >>> labels = parse_labels(line)
    >>> str(labels.name[0]), int(labels.occluded[0]), labels.dimensions.tolist(), labels.score
    ('Car', 1, [[3.9, 1.5, 1.6]], None)
    >>> parse_labels("Car 0.00 1 -1.57", "000007.txt")
    Traceback (most recent call last):
    triops.data.kitti_labels.LabelError: 000007.txt, line 1: 4 fields, expected 15, or 16 with a score
    """
    rows = [line.split() for line in text.splitlines()]
    filled = [row for row in rows if row]
    columns = len(filled[0]) if filled else COLUMNS + (scored is True)
    wanted = (COLUMNS, COLUMNS + 1) if scored is None else (COLUMNS + scored,)
    if columns not in wanted or any(len(row) != columns for row in filled):
        raise LabelError(f"{source}, {_wrong_count(rows, wanted)}")
    try:
        numbers = np.array([[float(value) for value in row[1:]] for row in filled], np.float64)
    except ValueError:
        raise LabelError(f"{source}, {_wrong_number(rows)}") from None
    numbers = numbers.reshape(len(filled), columns - 1)
    occluded = numbers[:, 1]
    odd = "_" in text or not text.isascii()  # float() takes "1_0" and digits of other scripts
    suspect = odd or not np.isfinite(numbers).all() or not _are_levels(occluded)
    if suspect and (wrong := _wrong_number(rows)):
        raise LabelError(f"{source}, {wrong}")
    return Labels(
        np.array([row[0] for row in filled], np.str_), numbers[:, 0], occluded.astype(np.int64), numbers[:, 2],
        numbers[:, 3:7], numbers[:, [9, 7, 8]], numbers[:, 10:13], numbers[:, 13],
        numbers[:, 14] if columns > COLUMNS else None,
    )  # fmt: skip


def _wrong_count(rows: Sequence[Sequence[str]], wanted: Sequence[int]) -> str:
    expected = "15, or 16 with a score" if len(wanted) == 2 else "15" if COLUMNS in wanted else "16, the last a score"
    first = 0
    for number, row in enumerate(rows, 1):
        if not row:
            continue
        if len(row) not in wanted:
            return f"line {number}: {len(row)} fields, expected {expected}"
        first = first or len(row)
        if len(row) != first:
            return f"line {number}: {len(row)} fields, while the lines before have {first}"
    raise AssertionError("no line has a wrong number of fields")


def _are_levels(occluded: Floats) -> bool:
    """Whether all are whole numbers, -1 to 3 in KITTI; others may have a few more."""
    return bool(((occluded == np.floor(occluded)) & (np.abs(occluded) < 100)).all())


def _wrong_number(rows: Sequence[Sequence[str]]) -> str:
    """What is wrong in the first line that has anything wrong; empty where every field is a number."""
    for number, row in enumerate(rows, 1):
        for field, value in zip(FIELDS[1:], row[1:], strict=False):
            try:
                parsed = float(value) if value.isascii() and "_" not in value else None
            except ValueError:
                parsed = None
            if parsed is None:
                return f"line {number}: {field} must be a number, got {value[:40]!r}"
            if not math.isfinite(parsed):
                return f"line {number}: {field} must be finite, got {value}"
            if field == "occluded" and not _are_levels(np.array(parsed)):
                return f"line {number}: occluded must be a small whole number, got {value}"
    return ""


def read_labels(path: str | os.PathLike[str], scored: bool | None = None) -> Labels:
    """The objects of a label file. See `parse_labels`.

    Raises:
        LabelError: the file is malformed or no text.
        OSError: it cannot be read.
    """
    try:
        text = Path(path).read_text(encoding="utf-8-sig")  # as Windows' editors write it
    except UnicodeDecodeError as error:
        raise LabelError(f"{os.fspath(path)}: not a text file (byte {error.start})") from None
    return parse_labels(text, os.fspath(path), scored)


def format_labels(labels: Labels) -> str:
    """The text of a label file: numbers with two digits behind the point, as KITTI's own; scores with four.

    >>> line = "Car 0.00 1 -1.57 600.00 150.00 650.00 200.00 1.50 1.60 3.90 1.00 1.70 20.00 -1.52\\n"
    >>> format_labels(parse_labels(line)) == line
    True
    """
    lines = []
    for i, name in enumerate(labels.name):
        length, height, width = labels.dimensions[i]
        numbers = [labels.alpha[i], *labels.bbox[i], height, width, length, *labels.location[i], labels.rotation_y[i]]
        tail = "" if labels.score is None else f" {labels.score[i]:.4f}"
        shown = " ".join(f"{value:.2f}" for value in numbers)
        lines.append(f"{name} {labels.truncated[i]:.2f} {labels.occluded[i]} {shown}{tail}\n")
    return "".join(lines)


def write_labels(path: str | os.PathLike[str], labels: Labels) -> None:
    """Write a label file whole or not at all: under a temporary name first, which is then renamed."""
    temporary = Path(f"{os.fspath(path)}.{os.getpid()}.tmp")
    temporary.write_text(format_labels(labels), encoding="utf-8")
    temporary.replace(path)


def from_annotation(annotation: Mapping[str, Any], source: str = "annotation", scored: bool | None = None) -> Labels:
    """The objects of an annotation dict of mmdetection3d or OpenPCDet: the fields of `Labels`, as arrays or lists.

    Args:
        annotation: other keys than the fields of `Labels` are left alone. `truncated` and `occluded` may be missing,
            as they are in some predictions.
        source: what messages call it.
        scored: True asks for a `score`, False ignores one; None takes it where there is one.

    Raises:
        LabelError: a field is missing, of another length than `name`, not a number or not finite.

    >>> from_annotation({"name": ["Car"], "bbox": [[0, 0, 9]]}, "frame 7")
    Traceback (most recent call last):
    triops.data.kitti_labels.LabelError: frame 7: alpha is missing
    """
    if annotation.get("name") is None:
        raise LabelError(f"{source}: name is missing")
    names = np.asarray(annotation["name"], np.str_).reshape(-1)
    count = len(names)

    def field(key: str, *columns: int) -> Floats:
        value = annotation.get(key)
        if value is None and key in ("truncated", "occluded"):
            return np.full(count, -1.0)
        if value is None:
            raise LabelError(f"{source}: {key} is missing")
        try:
            found = np.asarray(value, np.float64)
        except (TypeError, ValueError):
            raise LabelError(f"{source}: {key} must be numbers") from None
        if count == 0 and found.size == 0:
            return np.zeros((0, *columns))
        if found.shape != (count, *columns):
            raise LabelError(f"{source}: {key} must have shape {[count, *columns]}, got {list(found.shape)}")
        if not np.isfinite(found).all():
            row = int(np.flatnonzero(~np.isfinite(found).reshape(count, -1).all(1))[0])
            raise LabelError(f"{source}: {key} of object {row} must be finite, got {found[row].tolist()}")
        return found

    score = field("score") if scored or (scored is None and annotation.get("score") is not None) else None
    alpha, bbox, dimensions, occluded = field("alpha"), field("bbox", 4), field("dimensions", 3), field("occluded")
    if not _are_levels(occluded):
        raise LabelError(f"{source}: occluded must be small whole numbers, got {occluded.tolist()}")
    return Labels(
        names, field("truncated"), occluded.astype(np.int64), alpha, bbox, dimensions, field("location", 3),
        field("rotation_y"), score,
    )  # fmt: skip
