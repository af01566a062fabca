"""Ground-truth databases: triops against mmdetection3d, in one process on one core.

    python benchmarks/gtdb.py FOLDER --frames 500

Makes a synthetic data set in FOLDER (1.9 MB per frame) and builds its database both ways. First frame by frame,
interleaved, with the time of each stage. Then as whole jobs, in turns: `create_groundtruth_database` of the script that
mmdet3d ships, and `run` on one thread; from opening the info file to writing the records. Needs mmdet3d; the kernels of
both are compiled before the clock starts. Both find the same points.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import io
import mmap
import os
import shutil
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

import triops.compat.mmcv  # noqa: F401 - mmdet3d imports mmcv.ops
from triops.data.engine_local import LocalEngine
from triops.data.frames import FrameRef
from triops.data.gtdb import GtDatabase
from triops.data.job import run
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
        "modality": {"use_lidar": True, "use_camera": False}, "data_prefix": {"pts": "training/velodyne_reduced"},
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
    output = job.compute(ref, frame)
    found = clock()
    job.write(ref, output)
    return np.diff([begin, read, found, clock()], axis=0), sum(len(data) for _, data in output.contents) // 16


def mmdet3d_whole(root: Path, out: Path) -> None:
    """The database by mmdetection3d's own script."""
    import mmdet3d

    script = Path(mmdet3d.__file__).parent / ".mim/tools/dataset_converters/create_gt_database.py"
    spec = importlib.util.spec_from_file_location("create_gt_database", script)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    with contextlib.redirect_stdout(io.StringIO()):
        module.create_groundtruth_database(
            "KittiDataset", str(root), "kitti", "kitti_infos_train.pkl", database_save_path=str(out / "database"),
            db_info_save_path=str(out / "infos.pkl"),
        )  # fmt: skip


def triops_whole(root: Path, out: Path) -> None:
    run(GtDatabase((open_source(str(root / "kitti_infos_train.pkl")),), str(out)), LocalEngine(1))


def touch_memory(size: int = 2**30) -> None:
    """Use memory once. Some hosts of virtual machines give memory at its first use only, 8 us per page.

    A new page of a file is taken from what was freed last: this.
    """
    with mmap.mmap(-1, size) as memory:
        for page in range(0, size, mmap.PAGESIZE):
            memory[page] = 1


def whole_jobs(root: Path, folder: Path, frames: int, rounds: int) -> None:
    """Print frames per second of wall time and of the process's own time, of both in turns."""
    jobs = {"triops": triops_whole, "mmdet3d": mmdet3d_whole}
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in jobs}
    for _ in range(rounds):
        for name, job in jobs.items():
            out = Path(tempfile.mkdtemp(prefix=f"{name}-", dir=folder))
            os.sync()  # what the job before has written is its own affair
            touch_memory()
            wall, busy = time.perf_counter(), time.process_time()
            job(root, out)
            times[name].append((time.perf_counter() - wall, time.process_time() - busy))
    print(f"whole jobs, median of {rounds}: frames per second by wall time, by time of the core")
    medians = {name: np.median(found, 0) / frames for name, found in times.items()}
    for name, (wall, busy) in medians.items():
        print(f"{name:20} {1 / wall:7.0f} {1 / busy:7.0f}   {busy * 1e3:.2f} ms of the core per frame")
    print(f"triops is {medians['mmdet3d'][1] / medians['triops'][1]:.1f} times as fast by time of the core")


def print_stages(times: dict[str, list[np.ndarray]]) -> None:
    """Print milliseconds of the core per frame and stage; the 10th percentile is the least disturbed by others."""
    for percentile in (10, 50):
        print(f"core ms, {percentile}th percentile   read    find   write   total   frames/s")
        totals = {}
        for name, found in times.items():
            frames = np.array(found)[:, :, 1] * 1e3
            totals[name] = float(np.percentile(frames.sum(1), percentile))
            stages = np.percentile(frames, percentile, 0)
            print(f"{name:24}", *(f"{ms:7.2f}" for ms in (*stages, totals[name])), f"{1e3 / totals[name]:10.0f}")
        print(f"triops is {totals['mmdet3d'] / totals['triops']:.1f} times as fast")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--frames", type=int, default=500)
    parser.add_argument("--points", type=int, default=120_000)
    parser.add_argument("--boxes", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=3, help="of whole jobs")
    options = parser.parse_args()
    torch.set_num_threads(1)
    root = write_kitti(options.folder / "kitti", options.frames, points=options.points, boxes=options.boxes)
    reduced = root / "training/velodyne_reduced"
    if not reduced.exists():
        reduced.symlink_to("velodyne")  # where mmdetection3d's script looks for points
    infos = write_infos(root)
    # New folders, and nothing is removed before the end: for a while after files were removed, ext4 takes 40 times as
    # long to create one, since it walks over the inodes that became free.
    output = Path(tempfile.mkdtemp(prefix="output-", dir=options.folder))
    ours, theirs = output / "triops", output / "mmdet3d"
    theirs.mkdir()
    job = GtDatabase((open_source(str(infos)),), str(ours))
    job.start()
    refs, dataset = job.sources[0].refs(0), mmdet3d_dataset(root)
    for number in range(2):  # compile
        triops_frame(job, refs[number])
        mmdet3d_frame(dataset, number, theirs)
    touch_memory()
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
    print_stages(times)
    whole_jobs(root, output, len(refs), options.rounds)
    shutil.rmtree(output)


if __name__ == "__main__":
    main()
