"""Inputs of site_rows, sparse_to_dense and sparse_from_dense."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from triops import scenes
from triops._sample import BadCall, Sample, Sized, Standard, Work, bytes_of
from triops.ops.sparse_dense import dense_shape, reference, site_rows, sparse_to_dense

_Make = Callable[[torch.dtype], tuple[Any, ...]]
INDEX = (torch.float32,)  # of operators without floats: one call is enough


def sites(count: int, batch_size: int, shape: Sequence[int], beyond: int = 0, seed: int = 0) -> Tensor:
    """Random rows int64 [N, 1 + D], some of them at one site, and up to `beyond` outside the grids on every side."""
    g = torch.Generator().manual_seed(seed)
    columns = [torch.randint(-beyond, size + beyond, (count,), generator=g) for size in (batch_size, *shape)]
    return torch.stack(columns, 1)


def _rows(
    count: int, batch_size: int, shape: Sequence[int], beyond: int = 0, index: torch.dtype = torch.int32
) -> _Make:
    return lambda dtype: (sites(count, batch_size, shape, beyond).to(index), batch_size, list(shape))


def _table(count: int, batch_size: int, shape: Sequence[int]) -> Tensor:
    return reference.site_rows(sites(count, batch_size, shape, 1), batch_size, list(shape))


def _to(
    count: int, batch_size: int, shape: Sequence[int], channels: int, first: bool = True, odd: bool = False
) -> _Make:
    def make(dtype: torch.dtype) -> tuple[Any, ...]:
        rows = _table(count, batch_size, shape)
        if odd:  # numbers that are no row
            rows = torch.where(rows % 3 == 0, rows + count, torch.where(rows % 3 == 1, -7, rows))
        return torch.randn(count, channels, generator=torch.Generator().manual_seed(1)).to(dtype), rows, first

    return make


def _from(count: int, batch_size: int, shape: Sequence[int], channels: int, first: bool = True) -> _Make:
    def make(dtype: torch.dtype) -> tuple[Any, ...]:
        rows = _table(count, batch_size, shape)
        size = dense_shape(rows, channels, first)
        return torch.randn(size, generator=torch.Generator().manual_seed(1)).to(dtype), rows, count, first

    return make


def _lidar(operator: str, channels: int, shape: tuple[int, int, int], count: int, batch: int) -> _Make:
    """What stands behind an encoder: a grid of few layers, half full."""

    def make(dtype: torch.dtype) -> tuple[Any, ...]:
        indices = scenes.lidar_sites(count, shape, batch, roughness=0.2)
        if operator == "site_rows":
            return indices, batch, list(shape)
        rows = reference.site_rows(indices, batch, list(shape))
        if operator == "sparse_to_dense":
            return torch.randn(len(indices), channels).to(dtype), rows, True
        return torch.randn(dense_shape(rows, channels, True)).to(dtype), rows, len(indices), True

    return make


_BEV = (128, (2, 200, 176), 12_000, 2)

SAMPLES = [
    Sample("site_rows", "24000 rows, 2 x 200 x 176", _lidar("site_rows", *_BEV), "network", INDEX),
    Sample("site_rows", "60 rows", _rows(60, 2, [3, 4, 5], 1), dtypes=INDEX),
    Sample("site_rows", "300 rows, one axis", _rows(300, 3, [50], 2, torch.int64), dtypes=INDEX),
    Sample("site_rows", "one row", _rows(1, 1, [1, 1]), "boundary", INDEX),
    Sample("site_rows", "four axes", _rows(90, 2, [2, 3, 2, 4], 1), "boundary", INDEX),
    Sample("site_rows", "no rows", _rows(0, 2, [3, 4]), "boundary", INDEX),
    Sample("sparse_to_dense", "12000 rows per grid, 128 channels", _lidar("sparse_to_dense", *_BEV), "network",
           demo=True),
    Sample("sparse_to_dense", "20 rows", _to(20, 2, [3, 5], 4), gradcheck=True),
    Sample("sparse_to_dense", "channels last", _to(20, 2, [3, 5], 4, False), gradcheck=True),
    Sample("sparse_to_dense", "three axes, 70 channels", _to(60, 2, [3, 5, 7], 70)),
    Sample("sparse_to_dense", "numbers that are no row", _to(40, 2, [3, 9], 3, odd=True), "boundary"),
    Sample("sparse_to_dense", "one channel", _to(1, 1, [1], 1), "boundary"),
    Sample("sparse_to_dense", "no rows", _to(0, 2, [3], 4), "boundary"),
    Sample("sparse_to_dense", "no channels", _to(5, 2, [3], 0), "boundary"),
    Sample("sparse_from_dense", "12000 rows per grid, 128 channels", _lidar("sparse_from_dense", *_BEV), "network"),
    Sample("sparse_from_dense", "20 rows", _from(20, 2, [3, 5], 4), gradcheck=True),
    Sample("sparse_from_dense", "channels last", _from(20, 2, [3, 5], 4, False), gradcheck=True),
    Sample("sparse_from_dense", "three axes, 70 channels", _from(60, 2, [3, 5, 7], 70)),
    Sample("sparse_from_dense", "one channel", _from(1, 1, [1], 1), "boundary"),
    Sample("sparse_from_dense", "no rows", _from(0, 2, [3], 4), "boundary"),
]  # fmt: skip

SIZED = [
    Sized("site_rows", "rows", lambda draw: _rows(draw(5000), draw(4), [draw(3), draw(60), draw(60)])),
    Sized("sparse_to_dense", "rows", lambda draw: _to(draw(500), draw(4), [draw(3), draw(60), draw(60)], 64)),
    Sized("sparse_from_dense", "rows", lambda draw: _from(draw(500), draw(4), [draw(3), draw(60), draw(60)], 64)),
]

_FEATURES, _INT = torch.zeros(2, 3), torch.zeros(1, 4, dtype=torch.int32)

BAD_CALLS = [
    BadCall("site_rows: float indices", lambda: site_rows(torch.zeros(3, 2), 1, [4]), TypeError,
            "indices must be int32 or int64, got float32"),
    BadCall("site_rows: too few columns", lambda: site_rows(_INT, 1, [4, 4]), ValueError,
            r"indices must have shape \[N, 3\], got \[1, 4\]"),
    BadCall("site_rows: no axis", lambda: site_rows(_INT, 1, []), ValueError, "from 1 to 4 entries"),
    BadCall("site_rows: a negative size", lambda: site_rows(_INT, 1, [4, -1, 4]), ValueError,
            "spatial_shape must be at least 0"),
    BadCall("sparse_to_dense: features of rank 1", lambda: sparse_to_dense(_FEATURES[0], _INT), ValueError,
            r"features must have shape \[N, C\], got \[3\]"),
    BadCall("sparse_to_dense: int64 rows", lambda: sparse_to_dense(_FEATURES, _INT.long()), TypeError,
            "rows must be int32, got int64"),
    BadCall("sparse_to_dense: rows of rank 1", lambda: sparse_to_dense(_FEATURES, _INT[0]), ValueError,
            r"rows must have shape \[B, \*spatial_shape\]"),
    BadCall("sparse_to_dense: complex features", lambda: sparse_to_dense(_FEATURES + 1j, _INT), TypeError,
            "features must be .*got complex64"),
]  # fmt: skip

STANDARD = {name: Standard("exact") for name in ("sparse_to_dense", "sparse_from_dense")}


def work(operator: str, args: tuple[Any, ...]) -> Work:
    if operator == "site_rows":
        return Work(bytes_of(args) + 4 * args[1] * math.prod(args[2]), 0)
    values, rows = args[:2]
    if operator == "sparse_to_dense":
        return Work(bytes_of((values, rows)) + rows.numel() * values.shape[1] * values.element_size(), 0)
    moved = args[2] * (values.numel() // max(rows.numel(), 1)) * values.element_size()
    return Work(bytes_of((rows,)) + 2 * moved, 0)


def baselines(operator: str) -> dict[str, Callable[..., Any]]:
    return {} if operator == "site_rows" else {"torch": getattr(reference, operator)}
