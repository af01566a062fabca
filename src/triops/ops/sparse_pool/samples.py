"""Inputs of the sparse poolings and of their backward operators."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from triops import scenes
from triops._check import FLOATS
from triops._sample import BadCall, Sample, Sized, Standard, Work, bytes_of
from triops.ops.rulebook.rulebook import Rulebook
from triops.ops.sparse_conv.samples import Build, hand_made, sparse, submanifold, with_gather
from triops.ops.sparse_pool import (
    reference,
    sparse_avg_pool,
    sparse_avg_pool_times_count,
    sparse_max_pool,
    sparse_max_pool_from_zero,
)

Make = Callable[[torch.dtype], tuple[Any, ...]]
_FORWARD = ("sparse_max_pool", "sparse_max_pool_from_zero", "sparse_avg_pool")
_OWN_GRADIENT = "sparse_avg_pool_times_count"  # not that of what it computes
_OPERATORS = (*_FORWARD, *(f"{name}_backward" for name in _FORWARD), _OWN_GRADIENT)


@cache
def _lidar() -> Rulebook:
    """The stride-2 case of the design documents."""
    sites = scenes.lidar_sites(149_100, (11, 360, 360), 4, reach=0.22, roughness=0.1)
    return Rulebook.sparse(sites, 4, [11, 360, 360], 3, stride=2, padding=[0, 1, 1])


def _pool(operator: str, build: Build, channels: int, *, values: str = "distinct") -> Make:
    def make(dtype: torch.dtype) -> tuple[Any, ...]:
        g = torch.Generator().manual_seed(0)
        rulebook = build()
        rows, outputs = rulebook.in_indices.shape[0], rulebook.gather.shape[1]
        if values == "distinct":  # far enough apart for a finite difference
            order = torch.randperm(rows * channels, generator=g)
            # none is 0, where a maximum that starts there has a kink
            features = (order.view(rows, channels) - rows * channels * 0.75 + 0.5) / max(rows * channels, 1)
        else:  # ties, and values that are not finite
            choices = torch.tensor([-1.0, 0.0, 0.0, 2.0, float("inf"), -float("inf"), float("nan")])
            features = choices[torch.randint(0, len(choices), (rows, channels), generator=g)]
        features = features.to(dtype)
        if not operator.endswith("backward"):
            return features, rulebook.gather, rulebook.scatter
        forward = getattr(reference, operator.removesuffix("_backward"))
        made = forward(features, rulebook.gather, rulebook.scatter)
        saved = (features, made) if isinstance(made, Tensor) else made[1:]
        return torch.randn(outputs, channels, generator=g).to(dtype), *saved, rulebook.scatter

    return make


_CASES: list[tuple[str, Build, int, str]] = [
    ("stride 2", sparse(30, 1, [4, 5, 6], 2), 3, "general"),
    ("overlapping, 2D, 12 sites", sparse(12, 1, [4, 5], padding=1), 2, "general"),
    ("overlapping, 2D", sparse(80, 2, [13, 17], stride=2, padding=1), 20, "general"),
    ("submanifold", submanifold(60, 1, [5, 6, 7]), 5, "general"),
    ("70 channels", sparse(50, 1, [5, 6, 7], padding=1), 70, "boundary"),
    ("one site", sparse(1, 1, [5, 6, 7], padding=1), 4, "boundary"),
    ("no sites", sparse(0, 1, [5, 6, 7], padding=1), 4, "boundary"),
    ("all vanish", lambda: Rulebook.sparse(torch.ones(3, 4, dtype=torch.int32), 2, [3, 3, 3], 1, stride=2), 4,
     "boundary"),
    ("no channels", sparse(30, 1, [4, 5, 6]), 0, "boundary"),
    ("outputs without inputs", hand_made([-1, -1, -1], [0, -1, 1], [-1, -1, -1], rows=2), 3, "boundary"),
    ("257 outputs", submanifold(257, 1, [6, 9, 8]), 2, "boundary"),
]  # fmt: skip

_DTYPES = {"general": FLOATS, "boundary": (torch.float32, torch.float16)}
SAMPLES = [
    Sample(operator, name, _pool(operator, build, channels), scale, _DTYPES[scale],  # type: ignore[arg-type]
           gradcheck="12 sites" in name and not operator.endswith("backward") and operator != _OWN_GRADIENT)
    for operator in _OPERATORS for name, build, channels, scale in _CASES
]  # fmt: skip
SAMPLES += [
    Sample(operator, "ties and not finite", _pool(operator, sparse(60, 1, [4, 5, 6]), 6, values="special"), "boundary")
    for operator in _OPERATORS
]
SAMPLES += [
    Sample(operator, "stride 2, 149100 sites, 16 channels", _pool(operator, _lidar, 16), "network",
           demo=operator == "sparse_max_pool")
    for operator in _OPERATORS
]  # fmt: skip


SIZED = [
    Sized(operator, "stride 2", lambda draw, operator=operator: _pool(  # type: ignore[misc]
        operator, sparse(draw(3000), draw(4), [9, 20, 20]), 16))
    for operator in _OPERATORS
]  # fmt: skip


def _bad_calls() -> list[BadCall]:
    build = sparse(30, 1, [4, 5, 6], 2)
    features = torch.zeros(30, 3)

    def of(name: str, function: Callable[..., Tensor]) -> list[BadCall]:
        def broken(value: int) -> Callable[[], Tensor]:
            def call() -> Tensor:
                book = build()
                gather = book.gather
                gather[1, 2] = value
                return function(features, with_gather(book, gather))

            return call

        calls: list[tuple[str, Callable[[], Any], type[Exception], str]] = [
            ("features as a list", lambda: function([1.0], build()), TypeError, "features must be a Tensor"),
            ("features of rank 3", lambda: function(features[None], build()), ValueError, r"shape \[N, C\]"),
            ("too many features", lambda: function(features.repeat(2, 1), build()), ValueError, "N = 60"),
            ("integer features", lambda: function(features.int(), build()), TypeError, "got int32"),
            ("no rulebook", lambda: function(features, None), TypeError, "rulebook must be a Rulebook"),
            ("a row behind the last", broken(30), IndexError, r"gather\[1, 2\] = 30 is neither"),
            ("a row before the first", broken(-7), IndexError, r"gather\[1, 2\] = -7"),
        ]
        return [BadCall(f"{name}: {what}", call, error, match) for what, call, error, match in calls]

    functions = (sparse_max_pool, sparse_max_pool_from_zero, sparse_avg_pool, sparse_avg_pool_times_count)
    return [bad for function in functions for bad in of(function.__name__, function)]


BAD_CALLS = _bad_calls()

_TABLE = "the whole table is walked for the few entries that meet, and rows are gathered in no order"
STANDARD = {name: Standard(why_slower=_TABLE) for name in _OPERATORS}


def work(operator: str, args: tuple[Any, ...]) -> Work:
    table = args[-1] if operator.endswith("backward") else args[1]
    pairs = int((table >= 0).sum())
    channels = args[0].shape[1]
    beside = channels * table.shape[1] * 4 if operator == "sparse_max_pool" else 0
    read = args[:-1] if operator == "sparse_max_pool_from_zero_backward" else args[:1]
    moved = bytes_of(read) + table.shape[1] * channels * args[0].element_size() + beside + 4 * pairs
    return Work(moved, pairs * channels)


def baselines(operator: str) -> dict[str, Callable[..., Any]]:
    found: dict[str, Callable[..., Any]] = {
        "sparse_max_pool": _padded_max,
        "sparse_max_pool_from_zero": lambda *args: _padded_max(*args)[0].clamp(min=0),
        "sparse_avg_pool": _padded_mean,
        "sparse_avg_pool_times_count": _padded_mean,
    }
    return {"torch": found[operator]} if operator in found else {}


def _padded_max(features: Tensor, gather: Tensor, scatter: Tensor) -> tuple[Tensor, Tensor]:
    """What one writes in torch: a row of -inf behind the features, and all offsets at once."""
    padded = torch.cat([features, features.new_full((1, features.shape[1]), -float("inf"))])
    best, argmax = padded[gather].max(0)
    return best, argmax.int()


def _padded_mean(features: Tensor, gather: Tensor, scatter: Tensor) -> tuple[Tensor, Tensor]:
    padded = torch.cat([features, features.new_zeros(1, features.shape[1])])
    count = (gather >= 0).sum(0, dtype=torch.int32)
    return padded[gather].sum(0) / count[:, None], count
