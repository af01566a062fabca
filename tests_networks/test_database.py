"""mmdetection3d's own DataBaseSampler reads what `triops gtdb` writes, and its own data set agrees on every box."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import triops.compat.mmcv  # noqa: F401
from triops.data.engine_local import LocalEngine
from triops.data.gtdb import GtDatabase
from triops.data.job import run
from triops.data.pickles import load_pickle
from triops.data.sources import open_source
from triops.data.synthetic import write_infos, write_kitti

CLASSES = ["Pedestrian", "Cyclist", "Car"]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from mmdet3d.utils import register_all_modules

    register_all_modules()
    folder = write_kitti(tmp_path_factory.mktemp("kitti"), 4, points=20_000, boxes=15, seed=4)
    infos = open_source(str(write_infos(folder)))
    assert run(GtDatabase((infos,), str(folder)), LocalEngine(1)).good
    return folder


def test_the_sampler_loads_the_database_and_pastes_objects(root: Path) -> None:
    from mmdet3d.registry import TRANSFORMS

    sampler = TRANSFORMS.build({
        "type": "DataBaseSampler", "data_root": str(root), "info_path": str(root / "kitti_dbinfos_train.pkl"),
        "rate": 1.0, "classes": CLASSES, "sample_groups": {"Car": 8, "Pedestrian": 2},
        "prepare": {"filter_by_difficulty": [-1], "filter_by_min_points": {"Car": 5, "Pedestrian": 1}},
    })  # fmt: skip
    np.random.seed(0)
    sampled = sampler.sample_all(np.zeros((0, 7), np.float32), np.zeros(0, np.int64))
    assert len(sampled["gt_bboxes_3d"]) >= 5
    from mmdet3d.structures import LiDARInstance3DBoxes

    boxes = LiDARInstance3DBoxes(sampled["gt_bboxes_3d"])
    inside = boxes.points_in_boxes_part(sampled["points"].tensor[:, :3])
    assert (inside >= 0).float().mean() > 0.99, "points are back in their boxes; rounding may move one across a face"


def test_every_box_and_its_points_are_those_of_mmdetection3ds_own_tools(root: Path) -> None:
    from mmdet3d.registry import DATASETS
    from mmdet3d.structures.ops import box_np_ops

    load = {"type": "LoadPointsFromFile", "coord_type": "LIDAR", "load_dim": 4, "use_dim": 4}
    annotations = {"type": "LoadAnnotations3D", "with_bbox_3d": True, "with_label_3d": True}
    dataset = DATASETS.build({
        "type": "KittiDataset", "data_root": str(root), "ann_file": "kitti_infos_train.pkl", "test_mode": False,
        "data_prefix": {"pts": "training/velodyne"}, "pipeline": [load, annotations],
    })  # fmt: skip
    infos = load_pickle((root / "kitti_dbinfos_train.pkl").read_bytes())
    ours = {(info["image_idx"], info["gt_idx"]): info for group in infos.values() for info in group}
    theirs = 0
    for number in range(len(dataset)):
        example = dataset.pipeline(dataset.get_data_info(number))
        boxes, points = example["ann_info"]["gt_bboxes_3d"].numpy(), example["points"].numpy()
        inside = box_np_ops.points_in_rbbox(points, boxes)
        for i, box in enumerate(boxes):
            info = ours[example["sample_idx"], i]
            assert info["name"] == dataset.metainfo["classes"][example["ann_info"]["gt_labels_3d"][i]]
            assert info["difficulty"] == example["ann_info"]["difficulty"][i]
            np.testing.assert_allclose(info["box3d_lidar"], box, atol=1e-5)
            part = points[inside[:, i]]
            part[:, :3] -= box[:3]
            np.testing.assert_allclose(np.fromfile(root / info["path"], np.float32).reshape(-1, 4), part, atol=1e-5)
            theirs += 1
    assert theirs == len(ours)
