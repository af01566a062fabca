"""Between the rows of a sparse tensor and dense grids: which row stands for a site, and the copies both ways."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from triops import _check, _op
from triops.ops.rulebook.geometry import MAX_EXTENT
from triops.ops.sparse_dense import reference

DTYPES = (*_check.FLOATS, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool)


def site_rows(indices: Tensor, batch_size: int, spatial_shape: Sequence[int]) -> Tensor:
    """For every site of the grids the lowest row of `indices` that names it, -1 where none does.

    Args:
        indices: int32 or int64 [N, 1 + D], D from 1 to 4: batch and position. Rows outside the grids name no site.
        batch_size, spatial_shape: the number of grids, and their D sizes.

    Returns:
        int32 [batch_size, *spatial_shape].

    >>> import torch, triops
    >>> triops.site_rows(torch.tensor([[0, 2], [1, 0], [0, 2], [-1, 1]]), 2, [3])
    tensor([[-1, -1,  0],
            [ 1, -1, -1]], dtype=torch.int32)
    """
    return _site_rows(indices, batch_size, spatial_shape)  # type: ignore[no-any-return]


def sparse_to_dense(features: Tensor, rows: Tensor, channels_first: bool = True) -> Tensor:
    """The rows of features at their sites, zeros at all others. Differentiable in features, any number of times.

    Args:
        features: [N, C] of any real dtype.
        rows: int32 [B, *spatial_shape], from `site_rows`: a row for each site, each row at one site at most. Numbers
            that are no row count as -1.
        channels_first: the order of the result.

    Returns:
        [B, C, *spatial_shape], or [B, *spatial_shape, C].

    >>> import torch, triops
    >>> triops.sparse_to_dense(torch.tensor([[5.0, 6.0]]), torch.tensor([[-1, 0]], dtype=torch.int32))
    tensor([[[0., 5.],
             [0., 6.]]])
    """
    return _sparse_to_dense(features, rows, channels_first)  # type: ignore[no-any-return]


def _check_site_rows(indices: Tensor, batch_size: int, spatial_shape: list[int]) -> None:
    c = _check.Checker("site_rows")
    if not 1 <= len(spatial_shape) <= 4:
        c.fail(f"spatial_shape must have from 1 to 4 entries, got {spatial_shape}")
    c.shape("indices", indices, "N", 1 + len(spatial_shape))
    c.dtype("indices", indices, _check.INDICES)
    if not isinstance(indices.shape[0], torch.SymInt) and indices.shape[0] > MAX_EXTENT:  # tracing: no condition of it
        c.fail(f"indices must have fewer than 2**31 rows, got {indices.shape[0]}")
    for name, size in (("batch_size", batch_size), *(("spatial_shape", size) for size in spatial_shape)):
        if not 0 <= size <= MAX_EXTENT:
            c.fail(f"{name} must be at least 0 and below 2**31, got {size}")


def _check_to_dense(features: Tensor, rows: Tensor, channels_first: bool) -> None:
    c = _check.Checker("sparse_to_dense")
    c.shape("features", features, "N", "C")
    c.dtype("features", features, DTYPES)
    _check_rows(c, rows)
    c.same_device(features=features, rows=rows)


def _check_from_dense(dense: Tensor, rows: Tensor, count: int, channels_first: bool) -> None:
    c = _check.Checker("sparse_from_dense")
    c.dtype("dense", dense, DTYPES)
    _check_rows(c, rows)
    pattern: list[int | str] = list(rows.shape)
    pattern.insert(1 if channels_first else rows.dim(), "C")
    c.shape("dense", dense, *pattern)
    c.same_device(dense=dense, rows=rows)
    c.at_least("count", count, 0)


def _check_rows(c: _check.Checker, rows: Tensor) -> None:
    if not 2 <= rows.dim() <= 5:
        c.fail(f"rows must have shape [B, *spatial_shape] with from 1 to 4 sizes, got {list(rows.shape)}")
    c.dtype("rows", rows, (torch.int32,))


def _fake_site_rows(indices: Tensor, batch_size: int, spatial_shape: list[int]) -> Tensor:
    return indices.new_empty((batch_size, *spatial_shape), dtype=torch.int32)


def dense_shape(rows: Tensor, channels: int, channels_first: bool) -> tuple[int, ...]:
    batch, *spatial = rows.shape
    return (batch, channels, *spatial) if channels_first else (batch, *spatial, channels)


def as_three(dense: Tensor, rows: Tensor, channels_first: bool) -> tuple[int, int, int]:
    """How many grids, sites per grid and channels."""
    return rows.shape[0], math.prod(rows.shape[1:]), dense.shape[1 if channels_first else -1]


def _fake_to_dense(features: Tensor, rows: Tensor, channels_first: bool) -> Tensor:
    return features.new_empty(dense_shape(rows, features.shape[1], channels_first))


def _fake_from_dense(dense: Tensor, rows: Tensor, count: int, channels_first: bool) -> Tensor:
    return dense.new_empty((count, dense.shape[1 if channels_first else -1]))


def _setup_to_dense(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    features, rows, ctx.channels_first = inputs
    ctx.count = features.shape[0]
    ctx.save_for_backward(rows)


def _backward_to_dense(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
    return _sparse_from_dense(grad, ctx.saved_tensors[0], ctx.count, ctx.channels_first), None, None


def _setup_from_dense(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, rows, _, ctx.channels_first = inputs
    ctx.save_for_backward(rows)


def _backward_from_dense(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
    return _sparse_to_dense(grad, ctx.saved_tensors[0], ctx.channels_first), None, None, None


_site_rows = _op.define(reference.site_rows, check=_check_site_rows, fake=_fake_site_rows)
_sparse_to_dense = _op.define(
    reference.sparse_to_dense, check=_check_to_dense, fake=_fake_to_dense,
    setup_context=_setup_to_dense, backward=_backward_to_dense,
)  # fmt: skip
_sparse_from_dense = _op.define(
    reference.sparse_from_dense, check=_check_from_dense, fake=_fake_from_dense,
    setup_context=_setup_from_dense, backward=_backward_from_dense,
)  # fmt: skip
