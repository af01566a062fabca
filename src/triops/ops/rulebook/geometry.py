"""The arithmetic of a convolution's geometry that all backends share, and the checks of its parameters."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from triops import _check

MAX_KERNEL_VOLUME = _check.MAX_OFFSETS
MAX_EXTENT = 2**31 - 1  # of one axis: coordinates are int32
MAX_BITMAP = 1 << 28  # places of a grid that a ranked bitmap is made for: 64 MiB
MAX_VOLUME = 2**62  # of the whole grid with its halo: a flat index is int64

Ints = int | Sequence[int]


def output_shape(
    spatial_shape: Sequence[int], kernel_size: Sequence[int], stride: Sequence[int], padding: Sequence[int],
    dilation: Sequence[int], out_padding: Sequence[int], subm: bool, transpose: bool,
) -> list[int]:  # fmt: skip
    """The grid of the outputs; an axis may come out below 1, which the checks refuse."""
    if subm:
        return list(spatial_shape)
    axes = zip(spatial_shape, kernel_size, stride, padding, dilation, out_padding, strict=True)
    if transpose:
        return [(size - 1) * s - 2 * p + d * (k - 1) + extra + 1 for size, k, s, p, d, extra in axes]
    return [(size + 2 * p - d * (k - 1) - 1) // s + 1 for size, k, s, p, d, _ in axes]


def bitmap_words(batch_size: int, shape: Sequence[int]) -> int:
    """The length of a grid's ranked bitmap; 0 where it is too large for one."""
    places = batch_size * math.prod(shape)
    return -(-places // 32) if places <= MAX_BITMAP else 0


def index_words(batch_size: int, lists: Sequence[Sequence[int]], transpose: bool) -> int:
    """`bitmap_words` of the output grid; lists: shape, kernel size, stride, padding, dilation, out_padding."""
    shape, kernel_size, stride, padding, dilation, out_padding = lists
    return bitmap_words(
        batch_size, output_shape(shape, kernel_size, stride, padding, dilation, out_padding, False, transpose)
    )


def submanifold_padding(kernel_size: Sequence[int], dilation: Sequence[int]) -> list[int]:
    return [k // 2 * d for k, d in zip(kernel_size, dilation, strict=True)]


def as_list(operator: str, name: str, value: Any, dimensions: int) -> list[int]:
    """An integer for every axis, or one for each: what the public functions take."""
    if type(value) is list and {*map(type, value)} == {int}:  # spares layers, which have such lists, the rest
        return list(value)
    number = _check.as_integer(value)
    if number is not None:
        return [number] * dimensions
    if isinstance(value, (Tensor, str, bytes)) or not isinstance(value, Sequence):
        raise TypeError(
            f"{operator}: {name} must be an integer or a sequence of {dimensions} integers, got {type(value).__name__}"
        )
    numbers = [_check.as_integer(element) for element in value]
    for element, number in zip(value, numbers, strict=True):
        if number is None:
            raise TypeError(f"{operator}: {name} must hold integers, got {type(element).__name__}")
    return numbers  # type: ignore[return-value]


def dimensions(indices: Tensor) -> int:
    """D, or 1 where indices is malformed, which the operator's own check will say."""
    return indices.shape[1] - 1 if isinstance(indices, Tensor) and indices.dim() == 2 else 1


def as_lists(
    operator: str, axes: int, spatial_shape: Ints, kernel_size: Ints, stride: Ints, padding: Ints, dilation: Ints,
    out_padding: Ints,
) -> list[list[int]]:  # fmt: skip
    return [
        as_list(operator, "spatial_shape", spatial_shape, axes),
        as_list(operator, "kernel_size", kernel_size, axes),
        as_list(operator, "stride", stride, axes),
        as_list(operator, "padding", padding, axes),
        as_list(operator, "dilation", dilation, axes),
        as_list(operator, "out_padding", out_padding, axes),
    ]


def _check_indices(operator: str, indices: Tensor) -> int:
    """indices [L, 1 + D] of an index dtype. -> D"""
    shape = indices.shape
    check = _check.Checker(operator)
    if len(shape) != 2 or not 2 <= shape[1] <= 5:
        check.fail(f"indices must have shape [L, 1 + D] with D from 1 to 4, got {list(shape)}")
    check.dtype("indices", indices, _check.INDICES)
    if _check.too_many(shape[0]):
        check.fail(f"indices must hold at most 2**30 sites, since rows are int32, got {shape[0]}")
    return shape[1] - 1


def _check_grid(check: _check.Checker, dimensions: int, batch_size: int, spatial_shape: Sequence[int]) -> None:
    check.at_least("batch_size", batch_size, 1)
    if batch_size > MAX_EXTENT:
        check.fail(f"batch_size must stay below 2**31, got {batch_size}")
    _check_list(check, "spatial_shape", spatial_shape, dimensions, 1)


def check_convolution(
    operator: str, indices: Tensor, batch_size: int, spatial_shape: Sequence[int], kernel_size: Sequence[int],
    stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int], out_padding: Sequence[int],
    subm: bool, transpose: bool,
) -> None:  # fmt: skip
    """Everything about a call that can be said without looking at the sites."""
    numbers = (
        operator, _check_indices(operator, indices), batch_size, tuple(spatial_shape), tuple(kernel_size),
        tuple(stride), tuple(padding), tuple(dilation), tuple(out_padding), subm, transpose,
    )  # fmt: skip
    try:
        _check_numbers_once(*numbers)
    except TypeError:  # symbolic integers cannot be remembered
        _check_numbers(*numbers)


def _check_numbers(
    operator: str, dimensions: int, batch_size: int, spatial_shape: tuple[int, ...], kernel_size: tuple[int, ...],
    stride: tuple[int, ...], padding: tuple[int, ...], dilation: tuple[int, ...], out_padding: tuple[int, ...],
    subm: bool, transpose: bool,
) -> None:  # fmt: skip
    check = _check.Checker(operator)
    _check_grid(check, dimensions, batch_size, spatial_shape)
    _check_list(check, "kernel_size", kernel_size, dimensions, 1)
    _check_list(check, "stride", stride, dimensions, 1)
    _check_list(check, "padding", padding, dimensions, 0)
    _check_list(check, "dilation", dilation, dimensions, 1)
    _check_list(check, "out_padding", out_padding, dimensions, 0)
    if math.prod(kernel_size) > MAX_KERNEL_VOLUME:
        check.fail(f"kernel_size may hold at most {MAX_KERNEL_VOLUME} offsets, got {list(kernel_size)}")
    if subm:
        if any(k % 2 == 0 for k in kernel_size):
            check.fail(f"kernel_size must be odd on every axis when subm is True, got {list(kernel_size)}")
        if any(s != 1 for s in stride):
            check.fail(f"stride must be 1 on every axis when subm is True, got {list(stride)}")
        if transpose:
            check.fail("transpose must be False when subm is True, got True")
    if any(e != 0 for e in out_padding) and not transpose:
        check.fail(f"out_padding must be 0 on every axis unless transpose is True, got {list(out_padding)}")
    shape = output_shape(spatial_shape, kernel_size, stride, padding, dilation, out_padding, subm, transpose)
    if any(size < 1 for size in shape):
        check.fail(f"the output shape would be empty: {shape}, from spatial_shape {list(spatial_shape)}")
    if any(size > MAX_EXTENT for size in shape):
        check.fail(f"the output shape must stay below 2**31 on every axis, got {shape}")
    halo = [(k - 1) * d for k, d in zip(kernel_size, dilation, strict=True)]
    volume = batch_size * math.prod(max(i, o) + h for i, o, h in zip(spatial_shape, shape, halo, strict=True))
    if volume >= MAX_VOLUME:
        check.fail(
            "batch_size times the grid, with what the kernel reaches around it, must stay below 2**62 sites, "
            f"got {batch_size} x {shape} and {halo}"
        )


_check_numbers_once = lru_cache(maxsize=1024)(_check_numbers)  # an error is not remembered, and raised each time


def _check_list(check: _check.Checker, name: str, values: Sequence[int], length: int, least: int) -> None:
    if len(values) != length:
        check.fail(f"{name} must have {length} entries, one for each axis of indices, got {list(values)}")
    if any(v < least for v in values):
        check.fail(f"{name} must be at least {least} on every axis, got {list(values)}")
    if any(v > MAX_EXTENT for v in values):
        check.fail(f"{name} must stay below 2**31 on every axis, got {list(values)}")


def checker(operator: str) -> Callable[..., None]:
    """`check_convolution` for one operator, as `_op.define` takes it."""

    def check(
        indices: Tensor, batch_size: int, spatial_shape: list[int], kernel_size: list[int], stride: list[int],
        padding: list[int], dilation: list[int], out_padding: list[int], subm: bool, transpose: bool,
    ) -> None:  # fmt: skip
        check_convolution(
            operator, indices, batch_size, spatial_shape, kernel_size, stride, padding, dilation, out_padding, subm,
            transpose,
        )  # fmt: skip

    return check


def refuse_outside_sites(operator: str, indices: Tensor, batch_size: int, spatial_shape: Sequence[int]) -> None:
    """With TRIOPS_CHECK=1 a site outside the grid is an error; else it is dropped without a word."""
    if not _check.strict():
        return
    limit = torch.tensor([batch_size, *spatial_shape], device=indices.device)
    outside = ((indices < 0) | (indices >= limit)).any(1).nonzero()
    if len(outside):
        row = int(outside[0])
        raise IndexError(
            f"{operator}: indices[{row}] = {indices[row].tolist()} is outside the grid "
            f"{[batch_size, *spatial_shape]} ({len(outside)} of {len(indices)} sites are)"
        )
