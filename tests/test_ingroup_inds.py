"""Facts about ingroup_inds, by hand and by counting."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import run

import triops

BACKENDS = ["reference", "cpu", "gpu"]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_elements_of_a_group_are_numbered_in_their_order(backend: str, dtype: torch.dtype) -> None:
    got = run(backend, "ingroup_inds", (torch.tensor([5, 5, 2, 5, 2, 9], dtype=dtype),))
    assert got.dtype == torch.int32
    assert got.tolist() == [0, 1, 0, 2, 1, 0]


@pytest.mark.parametrize("backend", BACKENDS)
def test_any_integer_is_a_group(backend: str) -> None:
    groups = torch.tensor([-1, 2**63 - 1, -(2**63), -1, 2**63 - 1])
    assert run(backend, "ingroup_inds", (groups,)).tolist() == [0, 0, 0, 1, 1]


@pytest.mark.parametrize("backend", BACKENDS)
@settings(deadline=None, max_examples=30)
@given(st.lists(st.integers(-3, 3) | st.integers(-(2**62), 2**62), max_size=40))
def test_the_numbers_are_those_of_counting(backend: str, groups: list[int]) -> None:
    seen: dict[int, int] = {}
    expected = []
    for group in groups:
        expected.append(seen.get(group, 0))
        seen[group] = expected[-1] + 1
    assert run(backend, "ingroup_inds", (torch.tensor(groups, dtype=torch.int64),)).tolist() == expected


def test_nothing_has_no_numbers() -> None:
    assert triops.ingroup_inds(torch.zeros(0, dtype=torch.int32)).shape == (0,)
