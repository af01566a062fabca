"""Facts about `triops.evaluate` and `triops eval`: KITTI's protocol, nuScenes-style metrics, bad frames."""

from __future__ import annotations

import json
import math
import pickle
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kitti_by_hand import evaluate

import triops_cli
from triops.compat import _finder
from triops.data.kitti_labels import FIELDS, Labels, parse_labels, write_labels
from triops.evaluate import BadFrame, KittiResult, kitti, nuscenes_style
from triops.evaluate.kitti_protocol import DIFFICULTIES, METRICS, OVERLAP_SETS, OVERLAPS
from triops.evaluate.overlaps import candidates, pairs
from triops.evaluate.sources import concatenated


def line(name: str = "Car", index: int = 0, score: float | None = None, **changes: float) -> str:
    """An object that is easy to see; those of other indices are far from it in the image and in space."""
    place = {"left": 200.0 * index, "right": 200.0 * index + 100, "x": 20.0 * index}
    fields = {
        "truncated": 0, "occluded": 0, "alpha": 0.5, "left": 0, "top": 100, "right": 100, "bottom": 160, "height": 1.5,
        "width": 1.6, "length": 4, "x": 0, "y": 1.7, "z": 20, "rotation_y": 0.3, **place, **changes,
    }  # fmt: skip
    numbers = [fields[f] for f in FIELDS[1:-1]] + ([] if score is None else [score])
    return f"{name} {' '.join(map(str, numbers))}\n"


def labels(*lines: str) -> Labels:
    return parse_labels("".join(lines))


def evaluated(truth: list[str], found: list[str], **options: Any) -> KittiResult:
    return kitti([labels(*truth)], [parse_labels("".join(found), scored=True)], **options)


FORTY = [line(index=i) for i in range(40)]
FORTY_FOUND = [line(index=i, score=0.9 - i / 100) for i in range(40)]


# KITTI's protocol by hand


def test_forty_objects_found_give_forty_samples_of_precision_one() -> None:
    result = evaluated(FORTY, FORTY_FOUND)
    for metric in METRICS:
        assert result.ap("Car", metric, "easy") == pytest.approx(100 * 39 / 40)
        assert result.ap("Car", metric, "easy", "loose", 11) == pytest.approx(100 * 10 / 11)
    assert result.objects.tolist() == [[40, 40, 40], [0, 0, 0], [0, 0, 0]]
    assert result.ap("Pedestrian") == 0


def test_a_false_positive_above_all_others_costs_one_in_forty_one() -> None:
    result = evaluated(FORTY, [*FORTY_FOUND, line(index=99, score=0.95)])
    assert result.ap("Car") == pytest.approx(100 * 40 / 41 * 39 / 40)
    assert result.ap("Car", points=11) == pytest.approx(100 * 40 / 41 * 10 / 11)
    assert result.precision[0, METRICS.index("3D"), 0, 1, :40] == pytest.approx(np.full(40, 40 / 41))
    assert result.recall[0, METRICS.index("3D"), 0, 1, :40] == pytest.approx(np.arange(1, 41) / 40)


def test_a_false_positive_below_all_others_costs_nothing() -> None:
    assert evaluated(FORTY, [*FORTY_FOUND, line(index=99, score=0.1)]).ap("Car") == pytest.approx(97.5)


def test_half_of_the_objects_found_are_half_of_the_samples() -> None:
    assert evaluated(FORTY, FORTY_FOUND[:20]).ap("Car") == pytest.approx(100 * 19 / 40)


def test_a_car_detection_on_a_van_is_neither_right_nor_wrong_and_on_a_truck_wrong() -> None:
    extra = line(index=50, score=0.95)
    assert evaluated([*FORTY, line("Van", 50)], [*FORTY_FOUND, extra]).ap("Car") == pytest.approx(97.5)
    assert evaluated([*FORTY, line("Truck", 50)], [*FORTY_FOUND, extra]).ap("Car") < 96


