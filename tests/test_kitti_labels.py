"""Facts about KITTI's label files: what is read, what is written, and what is said of a bad line."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from triops.data.kitti_labels import LabelError, format_labels, from_annotation, parse_labels, read_labels, write_labels

CAR = "Car 0.10 2 -1.57 600.00 150.00 650.00 200.00 1.50 1.60 3.90 1.00 1.70 20.00 -1.52"
DONT_CARE = "DontCare -1.00 -1 -10.00 500.00 160.00 520.00 180.00 -1.00 -1.00 -1.00 -1000.00 -1000.00 -1000.00 -10.00"


def test_a_line_says_height_width_length_and_labels_say_length_height_width() -> None:
    labels = parse_labels(f"{CAR}\n{DONT_CARE}\n")
    assert labels.name.tolist() == ["Car", "DontCare"]
    assert labels.truncated.tolist() == [0.1, -1]
    assert labels.occluded.tolist() == [2, -1]
    assert labels.alpha.tolist() == [-1.57, -10]
    assert labels.bbox[0].tolist() == [600, 150, 650, 200]
    assert labels.dimensions[0].tolist() == [3.9, 1.5, 1.6]
    assert labels.location[0].tolist() == [1, 1.7, 20]
    assert labels.rotation_y.tolist() == [-1.52, -10]
    assert labels.score is None


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    text = f"{CAR} 0.9871\n{DONT_CARE} 0.1000\n"
    write_labels(tmp_path / "000000.txt", parse_labels(text))
    assert (tmp_path / "000000.txt").read_text() == text
    assert [p.name for p in tmp_path.iterdir()] == ["000000.txt"]
    again = read_labels(tmp_path / "000000.txt", scored=True)
    assert again.score is not None
    assert again.score.tolist() == [0.9871, 0.1]


@pytest.mark.parametrize("text", ["", "\n", " \r\n\n"])
def test_an_empty_file_has_no_objects(text: str) -> None:
    labels = parse_labels(text, scored=True)
    assert len(labels) == 0
    assert labels.bbox.shape == (0, 4)
    assert labels.score is not None
    assert format_labels(labels) == ""


@pytest.mark.parametrize(
    ("text", "scored", "message"),
    [
        (f"{CAR}\nCar 1 2", None, "f.txt, line 2: 3 fields, expected 15, or 16 with a score"),
        (f"\n{CAR}\n\n{CAR} 0.5", None, "f.txt, line 4: 16 fields, while the lines before have 15"),
        (CAR, True, "f.txt, line 1: 15 fields, expected 16, the last a score"),
        (f"{CAR} 0.5", False, "f.txt, line 1: 16 fields, expected 15"),
        (f"{CAR}\n{CAR.replace('650.00', 'wide')}", None, "f.txt, line 2: right must be a number, got 'wide'"),
        (CAR.replace("20.00", "nan"), None, "f.txt, line 1: z must be finite, got nan"),
        (f"{CAR} -inf", True, "f.txt, line 1: score must be finite, got -inf"),
        (CAR.replace(" 2 ", " 1.5 "), None, "f.txt, line 1: occluded must be a small whole number, got 1.5"),
        (CAR.replace(" 2 ", " 1e300 "), None, "f.txt, line 1: occluded must be a small whole number, got 1e300"),
        (CAR.replace("3.90", "3_9"), None, "f.txt, line 1: length must be a number, got '3_9'"),
    ],
)
def test_a_bad_line_is_named(text: str, scored: bool | None, message: str) -> None:
    with pytest.raises(LabelError) as caught:
        parse_labels(text, "f.txt", scored)
    assert str(caught.value) == message


def test_a_file_that_is_no_text_is_named(tmp_path: Path) -> None:
    (tmp_path / "000001.txt").write_bytes(b"Car \xff\xfe")
    with pytest.raises(LabelError, match=r"000001\.txt: not a text file \(byte 4\)"):
        read_labels(tmp_path / "000001.txt")


def test_a_name_may_hold_what_a_number_may_not() -> None:
    assert parse_labels(CAR.replace("Car", "Person_sitting")).name.tolist() == ["Person_sitting"]
    assert parse_labels(CAR.replace("Car", "Straßenbahn")).name.tolist() == ["Straßenbahn"]


def test_an_annotation_dict_holds_the_same_fields() -> None:
    labels = parse_labels(f"{CAR} 0.5")
    again = from_annotation({**labels.annotation(), "index": [3]})
    for key, value in labels.annotation().items():
        assert np.array_equal(getattr(again, key), value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"location": None}, "frame 7: location is missing"),
        ({"location": [[1, 2]]}, r"frame 7: location must have shape \[1, 3\], got \[1, 2\]"),
        ({"location": [[1, 2, np.nan]]}, r"frame 7: location of object 0 must be finite, got \[1.0, 2.0, nan\]"),
        ({"alpha": ["left"]}, "frame 7: alpha must be numbers"),
        ({"occluded": [0.5]}, r"frame 7: occluded must be small whole numbers, got \[0.5\]"),
        ({"name": None}, "frame 7: name is missing"),
        ({"score": None}, "frame 7: score is missing"),
    ],
)
def test_a_bad_annotation_is_named(change: dict[str, object], message: str) -> None:
    annotation = {**parse_labels(f"{CAR} 0.5").annotation(), **change}
    with pytest.raises(LabelError, match=message):
        from_annotation(annotation, "frame 7", scored=True)


def test_a_byte_order_mark_is_no_part_of_the_first_type(tmp_path: Path) -> None:
    path = tmp_path / "000000.txt"
    path.write_text("Car 0 0 0 0 0 10 50 1.5 1.6 4 1 1 10 0\r\n", encoding="utf-8-sig")
    assert read_labels(path).name.tolist() == ["Car"]
