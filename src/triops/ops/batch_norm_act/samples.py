"""Inputs of batch_norm_act and its gradient."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from triops._activations import ACTIVATIONS
from triops._dtypes import compute_dtype
from triops._sample import BadCall, Sample, Sized, Standard, Work, bytes_of
from triops.ops.batch_norm_act import batch_norm_act, reference

_Make = Callable[[torch.dtype], tuple[Any, ...]]


def _forward(
    rows: int, channels: int, activation: str = "relu", training: bool = True, affine: bool = True,
    running: bool = True, active: int | None = None, away: float = 0.0, odd: bool = False,
) -> _Make:  # fmt: skip
    """away: added to the features; odd: values that are no number or infinite among them."""

    def make(dtype: torch.dtype) -> tuple[Any, ...]:
        g = torch.Generator().manual_seed(rows + channels)
        real = compute_dtype(dtype)
        features = (torch.randn(rows, channels, generator=g, dtype=real) + away).to(dtype)
        if odd:
            features[::5, 0], features[1::5, 1] = math.nan, math.inf
        weight, bias, mean = torch.randn(3, channels, generator=g, dtype=real)
        variance = torch.rand(channels, generator=g, dtype=real) + 0.5
        counted = None if active is None else torch.tensor([active], dtype=torch.int32)
        return (
            features, weight if affine else None, bias if affine else None, mean if running else None,
            variance if running else None, counted, training, 0.1, 1e-3, activation, 0.1,
        )  # fmt: skip

    return make


def _backward(*args: Any, **options: Any) -> _Make:
    def make(dtype: torch.dtype) -> tuple[Any, ...]:
        forward = _forward(*args, **options)(dtype)
        features, weight, bias, _, _, active, training, _, _, activation, alpha = forward
        statistics = reference.batch_norm_act(*forward)[1]
        grad = torch.randn(features.shape, generator=torch.Generator().manual_seed(7)).to(dtype)
        return grad, features, weight, bias, statistics, active, training, activation, alpha

    return make


_CASES: list[tuple[str, str, tuple[int, int], dict[str, Any]]] = [
    ("6 rows", "general", (6, 3), {"activation": "none"}),
    *((f"90 rows, {a}", "general", (90, 20), {"activation": a}) for a in ACTIVATIONS),
    ("running statistics", "general", (70, 20), {"training": False}),
    ("60 of 90 rows", "general", (90, 16), {"active": 60, "activation": "leaky_relu"}),
    ("not affine, none running", "general", (90, 16), {"affine": False, "running": False}),
    ("2000 rows far from 0", "general", (2000, 5), {"away": 50.0, "activation": "none"}),
    ("1 row, 1 channel", "boundary", (1, 1), {}),
    ("no rows", "boundary", (0, 4), {}),
    ("no channels", "boundary", (4, 0), {}),
    ("none of 9 rows", "boundary", (9, 4), {"active": 0}),
    ("more active than rows", "boundary", (9, 4), {"active": 90}),
    ("values that are no numbers", "boundary", (30, 4), {"odd": True}),
]  # fmt: skip

SAMPLES = [
    Sample("batch_norm_act", "120000 rows, 64 channels", _forward(120_000, 64), "network", demo=True),
    Sample("batch_norm_act", "60000 of 90000 rows, 32 channels", _forward(90_000, 32, active=60_000), "network"),
    Sample("batch_norm_act_backward", "120000 rows, 64 channels", _backward(120_000, 64), "network"),
    *(Sample("batch_norm_act", n, _forward(*s, **o), scale) for n, scale, s, o in _CASES),  # type: ignore[arg-type]
    *(Sample("batch_norm_act_backward", n, _backward(*s, **o), scale) for n, scale, s, o in _CASES),  # type: ignore[arg-type]
    *(
        Sample(
            "batch_norm_act", f"gradients, {a}", _forward(7, 3, a, active=5 if a == "silu" else None), gradcheck=True
        )
        for a in ACTIVATIONS
    ),
]

SIZED = [
    Sized("batch_norm_act", "rows", lambda draw: _forward(draw(90_000), 64)),
    Sized("batch_norm_act", "active rows", lambda draw: _forward(draw(9000), 64, active=draw(9000))),
    Sized("batch_norm_act_backward", "rows", lambda draw: _backward(draw(20_000), 64)),
]

_X, _C = torch.zeros(5, 3), torch.zeros(3)


def _bad(what: str, error: type[Exception], match: str, *args: Any, **options: Any) -> BadCall:
    return BadCall(f"batch_norm_act: {what}", lambda: batch_norm_act(*args, **options), error, match)


BAD_CALLS = [
    _bad("rank 3", ValueError, r"features must have shape \[N, C\], got \[5, 3, 1\]", _X[..., None], _C, _C),
    _bad("integers", TypeError, "features must be float32.*got int64", _X.long(), _C, _C),
    _bad("a longer weight", ValueError, r"weight must have shape \[C\] with C = 3 as in features, got \[4\]", _X, _C,
         _C, torch.zeros(4)),
    _bad("no running values", ValueError, "must be tensors where not training", _X, None, None),
    _bad("half of the running values", ValueError, "both be tensors or both None", _X, _C, None, training=True),
    _bad("one row", ValueError, r"more than one row while training, got shape \[1, 3\]", _X[:1], _C, _C, training=True),
    _bad("an unknown activation", ValueError, "activation must be 'none', .* got 'tanh'", _X, _C, _C,
         activation="tanh"),
    _bad("active as a number", TypeError, "active must be a Tensor or None, got int", _X, _C, _C, active=3),
    _bad("active int64", TypeError, "active must be int32, got int64", _X, _C, _C, active=torch.tensor([3])),
    _bad("momentum NaN", ValueError, "momentum must be finite", _X, _C, _C, momentum=math.nan),
]  # fmt: skip

# a normalised value is a difference, and sums of gradients cancel
# The gradients of weight and bias are sums over all rows, whose terms cancel: twice the usual static threshold.
STANDARD = {
    "batch_norm_act": Standard(error_scale="row"),
    "batch_norm_act_backward": Standard(error_scale="row", float32=2e-5),
}


def work(operator: str, args: tuple[Any, ...]) -> Work:
    passes = 2 if operator == "batch_norm_act_backward" or args[6] else 1
    features: Tensor = args[0]
    read = bytes_of(args[:2] if operator == "batch_norm_act_backward" else args[:1])
    return Work(passes * read + bytes_of((features,)), 8 * features.numel())


def baselines(operator: str) -> dict[str, Callable[..., Any]]:
    return {"torch": getattr(reference, operator)}
