"""Inputs of dynamic_scatter_forward and dynamic_scatter_backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from triops import scenes
from triops._op import OPERATORS
from triops._sample import BadCall, Sample, Sized, Standard, Work, bytes_of, compiled_mmcv
from triops.ops.dynamic_scatter import dynamic_scatter, dynamic_scatter_backward, dynamic_scatter_forward
from triops.ops.voxelize import dynamic_voxelize

_Make = Callable[[torch.dtype], tuple[Any, ...]]
_F, _B = "dynamic_scatter_forward", "dynamic_scatter_backward"


def _network(
    count: int,
    channels: int,
    size: list[float],
    bounds: list[float],
    reduce: str,
    batch: int = 1,
    shuffled: bool = True,
) -> _Make:
    """Features of sweeps, by dynamic voxels with the batch in front. Points outside the range belong to none."""

    def make(dtype: torch.dtype) -> tuple[Any, ...]:
        g = torch.Generator().manual_seed(0)
        coords = []
        for b in range(batch):
            cell = dynamic_voxelize(scenes.lidar_scene(count, seed=b).points, size, bounds)
            if shuffled:
                cell = cell[torch.randperm(count, generator=g)]
            coords.append(torch.cat([torch.full((count, 1), b, dtype=torch.int32), cell], 1))
        return torch.randn(batch * count, channels, generator=g).to(dtype), torch.cat(coords), reduce

    return make


def _random(
    count: int, channels: int, axes: int = 3, lowest: int = -1, above: int = 4, reduce: str = "mean", seed: int = 0,
    index: torch.dtype = torch.int32,
) -> _Make:  # fmt: skip
    def make(dtype: torch.dtype) -> tuple[Any, ...]:
        g = torch.Generator().manual_seed(seed)
        features = torch.randn(count, channels, generator=g)
        coords = torch.randint(lowest, above, (count, axes), generator=g)
        return features.to(dtype), coords.to(index), reduce

    return make


def _distinct(reduce: str) -> _Make:
    """Features that are all different, so that a maximum has one winner."""

    def make(dtype: torch.dtype) -> tuple[Any, ...]:
        g = torch.Generator().manual_seed(2)
        features = torch.randperm(24 * 2, generator=g).view(24, 2).to(dtype) * 0.1
        return features, torch.randint(-1, 2, (24, 3), generator=g), reduce

    return make


def _equal_and_not_finite(reduce: str) -> _Make:
    def make(dtype: torch.dtype) -> tuple[Any, ...]:
        features, coords, _ = _random(300, 4, 2, seed=3)(dtype)
        features = features.round()
        features[::3, 0], features[::2, 1], features[1::2, 2], features[:, 3] = (
            float("nan"), float("-inf"), float("inf"), float("nan"),
        )  # fmt: skip
        return features, coords, reduce

    return make


def _backward(forward: _Make) -> _Make:
    """A gradient for what the forward makes of an input."""

    def make(dtype: torch.dtype) -> tuple[Any, ...]:
        features, coords, reduce = forward(dtype)
        reduced, _, point_to_voxel, counts = OPERATORS[_F](features, coords, reduce)
        g = torch.Generator().manual_seed(9)
        return (
            torch.randn(reduced.shape, generator=g).to(dtype), features, reduced, point_to_voxel, counts, reduce,
        )  # fmt: skip

    return make


_PILLARS = ([0.16, 0.16, 4.0], [0.0, -39.68, -3.0, 69.12, 39.68, 1.0])
_VOXELS = ([0.1, 0.1, 0.2], [-51.2, -51.2, -5.0, 51.2, 51.2, 3.0])
_CASES: list[tuple[str, _Make, Any]] = [
    ("pillars, 4 x 40000 points, 64 channels, max", _network(40_000, 64, *_PILLARS, "max", 4), "network"),
    ("pillars, 4 x 40000 points, 4 channels, mean", _network(40_000, 4, *_PILLARS, "mean", 4), "network"),
    ("voxels, 300000 points, 5 channels, mean", _network(300_000, 5, *_VOXELS, "mean"), "network"),
    ("voxels, 300000 points, 32 channels, max, in order", _network(300_000, 32, *_VOXELS, "max", shuffled=False),
     "network"),
]  # fmt: skip
for _reduce in ("max", "mean", "sum"):
    _CASES += [
        (f"50 points, {_reduce}", _random(50, 3, reduce=_reduce), "general"),
        (f"batch in front, 70 channels, {_reduce}", _random(500, 70, 4, reduce=_reduce, seed=1), "general"),
        (f"2000 points, int64, {_reduce}", _random(
            2000, 5, 3, -1, 30, _reduce, 4, torch.int64), "general"),
        (f"equal and not finite, {_reduce}", _equal_and_not_finite(_reduce), "boundary"),
        (f"no points, {_reduce}", _random(0, 3, reduce=_reduce), "boundary"),
        (f"all outside, {_reduce}", _random(40, 3, lowest=-2, above=0, reduce=_reduce), "boundary"),
    ]  # fmt: skip
_CASES += [
    ("one point", _random(1, 1, lowest=0), "boundary"),
    ("no channels", _random(30, 0), "boundary"),
    ("one axis", _random(200, 2, 1, above=9, reduce="max"), "boundary"),
    ("eight axes", _random(200, 2, 8, 0, 2, "sum"), "boundary"),
    ("one voxel, 1025 points", _random(1025, 3, lowest=0, above=1), "boundary"),
    ("1024 voxels, 129 channels", _random(1024, 129, 1, 0, 10**6, "max"), "boundary"),
    ("coordinates beyond 32 bits in all", _random(100, 2, 3, 0, 5000, "mean", 5), "boundary"),
    ("coordinates beyond 64 bits in all", _random(100, 2, 3, 2**31 - 6, 2**31 - 1, "max", 6), "boundary"),
    ("coordinates up to 2**63", _random(100, 2, 2, 2**63 - 4, 2**63 - 1, "sum", 7, torch.int64), "boundary"),
]
SAMPLES = [Sample(_F, name, make, scale, demo=i == 0) for i, (name, make, scale) in enumerate(_CASES)]
SAMPLES += [Sample(_B, name, _backward(make), scale, demo=i == 0) for i, (name, make, scale) in enumerate(_CASES)]
SAMPLES += [Sample(_F, f"distinct, {reduce}", _distinct(reduce), gradcheck=True) for reduce in ("mean", "max", "sum")]


SIZED = [
    Sized(operator, reduce, lambda draw, wrap=wrap, reduce=reduce: wrap(  # type: ignore[misc]
        _random(draw(1_300_000), 4, above=40, reduce=reduce)))
    for operator, wrap in ((_F, lambda make: make), (_B, _backward)) for reduce in ("mean", "max")
]  # fmt: skip


def _bad_calls() -> list[BadCall]:
    features, coords = torch.zeros(5, 2), torch.zeros(5, 3, dtype=torch.int32)
    calls = []
    for function in (dynamic_scatter, dynamic_scatter_forward):

        def bad(what: str, error: type[Exception], match: str, *args: Any, f: Any = function) -> BadCall:
            return BadCall(f"{f.__name__}: {what}", lambda: f(*args), error, match)

        calls += [
            bad("features of rank 3", ValueError, r"features must have shape \[N, C\], got", features[None], coords),
            bad("coords of rank 1", ValueError, r"coords must have shape \[N, D\]", features, coords[:, 0]),
            bad("unequal points", ValueError, r"N = 5 as in features, got \[4, 3\]", features, coords[1:]),
            bad("no axes", ValueError, r"D from 1 to 8, got \[5, 0\]", features, coords[:, :0]),
            bad("nine axes", ValueError, r"D from 1 to 8, got \[5, 9\]", features, coords.repeat(1, 3)),
            bad("integer features", TypeError, "features must be float32.*got int64", features.long(), coords),
            bad("float coords", TypeError, "coords must be int32 or int64, got float32", features, coords.float()),
            bad("unequal devices", ValueError, "coords on meta", features, coords.to("meta")),
            bad("a list", TypeError, "coords must be a Tensor, got list", features, coords.tolist()),
            bad("unknown reduction", ValueError, "reduce must be 'mean', 'max' or 'sum', got 'min'", features, coords,
                "min"),
            bad("reduction as a number", TypeError, "reduce must be a string, got int", features, coords, 0),
        ]  # fmt: skip

    grad, voxel, counts = torch.zeros(4, 2), torch.zeros(5, dtype=torch.int32), torch.ones(4, dtype=torch.int32)
    good = (grad, features, grad, voxel, counts, "mean")

    def bad_backward(what: str, error: type[Exception], match: str, position: int, value: Any) -> BadCall:
        args = (*good[:position], value, *good[position + 1 :])
        return BadCall(f"{_B}: {what}", lambda: dynamic_scatter_backward(*args), error, match)

    def put(value: int) -> Tensor:
        changed = voxel.clone()
        changed[3] = value
        return changed

    return [
        *calls,
        bad_backward("grad_reduced of rank 1", ValueError, r"grad_reduced must have shape \[V, C\]", 0, grad[0]),
        bad_backward("features of other channels", ValueError, "C = 2 as in grad_reduced", 1, torch.zeros(5, 3)),
        bad_backward("reduced of fewer voxels", ValueError, "V = 4 as in grad_reduced", 2, grad[1:]),
        bad_backward("point_to_voxel too short", ValueError, "N = 5 as in features", 3, voxel[1:]),
        bad_backward("counts too long", ValueError, "V = 4 as in grad_reduced", 4, voxel),
        bad_backward("another dtype", TypeError, "features float64", 1, features.double()),
        bad_backward("integer gradient", TypeError, "grad_reduced must be float32", 0, grad.long()),
        bad_backward("int64 point_to_voxel", TypeError, "point_to_voxel must be int32", 3, voxel.long()),
        bad_backward("int64 counts", TypeError, "counts must be int32", 4, counts.long()),
        bad_backward("unequal devices", ValueError, "counts on meta", 4, counts.to("meta")),
        bad_backward("None", TypeError, "reduced must be a Tensor, got NoneType", 2, None),
        bad_backward("unknown reduction", ValueError, "reduce must be 'mean', 'max' or 'sum'", 5, "avg"),
        bad_backward("a voxel too high", IndexError, r"point_to_voxel must lie in -1\.\.3", 3, put(4)),
        bad_backward("a voxel too low", IndexError, r"point_to_voxel must lie in -1\.\.3", 3, put(-2)),
    ]


BAD_CALLS = _bad_calls()

STANDARD = {
    _F: Standard(
        error_scale="row",  # sums may cancel; that maxima are exact is a test of its own
        why_slower="the points are sorted by voxel before anything is reduced, and the host waits in between",
    ),
    _B: Standard(why_slower="rows are gathered wherever a point's voxel lies"),
}


def work(operator: str, args: tuple[Any, ...]) -> Work:
    if operator == _F:
        features, coords = args[:2]
        return Work(2 * bytes_of(features) + 2 * bytes_of(coords) + 4 * len(coords), features.numel())
    grad_reduced, features, reduced, point_to_voxel, counts, reduce = args
    read = bytes_of((features, reduced)) if reduce == "max" else bytes_of(counts) if reduce == "mean" else 0
    return Work(bytes_of((grad_reduced, point_to_voxel, features)) + read, features.numel())


def baselines(operator: str) -> dict[str, Callable[..., Any]]:
    found: dict[str, Callable[..., Any]] = {"torch": _vectorised_forward if operator == _F else _vectorised_backward}
    _ext = compiled_mmcv()
    if _ext is None or not torch.cuda.is_available():  # mmcv has no CPU kernel
        return found

    def mmcv_backward(
        grad_reduced: Tensor, features: Tensor, reduced: Tensor, point_to_voxel: Tensor, counts: Tensor, reduce: str
    ) -> Tensor:
        grad = torch.zeros_like(features)
        _ext.dynamic_point_to_voxel_backward(
            grad, grad_reduced, features, reduced, point_to_voxel, counts, reduce
        )  # fmt: skip
        return grad

    found["mmcv"] = _ext.dynamic_point_to_voxel_forward if operator == _F else mmcv_backward
    return found


def _vectorised_forward(features: Tensor, coords: Tensor, reduce: str) -> tuple[Tensor, ...]:
    """The plain formulation in torch: flat keys, unique, and a scatter."""
    kept = (coords >= 0).all(1).nonzero()[:, 0]
    cell = coords[kept].long()
    shape = (cell.max(0).values + 1).tolist()
    flat = cell[:, 0]
    for axis in range(1, len(shape)):
        flat = flat * shape[axis] + cell[:, axis]
    flat, voxel, counts = flat.unique(return_inverse=True, return_counts=True)
    columns = []
    for size in reversed(shape):
        columns.append(flat % size)
        flat = flat // size
    value = features[kept]
    if reduce == "max":
        reduced = features.new_full((len(counts), features.shape[1]), -torch.inf)
        reduced.scatter_reduce_(0, voxel[:, None].expand_as(value), value, "amax")
    else:
        reduced = features.new_zeros((len(counts), features.shape[1])).index_add_(0, voxel, value)
        if reduce == "mean":
            reduced /= counts[:, None]
    point_to_voxel = torch.full((len(coords),), -1, dtype=torch.int32, device=coords.device)
    point_to_voxel[kept] = voxel.int()
    return reduced, torch.stack(columns[::-1], 1).to(coords.dtype), point_to_voxel, counts.int()


def _vectorised_backward(
    grad_reduced: Tensor, features: Tensor, reduced: Tensor, point_to_voxel: Tensor, counts: Tensor, reduce: str
) -> Tensor:
    """The plain formulation in torch: a gather; for "max" the lowest index by a scatter first."""
    kept = (point_to_voxel >= 0).nonzero()[:, 0]
    voxel = point_to_voxel[kept].long()
    if reduce == "mean":
        grad_reduced = grad_reduced / counts[:, None]
    grad = grad_reduced[voxel]
    if reduce == "max":
        candidate = torch.where(features[kept] == reduced[voxel], kept[:, None], len(features))
        winner = candidate.new_full(reduced.shape, len(features))
        winner.scatter_reduce_(0, voxel[:, None].expand_as(candidate), candidate, "amin")
        grad = torch.where(winner[voxel] == kept[:, None], grad, 0)
    return torch.zeros_like(features).index_copy_(0, kept, grad)
