"""Which source of frames a path is."""

from __future__ import annotations

import os
from collections.abc import Sequence

from triops.data import files
from triops.data.frames import FrameError, Source
from triops.data.infos import open_infos
from triops.data.kitti import KittiFolder
from triops.data.parquet import ParquetFrames


def open_source(
    path: str, *, split: str = "train", root: str | None = None, points: str | None = None, sweeps: int | None = None,
    inclusive: bool = False,
) -> Source:  # fmt: skip
    """The data set at a path: an info file (`*.pkl`), Parquet frames (`*.parquet`, or a folder of them), or KITTI's
    folders.

    Args:
        path: on a disk or an fsspec URL, which may be chained (`zip://kitti::s3://bucket/kitti.zip`).
        split: of KITTI's folders; info files have it in their name.
        root, points, sweeps: see `triops.data.infos.InfoFile`; `points` also for KITTI's folders.
        inclusive: see `triops.data.kitti.KittiFolder`.

    Raises:
        FrameError: it is none of these.
        PickleError: an info file that is damaged or asks for more than plain values.
        OSError: it cannot be read.
    """
    if not files.is_url(path):
        path = os.path.abspath(path)
    if files.name_of(path).endswith(".pkl"):
        return open_infos(path, root, points, sweeps)
    if files.name_of(path).endswith(".parquet") and not files.is_folder(path):
        return ParquetFrames(path)
    if files.is_folder(files.join(path, "training", "label_2")):
        return KittiFolder(path, split, points or "training/velodyne", inclusive)
    if any(name.endswith(".parquet") for name in files.names(path)):
        return ParquetFrames(path)
    if not files.exists(path):
        raise FrameError(f"{path}: no such file or folder")
    raise FrameError(f"{path}: neither an info file (.pkl), nor Parquet frames, nor a folder with training/label_2")


def open_sources(paths: Sequence[str], **options: object) -> tuple[tuple[Source, ...], dict[str, str]]:
    """The data sets at some paths, and the paths that cannot be read, with the reason. See `open_source`."""
    sources, broken = [], {}
    for path in paths:
        try:
            sources.append(open_source(path, **options))  # type: ignore[arg-type]
        except OSError as error:
            broken[path] = files.reason(error)
        except ValueError as error:
            broken[path] = str(error)
    return tuple(sources), broken
