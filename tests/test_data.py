"""Facts about jobs over data sets: what they write, what they refuse, and that they go on where they were."""

from __future__ import annotations

import functools
import json
import pickle
import pickletools
import shutil
import socket
import sys
import tarfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import triops_cli
from triops.data import cpu, engine_local, engine_ray, files, pickles, records
from triops.data.engine_local import LocalEngine
from triops.data.frames import Frame, FrameError, FrameRef, points_of
from triops.data.gtdb import GtDatabase, points_of_boxes
from triops.data.infos import open_infos
from triops.data.job import Job, JobError, Outcome, Result, run, shard_of
from triops.data.kitti import difficulty
from triops.data.kitti_labels import parse_labels
from triops.data.label import PointLabels
from triops.data.pickles import PickleError, dump_pickle, load_pickle
from triops.data.sources import open_source
from triops.data.synthetic import write_infos, write_kitti

FRAMES = 5


@pytest.fixture(scope="module")
def kitti(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_kitti(tmp_path_factory.mktemp("kitti"), FRAMES, points=3000, boxes=6, seed=1)


@pytest.fixture
def own_kitti(kitti: Path, tmp_path: Path) -> Path:
    """A copy that a test may damage."""
    return Path(shutil.copytree(kitti, tmp_path / "kitti"))


def database(source: Path | str, out: Path | str, layout: str = "mmdet3d", classes: tuple[str, ...] = ()) -> GtDatabase:
    return GtDatabase((open_source(str(source), inclusive=layout == "pcdet"),), str(out), layout, classes)


def make(source: Path | str, out: Path | str, layout: str = "mmdet3d", **options: Any) -> Result:
    return run(database(source, out, layout), LocalEngine(1), **options)


def tree(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def infos(path: Path) -> dict[str, list[dict[str, Any]]]:
    return pickle.loads(path.read_bytes())  # as the libraries read it


# The points of a box


def test_points_of_a_box_are_relative_to_its_centre_and_in_order() -> None:
    points = np.array([[9, 0, 0, 1], [2, 1, 0, 2], [1, 0, 0.5, 3]], np.float32)
    (found,) = points_of_boxes(points, np.array([[2, 0, 0, 4, 3, 2, 0]], np.float32), "center")
    assert found.tolist() == [[0, 1, 0, 2], [-1, 0, 0.5, 3]]


def test_a_point_in_two_boxes_belongs_to_both_and_an_empty_box_has_none() -> None:
    points = np.array([[0.5, 0, 0.1]], np.float32)
    boxes = np.array([[0, 0, 0, 4, 2, 2, 0], [9, 9, 0, 1, 1, 1, 0], [1, 0, 0, 4, 2, 2, 0]], np.float32)
    first, none, second = points_of_boxes(points, boxes, "bottom")
    assert first.tolist() == [[0.5, 0, np.float32(0.1)]]
    assert second.tolist() == [[-0.5, 0, np.float32(0.1)]]
    assert none.shape == (0, 3)


def test_many_points_and_boxes_give_what_a_loop_over_boxes_gives() -> None:
    random = np.random.default_rng(0)
    points = random.uniform(-5, 5, (5000, 5)).astype(np.float32)
    boxes = np.concatenate([random.uniform(-4, 4, (12, 3)), random.uniform(1, 4, (12, 3)), np.zeros((12, 3))], 1)
    boxes = boxes.astype(np.float32)
    for box, found in zip(boxes, points_of_boxes(points, boxes, "center"), strict=True):
        moved = points[:, :3] - box[:3]
        inside = (np.abs(moved) < box[3:6] / 2).all(1)
        np.testing.assert_array_equal(found, np.concatenate([moved, points[:, 3:]], 1)[inside])


def test_more_pairs_than_points_are_found_too() -> None:
    points = np.random.default_rng(1).uniform(-1, 1, (2000, 4)).astype(np.float32)
    boxes = np.tile(np.array([[0, 0, 0, 9, 9, 9, 0]], np.float32), (5, 1))
    for found in points_of_boxes(points, boxes, "center"):
        np.testing.assert_array_equal(found, points)


@pytest.mark.parametrize("features", [3, 4, 6])
@pytest.mark.parametrize("position", [0, 1023, 1024, 2999])
def test_a_point_that_is_not_finite_is_found_wherever_it_is(features: int, position: int) -> None:
    points = np.zeros((3000, features), np.float32)
    boxes = np.array([[50, 0, 0, 1, 1, 1, 0]], np.float32)
    points[position, 3:] = np.nan  # other features may be anything
    assert [part.shape for part in points_of_boxes(points, boxes, "center")] == [(0, features)]
    for axis in range(3):
        points[:, :3] = 0
        points[position, axis] = -np.inf
        with pytest.raises(FrameError, match=rf"f\.bin: 1 points are not finite, the first is number {position}"):
            points_of_boxes(points, boxes, "center", "f.bin")
        with pytest.raises(FrameError, match="1 points are not finite"):
            points_of_boxes(points, boxes[:0], "center")


# Layouts


def test_the_layout_of_mmdetection3d(kitti: Path, tmp_path: Path) -> None:
    result = make(kitti, tmp_path)
    assert result.good
    assert result.tally.frames == FRAMES
    found = infos(tmp_path / "kitti_dbinfos_train.pkl")
    assert [*found["Car"][0]] == [
        "name", "path", "image_idx", "gt_idx", "box3d_lidar", "num_points_in_gt", "difficulty", "group_id",
    ]  # fmt: skip
    every = [info for group in found.values() for info in group]
    assert sorted(info["group_id"] for info in every) == [*range(len(every))]
    for name, group in found.items():
        for info in group:
            assert info["path"] == f"kitti_gt_database/{info['image_idx']}_{name}_{info['gt_idx']}.bin"
            assert info["box3d_lidar"].dtype == np.float32
            points = np.fromfile(tmp_path / info["path"], np.float32).reshape(-1, 4)
            assert len(points) == info["num_points_in_gt"]
            length, width, height = info["box3d_lidar"][3:6]
            assert (points[:, 2] >= -1e-4).all(), "z starts at the bottom"
            assert (points[:, 2] <= height + 1e-4).all()
            assert (np.hypot(points[:, 0], points[:, 1]) <= np.hypot(length, width) / 2 + 1e-4).all()


def test_the_layout_of_openpcdet(kitti: Path, tmp_path: Path) -> None:
    make(kitti, tmp_path / "mmdet3d")
    make(kitti, tmp_path / "pcdet", "pcdet")
    theirs, ours = (infos(tmp_path / name / "kitti_dbinfos_train.pkl") for name in ("mmdet3d", "pcdet"))
    assert [*ours["Car"][0]] == [
        "name", "path", "image_idx", "gt_idx", "box3d_lidar", "num_points_in_gt", "difficulty", "bbox", "score",
    ]  # fmt: skip
    for bottom, centre in zip(theirs["Car"], ours["Car"], strict=True):
        assert centre["path"] == f"gt_database/{centre['image_idx']}_Car_{centre['gt_idx']}.bin"
        assert centre["image_idx"] == f"{bottom['image_idx']:06}"
        height = bottom["box3d_lidar"][5]
        np.testing.assert_allclose(centre["box3d_lidar"][2], bottom["box3d_lidar"][2] + height / 2, atol=1e-5)
        low = np.fromfile(tmp_path / "mmdet3d" / bottom["path"], np.float32).reshape(-1, 4)
        middle = np.fromfile(tmp_path / "pcdet" / centre["path"], np.float32).reshape(-1, 4)
        np.testing.assert_allclose(low[:, 2] - middle[:, 2], height / 2, atol=1e-5)


def test_only_the_classes_asked_for_are_written(kitti: Path, tmp_path: Path) -> None:
    run(database(kitti, tmp_path, classes=("Car",)), LocalEngine(1))
    assert [*infos(tmp_path / "kitti_dbinfos_train.pkl")] == ["Car"]
    assert all("_Car_" in p.name for p in (tmp_path / "kitti_gt_database").iterdir())


def test_an_info_file_gives_what_the_folders_give(own_kitti: Path, tmp_path: Path) -> None:
    make(own_kitti, tmp_path / "folders")
    make(write_infos(own_kitti), tmp_path / "infos")
    names = [p.name for p in (tmp_path / "folders/kitti_gt_database").iterdir()]
    assert names
    for name in names:
        parts = [(tmp_path / source / "kitti_gt_database" / name).read_bytes() for source in ("folders", "infos")]
        np.testing.assert_allclose(*(np.frombuffer(part, np.float32) for part in parts), atol=1e-5)
    one, two = (infos(tmp_path / source / "kitti_dbinfos_train.pkl") for source in ("folders", "infos"))
    assert [i["difficulty"] for i in one["Car"]] == [i["difficulty"] for i in two["Car"]]


@pytest.mark.parametrize(
    ("height", "occluded", "truncated", "exclusive", "inclusive"),
    [
        (50, 0, 0.0, 0, 0), (40, 0, 0.0, 1, 0), (39, 0, 0.0, 1, 0), (24.5, 0, 0, -1, 1), (50, 2, 0.4, 2, 2),
        (50, 3, 0, -1, -1),
    ],
)  # fmt: skip
def test_difficulty_follows_height_occlusion_and_truncation(
    height: float, occluded: int, truncated: float, exclusive: int, inclusive: int
) -> None:
    labels = parse_labels(f"Car {truncated} {occluded} 0 0 100 50 {100 + height} 1 1 1 0 0 9 0")
    assert difficulty(labels).tolist() == [exclusive]
    assert difficulty(labels, inclusive=True).tolist() == [inclusive]


# Info files of other data sets


def write_info_file(folder: Path, metainfo: dict[str, Any], entry: dict[str, Any], name: str) -> Path:
    path = folder / name
    path.write_bytes(dump_pickle({"metainfo": metainfo, "data_list": [{"sample_idx": 7, **entry}]}))
    return path


def write_points(path: Path, points: list[list[float]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    np.array(points, np.float32).tofile(path)


def load_only(path: Path, **options: Any) -> Frame:
    source = open_infos(str(path), None, None, options.get("sweeps"))
    (ref,) = source.refs(0)
    return source.load(ref)


def test_waymo_boxes_are_in_the_lidars_frame_with_z_at_the_bottom(tmp_path: Path) -> None:
    write_points(tmp_path / "training/velodyne/0000007.bin", [[1, 0, 0.5, 0, 0, 0]])
    instances = [
        {"bbox_3d": [1.0, 0, 0, 4, 2, 1.5, 0.1], "bbox_label_3d": 1},
        {"bbox_3d": [5.0, 0, 0, 4, 2, 1.5, 0.1], "bbox_label_3d": -1},
    ]
    entry = {"lidar_points": {"num_pts_feats": 6, "lidar_path": "0000007.bin"}, "instances": instances}
    frame = load_only(write_info_file(tmp_path, {"dataset": "waymo"}, entry, "waymo_infos_train.pkl"))
    assert frame.names == ["Pedestrian"]
    assert frame.z_origin == "bottom"
    np.testing.assert_allclose(frame.boxes, [[1.0, 0, 0, 4, 2, 1.5, 0.1]])


def nuscenes(tmp_path: Path, sweeps: list[dict[str, Any]] | None) -> Path:
    write_points(tmp_path / "samples/LIDAR_TOP/a.bin", [[10, 0, 0, 7, 3], [0.5, 0.5, 0, 7, 3]])
    write_points(tmp_path / "sweeps/LIDAR_TOP/b.bin", [[20, 1, 0, 8, 3], [0.5, -0.5, 0, 8, 3]])
    instances = [
        {"bbox_3d": [10.0, 0, 0, 4, 2, 2, 0], "bbox_label_3d": 0, "bbox_3d_isvalid": True, "velocity": [np.nan] * 2},
        {"bbox_3d": [30.0, 0, 0, 4, 2, 2, 0], "bbox_label_3d": 0, "bbox_3d_isvalid": False, "velocity": [1.0, 2]},
        {"bbox_3d": [40.0, 0, 0, 4, 2, 2, 0], "bbox_label_3d": 1, "bbox_3d_isvalid": True, "velocity": [1.0, 2]},
    ]
    entry = {
        "timestamp": 5.0, "instances": instances, "lidar_points": {"num_pts_feats": 5, "lidar_path": "a.bin"},
        **({} if sweeps is None else {"lidar_sweeps": sweeps}),
    }  # fmt: skip
    categories = {"car": 0, "bus": 1, "animal": -1}
    return write_info_file(
        tmp_path, {"categories": categories, "dataset": "nuscenes"}, entry, "nuscenes_infos_train.pkl"
    )


def test_nuscenes_boxes_have_their_centre_and_a_velocity_and_are_valid(tmp_path: Path) -> None:
    frame = load_only(nuscenes(tmp_path, None), sweeps=0)
    assert (frame.names, frame.z_origin) == (["car", "bus"], "center")
    np.testing.assert_allclose(frame.boxes, [[10, 0, 0, 4, 2, 2, 0, 0, 0], [40, 0, 0, 4, 2, 2, 0, 1, 2]])


def test_sweeps_of_nuscenes_are_moved_aged_and_freed_of_the_vehicle(tmp_path: Path) -> None:
    moved = np.eye(4)
    moved[:3, 3] = [-1, 0, 0]
    sweep = {"timestamp": 4.5, "lidar_points": {"lidar_path": "x/sweeps/b.bin", "lidar2sensor": moved.tolist()}}
    frame = load_only(nuscenes(tmp_path, [sweep]))
    np.testing.assert_allclose(frame.points, [[10, 0, 0, 7, 0], [0.5, 0.5, 0, 7, 0], [21, 1, 0, 8, 0.5]])


def test_a_first_frame_of_nuscenes_stands_in_for_its_missing_sweeps(tmp_path: Path) -> None:
    frame = load_only(nuscenes(tmp_path, None), sweeps=3)
    np.testing.assert_allclose(frame.points, [[10, 0, 0, 7, 0], [0.5, 0.5, 0, 7, 0], *[[10, 0, 0, 7, 0]] * 3])


def test_train_and_val_lie_side_by_side_though_both_number_frames_from_0(tmp_path: Path) -> None:
    train = nuscenes(tmp_path, None)
    val = train.with_name("nuscenes_infos_val.pkl")
    content = pickle.loads(train.read_bytes())
    content["data_list"][0]["instances"][0]["bbox_3d"][1] = 100.0  # an empty box
    val.write_bytes(pickle.dumps(content))
    for path in (train, val):
        assert make(path, tmp_path).good
    counts = [
        infos(tmp_path / f"nuscenes_dbinfos_{split}.pkl")["car"][0]["num_points_in_gt"] for split in ("train", "val")
    ]
    sizes = [(tmp_path / f"nuscenes_gt_database{suffix}/7_car_0.bin").stat().st_size for suffix in ("", "_val")]
    assert (counts, sizes) == ([11, 0], [11 * 20, 0])


def test_labels_are_those_of_the_frames_own_points(tmp_path: Path) -> None:
    assert triops_cli.main(["label", str(nuscenes(tmp_path, None))]) == 0
    assert np.fromfile(tmp_path / "labels/7.label", np.uint32).tolist() == [1 << 16 | 1, 0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"instances": [{"bbox_label_3d": float("inf")}]}, "malformed (OverflowError"),
        ({"sample_idx": None}, "sample_idx of entry 0 must be a number or a name"),
        ({"sample_idx": "../../x"}, "sample_idx '../../x' cannot be part of a file's name"),
        ({"instances": [{"bbox_label_3d": 0}]}, "malformed (KeyError: 'bbox_3d')"),
        ({"instances": [{"bbox_label_3d": 0, "bbox_3d": [1.0] * 6}]}, "bbox_3d must be 7 numbers or more, got [6]"),
        ({"instances": [{"bbox_label_3d": 0, "bbox_3d": [np.nan] * 7}]}, "box 0 must be finite"),
        ({"lidar_points": {"num_pts_feats": 2, "lidar_path": "a"}}, "num_pts_feats must be from 3 to 64, got 2"),
    ],
)
def test_a_malformed_entry_of_an_info_file_is_named(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    write_points(tmp_path / "training/velodyne/a.bin", [[1, 0, 0.5, 0, 0, 0]])
    entry = {"lidar_points": {"num_pts_feats": 6, "lidar_path": "a.bin"}, "instances": [], **change}
    path = write_info_file(tmp_path, {"dataset": "waymo"}, entry, "waymo_infos_train.pkl")
    with pytest.raises(FrameError) as caught:
        load_only(path)
    assert message in str(caught.value)


def test_a_class_that_is_a_path_is_refused(tmp_path: Path) -> None:
    path = write_info_file(tmp_path, {"dataset": "waymo", "classes": ["a/../b"]}, {}, "waymo_infos_train.pkl")
    with pytest.raises(FrameError, match="cannot be part of a file's name"):
        open_infos(str(path), None, None, None).refs(0)


# Pickles


class Calls:
    """Pickled, it calls a function when read."""

    def __init__(self, function: Callable[..., Any], *args: Any) -> None:
        self.call = function, args

    def __reduce__(self) -> Any:
        return self.call


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_plain_values_and_arrays_are_read_at_every_protocol(protocol: int) -> None:
    value = {
        "list": [1, 2.5, None, True, "é", b"\xff", (1, {2})],
        "float": np.arange(6, dtype=np.float32).reshape(2, 3), "fortran": np.asfortranarray(np.arange(6).reshape(2, 3)),
        "text": np.array(["Car", "Van"]), "any": np.array(["Car", None], object), "empty": np.empty((0, 7)),
        "big": np.arange(3, dtype=">i4"), "scalar": np.float32(1.5), "name": np.str_("Car"), "bool": np.bool_(True),
    }  # fmt: skip
    data = pickle.dumps(value, protocol)
    found = load_pickle(data)
    assert {*found} == {*value}
    for key, expected in pickle.loads(data).items():
        if isinstance(expected, np.ndarray):
            assert (found[key].dtype, found[key].shape) == (expected.dtype, expected.shape)
            assert found[key].tolist() == expected.tolist()
        else:
            assert found[key] == expected
            assert type(found[key]) is type(expected)


def old_array(core: bytes, data: bytes) -> bytes:
    """A pickle of a float32 array of 2 elements, as NumPy writes it, with these bytes."""
    head = b"c" + core + b".multiarray\n_reconstruct\n(cnumpy\nndarray\n(I0\ntC\x01btR(I1\n(I2\ntcnumpy\ndtype\n"
    dtype = b"(X\x02\x00\x00\x00f4I00\nI01\ntR(I3\nX\x01\x00\x00\x00<NNNI-1\nI-1\nI0\ntb"
    return head + dtype + b"I00\nC" + bytes([len(data)]) + data + b"tb."


def test_the_names_of_numpy_1_and_2_are_read() -> None:
    for core in (b"numpy.core", b"numpy._core"):
        assert load_pickle(old_array(core, np.array([1, 2], "<f4").tobytes())).tolist() == [1.0, 2.0]


def test_what_is_dumped_is_read_by_pickle_itself() -> None:
    data = dump_pickle({"box": np.array([1.5, 2], np.float32), "names": np.array(["Car", "Van"])})
    assert b"_core" not in data
    assert pickle.loads(data)["names"].tolist() == load_pickle(data)["names"].tolist() == ["Car", "Van"]
    box = pickle.loads(data)["box"]
    assert (box.tolist(), box.dtype, box.flags.writeable) == ([1.5, 2.0], np.float32, True)
    assert load_pickle(data)["box"].tolist() == [1.5, 2.0]


@pytest.mark.parametrize(
    "value",
    [
        Calls(eval, "open('owned', 'w')"), Calls(getattr, "", "join"), Calls(pickle.loads, b"N."), Path("x"),
        Calls(np.load, "x"), Calls(np.dtype, [("a", "O")]), Calls(np.dtype, "V8"), Calls(np.frombuffer, b"12345678"),
    ],
    ids=["eval", "getattr", "pickle.loads", "Path", "np.load", "np.dtype O", "np.dtype V8", "np.frombuffer"],
)  # fmt: skip
def test_everything_else_is_refused(value: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for protocol in (2, 4):
        with pytest.raises(PickleError, match=r"infos\.pkl: refused: "):
            load_pickle(pickle.dumps([value], protocol), "infos.pkl")
    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize(
    "data",
    [
        b"", b"junk", pickle.dumps([1] * 100)[:-5],
        b"cnumpy\ndtype\n}X\x08\x00\x00\x00functionNsb.",  # sets an attribute of a function that it may call
        b"c_codecs\nencode\n(X\x01\x00\x00\x00aX\x03\x00\x00\x00rottR.",
        b"Pidentifier\n.",
        b"cnumpy\nndarray\n(I9\ntR.",
        # an array of two numbers with the bytes of one
        old_array(b"numpy._core", bytes(4)),
    ],
)  # fmt: skip
def test_damaged_and_crafted_pickles_are_errors_of_their_own_kind(data: bytes) -> None:
    with pytest.raises(PickleError):
        load_pickle(data)


def test_a_small_pickle_makes_no_huge_array() -> None:
    nested: Any = [0.0] * 10
    for _ in range(8):
        nested = [nested] * 10  # pickled once
    for values, kind in ((nested, "f8"), ([""] * 20_000, "U16384")):

        class Asked:
            def __reduce__(self) -> Any:
                return np.array, (values, kind)  # noqa: B023

        with pytest.raises(PickleError, match="values far larger than the file"):
            load_pickle(pickle.dumps(Asked()))


def times(number: int, call: bytes) -> bytes:
    """The instructions of a list of what so many equal calls make."""
    return b"](" + call * number + b"e."


TEXT = b"a" * 100_000
LONG = len(TEXT).to_bytes(4, "little")
MANY_COPIES = {
    "encode": b"c_codecs\nencode\nq\x00X" + LONG + TEXT + b"q\x01" + times(70, b"h\x00h\x01\x85R"),
    "set": b"cbuiltins\nset\nq\x00(" + b"N" * 100_000 + b"lq\x01" + times(5, b"h\x00h\x01\x85R"),
    "_frombuffer": b"cnumpy.core.numeric\n_frombuffer\nq\x00B" + LONG + TEXT + b"q\x01cnumpy\ndtype\n"
    b"X\x02\x00\x00\x00u1\x85Rq\x02J" + LONG + b"\x85q\x03X\x01\x00\x00\x00Cq\x04"
    + times(70, b"h\x00(h\x01h\x02h\x03h\x04tR"),
    "_reconstruct": b"cnumpy\ndtype\nX\x02\x00\x00\x00u2\x85R(K\x03X\x01\x00\x00\x00>NNNK\x00K\x00K\x00tbq\x00"
    b"cnumpy.core.multiarray\n_reconstruct\nq\x01cnumpy\nndarray\nK\x00\x85B\x01\x00\x00\x00b\x87q\x02"
    b"(K\x01J" + (len(TEXT) // 2).to_bytes(4, "little") + b"\x85h\x00\x89B" + LONG + TEXT + b"tq\x03"
    + times(70, b"h\x01h\x02Rh\x03b"),
}  # fmt: skip


@pytest.mark.parametrize("name", MANY_COPIES)
def test_a_small_pickle_makes_no_great_number_of_copies(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    data = b"\x80\x03" + MANY_COPIES[name]
    assert len(load_pickle(data)) == (5 if name == "set" else 70)  # it is well formed
    monkeypatch.setattr(pickles, "_ROOM", 0)
    with pytest.raises(PickleError, match="values far larger than the file"):
        load_pickle(data)


@pytest.mark.parametrize("protocol", range(6))
def test_what_a_pickle_held_can_be_pickled_again(protocol: int) -> None:
    value = load_pickle(pickle.dumps({"box": np.arange(6.0).reshape(2, 3).T}, protocol))
    again = pickle.loads(pickle.dumps(value, protocol))["box"]
    assert type(again) is np.ndarray
    np.testing.assert_array_equal(again, value["box"])


FAR = 100_000


def frame(data: bytes) -> bytes:
    return b"\x95" + len(data).to_bytes(8, "little") + data


@pytest.mark.parametrize(
    "data",
    [
        frame(b"Nr\x00") + FAR.to_bytes(4, "little") + b".",  # the zero is dropped, and four other bytes are read
        frame(b"N" + frame(b"rrrrr.")[:-6] + b"X") + b"r" + FAR.to_bytes(4, "little") + b".",  # a frame in a frame
        frame(b"NX\x01\x00") + b"\x00\x00\x00\x00r" + FAR.to_bytes(4, "little") + b".",
    ],
)
def test_a_frame_of_a_pickle_hides_no_number(data: bytes) -> None:
    with pytest.raises(PickleError, match=r"it numbers more values .* or its frames end within an instruction"):
        load_pickle(b"\x80\x04" + data)


def test_frames_of_a_pickle_may_stand_one_behind_or_in_another() -> None:
    whole = frame(b"]") + frame(frame(b"q\x00(") + b"K\x01") + b"K\x02" + frame(b"e") + b"."
    assert load_pickle(b"\x80\x04" + whole) == [1, 2]
    value = [bytes(100_000), "a" * 100_000, [str(i) for i in range(30_000)]]
    for dump in (pickle.dumps, pickle._dumps):  # type: ignore[attr-defined]
        assert load_pickle(dump(value, 4)) == value


@pytest.mark.parametrize("put", [b"r" + FAR.to_bytes(4, "little"), b"p100000\n", b"p0100000\n", b"p1_000_0_0\n"])
@pytest.mark.parametrize("before", [b"", b"\x80\x02", b"X\x01\x00\x00\x00r", b"\x8c\x02.p", b"Vr.\n", b"G" + b"r" * 8])
def test_a_small_pickle_numbers_no_value_that_it_has_no_room_for(before: bytes, put: bytes) -> None:
    for data in (before + b"N" + put + b".", before + b"N" + put.rstrip(b"\n")):
        with pytest.raises(PickleError, match=r"infos\.pkl: refused: it numbers more values than it can hold"):
            load_pickle(data, "infos.pkl")


def test_a_pickle_may_number_values_as_it_likes_within_its_size() -> None:
    assert load_pickle(b"]r\x00\xff\x00\x00p65535\n.") == []
    value = [str(i) for i in range(70_000)]  # more than are always allowed
    for protocol in range(5):
        assert load_pickle(pickle.dumps(value, protocol)) == value


@pytest.mark.parametrize("protocol", range(6))
def test_instructions_of_a_pickle_are_told_from_what_follows_them(protocol: int) -> None:
    numbers = [None, True, 1, 300, 70_000, -(10**30), 10**700, 1.5]
    texts = ["", "rp.", "rp." * 100, "ą\n", b"r.", b"rp." * 100, bytearray(b"rp.") * 100]
    many = [{str(i): (i, [i], {i})} for i in range(300)]  # numbers of one byte, then of four
    value = [numbers, texts, many, np.arange(3.0), np.array(["a"]), Path("x"), frozenset({1})]
    data = pickle.dumps(value, protocol)
    puts = [(at, number) for code, number, at in pickletools.genops(data) if code.name in ("PUT", "LONG_BINPUT")]
    for limit in range(0, len(many), 7):
        expected = next((at for at, number in puts if number >= limit), -1)
        assert cpu.first_far_put(np.frombuffer(data, np.uint8), pickles.arguments(), limit) == expected
    for end in range(len(data) - 200, len(data)):  # cut off
        cpu.first_far_put(np.frombuffer(data[:end], np.uint8), pickles.arguments(), 1 << 40)


# Engines, shards and restarts


@pytest.fixture(scope="module")
def expected(kitti: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    out = tmp_path_factory.mktemp("expected")
    make(kitti, out)
    return tree(out)


def test_the_output_is_the_same_with_several_threads(kitti: Path, tmp_path: Path, expected: dict[str, bytes]) -> None:
    run(database(kitti, tmp_path), LocalEngine(3))
    assert tree(tmp_path) == expected


def test_the_output_is_the_same_with_processes(
    kitti: Path, tmp_path: Path, expected: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_local, "THREADS", 1)
    monkeypatch.setattr(engine_local, "WORTH_PROCESSES", 1)
    result = run(database(kitti, tmp_path), LocalEngine(2))
    assert result.tally.frames == FRAMES
    assert tree(tmp_path) == expected


def backwards(job: Job, refs: list[FrameRef]) -> Iterator[Outcome]:
    yield from map(job, reversed(refs))


def test_the_output_is_the_same_in_any_order(kitti: Path, tmp_path: Path, expected: dict[str, bytes]) -> None:
    run(database(kitti, tmp_path), backwards)
    assert tree(tmp_path) == expected


def test_the_last_shard_finishes_the_job(kitti: Path, tmp_path: Path, expected: dict[str, bytes]) -> None:
    results = [run(database(kitti, tmp_path), LocalEngine(1), shard=(part, 3)) for part in (2, 3, 1)]
    assert [r.finished is not None for r in results] == [False, False, True]
    assert [r.missing for r in results] == [3, 2, 0]
    assert tree(tmp_path) == expected


def test_shards_hold_every_frame_once() -> None:
    refs = [FrameRef(str(k), k, 0) for k in range(10)]
    parts = [shard_of(refs, (part, 4)) for part in range(1, 5)]
    assert sorted(r.sample for part in parts for r in part) == [*range(10)]


def test_a_second_run_does_nothing(kitti: Path, tmp_path: Path, expected: dict[str, bytes]) -> None:
    make(kitti, tmp_path)
    again = make(kitti, tmp_path)
    assert (again.before, again.tally.frames) == (FRAMES, 0)
    assert tree(tmp_path) == expected


def test_a_run_that_is_killed_goes_on(kitti: Path, tmp_path: Path, expected: dict[str, bytes]) -> None:
    def killed(job: Job, refs: list[FrameRef]) -> Iterator[Outcome]:
        yield job(refs[0])
        yield job(refs[1])
        frame = job.sources[0].load(refs[2])
        output = job.compute(refs[2], frame)
        [(name, data), *_] = output.contents
        (tmp_path / output.folder / name).write_bytes(bytes(data)[:5])
        (record,) = (tmp_path / job.place).glob("*.records")
        with record.open("a") as file:
            file.write(f"{refs[2].key} {output.record}"[:40])
        (tmp_path / job.place / "temporary" / "left-over").write_bytes(b"half of a file")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(database(kitti, tmp_path), killed)
    again = make(kitti, tmp_path)
    assert (again.before, again.tally.frames) == (2, FRAMES - 2)
    assert tree(tmp_path) == expected


def test_a_frame_whose_points_were_removed_is_done_again(
    kitti: Path, tmp_path: Path, expected: dict[str, bytes]
) -> None:
    make(kitti, tmp_path)
    next((tmp_path / "kitti_gt_database").glob("2_*.bin")).unlink()
    assert make(kitti, tmp_path).tally.frames == 1
    assert tree(tmp_path) == expected


def test_output_of_other_settings_is_not_mixed(kitti: Path, tmp_path: Path) -> None:
    make(kitti, tmp_path)
    with pytest.raises(JobError, match="layout was mmdet3d, is pcdet"):
        make(kitti, tmp_path, "pcdet")


@pytest.mark.parametrize(
    ("folder", "path"),
    [
        ("memory://", "memory://n"), ("file:///", "file:///n"), ("s3://b/", "s3://b/n"), ("/", "/n"), ("a//", "a/n"),
        ("zip::x.zip", "zip://n::x.zip"), ("zip://a/::x.zip", "zip://a/n::x.zip"), ("a::b", "a::b/n"),
        ("simplecache::file:///", "simplecache::file:///n"),
    ],
)  # fmt: skip
def test_a_name_in_the_uppermost_folder_of_a_url(folder: str, path: str) -> None:
    """It was taken for a local path, as a slash of `://` was lost."""
    assert files.join(folder, "n") == path
    assert files.join(files.folder_of(path), files.name_of(path)) == path


def test_a_url_is_a_place_like_any_other(kitti: Path, expected: dict[str, bytes]) -> None:
    for path, data in tree(kitti).items():
        files.make_folder(files.folder_of(f"memory://kitti/{path}"))
        files.write_whole(f"memory://kitti/{path}", data, "memory://kitti")
    result = make("memory://kitti", "memory://out")
    assert result.good
    for path, data in expected.items():
        assert files.read(f"memory://out/{path}") == data
    assert make("memory://kitti", "memory://out").before == FRAMES


def test_files_that_were_there_are_overwritten_whatever_their_length(tmp_path: Path) -> None:
    for data in (b"12345", b"123", b"", b"123456"):
        files.write(str(tmp_path), [("a.bin", data), ("b.bin", data[::-1])])
        assert [files.read(str(tmp_path / name)) for name in ("a.bin", "b.bin")] == [data, data[::-1]]


@pytest.mark.parametrize("record", ["{", "[]", '{"gt_idx": [0]}', '{"gt_idx": [], "box": "zz"}', "\udcff"])
def test_a_frame_whose_record_is_damaged_is_done_again(
    kitti: Path, tmp_path: Path, expected: dict[str, bytes], record: str
) -> None:
    make(kitti, tmp_path)
    path = tmp_path / ".kitti_dbinfos_train/all.records"
    lines = path.read_text().splitlines()
    lines[1] = f"000001 {record}"
    path.write_text("\n".join([*lines, ""]), errors="surrogateescape")
    again = make(kitti, tmp_path)
    assert (again.before, again.tally.frames) == (FRAMES - 1, 1)
    assert tree(tmp_path) == expected


def test_a_later_record_of_a_frame_counts_and_one_without_an_end_does_not(tmp_path: Path) -> None:
    folder = str(tmp_path)
    records.append(folder, "a", "1")
    records.append(folder, "b", "2")
    records.put_together(folder, "ab", records.read(folder), folder)
    assert tree(tmp_path) == {"all.records": b"a 1\nb 2\n"}
    records.append(folder, "a", "3")
    (part,) = tmp_path.glob("part-*")
    with part.open("a") as file:
        file.write("b 4")
    assert records.read(folder) == {"a": "3", "b": "2"}
    records.append(folder, "c", "5")
    assert records.read(folder)["c"] == "5", "what a failed write left does not run into the next"


@pytest.fixture(scope="module")
def archives(kitti: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with KITTI's folders and an info file in kitti.zip, in a folder `data`, and in kitti.tar."""
    root = tmp_path_factory.mktemp("archives")
    write_infos(shutil.copytree(kitti, root / "own/data"))
    shutil.make_archive(str(root / "kitti"), "zip", root / "own")
    with tarfile.open(root / "kitti.tar", "w") as tar:
        for path in (root / "own/data").iterdir():
            tar.add(path, path.name)
    return root


@pytest.mark.parametrize(
    "source",
    [
        "zip://data::file://{}/kitti.zip", "zip://data/::{}/kitti.zip", "simplecache::zip://data::{}/kitti.zip",
        "tar://::file://{}/kitti.tar", "tar::{}/kitti.tar", "simplecache::file://{}/own/data",
        "zip://data/kitti_infos_train.pkl::{}/kitti.zip", "tar://kitti_infos_train.pkl::{}/kitti.tar",
        "filecache::file://{}/own/data/kitti_infos_train.pkl",
    ],
)  # fmt: skip
def test_archives_and_caches_are_sources(
    source: str, archives: Path, tmp_path: Path, expected: dict[str, bytes]
) -> None:
    found = open_source(source.format(archives))
    assert vars(found)["split"] == "train"
    result = run(GtDatabase((found,), str(tmp_path), "mmdet3d", ()), LocalEngine(2))
    assert result.good
    assert {name: data for name, data in tree(tmp_path).items() if name.endswith(".bin")} == {
        name: data for name, data in expected.items() if name.endswith(".bin")
    }


def test_what_is_wrong_with_an_archive_is_said(archives: Path, tmp_path: Path) -> None:
    whole = (archives / "kitti.zip").read_bytes()
    (tmp_path / "cut.zip").write_bytes(whole[:1000])
    with pytest.raises(OSError, match=r"^zip://training/label_2::.*cut\.zip: File is not a zip file"):
        open_source(f"zip::{tmp_path}/cut.zip")
    with pytest.raises(FrameError, match=r"zip://elsewhere::.*: no such file or folder"):
        open_source(f"zip://elsewhere::{archives}/kitti.zip")

    at = whole.index(b"PK", whole.index(b"velodyne/000001.bin")) - 100  # bytes of that file
    (tmp_path / "damaged.zip").write_bytes(whole[:at] + bytes(50) + whole[at + 50 :])
    result = make(f"zip://data::{tmp_path}/damaged.zip", tmp_path / "out")
    assert [*result.bad] == ["000001"]
    assert "zip://data/training/velodyne/000001.bin::" in result.bad["000001"]


def test_no_output_goes_to_an_archive_or_a_cache(
    kitti: Path, archives: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What a cache gives back is not what was written there last."""
    for arguments in ([kitti, "--out", f"simplecache::file://{tmp_path}"], [f"zip://data::{archives}/kitti.zip"]):
        assert triops_cli.main(["gtdb", *map(str, arguments)]) == 2
        error = " ".join(capsys.readouterr().err.split())
        assert f"--out must be a place that files can be written to and read back from, got {arguments[-1]}" in error
        assert "Remedy: --out with a folder" in error
    assert [*tmp_path.iterdir()] == []


def test_records_that_another_process_puts_together_meanwhile_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, read_file = str(tmp_path), files.read
    records.append(folder, "a", "1")

    def late(path: str) -> bytes:
        if "part-" in path:
            records.put_together(folder, "a", {"a": "1"}, folder)
        return read_file(path)

    monkeypatch.setattr(files, "read", late)
    assert records.read(folder) == {"a": "1"}


def test_another_process_may_end_the_job_meanwhile(kitti: Path, tmp_path: Path, expected: dict[str, bytes]) -> None:
    def slow(job: Job, refs: Sequence[FrameRef]) -> Iterator[Outcome]:
        for position, ref in enumerate(refs):
            if position == 2:
                make(kitti, tmp_path)
            yield job(ref)

    assert run(database(kitti, tmp_path), slow).good
    assert tree(tmp_path) == expected


@pytest.mark.parametrize("protocol", ["", "file://"])
def test_another_process_may_remove_the_temporary_folder_meanwhile(protocol: str, kitti: Path, tmp_path: Path) -> None:
    """Labels are written under a temporary name each."""
    job = PointLabels((open_source(str(kitti)),), f"{protocol}{tmp_path}", "label", ("Car",))

    def slow(job: Job, refs: Sequence[FrameRef]) -> Iterator[Outcome]:
        for position, ref in enumerate(refs):
            if position == 2:
                run(job, LocalEngine(1))
            yield job(ref)

    assert run(job, slow).good
    assert len([*tmp_path.glob("labels/*.label")]) == FRAMES


@pytest.mark.parametrize("protocol", ["", "file://", "memory://"])
def test_nothing_temporary_is_left(protocol: str, kitti: Path, tmp_path: Path) -> None:
    source, out = open_source(str(kitti)), f"{protocol}{tmp_path}"
    for job in (database(kitti, out), PointLabels((source,), out, "label", ("Car",))):
        run(job, LocalEngine(2))
        assert files.is_folder(files.join(out, job.place))
        assert not files.exists(files.join(out, job.place, "temporary"))


def sleep(job: str, ref: FrameRef) -> Outcome:
    time.sleep(0.05)
    with open(job, "ab") as log:
        log.write(b".")
    return Outcome(ref.key)


def test_processes_drop_what_has_not_begun_when_nobody_waits_any_more(tmp_path: Path) -> None:
    log, refs = tmp_path / "log", [FrameRef(str(k), k, 0) for k in range(1500)]
    outcomes = LocalEngine(8)(functools.partial(sleep, str(log)), refs)  # type: ignore[arg-type]
    next(outcomes)
    outcomes.close()  # type: ignore[attr-defined]
    assert log.stat().st_size < 500


# Bad frames


def truncate(root: Path) -> None:
    path = root / "training/velodyne/000001.bin"
    path.write_bytes(path.read_bytes()[:-3])


def add_nan(root: Path) -> None:
    path = root / "training/velodyne/000001.bin"
    points = np.fromfile(path, np.float32)
    points[4 * 17 + 1] = np.nan
    points.tofile(path)


def remove_calibration(root: Path) -> None:
    (root / "training/calib/000001.txt").unlink()


def damage_label(root: Path) -> None:
    path = root / "training/label_2/000001.txt"
    path.write_text(path.read_text().replace("Car 0", "Car zero", 1))


def make_singular(root: Path) -> None:
    path = root / "training/calib/000001.txt"
    kept = [line for line in path.read_text().splitlines() if not line.startswith("Tr_velo_to_cam")]
    path.write_text("\n".join([*kept, "Tr_velo_to_cam:" + " 0" * 12]))


def make_huge(root: Path) -> None:
    path = root / "training/label_2/000001.txt"
    path.write_text("Car 0 0 0 0 0 10 50 1.5 1.6 4 1e300 1 10 0\n")


def name_at_length(root: Path) -> None:
    path = root / "training/label_2/000001.txt"
    path.write_text(path.read_text().replace("Car 0", "C" * 300 + " 0", 1))


def replace_by_folder(root: Path) -> None:
    path = root / "training/velodyne/000001.bin"
    path.rename(root / "kept.bin")
    path.mkdir()


BAD = {
    make_singular: "000001.txt: the way from the LiDAR to the camera has no inverse",
    make_huge: "inf, 4.0, 1.600000023841858, 1.5, -1.5707963705062866]",
    name_at_length: f"000001.txt: class '{'C' * 60}'... is longer than 100 bytes",
    truncate: "000001.bin: 47997 bytes are not whole points of 4 float32: truncated?",
    add_nan: "000001.bin: 1 points are not finite, the first is number 17",
    remove_calibration: "000001.txt: no such file",
    damage_label: "line 1: truncated must be a number, got 'zero.00'",
}


@pytest.mark.parametrize("damage", BAD, ids=lambda d: d.__name__)
def test_a_bad_frame_is_named_and_the_others_are_done(
    own_kitti: Path, tmp_path: Path, expected: dict[str, bytes], damage: Callable[[Path], None]
) -> None:
    kept = tree(own_kitti)
    damage(own_kitti)
    result = make(own_kitti, tmp_path / "out")
    assert not result.good
    assert [*result.bad] == ["000001"]
    assert result.bad["000001"].endswith(BAD[damage])
    done = tree(tmp_path / "out")
    together = ["kitti_dbinfos_train.pkl", ".kitti_dbinfos_train/all.records"]
    same = [name for name in expected if "/1_" not in name and name not in together]
    assert same
    assert all(done[name] == expected[name] for name in same)
    lines = expected[together[1]].splitlines()
    assert done[together[1]].splitlines() == [line for line in lines if not line.startswith(b"000001 ")]
    assert not any(info["image_idx"] == 1 for info in infos(tmp_path / "out/kitti_dbinfos_train.pkl")["Car"])
    for name, data in kept.items():  # mended, it is done, and nothing tells that it was bad
        (own_kitti / name).write_bytes(data)
    assert make(own_kitti, tmp_path / "out").tally.frames == 1
    assert tree(tmp_path / "out") == expected


def test_a_folder_in_the_place_of_points_is_named(own_kitti: Path, tmp_path: Path) -> None:
    replace_by_folder(own_kitti)
    assert make(own_kitti, tmp_path / "out").bad["000001"].endswith("velodyne/000001.bin: is a directory")


def test_files_of_windows_editors_are_read(own_kitti: Path, tmp_path: Path, expected: dict[str, bytes]) -> None:
    listed = own_kitti / "ImageSets/train.txt"
    for path in (listed, *(own_kitti / f"training/{kind}/000001.txt" for kind in ("label_2", "calib"))):
        path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes().replace(b"\n", b"\r\n"))
    assert make(own_kitti, tmp_path / "out").good
    assert tree(tmp_path / "out") == expected


def test_names_may_be_of_any_script(own_kitti: Path, tmp_path: Path) -> None:
    for folder, suffix in (("velodyne", "bin"), ("label_2", "txt"), ("calib", "txt")):
        path = own_kitti / f"training/{folder}/000001.{suffix}"
        path.rename(path.with_name(f"\u5e27\u0662.{suffix}"))
    label = own_kitti / "training/label_2/\u5e27\u0662.txt"
    label.write_text(label.read_text().replace("Car", "Fu\u00dfg\u00e4nger"), encoding="utf-8")
    (own_kitti / "ImageSets/train.txt").unlink()
    assert make(own_kitti, tmp_path / "out").good
    found = infos(tmp_path / "out/kitti_dbinfos_train.pkl")["Fu\u00dfg\u00e4nger"]
    assert {info["image_idx"] for info in found} == {"\u5e27\u0662"}
    assert (tmp_path / "out" / found[0]["path"]).exists()


def test_strict_stops_at_the_first_bad_frame(own_kitti: Path, tmp_path: Path) -> None:
    truncate(own_kitti)
    with pytest.raises(FrameError, match=r"frame 000001: .*truncated"):
        make(own_kitti, tmp_path / "out", strict=True)
    assert not (tmp_path / "out/kitti_dbinfos_train.pkl").exists()


def test_an_output_that_cannot_be_written_is_no_bad_frame(kitti: Path, tmp_path: Path) -> None:
    job = database(kitti, tmp_path)
    job.start()
    shutil.rmtree(tmp_path / "kitti_gt_database")
    with pytest.raises(OSError, match="No such file"):
        job(job.sources[0].refs(0)[0])


def test_two_frames_of_one_name_are_refused(kitti: Path, tmp_path: Path) -> None:
    source = open_source(str(kitti))
    with pytest.raises(JobError, match="two frames are named 000000"):
        run(GtDatabase((source, source), str(tmp_path)), LocalEngine(1))


def test_frames_whose_files_would_have_one_name_are_refused(own_kitti: Path, tmp_path: Path) -> None:
    (own_kitti / "ImageSets/train.txt").write_text("000001\n1\n")
    with pytest.raises(JobError, match="two frames are named 1"):
        make(own_kitti, tmp_path / "out")


def test_huge_numbers_are_finite() -> None:
    points = np.full((100, 4), 3e38, "<f4")
    assert points_of(points.tobytes(), 4, "f").shape == (100, 4)


# Labels


def test_labels_hold_the_class_and_the_box_of_each_point(own_kitti: Path, tmp_path: Path) -> None:
    source = open_source(str(own_kitti))
    run(PointLabels((source,), str(tmp_path / "out"), "label", ("Van", "Car")), LocalEngine(1))
    assert json.loads((tmp_path / "out/classes.json").read_text()) == {"Van": 1, "Car": 2}
    ref = source.refs(0)[0]
    frame = source.load(ref)
    labels = np.fromfile(tmp_path / "out/labels/000000.label", "<u4")
    assert len(labels) == len(frame.points)
    box = (labels >> 16).astype(int) - 1
    assert (box >= 0).any()
    assert (labels[box < 0] == 0).all()
    for i in {*box.tolist()} - {-1}:
        assert {*(labels[box == i] & 0xFFFF).tolist()} == {("Van", "Car").index(frame.names[i]) + 1}
    for i, name in enumerate(frame.names):
        (held,) = points_of_boxes(frame.points, frame.boxes[i : i + 1], "bottom")
        assert (box == i).sum() == (len(held) if name in ("Van", "Car") else 0)


# Parquet


def test_parquet_frames_give_the_same_database(kitti: Path, tmp_path: Path, expected: dict[str, bytes]) -> None:
    pytest.importorskip("pyarrow")
    from triops.data.parquet import ToParquet

    run(ToParquet((open_source(str(kitti)),), str(tmp_path / "parquet")), LocalEngine(1))
    result = make(tmp_path / "parquet/frames", tmp_path / "out")
    assert result.good
    for name, data in expected.items():
        if name.endswith(".bin"):
            assert (tmp_path / "out" / name.replace("kitti_gt", "custom_gt")).read_bytes() == data


def test_labels_go_to_parquet(kitti: Path, tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    for kind in ("label", "parquet"):
        run(PointLabels((open_source(str(kitti)),), str(tmp_path / kind), kind, ("Car",)), LocalEngine(1))
    row = parquet.read_table(tmp_path / "parquet/labels/000000.parquet").to_pydict()
    labels = np.fromfile(tmp_path / "label/labels/000000.label", "<u4")
    assert row["frame"] == ["000000"]
    assert row["label"][0] == (labels & 0xFFFF).tolist()
    assert row["box"][0] == ((labels >> 16).astype(int) - 1).tolist()


def test_a_damaged_parquet_file_is_named(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    (tmp_path / "a.parquet").write_bytes(b"PAR1 and nothing else")
    with pytest.raises(FrameError, match=r"a\.parquet"):
        make(tmp_path, tmp_path / "out")


# The command line


def command(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> tuple[int, str, str]:
    status = triops_cli.main([str(a) for a in arguments])
    return status, *capsys.readouterr()


def test_the_command_reports_and_its_status_says_whether_frames_were_bad(
    own_kitti: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, report = tmp_path / "out", tmp_path / "report.json"
    truncate(own_kitti)
    status, text, _ = command(capsys, "gtdb", own_kitti, "--out", out, "--report", report)
    assert status == 1
    assert "1 bad frame, left out:\n  000001:" in text
    assert [*json.loads(report.read_text())["bad_frames"]] == ["000001"]
    status, _, error = command(capsys, "gtdb", own_kitti, "--out", tmp_path / "strict", "--strict")
    assert status == 1
    assert "stopped: frame 000001" in error
    write_kitti(own_kitti, FRAMES, points=3000, boxes=6, seed=1)
    status, text, _ = command(capsys, "gtdb", own_kitti, "--out", out)
    assert status == 0
    assert f"{FRAMES - 1} of {FRAMES} frames were done before" in text


def test_a_malicious_info_file_is_named_and_the_other_sources_are_done(
    kitti: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = tmp_path / "bad_infos_train.pkl"
    bad.write_bytes(pickle.dumps(Calls(eval, "1")))
    status, text, _ = command(capsys, "gtdb", kitti, bad, "--out", tmp_path / "out")
    assert status == 1
    assert "1 bad source, left out:" in text
    assert "asks for builtins.eval" in text.replace("\n    ", " ")
    assert (tmp_path / "out/kitti_dbinfos_train.pkl").exists()
    assert command(capsys, "gtdb", bad, "--out", tmp_path / "none")[0] == 1
    assert command(capsys, "gtdb", kitti, bad, "--out", tmp_path / "strict", "--strict")[0] == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--shard", "4/3"], "--shard must be i/n with i from 1 to n, got 4/3"),
        (["--workers", "-1"], "--workers must be at least 0, got -1"),
        (["--sweeps", "-1"], "--sweeps must be at least 0, got -1"),
        (["--address", "auto"], "--address is for --engine ray"),
    ],
)
def test_a_call_that_makes_no_sense_is_one_sentence(
    kitti: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    status, _, error = command(capsys, "gtdb", kitti, "--out", tmp_path, *arguments)
    assert (status, error) == (2, f"triops gtdb: {message}\n")


def test_without_ray_its_engine_is_one_sentence(
    kitti: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    status, _, error = command(capsys, "gtdb", kitti, "--out", tmp_path, "--engine", "ray")
    assert (status, error) == (2, "triops gtdb: --engine ray needs Ray Data. Remedy: pip install 'triops[ray]'\n")


def test_a_ray_address_where_nobody_listens_is_one_sentence() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound but not listening
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(JobError, match=rf"^no Ray cluster at {address}: .*refused$"):
            engine_ray._check_reachable(address)
    for address in (None, "auto", "local", "ray://head:10001"):
        engine_ray._check_reachable(address)  # left to Ray


def test_synth_and_label_from_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = tmp_path / "kitti"
    assert command(capsys, "synth", root, "--frames", "2", "--points", "500", "--boxes", "3", "--predictions")[0] == 0
    assert len([*(root / "predictions").iterdir()]) == 2
    assert command(capsys, "label", root, "--out", tmp_path / "out", "--shard", "1/2")[0] == 0
    assert [p.name for p in (tmp_path / "out/labels").iterdir()] == ["000000.label"]
    assert json.loads((tmp_path / "out/classes.json").read_text())["Car"] == 3
