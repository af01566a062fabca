"""Facts about knn and three_nn: by hand, and that boxes and sorting change nothing."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import CLOUDS, random_clouds, run
from test_ball_query import clouds
from torch import Tensor

import triops

BACKENDS = ["reference", "cpu", "gpu"]
AXIS = torch.tensor([[0.0, 0, 0], [3, 0, 0], [1, 0, 0], [-1, 0, 0], [0, 0, 0]])
INF = math.inf


def nearest(backend: str, points: Tensor, queries: Tensor, k: int, squared: bool = True, *offsets: Tensor) -> Any:
    return run(backend, "knn", (points, queries, k, squared, *(offsets or (None, None))))


@pytest.mark.parametrize("backend", BACKENDS)
def test_nearest_first_and_of_equals_the_lower_index(backend: str) -> None:
    indices, distances = nearest(backend, AXIS[None], AXIS[None, :1], 5, False)
    assert indices.tolist() == [[[0, 4, 2, 3, 1]]]
    assert distances.tolist() == [[[0, 0, 1, 1, 3]]]


@pytest.mark.parametrize("backend", BACKENDS)
def test_more_neighbors_than_points_are_minus_1_at_distance_inf(backend: str) -> None:
    indices, distances = nearest(backend, AXIS[:2], AXIS[:1], 4)
    assert indices.tolist() == [[0, 1, -1, -1]]
    assert distances.tolist() == [[0, 9, INF, INF]]


@pytest.mark.parametrize("backend", BACKENDS)
def test_ragged_clouds_give_rows_of_points_and_do_not_see_each_other(backend: str) -> None:
    offsets = torch.tensor([0, 2, 2, 5]), torch.tensor([0, 1, 2, 3])
    indices, distances = nearest(backend, AXIS, torch.zeros(3, 3), 2, True, *offsets)
    assert indices.tolist() == [[0, 1], [-1, -1], [4, 2]]
    assert distances.tolist() == [[0, 9], [INF, INF], [0, 1]]


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_is_not_finite_has_no_neighbors(backend: str) -> None:
    points = torch.tensor([[math.nan, 0, 0], [0, INF, 0], [1, 0, 0], [3e38, 0, 0]])
    indices, distances = nearest(backend, points, points, 2)
    assert indices.tolist() == [[-1, -1], [-1, -1], [2, -1], [3, -1]]  # the square of 3e38 is no float32
    assert distances[2].tolist() == [0, INF]


@pytest.mark.parametrize("backend", BACKENDS)
def test_distances_of_half_coordinates_are_float32(backend: str) -> None:
    points = torch.tensor([[300.0, 0, 0], [0, 400, 0]], dtype=torch.float16)
    _, distances = nearest(backend, points, points[:1], 2, False)
    assert distances.dtype == torch.float32
    assert distances.tolist() == [[0, 500]]


@pytest.mark.parametrize("backend", BACKENDS)
def test_three_nn_gives_the_first_point_of_the_cloud_for_those_that_are_missing(backend: str) -> None:
    distances, indices = run(backend, "three_nn", (AXIS[None, :1], AXIS[None, :2], False, None, None))
    assert (distances.tolist(), indices.tolist()) == ([[[0, 3, INF]]], [[[0, 1, 0]]])
    offsets = torch.tensor([0, 3, 5]), torch.tensor([0, 0, 1])
    distances, indices = run(backend, "three_nn", (AXIS[:1], AXIS, True, *offsets))
    assert (distances.tolist(), indices.tolist()) == ([[0, 1, INF]], [[4, 3, 3]])


@pytest.mark.parametrize("backend", BACKENDS)
def test_128_neighbors(backend: str) -> None:
    points = torch.rand(200, 3, generator=torch.Generator().manual_seed(0))
    indices, distances = nearest(backend, points, points[:1], 128)
    assert indices.unique().numel() == 128
    assert torch.equal(distances, distances.sort().values)


def test_offsets_that_lead_nowhere_stay_in_the_points_on_a_gpu_and_are_errors_on_a_cpu() -> None:
    offsets, good = torch.tensor([-5, 9, 2, 100]), torch.tensor([0, 1, 2, 3])
    indices, _ = nearest("gpu", AXIS, AXIS[:3], 2, True, offsets, good)
    assert indices.min() >= -1
    assert indices.max() < 5
    with pytest.raises(IndexError, match="offsets must ascend from 0 to 5"):
        triops.three_nn(AXIS[:3], AXIS, offsets=offsets, query_offsets=good)


@settings(deadline=None, max_examples=8)
@given(clouds(), st.integers(1, 40))
def test_all_backends_find_the_same(cloud: tuple[Tensor, Tensor], k: int) -> None:
    expected, cpu, gpu = (nearest(b, *cloud, k) for b in BACKENDS)
    for found in (cpu, gpu):
        assert torch.equal(found[0], expected[0])
        assert torch.equal(found[1], expected[1])  # distances too, bit for bit


@pytest.mark.parametrize(("backend", "clouds"), CLOUDS)
def test_random_clouds_with_duplicates_and_collinear_points_give_the_indices_of_the_reference(
    backend: str, clouds: int
) -> None:
    points, offsets = random_clouds(clouds)
    queries, ends = points[offsets[:-1]].repeat_interleave(2, 0).float(), torch.arange(clouds + 1) * 2
    queries[::2] += 0.25
    expected, found = (nearest(b, points, queries, 12, True, offsets, ends) for b in ("reference", backend))
    assert torch.equal(found[0], expected[0])
    assert torch.equal(found[1], expected[1])
    three = [run(b, "three_nn", (queries, points, True, offsets, ends)) for b in ("reference", backend)]
    assert torch.equal(three[1][1], three[0][1])
