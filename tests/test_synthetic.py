"""Facts about synthetic data sets in KITTI's layout."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import triops
from triops.data.kitti_calibration import CalibrationError, format_calibration, parse_calibration, to_camera, to_lidar
from triops.data.kitti_labels import read_labels
from triops.data.synthetic import CALIBRATION, IMAGE, Noise, kitti_frame, predictions, write_kitti

TO_RECTIFIED = CALIBRATION.lidar_to_rectified()


def test_the_same_arguments_give_the_same_bytes(tmp_path: Path) -> None:
    trees = []
    for name in ("a", "b"):
        root = write_kitti(tmp_path / name, 2, points=500, boxes=4, seed=3, noise=Noise())
        trees.append({p.relative_to(root): p.read_bytes() for p in root.rglob("*") if p.is_file()})
    assert trees[0] == trees[1]
    assert len(trees[0]) == 2 * 4 + 1


def test_most_labelled_objects_hold_points_of_the_sweep() -> None:
    sweep, labels = kitti_frame(60_000, 15, seed=1)
    real = labels.name != "DontCare"
    boxes = to_lidar(labels.location, labels.dimensions, labels.rotation_y, TO_RECTIFIED)[real]
    inside = triops.points_in_boxes_all(
        torch.from_numpy(sweep[None, :, :3].copy()), torch.from_numpy(boxes[None]).float(), z_origin="bottom"
    )[0].sum(0)
    assert real.sum() >= 8
    assert (inside > 0).float().mean() > 0.9


def test_labels_are_as_a_camera_sees_them() -> None:
    labels = kitti_frame(100, 40, seed=2)[1]
    assert (labels.bbox[:, :2] <= labels.bbox[:, 2:]).all()
    assert (labels.bbox >= 0).all()
    assert (labels.bbox <= [*IMAGE, *IMAGE]).all()
    assert {*labels.occluded.tolist()} >= {0, 1, 2}
    assert ((labels.truncated >= 0) & (labels.truncated < 0.9) | (labels.name == "DontCare")).all()


def test_boxes_go_to_the_camera_and_back() -> None:
    boxes = np.array([[10.0, 2, -1.7, 4, 1.6, 1.5, 0.3], [20, -5, -1.6, 0.8, 0.6, 1.7, -3.0]])
    np.testing.assert_allclose(to_lidar(*to_camera(boxes, TO_RECTIFIED), TO_RECTIFIED), boxes, atol=1e-9)


def test_a_car_ahead_looks_along_the_cameras_axis() -> None:
    plain = np.eye(4)
    plain[:3, :3] = [[0, -1, 0], [0, 0, -1], [1, 0, 0]]  # x right, y down, z ahead
    location, dimensions, rotation = to_camera(np.array([[10.0, 2, -1.5, 4, 1.6, 1.4, 0]]), plain)
    np.testing.assert_allclose(location, [[-2, 1.5, 10]])
    np.testing.assert_allclose(dimensions, [[4, 1.4, 1.6]])
    np.testing.assert_allclose(rotation, [-np.pi / 2])


def test_predictions_without_noise_are_the_labels(tmp_path: Path) -> None:
    root = write_kitti(tmp_path, 1, points=10, boxes=6, noise=Noise(0, 0, 0, 0, 0, 0))
    truth, found = read_labels(root / "training/label_2/000000.txt"), read_labels(root / "predictions/000000.txt")
    real = truth.name != "DontCare"
    assert found.name.tolist() == truth.name[real].tolist()
    np.testing.assert_allclose(found.location, truth.location[real], atol=0.011)
    np.testing.assert_allclose(found.dimensions, truth.dimensions[real], atol=0.011)


def test_noise_is_of_the_size_asked_for() -> None:
    labels = kitti_frame(10, 200, seed=5)[1]
    real = labels.name != "DontCare"
    found = predictions(labels, Noise(position=0.5, size=0, heading=0, missed=0, false=0))
    error = found.location - labels.location[real]
    assert 0.4 < error.std() < 0.6
    assert len(predictions(labels, Noise(missed=1.0, false=0))) == 0


def test_a_calibration_survives_its_file() -> None:
    again = parse_calibration(format_calibration(CALIBRATION))
    np.testing.assert_allclose(again.lidar_to_rectified(), TO_RECTIFIED, atol=1e-11)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("P2: 1", "f: P2 must be 12 finite numbers, got '1'"),
        (format_calibration(CALIBRATION).replace("R0_rect", "R0"), "f: R0_rect is missing"),
        (format_calibration(CALIBRATION).replace("e+02", "e+999", 99), "f: P2 must be 12 finite numbers"),
    ],
)
def test_a_bad_calibration_names_the_entry(text: str, message: str) -> None:
    with pytest.raises(CalibrationError) as caught:
        parse_calibration(text, "f")
    assert str(caught.value).startswith(message)
