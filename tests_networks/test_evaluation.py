"""mmdetection3d's own KITTI evaluation runs without CUDA, and `triops.evaluate.kitti` gives the same figures."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import triops.compat.mmcv
import triops.compat.mmdet3d  # noqa: F401
from triops.data.kitti_labels import Labels
from triops.data.synthetic import CALIBRATION, IMAGE, Noise, kitti_frame, predictions
from triops.evaluate import kitti

CLASSES = ["Pedestrian", "Cyclist", "Car"]
CATEGORIES = {**{name: i for i, name in enumerate(CLASSES)}, "Van": 3, "DontCare": -1}


def info(index: int, labels: Labels) -> dict[str, Any]:
    camera = {
        "height": IMAGE[1], "width": IMAGE[0], "lidar2cam": CALIBRATION.lidar_to_rectified().tolist(),
        "cam2img": [*CALIBRATION.projection.tolist(), [0, 0, 0, 1]],
    }  # fmt: skip
    instances = [
        {
            "bbox_label": CATEGORIES[str(labels.name[i])], "truncated": labels.truncated[i], "score": 0.0,
            "occluded": labels.occluded[i], "alpha": labels.alpha[i], "bbox": labels.bbox[i].tolist(),
            "bbox_3d": [*labels.location[i], *labels.dimensions[i], labels.rotation_y[i]],
        }
        for i in range(len(labels))
    ]  # fmt: skip
    return {"sample_idx": index, "images": {"CAM2": camera}, "instances": instances}


def test_kitti_metric_runs_and_agrees(tmp_path: Path) -> None:
    from mmdet3d.evaluation.metrics import KittiMetric
    from mmdet3d.structures import CameraInstance3DBoxes

    truth = [kitti_frame(100, 20, seed=i)[1] for i in range(60)]
    infos = {"metainfo": {"categories": CATEGORIES}, "data_list": [info(i, frame) for i, frame in enumerate(truth)]}
    (tmp_path / "infos.pkl").write_bytes(pickle.dumps(infos))
    metric = KittiMetric(str(tmp_path / "infos.pkl"), pklfile_prefix=str(tmp_path / "results"))
    metric.dataset_meta = {"classes": CLASSES}
    for i, frame in enumerate(truth):
        found = predictions(frame, Noise(), seed=i)
        assert found.score is not None
        known = np.isin(found.name, CLASSES)
        boxes = np.column_stack([found.location, found.dimensions, found.rotation_y])[known]
        instances = {
            "bboxes_3d": CameraInstance3DBoxes(torch.from_numpy(boxes).float()),
            "scores_3d": torch.from_numpy(found.score[known]).float(),
            "labels_3d": torch.tensor([CATEGORIES[str(n)] for n in found.name[known]]),
        }
        metric.process({}, [{"pred_instances_3d": instances, "pred_instances": {}, "sample_idx": i}])
    theirs = metric.compute_metrics(metric.results)

    with open(tmp_path / "results" / "pred_instances_3d.pkl", "rb") as file:
        found = pickle.load(file)
    ours = kitti([info["kitti_annos"] for info in metric.data_infos], found, classes=CLASSES)
    compared = 0
    for name in CLASSES:
        for shown, kind in (("2D", "2D"), ("BEV", "BEV"), ("3D", "3D")):
            for points in (11, 40):
                for difficulty in ("easy", "moderate", "hard"):
                    for overlap in ("strict", "loose"):
                        value = theirs[f"pred_instances_3d/KITTI/{name}_{shown}_AP{points}_{difficulty}_{overlap}"]
                        assert ours.ap(name, kind, difficulty, overlap, points) == pytest.approx(value, abs=1e-3)
                        compared += value > 1
    assert compared > 90
