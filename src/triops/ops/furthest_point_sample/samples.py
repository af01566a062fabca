"""Inputs of furthest_point_sample and furthest_point_sample_with_dist."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from triops import scenes
from triops._clouds import even_offsets
from triops._sample import BadCall, Sample, Sized, Standard, Work, bytes_of, compiled_mmcv
from triops.ops.furthest_point_sample import (
    furthest_point_sample,
    furthest_point_sample_rows,
    furthest_point_sample_with_dist,
)

_P, _D = "furthest_point_sample", "furthest_point_sample_with_dist"
_Make = Callable[[torch.dtype], tuple[Any, ...]]
_ONE = (torch.float32,)


def _padded(batch: int, length: int, count: int, width: int = 3, seed: int = 0, levels: int = 0) -> _Make:
    """Uniform points; `levels`: on so many levels along each axis, which makes duplicates and equal distances."""

    def make(dtype: torch.dtype) -> tuple[Any, ...]:
        points = torch.rand(batch * length, width, generator=torch.Generator().manual_seed(seed))
        points = (points * levels).floor() if levels else points * 40 - 20
        offsets = (even_offsets(batch, n, points.device) for n in (length, count))
        return points.to(dtype), *offsets, batch * count, length, True

    return make


def _lidar(batch: int, length: int, count: int) -> _Make:
    def make(dtype: torch.dtype) -> tuple[Any, ...]:
        clouds = [scenes.lidar_scene(length, seed=b).points[:length, :3] for b in range(batch)]
        offsets = (even_offsets(batch, n, clouds[0].device) for n in (length, count))
        return torch.cat(clouds).to(dtype), *offsets, batch * count, length, True

    return make


def _ragged(lengths: Sequence[int], counts: Sequence[int], width: int = 3, dtype: torch.dtype = torch.int32) -> _Make:
    def make(real: torch.dtype) -> tuple[Any, ...]:
        points = torch.randn(sum(lengths), width, generator=torch.Generator().manual_seed(1)).to(real)
        offsets = (torch.tensor([0, *n]).cumsum(0).to(dtype) for n in (lengths, counts))
        return points, *offsets, sum(counts), sum(lengths), False

    return make


def _not_finite(start: int, stop: int) -> _Make:
    """Infinite and NaN coordinates in a range of points, too many samples for the others."""

    def make(dtype: torch.dtype) -> tuple[Any, ...]:
        points, *rest = _padded(1, 30, 40)(dtype)
        points[start:stop:2, 1] = torch.nan
        points[start + 1 : stop : 2, 2] = -torch.inf
        return points, *rest

    return make


def _distances(batch: int, length: int, count: int, seed: int = 0) -> _Make:
    """Squared distances as mmdetection3d computes them, by a product: some come out negative."""

    def make(dtype: torch.dtype) -> tuple[Any, ...]:
        x = torch.randn(batch, length, 5, generator=torch.Generator().manual_seed(seed))
        squares = x.square().sum(-1)
        return (squares[:, :, None] + squares[:, None] - 2 * x @ x.mT).to(dtype), count

    return make


def _with_holes(dtype: torch.dtype) -> tuple[Any, ...]:
    """NaN between some points, points that are not finite, -0 and 0, and more samples than points."""
    distances, _ = _distances(2, 20, 0, 3)(dtype)
    distances[0, 3, 5:9], distances[0, 7], distances[0, 11, 11] = torch.nan, torch.inf, -torch.inf
    distances[1, :, :] = torch.tensor([0.0, -0.0]).repeat(10)
    return distances, 25


SAMPLES = [
    Sample(_P, "1 x 16384 -> 1024, LiDAR", _lidar(1, 16_384, 1024), "network", _ONE, demo=True),
    Sample(_P, "8 x 16384 -> 4096", _lidar(8, 16_384, 4096), "network", _ONE, gpu_only=True),
    Sample(_P, "1 x 40000 -> 2048", _lidar(1, 40_000, 2048), "network", _ONE, gpu_only=True),
    Sample(_P, "4 x 65536 -> 16384", _lidar(4, 65_536, 16_384), "network", _ONE, gpu_only=True),
    Sample(_P, "512 x 512 -> 128, RoIs", _padded(512, 512, 128), "network", _ONE, gpu_only=True),
    Sample(_P, "2 x 150 -> 40", _padded(2, 150, 40)),
    Sample(_P, "2 x 150 -> 40, duplicates", _padded(2, 150, 40, levels=4)),
    Sample(_P, "ragged, width 5", _ragged([60, 0, 90], [6, 2, 9], 5)),
    Sample(_P, "a line, more samples than points", _padded(1, 70, 80, 1, levels=20), "boundary", _ONE),
    Sample(_P, "one point", _padded(3, 1, 4), "boundary", _ONE),
    Sample(_P, "no samples", _padded(2, 5, 0), "boundary", _ONE),
    Sample(_P, "no points", _padded(2, 0, 3), "boundary", _ONE),
    Sample(_P, "no clouds", _padded(0, 5, 3), "boundary", _ONE),
    Sample(_P, "not finite, the first included", _not_finite(0, 9), "boundary", _ONE),
    Sample(_P, "nothing finite", _not_finite(0, 30), "boundary", _ONE),
    Sample(_P, "4500 points, more than one block", _padded(1, 4500, 12), "boundary", _ONE),
    Sample(_P, "ragged, int64 offsets", _ragged([5, 700, 0, 64], [9, 20, 0, 5], 3, torch.int64), "boundary", _ONE),
    Sample(_D, "1 x 2048 -> 512", _distances(1, 2048, 512), "network", _ONE, demo=True),
    Sample(_D, "4 x 4096 -> 512", _distances(4, 4096, 512), "network", _ONE, gpu_only=True),
    Sample(_D, "2 x 100 -> 30", _distances(2, 100, 30)),
    Sample(_D, "NaN, infinite and equal distances", _with_holes, "boundary", _ONE),
    Sample(_D, "one point", _distances(2, 1, 3), "boundary", _ONE),
    Sample(_D, "no points", _distances(2, 0, 3), "boundary", _ONE),
]

SIZED = [
    Sized(_P, "points", lambda draw: _padded(draw(3), draw(3000), draw(9))),
    Sized(_P, "ragged", lambda draw: _ragged([draw(900), draw(3000)], [draw(9), draw(9)])),
    Sized(_D, "points", lambda draw: _distances(draw(3), draw(900), draw(9))),
]

STANDARD = {n: Standard(why_slower="every sample depends on the one before it") for n in (_P, _D)}


def _bad_calls() -> list[BadCall]:
    points, offsets = torch.zeros(5, 3), torch.tensor([0, 2, 5])

    def bad(what: str, error: type[Exception], match: str, *args: Any, **kwargs: Any) -> BadCall:
        return BadCall(f"{_P}: {what}", lambda: furthest_point_sample(*args, **kwargs), error, match)

    return [
        bad("rank 2 without offsets", ValueError, r"points must have shape \[B, N, D\], got \[5, 3\]", points, 2),
        bad("rank 3 with offsets", ValueError, r"points must have shape \[N, D\]", points[None], 2, offsets=offsets),
        bad("no columns", ValueError, "points must have at least one column", points[None, :, :0], 2),
        bad("integers", TypeError, "points must be float32.*got int64", points[None].long(), 2),
        bad("a list", TypeError, "points must be a Tensor, got list", [[0.0, 0, 0]], 2),
        bad("negative count", ValueError, "count must be at least 0, got -1", points[None], -1),
        bad("fractional count", TypeError, "count must be an integer, got float", points[None], 1.5),
        bad("counts without offsets", TypeError, "count must be an integer, got list", points[None], [1]),
        bad("counts of another batch", ValueError, "count must be one integer or 2", points, [1], offsets=offsets),
        bad("offsets of rank 0", ValueError, r"offsets must have shape \[B \+ 1\], got \[\]", points, 1,
            offsets=offsets[0]),
        bad("float offsets", TypeError, "offsets must be int32 or int64", points, 1, offsets=offsets.float()),
        bad("offsets as a list", TypeError, "offsets must be a Tensor, got list", points, 1, offsets=[0, 5]),
        bad("offsets elsewhere", ValueError, "offsets on meta", points, 1, offsets=offsets.to("meta")),
        bad("offsets that end early", IndexError, "offsets must ascend from 0 to 5", points, 1, offsets=offsets[:2]),
        bad("offsets that descend", IndexError, "offsets must ascend from 0 to 5", points, 1,
            offsets=torch.tensor([0, 6, 5])),
        BadCall(f"{_P}: samples beyond the count",
                lambda: furthest_point_sample_rows(points, offsets, offsets, 4), IndexError,
                "sample_offsets must ascend from 0 to 4"),
        BadCall(f"{_D}: not square", lambda: furthest_point_sample_with_dist(points[None], 2), ValueError,
                r"distances must have shape \[B, N, N\], got \[1, 5, 3\]"),
        BadCall(f"{_D}: integers", lambda: furthest_point_sample_with_dist(torch.zeros(1, 2, 2).int(), 2), TypeError,
                "distances must be float32"),
    ]  # fmt: skip


BAD_CALLS = _bad_calls()


def work(operator: str, args: tuple[Any, ...]) -> Work:
    if operator == _P:
        points, offsets, _, count, *_ = args
        return Work(bytes_of(points) + 4 * count, 3 * count * points.numel() // max(len(offsets) - 1, 1))
    distances, count = args
    return Work(4 * count * (distances.shape[1] + 1) * distances.shape[0], 2 * count * distances[:, 0].numel())


def baselines(operator: str) -> dict[str, Callable[..., Any]]:
    found: dict[str, Callable[..., Any]] = {"torch": _vectorised if operator == _P else _vectorised_by_distances}
    _ext = compiled_mmcv()
    if _ext is None or not torch.cuda.is_available():  # mmcv has no CPU kernel
        return found

    def mmcv(points: Tensor, offsets: Tensor, _: Tensor, count: int, length: int, within: bool) -> Tensor:
        batch = offsets.shape[0] - 1
        out = torch.zeros((batch, count // batch), dtype=torch.int32, device=points.device)
        nearest = torch.full((batch, length), 1e10, device=points.device)
        _ext.furthest_point_sampling_forward(points, nearest, out, b=batch, n=length, m=count // batch)
        return out.view(-1)

    return {**found, "mmcv": mmcv} if operator == _P else found


def _vectorised(
    points: Tensor, offsets: Tensor, sample_offsets: Tensor, count: int, longest: int, within: bool
) -> Tensor:
    """A loop over samples in torch, cloud by cloud."""
    found = []
    bounds = offsets.tolist(), sample_offsets.tolist()
    for begin, end, first, last in zip(bounds[0], bounds[0][1:], bounds[1], bounds[1][1:], strict=False):
        cloud = points[begin:end].float()
        out = torch.zeros(last - first, dtype=torch.int32, device=points.device)
        if end > begin:
            nearest = torch.full_like(cloud[:, 0], torch.inf)
            for k in range(1, last - first):
                nearest = torch.minimum(nearest, (cloud - cloud[out[k - 1]]).square().sum(1))
                out[k] = nearest.argmax()
        found.append(out + (0 if within else begin if end > begin else -1))
    return torch.cat(found)


def _vectorised_by_distances(distances: Tensor, count: int) -> Tensor:
    out = torch.zeros((distances.shape[0], count), dtype=torch.int32, device=distances.device)
    cloud = torch.arange(len(distances), device=distances.device)
    nearest = torch.full_like(distances[:, 0], torch.inf)
    for k in range(1, count):
        nearest = torch.minimum(nearest, distances[cloud, out[:, k - 1]])
        out[:, k] = nearest.argmax(1)
    return out
