"""mmcv's and OpenPCDet's names for searches among points."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import triops.compat.mmcv

LINE = torch.tensor([[0.0, 0, 0], [1, 0, 0], [2, 0, 0], [9, 0, 0]])


@pytest.fixture
def ext() -> Any:
    return triops.compat.mmcv.extension("mmcv._ext")


def test_ball_query_fills_its_indices(ext: Any) -> None:
    indices = torch.zeros(1, 2, 3, dtype=torch.int32)
    ext.ball_query_forward(
        LINE[None, 1:3].contiguous(), LINE[None], indices, b=1, n=4, m=2, min_radius=0.5, max_radius=1.5, nsample=3
    )
    assert indices.tolist() == [[[0, 1, 2], [1, 2, 1]]]


def test_stacked_ball_query_counts_within_each_cloud_and_marks_empty_balls_in_front(ext: Any) -> None:
    indices = torch.zeros(3, 3, dtype=torch.int32)
    centers = torch.tensor([[0.5, 0, 0], [9.5, 0, 0], [5.0, 0, 0]])
    counts = [torch.tensor(c, dtype=torch.int32) for c in ([1, 2], [2, 2])]
    ext.stack_ball_query_forward(centers, counts[0], LINE, counts[1], indices, max_radius=1.0, nsample=3)
    assert indices.tolist() == [[0, 1, 0], [1, 1, 1], [-1, 0, 0]]


def test_knn_and_three_nn_fill_indices_and_squared_distances(ext: Any) -> None:
    indices, squares = torch.zeros(1, 1, 5, dtype=torch.int32), torch.zeros(1, 1, 5)
    ext.knn_forward(LINE[None], LINE[None, 1:2].contiguous(), indices, squares, b=1, n=4, m=1, nsample=5)
    assert indices.tolist() == [[[1, 0, 2, 3, 0]]]
    assert squares.tolist() == [[[0, 1, 1, 64, 1e10]]]
    indices, squares = torch.zeros(1, 1, 3, dtype=torch.int32), torch.zeros(1, 1, 3)
    ext.three_nn_forward(LINE[None, 3:].contiguous(), LINE[None, :3].contiguous(), squares, indices, b=1, n=1, m=3)
    assert (indices.tolist(), squares.tolist()) == ([[[2, 1, 0]]], [[[49, 64, 81]]])
