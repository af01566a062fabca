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
import torch

import triops
from triops.data import files
from triops.data.files import Data
from triops.data.frames import Frame, FrameRef, xyz_of
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
            "job": "gtdb", "layout": self.layout, "classes": list(self.classes),
            "sources": [source_settings(source) for source in self.sources],
        }  # fmt: skip

    def compute(self, ref: FrameRef, frame: Frame) -> Iterable[tuple[str, Data]]:
        origin = Z_ORIGIN[self.layout]
        boxes = frame.boxes_from(origin)
        wanted = [i for i, name in enumerate(frame.names) if not self.classes or name in self.classes]
        parts = points_of_boxes(frame.points, boxes[wanted], origin)
        record = []
        for i, part in zip(wanted, parts, strict=True):
            name = self._file(ref, frame.names[i], i)
            yield f"{self.database}/{name}", part.data.cast("B") if part.size else b""
            entry = {
                "file": name, "name": frame.names[i], "gt_idx": i, "box": boxes[i].tolist(), "points": len(part),
                "difficulty": frame.difficulty[i],
            }  # fmt: skip
            if frame.bbox is not None:
                entry["bbox"] = frame.bbox[i].tolist()
            if frame.score is not None:
                entry["score"] = frame.score[i]
            record.append(entry)
        yield f"{self.place}/{ref.key}.json", json.dumps(record).encode()

    def done(self, refs: Sequence[FrameRef]) -> set[str]:
        """Frames whose record and all of whose points are there."""
        records = files.names(files.join(self.out, self.place))
        points = files.names(files.join(self.out, self.database))
        recorded = (ref.key for ref in refs if f"{ref.key}.json" in records)
        return {key for key in recorded if all(entry["file"] in points for entry in self._record(key))}

    def finish(self, refs: Sequence[FrameRef]) -> str:
        """Write the info file, in the order of the frames."""
        infos: dict[str, list[dict[str, Any]]] = {}
        count = 0
        for ref in refs:
            for entry in self._record(ref.key):
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
            "box3d_lidar": np.array(entry["box"], np.float32),
            "num_points_in_gt": entry["points"],
            "difficulty": entry["difficulty"],
        }
        if self.layout == "mmdet3d":
            return {**info, "group_id": number}
        if "bbox" in entry:
            info["bbox"] = np.array(entry["bbox"], np.float32)
        return {**info, "score": entry.get("score", -1.0)}

    def _sample(self, ref: FrameRef) -> int | str:
        return ref.sample if self.layout == "mmdet3d" else ref.key

    def _file(self, ref: FrameRef, name: str, number: int) -> str:
        return f"{self._sample(ref)}_{name}_{number}.bin"

    def _record(self, key: str) -> list[dict[str, Any]]:
        path = files.join(self.out, self.place, f"{key}.json")
        try:
            record: list[dict[str, Any]] = json.loads(files.read(path))
        except ValueError:
            raise JobError(f"{path} is damaged. Remedy: remove it, and the frame is done again") from None
        return record


def points_of_boxes(
    points: npt.NDArray[np.float32], boxes: npt.NDArray[np.float32], z_origin: str
) -> list[npt.NDArray[np.float32]]:
    """The points [K, C] in each box, in their order, less the first three fields of the box.

    Args:
        points: float32 [N, C], x, y and z first.
        boxes: float32 [T, 7 or more].
        z_origin: as in `triops.points_in_boxes`.

    >>> points = np.array([[1, 0, 0, 9], [5, 0, 0, 9]], np.float32)
    >>> [p.tolist() for p in points_of_boxes(points, np.array([[2, 0, 0, 4, 2, 2, 0]], np.float32), "center")]
    [[[-1.0, 0.0, 0.0, 9.0]]]
    """
    if len(boxes) == 0:
        return []
    xyz, fields = xyz_of(points), torch.from_numpy(np.ascontiguousarray(boxes[:, :7]))[None]
    first = triops.points_in_boxes(torch.from_numpy(xyz)[None], fields, z_origin=z_origin)[0].numpy()
    # Few points are in any box, and only those can be in a second one.
    inside = np.flatnonzero(first >= 0)
    every = triops.points_in_boxes_all(torch.from_numpy(xyz.take(inside, 0))[None], fields, z_origin=z_origin)[0]
    # By box, then by point. take() and whole rows are several times as fast as indices and slices of rows.
    box, position = np.divmod(np.flatnonzero(every.numpy().T.copy()), max(len(inside), 1))
    centre = np.zeros((len(boxes), points.shape[1]), np.float32)
    centre[:, :3] = boxes[:, :3]
    found = points.take(inside.take(position), 0)
    found -= centre.take(box, 0)
    return np.split(found, np.cumsum(np.bincount(box, minlength=len(boxes)))[:-1])
