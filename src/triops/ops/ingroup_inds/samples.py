"""Inputs of ingroup_inds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from triops import scenes
from triops._sample import BadCall, Sample, Sized, Standard, Work, bytes_of
from triops.ops.ingroup_inds import ingroup_inds
from triops.ops.voxelize import dynamic_voxelize

_NAME = "ingroup_inds"
_Make = Callable[[torch.dtype], tuple[Any, ...]]
_ONE = (torch.float32,)  # no float goes in: one pass over the samples is enough


def _windows(count: int, dtype: torch.dtype) -> _Make:
    """The window of each point of a sweep, as a transformer over windows groups its voxels."""

    def make(_: torch.dtype) -> tuple[Any, ...]:
        points = scenes.lidar_scene(count, seed=0).points
        cell = dynamic_voxelize(points, [3.2, 3.2, 8.0], [-102.4, -102.4, -4.0, 102.4, 102.4, 4.0]).long()
        return ((cell[:, 1] * 64 + cell[:, 2]).to(dtype),)

    return make


def _permutation(dtype: torch.dtype) -> tuple[Any, ...]:
    return (torch.randperm(4097, generator=torch.Generator().manual_seed(0)) - 2000,)


def _random(count: int, lowest: int, above: int, dtype: torch.dtype = torch.int64, seed: int = 0) -> _Make:
    def make(_: torch.dtype) -> tuple[Any, ...]:
        return (torch.randint(lowest, above, (count,), generator=torch.Generator().manual_seed(seed)).to(dtype),)

    return make


def _extremes(_: torch.dtype) -> tuple[Any, ...]:
    ends = torch.tensor([2**63 - 1, -(2**63), 0, -1, 2**32, 0, 2**63 - 1])
    return (ends.repeat(3),)


SAMPLES = [
    Sample(_NAME, "windows of 1000000 points", _windows(1_000_000, torch.int64), "network", _ONE, demo=True),
    Sample(_NAME, "windows of 1000000 points, int32", _windows(1_000_000, torch.int32), "network", _ONE),
    Sample(_NAME, "50 elements of 7 groups", _random(50, 0, 7), dtypes=_ONE),
    Sample(_NAME, "3000 elements of 200 groups, int32", _random(3000, -100, 100, torch.int32, 1), dtypes=_ONE),
    Sample(_NAME, "groups far apart", _random(3000, -(2**62), 2**62, seed=2), dtypes=_ONE),
    Sample(_NAME, "none", _random(0, 0, 7), "boundary", _ONE),
    Sample(_NAME, "one", _random(1, 5, 6), "boundary", _ONE),
    Sample(_NAME, "one group of 10000", _random(10_000, 3, 4), "boundary", _ONE),
    Sample(_NAME, "every element its own group", _permutation, "boundary", _ONE),
    Sample(_NAME, "1023, 1024 and 1025 elements of three groups",
           lambda _: (torch.repeat_interleave(torch.arange(3), torch.tensor([1023, 1024, 1025])),), "boundary", _ONE),
    Sample(_NAME, "the highest and the lowest integers", _extremes, "boundary", _ONE),
]  # fmt: skip

_good = torch.zeros(5, dtype=torch.int64)
BAD_CALLS = [
    BadCall("rank 2", lambda: ingroup_inds(_good[None]), ValueError, r"group_inds must have shape \[N\], got \[1, 5\]"),
    BadCall("floats", lambda: ingroup_inds(_good.float()), TypeError, "group_inds must be int32 or int64, got float32"),
    BadCall("a list", lambda: ingroup_inds([1, 2]), TypeError, "group_inds must be a Tensor, got list"),  # type: ignore[arg-type]
]

STANDARD = {_NAME: Standard(why_slower="elements are sorted by group first")}


SIZED = [Sized(_NAME, "elements", lambda draw: _random(draw(1_300_000), 0, 7000))]


def work(operator: str, args: tuple[Any, ...]) -> Work:
    return Work(bytes_of(args) + 4 * len(args[0]), len(args[0]))


def baselines(operator: str) -> dict[str, Callable[..., Any]]:
    return {"torch": _by_unique}


def _by_unique(group_inds: Tensor) -> Tensor:
    """The plain formulation in torch: numbers for the groups, their counts, and a stable sort."""
    _, group, counts = group_inds.unique(return_inverse=True, return_counts=True)
    order = group.argsort(stable=True)
    begin = counts.cumsum(0) - counts
    place = torch.arange(len(order), device=order.device) - begin[group[order]]
    out = torch.empty_like(order, dtype=torch.int32)
    out[order] = place.int()
    return out
