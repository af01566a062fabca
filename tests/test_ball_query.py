"""Facts about ball_query: by hand, and that boxes and sorting change nothing."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import CLOUDS, random_clouds, run
from torch import Tensor

import triops

BACKENDS = ["reference", "cpu", "gpu"]
AXIS = torch.tensor([[0.0, 0, 0], [3, 0, 0], [1, 0, 0], [2, 0, 0], [0, 0, 0]])


def ball(backend: str, points: Tensor, centers: Tensor, radius: float, k: int, **options: Any) -> Any:
    offsets = options.get("offsets"), options.get("center_offsets")
    return run(backend, "ball_query", (points, centers, radius, k, options.get("min_radius", 0.0), *offsets))


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_lowest_indices_come_first_and_the_first_fills_the_rest(backend: str) -> None:
    assert ball(backend, AXIS[None], AXIS[None, :1], 2.5, 6).tolist() == [[[0, 2, 3, 4, 0, 0]]]
    assert ball(backend, AXIS[None], AXIS[None, :1], 2.5, 2).tolist() == [[[0, 2]]]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_point_at_the_radius_is_outside_and_one_at_the_minimum_inside(backend: str) -> None:
    assert ball(backend, AXIS[None], AXIS[None, :1], 2.0, 3).tolist() == [[[0, 2, 4]]]
    # those at the center itself stay
    assert ball(backend, AXIS[None], AXIS[None, :1], 3.0, 5, min_radius=2.0).tolist() == [[[0, 3, 4, 0, 0]]]


@pytest.mark.parametrize("backend", BACKENDS)
def test_ragged_clouds_give_rows_of_points_and_do_not_see_each_other(backend: str) -> None:
    options = {"offsets": torch.tensor([0, 2, 2, 5]), "center_offsets": torch.tensor([0, 1, 2, 3])}
    centers = torch.zeros(3, 3)
    assert ball(backend, AXIS, centers, 1.5, 3, **options).tolist() == [[0, 0, 0], [-1, -1, -1], [2, 4, 2]]


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_empty_ball_is_0_in_a_padded_batch_and_minus_1_in_a_ragged_one(backend: str) -> None:
    far = torch.full((1, 3), 9.0)
    assert ball(backend, AXIS[None], far[None], 1.0, 2).tolist() == [[[0, 0]]]
    assert ball(backend, AXIS, far, 1.0, 2).tolist() == [[-1, -1]]


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_is_not_finite_has_no_neighbors(backend: str) -> None:
    points = torch.tensor([[math.nan, 0, 0], [0, math.inf, 0], [0, 0, 0]])
    assert ball(backend, points, points, 1e30, 2).tolist() == [[-1, -1], [-1, -1], [2, 2]]


@pytest.mark.parametrize("backend", BACKENDS)
def test_half_coordinates_are_the_float32_numbers_that_they_hold(backend: str) -> None:
    points = torch.tensor([[300.0, 0, 0], [300.25, 0, 0]], dtype=torch.float16)  # a square of 300 is no float16
    assert ball(backend, points, points, 0.5, 2).tolist() == [[0, 1], [0, 1]]


def test_offsets_that_lead_nowhere_stay_in_the_points_on_a_gpu_and_are_errors_on_a_cpu() -> None:
    offsets, good = torch.tensor([-5, 9, 2, 100]), torch.tensor([0, 1, 2, 3])
    found = ball("gpu", AXIS, AXIS[:3], 1.0, 2, offsets=offsets, center_offsets=good)
    assert found.min() >= -1
    assert found.max() < 5
    ball("gpu", AXIS, AXIS[:3], 1.0, 2, offsets=good, center_offsets=offsets)
    with pytest.raises(IndexError, match="offsets must ascend from 0 to 5"):
        triops.ball_query(AXIS, AXIS[:3], 1.0, 2, offsets=offsets, center_offsets=good)


@st.composite
def clouds(draw: st.DrawFn) -> tuple[Tensor, Tensor]:
    """Points on a coarse grid, so that many coincide and lie on lines, and some that are not finite."""
    count, queries, seed = draw(st.integers(0, 300)), draw(st.integers(1, 20)), draw(st.integers(0, 2**20))
    g = torch.Generator().manual_seed(seed)
    cells, axes = draw(st.sampled_from([2, 5, 1000])), draw(st.integers(1, 3))
    points = torch.randint(cells, (count + queries, 3), generator=g) * torch.tensor([1.0, axes > 1, axes > 2])
    points = points * draw(st.sampled_from([1.0, 1e-3, 3e5])) + draw(st.sampled_from([0.0, 1e3]))
    points[torch.rand(points.shape, generator=g) < draw(st.sampled_from([0.0, 0.05]))] = math.nan
    return points[:count], points[count:]


@settings(deadline=None, max_examples=8)
@given(clouds(), st.sampled_from([1e-3, 0.9, 1.0, 2.5, 1e6]), st.integers(1, 40), st.sampled_from([0.0, 0.5, 1.0]))
def test_all_backends_find_the_same(cloud: tuple[Tensor, Tensor], radius: float, k: int, minimum: float) -> None:
    expected, cpu, gpu = (ball(b, *cloud, radius, k, min_radius=minimum * radius) for b in BACKENDS)
    assert torch.equal(cpu, expected)
    assert torch.equal(gpu, expected)


@pytest.mark.parametrize(("backend", "clouds"), CLOUDS)
def test_random_clouds_with_duplicates_and_collinear_points_give_the_indices_of_the_reference(
    backend: str, clouds: int
) -> None:
    points, offsets = random_clouds(clouds)
    centers = points[offsets[:-1].repeat_interleave(2) + torch.tensor([0, -1]).repeat(clouds)]
    ends = {"offsets": offsets, "center_offsets": torch.arange(clouds + 1) * 2}
    for minimum in (0.0, 0.5):
        expected, found = (ball(b, points, centers, 1.0, 8, min_radius=minimum, **ends) for b in ("reference", backend))
        assert torch.equal(found, expected)
        assert 0.05 < (expected >= 0).float().mean() < 1
