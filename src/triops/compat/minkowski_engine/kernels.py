"""Shapes of kernels: `MinkowskiEngine.MinkowskiKernelGenerator`, and where the offsets of a kernel lie."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from triops.compat.minkowski_engine.common import convert_to_int_list
from triops.compat.minkowski_engine.keys import CoordinateMapKey, RegionType


def kernel_offsets(kernel_size: Sequence[int], region_type: int, first_at_zero: bool = False) -> Tensor:
    """int32 [K, D]: the offsets of a kernel in steps, in the order of its weights.

    A cube counts the first axis fastest; an axis of odd size is centred, one of even size begins at 0. A cross begins
    with its centre; every axis then has its steps forwards and those backwards.

    first_at_zero: axes of odd size begin at 0 too.

    >>> from triops.compat.minkowski_engine.kernels import RegionType, kernel_offsets
    >>> kernel_offsets([3, 2], RegionType.HYPER_CUBE).tolist()
    [[-1, 0], [0, 0], [1, 0], [-1, 1], [0, 1], [1, 1]]
    >>> kernel_offsets([5, 3], RegionType.HYPER_CROSS).tolist()
    [[0, 0], [1, 0], [2, 0], [-2, 0], [-1, 0], [0, 1], [0, -1]]
    """
    if region_type == RegionType.HYPER_CUBE:
        starts = [-(size // 2) if size % 2 and not first_at_zero else 0 for size in kernel_size]
        axes = [range(start, start + size) for start, size in zip(starts, kernel_size, strict=True)]
        steps = [offset[::-1] for offset in itertools.product(*reversed(axes))]
    elif region_type == RegionType.HYPER_CROSS:
        centre = (0,) * len(kernel_size)
        steps = [centre]
        for axis, size in enumerate(kernel_size):
            reach = size // 2
            for step in (*range(1, reach + 1), *range(-reach, 0)):
                steps.append((*centre[:axis], step, *centre[axis + 1 :]))
    else:
        raise NotImplementedError(
            f"MinkowskiEngine: kernels are of RegionType HYPER_CUBE or HYPER_CROSS, got {region_type!r}"
        )
    return torch.tensor(steps, dtype=torch.int32).view(-1, len(kernel_size))


def get_kernel_volume(
    region_type: int, kernel_size: Sequence[int], region_offset: Any = None, axis_types: Any = None, dimension: int = -1
) -> int:
    """How many offsets a kernel has."""
    if any(size <= 0 for size in kernel_size):
        raise ValueError(f"MinkowskiEngine: kernel_size must be positive, got {list(kernel_size)}")
    if axis_types is not None or (region_offset is not None and len(region_offset)):
        raise NotImplementedError("MinkowskiEngine: kernels with axis_types or region_offsets are not there")
    if region_type == RegionType.HYPER_CUBE:
        return math.prod(kernel_size)
    if region_type == RegionType.HYPER_CROSS:
        if any(size % 2 == 0 for size in kernel_size):
            raise ValueError(f"MinkowskiEngine: the sizes of a HYPER_CROSS must be odd, got {list(kernel_size)}")
        return sum(size - 1 for size in kernel_size) + 1
    raise NotImplementedError(
        f"MinkowskiEngine: kernels are of RegionType HYPER_CUBE or HYPER_CROSS, got {region_type!r}"
    )


def convert_region_type(
    region_type: RegionType, tensor_stride: Any, kernel_size: Any, up_stride: Any, dilation: Any, region_offset: Any,
    axis_types: Any, dimension: int, center: bool = True,
) -> tuple[RegionType, Tensor, int]:  # fmt: skip
    """-> region type, no offsets, volume. What concerns offsets of one's own is not there."""
    volume = get_kernel_volume(
        region_type, convert_to_int_list(kernel_size, dimension), region_offset, axis_types, dimension
    )
    return region_type, torch.empty(0, dtype=torch.int32), volume


class KernelRegion(NamedTuple):
    kernel_size: Any
    kernel_stride: Any
    kernel_dilation: Any
    region_type: RegionType
    offset: Any
    D: int


class KernelGenerator:
    """Size, stride, dilation and shape of a kernel, which a layer is given in place of these.

    >>> from triops.compat.minkowski_engine import KernelGenerator, RegionType
    >>> KernelGenerator(3, stride=2, region_type=RegionType.HYPER_CROSS, dimension=3).kernel_volume
    7
    """

    def __init__(
        self, kernel_size: Any = -1, stride: Any = 1, dilation: Any = 1, is_transpose: bool = False,
        region_type: RegionType = RegionType.HYPER_CUBE, region_offsets: Tensor | None = None,
        expand_coordinates: bool = False, axis_types: Any = None, dimension: int = -1,
    ) -> None:  # fmt: skip
        if dimension <= 0:
            raise ValueError(f"KernelGenerator: dimension must be positive, got {dimension}")
        self.cache: dict[tuple[int, ...], tuple[RegionType, Tensor, int]] = {}
        self.kernel_size = convert_to_int_list(kernel_size, dimension)
        self.kernel_stride = convert_to_int_list(stride, dimension)
        self.kernel_dilation = convert_to_int_list(dilation, dimension)
        self.region_type = RegionType(region_type)
        self.region_offsets = torch.empty(0, dtype=torch.int32)
        self.axis_types = axis_types
        self.dimension = dimension
        self.kernel_volume = get_kernel_volume(region_type, self.kernel_size, region_offsets, axis_types, dimension)
        self.requires_strided_coordinates = all(s == 1 for s in self.kernel_stride)  # the name says the opposite
        self.expand_coordinates = expand_coordinates

    def get_kernel(self, tensor_stride: Any, is_transpose: bool) -> tuple[RegionType, Tensor, int]:
        return self.region_type, self.region_offsets, self.kernel_volume

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(kernel_size={self.kernel_size}, kernel_stride={self.kernel_stride}, "
            f"kernel_dilation={self.kernel_dilation}, region_type={self.region_type!s}, "
            f"expand_coordinates={self.expand_coordinates}, dimension={self.dimension})"
        )


__all__ = [
    "CoordinateMapKey", "KernelGenerator", "KernelRegion", "RegionType", "convert_region_type", "get_kernel_volume",
    "kernel_offsets",
]  # fmt: skip
