"""Labels of points: the box that each point of a frame lies in, and its class."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

import triops
from triops.data import files
from triops.data.frames import Frame, FrameError, FrameRef, check_points, xyz_of
from triops.data.job import Job, Output, source_settings
from triops.data.parquet import require_pyarrow

MOST = (1 << 16) - 2  # boxes or classes that fit beside "none" into half of a label


@dataclass(frozen=True)
class PointLabels(Job):
    """A label for every point of every frame, in `labels`.

    "label": SemanticKITTI's format, a little-endian uint32 per point: the class in the lower 16 bits, the box in the
    upper 16. 0 is no box; class k of `classes.json` is k, the first box is 1.
    "parquet": one row per frame with `frame`, `box` (list<int32>, from 0, -1 for none) and `label` (list<int32>, as
    above).

    A point in several boxes gets the first of them.

    Attributes:
        format: "label" or "parquet".
        classes: in the order of their numbers, from 1; boxes of others are left out.
    """

    format: str = "label"
    classes: tuple[str, ...] = ()

    @property
    def place(self) -> str:
        return ".labels"

    @property
    def folders(self) -> Sequence[str]:
        return ("labels",)

    def settings(self) -> dict[str, object]:
        return {
            "job": "label", "format": self.format, "classes": list(self.classes),
            "sources": [source_settings(source) for source in self.sources],
        }  # fmt: skip

    def start(self) -> None:
        if self.format == "parquet":
            require_pyarrow()
        super().start()
        numbers = {name: number for number, name in enumerate(self.classes, 1)}
        self._write("classes.json", json.dumps(numbers, indent=1).encode())

    def compute(self, ref: FrameRef, frame: Frame) -> Output:
        check_points(frame.points, frame.source)
        number = {name: k for k, name in enumerate(self.classes, 1)}
        used = [i for i, name in enumerate(frame.names) if name in number]
        if len(frame.names) > MOST:
            raise FrameError(f"{len(frame.names)} boxes: a label has room for {MOST}")
        index = np.array([-1, *used], np.int32)  # of the box among all boxes, by that among those used, after -1
        label = np.array([0, *(number[frame.names[i]] for i in used)], np.int32)
        found = (
            1
            + triops.points_in_boxes(
                torch.from_numpy(xyz_of(frame.points))[None],
                torch.from_numpy(np.ascontiguousarray(frame.boxes[used, :7]))[None],
                z_origin=frame.z_origin,
            )[0].numpy()
        )
        if self.format == "label":
            packed = (label | (index + 1) << 16).astype("<u4")
            return Output("labels", [(f"{ref.key}.label", packed[found].tobytes())])
        arrow = require_pyarrow()
        offsets = arrow.array([0, len(found)], arrow.int32())
        columns = {
            name: arrow.ListArray.from_arrays(offsets, arrow.array(values[found], arrow.int32()))
            for name, values in (("box", index), ("label", label))
        }
        buffer = io.BytesIO()
        arrow.parquet.write_table(arrow.table({"frame": [ref.key], **columns}), buffer)
        return Output("labels", [(f"{ref.key}.parquet", buffer.getvalue())])

    def done(self, refs: Sequence[FrameRef]) -> set[str]:
        there = files.names(files.join(self.out, "labels"))
        return {ref.key for ref in refs if f"{ref.key}.{self.format}" in there}

    def finish(self, refs: Sequence[FrameRef]) -> str:
        return f"{files.join(self.out, 'labels')}: {len(refs):,} frames"
