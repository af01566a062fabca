"""KITTI's folders as a source of frames: velodyne, label_2 and calib."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from triops.data import files
from triops.data.frames import Frame, FrameError, FrameRef, as_sample, check_boxes, points_of, safe_name
from triops.data.kitti_calibration import parse_calibration, to_lidar
from triops.data.kitti_labels import Labels, parse_labels

FEATURES = 4
CLASSES = ("Pedestrian", "Cyclist", "Car", "Van", "Truck", "Person_sitting", "Tram", "Misc")
# Least height in the image, most occlusion and most truncation of easy, moderate and hard objects.
LEVELS = ((40, 0, 0.15), (25, 1, 0.3), (25, 2, 0.5))


@dataclass(frozen=True)
class KittiFolder:
    """The frames of a folder that has `training/velodyne`, `training/label_2` and `training/calib`.

    Attributes:
        root: the folder.
        split: frames are those of `ImageSets/<split>.txt`, or all that have a label where there is no such file.
        points: folder of the points below `root`.
        inclusive: the last pixel counts to the height of a box in the image (OpenPCDet), or does not (mmdetection3d).
    """

    root: str
    split: str = "train"
    points: str = "training/velodyne"
    inclusive: bool = False

    dataset = "kitti"

    def classes(self) -> list[str]:
        return [*CLASSES]

    def refs(self, number: int) -> list[FrameRef]:
        listed = files.join(self.root, "ImageSets", f"{self.split}.txt")
        if files.exists(listed):
            keys = _text(listed).split()
        else:
            found = files.names(files.join(self.root, "training", "label_2"))
            keys = sorted(name[:-4] for name in found if name.endswith(".txt"))
        if not keys:
            raise FrameError(f"{self.root}: no frames: neither ImageSets/{self.split}.txt nor files in label_2")
        return [FrameRef(safe_name(key, "frame"), as_sample(key), number) for key in keys]

    def load(self, ref: FrameRef) -> Frame:
        velodyne = files.join(self.root, self.points, f"{ref.key}.bin")
        points = points_of(files.read(velodyne), FEATURES, velodyne)
        calib = files.join(self.root, "training", "calib", f"{ref.key}.txt")
        calibration = parse_calibration(_text(calib), calib)
        path = files.join(self.root, "training", "label_2", f"{ref.key}.txt")
        labels = parse_labels(_text(path), path, scored=False)
        objects = labels.name != "DontCare"
        names = [safe_name(str(name), f"{path}: class", "class") for name in labels.name[objects]]
        boxes = to_lidar(
            labels.location[objects], labels.dimensions[objects], labels.rotation_y[objects],
            calibration.lidar_to_rectified(), calib,
        )  # fmt: skip
        with np.errstate(over="ignore"):  # what float32 cannot hold becomes infinite, and is refused
            found, bbox = boxes.astype(np.float32), labels.bbox[objects].astype(np.float32)
        return Frame(
            points, check_boxes(found, path), names, "bottom", difficulty(labels, self.inclusive)[objects].tolist(),
            bbox, source=velodyne,
        )  # fmt: skip


def _text(path: str) -> str:
    try:
        return files.read(path).decode("utf-8-sig")  # Windows' editors begin a file with a byte order mark
    except UnicodeDecodeError as error:
        raise FrameError(f"{path}: not a text file (byte {error.start})") from None


def difficulty(labels: Labels, inclusive: bool = False) -> np.ndarray:
    """The first level whose limits an object keeps: 0 easy, 1 moderate, 2 hard, -1 none of them; int64 [N].

    inclusive: see `KittiFolder`.
    """
    height = labels.bbox[:, 3] - labels.bbox[:, 1] + inclusive
    level = np.full(len(labels), -1)
    for number, (least, occlusion, truncation) in reversed([*enumerate(LEVELS)]):
        tall = height >= least if inclusive else height > least
        level[tall & (labels.occluded <= occlusion) & (labels.truncated <= truncation)] = number
    return level
