"""Inputs of points_in_polygons."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from triops._sample import BadCall, Sample, Sized, Standard, Work, bytes_of, compiled_mmcv
from triops.ops.points_in_polygons import points_in_polygons, reference

_NAME = "points_in_polygons"
_Make = Callable[[torch.dtype], tuple[Any, ...]]
_FLOAT32 = (torch.float32,)


def _rotated(points: int, polygons: int, seed: int = 0, size: float = 1024.0) -> _Make:
    """Anchor points of an aerial image, and rotated boxes."""

    def make(dtype: torch.dtype) -> tuple[Any, ...]:
        g = torch.Generator().manual_seed(seed)
        center = torch.rand(polygons, 1, 2, generator=g) * size
        width, height = (torch.rand(2, polygons, 1, 1, generator=g) * 0.2 * size + 1).unbind(0)
        angle = torch.rand(polygons, 1, generator=g) * 3.14
        across, up = torch.stack([angle.cos(), angle.sin()], 2), torch.stack([-angle.sin(), angle.cos()], 2)
        sign = torch.tensor([[-1.0, -1], [1, -1], [1, 1], [-1, 1]])
        corners = center + sign[:, :1] * across * width / 2 + sign[:, 1:] * up * height / 2
        return (torch.rand(points, 2, generator=g) * size).to(dtype), corners.reshape(-1, 8).to(dtype)

    return make


def _lattice(dtype: torch.dtype) -> tuple[Any, ...]:
    """Everything at small integers: points on corners and edges, edges without length, polygons without area."""
    g = torch.Generator().manual_seed(0)
    y, x = torch.meshgrid(torch.arange(6.0), torch.arange(6.0), indexing="ij")
    return torch.stack([x, y], 2).view(-1, 2).to(dtype) / 2, torch.randint(3, (200, 8), generator=g).to(dtype)


def _not_finite(dtype: torch.dtype) -> tuple[Any, ...]:
    points, polygons = _rotated(40, 30)(dtype)
    points[0, 0], points[1, 1], points[2] = torch.nan, torch.inf, 3e38
    for row, (column, value) in enumerate([(0, torch.nan), (3, torch.inf), (4, -torch.inf), (7, torch.nan)]):
        polygons[row, column] = value
    polygons[5] = torch.tensor([-3e38, -3e38, 3e38, -3e38, 3e38, 3e38, -3e38, 3e38])
    return points, polygons


SAMPLES = [
    Sample(_NAME, "21824 points, 500 polygons", _rotated(21824, 500), "network", gpu_only=True),
    Sample(_NAME, "5456 points, 60 polygons", _rotated(5456, 60), "network", demo=True),
    Sample(_NAME, "50 points, 20 polygons", _rotated(50, 20)),
    Sample(_NAME, "200 points, 129 polygons", _rotated(200, 129, seed=1)),
    Sample(_NAME, "on corners and edges", _lattice, "boundary"),
    Sample(_NAME, "not finite", _not_finite, "boundary", _FLOAT32),
    Sample(_NAME, "no points", _rotated(0, 3), "boundary", _FLOAT32),
    Sample(_NAME, "no polygons", _rotated(3, 0), "boundary", _FLOAT32),
]

SIZED = [Sized(_NAME, "points and polygons", lambda draw: _rotated(draw(300), draw(300)))]

_points, _polygons = torch.zeros(5, 2), torch.zeros(3, 8)
BAD_CALLS = [
    BadCall("points with 3 columns", lambda: points_in_polygons(torch.zeros(5, 3), _polygons), ValueError,
            r"points must have shape \[N, 2\], got \[5, 3\]"),
    BadCall("polygons of five corners", lambda: points_in_polygons(_points, torch.zeros(3, 10)), ValueError,
            r"polygons must have shape \[M, 8\], got \[3, 10\]"),
    BadCall("unequal dtypes", lambda: points_in_polygons(_points, _polygons.double()), TypeError,
            "points float32, polygons float64"),
    BadCall("integers", lambda: points_in_polygons(_points.long(), _polygons.long()), TypeError,
            "points must be float32.*got int64"),
]  # fmt: skip

STANDARD = {_NAME: Standard(why_slower="four quotients per pair")}


def work(operator: str, args: tuple[Any, ...]) -> Work:
    pairs = len(args[0]) * len(args[1])
    return Work(bytes_of(args) + pairs, 4 * 12 * pairs)


def baselines(operator: str) -> dict[str, Callable[..., Any]]:
    found: dict[str, Callable[..., Any]] = {"torch": reference.points_in_polygons}
    _ext = compiled_mmcv()
    if _ext is None:
        return found

    def mmcv(points: Tensor, polygons: Tensor) -> Tensor:
        out = points.new_zeros((len(points), len(polygons)), dtype=torch.float32)
        _ext.points_in_polygons_forward(points, polygons, out)
        return out

    return {**found, "mmcv": mmcv}
