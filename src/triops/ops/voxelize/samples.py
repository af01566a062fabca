"""Inputs of voxelize_padded and dynamic_voxelize."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from triops import scenes
from triops._sample import BadCall, Sample, Sized, Standard, Work, bytes_of, compiled_mmcv
from triops.ops.voxelize import dynamic_voxelize, voxelize, voxelize_padded
from triops.ops.voxelize import grid_size as checked_grid_size
from triops.ops.voxelize.geometry import grid_size

_Make = Callable[[torch.dtype], tuple[Any, ...]]
_P, _D = "voxelize_padded", "dynamic_voxelize"

# voxel size, range, points per voxel, voxels at most (in training), points of a scene, numbers per point
_NETWORKS: dict[str, tuple[list[float], list[float], int, int, int, int]] = {
    "PointPillars": ([0.16, 0.16, 4], [0, -39.68, -3, 69.12, 39.68, 1], 32, 16_000, 20_000, 4),
    "SECOND": ([0.05, 0.05, 0.1], [0, -40, -3, 70.4, 40, 1], 5, 16_000, 20_000, 4),
    "CenterPoint": ([0.1, 0.1, 0.2], [-51.2, -51.2, -5, 51.2, 51.2, 3], 10, 90_000, 300_000, 5),
}


def _network(operator: str, name: str, shuffled: bool = False, more_voxels: int = 0) -> _Make:
    """A sweep of which the points within the range are left, as the networks' pipelines leave them."""

    def make(dtype: torch.dtype) -> tuple[Any, ...]:
        size, bounds, max_points, max_voxels, count, channels = _NETWORKS[name]
        g = torch.Generator().manual_seed(0)
        xyz = scenes.lidar_scene(4 * count).points
        low, high = torch.tensor(bounds[:3]), torch.tensor(bounds[3:])
        xyz = xyz[((xyz > low) & (xyz < high)).all(1)]
        step = len(xyz) / count
        xyz = xyz[(torch.arange(count) * step).long()]  # evenly all around
        if shuffled:
            xyz = xyz[torch.randperm(count, generator=g)]
        points = torch.cat([xyz, torch.rand(count, channels - 3, generator=g)], 1).to(dtype)
        limits = (max_points, more_voxels or max_voxels)
        return points, size, bounds, *(limits if operator == _P else ())

    return make


def _random(
    operator: str, count: int, channels: int = 4, size: tuple[float, ...] = (1, 1, 1), reach: float = 4.0,
    max_points: int = 3, max_voxels: int = 50, seed: int = 0,
) -> _Make:  # fmt: skip
    """Points of which a part lies outside a range of `reach` in x and y, and half of that in z."""

    def make(dtype: torch.dtype) -> tuple[Any, ...]:
        g = torch.Generator().manual_seed(seed)
        points = torch.rand(count, channels, generator=g) * 2 - 1
        points[:, :3] *= torch.tensor([1.1, 1.1, 0.55]) * reach
        bounds = [-reach, -reach, -reach / 2, reach, reach, reach / 2]
        limits = (max_points, max_voxels) if operator == _P else ()
        return points.to(dtype), [float(s) for s in size], bounds, *limits

    return make


def _away_from_borders(dtype: torch.dtype) -> tuple[Any, ...]:
    g = torch.Generator().manual_seed(3)
    points = torch.randint(-2, 2, (12, 4), generator=g) + 0.5 + 0.1 * torch.rand(12, 4, generator=g)
    return points.to(dtype), [1.0, 1.0, 1.0], [-2.0, -2.0, -1.0, 2.0, 2.0, 1.0], 2, 5


def _on_borders(operator: str) -> _Make:
    """Points on the borders of cells of 0.1 and just beside them: where a division and a product differ."""

    def make(dtype: torch.dtype) -> tuple[Any, ...]:
        border = torch.arange(-3, 45) * 0.1
        beside = torch.stack([border, border.nextafter(border + 1), border.nextafter(border - 1)])
        flat = beside.flatten()
        points = torch.stack([flat, flat.flip(0), flat.roll(5)], 1).to(dtype)
        return points, [0.1, 0.1, 0.1], [0.0, 0.0, 0.0, 4.0, 4.0, 4.0], *((4, 500) if operator == _P else ())

    return make


