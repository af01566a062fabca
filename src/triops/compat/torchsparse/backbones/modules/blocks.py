"""Convolution, norm and activation, and the residual block of two of them. Names of parameters are torchsparse's."""

from __future__ import annotations

import math
from typing import Any

from torch import nn

from triops.compat.torchsparse import nn as spnn
from triops.compat.torchsparse.tensor import SparseTensor
from triops.compat.torchsparse.utils.utils import make_ntuple

__all__ = ["SparseConvBlock", "SparseConvTransposeBlock", "SparseResBlock"]


def _layers(channels_in: int, channels_out: int, kernel: Any, **options: Any) -> list[nn.Module]:
    return [spnn.Conv3d(channels_in, channels_out, kernel, **options), spnn.BatchNorm(channels_out)]


class SparseConvBlock(nn.Sequential):
    def __init__(
        self, in_channels: int, out_channels: int, kernel_size: Any, stride: Any = 1, dilation: int = 1
    ) -> None:
        super().__init__(
            *_layers(in_channels, out_channels, kernel_size, stride=stride, dilation=dilation), spnn.ReLU(True)
        )


class SparseConvTransposeBlock(nn.Sequential):
    def __init__(
        self, in_channels: int, out_channels: int, kernel_size: Any, stride: Any = 1, dilation: int = 1
    ) -> None:
        options = {"stride": stride, "dilation": dilation, "transposed": True}
        super().__init__(*_layers(in_channels, out_channels, kernel_size, **options), spnn.ReLU(True))


class SparseResBlock(nn.Module):
    def __init__(
        self, in_channels: int, out_channels: int, kernel_size: Any, stride: Any = 1, dilation: int = 1
    ) -> None:
        super().__init__()
        self.main = nn.Sequential(
            *_layers(in_channels, out_channels, kernel_size, stride=stride, dilation=dilation),
            spnn.ReLU(True),
            *_layers(out_channels, out_channels, kernel_size, dilation=dilation),
        )
        self.shortcut: nn.Module = nn.Identity()
        if in_channels != out_channels or math.prod(make_ntuple(stride, ndim=3)) != 1:
            self.shortcut = nn.Sequential(*_layers(in_channels, out_channels, 1, stride=stride))
        self.relu = spnn.ReLU(True)

    def forward(self, x: SparseTensor) -> SparseTensor:
        made: SparseTensor = self.relu(self.main(x) + self.shortcut(x))
        return made
