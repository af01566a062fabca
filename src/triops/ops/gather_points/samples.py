"""Inputs of gather_points and gather_points_backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from triops._sample import BadCall, Sample, Sized, Standard, Work, bytes_of, compiled_mmcv
from triops.ops.gather_points import gather_points, gather_points_backward, group_points

_F, _B = "gather_points", "gather_points_backward"
_Make = Callable[[torch.dtype], tuple[Any, ...]]
_ONE = (torch.float32,)


def _random(
    batch: int, channels: int, count: int, places: int, rows: bool = False, lowest: int = 0,
    dtype: torch.dtype = torch.int32, near: bool = False,
) -> _Make:  # fmt: skip
    """`lowest` -1: some indices are no point. `near`: runs of 32 close indices, as balls around points have."""

    def make(real: torch.dtype) -> tuple[Any, ...]:
        draw = torch.Generator().manual_seed(0)
        shape = (batch, count, channels) if rows else (batch, channels, count)
        features = torch.randn(shape, generator=draw).to(real)
        indices = torch.randint(lowest, max(count, lowest + 1), (batch, places), generator=draw)
        if near:
            indices = (indices[:, ::32].repeat_interleave(32, 1) + indices % 50) % count
        return features, indices.to(dtype), rows

    return make


def _backward(make: _Make) -> _Make:
    def made(dtype: torch.dtype) -> tuple[Any, ...]:
        features, indices, rows = make(dtype)
        count, channels = (features.shape[1], features.shape[2]) if rows else (features.shape[2], features.shape[1])
        shape = (len(indices), indices.shape[1], channels) if rows else (len(indices), channels, indices.shape[1])
        grad = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)
        return grad, indices, count, rows

    return made


_CASES: list[tuple[str, _Make, Any]] = [
    ("1 x 16 x 4096, 1024 x 16 neighbors", _random(1, 16, 4096, 16_384, near=True), "network"),
    ("planes", _random(2, 11, 40, 90), "general"),
    ("rows", _random(1, 5, 40, 70, True, -1), "general"),
    ("planes of few channels, int64", _random(2, 3, 50, 30, False, -1, torch.int64), "boundary"),
    ("129 channels", _random(1, 129, 7, 20), "boundary"),
    ("1 point", _random(2, 9, 1, 5), "boundary"),
    ("no points, no index", _random(1, 9, 0, 5, False, -1), "boundary"),
    ("no places", _random(2, 9, 6, 0), "boundary"),
    ("no channels", _random(2, 0, 6, 5), "boundary"),
    ("no clouds", _random(0, 9, 6, 5), "boundary"),
]
_LARGE = [
    ("group_points, 8 x 64 x 16384, 4096 x 32 neighbors", _random(8, 64, 16_384, 4096 * 32, near=True)),
    ("gather_points, 8 x 3 x 16384, 4096 places", _random(8, 3, 16_384, 4096)),
    ("rows, 80000 x 64, 8192 x 16 neighbors", _random(1, 64, 80_000, 8192 * 16, True, near=True)),
]
SAMPLES = [
    Sample(operator, name, wrap(make), scale, _ONE if scale != "general" else Sample.dtypes, demo=scale == "network")
    for operator, wrap in ((_F, lambda make: make), (_B, _backward)) for name, make, scale in _CASES
]  # fmt: skip
SAMPLES += [
    Sample(operator, name, wrap(make), "network", (torch.float32, torch.float16), gpu_only=True)
    for operator, wrap in ((_F, lambda make: make), (_B, _backward)) for name, make in _LARGE
]  # fmt: skip
SAMPLES += [Sample(_F, f"gradient, rows {rows}", _random(2, 3, 5, 8, rows, -1), dtypes=_ONE, gradcheck=True)
            for rows in (False, True)]  # fmt: skip

SIZED = [
    Sized(operator, f"rows {rows}", lambda draw, wrap=wrap, rows=rows: wrap(  # type: ignore[misc]
        _random(draw(3), 9, draw(500), draw(3000), rows)))
    for operator, wrap in ((_F, lambda make: make), (_B, _backward)) for rows in (False, True)
]  # fmt: skip

STANDARD = {
    _F: Standard(why_slower="features are read wherever an index points"),
    _B: Standard(error_scale="row", why_slower="gradients are added wherever an index points"),
}


def _bad_calls() -> list[BadCall]:
    features, indices = torch.zeros(2, 3, 5), torch.zeros(2, 4, dtype=torch.int32)

    def bad(what: str, error: type[Exception], match: str, f: Any, *args: Any) -> BadCall:
        return BadCall(f"{f.__name__}: {what}", lambda: f(*args), error, match)

    return [
        bad("features of rank 4", ValueError, r"features must have shape \[B, C, N\]", gather_points, features[None],
            indices),
        bad("indices of rank 1", ValueError, r"indices must have shape \[B, M\]", gather_points, features, indices[0]),
        bad("another batch", ValueError, "B = 2 as in features", gather_points, features, indices[:1]),
        bad("integer features", TypeError, "features must be float32", gather_points, features.long(), indices),
        bad("float indices", TypeError, "indices must be int32 or int64", gather_points, features, indices.float()),
        bad("a list", TypeError, "indices must be a Tensor, got list", gather_points, features, [[1]]),
        bad("another device", ValueError, "indices on meta", gather_points, features, indices.to("meta")),
        bad("an index too high", IndexError, r"indices must lie in -1\.\.4", gather_points, features, indices + 5),
        bad("an index too low", IndexError, r"indices must lie in -1\.\.4", gather_points, features, indices - 2),
        bad("rows: an index too high", IndexError, r"-1\.\.2", gather_points, features[0], indices[0] + 3),
        bad("indices of rank 2", ValueError, r"indices must have shape \[B, M, K\]", group_points, features, indices),
        bad("rows: indices of rank 1", ValueError, r"indices must have shape \[M, K\]", group_points, features[0],
            indices[0]),
        bad("too few points", IndexError, r"indices must lie in -1\.\.0", gather_points_backward, features[:, :, :4],
            indices + 1, 1),
        bad("unequal places", ValueError, "M = 5 as in grad_output", gather_points_backward, features, indices, 9),
        bad("negative count", ValueError, "count must be at least 0", gather_points_backward, features[:, :, :4],
            indices, -1),
    ]  # fmt: skip


BAD_CALLS = _bad_calls()


def work(operator: str, args: tuple[Any, ...]) -> Work:
    features, indices = args[:2]
    channels = features.shape[2 if args[-1] else 1]
    elements = indices.numel() * channels
    if operator == _F:
        return Work(bytes_of((features, indices)) + elements * features.element_size(), 0)
    return Work(bytes_of((features, indices)) + len(indices) * args[2] * channels * features.element_size(), elements)


def baselines(operator: str) -> dict[str, Callable[..., Any]]:
    found: dict[str, Callable[..., Any]] = {"torch": _by_gather if operator == _F else _by_scatter}
    _ext = compiled_mmcv()
    if _ext is None or not torch.cuda.is_available():  # mmcv has no CPU kernel
        return found

    def mmcv_forward(features: Tensor, indices: Tensor, rows: bool) -> Tensor:
        batch, channels, count = features.shape
        out = features.new_zeros((batch, channels, indices.shape[1]))
        _ext.gather_points_forward(features, indices, out, b=batch, c=channels, n=count, npoints=indices.shape[1])
        return out

    def mmcv_backward(grad: Tensor, indices: Tensor, count: int, rows: bool) -> Tensor:
        batch, channels, places = grad.shape
        out = grad.new_zeros((batch, channels, count))
        _ext.gather_points_backward(grad, indices, out, b=batch, c=channels, n=count, npoints=places)
        return out

    return {**found, "mmcv": mmcv_forward if operator == _F else mmcv_backward}


def _by_gather(features: Tensor, indices: Tensor, rows: bool) -> Tensor:
    axis = 1 if rows else 2
    index = indices.clamp(min=0).long().unsqueeze(3 - axis)
    found = features.gather(axis, index.expand(*(features.shape[:1] + index.shape[1:2] + features.shape[2:] if rows else
                                               features.shape[:2] + index.shape[2:])))  # fmt: skip
    return found * (indices >= 0).unsqueeze(3 - axis)


def _by_scatter(grad: Tensor, indices: Tensor, count: int, rows: bool) -> Tensor:
    axis = 1 if rows else 2
    index = indices.clamp(min=0).long().unsqueeze(3 - axis).expand_as(grad)
    shape = (grad.shape[0], count, grad.shape[2]) if rows else (*grad.shape[:2], count)
    return grad.new_zeros(shape).scatter_add_(axis, index, grad * (indices >= 0).unsqueeze(3 - axis))
