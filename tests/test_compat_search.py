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
