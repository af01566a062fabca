"""Ground-truth databases: the points of every box in files of their own, with a record of each box.

The layouts are those of mmdetection3d 1.4 and OpenPCDet, which paste these objects into other frames in training.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from triops._geometry.box.reference import ZOrigin
from triops.data import cpu, files, records
from triops.data.frames import Frame, FrameRef, check_points
from triops.data.job import Job, JobError, Output, source_settings
from triops.data.pickles import dump_pickle

Z_ORIGIN: dict[str, ZOrigin] = {"mmdet3d": "bottom", "pcdet": "center"}


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
        # Both splits lie below one root, and nuScenes' info files number the frames of each from 0.
        name = "gt_database" if self.layout == "pcdet" else f"{self._prefix}_gt_database"
        return name if self._split == "train" else f"{name}_{self._split}"

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
            "job": "gtdb", "record": 3, "layout": self.layout, "classes": list(self.classes),
            "sources": [source_settings(source) for source in self.sources],
        }  # fmt: skip

    def compute(self, ref: FrameRef, frame: Frame) -> Output:
        origin = Z_ORIGIN[self.layout]
        names, boxes, sample = frame.names, frame.boxes_from(origin), self._sample(ref)
        wanted = [*range(len(names))]
        if self.classes:
            wanted = [i for i in wanted if names[i] in self.classes]
            names, boxes = [names[i] for i in wanted], boxes[wanted]
        rows, ends = _rows_of_boxes(frame.points, boxes, origin, frame.source)
        data, size = rows.data.cast("B") if rows.size else memoryview(b""), rows.itemsize * rows.shape[1]
        parts = [*zip([0, *ends], ends, strict=False)]
        record: dict[str, Any] = {
            "gt_idx": wanted,
            "name": names,
            "points": [end - begin for begin, end in parts],
            "difficulty": [frame.difficulty[i] for i in wanted],
            "box": _to_text(boxes),
        }
        if self.layout == "pcdet" and frame.bbox is not None:
            record["bbox"] = _to_text(frame.bbox[wanted])
        if self.layout == "pcdet" and frame.score is not None:
            record["score"] = [frame.score[i] for i in wanted]
        contents = [
            (_file(sample, name, i), data[size * begin : size * end])
            for name, i, (begin, end) in zip(names, wanted, parts, strict=True)
        ]
        return Output(self.database, contents, json.dumps(record))

    def done(self, refs: Sequence[FrameRef]) -> set[str]:
        """Frames whose record can be read and all of whose points are there."""
        found = records.read(files.join(self.out, self.place))
        points = files.names(files.join(self.out, self.database)) if found else set()
        done = set()
        for ref in refs:
            columns, sample = _columns(found.get(ref.key)), self._sample(ref)
            if columns is not None and all(
                _file(sample, name, i) in points for name, i in zip(columns["name"], columns["gt_idx"], strict=True)
            ):
                done.add(ref.key)
        return done

    def finish(self, refs: Sequence[FrameRef]) -> str:
        """Write the info file, and all records into one file, in the order of the frames."""
        folder, infos, count = files.join(self.out, self.place), dict[str, list[dict[str, Any]]](), 0
        found = records.read(folder)
        for ref in refs:
            columns = _columns(found.get(ref.key))
            if columns is None:
                raise JobError(f"{folder}: no record of frame {ref.key}. Remedy: the same command does it again")
            for info in self._infos(ref, columns, count):
                infos.setdefault(info["name"], []).append(info)
                count += 1
        self._write(self.info_file, dump_pickle(infos))
        records.put_together(folder, [ref.key for ref in refs], found, files.join(self.out, self._temporary))
        classes = ", ".join(f"{len(found):,} {name}" for name, found in infos.items())
        return f"{files.join(self.out, self.info_file)}: {classes or 'no objects'}"

    def _infos(self, ref: FrameRef, columns: dict[str, Any], first: int) -> Iterator[dict[str, Any]]:
        """The records of a frame's boxes, with the keys that the library has. first: number of the first box."""
        database, sample = self.database, self._sample(ref)
        bbox, score = columns.get("bbox"), columns.get("score")
        for k, (name, number) in enumerate(zip(columns["name"], columns["gt_idx"], strict=True)):
            info: dict[str, Any] = {
                "name": name,
                "path": f"{database}/{_file(sample, name, number)}",
                "image_idx": sample,
                "gt_idx": number,
                "box3d_lidar": columns["box"][k],
                "num_points_in_gt": columns["points"][k],
                "difficulty": columns["difficulty"][k],
            }
            if self.layout == "mmdet3d":
                info["group_id"] = first + k
            else:
                if bbox is not None:
                    info["bbox"] = bbox[k]
                info["score"] = -1.0 if score is None else score[k]
            yield info

    def _sample(self, ref: FrameRef) -> int | str:
        return ref.sample if self.layout == "mmdet3d" else ref.key


def _columns(record: str | None) -> dict[str, Any] | None:
    """What `compute` recorded of a frame's boxes, column by column; None where the record is missing or damaged."""
    try:
        columns: dict[str, Any] = json.loads(record or "")
        count = len(columns["gt_idx"])
        for name in ("box", "bbox"):
            if name in columns:
                columns[name] = _from_text(columns[name], count)
        lengths = {len(columns[name]) for name in ("name", "points", "difficulty", "box", *columns)}
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
    return columns if lengths == {count} else None


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
    points: npt.NDArray[np.float32], boxes: npt.NDArray[np.float32], z_origin: ZOrigin, source: str = "points"
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
    rows, ends = _rows_of_boxes(points, boxes, z_origin, source)
    return [rows[begin:end] for begin, end in zip([0, *ends], ends, strict=False)]


def _rows_of_boxes(
    points: npt.NDArray[np.float32], boxes: npt.NDArray[np.float32], z_origin: str, source: str
) -> tuple[npt.NDArray[np.float32], list[int]]:
    """As `points_of_boxes`: the points of all boxes one after the other, and where those of each box end."""
    if len(boxes) == 0:
        check_points(points, source)
        return np.empty((0, points.shape[1]), np.float32), []
    fields = np.ascontiguousarray(boxes[:, :7])
    rows, ends, finite = cpu.rows_of_boxes(np.ascontiguousarray(points), fields, z_origin == "bottom")
    if not finite:
        check_points(points, source)
    return rows, ends.tolist()
