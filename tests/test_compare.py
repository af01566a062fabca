"""The rule by which two results are the same catches what it should: errors are planted in right results."""

from __future__ import annotations

import math

import pytest
import torch
from support import error_scale, run, small

from triops import _sample
from triops._compare import FLOOR, TOLERANCE, difference
from triops._op import OPERATORS

INF, NAN = math.inf, math.nan


def first_general_sample(operator: str) -> _sample.Sample:
    return next(s for s in small(_sample.all_samples()) if s.operator == operator and s.scale == "general")


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("size", [1e-4, 1.0, 1e4])
def test_a_twentieth_of_a_value_is_an_error_whatever_its_size(size: float, dtype: torch.dtype) -> None:
    right = torch.tensor([size, 2 * size], dtype=dtype)
    assert not difference(right, right)
    for wrong in (right * 1.05, right * torch.tensor([1, 0.95], dtype=dtype), right * 0):
        for scale in ("value", "row"):
            assert difference(wrong, right, scale)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_a_unit_in_the_last_place_is_no_error(dtype: torch.dtype) -> None:
    right = torch.linspace(1, 2, 50, dtype=dtype)
    assert not difference(right * (1 + torch.finfo(dtype).eps), right)


def test_a_small_value_beside_large_ones_is_compared_by_its_own_size() -> None:
    right = torch.tensor([[10.0, 1e-5]])
    assert "worst at [0, 1]: 2e-05 instead of 1e-05" in difference(torch.tensor([[10.0, 2e-5]]), right)


def test_in_a_sum_an_error_is_small_against_its_row_and_not_against_the_largest() -> None:
    right = torch.tensor([[10.0, 1e-6], [1e-5, 1e-6]])
    near = torch.tensor([[10.0, 1.1e-6], [1e-5, 1e-6]])
    assert difference(near, right, "value")
    assert not difference(near, right, "row")
    assert difference(torch.tensor([[10.0, 1e-6], [1e-5, 1.1e-6]]), right, "row")


def test_a_sum_that_cancels_has_the_errors_of_the_sums_around_it() -> None:
    right = torch.tensor([[3.0], [-2.0], [1e-6], [0.0], [0.0]])
    near = right + torch.tensor([[0.0], [0.0], [1e-5], [0.0], [0.0]])
    assert not difference(near, right, "row")
    assert difference(right + 1e-3, right, "row")


def test_nan_and_inf_have_their_places() -> None:
    right = torch.tensor([NAN, INF, -INF, 1.0])
    assert not difference(right.clone(), right)
    for place, value in ((0, 1.0), (1, -INF), (1, 3e38), (2, NAN), (3, NAN), (3, INF)):
        wrong = right.clone()
        wrong[place] = value
        assert f"worst at [{place}]" in difference(wrong, right)


def test_numbers_without_digits_left_may_be_flushed_to_zero() -> None:
    assert not difference(torch.zeros(1), torch.tensor([FLOOR[torch.float32] / 2]))
    assert difference(torch.zeros(1), torch.tensor([FLOOR[torch.float32] * 2]))


def test_integers_shapes_dtypes_and_the_number_of_outputs_are_compared() -> None:
    right = torch.tensor([1, 2**60])
    assert difference(torch.tensor([1, 2**60 + 1]), right)
    assert difference(right.int(), right)
    assert difference(right[None], right)
    assert difference((right, right), right)


@pytest.mark.parametrize("operator", sorted(OPERATORS))
def test_one_percent_off_the_smallest_value_of_any_operator_is_caught(operator: str) -> None:
    """Where values are sums, the smallest that can be told from rounding."""
    right = [
        t.clone() for t in _sample.tensors_of(run("cpu", operator, first_general_sample(operator).make(torch.float32)))
    ]
    assert not difference(right, right, error_scale(operator))
    for i, output in enumerate(right):
        if not output.is_floating_point() or output.numel() == 0:
            continue
        size = output.abs()
        if error_scale(operator) == "row":
            size = torch.where(size > 2e-3 * size.max(), size, INF)
        at = int(torch.where(size > 10 * FLOOR[torch.float32], size, INF).argmin())
        wrong = output.clone()
        wrong.view(-1)[at] *= 1.01
        found = difference([*right[:i], wrong, *right[i + 1 :]], right, error_scale(operator))
        assert found.startswith(f"output {i}: 1 of")
