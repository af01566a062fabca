"""Inputs of three_interpolate and three_interpolate_backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from triops._sample import BadCall, Sample, Sized, Standard, Work, bytes_of, compiled_mmcv
from triops.ops.three_interpolate import three_interpolate, three_interpolate_backward

_F, _B = "three_interpolate", "three_interpolate_backward"
_Make = Callable[[torch.dtype], tuple[Any, ...]]
_ONE = (torch.float32,)


def _random(
    batch: int, channels: int, count: int, places: int, neighbors: int = 3, rows: bool = False, lowest: int = 0,
    float32_weights: bool = False, near: bool = False,
) -> _Make:  # fmt: skip
    """`lowest` -1: some indices are no point. `near`: neighbors of neighboring places are close to each other."""

    def make(real: torch.dtype) -> tuple[Any, ...]:
        draw = torch.Generator().manual_seed(0)
        shape = (batch, count, channels) if rows else (batch, channels, count)
        features = torch.randn(shape, generator=draw).to(real)
        indices = torch.randint(lowest, max(count, lowest + 1), (batch, places, neighbors), generator=draw)
        if near:
            indices = (torch.arange(places)[:, None] * count // places + indices % 60) % count
        weights = torch.rand(batch, places, neighbors, generator=draw)
        weights = (weights / weights.sum(-1, keepdim=True)).to(torch.float32 if float32_weights else real)
        return features, indices.int(), weights, rows

    return make


def _backward(make: _Make, of_weights: bool = True) -> _Make:
    def made(dtype: torch.dtype) -> tuple[Any, ...]:
        features, indices, weights, rows = make(dtype)
        batch, places, _ = indices.shape
        shape = (batch, places, features.shape[2]) if rows else (batch, features.shape[1], places)
        grad = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)
        return grad, features, indices, weights, rows, of_weights

    return made


_CASES: list[tuple[str, _Make, Any, tuple[torch.dtype, ...]]] = [
    ("1 x 32 x 1024, 4096 places", _random(1, 32, 1024, 4096, near=True), "network", _ONE),
    ("planes", _random(2, 11, 40, 60), "general", Sample.dtypes),
    ("rows, float32 weights", _random(1, 5, 40, 70, 4, True, -1, True), "general",
     (torch.float32, torch.float16, torch.bfloat16)),
    ("129 channels", _random(1, 129, 7, 20), "boundary", _ONE),
    ("1 point", _random(2, 3, 1, 5), "boundary", _ONE),
    ("no points, no index", _random(1, 9, 0, 5, lowest=-1), "boundary", _ONE),
    ("no places", _random(2, 9, 6, 0), "boundary", _ONE),
    ("no neighbors", _random(2, 9, 6, 4, 0), "boundary", _ONE),
    ("no channels", _random(2, 0, 6, 5), "boundary", _ONE),
]  # fmt: skip
_LARGE = _random(8, 256, 4096, 16_384, near=True)
SAMPLES = [Sample(_F, name, make, scale, dtypes, demo=scale == "network") for name, make, scale, dtypes in _CASES]
SAMPLES += [
    Sample(_B, name, _backward(make), scale, dtypes, demo=scale == "network") for name, make, scale, dtypes in _CASES
]
SAMPLES += [
    Sample(_F, "8 x 256 x 4096, 16384 places", _LARGE, "network", (torch.float32, torch.float16), gpu_only=True),
    Sample(_B, "8 x 256 x 4096, 16384 places", _backward(_LARGE, False), "network", (torch.float32, torch.float16),
           gpu_only=True),
    Sample(_F, "gradient, planes", _random(2, 3, 5, 4, lowest=-1), dtypes=_ONE, gradcheck=True),
    Sample(_F, "gradient, rows", _random(1, 3, 5, 4, 2, True), dtypes=_ONE, gradcheck=True),
]  # fmt: skip

SIZED = [
    Sized(operator, "places", lambda draw, wrap=wrap: wrap(_random(draw(3), 9, draw(500), draw(3000))))  # type: ignore[misc]
    for operator, wrap in ((_F, lambda make: make), (_B, _backward))
]

STANDARD = {
    _F: Standard(error_scale="row", why_slower="features are read wherever an index points"),
    _B: Standard(error_scale="row", why_slower="gradients are added wherever an index points"),
}


def _bad_calls() -> list[BadCall]:
    features, indices, weights = torch.zeros(2, 3, 5), torch.zeros(2, 4, 3, dtype=torch.int32), torch.zeros(2, 4, 3)

    def bad(what: str, error: type[Exception], match: str, *args: Any, f: Any = three_interpolate) -> BadCall:
        return BadCall(f"{f.__name__}: {what}", lambda: f(*args), error, match)

    return [
        bad("features of rank 4", ValueError, r"features must have shape \[B, C, M\]", features[None], indices,
            weights),
        bad("indices of rank 2", ValueError, r"indices must have shape \[B, N, K\]", features, indices[0], weights),
        bad("unequal weights", ValueError, "K = 3 as in indices", features, indices, weights[:, :, :2]),
        bad("integer features", TypeError, "features must be float32", features.long(), indices, weights),
        bad("float indices", TypeError, "indices must be int32 or int64", features, weights, weights),
        bad("double weights", TypeError, "must have one dtype", features, indices, weights.double()),
        bad("a list", TypeError, "weights must be a Tensor, got list", features, indices, [1.0]),
        bad("another device", ValueError, "weights on meta", features, indices, weights.to("meta")),
        bad("an index too high", IndexError, r"indices must lie in -1\.\.4", features, indices + 5, weights),
        bad("rows: an index too low", IndexError, r"-1\.\.2", features[0], indices[0] - 2, weights[0]),
        bad("rows: indices of rank 3", ValueError, r"indices must have shape \[N, K\]", features[0], indices, weights),
        bad("unequal places", ValueError, "N = 4 as in indices", features, features, indices, weights,
            f=three_interpolate_backward),
    ]  # fmt: skip


BAD_CALLS = _bad_calls()


def work(operator: str, args: tuple[Any, ...]) -> Work:
    features, indices, weights = args[:3] if operator == _F else args[1:4]
    channels = features.shape[2 if args[3 if operator == _F else 4] else 1]
    outer = indices.shape[0] * indices.shape[1] * channels
    bytes_moved = bytes_of((features, indices, weights)) + outer * features.element_size()
    return Work(bytes_moved, 2 * outer * indices.shape[2])


def baselines(operator: str) -> dict[str, Callable[..., Any]]:
    found: dict[str, Callable[..., Any]] = {"torch": _by_gather} if operator == _F else {}
    _ext = compiled_mmcv()
    if _ext is None or not torch.cuda.is_available():  # mmcv has no CPU kernel
        return found

    def mmcv_forward(features: Tensor, indices: Tensor, weights: Tensor, rows: bool) -> Tensor:
        batch, channels, count = features.shape
        out = features.new_zeros((batch, channels, indices.shape[1]))
        _ext.three_interpolate_forward(features, indices, weights, out, b=batch, c=channels, m=count, n=out.shape[2])
        return out

    return {**found, "mmcv": mmcv_forward} if operator == _F else found


def _by_gather(features: Tensor, indices: Tensor, weights: Tensor, rows: bool) -> Tensor:
    """Gather, multiply, sum."""
    planes = features.mT if rows else features
    batch, channels, _ = planes.shape
    index = indices.clamp(min=0).long().view(batch, 1, -1).expand(-1, channels, -1)
    found = planes.gather(2, index).view(batch, channels, *indices.shape[1:])
    out = (found * (weights * (indices >= 0)).to(planes.dtype)[:, None]).sum(-1)
    return out.mT.contiguous() if rows else out
