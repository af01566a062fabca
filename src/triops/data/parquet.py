"""Frames in Parquet files: as a source, and as what any other source is turned into.

One row per frame:

    frame       string         its name
    sample      string         what databases call it; optional
    points      list<float>    x, y, z and further features of each point, point by point
    features    int32          numbers per point
    boxes       list<float>    cx, cy, cz, dx, dy, dz, heading and further fields of each box, box by box
    fields      int32          numbers per box
    z_origin    string         "center" or "bottom": what cz is
    names       list<string>   class of each box
    difficulty  list<int32>    of each box; optional

A row group of one frame is read the quickest.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from triops.data import files
from triops.data.frames import Frame, FrameError, FrameRef, as_sample, check_boxes, check_points, safe_name
from triops.data.job import Job, JobError, Output, source_settings

REQUIRED = ("frame", "points", "features", "boxes", "fields", "z_origin", "names")


def require_pyarrow() -> Any:
    """The package pyarrow."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise JobError("Parquet needs pyarrow. Remedy: pip install 'triops[parquet]'") from None
    return pyarrow


@dataclass(frozen=True)
class ParquetFrames:
    """The frames of a Parquet file, or of all those in a folder, in the order of their names.

    Attributes:
        path: a file or a folder.
        dataset, split: what a database of them is called.
    """

    path: str
    dataset: str = "custom"
    split: str = "train"

    def classes(self) -> list[str]:
        """In alphabetical order."""
        found = set[str]()
        for path in self._files():
            for names in _checked(path).read(columns=["names"]).column("names").to_pylist():
                found.update(map(str, names or ()))
        return sorted(found)

    def refs(self, number: int) -> list[FrameRef]:
        refs = []
        for path in self._files():
            file = _checked(path)
            columns = ["frame", *(["sample"] if "sample" in file.schema_arrow.names else [])]
            for group in range(file.num_row_groups):
                table = file.read_row_group(group, columns=columns).to_pydict()
                samples = table.get("sample", table["frame"])
                for row, (frame, sample) in enumerate(zip(table["frame"], samples, strict=True)):
                    key = safe_name(str(frame), f"{path}: frame")
                    text = safe_name(str(sample), f"{path}: sample")
                    refs.append(FrameRef(key, as_sample(text), number, (path, group, row)))
        return refs

    def load(self, ref: FrameRef) -> Frame:
        path, group, row = ref.payload
        where = f"{path}, frame {ref.key}"
        try:
            return self._load(path, group, row, where)
        except (require_pyarrow().ArrowException, OSError) as error:
            raise FrameError(f"{where}: {error}") from None
        except FrameError:
            raise
        except (TypeError, ValueError, AttributeError) as error:  # of a value that is null, a column of another type
            raise FrameError(f"{where}: malformed ({error})") from None

    def _load(self, path: str, group: int, row: int, where: str) -> Frame:
        file = _open(path)
        table = file.read_row_group(group).slice(row, 1)
        columns = {name: table.column(name)[0] for name in table.column_names}
        points = _matrix(columns["points"], columns["features"].as_py(), f"{where}: points")
        boxes = _matrix(columns["boxes"], columns["fields"].as_py(), f"{where}: boxes")
        names = [safe_name(str(name), f"{where}: class", "class") for name in columns["names"].as_py()]
        levels = columns["difficulty"].as_py() if "difficulty" in columns else [0] * len(names)
        origin = columns["z_origin"].as_py()
        if points.shape[1] < 3 or boxes.shape[1] < 7 or not len(names) == len(boxes) == len(levels):
            raise FrameError(f"{where}: {points.shape} points, {boxes.shape} boxes, {len(names)} names")
        if origin not in ("center", "bottom"):
            raise FrameError(f"{where}: z_origin must be center or bottom, got {origin!r}")
        return Frame(points, check_boxes(boxes, where), names, origin, [int(v) for v in levels], source=where)

    def _files(self) -> list[str]:
        if not files.is_folder(self.path):
            return [self.path]
        found = sorted(name for name in files.names(self.path) if name.endswith(".parquet"))
        return [files.join(self.path, name) for name in found]


def _open(path: str) -> Any:
    arrow = require_pyarrow()
    try:
        source = io.BytesIO(files.read(path)) if files.is_url(path) else path
        return arrow.parquet.ParquetFile(source)
    except arrow.ArrowException as error:
        raise FrameError(f"{path}: {error}") from None


def _checked(path: str) -> Any:
    """The file, if it has all columns."""
    file = _open(path)
    absent = [name for name in REQUIRED if name not in file.schema_arrow.names]
    if absent:
        raise FrameError(f"{path}: no column {', '.join(absent)}")
    return file


def _matrix(column: Any, width: int, what: str) -> Any:
    with np.errstate(over="ignore"):
        flat = column.values.to_numpy(zero_copy_only=False).astype(np.float32, copy=False)
    if not isinstance(width, int) or width < 1 or len(flat) % width:
        raise FrameError(f"{what}: {len(flat)} numbers are not rows of {width}")
    return flat.reshape(-1, width)


@dataclass(frozen=True)
class ToParquet(Job):
    """Every frame of some sources as a Parquet file of one row, in `frames`."""

    @property
    def place(self) -> str:
        return ".frames"

    @property
    def folders(self) -> Sequence[str]:
        return ("frames",)

    def settings(self) -> dict[str, object]:
        return {"job": "parquet", "sources": [source_settings(source) for source in self.sources]}

    def start(self) -> None:
        require_pyarrow()
        super().start()

    def compute(self, ref: FrameRef, frame: Frame) -> Output:
        arrow = require_pyarrow()
        check_points(frame.points, frame.source)

        def row(values: Any, kind: Any) -> Any:
            return arrow.ListArray.from_arrays(arrow.array([0, len(values)], arrow.int32()), arrow.array(values, kind))

        table = arrow.table({
            "frame": [ref.key], "sample": [str(ref.sample)],
            "points": row(frame.points.ravel(), arrow.float32()),
            "features": arrow.array([frame.points.shape[1]], arrow.int32()),
            "boxes": row(frame.boxes.ravel(), arrow.float32()),
            "fields": arrow.array([frame.boxes.shape[1]], arrow.int32()),
            "z_origin": [frame.z_origin],
            "names": row(frame.names, arrow.string()),
            "difficulty": row(frame.difficulty, arrow.int32()),
        })  # fmt: skip
        buffer = io.BytesIO()
        # Coordinates hardly repeat: a dictionary of them only costs time.
        arrow.parquet.write_table(table, buffer, use_dictionary=False, compression="snappy")
        return Output("frames", [(f"{ref.key}.parquet", buffer.getvalue())])

    def done(self, refs: Sequence[FrameRef]) -> set[str]:
        there = files.names(files.join(self.out, "frames"))
        return {ref.key for ref in refs if f"{ref.key}.parquet" in there}

    def finish(self, refs: Sequence[FrameRef]) -> str:
        return f"{files.join(self.out, 'frames')}: {len(refs):,} frames"