def test_a_detection_in_a_dont_care_region_is_wrong_in_space_but_not_in_the_image() -> None:
    extra = line(index=50, score=0.95)
    region = line("DontCare", 50, x=-1000, y=-1000, z=-1000, length=-1, width=-1, height=-1, alpha=-10)
    result = evaluated([*FORTY, region], [*FORTY_FOUND, extra])
    assert result.ap("Car", "2D") == pytest.approx(97.5)
    assert result.ap("Car", "BEV") == pytest.approx(97.5 * 40 / 41)


@pytest.mark.parametrize(
    ("change", "counted"),
    [
        ({}, [1, 1, 1]),
        ({"occluded": 1}, [0, 1, 1]),
        ({"occluded": 2}, [0, 0, 1]),
        ({"occluded": 3}, [0, 0, 0]),
        ({"truncated": 0.15}, [1, 1, 1]),
        ({"truncated": 0.16}, [0, 1, 1]),
        ({"truncated": 0.51}, [0, 0, 0]),
        ({"top": 120}, [0, 1, 1]),  # 40 pixels high
        ({"top": 135}, [0, 0, 0]),
    ],
)
def test_what_counts_at_each_difficulty(change: dict[str, float], counted: list[int]) -> None:
    assert evaluated([line(**change)], []).objects[0].tolist() == counted


def test_a_detection_too_low_to_count_is_no_false_positive() -> None:
    for top, easy in ((120, 97.5 * 40 / 41), (120.1, 97.5)):  # 40 pixels high, and a little less
        result = evaluated(FORTY, [*FORTY_FOUND, line(index=99, score=0.95, top=top)])
        assert result.ap("Car", "2D", "easy") == pytest.approx(easy)
        assert result.ap("Car", "2D", "moderate") == pytest.approx(97.5 * 40 / 41)


def test_a_detection_turned_round_has_no_orientation_similarity() -> None:
    turned = [line(index=i, score=0.5, alpha=0.5 - math.pi) for i in range(40)]
    result = evaluated(FORTY, turned)
    assert result.ap("Car", "2D") == pytest.approx(97.5)
    assert result.ap("Car", "AOS") == pytest.approx(0, abs=1e-9)


def test_without_angles_there_is_no_orientation_similarity() -> None:
    result = evaluated(FORTY, [line(index=i, score=0.5, alpha=-10) for i in range(40)])
    assert math.isnan(result.ap("Car", "AOS"))
    assert result.ap("Car", "2D") == pytest.approx(97.5)
    assert result.as_json()["classes"]["Car"]["strict"]["R40"]["AOS"] == dict.fromkeys(DIFFICULTIES)


@pytest.mark.parametrize("angle", [0.0, 0.3, math.pi / 4, -2.9, 100.0])
def test_a_box_has_an_overlap_of_one_with_itself(angle: float) -> None:
    boxes = concatenated([labels(line(rotation_y=angle), line("Pedestrian", 3, x=-41.37, z=63.21, width=0.61))])
    found = candidates(boxes, boxes, (0, 0, 0), "cpu")
    assert found.detection.tolist() == [0, 1] * 3
    assert found.overlap == pytest.approx(np.ones(6), abs=1e-12)


def test_pairs_are_those_of_each_frame_in_parts_of_any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    truth = concatenated([labels(line(), line()), labels(), labels(line())])
    found = concatenated([labels(line(), line(), line()), labels(line()), labels(line(), line())])
    wanted = [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2), (2, 4), (2, 5)]
    for size in (1, 3, 4, 100):
        monkeypatch.setattr("triops.evaluate.overlaps.PAIRS_AT_ONCE", size)
        parts = [list(zip(i.tolist(), j.tolist(), strict=True)) for i, j in pairs(truth, found)]
        assert [pair for part in parts for pair in part] == wanted
        assert len(parts) == {1: 3, 3: 3, 4: 3, 100: 1}[size]


# KITTI's protocol against another implementation

NAMES = ["Car", "Pedestrian", "Cyclist", "Van", "Person_sitting", "Truck", "DontCare"]


