"""Pickles of annotation dicts: info files and results of mmdetection3d and OpenPCDet."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from triops.data.pickles import load_pickle

SUFFIXES = (".pkl", ".pickle")


def is_pickle(source: object) -> bool:
    return isinstance(source, str | os.PathLike) and os.fspath(source).endswith(SUFFIXES)


def read_annotations(path: str | os.PathLike[str]) -> dict[str, Any] | list[Any]:
    """The frames of a pickle: by name where it names every frame, else in order.

    Read are info files of mmdetection3d 1.x (`data_list`) and of OpenPCDet (a list of dicts with `annos`), and lists of
    annotation dicts, which OpenPCDet's results name by `frame_id`.

    Raises:
        ValueError: a pickle of something else; `PickleError`, which is one, where it is not of plain values.
        OSError: it cannot be read.
    """
    source = os.fspath(path)
    content = load_pickle(Path(path).read_bytes(), source)
    if isinstance(content, Mapping) and isinstance(content.get("data_list"), Sequence):
        names = _categories(content, source)
        frames = [_of_instances(info, names) for info in content["data_list"]]
        keys = [_get(info, "sample_idx") for info in content["data_list"]]
    elif isinstance(content, Sequence) and not isinstance(content, str | bytes):
        frames = [info["annos"] if _get(info, "annos") is not None else info for info in content]
        keys = [_frame_name(info) for info in content]
    else:
        raise ValueError(f"{source}: neither an info file nor a list of annotation dicts")
    named = [str(k) if isinstance(k, str) else f"{int(k):06}" for k in keys if isinstance(k, str | int | np.integer)]
    if len(named) == len(set(named)) == len(frames):
        return dict(zip(named, frames, strict=True))
    return frames


def paired(ground_truth: Any, predictions: Any) -> tuple[Any, Any]:
    """Both sources, pickles as what they hold. Frames go by their order where either side does not name them."""
    read = [read_annotations(source) if is_pickle(source) else source for source in (ground_truth, predictions)]
    if is_pickle(ground_truth) and is_pickle(predictions) and any(isinstance(frames, list) for frames in read):
        read = [list(frames.values()) if isinstance(frames, dict) else frames for frames in read]
    return read[0], read[1]


def _get(info: Any, *keys: str) -> Any:
    for key in keys:
        info = info.get(key) if isinstance(info, Mapping) else None
    return info


def _frame_name(info: Any) -> Any:
    """As OpenPCDet names a frame in its info files and in its results."""
    for keys in (("frame_id",), ("point_cloud", "lidar_idx"), ("image", "image_idx")):
        if (name := _get(info, *keys)) is not None:
            return name
    return None


def _categories(content: Mapping[str, Any], source: str) -> dict[int, str]:
    categories = _get(content, "metainfo", "categories")
    if not isinstance(categories, Mapping):
        raise ValueError(f"{source}: metainfo has no categories")
    return {int(label): str(name) for name, label in categories.items()}


def _of_instances(info: Any, names: Mapping[int, str]) -> Any:
    """The annotation dict of a frame of mmdetection3d's. A wrong field becomes None, which is named when it is read."""
    instances = _get(info, "instances")
    if not isinstance(instances, Sequence):
        return {}
    classes = [names.get(_get(i, "bbox_label")) for i in instances]
    boxes = [_get(i, "bbox_3d") for i in instances]
    boxes = [box if isinstance(box, Sequence | np.ndarray) and len(box) == 7 else None for box in boxes]
    return {
        "name": None if None in classes else classes,
        **{key: [_get(i, key) for i in instances] for key in ("truncated", "occluded", "alpha", "bbox")},
        "location": [None if box is None else box[:3] for box in boxes],
        "dimensions": [None if box is None else box[3:6] for box in boxes],
        "rotation_y": [None if box is None else box[6] for box in boxes],
    }
