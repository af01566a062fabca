"""Inputs of chamfer_distance."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from triops._dtypes import compute_dtype
from triops._sample import BadCall, Sample, Sized, Standard, Work, bytes_of, compiled_mmcv
from triops.ops.chamfer_distance import chamfer_distance, chamfer_distance_backward, reference

_F, _B = "chamfer_distance", "chamfer_distance_backward"
_Make = Callable[[torch.dtype], tuple[Any, ...]]
_FLOAT32 = (torch.float32,)


def _sets(batch: int, one: int, two: int, axes: int = 2, grid: float = 0.0, seed: int = 0) -> _Make:
    """Points in a square or cube; with a grid, many at the same place and at equal distances."""

    def make(dtype: torch.dtype) -> tuple[Any, ...]:
        g = torch.Generator().manual_seed(seed)
        points = [torch.rand(batch, n, axes, generator=g, dtype=torch.float64) * 10 for n in (one, two)]
        return tuple(((p / grid).round() * grid if grid else p).to(dtype) for p in points)

    return make


def _not_finite(dtype: torch.dtype) -> tuple[Any, ...]:
    one, two = _sets(2, 20, 15)(dtype)
    one[0, ::3, 0], two[0, ::2, 1], two[1] = torch.nan, torch.inf, torch.nan
    return one, two


def _backward(make: _Make) -> _Make:
    def made(dtype: torch.dtype) -> tuple[Any, ...]:
        one, two = make(dtype)
        _, _, idx1, idx2 = reference.chamfer_distance(one, two)
        g = torch.Generator().manual_seed(1)
        grads = [torch.randn(i.shape, generator=g).to(compute_dtype(dtype)) for i in (idx1, idx2)]
        return one, two, idx1, idx2, *grads

    return made


_CASES: list[tuple[str, _Make, Any, tuple[torch.dtype, ...]]] = [
    ("4 x 300 and 200 points", _sets(4, 300, 200), "network", Sample.dtypes),
    ("2 x 9 and 7 points", _sets(2, 9, 7), "general", Sample.dtypes),
    ("70 and 33 points in space, on a grid", _sets(1, 70, 33, 3, 2.5), "general", Sample.dtypes),
    ("not finite", _not_finite, "boundary", _FLOAT32),
    ("no points", _sets(2, 0, 3), "boundary", _FLOAT32),
    ("no others", _sets(2, 3, 0), "boundary", _FLOAT32),
    ("no sets", _sets(0, 3, 2), "boundary", _FLOAT32),
    ("one place", _sets(1, 40, 1), "boundary", _FLOAT32),
]
SAMPLES = [
    *(
        Sample(_F, name, make, scale, dtypes, gradcheck=name.startswith("2 x 9"), demo=scale == "network")
        for name, make, scale, dtypes in _CASES
    ),
    *(Sample(_B, name, _backward(make), scale, dtypes) for name, make, scale, dtypes in _CASES),
    Sample(_F, "8 x 16384 points", _sets(8, 16384, 16384, 3), "network", _FLOAT32, gpu_only=True),
]

SIZED = [
    Sized(_F, "points", lambda draw: _sets(draw(3), draw(1500), draw(1500))),
    Sized(_B, "points", lambda draw: _backward(_sets(draw(3), draw(200), draw(200)))),
]

_one, _two, _index, _grad = torch.zeros(2, 5, 2), torch.zeros(2, 4, 2), torch.zeros(2, 5).int(), torch.zeros(2, 5)
BAD_CALLS = [
    BadCall(f"{_F}: four axes", lambda: chamfer_distance(torch.zeros(2, 5, 4), _two), ValueError,
            r"xyz1 must have shape \[B, N, 2\] or \[B, N, 3\], got \[2, 5, 4\]"),
    BadCall(f"{_F}: another batch", lambda: chamfer_distance(_one, _two[:1]), ValueError, "B = 2 as in xyz1"),
    BadCall(f"{_F}: plane and space", lambda: chamfer_distance(_one, torch.zeros(2, 4, 3)), ValueError,
            "D = 2 as in xyz1"),
    BadCall(f"{_F}: unequal dtypes", lambda: chamfer_distance(_one, _two.half()), TypeError, "xyz2 float16"),
    BadCall(f"{_B}: indices of another length",
            lambda: chamfer_distance_backward(_one, _two, _index[:, 1:], _index[:, 1:], _grad, _grad[:, 1:]),
            ValueError, "idx1 must have shape"),
    BadCall(f"{_B}: an index that is not there",
            lambda: chamfer_distance_backward(_one, _two, _index + 4, _index[:, 1:], _grad, _grad[:, 1:]), IndexError,
            "indices must be from -1 to 3"),
]  # fmt: skip

STANDARD = {
    _F: Standard(why_slower="points are sorted first, and each searches the boxes around it"),
    _B: Standard(error_scale="row", why_slower="gradients are added by atomics"),
}


def work(operator: str, args: tuple[Any, ...]) -> Work:
    points = args[0].shape[0] * (args[0].shape[1] + args[1].shape[1])
    written = 8 * points if operator == _F else bytes_of(args[:2])
    return Work(bytes_of(args) + written, 8 * points)


def baselines(operator: str) -> dict[str, Callable[..., Any]]:
    if operator == _B:
        return {"torch": reference.chamfer_distance_backward}
    found: dict[str, Callable[..., Any]] = {"torch": _by_cdist}
    _ext = compiled_mmcv()
    if _ext is None:
        return found

    def mmcv(xyz1: Tensor, xyz2: Tensor) -> tuple[Tensor, ...]:
        distances = [torch.zeros_like(t[..., 0]) for t in (xyz1, xyz2)]
        indices = [torch.zeros_like(d, dtype=torch.int32) for d in distances]
        _ext.chamfer_distance_forward(xyz1, xyz2, *distances, *indices)
        return *distances, *indices

    return {**found, "mmcv": mmcv}


def _by_cdist(xyz1: Tensor, xyz2: Tensor) -> tuple[Tensor, ...]:
    """The plain formulation in torch: all distances, and the least of each row and column."""
    squares = (
        (xyz1.to(compute_dtype(xyz1.dtype))[:, :, None] - xyz2.to(compute_dtype(xyz2.dtype))[:, None]).square().sum(3)
    )
    (near1, idx1), (near2, idx2) = squares.min(2), squares.min(1)
    return near1, near2, idx1.int(), idx2.int()
