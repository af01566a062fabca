"""Facts about points_in_polygons: mmcv's own example, and a plain loop."""

from __future__ import annotations

import pytest
import torch
from support import run

from triops.ops.points_in_polygons.samples import SAMPLES

BACKENDS = ["reference", "cpu", "gpu"]


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_example_of_mmcv(backend: str) -> None:
    points = torch.tensor([[300.0, 300], [400, 400], [100, 100], [300, 250], [100, 0]])
    polygons = torch.tensor([
        [200.0, 200, 400, 400, 500, 200, 400, 100], [400, 400, 500, 500, 600, 300, 500, 200],
        [300, 300, 600, 700, 700, 700, 700, 100],
    ])  # fmt: skip
    found = run(backend, "points_in_polygons", (points, polygons))
    assert found.int().tolist() == [[0, 0, 0], [0, 0, 1], [0, 0, 0], [1, 0, 0], [0, 0, 0]]


def by_loop(px: float, py: float, polygon: list[float]) -> bool:
    """Edges to the right of the point, counted until the point is found to lie on one."""
    crossings = 0
    for i in range(4):
        (sx, sy), (tx, ty) = (polygon[2 * c : 2 * c + 2] for c in (i, (i + 3) % 4))
        if not min(sy, ty) <= py <= max(sy, ty):
            continue
        if (sx, sy) == (px, py) or (tx, ty) == (px, py):
            break
        if (sy < py) != (ty < py):
            at = sx + (py - sy) * (tx - sx) / (ty - sy)
            if at == px:
                break
            crossings += at > px
    return crossings % 2 == 1


@pytest.mark.parametrize("backend", BACKENDS)
def test_points_on_corners_and_edges_are_where_a_plain_loop_has_them(backend: str) -> None:
    points, polygons = next(s for s in SAMPLES if s.name == "on corners and edges").make(torch.float64)
    found = run(backend, "points_in_polygons", (points, polygons))
    assert found.tolist() == [[by_loop(*p, q) for q in polygons.tolist()] for p in points.tolist()]