def crowded_frames(count: int, seed: int) -> tuple[list[Labels], list[Labels]]:
    """Objects that overlap each other, some too small, hidden or cut off; several detections of each, of any class."""
    random = np.random.default_rng(seed)
    truth, found = [], []
    for _ in range(count):
        n = int(random.integers(0, 12))
        m = n and int(random.integers(0, 20))
        kind = random.choice(len(NAMES), n, p=[0.4, 0.2, 0.15, 0.08, 0.05, 0.04, 0.08])
        middle = random.choice([[200.0, 150], [600, 150], [1000, 150]], n)
        size = np.stack([random.uniform(30, 120, n), random.choice([24, 25, 30, 40, 41, 60, 90], n)], 1)
        middle = middle + random.normal(0, 20, (n, 2))
        dims = random.uniform(0.9, 1.1, (n, 3)) * np.where(kind[:, None] % 3 == 0, [4.0, 1.5, 1.7], [1.0, 1.7, 0.8])
        place = random.choice([[0.0, 1.7, 10], [8, 1.6, 30]], n) + random.normal(0, 1, (n, 3)) * [1, 0.2, 1]
        turn = random.uniform(-math.pi, math.pi, n)
        a = Labels(
            np.array(NAMES)[kind], random.choice([0, 0, 0.1, 0.2, 0.4, 0.6], n), random.choice([0, 0, 0, 1, 2, 3], n),
            random.uniform(-3, 3, n), np.concatenate([middle - size / 2, middle + size / 2], 1), dims, place, turn,
        )  # fmt: skip
        of = random.integers(0, max(n, 1), m)
        name = np.where(random.random(m) < 0.85, a.name[of], np.array(NAMES)[random.integers(0, 3, m)])
        b = Labels(
            name, np.full(m, -1.0), np.full(m, -1), a.alpha[of] + random.normal(0, 0.5, m),
            a.bbox[of] + random.normal(0, 3, (m, 4)), dims[of] * random.normal(1, 0.05, (m, 3)),
            place[of] + random.normal(0, 0.2, (m, 3)), turn[of] + random.normal(0, 0.1, m),
            random.random(m).round(2),
        )  # fmt: skip
        truth.append(a)
        found.append(b)
    return truth, found


def plain(frame: Labels) -> list[dict[str, Any]]:
    scores = np.zeros(len(frame)) if frame.score is None else frame.score
    return [
        {
            "name": str(frame.name[i]), "truncated": frame.truncated[i], "occluded": frame.occluded[i],
            "alpha": frame.alpha[i], "bbox": frame.bbox[i].tolist(), "lhw": frame.dimensions[i].tolist(),
            "xyz": frame.location[i].tolist(), "ry": frame.rotation_y[i], "score": scores[i],
        }
        for i in range(len(frame))
    ]  # fmt: skip


def test_every_cell_equals_the_plain_implementation() -> None:
    truth, found = crowded_frames(40, seed=1)
    result = kitti(truth, found)
    frames = [(plain(a), plain(b)) for a, b in zip(truth, found, strict=True)]
    compared = 0
    for c, name in enumerate(result.classes):
        for s in range(len(OVERLAP_SETS)):
            for m, metric in enumerate(METRICS[:3]):
                limit = OVERLAPS[name][0 if metric == "2D" else s]
                assert result.min_overlaps[c, m, s] == limit
                for d in range(len(DIFFICULTIES)):
                    if metric == "2D" and s == 1:
                        continue
                    r40, r11, aos40, aos11 = evaluate(frames, name, metric, d, limit)
                    assert result.r40[c, m, s, d] == pytest.approx(r40, abs=1e-9), (name, metric, limit, d)
                    assert result.r11[c, m, s, d] == pytest.approx(r11, abs=1e-9), (name, metric, limit, d)
                    compared += r40 > 1
                    if metric == "2D":
                        assert result.r40[c, 3, 0, d] == pytest.approx(aos40, abs=1e-9)
                        assert result.r11[c, 3, 0, d] == pytest.approx(aos11, abs=1e-9)
    assert compared > 30  # of 45 cells: not a comparison of zeros
    assert np.array_equal(result.r40[:, [0, 3], 0], result.r40[:, [0, 3], 1])