def _not_finite(operator: str) -> _Make:
    def make(dtype: torch.dtype) -> tuple[Any, ...]:
        inf, nan = float("inf"), float("nan")
        points = torch.ones(15, 4)
        for i, value in enumerate((inf, -inf, nan, 3e38, -3e38)):
            for field in range(3):
                points[i * 3 + field, field] = value
        points[:, 3] = nan  # what is not a coordinate goes along as it is
        points = torch.cat([points, torch.ones(2, 4)]).to(dtype)
        return points, [1.0, 1.0, 1.0], [0.0, 0.0, 0.0, 4.0, 4.0, 4.0], *((3, 5) if operator == _P else ())

    return make


def _huge_grid(operator: str) -> _Make:
    """More cells than 32 bits can number."""

    def make(dtype: torch.dtype) -> tuple[Any, ...]:
        g = torch.Generator().manual_seed(5)
        points = (torch.rand(300, 3, generator=g) * 1e4).round().repeat(2, 1)
        return (
            points.to(dtype),
            [0.01, 0.01, 0.01],
            [0.0, 0.0, 0.0, 1e4, 1e4, 1e4],
            *((2, 400) if operator == _P else ()),
        )

    return make


def _one_cell(count: int, max_points: int) -> _Make:
    def make(dtype: torch.dtype) -> tuple[Any, ...]:
        points = torch.rand(count, 3, generator=torch.Generator().manual_seed(7))
        return points.to(dtype), [1.0, 1.0, 1.0], [0.0, 0.0, 0.0, 1.0, 1.0, 1.0], max_points, 7

    return make


SAMPLES = []
for _operator in (_P, _D):
    SAMPLES += [
        Sample(_operator, "PointPillars, 20000 points", _network(_operator, "PointPillars"), "network", demo=True),
        Sample(_operator, "SECOND, 20000 points, shuffled", _network(_operator, "SECOND", shuffled=True), "network"),
        Sample(_operator, "CenterPoint, 300000 points", _network(_operator, "CenterPoint"), "network"),
        Sample(_operator, "40 points", _random(_operator, 40)),
        Sample(_operator, "3000 points, 3 numbers each", _random(_operator, 3000, 3, max_voxels=100, seed=1)),
        Sample(_operator, "hashed grid", _random(_operator, 2000, 5, (0.02, 0.02, 0.02), 8, seed=2, max_voxels=1500)),
        Sample(_operator, "no points", _random(_operator, 0), "boundary"),
        Sample(_operator, "one point", _random(_operator, 1, reach=2.0), "boundary"),
        Sample(_operator, "1024 points", _random(_operator, 1024, max_points=1, seed=4), "boundary"),
        Sample(_operator, "1025 points", _random(_operator, 1025, 17, max_points=9, seed=4), "boundary"),
        Sample(_operator, "a grid of one cell", _random(_operator, 65, size=(8, 8, 4)), "boundary"),
        Sample(_operator, "on borders", _on_borders(_operator), "boundary"),
        Sample(_operator, "not finite", _not_finite(_operator), "boundary"),
        Sample(_operator, "huge grid", _huge_grid(_operator), "boundary"),
    ]
SAMPLES += [
    Sample(_P, "CenterPoint, 300000 points, shuffled, 120000 voxels", _network(_P, "CenterPoint", True, 120_000),
           "network"),
    Sample(_P, "away from borders", _away_from_borders, gradcheck=True),
    Sample(_P, "one voxel at most", _random(_P, 200, max_voxels=1, seed=6), "boundary"),
    Sample(_P, "as many voxels as points", _random(_P, 64, size=(0.01, 0.01, 0.01), max_voxels=64), "boundary"),
    Sample(_P, "1500 points in one cell, 1000 kept", _one_cell(1500, 1000), "boundary"),
    Sample(_P, "33 points in one cell, 33 kept", _one_cell(33, 33), "boundary"),
]  # fmt: skip


SIZED = [
    Sized(_D, "points", lambda draw: _random(_D, draw(1_300_000))),
    Sized(_P, "a small grid", lambda draw: _random(_P, draw(1_300_000), max_points=32, max_voxels=20_000)),
    Sized(_P, "a large grid", lambda draw: _random(
        _P, draw(1_300_000), size=(0.01, 0.01, 0.1), max_points=10, max_voxels=20_000)),
]  # fmt: skip


