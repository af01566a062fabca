"""Ground-truth databases: the points of every box in files of their own, with a record of each box.

The layouts are those of mmdetection3d 1.4 and OpenPCDet, which paste these objects into other frames in training.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from triops.data import cpu, files
from triops.data.files import Data
from triops.data.frames import Frame, FrameRef, check_points
from triops.data.job import Job, JobError, source_settings
from triops.data.pickles import dump_pickle

Z_ORIGIN = {"mmdet3d": "bottom", "pcdet": "center"}


@dataclass(frozen=True)
class GtDatabase(Job):
    """A ground-truth database of some sources, in the layout of "mmdet3d" or "pcdet".

    A file holds the points of a box less its centre (mmdet3d: the middle of its bottom), not turned, all features. A
    point in several boxes belongs to each of them.

    Attributes:
        layout: "mmdet3d" or "pcdet".
        classes: that go into the database; all if empty.
    """

    layout: str = "mmdet3d"
    classes: tuple[str, ...] = ()

    @property
    def _prefix(self) -> str:
        return self.sources[0].dataset

    @property
    def _split(self) -> str:
        return self.sources[0].split

    @property
    def database(self) -> str:
        """Folder of the points below `out`."""
        if self.layout == "mmdet3d":
            return f"{self._prefix}_gt_database"
        return "gt_database" if self._split == "train" else f"gt_database_{self._split}"

    @property
    def info_file(self) -> str:
        """File of the records below `out`."""
        return f"{self._prefix}_dbinfos_{self._split}.pkl"

    @property
    def place(self) -> str:
        return f".{self.info_file.removesuffix('.pkl')}"

    @property
    def folders(self) -> Sequence[str]:
        return (self.database,)

    def settings(self) -> dict[str, object]:
        return {
            "job": "gtdb", "record": 2, "layout": self.layout, "classes": list(self.classes),
            "sources": [source_settings(source) for source in self.sources],
        }  # fmt: skip

    def compute(self, ref: FrameRef, frame: Frame) -> Iterable[tuple[str, Data]]:
        origin = Z_ORIGIN[self.layout]
        wanted = [i for i, name in enumerate(frame.names) if not self.classes or name in self.classes]
        boxes = frame.boxes_from(origin)[wanted]
        parts = points_of_boxes(frame.points, boxes, origin, frame.source)
        database, sample = self.database, self._sample(ref)
        for i, part in zip(wanted, parts, strict=True):
            yield f"{database}/{_file(sample, frame.names[i], i)}", part.data.cast("B") if part.size else b""
        record: dict[str, Any] = {
            "gt_idx": wanted,
            "name": [frame.names[i] for i in wanted],
            "points": [len(part) for part in parts],
            "difficulty": [frame.difficulty[i] for i in wanted],
            "box": _to_text(boxes),
        }
        if frame.bbox is not None:
            record["bbox"] = _to_text(frame.bbox[wanted])
        if frame.score is not None:
            record["score"] = [frame.score[i] for i in wanted]
        yield f"{self.place}/{ref.key}.json", json.dumps(record).encode()

    def done(self, refs: Sequence[FrameRef]) -> set[str]:
        """Frames whose record and all of whose points are there."""
        records = files.names(files.join(self.out, self.place))
        points = files.names(files.join(self.out, self.database))
        recorded = (ref for ref in refs if f"{ref.key}.json" in records)
        return {ref.key for ref in recorded if all(entry["file"] in points for entry in self._record(ref))}

    def finish(self, refs: Sequence[FrameRef]) -> str:
        """Write the info file, in the order of the frames."""
        infos: dict[str, list[dict[str, Any]]] = {}
        count = 0
        for ref in refs:
            for entry in self._record(ref):
                infos.setdefault(entry["name"], []).append(self._info(ref, entry, count))
                count += 1
        self._write(self.info_file, dump_pickle(infos))
        classes = ", ".join(f"{len(found):,} {name}" for name, found in infos.items())
        return f"{files.join(self.out, self.info_file)}: {classes or 'no objects'}"

    def _info(self, ref: FrameRef, entry: dict[str, Any], number: int) -> dict[str, Any]:
        """The record of a box, with the keys that the library has."""
        info: dict[str, Any] = {
            "name": entry["name"],
            "path": f"{self.database}/{entry['file']}",
            "image_idx": self._sample(ref),
            "gt_idx": entry["gt_idx"],
            "box3d_lidar": entry["box"],
            "num_points_in_gt": entry["points"],
            "difficulty": entry["difficulty"],
        }
        if self.layout == "mmdet3d":
            return {**info, "group_id": number}
        if "bbox" in entry:
            info["bbox"] = entry["bbox"]
        return {**info, "score": entry.get("score", -1.0)}

    def _sample(self, ref: FrameRef) -> int | str:
        return ref.sample if self.layout == "mmdet3d" else ref.key

    def _record(self, ref: FrameRef) -> list[dict[str, Any]]:
        """What `compute` recorded of a frame, box by box."""
        path = files.join(self.out, self.place, f"{ref.key}.json")
        try:
            columns: dict[str, Any] = json.loads(files.read(path))
            count = len(columns["gt_idx"])
            for name in ("box", "bbox"):
                if name in columns:
                    columns[name] = _from_text(columns[name], count)
            sample = self._sample(ref)
            entries = zip(columns["name"], columns["gt_idx"], strict=True)
            columns["file"] = [_file(sample, name, number) for name, number in entries]
            return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
        except (ValueError, KeyError, TypeError, AttributeError):
            raise JobError(f"{path} is damaged. Remedy: remove it, and the frame is done again") from None


def _file(sample: int | str, name: str, number: int) -> str:
    return f"{sample}_{name}_{number}.bin"


def _to_text(values: npt.NDArray[np.float32]) -> str:
    """The bits of float32 numbers: far shorter to write and to read than their digits.

    >>> _from_text(_to_text(np.array([[0.1, 2]], np.float32)), 1)
    array([[0.1, 2. ]], dtype=float32)
    """
    return values.astype("<f4", copy=False).tobytes().hex()


def _from_text(text: str, rows: int) -> npt.NDArray[np.float32]:
    return np.frombuffer(bytes.fromhex(text), "<f4").astype(np.float32).reshape(rows, -1 if rows else 0)


def points_of_boxes(
    points: npt.NDArray[np.float32], boxes: npt.NDArray[np.float32], z_origin: str, source: str = "points"
) -> list[npt.NDArray[np.float32]]:
    """The points [K, C] in each box, in their order, less the first three fields of the box.

    Args:
        points: float32 [N, C], x, y and z first.
        boxes: float32 [T, 7 or more].
        z_origin: as in `triops.points_in_boxes`.
        source: where the points are from, for messages.

    Raises:
        FrameError: a coordinate of a point is infinite or NaN.

    >>> points = np.array([[1, 0, 0, 9], [5, 0, 0, 9]], np.float32)
    >>> [p.tolist() for p in points_of_boxes(points, np.array([[2, 0, 0, 4, 2, 2, 0]], np.float32), "center")]
    [[[-1.0, 0.0, 0.0, 9.0]]]
    """
    if len(boxes) == 0:
        check_points(points, source)
        return []
    fields = np.ascontiguousarray(boxes[:, :7])
    rows, ends, finite = cpu.rows_of_boxes(np.ascontiguousarray(points), fields, z_origin == "bottom")
    if not finite:
        check_points(points, source)
    found, begin = [], 0
    for end in ends.tolist():
        found.append(rows[begin:end])
        begin = end
    return found
