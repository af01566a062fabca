"""Facts about furthest_point_sample: by hand, by symmetry, and the same indices everywhere."""

from __future__ import annotations

import math

import pytest
import torch
from support import CLOUDS, random_clouds, run
from torch import Tensor

import triops
from triops.ops.furthest_point_sample import furthest_point_sample_rows

BACKENDS = ["reference", "cpu", "gpu"]


def sampled(backend: str, cloud: Tensor, count: int) -> list[int]:
    ends = torch.tensor([0, len(cloud)]), torch.tensor([0, count])
    return run(backend, "furthest_point_sample", (cloud, *ends, count, len(cloud), True)).tolist()  # type: ignore[no-any-return]


def on_a_line(*x: float) -> Tensor:
    return torch.tensor([[value, 0.0, 0.0] for value in x])


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_ends_of_a_line_come_first_then_its_middle(backend: str) -> None:
    assert sampled(backend, on_a_line(0, 1, 2, 3, 4), 3) == [0, 4, 2]


@pytest.mark.parametrize("backend", BACKENDS)
def test_of_equal_distances_the_lower_index_wins(backend: str) -> None:
    assert sampled(backend, on_a_line(0, 3, -3, 3), 4) == [0, 1, 2, 0]  # the second 3 is a duplicate: at distance 0


@pytest.mark.parametrize("backend", BACKENDS)
def test_more_samples_than_points_repeat_the_first(backend: str) -> None:
    assert sampled(backend, on_a_line(0, 2), 4) == [0, 1, 0, 0]


@pytest.mark.parametrize("backend", BACKENDS)
def test_points_that_are_not_finite_are_not_sampled(backend: str) -> None:
    assert sampled(backend, on_a_line(math.nan, 1, math.inf, 5), 4) == [1, 3, 1, 1]
    assert sampled(backend, on_a_line(math.nan, -math.inf), 2) == [0, 0]


@pytest.mark.parametrize("backend", BACKENDS)
def test_distances_that_overflow_are_equal(backend: str) -> None:
    assert sampled(backend, on_a_line(0, 1, 2e38, -2e38), 3) == [0, 2, 3]


@pytest.mark.parametrize("backend", BACKENDS)
def test_points_infinitely_far_from_each_other_come_in_their_order(backend: str) -> None:
    order = torch.randperm(5000, generator=torch.Generator().manual_seed(0))  # more than a block of groups
    cloud = on_a_line(*(order * 1e20).tolist())  # the squares of all gaps overflow
    assert sampled(backend, cloud, 20) == [*range(20)]


@pytest.mark.parametrize("backend", BACKENDS)
def test_any_number_of_columns_counts(backend: str) -> None:
    cloud = torch.cat([on_a_line(0, 1, 2), torch.tensor([[0.0], [9], [0]])], 1)
    assert sampled(backend, cloud, 3) == [0, 1, 2]
    assert sampled(backend, cloud[:, :1], 3) == [0, 2, 1]


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_empty_cloud_gives_0_and_among_others_minus_1(backend: str) -> None:
    assert sampled(backend, torch.zeros(0, 3), 2) == [0, 0]
    args = on_a_line(0, 1), torch.tensor([0, 0, 2, 2]), torch.tensor([0, 1, 3, 5]), 5, 2, False
    assert run(backend, "furthest_point_sample", args).tolist() == [-1, 0, 1, -1, -1]


def test_offsets_that_lie_touch_nothing_out_of_bounds_on_gpu() -> None:
    cloud = on_a_line(0, 1, 2, 3)
    for wrong in ([-9, 2, 900], [4, 1, 0], [2**31 - 1, -(2**31), 3]):
        offsets, right = torch.tensor(wrong), torch.tensor([0, 2, 4])
        for pair in ((offsets, right), (right, offsets)):
            found = run("gpu", "furthest_point_sample", (cloud, *pair, 4, 4, False))
            assert (found >= -1).all()
            assert (found < 4).all()


@pytest.mark.parametrize(("backend", "clouds"), CLOUDS)
def test_random_clouds_with_duplicates_and_collinear_points_give_the_indices_of_the_reference(
    backend: str, clouds: int
) -> None:
    points, offsets = random_clouds(clouds)
    args = points, offsets, torch.arange(clouds + 1) * 5, 5 * clouds, 40, False
    assert torch.equal(run(backend, "furthest_point_sample", args), run("reference", "furthest_point_sample", args))


def test_a_large_cloud_of_many_boxes_gives_the_indices_of_the_reference_on_cpu() -> None:
    points = torch.randn(30_000, 3, generator=torch.Generator().manual_seed(0)).cumsum(0) % 7
    args = points, torch.tensor([0, 30_000]), torch.tensor([0, 300]), 300, 30_000, True
    assert torch.equal(run("cpu", "furthest_point_sample", args), run("reference", "furthest_point_sample", args))


def test_padded_and_ragged_clouds_give_the_same_samples() -> None:
    points = torch.rand(3, 50, 3)
    padded = triops.furthest_point_sample(points, 7)
    rows = triops.furthest_point_sample(points.view(-1, 3), 7, offsets=torch.tensor([0, 50, 100, 150]))
    assert padded.dtype == rows.dtype == torch.int32
    assert torch.equal(rows.view(3, 7) - torch.arange(3)[:, None] * 50, padded)
    some = triops.furthest_point_sample(points.view(-1, 3), [7, 0, 2], offsets=torch.tensor([0, 50, 100, 150]))
    assert torch.equal(some, torch.cat([rows[:7], rows[14:16]]))
    by_rows = furthest_point_sample_rows(
        points.view(-1, 3), torch.tensor([0, 50, 100, 150]), torch.tensor([0, 7, 7, 9]), 9
    )
    assert torch.equal(by_rows, some)


def test_moved_points_give_the_same_samples() -> None:
    points = (torch.rand(1, 200, 3) * 64).round()  # whole numbers: no rounding in either place
    assert torch.equal(triops.furthest_point_sample(points, 20), triops.furthest_point_sample(points + 512, 20))


@pytest.mark.parametrize("backend", BACKENDS)
def test_by_distances_it_samples_what_it_samples_by_points(backend: str) -> None:
    cloud = (torch.rand(60, 3, generator=torch.Generator().manual_seed(0)) * 9).floor()
    distances = (cloud[:, None] - cloud[None]).square().sum(-1)
    found = run(backend, "furthest_point_sample_with_dist", (distances[None], 25))
    assert found[0].tolist() == sampled("reference", cloud, 25)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_point_at_no_finite_distance_to_itself_is_not_sampled(backend: str) -> None:
    line = torch.tensor([math.nan, 1.0, math.inf, 5.0])
    distances = (line[:, None] - line).square()
    assert run(backend, "furthest_point_sample_with_dist", (distances[None], 4)).tolist() == [[1, 3, 1, 1]]


def test_compiles_from_the_public_function() -> None:
    points = torch.rand(2, 20, 3)

    def both(x: Tensor) -> tuple[Tensor, Tensor]:
        rows = triops.furthest_point_sample(x.view(-1, 3), [2, 3], offsets=torch.tensor([0, 20, 40]))
        return triops.furthest_point_sample(x, 5), rows

    compiled = torch.compile(both, backend="aot_eager", fullgraph=True)
    for got, expected in zip(compiled(points), both(points), strict=True):
        assert torch.equal(got, expected)