def _bad_calls(function: Callable[..., Any]) -> list[BadCall]:
    name = "dynamic_voxelize" if function is dynamic_voxelize else "voxelize"
    points, size, bounds = torch.zeros(5, 4), (1, 1, 1), (0, 0, 0, 4, 4, 4)
    limits = () if function is dynamic_voxelize else (3, 9)

    def bad(what: str, error: type[Exception], match: str, *args: Any) -> BadCall:
        call = args if len(args) > 3 else (*args, *limits)
        return BadCall(f"{function.__name__}: {what}", lambda: function(*call), error, f"{name}(_padded)?: .*{match}")

    calls = [
        bad("points of rank 3", ValueError, r"points must have shape \[N, C\].*got \[1, 5, 4\]; .*one cloud",
            points[None], size, bounds),
        bad("points of two columns", ValueError, r"C at least 3, got \[5, 2\]", points[:, :2], size, bounds),
        bad("integer points", TypeError, "points must be float32.*got int64", points.long(), size, bounds),
        bad("a number as voxel_size", TypeError, "voxel_size must be a sequence of numbers, got float", points, 1.0,
            bounds),
        bad("a tensor as voxel_size", TypeError, "voxel_size must be a sequence of numbers, got Tensor", points,
            torch.ones(3), bounds),
        bad("a word in voxel_size", TypeError, "voxel_size must hold numbers, got str", points, (1, "1", 1), bounds),
        bad("two voxel sizes", ValueError, "voxel_size must be three numbers.*got 2", points, (1, 1), bounds),
        bad("voxel_size 0", ValueError, "voxel_size must be at least 1e-37, got 0", points, (1, 0, 1), bounds),
        bad("voxel_size NaN", ValueError, "voxel_size must be finite", points, (1, float("nan"), 1), bounds),
        bad("point_range None", TypeError, "point_range must be a sequence of numbers, got NoneType", points, size,
            None),
        bad("three bounds", ValueError, "point_range must be six numbers.*got 3", points, size, (4, 4, 4)),
        bad("an infinite bound", ValueError, "point_range must be finite", points, size, (0, 0, 0, 4, float("inf"), 4)),
        bad("an empty range", ValueError, r"at least one voxel.*got \[4, 0, 4\]", points, size, (0, 0, 0, 4, 0, 4)),
        bad("a range upside down", ValueError, r"at least one voxel.*got \[4, 4, -4\]", points, size,
            (0, 0, 4, 4, 4, 0)),
        bad("an axis too fine", ValueError, r"2\*\*31 - 1", points, (1e-30, 1, 1), bounds),
        bad("a grid too fine", ValueError, r"2\*\*62", points, (2e-9, 2e-9, 2e-9), bounds),
    ]  # fmt: skip
    if function is not dynamic_voxelize:
        calls += [
            bad("a list of points", TypeError, "points must be a Tensor, got list", [[0, 0, 0]], size, bounds, 3, 9),
            bad("max_points 0", ValueError, "max_points must be at least 1, got 0", points, size, bounds, 0, 9),
            bad("max_voxels -1", ValueError, "max_voxels must be at least 1, got -1", points, size, bounds, 3, -1),
            bad("a fraction of points", TypeError, "max_points must be an integer", points, size, bounds, 1.5, 9),
            bad("max_voxels None", TypeError, "max_voxels must be an integer", points, size, bounds, 3, None),
            bad("more than memory holds", ValueError, r"at most 2\*\*30 numbers, got 5 voxels of 268435456 points",
                points, size, bounds, 2**28, 9),
        ]  # fmt: skip
    return calls


BAD_CALLS = [
    *_bad_calls(voxelize), *_bad_calls(voxelize_padded), *_bad_calls(dynamic_voxelize),
    BadCall("grid_size: infinite", lambda: checked_grid_size((1, 1, 1), (0, 0, 0, 4, float("inf"), 4)), ValueError,
            "grid_size: point_range must be finite, got inf"),
    BadCall("grid_size: three bounds", lambda: checked_grid_size((1, 1, 1), (4, 4, 4)), ValueError,
            "grid_size: point_range must be six numbers"),
]  # fmt: skip

STANDARD = {
    _P: Standard(floats="exact", why_slower="points meet in cells wherever these lie: latency, not bandwidth"),
    _D: Standard(),
}


