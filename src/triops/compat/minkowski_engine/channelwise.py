"""A kernel for each channel: `MinkowskiEngine.MinkowskiChannelwiseConvolution`."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from triops.compat.minkowski_engine.common import MinkowskiModuleBase
from triops.compat.minkowski_engine.kernels import KernelGenerator
from triops.compat.minkowski_engine.rows import gathered_sum
from triops.compat.minkowski_engine.sparse_tensor import SparseTensor


class MinkowskiChannelwiseConvolution(MinkowskiModuleBase):
    """Every channel by itself: `kernel` is [K, C], `bias` is [1, C]. In plain torch, offset by offset."""

    def __init__(
        self, in_channels: int, kernel_size: Any = -1, stride: Any = 1, dilation: Any = 1, bias: bool = False,
        kernel_generator: KernelGenerator | None = None, dimension: int = -1,
    ) -> None:  # fmt: skip
        super().__init__()
        if dimension <= 0:
            raise ValueError(f"{type(self).__name__}: dimension must be positive, got {dimension}")
        self.kernel_generator = kernel_generator or KernelGenerator(kernel_size, stride, dilation, dimension=dimension)
        self.in_channels = in_channels
        self.dimension = dimension
        self.kernel_shape = self.kernel_generator.kernel_volume, in_channels
        self.kernel = nn.Parameter(torch.empty(self.kernel_shape))
        self.bias = nn.Parameter(torch.empty(1, in_channels)) if bias else None
        self.reset_parameters()

    def forward(self, input: SparseTensor, coords: Any = None) -> SparseTensor:
        """coords: of no account, as in MinkowskiEngine."""
        if self.dimension != input.D or input.shape[1] != self.in_channels:
            raise ValueError(
                f"{type(self).__name__}: input must have {self.dimension} axes and {self.in_channels} channels, got "
                f"{input.D} and {input.shape[1]}"
            )
        manager, generator = input.coordinate_manager, self.kernel_generator
        out_key = manager.stride(input.coordinate_map_key, generator.kernel_stride)
        book = manager.rulebook(
            input.coordinate_map_key, out_key, generator.kernel_size, generator.kernel_stride,
            generator.kernel_dilation, generator.region_type,
        )  # fmt: skip
        out = gathered_sum(input.F, book.tables.gather, self.kernel)
        return input._like(out if self.bias is None else out + self.bias, out_key)

    def reset_parameters(self, is_transpose: bool = False) -> None:
        bound = 1 / math.sqrt(self.in_channels * self.kernel_generator.kernel_volume)
        with torch.no_grad():
            for parameter in (self.kernel, self.bias):
                if parameter is not None:
                    parameter.uniform_(-bound, bound)

    def __repr__(self) -> str:
        generator = self.kernel_generator
        return (
            f"{type(self).__name__}(in={self.in_channels}, region_type={generator.region_type!s}, "
            f"kernel_size={generator.kernel_size}, stride={generator.kernel_stride}, "
            f"dilation={generator.kernel_dilation})"
        )


__all__ = ["MinkowskiChannelwiseConvolution"]
