"""The grid of a voxelisation, which all backends share, and the checks of its parameters."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from torch import Tensor

from triops import _check

Numbers = Sequence[float]
MAX_CELLS = 2**62  # a flat cell number is int64
_INT32_MAX = 2**31 - 1
MAX_NUMBERS = 2**30  # points, and numbers in `voxels`: kernels count them in int32, in blocks
_LEAST_SIZE = 1e-37  # smaller ones are not normal numbers in float32


def grid_size(voxel_size: Numbers, point_range: Numbers) -> list[int]:
    """Cells along each axis: `round(range / size)`, halves away from zero, in float32 whatever the points are.

    So the grid is the same for every dtype, and that of mmcv. Its sizes are exact in float32.

    >>> grid_size([0.16, 0.16, 4], [0, -39.68, -3, 69.12, 39.68, 1])
    [432, 496, 1]
    """
    return list(_grid_size(tuple(voxel_size), tuple(point_range)))


@lru_cache(maxsize=1024)
def _grid_size(voxel_size: tuple[float, ...], point_range: tuple[float, ...]) -> tuple[int, ...]:
    axes = len(voxel_size)
    low, high, size = (np.array(v, np.float32) for v in (point_range[:axes], point_range[axes:], voxel_size))
    with np.errstate(over="ignore"):
        cells = (high - low) / size
    return tuple(math.floor(min(float(c), 1e18) + 0.5) for c in cells)


def as_numbers(operator: str, name: str, value: Any) -> list[float]:
    """A sequence or an array of numbers as plain floats; their number is checked by the operator."""
    if isinstance(value, np.ndarray) and value.ndim == 1:
        value = value.tolist()
    if type(value) in (list, tuple) and {*map(type, value)} == {float}:
        return list(value)
    if isinstance(value, (Tensor, str, bytes)) or not isinstance(value, Sequence):
        raise TypeError(f"{operator}: {name} must be a sequence of numbers, got {type(value).__name__}")
    found = [_check.as_float(element) for element in value]
    for element, number in zip(value, found, strict=True):
        if number is None:
            raise TypeError(f"{operator}: {name} must hold numbers, got {type(element).__name__}")
    return found  # type: ignore[return-value]


def check_points(operator: str, points: Tensor, voxel_size: Numbers, point_range: Numbers) -> None:
    check = _check.Checker(operator)
    if points.dim() != 2 or points.shape[1] < 3:
        remedy = "; a batch goes one cloud at a time" if points.dim() == 3 else ""
        check.fail(f"points must have shape [N, C] with C at least 3, got {list(points.shape)}{remedy}")
    check.dtype("points", points, _check.FLOATS)
    if points.shape[0] > MAX_NUMBERS:
        check.fail(f"points must be at most 2**30, since indices are int32, got {points.shape[0]}")
    check_grid(check, voxel_size, point_range)


def check_grid(check: _check.Checker, voxel_size: Numbers, point_range: Numbers) -> None:
    if len(voxel_size) != 3:
        check.fail(f"voxel_size must be three numbers, along x, y and z, got {len(voxel_size)}")
    if len(point_range) != 6:
        check.fail(f"point_range must be six numbers, lower x, y, z and upper x, y, z, got {len(point_range)}")
    for size in voxel_size:
        check.finite("voxel_size", size)
        check.at_least("voxel_size", size, _LEAST_SIZE)
    for bound in point_range:
        check.finite("point_range", bound)
    grid = grid_size(voxel_size, point_range)
    if not all(1 <= cells <= _INT32_MAX for cells in grid) or math.prod(grid) >= MAX_CELLS:
        check.fail(
            f"point_range must hold at least one voxel and at most 2**31 - 1 on every axis, and below 2**62 in all, "
            f"got {grid} along x, y and z"
        )


def check_voxelize(
    operator: str, points: Tensor, voxel_size: Numbers, point_range: Numbers, max_points: int, max_voxels: int
) -> None:
    check_points(operator, points, voxel_size, point_range)
    check = _check.Checker(operator)
    check.at_least("max_points", max_points, 1)
    check.at_least("max_voxels", max_voxels, 1)
    rows = min(max_voxels, points.shape[0])
    if rows * max_points * points.shape[1] > MAX_NUMBERS:
        check.fail(
            f"voxels must hold at most 2**30 numbers, got {rows} voxels of {max_points} points of "
            f"{points.shape[1]} numbers: lower max_points or max_voxels"
        )
