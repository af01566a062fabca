"""Facts about voxel_query, by hand, and that it is ball_query where the window holds the ball."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support import run

import triops
from triops.ops.voxel_query.samples import SAMPLES

BACKENDS = ["reference", "cpu", "gpu"]
POINTS = torch.tensor([[0.5, 0.5, 0.5], [1.5, 0.5, 0.5], [0.5, 1.5, 0.5], [0.5, 0.5, 1.5]])
ROWS = torch.tensor([[[[0, 1], [2, -1]], [[3, -7], [-1, -1]]]], dtype=torch.int32)  # [B, Z, Y, X]


def query(backend: str, sites: list[list[int]], radius: float, k: int, max_range: list[int], **other: Any) -> Any:
    coords = torch.tensor(sites)
    centers = coords[:, [3, 2, 1]] + 0.5
    return run(backend, "voxel_query", (POINTS, centers, coords, other.get("rows", ROWS), radius, k, max_range))


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_window_is_read_along_x_then_y_then_z(backend: str) -> None:
    assert query(backend, [[0, 0, 0, 0]], 1.0, 5, [1, 1, 1]).tolist() == [[0, 1, 2, 3, 0]]
    assert query(backend, [[0, 0, 0, 0]], 1.0, 2, [1, 1, 1]).tolist() == [[0, 1]]
    assert query(backend, [[0, 0, 0, 0]], 1.0, 3, [1, 0, 0]).tolist() == [[0, 3, 0]]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_point_at_the_radius_counts_and_a_center_without_points_is_minus_1(backend: str) -> None:
    assert query(backend, [[0, 1, 1, 1], [0, 9, 9, 9]], 1.5, 2, [1, 1, 1]).tolist() == [[1, 2], [-1, -1]]
    assert query(backend, [[0, 0, 1, 1]], 1.0, 3, [0, 1, 1]).tolist() == [[1, 2, 1]]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_center_as_far_off_as_integers_go_has_no_points(backend: str) -> None:
    far, rows = [2**63 - 1, -(2**63), 2**31 - 1, -(2**31)], torch.tensor([[[[0, 1], [2, 3]]]], dtype=torch.int32)
    sites = [[0, *(place if axis == a else 0 for a in range(3))] for axis in range(3) for place in far]
    assert query(backend, sites, 9.0, 2, [0, 0, 0], rows=rows).tolist() == [[-1, -1]] * 12
    assert query(backend, sites, 9.0, 2, [1, 1, 1], rows=rows).tolist() == [[-1, -1]] * 12


def test_on_a_gpu_rows_and_batches_that_are_not_there_are_empty() -> None:
    rows = ROWS.clone()
    rows[rows == 1] = 2**31 - 1
    assert query("gpu", [[0, 0, 0, 0], [7, 0, 0, 0], [-1, 0, 0, 0]], 1.0, 2, [1, 1, 1], rows=rows).tolist() == [
        [0, 2], [-1, -1], [-1, -1]
    ]  # fmt: skip


def test_a_window_that_holds_the_ball_finds_the_points_of_ball_query() -> None:
    points, centers, coords, rows, *_ = next(s for s in SAMPLES if s.name.startswith("2 x 4 x 5")).make(torch.float32)
    first, near = rows[0].max() + 1, coords[:, 0] == 0
    expected = triops.ball_query(points[:first], centers[near], 1.25 + 1e-4, 40)
    found = triops.voxel_query(points, centers[near], coords[near], rows, 1.25, 40, 2)
    assert torch.equal(found.sort().values[:, -1], expected.sort().values[:, -1])
    assert [set(row) for row in found.tolist()] == [set(row) for row in expected.tolist()]
