"""SparseResNet21D, a backbone of detectors: the tensor after each of its five stages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from triops.compat.torchsparse.backbones.modules import SparseConvBlock, SparseResBlock
from triops.compat.torchsparse.tensor import SparseTensor

__all__ = ["SparseResNet21D"]


class SparseResNet(nn.ModuleList):
    """blocks: for each stage how many blocks, channels, kernel size and stride of the first."""

    def __init__(
        self, blocks: Sequence[tuple[int, int, Any, Any]], *, in_channels: int = 4, width_multiplier: float = 1.0
    ) -> None:
        super().__init__()
        self.blocks = blocks
        self.in_channels = in_channels
        self.width_multiplier = width_multiplier
        for count, channels, kernel, stride in blocks:
            width = int(channels * width_multiplier)
            stage: list[nn.Module] = [SparseConvBlock(in_channels, width, kernel, stride=stride)]
            stage += [SparseResBlock(width, width, kernel) for _ in range(count - 1)]
            self.append(nn.Sequential(*stage))
            in_channels = width

    def forward(self, x: SparseTensor) -> list[SparseTensor]:
        made = []
        for stage in self:
            x = stage(x)
            made.append(x)
        return made


class SparseResNet21D(SparseResNet):
    def __init__(self, **kwargs: Any) -> None:
        stages = [(3, 16, 3, 1), (3, 32, 3, 2), (3, 64, 3, 2), (3, 128, 3, 2), (1, 128, (1, 3, 1), (1, 2, 1))]
        super().__init__(blocks=stages, **kwargs)