# What goes in


def write_frames(folder: Path, frames: dict[str, str]) -> Path:
    folder.mkdir(parents=True)
    for name, text in frames.items():
        (folder / f"{name}.txt").write_text(text)
    return folder


def same(a: KittiResult, b: KittiResult) -> bool:
    return all(
        np.array_equal(getattr(a, k), getattr(b, k), equal_nan=True) for k in ("r40", "r11", "precision", "recall")
    )


def test_folders_dicts_and_labels_give_the_same(tmp_path: Path) -> None:
    truth, found = crowded_frames(6, seed=2)
    for name, frames in (("truth/training/label_2", truth), ("found", found)):
        (tmp_path / name).mkdir(parents=True)
        for i, frame in enumerate(frames):
            write_labels(tmp_path / name / f"{i:06}.txt", frame)
    read = kitti(tmp_path / "truth", tmp_path / "found")
    assert read.frames == 6
    again = [
        [parse_labels(file.read_text()) for file in sorted((tmp_path / name).glob("*.txt"))]
        for name in ("truth/training/label_2", "found")
    ]
    assert same(read, kitti(*again))
    dicts = [[frame.annotation() for frame in frames] for frames in again]
    assert same(read, kitti(*dicts))
    for frame in dicts[1]:  # as OpenPCDet's: predictions say nothing of these
        del frame["truncated"], frame["occluded"]
    assert same(read, kitti(*({str(i): f for i, f in enumerate(frames)} for frames in dicts)))


def test_pickles_of_both_libraries_give_the_same(tmp_path: Path) -> None:
    truth, found = crowded_frames(6, seed=3)
    wanted = kitti(truth, found)
    labels_of = {name: i for i, name in enumerate(NAMES[:-1])} | {"DontCare": -1}

    def instances(frame: Labels) -> list[dict[str, Any]]:
        return [
            {
                "bbox_label": labels_of[str(frame.name[i])], "bbox": frame.bbox[i].tolist(), "alpha": frame.alpha[i],
                "truncated": frame.truncated[i], "occluded": int(frame.occluded[i]),
                "bbox_3d": [*frame.location[i], *frame.dimensions[i], frame.rotation_y[i]],
            }
            for i in range(len(frame))
        ]  # fmt: skip

    def written(name: str, value: Any) -> Path:
        (tmp_path / name).write_bytes(pickle.dumps(value))
        return tmp_path / name

    order = [3, 1, 0, 5, 4, 2]
    infos = [{"point_cloud": {"lidar_idx": f"{i:06}"}, "annos": f.annotation()} for i, f in enumerate(truth)]
    results = [{"frame_id": f"{i:06}", **found[i].annotation()} for i in order]
    openpcdet = written("kitti_infos_val.pkl", infos), written("result.pkl", results)
    assert same(wanted, kitti(*openpcdet))
    data_list = [{"sample_idx": i, "instances": instances(f)} for i, f in enumerate(truth)]
    mmdet3d = written("infos.pkl", {"metainfo": {"categories": labels_of}, "data_list": data_list})
    unnamed = written("pred_instances_3d.pkl", [f.annotation() for f in found])
    assert same(wanted, kitti(mmdet3d, unnamed))
    assert same(wanted, kitti(mmdet3d, openpcdet[1]))

    del data_list[1]["instances"], data_list[2]["instances"][0]["bbox_3d"]
    broken = written("broken.pkl", {"metainfo": {"categories": labels_of}, "data_list": data_list})
    problems = kitti(broken, openpcdet[1]).problems
    assert problems[0] == "ground_truth, frame 000001: name is missing; frame left out"
    assert problems[1] == "ground_truth, frame 000002: dimensions must be numbers; frame left out"
    with pytest.raises(ValueError, match=r"evil\.pkl: refused: it asks for builtins\.print"):
        kitti(written("evil.pkl", print), unnamed)
    with pytest.raises(ValueError, match=r"odd\.pkl: neither an info file nor a list of annotation dicts"):
        kitti(written("odd.pkl", {"a": 1}), unnamed)


