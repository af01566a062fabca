"""Inputs of vector_pool_pairs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from triops import scenes
from triops._sample import BadCall, Sample, Sized, Standard, Work, bytes_of
from triops.ops.vector_pool import vector_pool, vector_pool_pairs

_NAME = "vector_pool_pairs"
_Make = Callable[[torch.dtype], tuple[Any, ...]]
_ONE = (torch.float32,)


def _random(
    lengths: Sequence[int], numbers: Sequence[int], radius: float, grid: Sequence[int] = (3, 2, 4), k: int = -1,
    ball: bool = False, levels: int = 0,
) -> _Make:  # fmt: skip
    """`levels`: whole numbers, so that points lie on borders of cells and of the cube."""

    def make(dtype: torch.dtype) -> tuple[Any, ...]:
        draw = torch.Generator().manual_seed(0)
        points, centers = (torch.rand(sum(n), 3, generator=draw) * 6 for n in (lengths, numbers))
        if levels:
            points, centers = (t.round() for t in (points, centers))
        offsets = (torch.tensor([0, *n]).cumsum(0) for n in (lengths, numbers))
        return points.to(dtype), centers.to(dtype), *offsets, radius, list(grid), k, ball

    return make


def _lidar(points: int, centers: int) -> _Make:
    """Keypoints of a sweep, with the radius and the grid of PV-RCNN++."""

    def make(dtype: torch.dtype) -> tuple[Any, ...]:
        cloud = scenes.lidar_scene(points, seed=0).points[:points, :3]
        ends = torch.tensor([0, len(cloud)]), torch.tensor([0, centers])
        return cloud.to(dtype), cloud[:: points // centers][:centers].to(dtype), *ends, 1.2, [3, 3, 3], -1, False

    return make


def _not_finite(dtype: torch.dtype) -> tuple[Any, ...]:
    points, centers, *rest = _random([30], [5], 3.0)(dtype)
    points[::4, 1], centers[2, 0] = torch.nan, torch.inf
    return points, centers, *rest


SAMPLES = [
    Sample(_NAME, "10000 points, 256 centers", _lidar(10_000, 256), "network", _ONE, demo=True),
    Sample(_NAME, "20000 points, 4096 centers", _lidar(20_000, 4096), "network", _ONE, gpu_only=True),
    Sample(_NAME, "two clouds", _random([40, 30], [5, 6], 1.5)),
    Sample(_NAME, "ball, 4 points at most", _random([60], [7], 2.0, k=4, ball=True)),
    Sample(_NAME, "points on borders", _random([200], [6], 2.0, (2, 4, 1), levels=7), "boundary", _ONE),
    Sample(_NAME, "one point", _random([1], [2], 9.0, (1, 1, 1)), "boundary", _ONE),
    Sample(_NAME, "more than a block", _random([2500, 0, 10], [2, 1, 1], 1.0, k=30), "boundary", _ONE),
    Sample(_NAME, "not finite", _not_finite, "boundary", _ONE),
    Sample(_NAME, "no points", _random([0], [3], 1.0), "boundary", _ONE),
    Sample(_NAME, "no centers", _random([9], [0], 1.0), "boundary", _ONE),
    Sample(_NAME, "nothing near", _random([9], [4], 1e-3), "boundary", _ONE),
]

SIZED = [Sized(_NAME, "points and centers", lambda draw: _random([draw(2000)], [draw(30)], 1.0))]

STANDARD = {_NAME: Standard(why_slower="every center tests every point of its cloud")}


def _bad_calls() -> list[BadCall]:
    points, features, centers = torch.zeros(5, 3), torch.zeros(5, 4), torch.zeros(2, 3)
    good: dict[str, Any] = {
        "points": points, "features": features, "centers": centers, "radius": 1.0, "grid": (2, 2, 2), "channels": 2,
    }  # fmt: skip

    def bad(what: str, error: type[Exception], match: str, **changed: Any) -> BadCall:
        return BadCall(f"vector_pool: {what}", lambda: vector_pool(**{**good, **changed}), error, match)

    return [
        bad("points of rank 3", ValueError, r"points must have shape \[N, 3\]", points=points[None]),
        bad("centers of 2 columns", ValueError, r"centers must have shape \[M, 3\]", centers=centers[:, :2]),
        bad("unequal features", ValueError, "N = 5 as in points", features=features[1:]),
        bad("integer features", TypeError, "features must be float32", features=features.long()),
        bad("double centers", TypeError, "centers float64", centers=centers.double()),
        bad("a list", TypeError, "centers must be a Tensor, got list", centers=[[0, 0, 0]]),
        bad("channels that do not divide", ValueError, "a multiple of 3 channels", channels=3),
        bad("no channels", ValueError, "channels must be at least 1", channels=0),
        bad("radius 0", ValueError, "radius must be above 0", radius=0.0),
        bad("radius NaN", ValueError, "radius must be finite", radius=float("nan")),
        bad("two axes", ValueError, "grid must be three numbers", grid=(2, 2)),
        bad("no cells", ValueError, "grid must be three numbers", grid=(2, 0, 2)),
        bad("too many cells", ValueError, "grid must be three numbers", grid=(2**10, 2**10, 2)),
        bad("unknown shape", ValueError, "shape must be 'cube' or 'ball'", shape="cone"),
        bad("unknown pool", ValueError, "pool must be 'avg' or 'first'", pool="max"),
        bad("offsets that end early", IndexError, "offsets must ascend from 0 to 5", offsets=torch.tensor([0, 4])),
        bad("offsets of another batch", ValueError, r"center_offsets must have shape \[3\]",
            offsets=torch.tensor([0, 4, 5])),
        BadCall(f"{_NAME}: centers elsewhere", lambda: vector_pool_pairs(points, centers.to("meta"), 1.0, (1, 1, 1)),
                ValueError, "centers on meta"),
    ]  # fmt: skip


BAD_CALLS = _bad_calls()


def work(operator: str, args: tuple[Any, ...]) -> Work:
    points, centers = args[:2]
    return Work(bytes_of((points, centers)), 9 * points.shape[0] * centers.shape[0])


def baselines(operator: str) -> dict[str, Callable[..., Any]]:
    return {"torch": _vectorised}


def _vectorised(
    points: Tensor, centers: Tensor, offsets: Tensor, center_offsets: Tensor, radius: float, grid: list[int], k: int,
    ball: bool,
) -> Tensor:  # fmt: skip
    """All differences at once."""
    cloud, of_center = (
        torch.searchsorted(ends[1:], torch.arange(n, device=points.device), right=True)
        for ends, n in ((offsets, len(points)), (center_offsets, len(centers)))
    )
    local = points[None] - centers[:, None]  # [M, N, 3]
    near = local.square().sum(-1) <= radius**2 if ball else (local.abs() <= radius).all(-1)
    near &= of_center[:, None] == cloud[None]
    if k > 0:
        near &= near.cumsum(1) <= k
    center, point = near.nonzero(as_tuple=True)
    size = torch.tensor(grid, device=points.device)
    x, y, z = ((local[center, point] + radius) / (2 * radius / size)).floor().long().unbind(1)
    cell = ((x * grid[1] + y) * grid[2] + z).clamp(0, int(size.prod()) - 1)
    return torch.stack([point, center, cell], 1).int()
