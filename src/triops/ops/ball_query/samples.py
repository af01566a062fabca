"""Inputs of ball_query, and clouds for the other searches."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from triops import scenes
from triops._sample import BadCall, Sample, Sized, Standard, Work, bytes_of, compiled_mmcv
from triops.ops.ball_query import ball_query

_NAME = "ball_query"
_Make = Callable[[torch.dtype], tuple[Any, ...]]
Clouds = Callable[[], tuple[Tensor, Tensor]]  # points and queries, float32
_FLOAT32 = (torch.float32,)


def random_clouds(batch: int, points: int, queries: int, size: float = 4.0, seed: int = 0) -> Clouds:
    """[B, N, 3] and [B, M, 3] in a cube, on a grid of 1/16: with repeated points and equal distances."""

    def make() -> tuple[Tensor, Tensor]:
        g = torch.Generator().manual_seed(seed)
        return tuple((torch.rand(batch, n, 3, generator=g) * size * 16).round() / 16 for n in (points, queries))  # type: ignore[return-value]

    return make


@cache
def lidar_clouds(batch: int, points: int, queries: int) -> tuple[Tensor, Tensor]:
    """Sweeps, and of each some points in any order, as furthest point sampling gives them."""
    clouds = torch.stack([scenes.lidar_scene(points, seed=b).points for b in range(batch)])
    chosen = torch.randperm(points, generator=torch.Generator().manual_seed(1))[:queries]
    return clouds, clouds[:, chosen].contiguous()


@cache
def uniform_clouds(batch: int, points: int, queries: int) -> tuple[Tensor, Tensor]:
    clouds = torch.stack([scenes.uniform_points(points, seed=b) for b in range(batch)])
    return clouds, clouds[:, :queries].contiguous()


def ragged(
    clouds: Clouds, points: list[int], queries: list[int]
) -> Callable[[], tuple[Tensor, Tensor, Tensor, Tensor]]:
    """The first cloud, cut into pieces: points [N, 3], queries [M, 3], offsets of both."""

    def make() -> tuple[Tensor, Tensor, Tensor, Tensor]:
        offsets, query_offsets = (torch.tensor([0, *counts]).cumsum(0) for counts in (points, queries))
        rows, others = clouds()
        return rows[0, : offsets[-1]], others[0, : query_offsets[-1]], offsets, query_offsets

    return make


def along_a_line() -> tuple[Tensor, Tensor]:
    """Points at 0, 1, 2, ... on one axis, every second one twice: distances are equal in pairs."""
    x = torch.arange(100.0).repeat_interleave(2)[:130] / 2
    line = torch.stack([x.floor(), torch.zeros(130), torch.zeros(130)], 1)[torch.randperm(
        130, generator=torch.Generator().manual_seed(0))]  # fmt: skip
    return line[None], line[None, :20] + 0.5


def not_finite() -> tuple[Tensor, Tensor]:
    """Points and queries that are not finite, or whose distance is not."""
    points, queries = random_clouds(1, 90, 12)()
    points[0, ::7, 0], points[0, 1::7, 1], points[0, 2::7, 2] = torch.nan, torch.inf, -torch.inf
    points[0, 3::7] = 3e38
    queries[0, 0, 2], queries[0, 1, 0], queries[0, 2], queries[0, 3] = torch.nan, torch.inf, -3e38, 3e38
    return points, queries


def far_apart() -> tuple[Tensor, Tensor]:
    """One point far from all others, which must not spoil what is near; coordinates of every size."""
    points, queries = random_clouds(1, 2200, 9)()
    points[0, 17] = 1e30
    return points - 1000, queries - 1000


def _make(clouds: Clouds, radius: float, k: int, min_radius: float = 0.0) -> _Make:
    return lambda dtype: (*(t.to(dtype) for t in clouds()), radius, k, min_radius, None, None)


def _make_ragged(parts: Callable[[], tuple[Tensor, ...]], radius: float, k: int, min_radius: float = 0.0) -> _Make:
    def make(dtype: torch.dtype) -> tuple[Any, ...]:
        points, centers, offsets, center_offsets = parts()
        return points.to(dtype), centers.to(dtype), radius, k, min_radius, offsets, center_offsets

    return make


SAMPLES = [
    Sample(_NAME, "8 x 16384 points, 4096 centers, LiDAR", _make(lambda: lidar_clouds(8, 16384, 4096), 0.8, 32),
           "network", _FLOAT32, gpu_only=True),
    Sample(_NAME, "8 x 16384 points, 4096 centers, uniform", _make(lambda: uniform_clouds(8, 16384, 4096), 0.8, 32),
           "network", _FLOAT32, gpu_only=True),
    Sample(_NAME, "4 x 20000 points, 2048 centers, ragged",
           _make_ragged(ragged(lambda: lidar_clouds(1, 80000, 8192), [20000] * 4, [2048] * 4), 0.8, 32),
           "network", _FLOAT32, gpu_only=True),
    Sample(_NAME, "16384 points, 512 centers, LiDAR", _make(lambda: lidar_clouds(1, 16384, 512), 0.8, 32), "network",
           demo=True),
    Sample(_NAME, "2 x 70 points, 9 centers", _make(random_clouds(2, 70, 9), 1.2, 5)),
    Sample(_NAME, "ragged, with a minimum radius",
           _make_ragged(ragged(random_clouds(1, 200, 24), [90, 0, 1, 109], [9, 2, 3, 10]), 1.5, 12, 0.5)),
    Sample(_NAME, "2500 points, 10 centers", _make(random_clouds(1, 2500, 10), 0.5, 33), dtypes=_FLOAT32),
    Sample(_NAME, "no points", _make(random_clouds(2, 0, 5), 1.0, 3), "boundary", _FLOAT32),
    Sample(_NAME, "no centers", _make(random_clouds(2, 5, 0), 1.0, 3), "boundary", _FLOAT32),
    Sample(_NAME, "no clouds", _make_ragged(ragged(random_clouds(1, 0, 0), [], []), 1.0, 3), "boundary", _FLOAT32),
    Sample(_NAME, "one point, a huge radius", _make(random_clouds(3, 1, 2), 1e30, 1), "boundary", _FLOAT32),
    Sample(_NAME, "a radius whose square is 0", _make(random_clouds(1, 300, 9, 0.25), 1e-30, 4), "boundary", _FLOAT32),
    Sample(_NAME, "on a line, distances equal to the radii", _make(along_a_line, 3.5, 40, 1.5), "boundary", _FLOAT32),
    Sample(_NAME, "not finite", _make(not_finite, 2.0, 4), "boundary", _FLOAT32),
    Sample(_NAME, "one point far away", _make(far_apart, 0.5, 8), "boundary", _FLOAT32),
]  # fmt: skip


def _some(draw: Callable[[int], int]) -> _Make:
    points, centers = draw(5000), draw(40)
    cut = draw(points)
    return _make_ragged(ragged(random_clouds(1, points, centers), [cut, points - cut], [0, centers]), 0.8, 8)


SIZED = [
    Sized(_NAME, "points and centers", lambda draw: _make(random_clouds(draw(3), draw(3000), draw(40)), 0.8, 8)),
    Sized(_NAME, "ragged", _some),
]


def _bad(what: str, error: type[Exception], match: str, *args: Any, **options: Any) -> BadCall:
    return BadCall(f"{_NAME}: {what}", lambda: ball_query(*args, **options), error, match)


_points, _centers = torch.zeros(2, 5, 3), torch.zeros(2, 4, 3)
_rows, _others, _offsets = _points[0], _centers[0], torch.tensor([0, 2, 5])
BAD_CALLS = [
    _bad("points of rank 1", ValueError, r"points must have shape \[B, N, 3\], or \[N, 3\] with offsets, got \[3\]",
         _rows[0], _centers, 1.0, 3),
    _bad("points with 4 columns", ValueError, r"got \[2, 5, 4\]", torch.zeros(2, 5, 4), _centers, 1.0, 3),
    _bad("unequal batches", ValueError, "B = 2 as in points", _points, _centers[:1], 1.0, 3),
    _bad("mixed forms", ValueError, r"centers must have shape \[M, 3\]", _rows, _centers, 1.0, 3),
    _bad("unequal dtypes", TypeError, "points float32, centers float64", _points, _centers.double(), 1.0, 3),
    _bad("integers", TypeError, "points must be float32.*got int64", _points.long(), _centers.long(), 1.0, 3),
    _bad("radius 0", ValueError, "radius must be more than 0, got 0", _points, _centers, 0.0, 3),
    _bad("radius NaN", ValueError, "radius must be finite, got nan", _points, _centers, float("nan"), 3),
    _bad("min_radius above the radius", ValueError, "min_radius must be from 0 to the radius, 1.0, got 2.0",
         _points, _centers, 1.0, 3, min_radius=2.0),
    _bad("k 0", ValueError, "k must be at least 1, got 0", _points, _centers, 1.0, 0),
    _bad("k 5000", ValueError, "k must be at most 4096, got 5000", _points, _centers, 1.0, 5000),
    _bad("offsets of a padded batch", ValueError, r"offsets are for points of shape \[N, 3\]",
         _points, _centers, 1.0, 3, offsets=_offsets, center_offsets=_offsets),
    _bad("one kind of offsets", ValueError, "offsets and center_offsets must be given both",
         _rows, _others, 1.0, 3, offsets=_offsets),
    _bad("unequal offsets", ValueError, r"must have one shape, got \[3\] and \[2\]",
         _rows, _others, 1.0, 3, offsets=_offsets, center_offsets=_offsets[:2]),
    _bad("float offsets", TypeError, "offsets must be int32 or int64",
         _rows, _others, 1.0, 3, offsets=_offsets.float(), center_offsets=_offsets),
    _bad("offsets beyond the points", IndexError, "offsets must ascend from 0 to 5",
         _rows, _others, 1.0, 3, offsets=_offsets + 1, center_offsets=_offsets),
    _bad("more points than int32 counts in blocks", ValueError, r"2\*\*30 each",
         _points[:, :1].expand(2, 2**30, 3), _centers, 1.0, 3),
]  # fmt: skip

STANDARD = {_NAME: Standard(why_slower="points are sorted first, and each center searches the boxes around it")}


def work(operator: str, args: tuple[Any, ...]) -> Work:
    centers, k = args[1].numel() // 3, args[3]
    return Work(bytes_of(args) + 4 * centers * k, 8 * centers * k)


def baselines(operator: str) -> dict[str, Callable[..., Any]]:
    found: dict[str, Callable[..., Any]] = {"torch": by_cdist}
    _ext = compiled_mmcv()
    if _ext is None:
        return found

    def mmcv(
        points: Tensor, centers: Tensor, radius: float, k: int, min_radius: float, offsets: Tensor | None,
        center_offsets: Tensor | None,
    ) -> Tensor:  # fmt: skip
        out = centers.new_zeros((*centers.shape[:-1], k), dtype=torch.int32)
        if points.dim() == 3:
            _ext.ball_query_forward(
                centers, points, out, b=points.shape[0], n=points.shape[1], m=centers.shape[1], min_radius=min_radius,
                max_radius=radius, nsample=k,
            )  # fmt: skip
            return out
        assert offsets is not None
        assert center_offsets is not None
        _ext.stack_ball_query_forward(
            centers, center_offsets.diff().int(), points, offsets.diff().int(), out, max_radius=radius, nsample=k
        )
        return out

    return {**found, "mmcv": mmcv}


def by_cdist(
    points: Tensor, centers: Tensor, radius: float, k: int, min_radius: float, offsets: Tensor | None,
    center_offsets: Tensor | None,
) -> Tensor:  # fmt: skip
    """The plain formulation in torch: all distances, and the k lowest indices of those that are small enough."""
    apart = torch.cdist(centers.float(), points.float(), compute_mode="donot_use_mm_for_euclid_dist")
    near = (apart == 0) | ((apart >= min_radius) & (apart < radius))
    if offsets is not None and center_offsets is not None:
        clouds = [
            torch.bucketize(torch.arange(len(t), device=t.device), o[1:].to(t.device), right=True)
            for t, o in ((points, offsets), (centers, center_offsets))
        ]
        near &= clouds[0] == clouds[1][:, None]
    count = points.shape[-2]
    lowest = torch.where(near, torch.arange(count, device=points.device), count)
    lowest = lowest.topk(min(k, count), largest=False).values
    lowest = torch.nn.functional.pad(lowest, (0, k - lowest.shape[-1]), value=count)
    filled = torch.where(lowest < count, lowest, lowest[..., :1])
    return torch.where(filled < count, filled, 0 if points.dim() == 3 else -1).int()
