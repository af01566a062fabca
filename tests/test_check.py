"""The vocabulary of errors."""

import numpy as np
import pytest
import torch

import triops
from triops._check import FLOATS, Checker


def test_a_shape_error_prints_pattern_bindings_and_what_it_got() -> None:
    check = Checker("op")
    check.shape("a", torch.zeros(2, 3), "N", 3)
    with pytest.raises(ValueError, match=r"^op: b must have shape \[N, C\] with N = 2 as in a, got \[4, 5\]$"):
        check.shape("b", torch.zeros(4, 5), "N", "C")


def test_a_size_used_twice_in_one_tensor_must_agree() -> None:
    with pytest.raises(ValueError, match=r"m must have shape \[N, N\], got \[2, 3\]"):
        Checker("op").shape("m", torch.zeros(2, 3), "N", "N")


def test_dtype_errors_list_what_is_allowed() -> None:
    with pytest.raises(TypeError, match=r"^op: x must be float32, float16, bfloat16 or float64, got int32$"):
        Checker("op").dtype("x", torch.zeros(1, dtype=torch.int32), FLOATS)


def test_device_and_dtype_mixes_are_named() -> None:
    check = Checker("op")
    with pytest.raises(ValueError, match=r"^op: a and b must be on one device, got a on cpu, b on meta$"):
        check.same_device(a=torch.zeros(1), b=torch.zeros(1, device="meta"))
    with pytest.raises(TypeError, match=r"^op: a and b must have one dtype, got a float32, b float64$"):
        check.same_dtype(a=torch.zeros(1), b=torch.zeros(1).double())


def test_numbers() -> None:
    check = Checker("op")
    with pytest.raises(ValueError, match=r"^op: k must be at least 1, got 0$"):
        check.at_least("k", 0, 1)
    with pytest.raises(ValueError, match=r"^op: m must be finite, got inf$"):
        check.finite("m", float("inf"))
    with pytest.raises(ValueError, match=r"^op: mode must be 'iou' or 'iof', got 'x'$"):
        check.choice("mode", "x", ("iou", "iof"))


def test_a_shape_error_says_what_a_newcomer_has_to_write() -> None:
    def said(name: str, shape: tuple[int, ...], *pattern: int | str) -> str:
        with pytest.raises(ValueError, match=r"^op: \w+ must have shape") as error:
            Checker("op").shape(name, torch.zeros(shape), *pattern)
        return str(error.value).partition(", got ")[2]

    points, boxes = ("B", "M", 3), ("N", 7)
    assert said("points", (1, 9, 4), *points) == (
        "[1, 9, 4]; if the columns behind the first 3 are features: points[..., :3]"
    )
    assert said("boxes", (5, 9), *boxes) == "[5, 9]; if the columns behind the first 7 are features: boxes[..., :7]"
    assert said("points", (9, 3), *points) == "[9, 3]; with a batch axis: points[None]"
    assert said("points", (9, 2), *points) == "[9, 2]"
    assert said("boxes", (5, 7), "N", 5) == "[5, 7]", "the first columns of a 3D box are no rotated rectangle"


def test_an_array_is_refused_with_the_way_to_a_tensor() -> None:
    with pytest.raises(TypeError, match=r"^nms: boxes must be a Tensor, got ndarray; torch\.from_numpy\(boxes\)$"):
        triops.nms(np.zeros((2, 4)), torch.zeros(2), 0.5)  # type: ignore[arg-type]
