"""Inputs of site_neighbors."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from triops import scenes
from triops._sample import BadCall, Sample, Sized, Standard, Work, bytes_of
from triops.ops.site_neighbors import reference, site_neighbors

_NAME = "site_neighbors"
_Make = Callable[[torch.dtype], tuple[Any, ...]]
_ONE = (torch.float32,)  # no float goes in: one pass over the samples is enough


def cube(axes: int, positions: tuple[int, ...] = (-1, 0, 1)) -> Tensor:
    """Every offset whose entries are among these, the last axis fastest."""
    return torch.tensor(list(itertools.product(positions, repeat=axes)))


def random_sites(
    count: int, low: int, high: int, axes: int = 3, batch: int = 2, outside: bool = False, seed: int = 0
) -> Tensor:
    """int64 [count, 1 + axes], positions from low to high; some in a negative batch where `outside` says so."""
    g = torch.Generator().manual_seed(seed)
    batches = torch.randint(-1 if outside else 0, batch, (count, 1), generator=g)
    return torch.cat([batches, torch.randint(low, high + 1, (count, axes), generator=g)], 1)


def _sweeps(count: int, shuffled: bool = False) -> _Make:
    """The occupied voxels of two sweeps around the sensor, and a kernel of 3 x 3 x 3."""

    def make(_: torch.dtype) -> tuple[Any, ...]:
        sites = scenes.lidar_sites(count, (41, 1440, 1440), 2)
        sites[:, 2:] -= 720
        if shuffled:
            sites = sites[torch.randperm(count, generator=torch.Generator().manual_seed(0))]
        return sites, sites.clone(), cube(3).int()

    return make


def _coarser(count: int) -> _Make:
    """From the voxels of a sweep to those of twice the size, where MinkowskiEngine puts them: at even positions."""

    def make(_: torch.dtype) -> tuple[Any, ...]:
        sites = scenes.lidar_sites(count, (41, 1440, 1440))
        even = torch.cat([sites[:, :1], sites[:, 1:] // 2 * 2], 1).unique(dim=0)
        return sites, even, cube(3, (0, 1)).int()

    return make


def _random(
    count: int, centers: int, offsets: Tensor, span: int, dtype: torch.dtype = torch.int32, *, batch: int = 2,
    outside: bool = False,
) -> _Make:  # fmt: skip
    def make(_: torch.dtype) -> tuple[Any, ...]:
        axes = offsets.shape[1]
        sites = random_sites(count, -span, span, axes, batch, outside)
        around = random_sites(centers, -span - 1, span + 1, axes, batch, outside, seed=1)
        return sites.to(dtype), around.to(dtype), offsets.to(dtype)

    return make


def _ends(dtype: torch.dtype, axes: int) -> _Make:
    """Sites within two steps of the least and the greatest coordinates, beyond which nothing lies."""

    def make(_: torch.dtype) -> tuple[Any, ...]:
        ends = torch.iinfo(dtype)
        sites = []
        for seed in (0, 1):
            g = torch.Generator().manual_seed(seed)
            near = torch.randint(0, 3, (200, 1 + axes), generator=g)
            far = torch.rand(200, 1 + axes, generator=g) < 0.5
            sites.append(torch.where(far, ends.max - near, near + ends.min))
            sites[-1][:, 0] = torch.randint(0, 2, (200,), generator=g) * ends.max
        return sites[0].to(dtype), sites[1].to(dtype), cube(axes, (-1, 0, 1)).to(dtype)

    return make


def _apart(dtype: torch.dtype) -> _Make:
    """Offsets from one end of int32 or int64 to the other, and each of them twice."""

    def make(_: torch.dtype) -> tuple[Any, ...]:
        ends = torch.iinfo(dtype)
        sites = torch.tensor([[0, ends.min], [0, -1], [0, 0], [0, ends.max], [1, ends.max]], dtype=dtype)
        offsets = torch.tensor([[ends.min], [-1], [0], [1], [ends.max]], dtype=dtype)
        return sites, sites.flip(0), offsets.repeat(2, 1)

    return make


def _rows(indices: list[list[int]], centers: list[list[int]], offsets: list[list[int]]) -> _Make:
    def make(_: torch.dtype) -> tuple[Any, ...]:
        columns = len((indices or centers)[0])
        return (
            torch.tensor(indices, dtype=torch.int32).reshape(-1, columns),
            torch.tensor(centers, dtype=torch.int32).reshape(-1, columns),
            torch.tensor(offsets, dtype=torch.int32).reshape(-1, columns - 1),
        )

    return make


def _strided(_: torch.dtype) -> tuple[Any, ...]:
    sites, centers, offsets = _random(90, 70, cube(2), 4)(torch.float32)
    return sites.repeat(1, 2)[:, ::2], centers.t().contiguous().t(), offsets.flip(1)


SAMPLES = [
    Sample(_NAME, "248636 sites of two sweeps, 27 offsets", _sweeps(248_636), "network", _ONE),
    Sample(_NAME, "60000 sites of two sweeps, shuffled", _sweeps(60_000, shuffled=True), "network", _ONE),
    Sample(_NAME, "to voxels of twice the size, 8 offsets", _coarser(120_000), "network", _ONE, demo=True),
    Sample(_NAME, "3D, 60 sites, 40 centers", _random(60, 40, cube(3), 2), dtypes=_ONE),
    Sample(_NAME, "1D, int64", _random(50, 30, torch.tensor([[-7], [0], [40], [3]]), 30, torch.int64), dtypes=_ONE),
    Sample(_NAME, "2D, sites and centers of no batch", _random(200, 150, cube(2), 6, outside=True), dtypes=_ONE),
    Sample(_NAME, "4D, int64", _random(300, 200, cube(4, (0, 2)), 3, torch.int64), dtypes=_ONE),
    Sample(_NAME, "3000 sites, offsets far apart", _random(3000, 900, cube(2, (-50, -3, 1, 2, 90)), 30), dtypes=_ONE),
    Sample(_NAME, "not contiguous", _strided, dtypes=_ONE),
    Sample(_NAME, "no sites", _random(0, 9, cube(3), 2), "boundary", _ONE),
    Sample(_NAME, "no centers", _random(9, 0, cube(3), 2), "boundary", _ONE),
    Sample(_NAME, "no offsets", _random(9, 5, torch.zeros(0, 3), 2), "boundary", _ONE),
    Sample(_NAME, "one site", _rows([[0, -5]], [[0, -5]], [[0]]), "boundary", _ONE),
    Sample(_NAME, "no site has a batch", _rows([[-1, 0], [-3, 1]], [[-1, 0], [0, 0]], [[0], [1]]), "boundary", _ONE),
    Sample(_NAME, "1500 sites at 5 places", _random(1500, 1000, cube(1), 2, batch=1), "boundary", _ONE),
    Sample(_NAME, "256 offsets", _random(40, 3, cube(2, tuple(range(-8, 8))), 9), "boundary", _ONE),
    Sample(_NAME, "at the ends of int32", _ends(torch.int32, 3), "boundary", _ONE),
    Sample(_NAME, "at the ends of int64", _ends(torch.int64, 2), "boundary", _ONE),
    Sample(_NAME, "anywhere in int32", _random(300, 200, cube(3), 2**31 - 2), "boundary", _ONE),
    Sample(_NAME, "offsets across int32", _apart(torch.int32), "boundary", _ONE),
    Sample(_NAME, "offsets across int64", _apart(torch.int64), "boundary", _ONE),
    *(Sample(_NAME, f"{n} sites and centers", _random(n, n, cube(1), n), "boundary", _ONE) for n in (65, 1025)),
]  # fmt: skip


def _sized(draw: Callable[[int], int]) -> _Make:
    return _random(draw(900_000), draw(900_000), cube(3)[: draw(27)], draw(400))


SIZED = [Sized(_NAME, "sites, centers and offsets", _sized)]


def _bad(what: str, error: type[Exception], match: str, **changed: Any) -> BadCall:
    good = {
        "indices": torch.zeros(5, 4).int(), "centers": torch.zeros(3, 4).int(), "offsets": torch.zeros(2, 3).int()
    }  # fmt: skip
    return BadCall(f"{_NAME}: {what}", lambda: site_neighbors(**{**good, **changed}), error, match)


BAD_CALLS = [
    _bad("flat sites", ValueError, r"indices must have shape \[N, 1 \+ D\] with D from 1 to 4, got \[5\]",
         indices=torch.zeros(5).int()),
    _bad("five axes", ValueError, r"with D from 1 to 4, got \[5, 6\]", indices=torch.zeros(5, 6).int()),
    _bad("float sites", TypeError, "indices must be int32 or int64, got float32", indices=torch.zeros(5, 4)),
    _bad("centers of other axes", ValueError, r"centers must have shape \[A, 4\], got \[3, 3\]",
         centers=torch.zeros(3, 3).int()),
    _bad("centers of another dtype", TypeError, "centers must be int32, got int64", centers=torch.zeros(3, 4).long()),
    _bad("offsets with a batch", ValueError, r"offsets must have shape \[K, 3\], got \[2, 4\]",
         offsets=torch.zeros(2, 4).int()),
    _bad("offsets of another dtype", TypeError, "offsets must be int32, got int64", offsets=torch.zeros(2, 3).long()),
    _bad("too many offsets", ValueError, "offsets must have at most 4096 rows, got 4097",
         offsets=torch.zeros(4097, 3).int()),
    _bad("a list", TypeError, "centers must be a Tensor, got list", centers=[[0, 0, 0, 0]]),
]  # fmt: skip

STANDARD = {_NAME: Standard(why_slower="sites are looked up wherever they lie: latency, not bandwidth")}


def work(operator: str, args: tuple[Any, ...]) -> Work:
    entries = len(args[1]) * len(args[2])
    return Work(bytes_of(args) + 4 * entries, 10 * entries)


def baselines(operator: str) -> dict[str, Callable[..., Tensor]]:
    return {"torch": _by_flat_indices}


def _by_flat_indices(indices: Tensor, centers: Tensor, offsets: Tensor) -> Tensor:
    """The plain formulation in torch: flat indices in the box around the sites, looked up among sorted ones."""
    rows = (indices[:, 0] >= 0).nonzero()[:, 0]
    table = torch.full((len(offsets), len(centers)), -1, dtype=torch.int32, device=indices.device)
    if len(rows) == 0 or table.numel() == 0:
        return table
    sites = indices[rows].long()
    low, high = sites.amin(0), sites.amax(0)
    extent = [b - a + 1 for a, b in zip(low.tolist(), high.tolist(), strict=True)]
    if math.prod(extent) >= 2**62:
        return reference.site_neighbors(indices, centers, offsets)
    strides = [math.prod(extent[axis + 1 :]) for axis in range(len(extent))]
    strides_of = torch.tensor(strides, device=indices.device)
    keys, order = ((sites - low) * strides_of).sum(1).sort(stable=True)
    step = torch.cat([offsets.new_zeros((len(offsets), 1)), offsets], 1).long()
    wanted = centers.long() + step[:, None]
    inside = ((wanted >= low) & (wanted <= high)).all(2) & (centers[:, 0] >= 0)
    key = ((wanted - low) * strides_of).sum(2)
    place = torch.searchsorted(keys, key).clamp(max=len(keys) - 1)
    return torch.where(inside & (keys[place] == key), rows[order[place]], -1).int()