def test_names_of_classes_are_compared_without_regard_to_case_and_others_may_be_added() -> None:
    truth = [line("tractor", i) for i in range(40)]
    found = [line("TRACTOR", i, score=0.5, length=6) for i in range(40)]
    result = evaluated(truth, found, classes=["Tractor"], overlaps={"Tractor": (0.7, 0.5)})
    assert result.ap("Tractor", "BEV", overlap="strict") == 0
    assert result.ap("Tractor", "BEV", overlap="loose") == pytest.approx(97.5)
    with pytest.raises(ValueError, match="none known for Tractor; known are Car"):
        evaluated(truth, found, classes=["Tractor"])


def test_bad_frames_are_left_out_and_named(tmp_path: Path) -> None:
    good = "".join(FORTY), "".join(FORTY_FOUND)
    truth = {"000000": good[0], "000001": line()[:-5] + "\n", "000002": line(), "000003": line(), "000004": ""}
    found = {"000000": good[1], "000001": "", "000002": line(score=math.nan), "000004": "", "000009": ""}
    a, b = write_frames(tmp_path / "gt", truth), write_frames(tmp_path / "pred", found)
    said: list[tuple[str, int]] = []
    result = kitti(a, b, progress=lambda *step: said.append(step))
    assert said == [("reading", 6)] * 5 + [("matching", 6)]
    assert result.problems == (
        f"{a / '000001.txt'}, line 1: 14 fields, expected 15, or 16 with a score; frame left out",
        f"{b / '000002.txt'}, line 1: score must be finite, got nan; frame left out",
        "000003: no predictions; counted as a frame without detections",
        "000009: predictions without ground truth; left out",
    )
    assert result.remarks == (
        "1 frame with empty ground truth: 000004", "1 frame with empty predictions: 000004",
    )  # fmt: skip
    assert result.frames == 3
    assert result.objects[0, 0] == 41  # the one of 000003 was missed
    with pytest.raises(BadFrame, match=r"000001\.txt, line 1: 14 fields"):
        kitti(a, b, strict=True)
    chosen = kitti(a, b, frames=["000000", "000007"])
    assert (chosen.frames, chosen.problems) == (1, ("000007: no ground truth; left out",))


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: kitti("no/such/folder", []), ValueError, "no/such/folder is no folder"),
        (lambda: kitti(3, []), TypeError, "ground_truth must be a folder, or a sequence or mapping .*, got int"),
        (lambda: kitti([labels()], []), ValueError, "predictions must have as many frames as ground_truth, 1, got 0"),
        (lambda: kitti({"7": labels()}, []), ValueError, "must both name their frames"),
        (lambda: kitti([], []), ValueError, "no frames to evaluate"),
        (
            lambda: kitti([labels()], [3]),
            TypeError,
            r"predictions, frame 0 must be an annotation dict or Labels, got int",
        ),
        (lambda: evaluated([], [], classes="Car"), ValueError, "classes must be a sequence of names, got 'Car'"),
        (
            lambda: evaluated([], [], overlaps={"Car": (0.7,)}),
            ValueError,
            "overlaps must be two numbers between 0 and 1",
        ),
        (
            lambda: evaluated([], []).ap("Bus"),
            ValueError,
            "class_name must be one of Car, Pedestrian, Cyclist, got Bus",
        ),
    ],
)
def test_calls_that_make_no_sense(call: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()


def test_frames_without_anything_give_zeros() -> None:
    result = evaluated([], [])
    assert (result.r40[:, :3] == 0).all()
    assert result.frames == 1
    nothing = kitti([{}], [{}])
    assert (nothing.r40[:, :3] == 0).all()
    assert (nothing.frames, nothing.problems) == (0, ("ground_truth, frame 0: name is missing; frame left out",))


# The command line


def run(*arguments: str | Path) -> int:
    return triops_cli.main(["eval", "kitti", *map(str, arguments)])


def test_the_command_shows_a_table_and_writes_json_and_html(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    truth = write_frames(tmp_path / "gt", {"000000": "".join(FORTY)})
    found = write_frames(tmp_path / "pred", {"000000": "".join(FORTY_FOUND)})
    assert run(truth, found, "--device", "cpu", "--json", tmp_path / "a.json", "--html", tmp_path / "out/a.html") == 0
    out = capsys.readouterr().out
    assert "Car: 40 / 40 / 40 objects easy / moderate / hard\n  2D at 0.70      97.50" in out
    assert "1 frame evaluated" in out
    data = json.loads((tmp_path / "a.json").read_text())
    assert data["classes"]["Car"]["loose"]["R40"]["3D"]["hard"] == pytest.approx(97.5)
    assert data["classes"]["Car"]["loose"]["min_overlap"] == {"2D": 0.7, "BEV": 0.5, "3D": 0.5, "AOS": 0.7}
    page = (tmp_path / "out/a.html").read_text()
    assert page.count("<figure>") == 12
    assert page.count("<polyline") == 3 * (1 + 2 + 2 + 1)  # of Car; the others have no objects
    assert "easy, overlap 0.70: AP 97.50" in page
    assert "http" not in page.replace("http-equiv", "")


def test_the_command_names_bad_frames_at_the_end_and_says_so_in_its_status(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    truth = write_frames(tmp_path / "gt", {"000000": line(), "000001": line(), "000002": line()})
    found = write_frames(tmp_path / "pred", {"000000": line(score=0.5), "000001": "Car left\n"})
    assert run(truth, found) == 1
    shown = " ".join(capsys.readouterr().out.split())
    assert f"{found / '000001.txt'}, line 1: 2 fields, expected 16, the last a score; frame left out" in shown
    assert shown.endswith(
        "000002: no predictions; counted as a frame without detections 2 frames evaluated; 2 problems"
    )
    assert run(truth, found, "--strict") == 1
    assert "stopped:" in capsys.readouterr().out
    (tmp_path / "val.txt").write_text("000000\n")
    assert run(truth, found, "--split", tmp_path / "val.txt") == 0
    assert "1 frame evaluated" in capsys.readouterr().out
    assert run(truth, tmp_path / "nowhere") == 2
    assert run(truth, tmp_path / "nowhere.pkl") == 2
    assert run(truth, found, "--split", tmp_path / "nowhere.txt") == 2
    assert "--split: " in capsys.readouterr().err


# nuScenes style


def boxes(*rows: list[float], **fields: Any) -> dict[str, Any]:
    return {"boxes": np.array(rows, float), "names": ["car"] * len(rows), **fields}


def box(x: float = 0.0, y: float = 0.0, heading: float = 0.0, length: float = 4.0, speed: float = 0.0) -> list[float]:
    return [x, y, 0, length, 2, 1.5, heading, speed, 0]


def test_one_car_off_by_a_metre_and_a_half_is_found_from_two_metres_on() -> None:
    truth = boxes(box(10, speed=3), attributes=["moving"])
    found = boxes(box(10.9, 1.2, 0.25, 5, 1), scores=[0.7], attributes=["parked"])
    result = nuscenes_style([truth], [found])
    assert result.ap.tolist() == [[0, 0, pytest.approx(1), pytest.approx(1)]]
    assert result.mean_ap == pytest.approx(0.5)
    assert result.errors[0].tolist() == pytest.approx([1.5, 1 - 4 / 5, 0.25, 2, 1])
    # an error counts 1 at most: translation, velocity and attribute add nothing
    assert result.nds == pytest.approx((5 * 0.5 + 0 + 0.8 + 0.75 + 0 + 0) / 10)
    assert result.as_json()["errors"]["velocity"] == pytest.approx(2)


def test_precision_is_counted_above_a_tenth_and_from_a_recall_above_a_tenth() -> None:
    # Two of four objects are found, with a wrong detection in between: precision is 1 below a recall of 1/4, from there
    # it goes from 1/2 to 2/3 at a recall of 1/2, and is 0 beyond.
    truth = boxes(*(box(20.0 * i) for i in range(4)))
    found = boxes(box(0), box(500), box(20), scores=[0.9, 0.8, 0.7])
    result = nuscenes_style([truth], [found])
    wanted = np.zeros(101)
    wanted[:25] = 1
    wanted[25:51] = np.linspace(1 / 2, 2 / 3, 26)
    assert result.precision[0, 0] == pytest.approx(wanted)
    assert result.ap[0, 0] == pytest.approx((14 * 0.9 + 26 * ((1 / 2 + 2 / 3) / 2 - 0.1)) / 90 / 0.9)


def test_each_detection_takes_the_nearest_object_that_is_free() -> None:
    truth = boxes(box(0), box(1.5))
    found = boxes(box(0.9), box(0.8), scores=[0.9, 0.8])  # the first takes 1.5, the second is left with 0
    result = nuscenes_style([truth], [found], distances=[1.0, 2.0])
    assert result.ap[0] == pytest.approx([1, 1])
    assert result.errors[0, 0] == pytest.approx(np.interp(np.linspace(0.11, 1, 90), [0.5, 1], [0.6, 0.7]).mean())


def test_matches_stay_within_frames_and_classes() -> None:
    truth, found = boxes(box(0)), boxes(box(0), scores=[0.5])
    assert nuscenes_style([truth, boxes()], [boxes(scores=[]), found]).mean_ap == 0
    assert nuscenes_style([truth], [{**found, "names": ["truck"]}]).mean_ap == 0
    nothing = nuscenes_style([truth], [boxes(scores=[])])
    assert (nothing.mean_ap, nothing.nds, nothing.errors.tolist()) == (0, 0, [[1.0] * 5])


def test_headings_differ_the_short_way_round_and_a_barrier_has_no_front() -> None:
    truth, found = boxes(box(heading=3.1)), boxes(box(heading=-3.1), scores=[1.0])
    assert nuscenes_style([truth], [found]).errors[0, 2] == pytest.approx(2 * math.pi - 6.2)
    names = {"names": ["barrier"]}
    turned = boxes(box(heading=3.1 - math.pi), scores=[1.0])
    barrier = nuscenes_style([{**truth, **names}], [{**turned, **names}])
    assert barrier.errors[0, 2] == pytest.approx(0, abs=1e-9)
    assert np.isnan(barrier.errors[0]).tolist() == [False, False, False, True, True]


def test_velocities_and_attributes_that_nobody_knows_are_errors_of_one() -> None:
    truth, found = boxes(box()[:7]), boxes(box()[:7], scores=[1.0])
    assert nuscenes_style([truth], [found]).errors[0].tolist() == pytest.approx([0, 0, 0, 1, 1])


def test_objects_too_far_away_or_without_points_are_left_out() -> None:
    truth, found = boxes(box(0), box(60), box(30), num_points=[5, 5, 0]), boxes(box(0), scores=[1.0])
    assert nuscenes_style([truth], [found]).objects.tolist() == [2]
    assert nuscenes_style([truth], [found], max_range=50).mean_ap == pytest.approx(1)
    assert nuscenes_style([truth], [found], max_range={"car": 50.0}).objects.tolist() == [1]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"scores": None}, r"predictions\[0\]: scores is missing"),
        ({"scores": [1.0, 2.0]}, r"predictions\[0\]: scores must have shape \[1\] as names, got \[2\]"),
        ({"scores": [math.nan]}, r"predictions\[0\]: scores must be finite"),
        ({"boxes": [[0.0] * 8]}, r"predictions\[0\]: boxes must have shape \[1, 7\] or \[1, 9\], got \[1, 8\]"),
        ({"boxes": [[math.inf] * 7]}, r"predictions\[0\]: box 0 must be finite"),
        ({"boxes": "x"}, r"predictions\[0\]: boxes must be numbers"),
    ],
)
def test_a_bad_frame_of_boxes_is_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        nuscenes_style([boxes(box())], [{**boxes(box(), scores=[0.5]), **change}])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"distances": [1.0]}, "distances must be positive and contain tp_distance, 2.0, got"),
        ({"min_recall": 1.0}, "min_recall must be at least 0 and less than 1, got 1.0"),
        ({"classes": []}, "classes: none given"),
    ],
)
def test_options_of_nuscenes_style_that_make_no_sense(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        nuscenes_style([boxes(box())], [boxes(box(), scores=[0.5])], **options)


# In place of mmdetection3d's and OpenPCDet's kernels

ROTATE_IOU = {
    "mmdet3d/evaluation/functional/kitti_utils": "rotate_iou",
    "pcdet/datasets/kitti/kitti_object_eval_python": "rotate_iou",
    "pcdet/datasets/once/once_eval": "iou_utils",
}


@pytest.fixture
def libraries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The two libraries in miniature, with modules that need CUDA to import."""
    for package, module in ROTATE_IOU.items():
        folder = tmp_path / package
        folder.mkdir(parents=True)
        (folder / f"{module}.py").write_text("raise ImportError('no CUDA')\n")
        (folder / "eval.py").write_text(
            f"def overlaps(*a):\n from .{module} import rotate_iou_gpu_eval as f\n return f(*a)\n"
        )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    _finder.uninstall()
    before = {n: sys.modules.pop(n) for n in [*sys.modules] if n.partition(".")[0] in ("mmdet3d", "pcdet")}
    yield
    for name in [n for n in sys.modules if n.partition(".")[0] in ("mmdet3d", "pcdet")]:
        del sys.modules[name]
    sys.modules.update(before)


def overlaps_of(package: str) -> Any:
    name = f"{package.replace('/', '.')}.eval"
    __import__(name)
    return sys.modules[name].overlaps


@pytest.mark.parametrize("package", ROTATE_IOU)
def test_the_evaluations_of_both_libraries_run_without_cuda(libraries: None, package: str) -> None:
    overlaps = overlaps_of(package)
    with pytest.raises(ImportError, match="no CUDA"):
        overlaps(np.zeros((1, 5)), np.zeros((1, 5)))
    _finder.install("pcdet" if package.startswith("mmdet3d") else "mmdet3d")  # the other one
    with pytest.raises(ImportError, match="no CUDA"):
        overlaps(np.zeros((1, 5)), np.zeros((1, 5)))
    _finder.install(package.partition("/")[0])
    a, b = np.array([[0.0, 0, 4, 2, 0]]), np.array([[1.0, 0, 4, 2, 0], [0, 0, 2, 1, 0], [9, 9, 1, 1, 0]])
    assert overlaps(a, b, -1).tolist() == [[pytest.approx(0.6), 0.25, 0]]
    assert overlaps(a, b, 0).tolist() == [[0.75, 1, 0]]  # of the second boxes, in spite of its name there
    assert overlaps(a, b, 1).tolist() == [[0.75, 0.25, 0]]
    assert overlaps(a, b, 2).tolist() == [[6, 2, 0]]
    assert overlaps(a, b[:0]).shape == (1, 0)
    assert overlaps(a, b).dtype == np.float32


def test_angles_run_from_y_towards_x_there(libraries: None) -> None:
    _finder.install("mmdet3d")
    overlaps = overlaps_of("mmdet3d/evaluation/functional/kitti_utils")
    beam, below = np.array([[0.0, 0, 10, 0.5, 0.5]]), np.array([[3.0, -3 * math.tan(0.5), 0.1, 0.1, 0]])
    assert overlaps(beam, below, 0).item() == pytest.approx(1)
    assert overlaps(beam, below * [1, -1, 1, 1, 1], 0).item() == 0
