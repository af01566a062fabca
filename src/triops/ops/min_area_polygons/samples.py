"""Inputs of min_area_polygons."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from triops._sample import BadCall, Sample, Sized, Standard, Work, bytes_of
from triops.ops.min_area_polygons import min_area_polygons

_Make = Callable[[torch.dtype], tuple[Any, ...]]
_NAME = "min_area_polygons"


def sets(count: int, points: int = 9, seed: int = 0) -> _Make:
    def make(dtype: torch.dtype) -> tuple[Any, ...]:
        g = torch.Generator().manual_seed(seed)
        centre = torch.rand(count, 1, 2, generator=g) * 20
        return ((centre + torch.randn(count, points, 2, generator=g)).flatten(1).to(dtype),)

    return make


def _special(dtype: torch.dtype) -> tuple[Any, ...]:
    """Equal points, points in line, squares, huge and tiny ones, and some that are not finite."""
    square = torch.tensor([[0.0, 0], [1, 0], [1, 1], [0, 1]])
    diamond = torch.tensor([[1.0, 0], [2, 1], [1, 2], [0, 1]])
    shapes = [
        square * 0 + 3, square[:, :1].expand(4, 2), square * torch.tensor([0.0, 1]), square, diamond, square * 1e15,
        square * 1e-15, square * math.inf, square + math.nan, diamond.flip(0), square[[0, 2, 1, 3]],
    ]  # fmt: skip
    return (torch.stack(shapes).flatten(1).to(dtype),)


SAMPLES = [
    Sample(_NAME, "20000 sets of 9 points", sets(20_000), "network", demo=True),
    Sample(_NAME, "7 sets of 9 points", sets(7)),
    Sample(_NAME, "33 quadrilaterals", sets(33, 4, seed=1)),
    *(
        Sample(_NAME, f"{n} sets of {k}", sets(n, k, seed=n), "boundary", (torch.float32,))
        for n, k in ((1, 1), (3, 2), (65, 3), (5, 16), (0, 9))
    ),
    Sample(_NAME, "special", _special, "boundary", (torch.float32, torch.float64)),
]

SIZED = [Sized(_NAME, "sets", lambda draw: sets(draw(9000)))]

_POINTS = torch.zeros(3, 18)


def _bad(what: str, error: type[Exception], match: str, *args: Any) -> BadCall:
    return BadCall(f"{_NAME}: {what}", lambda: min_area_polygons(*args), error, match)


BAD_CALLS = [
    _bad("17 columns", ValueError, "pointsets must have 2 to 32 columns.*got 17", _POINTS[:, 1:]),
    _bad("rank 3", ValueError, r"pointsets must have shape \[N, 2K\], got \[1, 3, 18\]", _POINTS[None]),
    _bad("integers", TypeError, "pointsets must be float32.*got int64", _POINTS.long()),
    _bad("None", TypeError, "pointsets must be a Tensor, got NoneType", None),
]

STANDARD = {_NAME: Standard(error_scale="row", why_slower="every side of a hull is tried with every corner")}


def work(operator: str, args: tuple[Any, ...]) -> Work:
    (points,) = args
    return Work(
        bytes_of(args) + len(points) * 8 * points.element_size(), 10 * len(points) * (points.shape[1] // 2) ** 2
    )


def baselines(operator: str) -> dict[str, Callable[..., Any]]:
    return {}
