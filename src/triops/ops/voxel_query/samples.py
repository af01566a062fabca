"""Inputs of voxel_query."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from triops import scenes
from triops._sample import BadCall, Sample, Sized, Standard, Work, bytes_of
from triops.ops.voxel_query import reference, voxel_query

_NAME = "voxel_query"
_Make = Callable[[torch.dtype], tuple[Any, ...]]
_FLOAT32 = (torch.float32,)


def _random(
    batch: int, shape: tuple[int, int, int], centers: int, radius: float, k: int, max_range: list[int],
    share: float = 0.3, dtype: torch.dtype = torch.int32,
) -> _Make:  # fmt: skip
    """Points in some voxels of a unit grid, and centers anywhere, some off the grid."""

    def make(real: torch.dtype) -> tuple[Any, ...]:
        g = torch.Generator().manual_seed(0)
        filled = torch.rand((batch, *shape), generator=g) < share
        sites = filled.nonzero()
        points = sites[:, [3, 2, 1]] + (torch.rand(len(sites), 3, generator=g) * 4).round() / 4
        rows = torch.where(filled, filled.flatten().cumsum(0).view_as(filled) - 1, -1)
        coords = torch.randint(-1, 2 + max(shape), (centers, 4), generator=g)
        coords[:, 0] %= max(batch, 1)
        return (
            points.to(real),
            coords[:, [3, 2, 1]].to(real) + 0.5,
            coords.to(dtype),
            rows.to(dtype),
            radius,
            k,
            max_range,
        )

    return make


def _voxel_rcnn(batch: int, points: int, centers: int) -> _Make:
    """The grid points of RoIs in the voxels of a sweep, as in Voxel R-CNN: stride 4, windows of 9 x 9 x 9."""

    def make(dtype: torch.dtype) -> tuple[Any, ...]:
        size, low, shape = torch.tensor([0.2, 0.2, 0.4]), torch.tensor([-40.0, -40.0, -3.0]), (10, 400, 400)
        clouds, rows, begin = [], torch.full((batch, *shape), -1, dtype=torch.int32), 0
        chosen, g = [], torch.Generator().manual_seed(0)
        for b in range(batch):
            cell = ((scenes.lidar_scene(points, seed=b).points - low) / size).floor().long()
            cell = cell[((cell >= 0) & (cell < torch.tensor(shape).flip(0))).all(1)].unique(dim=0)
            rows[b, cell[:, 2], cell[:, 1], cell[:, 0]] = torch.arange(begin, begin + len(cell), dtype=torch.int32)
            clouds.append((cell + 0.5) * size + low)
            chosen.append(torch.randint(begin, begin + len(cell), (centers,), generator=g))
            begin += len(cell)
        every = torch.cat(clouds)
        around = every[torch.cat(chosen)] + torch.randn(batch * centers, 3, generator=g) * 0.3
        cell = ((around - low) / size).floor().int()
        batches = torch.arange(batch).repeat_interleave(centers)[:, None].int()
        return every.to(dtype), around.to(dtype), torch.cat([batches, cell.flip(1)], 1), rows, 0.8, 16, [4, 4, 4]

    return make


SAMPLES = [
    Sample(_NAME, "2 x 27648 centers, 9 x 9 x 9 voxels", _voxel_rcnn(2, 100_000, 27648), "network", _FLOAT32,
           gpu_only=True),
    Sample(_NAME, "500 centers, 9 x 9 x 9 voxels", _voxel_rcnn(1, 20_000, 500), "network", demo=True),
    Sample(_NAME, "2 x 4 x 5 x 6 voxels, 20 centers", _random(2, (4, 5, 6), 20, 1.5, 4, [1, 2, 1])),
    Sample(_NAME, "int64, a window wider than the grid",
           _random(1, (2, 9, 9), 20, 2.5, 20, [3, 1, 9], dtype=torch.int64)),
    Sample(_NAME, "no centers", _random(1, (2, 3, 3), 0, 1.0, 3, [1, 1, 1]), "boundary", _FLOAT32),
    Sample(_NAME, "no points", _random(1, (2, 3, 3), 4, 1.0, 3, [1, 1, 1], share=0), "boundary", _FLOAT32),
    Sample(_NAME, "no voxels", _random(1, (0, 3, 3), 4, 1.0, 3, [1, 1, 1]), "boundary", _FLOAT32),
    Sample(_NAME, "a window of one voxel, a distance equal to the radius",
           lambda dtype: (torch.tensor([[1.0, 0, 0]]), torch.zeros(2, 3), torch.tensor([[0, 0, 0, 0], [0, 0, 0, 1]]),
                          torch.zeros(1, 1, 1, 1, dtype=torch.int64), 1.0, 3, [0, 0, 0]), "boundary", _FLOAT32),
]  # fmt: skip

SIZED = [
    Sized(_NAME, "centers and voxels",
          lambda draw: _random(draw(3), (draw(9), draw(9), draw(9)), draw(200), 1.5, 4, [1, 2, 1])),
]  # fmt: skip


def _bad(what: str, error: type[Exception], match: str, **changed: Any) -> BadCall:
    good = {
        "points": torch.zeros(5, 3), "centers": torch.zeros(4, 3), "coords": torch.zeros(4, 4).int(),
        "voxel_rows": torch.zeros(1, 2, 3, 4).int(), "radius": 1.0, "k": 3, "max_range": [1, 1, 1],
    }  # fmt: skip
    return BadCall(f"{_NAME}: {what}", lambda: voxel_query(**{**good, **changed}), error, match)


BAD_CALLS = [
    _bad("points with 4 columns", ValueError, r"points must have shape \[N, 3\]", points=torch.zeros(5, 4)),
    _bad("fewer coords", ValueError, "M = 4 as in centers", coords=torch.zeros(3, 4).int()),
    _bad("float coords", TypeError, "coords must be int32 or int64", coords=torch.zeros(4, 4)),
    _bad("a flat map", ValueError, r"voxel_rows must have shape \[B, Z, Y, X\]", voxel_rows=torch.zeros(24).int()),
    _bad("radius -1", ValueError, "radius must be at least 0, got -1", radius=-1.0),
    _bad("k 0", ValueError, "k must be at least 1, got 0", k=0),
    _bad("two ranges", ValueError, r"max_range must be one integer or three \(z, y, x\), got 2", max_range=[1, 1]),
    _bad("a negative range", ValueError, "max_range must be at least 0, got -1", max_range=-1),
    _bad("a huge range", ValueError, r"at most 2\*\*20 voxels", max_range=1000),
    _bad("a voxel of a row that is not there", IndexError, "voxel_rows must be rows of points, below 5",
         voxel_rows=torch.full((1, 2, 3, 4), 5)),
    _bad("a batch that is not there", IndexError, "coords must name batches from 0 to 0",
         coords=torch.ones(4, 4).int()),
]  # fmt: skip

STANDARD = {_NAME: Standard(why_slower="windows are read voxel by voxel, most of them empty")}


def work(operator: str, args: tuple[Any, ...]) -> Work:
    points, centers, coords, _, _, k, max_range = args
    window = (2 * max_range[0] + 1) * (2 * max_range[1] + 1) * (2 * max_range[2] + 1)
    return Work(bytes_of((points, centers, coords)) + 4 * len(centers) * k, len(centers) * (window + 8 * k))


def baselines(operator: str) -> dict[str, Callable[..., Tensor]]:
    return {"torch": reference.voxel_query}
