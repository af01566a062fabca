"""mmdetection3d's info files as a source of frames: `*_infos_*.pkl` with `metainfo` and `data_list`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from triops._geometry.box.reference import ZOrigin
from triops.data import files
from triops.data.frames import Frame, FrameError, FrameRef, check_boxes, check_points, points_of, safe_name
from triops.data.kitti_calibration import to_lidar
from triops.data.pickles import load_pickle

Points = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Convention:
    """What a data set's info files leave unsaid.

    Attributes:
        points, sweeps: folders below the root; of `points`, the first that is there.
        z_origin: of the boxes.
        camera: whose frame the boxes are in, or None for the LiDAR's.
        classes: where the file names none.
        sweeps_loaded: earlier sweeps that mmdetection3d adds to a frame.
        features: numbers per point in the files, where the info files state another number.
    """

    points: tuple[str, ...] = ("",)
    sweeps: str = ""
    z_origin: ZOrigin = "bottom"
    camera: str | None = None
    classes: tuple[str, ...] = ()
    sweeps_loaded: int = 0
    features: int | None = None


CONVENTIONS = {
    "kitti": Convention(("training/velodyne_reduced", "training/velodyne"), camera="CAM2"),
    "waymo": Convention(("training/velodyne",), classes=("Car", "Pedestrian", "Cyclist")),
    "nuscenes": Convention(("samples/LIDAR_TOP",), "sweeps/LIDAR_TOP", "center", sweeps_loaded=10, features=5),
    "lyft": Convention(("v1.01-train/lidar",), "v1.01-train/lidar", "center", features=5),
}
_UNKNOWN = Convention()  # of another data set
_CLOSE = 1.0  # metres: points of earlier sweeps nearer than this in x and y are of the vehicle itself
_TIME = 4  # the column of a nuScenes point that becomes its age


@dataclass(frozen=True)
class InfoFile:
    """The frames of an info file.

    Attributes:
        path: the file.
        root: folder that the paths in it start from; the file's own by default.
        points: folder of the points below `root`; the data set's own by default.
        sweeps: how many earlier sweeps are added to a frame; as mmdetection3d by default: 10 for nuScenes, else none.
        dataset: kitti, nuscenes, waymo, lyft or another name; the one that the file states by default.
    """

    path: str
    root: str
    points: str
    sweeps: int
    dataset: str
    split: str
    content: dict[str, Any] | None = field(default=None, repr=False, compare=False)  # stays in this process

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "content": None}

    def classes(self) -> list[str]:
        content = self.content or _content(self.path)
        return [*_class_names(content["metainfo"], self.dataset, self.path).values()]

    def refs(self, number: int) -> list[FrameRef]:
        content = self.content or _content(self.path)
        names = _class_names(content["metainfo"], self.dataset, self.path)
        refs = []
        for position, info in enumerate(content["data_list"]):
            if not isinstance(info, dict):
                raise FrameError(f"{self.path}: entry {position} of data_list must be a dict, got {_kind(info)}")
            sample = info.get("sample_idx", position)
            if not isinstance(sample, str | int | np.integer):
                raise FrameError(
                    f"{self.path}: sample_idx of entry {position} must be a number or a name, got {sample}"
                )
            sample = sample if isinstance(sample, str) else int(sample)
            key = safe_name(str(sample), f"{self.path}: sample_idx")
            refs.append(FrameRef(key, sample, number, (_needed(info, self.sweeps), names)))
        return refs

    def load(self, ref: FrameRef) -> Frame:
        info, classes = ref.payload
        try:
            with np.errstate(over="ignore", invalid="ignore"):  # what is not finite is refused in the end
                return self._load(info, classes, f"{self.path}, frame {ref.key}")
        except (KeyError, TypeError, IndexError, AttributeError, OverflowError) as error:
            raise FrameError(f"{self.path}, frame {ref.key}: malformed ({type(error).__name__}: {error})") from None

    def _load(self, info: dict[str, Any], classes: Mapping[int, str], where: str) -> Frame:
        lidar = info["lidar_points"]
        convention = CONVENTIONS.get(self.dataset, _UNKNOWN)
        features = convention.features or int(lidar["num_pts_feats"])
        if not 3 <= features <= 64:
            raise FrameError(f"{where}: num_pts_feats must be from 3 to 64, got {features}")
        path = files.join(self.root, self.points, str(lidar["lidar_path"]))
        points = points_of(files.read(path), features, path)
        if self.sweeps:
            points = self._with_sweeps(points, info, features)
        names, kept = [], []
        for instance in info.get("instances", ()):
            name = classes.get(int(instance["bbox_label_3d"]))  # None where the class is ignored
            if name is not None and (self.dataset != "nuscenes" or instance.get("bbox_3d_isvalid", True)):
                names.append(name)
                kept.append(instance)
        boxes = self._boxes(kept, info)
        return Frame(
            points, check_boxes(boxes, where), names, convention.z_origin, [int(i.get("difficulty", 0)) for i in kept],
            np.array([i["bbox"] for i in kept], np.float32) if kept and all("bbox" in i for i in kept) else None,
            [float(i["score"]) for i in kept] if kept and all("score" in i for i in kept) else None, path,
        )  # fmt: skip

    def _boxes(self, instances: Sequence[Mapping[str, Any]], info: Mapping[str, Any]) -> Points:
        velocity = self.dataset == "nuscenes"
        if not instances:
            return np.empty((0, 9 if velocity else 7), np.float32)
        boxes = np.array([i["bbox_3d"] for i in instances], np.float64)
        if boxes.ndim != 2 or boxes.shape[1] < 7:
            raise FrameError(f"{self.path}: bbox_3d must be 7 numbers or more, got {list(boxes.shape[1:])}")
        camera = CONVENTIONS.get(self.dataset, _UNKNOWN).camera
        if camera:
            to_camera = np.array(info["images"][camera]["lidar2cam"], np.float64)
            if to_camera.shape != (4, 4):
                raise FrameError(f"{self.path}: lidar2cam must be [4, 4], got {list(to_camera.shape)}")
            boxes = to_lidar(boxes[:, :3], boxes[:, 3:6], boxes[:, 6], to_camera, f"{self.path}: lidar2cam")
        found = boxes.astype(np.float32)
        if velocity:
            speeds = np.array([i.get("velocity", (0, 0)) for i in instances], np.float32).reshape(-1, 2)
            speeds[np.isnan(speeds[:, 0])] = 0
            found = np.concatenate([found[:, :7], speeds], 1)
        return found

    def _with_sweeps(self, points: Points, info: Mapping[str, Any], features: int) -> Points:
        """Earlier sweeps behind the frame's own points, in its coordinates and with their age, as mmdetection3d does.

        Where there are none, the frame's own points take their place, so that density does not tell a first frame.
        """
        own = points.copy()
        own[:, _TIME] = 0
        if "lidar_sweeps" not in info:
            return np.concatenate([own, *[_not_close(own)] * self.sweeps])
        parts = [own]
        folder = CONVENTIONS.get(self.dataset, _UNKNOWN).sweeps
        for sweep in info["lidar_sweeps"][: self.sweeps]:
            lidar = sweep["lidar_points"]
            name = str(lidar["lidar_path"]).replace("\\", "/")
            path = files.join(self.root, self.points if "samples" in name else folder, name.rsplit("/", 1)[-1])
            part = points_of(files.read(path), features, path)
            check_points(part, path)
            part = _not_close(part).copy()
            matrix = np.array(lidar["lidar2sensor"], np.float64)
            part[:, :3] = part[:, :3] @ matrix[:3, :3]
            part[:, :3] -= matrix[:3, 3]
            part[:, _TIME] = info["timestamp"] - sweep["timestamp"]
            parts.append(part)
        return np.concatenate(parts)


def open_infos(path: str, root: str | None, points: str | None, sweeps: int | None) -> InfoFile:
    """The source that an info file is. What is None follows from the file and from what lies beside it."""
    content = _content(path)
    metainfo = content["metainfo"]
    dataset = str(metainfo.get("dataset") or metainfo.get("DATASET") or "custom").lower()
    dataset = safe_name(dataset, f"{path}: dataset")
    convention = CONVENTIONS.get(dataset, _UNKNOWN)
    root = files.folder_of(path) if root is None else root
    if points is None:
        there = [p for p in convention.points if files.is_folder(files.join(root, p))]
        points = (there or [convention.points[-1]])[0]
    split = re.search(r"_infos_([A-Za-z0-9]+)\.pkl$", files.name_of(path))
    loaded = convention.sweeps_loaded if sweeps is None else sweeps
    return InfoFile(path, root, points, loaded, dataset, split[1] if split else "train", content)


def _content(path: str) -> dict[str, Any]:
    content = load_pickle(files.read(path), path)
    if (
        isinstance(content, dict)
        and isinstance(content.get("metainfo"), dict)
        and type(content.get("data_list")) is list
    ):
        return content
    if isinstance(content, dict) and "infos" in content:
        remedy = "convert this older file with mmdetection3d's tools/dataset_converters/update_infos_to_v2.py"
    elif isinstance(content, list):
        remedy = "an older file of mmdetection3d has to be converted with its tools/dataset_converters/"
        remedy += "update_infos_to_v2.py, for one of OpenPCDet name KITTI's folder or a file of mmdetection3d"
    else:
        remedy = "name a file that mmdetection3d's tools/create_data.py has written"
    raise FrameError(f"{path}: expected a dict of metainfo and data_list, got {_kind(content)}. Remedy: {remedy}")


def _class_names(metainfo: Mapping[str, Any], dataset: str, path: str) -> dict[int, str]:
    """From label to class; without those that are ignored."""
    stated = metainfo.get("categories")
    if isinstance(stated, dict):
        if wrong := [name for name, label in stated.items() if not isinstance(label, int | np.integer)]:
            raise FrameError(f"{path}: categories must be numbers, got {wrong[0]}: {stated[wrong[0]]}")
        found = {int(label): str(name) for name, label in stated.items() if label >= 0}
    else:
        listed = metainfo.get("classes") or metainfo.get("CLASSES") or CONVENTIONS.get(dataset, _UNKNOWN).classes
        found = {label: str(name) for label, name in enumerate(listed)}
    if not found:
        raise FrameError(f"{path}: metainfo names no classes")
    return {label: safe_name(name, f"{path}: class", "class") for label, name in found.items()}


def _needed(info: dict[str, Any], sweeps: int) -> dict[str, Any]:
    """What `load` reads of an entry: most of an entry is about images."""
    keys = ["lidar_points", "instances", "timestamp", *(["lidar_sweeps"] if sweeps else [])]
    needed = {key: info[key] for key in keys if key in info}
    images = info.get("images")
    if isinstance(images, dict):
        matrices = {name: v["lidar2cam"] for name, v in images.items() if isinstance(v, dict) and "lidar2cam" in v}
        needed["images"] = {name: {"lidar2cam": matrix} for name, matrix in matrices.items()}
    return needed


def _not_close(points: Points) -> Points:
    return points[~(np.abs(points[:, :2]) < _CLOSE).all(1)]


def _kind(value: object) -> str:
    return type(value).__name__
