"""Residual blocks with channels weighted by the whole cloud: `MinkowskiEngine.modules.senet_block`."""

from __future__ import annotations

from typing import Any

from torch import nn

from triops.compat.minkowski_engine.broadcast import MinkowskiBroadcastMultiplication
from triops.compat.minkowski_engine.modules.resnet_block import BasicBlock, Bottleneck
from triops.compat.minkowski_engine.nonlinearity import MinkowskiReLU, MinkowskiSigmoid
from triops.compat.minkowski_engine.ops import MinkowskiLinear
from triops.compat.minkowski_engine.pooling import MinkowskiGlobalPooling


class SELayer(nn.Module):
    def __init__(self, channel: int, reduction: int = 16, D: int = -1) -> None:
        super().__init__()
        self.fc = nn.Sequential(
            MinkowskiLinear(channel, channel // reduction),
            MinkowskiReLU(inplace=True),
            MinkowskiLinear(channel // reduction, channel),
            MinkowskiSigmoid(),
        )
        self.pooling = MinkowskiGlobalPooling()
        self.broadcast_mul = MinkowskiBroadcastMultiplication()

    def forward(self, x: Any) -> Any:
        return self.broadcast_mul(x, self.fc(self.pooling(x)))


class SEBasicBlock(BasicBlock):
    def __init__(
        self, inplanes: int, planes: int, stride: Any = 1, dilation: Any = 1, downsample: nn.Module | None = None,
        reduction: int = 16, D: int = -1,
    ) -> None:  # fmt: skip
        super().__init__(inplanes, planes, stride, dilation, downsample, dimension=D)
        self.se = SELayer(planes, reduction=reduction, D=D)

    def branch(self, x: Any) -> Any:
        return self.se(super().branch(x))


class SEBottleneck(Bottleneck):
    def __init__(
        self, inplanes: int, planes: int, stride: Any = 1, dilation: Any = 1, downsample: nn.Module | None = None,
        D: int = 3, reduction: int = 16,
    ) -> None:  # fmt: skip
        super().__init__(inplanes, planes, stride, dilation, downsample, dimension=D)
        self.se = SELayer(planes * self.expansion, reduction=reduction, D=D)

    def branch(self, x: Any) -> Any:
        return self.se(super().branch(x))


__all__ = ["SEBasicBlock", "SEBottleneck", "SELayer"]
