"""Inputs of knn and three_nn."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from triops._dtypes import compute_dtype
from triops._sample import BadCall, Sample, Sized, Standard, Work, bytes_of, compiled_mmcv
from triops.ops.ball_query.samples import (
    Clouds,
    along_a_line,
    far_apart,
    lidar_clouds,
    not_finite,
    ragged,
    random_clouds,
    uniform_clouds,
)
from triops.ops.knn import knn, three_nn

_Make = Callable[[torch.dtype], tuple[Any, ...]]
_FLOAT32 = (torch.float32,)


def _knn(clouds: Callable[[], tuple[Tensor, ...]], k: int, squared: bool = False) -> _Make:
    def make(dtype: torch.dtype) -> tuple[Any, ...]:
        points, queries, *offsets = clouds()
        return points.to(dtype), queries.to(dtype), k, squared, *(offsets or (None, None))

    return make


def _three(clouds: Callable[[], tuple[Tensor, ...]], squared: bool = False) -> _Make:
    def make(dtype: torch.dtype) -> tuple[Any, ...]:
        points, queries, *offsets = clouds()
        return queries.to(dtype), points.to(dtype), squared, *(offsets or (None, None))

    return make


def _swapped(clouds: Clouds) -> Clouds:
    """The other way round: all points ask for neighbors among the few, as in feature propagation."""
    return lambda: clouds()[::-1]


_PARTS = ragged(random_clouds(1, 200, 24), [90, 0, 1, 109], [9, 2, 3, 10])

SAMPLES = [
    Sample("knn", "8 x 16384 points, 4096 queries, k 16, LiDAR", _knn(lambda: lidar_clouds(8, 16384, 4096), 16),
           "network", _FLOAT32, gpu_only=True),
    Sample("knn", "8 x 16384 points, 4096 queries, k 16, uniform", _knn(lambda: uniform_clouds(8, 16384, 4096), 16),
           "network", _FLOAT32, gpu_only=True),
    Sample("knn", "16384 points, 512 queries, k 16, LiDAR", _knn(lambda: lidar_clouds(1, 16384, 512), 16), "network",
           demo=True),
    Sample("knn", "2 x 70 points, 9 queries, k 5", _knn(random_clouds(2, 70, 9), 5)),
    Sample("knn", "ragged, k 12, squared", _knn(_PARTS, 12, squared=True)),
    Sample("knn", "2500 points, 10 queries, k 33", _knn(random_clouds(1, 2500, 10), 33), dtypes=_FLOAT32),
    Sample("knn", "no points", _knn(random_clouds(2, 0, 5), 3), "boundary", _FLOAT32),
    Sample("knn", "no queries", _knn(random_clouds(2, 5, 0), 3), "boundary", _FLOAT32),
    Sample("knn", "no clouds", _knn(ragged(random_clouds(1, 0, 0), [], []), 3), "boundary", _FLOAT32),
    Sample("knn", "one point", _knn(random_clouds(3, 1, 2), 1), "boundary", _FLOAT32),
    Sample("knn", "on a line, pairs of equal distances", _knn(along_a_line, 20), "boundary", _FLOAT32),
    Sample("knn", "not finite", _knn(not_finite, 60), "boundary", _FLOAT32),
    Sample("knn", "one point far away", _knn(far_apart, 8), "boundary", _FLOAT32),
    Sample("three_nn", "8 x 16384 queries, 4096 points", _three(_swapped(lambda: lidar_clouds(8, 16384, 4096))),
           "network", _FLOAT32, gpu_only=True),
    Sample("three_nn", "2048 queries, 512 points, LiDAR", _three(_swapped(lambda: lidar_clouds(1, 2048, 512))),
           "network", demo=True),
    Sample("three_nn", "2 x 9 queries, 70 points", _three(random_clouds(2, 70, 9))),
    Sample("three_nn", "ragged, squared", _three(_PARTS, squared=True)),
    Sample("three_nn", "no points", _three(random_clouds(2, 0, 5)), "boundary", _FLOAT32),
    Sample("three_nn", "two points", _three(random_clouds(2, 2, 5)), "boundary", _FLOAT32),
    Sample("three_nn", "not finite", _three(not_finite), "boundary", _FLOAT32),
]  # fmt: skip


def _some(draw: Callable[[int], int]) -> Callable[[], tuple[Tensor, ...]]:
    points, queries = draw(5000), draw(40)
    cut = draw(points)
    return ragged(random_clouds(1, points, queries), [cut, points - cut], [0, queries])


SIZED = [
    Sized("knn", "points and queries", lambda draw: _knn(random_clouds(draw(3), draw(3000), draw(40)), 8)),
    Sized("knn", "ragged", lambda draw: _knn(_some(draw), 8)),
    Sized("three_nn", "points and queries", lambda draw: _three(random_clouds(draw(3), draw(3000), draw(40)))),
]


def _bad(
    function: Callable[..., Any], what: str, error: type[Exception], match: str, *args: Any, **options: Any
) -> BadCall:
    return BadCall(f"{function.__name__}: {what}", lambda: function(*args, **options), error, match)


_points, _queries, _offsets = torch.zeros(2, 5, 3), torch.zeros(2, 4, 3), torch.tensor([0, 2, 5])
BAD_CALLS = [
    _bad(knn, "points with 4 columns", ValueError, r"points must have .*got \[2, 5, 4\]",
         torch.zeros(2, 5, 4), _queries, 3),
    _bad(knn, "unequal dtypes", TypeError, "points float32, queries float64", _points, _queries.double(), 3),
    _bad(knn, "k 0", ValueError, "k must be at least 1, got 0", _points, _queries, 0),
    _bad(knn, "k 5000", ValueError, "k must be at most 4096, got 5000", _points, _queries, 5000),
    _bad(knn, "one kind of offsets", ValueError, "offsets and query_offsets must be given both",
         _points[0], _queries[0], 3, offsets=_offsets),
    _bad(knn, "offsets beyond the queries", IndexError, "query_offsets must ascend from 0 to 4",
         _points[0], _queries[0], 3, offsets=_offsets, query_offsets=_offsets),
    _bad(three_nn, "queries of another batch", ValueError, "B = 2 as in points", _queries[:1], _points),
    _bad(three_nn, "a list", TypeError, "queries must be a Tensor, got list", [], _points),
    _bad(three_nn, "offsets beyond the points", IndexError, "offsets must ascend from 0 to 5",
         _queries[0], _points[0], offsets=_offsets - 1, query_offsets=_offsets),
]  # fmt: skip

STANDARD = {
    name: Standard(why_slower="points are sorted first, and each query searches the boxes around it")
    for name in ("knn", "three_nn")
}


def work(operator: str, args: tuple[Any, ...]) -> Work:
    queries, k = (args[1], args[2]) if operator == "knn" else (args[0], 3)
    return Work(bytes_of(args) + 8 * queries.numel() // 3 * k, 8 * queries.numel() // 3 * k)


def baselines(operator: str) -> dict[str, Callable[..., Any]]:
    found: dict[str, Callable[..., Any]] = {"torch": by_cdist if operator == "knn" else _three_by_cdist}
    _ext = compiled_mmcv()
    if _ext is None:
        return found

    def mmcv(points: Tensor, queries: Tensor, k: int, *_: Any) -> tuple[Tensor, Tensor]:
        indices = queries.new_zeros((*queries.shape[:-1], k), dtype=torch.int32)
        squares = torch.zeros_like(indices, dtype=queries.dtype)
        b, n, m = points.shape[0], points.shape[1], queries.shape[1]
        _ext.knn_forward(points, queries, indices, squares, b=b, n=n, m=m, nsample=k)
        return indices, squares.sqrt()

    def mmcv_three(queries: Tensor, points: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
        squares = torch.zeros_like(queries)
        indices = torch.zeros_like(queries, dtype=torch.int32)
        b, n, m = queries.shape[0], queries.shape[1], points.shape[1]
        _ext.three_nn_forward(queries, points, squares, indices, b=b, n=n, m=m)
        return squares.sqrt(), indices

    return {**found, "mmcv": mmcv if operator == "knn" else mmcv_three}


def by_cdist(
    points: Tensor, queries: Tensor, k: int, squared: bool, offsets: Tensor | None, query_offsets: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The plain formulation in torch: all distances, and the k smallest; of equal ones by chance."""
    points, queries = (t.to(compute_dtype(t.dtype)) for t in (points, queries))
    apart = torch.cdist(queries, points, compute_mode="donot_use_mm_for_euclid_dist")
    if offsets is not None and query_offsets is not None:
        clouds = [
            torch.bucketize(torch.arange(len(t), device=t.device), o[1:].to(t.device), right=True)
            for t, o in ((points, offsets), (queries, query_offsets))
        ]
        apart[clouds[0] != clouds[1][:, None]] = torch.inf
    near, index = apart.sort(dim=-1, stable=True) if points.device.type == "cpu" else apart.topk(k, largest=False)
    more = (0, k - min(k, near.shape[-1]))
    near = torch.nn.functional.pad(near[..., :k], more, value=torch.inf)
    index = torch.nn.functional.pad(index[..., :k], more, value=-1)
    return torch.where(near.isfinite(), index, -1).int(), near.square() if squared else near


def _three_by_cdist(
    queries: Tensor, points: Tensor, squared: bool, offsets: Tensor | None, query_offsets: Tensor | None
) -> tuple[Tensor, Tensor]:
    indices, near = by_cdist(points, queries, 3, squared, offsets, query_offsets)
    first = torch.zeros_like(indices)
    if offsets is not None and query_offsets is not None:
        number = torch.arange(len(queries), device=queries.device)
        first += offsets[torch.bucketize(number, query_offsets[1:], right=True)][:, None].int()
    return near, torch.where(indices < 0, first, indices)
