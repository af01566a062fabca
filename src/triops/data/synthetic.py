"""Synthetic data sets in KITTI's layout: sweeps, labels, calibration, and predictions with known errors.

Objects stand in the camera's view on the ground, do not touch each other, and hide each other; labels follow from the
geometry as KITTI's do: boxes in the image, truncation at its border, occlusion by what stands in front.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from triops.data.kitti import CLASSES, difficulty
from triops.data.kitti_calibration import Calibration, format_calibration, to_camera, to_lidar, wrap
from triops.data.kitti_labels import Labels, read_labels, write_labels
from triops.data.pickles import dump_pickle
from triops.scenes import SENSOR_HEIGHT, lidar_sweep

Floats = npt.NDArray[np.float64]

IMAGE = (1242, 375)  # width and height in pixels
CALIBRATION = Calibration(
    np.array([[721.5, 0, 609.6, 44.86], [0, 721.5, 172.9, 0.2164], [0, 0, 1, 0.002746]]),
    np.array([[0.99992, 0.00984, -0.00745], [-0.00987, 0.99994, -0.00428], [0.0074, 0.00435, 0.99996]]),
    np.array([
        [0.0075, -0.99997, -0.00062, -0.0041], [0.0148, 0.00073, -0.99989, -0.0763], [0.99986, 0.0075, 0.0148, -0.2718],
    ]),
)  # fmt: skip

NAMES = ("Car", "Pedestrian", "Cyclist", "Van")
_SIZES = np.array([[3.9, 1.6, 1.56], [0.85, 0.65, 1.75], [1.76, 0.6, 1.73], [5.1, 1.9, 2.2]])  # length, width, height
_SHARES = [0.6, 0.18, 0.12, 0.1]
_NEAR, _FAR = 5.0, 65.0  # metres from the sensor
_HALF_VIEW = np.deg2rad(38.0)
_PARTLY, _LARGELY = 0.85, 0.45  # visible shares below which an object counts as occluded


@dataclass(frozen=True)
class Noise:
    """Errors of synthetic predictions.

    Attributes:
        position: standard deviation of x, y and z in metres.
        size: of length, width and height, as a share.
        heading: in radians.
        missed: share of objects that are not found.
        false: wrong detections per true one.
        score: spread of the scores; 0 ranks every true detection above every false one.
    """

    position: float = 0.15
    size: float = 0.05
    heading: float = 0.08
    missed: float = 0.1
    false: float = 0.2
    score: float = 0.15


def write_kitti(
    root: str | Path, frames: int, *, points: int = 120_000, boxes: int = 20, seed: int = 0, noise: Noise | None = None
) -> Path:
    """Write `frames` frames below `root`, and return `root`.

    `training/velodyne`, `training/label_2` and `training/calib` as in KITTI, names of the frames in
    `ImageSets/train.txt`, and predictions with scores in `predictions` where `noise` is given. The same arguments give
    the same bytes.

    Args:
        root: a folder, made if need be.
        frames: number of frames.
        points: per sweep.
        boxes: objects per frame; fewer get a label where some are outside of the image.
        seed: of all random numbers.
        noise: errors of the predictions.

    Raises:
        ValueError: a negative number of frames, points or boxes.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     root = write_kitti(folder, 2, points=1000, boxes=3)
    ...     sorted(str(p.relative_to(root)) for p in root.rglob("*00001.*"))
    ['training/calib/000001.txt', 'training/label_2/000001.txt', 'training/velodyne/000001.bin']
    """
    for name, value in (("frames", frames), ("points", points), ("boxes", boxes)):
        if value < 0:
            raise ValueError(f"write_kitti: {name} must be at least 0, got {value}")
    root = Path(root)
    folders = [root / "training" / name for name in ("velodyne", "label_2", "calib")] + [root / "ImageSets"]
    for folder in [*folders, *([root / "predictions"] if noise else [])]:
        folder.mkdir(parents=True, exist_ok=True)
    velodyne, label_2, calib, image_sets = folders
    calibration = format_calibration(CALIBRATION)
    for frame in range(frames):
        sweep, labels = kitti_frame(points, boxes, seed=seed * 1_000_003 + frame)
        sweep.tofile(velodyne / f"{frame:06}.bin")
        write_labels(label_2 / f"{frame:06}.txt", labels)
        (calib / f"{frame:06}.txt").write_text(calibration)
        if noise:
            predicted = predictions(labels, noise, seed=seed * 1_000_003 + frame)
            write_labels(root / "predictions" / f"{frame:06}.txt", predicted)
    (image_sets / "train.txt").write_text("".join(f"{frame:06}\n" for frame in range(frames)))
    return root


def kitti_frame(points: int = 120_000, boxes: int = 20, *, seed: int = 0) -> tuple[npt.NDArray[np.float32], Labels]:
    """A sweep, float32 [points, 4] with the intensity last, and its labels, in the order that KITTI has: DontCare last.

    >>> sweep, labels = kitti_frame(2000, 4)
    >>> sweep.shape, len(labels) > 0, labels.score is None
    ((2000, 4), True, True)
    """
    random = np.random.default_rng((seed, 0))
    kind, objects = _place(boxes, random)
    centred = objects.copy()
    centred[:, 2] += objects[:, 5] / 2
    xyz = lidar_sweep(torch.from_numpy(centred.astype(np.float32)), points, seed=seed, nearest_wall=_FAR).numpy()
    intensity = random.random((points, 1), np.float32).round(2)
    return np.concatenate([xyz, intensity], 1), _labels(kind, objects)


def _place(count: int, random: np.random.Generator) -> tuple[npt.NDArray[np.int64], Floats]:
    """Kinds and boxes [count, 7] (LiDAR's frame, z at the bottom) that keep apart from each other."""
    kind = random.choice(len(NAMES), count, p=_SHARES)
    boxes = np.empty((count, 7))
    boxes[:, 3:6] = _SIZES[kind] * random.uniform(0.85, 1.15, (count, 3))
    radius = np.hypot(boxes[:, 3], boxes[:, 4]) / 2
    for i in range(count):
        for _ in range(200):  # a view that is too full lets the last ones touch
            distance = np.sqrt(random.uniform(_NEAR**2, _FAR**2))
            angle = random.uniform(-_HALF_VIEW, _HALF_VIEW)
            boxes[i, :2] = distance * np.cos(angle), distance * np.sin(angle)
            apart = np.hypot(*(boxes[:i, :2] - boxes[i, :2]).T)
            if (apart > radius[:i] + radius[i] + 0.3).all():
                break
    boxes[:, 2] = -SENSOR_HEIGHT + random.normal(0, 0.05, count)
    boxes[:, 6] = random.uniform(-np.pi, np.pi, count)
    return kind, boxes


def _labels(kind: npt.NDArray[np.int64], boxes: Floats) -> Labels:
    to_rectified = CALIBRATION.lidar_to_rectified()
    location, dimensions, rotation = to_camera(boxes, to_rectified)
    whole = image_boxes(boxes)
    clipped = whole.clip(0, [*IMAGE, *IMAGE])
    truncated = 1 - _area(clipped) / np.maximum(_area(whole), 1e-9)
    visible = _visible(boxes)
    occluded = np.where(visible < _LARGELY, 2, np.where(visible < _PARTLY, 1, 0))
    kept = np.flatnonzero((truncated < 0.9) & (clipped[:, 3] - clipped[:, 1] >= 8))
    # KITTI leaves objects that do not show to DontCare: a region of the image without a box.
    shown, hidden = kept[visible[kept] > 0], kept[visible[kept] == 0]
    none = len(hidden)
    return Labels(
        np.array([*(NAMES[k] for k in kind[shown]), *["DontCare"] * none], np.str_),
        np.concatenate([truncated[shown].round(2), np.full(none, -1.0)]),
        np.concatenate([occluded[shown], np.full(none, -1)]),
        np.concatenate([wrap(rotation - np.arctan2(location[:, 0], location[:, 2]))[shown], np.full(none, -10.0)]),
        np.concatenate([clipped[shown], clipped[hidden]]),
        np.concatenate([dimensions[shown], np.full((none, 3), -1.0)]),
        np.concatenate([location[shown], np.full((none, 3), -1000.0)]),
        np.concatenate([rotation[shown], np.full(none, -10.0)]),
    )


def image_boxes(boxes: Floats) -> Floats:
    """left, top, right, bottom [N, 4] in pixels, not clipped, of boxes [N, 7] (LiDAR's frame, z at the bottom)."""
    signs = np.array([[x, y, z] for x in (-0.5, 0.5) for y in (-0.5, 0.5) for z in (0.0, 1.0)])
    corner = signs * boxes[:, None, 3:6]
    cos, sin = np.cos(boxes[:, 6:]), np.sin(boxes[:, 6:])
    x, y = corner[..., 0] * cos - corner[..., 1] * sin, corner[..., 0] * sin + corner[..., 1] * cos
    xyz = np.stack([x, y, corner[..., 2]], -1) + boxes[:, None, :3]
    to_rectified = CALIBRATION.lidar_to_rectified()
    ahead = xyz.reshape(-1, 3) @ to_rectified[:3, :3].T + to_rectified[:3, 3]
    ahead[:, 2] = np.maximum(ahead[:, 2], 0.1)  # corners beside the camera end at the border of the image
    pixels = CALIBRATION.project(ahead)[0].reshape(-1, 8, 2)
    return np.concatenate([pixels.min(1), pixels.max(1)], 1)


def _area(boxes: Floats) -> Floats:
    area: Floats = np.prod(np.maximum(boxes[:, 2:] - boxes[:, :2], 0), 1)
    return area


def _visible(boxes: Floats) -> Floats:
    """Share of each object's directions in which nothing stands nearer."""
    distance, direction = np.hypot(boxes[:, 0], boxes[:, 1]), np.arctan2(boxes[:, 1], boxes[:, 0])
    radius = (boxes[:, 3] + boxes[:, 4]) / 4  # between what a side and what an end hides
    reach = np.arcsin(np.minimum(radius / np.maximum(distance, 1e-9), 1))
    rays = direction[:, None] + reach[:, None] * np.linspace(-1, 1, 41)
    nearer = distance[None] < distance[:, None]
    covered = (np.abs(rays[:, :, None] - direction) < reach) & nearer[:, None]
    share: Floats = 1 - covered.any(2).mean(1)
    return share


def predictions(labels: Labels, noise: Noise | None = None, *, seed: int = 0) -> Labels:
    """Detections of the labelled objects with errors of known size, in KITTI's format with scores.

    >>> labels = kitti_frame(100, 10)[1]
    >>> found = predictions(labels, Noise(0, 0, 0, 0, 0, 0))
    >>> len(found) == (labels.name != "DontCare").sum(), float(found.score.min())
    (np.True_, 1.0)
    """
    noise, random = noise or Noise(), np.random.default_rng((seed, 1))
    objects = np.flatnonzero((labels.name != "DontCare") & (random.random(len(labels)) >= noise.missed))
    to_rectified = CALIBRATION.lidar_to_rectified()
    boxes = to_lidar(labels.location, labels.dimensions, labels.rotation_y, to_rectified)[objects]
    names = labels.name[objects]
    error = random.normal(size=boxes.shape)
    boxes[:, :3] += noise.position * error[:, :3]
    boxes[:, 3:6] *= np.maximum(1 + noise.size * error[:, 3:6], 0.3)
    boxes[:, 6] += noise.heading * error[:, 6]
    # The larger the error, the lower the score, as a detector's scores mostly are.
    score = np.exp(-noise.score * np.abs(error).mean(1)) * (1 - noise.score * random.random(len(boxes)))
    wrong = random.poisson(noise.false * len(boxes))
    kind, others = _place(wrong, random)
    boxes = np.concatenate([boxes, others])
    score = np.concatenate([score, random.uniform(0.05, 0.3 + noise.score, wrong)])
    names = np.concatenate([names, np.array(NAMES)[kind]])
    clipped = image_boxes(boxes).clip(0, [*IMAGE, *IMAGE])
    kept = np.flatnonzero(_area(clipped) > 0)
    boxes, score, names, clipped = boxes[kept], score[kept], names[kept], clipped[kept]
    location, dimensions, rotation = to_camera(boxes, to_rectified)
    alpha = wrap(rotation - np.arctan2(location[:, 0], location[:, 2]))
    unknown = np.full(len(boxes), -1.0)
    return Labels(
        names, unknown, unknown.astype(np.int64), alpha, clipped, dimensions, location, rotation, score.clip(0, 1)
    )


def write_infos(root: str | Path) -> Path:
    """Write `kitti_infos_train.pkl`, mmdetection3d's info file, for a data set of `write_kitti`; returns its path."""
    root = Path(root)
    to_rectified = CALIBRATION.lidar_to_rectified()
    entries = []
    for position, key in enumerate((root / "ImageSets" / "train.txt").read_text().split()):
        labels = read_labels(root / "training" / "label_2" / f"{key}.txt")
        levels = difficulty(labels)
        instances = [
            {
                "bbox": labels.bbox[i].tolist(),
                "bbox_3d": [*labels.location[i].tolist(), *labels.dimensions[i].tolist(), float(labels.rotation_y[i])],
                "bbox_label": CLASSES.index(name) if name in CLASSES else -1,
                "bbox_label_3d": CLASSES.index(name) if name in CLASSES else -1,
                "difficulty": int(levels[i]),
                "truncated": float(labels.truncated[i]),
                "occluded": int(labels.occluded[i]),
                "alpha": float(labels.alpha[i]),
            }
            for i, name in enumerate(map(str, labels.name))
        ]
        image = {
            "img_path": f"{key}.png", "width": IMAGE[0], "height": IMAGE[1], "lidar2cam": to_rectified.tolist(),
            "cam2img": np.vstack([CALIBRATION.projection, [0, 0, 0, 1]]).tolist(),
        }  # fmt: skip
        entries.append({
            "sample_idx": position, "images": {"CAM2": image}, "instances": instances,
            "lidar_points": {"num_pts_feats": 4, "lidar_path": f"{key}.bin"},
        })  # fmt: skip
    categories = {**{name: label for label, name in enumerate(CLASSES)}, "DontCare": -1}
    metainfo = {"categories": categories, "dataset": "kitti", "info_version": "1.1"}
    path = root / "kitti_infos_train.pkl"
    path.write_bytes(dump_pickle({"metainfo": metainfo, "data_list": entries}))
    return path
