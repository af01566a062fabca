"""Residual blocks: `MinkowskiEngine.modules.resnet_block`."""

from __future__ import annotations

from typing import Any

from torch import nn

from triops.compat.minkowski_engine.convolution import MinkowskiConvolution
from triops.compat.minkowski_engine.nonlinearity import MinkowskiReLU
from triops.compat.minkowski_engine.normalization import MinkowskiBatchNorm


class _Residual(nn.Module):
    """What both blocks do: `branch`, plus the input or what `downsample` makes of it."""

    downsample: nn.Module | None
    relu: nn.Module

    def branch(self, x: Any) -> Any:
        raise NotImplementedError

    def forward(self, x: Any) -> Any:
        residual = x if self.downsample is None else self.downsample(x)
        out = self.branch(x)
        out += residual
        return self.relu(out)


class BasicBlock(_Residual):
    expansion = 1

    def __init__(
        self, inplanes: int, planes: int, stride: Any = 1, dilation: Any = 1, downsample: nn.Module | None = None,
        bn_momentum: float = 0.1, dimension: int = -1,
    ) -> None:  # fmt: skip
        super().__init__()
        self.conv1 = MinkowskiConvolution(
            inplanes, planes, kernel_size=3, stride=stride, dilation=dilation, dimension=dimension
        )
        self.norm1 = MinkowskiBatchNorm(planes, momentum=bn_momentum)
        self.conv2 = MinkowskiConvolution(planes, planes, kernel_size=3, dilation=dilation, dimension=dimension)
        self.norm2 = MinkowskiBatchNorm(planes, momentum=bn_momentum)
        self.relu = MinkowskiReLU(inplace=True)
        self.downsample = downsample

    def branch(self, x: Any) -> Any:
        out = self.relu(self.norm1(self.conv1(x)))
        return self.norm2(self.conv2(out))


class Bottleneck(_Residual):
    expansion = 4

    def __init__(
        self, inplanes: int, planes: int, stride: Any = 1, dilation: Any = 1, downsample: nn.Module | None = None,
        bn_momentum: float = 0.1, dimension: int = -1,
    ) -> None:  # fmt: skip
        super().__init__()
        wide = planes * self.expansion
        self.conv1 = MinkowskiConvolution(inplanes, planes, kernel_size=1, dimension=dimension)
        self.norm1 = MinkowskiBatchNorm(planes, momentum=bn_momentum)
        self.conv2 = MinkowskiConvolution(
            planes, planes, kernel_size=3, stride=stride, dilation=dilation, dimension=dimension
        )
        self.norm2 = MinkowskiBatchNorm(planes, momentum=bn_momentum)
        self.conv3 = MinkowskiConvolution(planes, wide, kernel_size=1, dimension=dimension)
        self.norm3 = MinkowskiBatchNorm(wide, momentum=bn_momentum)
        self.relu = MinkowskiReLU(inplace=True)
        self.downsample = downsample

    def branch(self, x: Any) -> Any:
        out = self.relu(self.norm1(self.conv1(x)))
        out = self.relu(self.norm2(self.conv2(out)))
        return self.norm3(self.conv3(out))


__all__ = ["BasicBlock", "Bottleneck"]
