"""Ground-truth databases: triops against the path of mmdetection3d, frame by frame, in one process on one core.

    python benchmarks/gtdb.py FOLDER --frames 500

Makes a synthetic data set in FOLDER (1.9 MB per frame), builds its database both ways, interleaved, and prints the
time of each stage. Needs mmdet3d; the kernels of both are compiled before the clock starts. Both find the same points.
"""

from __future__ import annotations

import argparse
import shutil
import time
from pathlib import Path

import numpy as np
import torch

import triops.compat.mmcv  # noqa: F401 - mmdet3d imports mmcv.ops
from triops.data import files
from triops.data.frames import FrameRef
from triops.data.gtdb import GtDatabase
from triops.data.sources import open_source
from triops.data.synthetic import write_infos, write_kitti

BLOCK = 10  # frames of one before those of the other: as close as can be, without one in the other's caches


def mmdet3d_dataset(root: Path):
    """The data set and the pipeline that tools/dataset_converters/create_gt_database.py builds for KITTI."""
    from mmdet3d.registry import DATASETS
    from mmdet3d.utils import register_all_modules

    register_all_modules()

    load = {"type": "LoadPointsFromFile", "coord_type": "LIDAR", "load_dim": 4, "use_dim": 4}
    annotations = {"type": "LoadAnnotations3D", "with_bbox_3d": True, "with_label_3d": True}
    return DATASETS.build({
        "type": "KittiDataset", "data_root": str(root), "ann_file": "kitti_infos_train.pkl", "test_mode": False,
        "modality": {"use_lidar": True, "use_camera": False}, "data_prefix": {"pts": "training/velodyne"},
        "pipeline": [load, annotations],
    })  # fmt: skip


def clock() -> np.ndarray:
    """Wall time and time of the core, which others on the machine do not lengthen; seconds [2]."""
    return np.array([time.perf_counter(), time.thread_time()])


def mmdet3d_frame(dataset, number: int, folder: Path) -> tuple[np.ndarray, int]:
    """What create_gt_database.py does to a frame: read, find, write. -> seconds [3, 2] of each, points found"""
    from mmdet3d.structures.ops import box_np_ops

    begin = clock()
    example = dataset.pipeline(dataset.get_data_info(number))
    points, boxes = example["points"].numpy(), example["ann_info"]["gt_bboxes_3d"].numpy()
    names = [dataset.metainfo["classes"][label] for label in example["ann_info"]["gt_labels_3d"]]
    read = clock()
    inside = box_np_ops.points_in_rbbox(points, boxes)
    parts = []
    for i, box in enumerate(boxes):
        part = points[inside[:, i]]
        part[:, :3] -= box[:3]
        parts.append(part)
    found = clock()
    for i, part in enumerate(parts):
        with open(folder / f"{number}_{names[i]}_{i}.bin", "w") as file:
            part.tofile(file)
    return np.diff([begin, read, found, clock()], axis=0), sum(map(len, parts))


def triops_frame(job: GtDatabase, ref: FrameRef) -> tuple[np.ndarray, int]:
    """The same stages of triops."""
    begin = clock()
    frame = job.sources[0].load(ref)
    read = clock()
    output = list(job.compute(ref, frame))
    found = clock()
    temporary = f"{job.out}/{job.place}/temporary"
    for path, data in output:
        files.write_whole(f"{job.out}/{path}", data, temporary)
    return np.diff([begin, read, found, clock()], axis=0), sum(len(data) for _, data in output[:-1]) // 16


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--frames", type=int, default=500)
    parser.add_argument("--points", type=int, default=120_000)
    parser.add_argument("--boxes", type=int, default=20)
    options = parser.parse_args()
    torch.set_num_threads(1)
    root = write_kitti(options.folder / "kitti", options.frames, points=options.points, boxes=options.boxes)
    infos = write_infos(root)
    ours, theirs = options.folder / "triops", options.folder / "mmdet3d"
    for folder in (ours, theirs):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
    job = GtDatabase((open_source(str(infos)),), str(ours))
    job.start()
    refs, dataset = job.sources[0].refs(0), mmdet3d_dataset(root)
    for number in range(2):  # compile
        triops_frame(job, refs[number])
        mmdet3d_frame(dataset, number, theirs)
    times: dict[str, list[np.ndarray]] = {"triops": [], "mmdet3d": []}
    counts = {"triops": 0, "mmdet3d": 0}
    for begin in range(2, options.frames, BLOCK):
        for name in times:
            for number in range(begin, min(begin + BLOCK, options.frames)):
                ours_now = name == "triops"
                seconds, count = triops_frame(job, refs[number]) if ours_now else mmdet3d_frame(dataset, number, theirs)
                times[name].append(seconds)
                counts[name] += count
    boxes = len([*(ours / "kitti_gt_database").iterdir()]) / len(refs)
    print(f"{len(refs)} frames, {boxes:.1f} boxes per frame; points in boxes: {counts}")
    for column, what in enumerate(("wall", "core")):
        print(f"median ms, {what:8}     read    find   write   total   frames/s")
        totals = {}
        for name, found in times.items():
            frames = np.array(found)[:, :, column]
            stages, total = np.median(frames, 0) * 1e3, float(np.median(frames.sum(1)))
            totals[name] = total
            print(f"{name:20}", *(f"{stage:7.2f}" for stage in stages), f"{total * 1e3:7.2f}{1 / total:11.0f}")
        print(f"triops is {totals['mmdet3d'] / totals['triops']:.1f} times as fast")


if __name__ == "__main__":
    main()
