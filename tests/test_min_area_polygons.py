"""Facts about the rectangle of least area around points."""

from __future__ import annotations

import math

import pytest
import torch
from support import run

import triops
from triops.ops.min_area_polygons.samples import sets

BACKENDS = ["reference", "cpu", "gpu"]


@pytest.mark.parametrize("backend", BACKENDS)
def test_by_hand(backend: str) -> None:
    points = torch.tensor([
        [0.0, 0, 2, 0, 2, 1, 0, 1],  # a rectangle
        [1, 0, 2, 1, 1, 2, 0, 1],  # a square on its corner, turned by an eighth
        [3, 3, 3, 3, 3, 3, 3, 3],  # a point
        [0, 0, 3, 0, 1, 0, 2, 0],  # a line
        [math.nan, 0, 2, 0, 2, 1, 0, 1],
    ])  # fmt: skip
    found = run(backend, "min_area_polygons", (points,))
    assert found[:4].tolist() == [
        [2, 0, 0, 0, 0, 1, 2, 1], [2, 1, 1, 0, 0, 1, 1, 2], [3] * 8, [3, 0, 0, 0, 0, 0, 3, 0]
    ]  # fmt: skip
    assert found[4].isnan().all()


def test_the_rectangle_holds_the_points_and_none_of_other_angles_is_smaller() -> None:
    (points,) = sets(60, seed=3)(torch.float64)
    corners = triops.min_area_polygons(points).view(-1, 4, 2)
    points = points.view(-1, 9, 2)

    def sizes(angle: torch.Tensor) -> torch.Tensor:
        """Of the rectangle around the points with this angle, [N]."""
        axes = torch.stack([torch.stack([angle.cos(), angle.sin()], -1), torch.stack([-angle.sin(), angle.cos()], -1)])
        along = torch.einsum("anc,nkc->ank", axes.expand(2, len(points), 2), points)
        return (along.amax(-1) - along.amin(-1)).prod(0)

    side = corners[:, 0] - corners[:, 1]
    found = side.norm(dim=-1) * (corners[:, 2] - corners[:, 1]).norm(dim=-1)
    torch.testing.assert_close(found, sizes(torch.atan2(side[:, 1], side[:, 0])))
    for angle in torch.linspace(0, math.pi / 2, 91, dtype=torch.float64)[:, None]:
        assert (sizes(angle) >= found * (1 - 1e-12)).all()