def work(operator: str, args: tuple[Any, ...]) -> Work:
    points = args[0]
    total, channels = points.shape
    if operator == _D:  # of a row only the coordinates
        return Work(total * (min(channels, 8) * points.element_size() + 12), 9 * total)
    rows, max_points = min(args[4], total), args[3]
    written = rows * (max_points * channels * points.element_size() + 16) + 4 * total
    return Work(bytes_of(points) + written, 12 * total)


def baselines(operator: str) -> dict[str, Callable[..., Any]]:
    found: dict[str, Callable[..., Any]] = {"torch": _vectorised_cells if operator == _D else _vectorised}
    _ext = compiled_mmcv()
    if _ext is None:
        return found

    def mmcv_dynamic(points: Tensor, size: list[float], bounds: list[float]) -> Tensor:
        coords = points.new_zeros((points.shape[0], 3), dtype=torch.int32)
        _ext.dynamic_voxelize_forward(points, torch.tensor(size), torch.tensor(bounds), coords, NDim=3)
        return coords

    def mmcv_hard(
        points: Tensor, size: list[float], bounds: list[float], max_points: int, max_voxels: int
    ) -> tuple[Tensor, ...]:
        voxels = points.new_zeros((max_voxels, max_points, points.shape[1]))
        coords = points.new_zeros((max_voxels, 3), dtype=torch.int32)
        num_points = points.new_zeros(max_voxels, dtype=torch.int32)
        count = torch.zeros((), dtype=torch.int64)
        _ext.hard_voxelize_forward(
            points, torch.tensor(size), torch.tensor(bounds), voxels, coords, num_points, count,
            max_points=max_points, max_voxels=max_voxels, NDim=3, deterministic=True,
        )  # fmt: skip
        return voxels, coords, num_points

    found["mmcv"] = mmcv_dynamic if operator == _D else mmcv_hard
    return found


def _vectorised_cells(points: Tensor, size: list[float], bounds: list[float]) -> Tensor:
    low, step = (torch.tensor(v, dtype=points.dtype, device=points.device) for v in (bounds[:3], size))
    grid = torch.tensor(grid_size(size, bounds), device=points.device)
    cell = ((points[:, :3] - low) / step).floor()
    inside = ((cell >= 0) & (cell < grid)).all(1)
    return torch.where(inside[:, None], cell, -1).flip(1).int()


def _vectorised(
    points: Tensor, size: list[float], bounds: list[float], max_points: int, max_voxels: int
) -> tuple[Tensor, ...]:
    """The plain formulation in torch: flat cell numbers, unique, and a stable sort."""
    device, total = points.device, points.shape[0]
    width, height, _ = grid_size(size, bounds)
    cell = _vectorised_cells(points, size, bounds).long()
    held = (cell[:, 0] >= 0).nonzero()[:, 0]
    cell = cell[held]
    flat, voxel, counts = ((cell[:, 0] * height + cell[:, 1]) * width + cell[:, 2]).unique(
        return_inverse=True, return_counts=True
    )
    by_voxel = voxel.argsort(stable=True)
    begin = counts.cumsum(0) - counts
    place = torch.empty_like(voxel)
    place[by_voxel] = torch.arange(len(voxel), device=device) - begin.repeat_interleave(counts)
    order = held[by_voxel[begin]].argsort()
    number = torch.empty_like(order)
    number[order] = torch.arange(len(order), device=device)
    voxel = number[voxel]
    rows = min(max_voxels, total)
    kept = (voxel < rows) & (place < max_points)
    held, voxel, place = held[kept], voxel[kept], place[kept]
    voxels = points.new_zeros((rows, max_points, points.shape[1]))
    voxels[voxel, place] = points[held]
    flat = flat[order[:rows]]
    coords = torch.zeros((rows, 3), dtype=torch.int32, device=device)
    coords[: len(flat)] = torch.stack([flat // (width * height), flat // width % height, flat % width], 1).int()
    num_points = torch.zeros(rows, dtype=torch.int32, device=device)
    num_points[: len(flat)] = counts[order[:rows]].clamp(max=max_points).int()
    slots = torch.full((total,), -1, dtype=torch.int32, device=device)
    slots[held] = (voxel * max_points + place).int()
    return voxels, coords, num_points, slots, torch.tensor(len(flat), dtype=torch.int32, device=device)
