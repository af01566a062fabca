"""Convolutions: `MinkowskiEngine.MinkowskiConvolution`."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

import triops
from triops.compat.minkowski_engine.common import MinkowskiModuleBase
from triops.compat.minkowski_engine.kernels import KernelGenerator
from triops.compat.minkowski_engine.keys import ConvolutionMode, CoordinateMapKey
from triops.compat.minkowski_engine.manager import CoordinateManager
from triops.compat.minkowski_engine.sparse_tensor import SparseTensor, map_key_of


def convolved(
    features: Tensor, kernel: Tensor, bias: Tensor | None, generator: KernelGenerator, in_key: CoordinateMapKey,
    out_key: CoordinateMapKey, manager: CoordinateManager, is_transpose: bool,
) -> Tensor:  # fmt: skip
    """Features [N, Cin] of one map, kernel [K, Cin, Cout] -> [A, Cout] of another; a key that is not set becomes that
    of the map that the kernel makes."""
    if not out_key.is_key_set():
        if is_transpose or generator.expand_coordinates:
            made = manager.expand(in_key, generator, is_transpose)
        else:
            made = manager.stride(in_key, generator.kernel_stride)
        out_key.set_key(made.map_key)
    book = manager.convolution_rulebook(in_key, out_key, generator, is_transpose)
    return triops.sparse_conv(features, kernel.permute(2, 0, 1), book, None if bias is None else bias.flatten())


class MinkowskiConvolutionFunction:
    is_transpose = False

    @classmethod
    def apply(
        cls, input_features: Tensor, kernel_weights: Tensor, kernel_generator: KernelGenerator,
        convolution_mode: ConvolutionMode, in_coordinate_map_key: CoordinateMapKey,
        out_coordinate_map_key: CoordinateMapKey | None = None, coordinate_manager: CoordinateManager | None = None,
    ) -> Tensor:  # fmt: skip
        if coordinate_manager is None:
            raise TypeError(f"{cls.__name__}: coordinate_manager must be given")
        out_key = out_coordinate_map_key or CoordinateMapKey(in_coordinate_map_key.get_coordinate_size())
        return convolved(
            input_features, kernel_weights, None, kernel_generator, in_coordinate_map_key, out_key, coordinate_manager,
            cls.is_transpose,
        )  # fmt: skip


class MinkowskiConvolutionTransposeFunction(MinkowskiConvolutionFunction):
    is_transpose = True


class MinkowskiConvolutionBase(MinkowskiModuleBase):
    """`kernel` is [K, Cin, Cout], or [Cin, Cout] for one offset without a stride; `bias` is [1, Cout]."""

    def __init__(
        self, in_channels: int, out_channels: int, kernel_size: Any = -1, stride: Any = 1, dilation: Any = 1,
        bias: bool = False, kernel_generator: KernelGenerator | None = None, is_transpose: bool = False,
        expand_coordinates: bool = False, convolution_mode: ConvolutionMode = ConvolutionMode.DEFAULT,
        dimension: int | None = -1,
    ) -> None:  # fmt: skip
        super().__init__()
        if dimension is None or dimension <= 0:
            raise ValueError(f"{type(self).__name__}: dimension must be positive, got {dimension}")
        if kernel_generator is None:
            kernel_generator = KernelGenerator(
                kernel_size, stride, dilation, expand_coordinates=expand_coordinates, dimension=dimension
            )
        else:
            kernel_generator.expand_coordinates = expand_coordinates
        self.in_channels, self.out_channels = in_channels, out_channels
        self.kernel_generator = kernel_generator
        self.is_transpose = is_transpose
        self.dimension = dimension
        self.convolution_mode = convolution_mode
        volume = kernel_generator.kernel_volume
        self.use_mm = volume == 1 and kernel_generator.requires_strided_coordinates
        shape = [in_channels, out_channels] if self.use_mm else [volume, in_channels, out_channels]
        self.kernel = nn.Parameter(torch.empty(shape))
        self.bias = nn.Parameter(torch.empty(1, out_channels)) if bias else None
        self.conv = MinkowskiConvolutionTransposeFunction() if is_transpose else MinkowskiConvolutionFunction()

    def forward(self, input: SparseTensor, coordinates: Any = None) -> SparseTensor:
        """coordinates: where results are wanted: a CoordinateMapKey, a SparseTensor, or int32 [A, 1 + D]."""
        if not isinstance(input, SparseTensor):
            raise TypeError(f"{type(self).__name__}: input must be a SparseTensor, got {type(input).__name__}")
        if self.dimension != input.D:
            raise ValueError(f"{type(self).__name__}: input must have {self.dimension} axes, got {input.D}")
        generator = self.kernel_generator
        if self.use_mm:
            out_key = input.coordinate_map_key
            out = nn.functional.linear(input.F, self.kernel.t(), None if self.bias is None else self.bias.flatten())
        else:
            steps = zip(input.tensor_stride, generator.kernel_stride, strict=True)
            stride = [max(t // s, 1) if self.is_transpose else t * s for t, s in steps]
            out_key = map_key_of(input, coordinates, stride)
            out = convolved(
                input.F, self.kernel, self.bias, generator, input.coordinate_map_key, out_key,
                input.coordinate_manager, self.is_transpose,
            )  # fmt: skip
        return input._like(out, out_key)

    def reset_parameters(self, is_transpose: bool = False) -> None:
        fan = (self.out_channels if is_transpose else self.in_channels) * self.kernel_generator.kernel_volume
        with torch.no_grad():
            for parameter in (self.kernel, self.bias):
                if parameter is not None:
                    parameter.uniform_(-1 / math.sqrt(fan), 1 / math.sqrt(fan))

    def __repr__(self) -> str:
        generator = self.kernel_generator
        return (
            f"{type(self).__name__}(in={self.in_channels}, out={self.out_channels}, "
            f"kernel_size={generator.kernel_size}, stride={generator.kernel_stride}, "
            f"dilation={generator.kernel_dilation})"
        )


class MinkowskiConvolution(MinkowskiConvolutionBase):
    """Results at the sites of the input, or at those of a strided map.

    >>> import torch
    >>> import triops.compat.minkowski_engine as ME
    >>> x = ME.SparseTensor(torch.ones(3, 1), torch.tensor([[0, -3], [0, 0], [0, 1]], dtype=torch.int32))
    >>> conv = ME.MinkowskiConvolution(1, 1, kernel_size=3, stride=2, dimension=1)
    >>> torch.nn.init.ones_(conv.kernel).shape
    torch.Size([3, 1, 1])
    >>> conv(x).C.tolist(), conv(x).F.tolist()
    ([[0, -4], [0, 0]], [[1.0], [2.0]])
    """

    def __init__(
        self, in_channels: int, out_channels: int, kernel_size: Any = -1, stride: Any = 1, dilation: Any = 1,
        bias: bool = False, kernel_generator: KernelGenerator | None = None, expand_coordinates: bool = False,
        convolution_mode: ConvolutionMode = ConvolutionMode.DEFAULT, dimension: int | None = None,
    ) -> None:  # fmt: skip
        super().__init__(
            in_channels, out_channels, kernel_size, stride, dilation, bias, kernel_generator, False,
            expand_coordinates, convolution_mode, dimension,
        )  # fmt: skip
        self.reset_parameters()


class MinkowskiConvolutionTranspose(MinkowskiConvolutionBase):
    """Back to the map of the finer stride, if there is one; else to the sites that the kernel makes."""

    def __init__(
        self, in_channels: int, out_channels: int, kernel_size: Any = -1, stride: Any = 1, dilation: Any = 1,
        bias: bool = False, kernel_generator: KernelGenerator | None = None, expand_coordinates: bool = False,
        convolution_mode: ConvolutionMode = ConvolutionMode.DEFAULT, dimension: int | None = None,
    ) -> None:  # fmt: skip
        super().__init__(
            in_channels, out_channels, kernel_size, stride, dilation, bias, kernel_generator, True,
            expand_coordinates, convolution_mode, dimension,
        )  # fmt: skip
        self.reset_parameters(True)


class MinkowskiGenerativeConvolutionTranspose(MinkowskiConvolutionBase):
    """A transposed convolution that always makes new sites: all that the kernel reaches."""

    def __init__(
        self, in_channels: int, out_channels: int, kernel_size: Any = -1, stride: Any = 1, dilation: Any = 1,
        bias: bool = False, kernel_generator: KernelGenerator | None = None,
        convolution_mode: ConvolutionMode = ConvolutionMode.DEFAULT, dimension: int | None = None,
    ) -> None:  # fmt: skip
        super().__init__(
            in_channels, out_channels, kernel_size, stride, dilation, bias, kernel_generator, True, True,
            convolution_mode, dimension,
        )  # fmt: skip
        self.reset_parameters(True)


__all__ = [
    "MinkowskiConvolution", "MinkowskiConvolutionBase", "MinkowskiConvolutionFunction",
    "MinkowskiConvolutionTranspose", "MinkowskiConvolutionTransposeFunction",
    "MinkowskiGenerativeConvolutionTranspose",
]  # fmt: skip
