"""Facts about roipoint_pool3d, by hand."""

from __future__ import annotations

import pytest
import torch
from support import run

import triops
from triops.ops.roipoint_pool3d.samples import _random

BACKENDS = ["reference", "cpu", "gpu"]
POINTS = torch.tensor([[[0.0, 0, 1], [5, 5, 5], [0.5, 0, 1], [0, 0, 2.5]]])
FEATURES = torch.tensor([[[7.0], [8], [9], [10]]])


def boxes(*rows: list[float]) -> torch.Tensor:
    return torch.tensor([[*rows]])


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_box_with_few_points_repeats_them_and_one_without_gives_zeros(backend: str) -> None:
    two = boxes([0.0, 0, 0, 2, 2, 2, 0], [90, 0, 0, 2, 2, 2, 0])
    pooled, indices = run(backend, "roipoint_pool3d", (POINTS, FEATURES, two, 5, "bottom", 0.0))
    assert indices.tolist() == [[[0, 2, 0, 2, 0], [-1] * 5]]
    assert pooled[0, 0, 1].tolist() == [0.5, 0, 1, 9]
    assert not pooled[0, 1].any()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_box_with_many_points_takes_the_lowest(backend: str) -> None:
    everything = boxes([0.0, 0, 0, 99, 99, 99, 0])
    _, indices = run(backend, "roipoint_pool3d", (POINTS, FEATURES, everything, 2, "bottom", 0.0))
    assert indices.tolist() == [[[0, 1]]]


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_origin_of_z_and_the_margin_decide(backend: str) -> None:
    box = boxes([0.0, 0, 1, 1, 1, 2, 0])
    held = [
        run(backend, "roipoint_pool3d", (POINTS, FEATURES, box, 3, *options))[1].flatten().tolist()
        for options in (("bottom", 0.0), ("center", 0.0), ("center", 0.01))
    ]
    assert held == [[0, 3, 0], [0, 0, 0], [0, 2, 0]]  # z from 1 to 3, or from 0 to 2; x of 0.5 is on the border


def test_coordinates_stay_float32_where_features_are_half() -> None:
    far = POINTS + torch.tensor([1000.0, 0, 0])
    box = boxes([1000.6, 0, 0, 0.3, 2, 4, 0])
    pooled, empty = triops.roipoint_pool3d(far, FEATURES.half(), box, 2)
    assert pooled.dtype == torch.float16
    assert pooled[0, 0, :, 3].tolist() == [9, 9]
    assert empty.tolist() == [[False]]


def test_gradients_go_to_points_and_features() -> None:
    points, features, box, *rest = _random(2, 12, 3, 5, 2)(torch.float64)

    def pooled(p: torch.Tensor, f: torch.Tensor) -> torch.Tensor:
        return triops.roipoint_pool3d(p, f, box, rest[0])[0]

    assert torch.autograd.gradcheck(pooled, (points.requires_grad_(), features.requires_grad_()))
