"""SparseResUNet42, a network of segmentation: the tensors of its stem, four encoders and four decoders."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from triops.compat.torchsparse.backbones.modules import SparseConvBlock, SparseConvTransposeBlock, SparseResBlock
from triops.compat.torchsparse.operators import cat
from triops.compat.torchsparse.tensor import SparseTensor

__all__ = ["SparseResUNet42"]


class SparseResUNet(nn.Module):
    def __init__(
        self, stem_channels: int, encoder_channels: Sequence[int], decoder_channels: Sequence[int], *,
        in_channels: int = 4, width_multiplier: float = 1.0,
    ) -> None:  # fmt: skip
        super().__init__()
        self.stem_channels = stem_channels
        self.encoder_channels = encoder_channels
        self.decoder_channels = decoder_channels
        self.in_channels = in_channels
        self.width_multiplier = width_multiplier
        widths = [int(width_multiplier * c) for c in (stem_channels, *encoder_channels, *decoder_channels)]

        first, second = SparseConvBlock(in_channels, widths[0], 3), SparseConvBlock(widths[0], widths[0], 3)
        self.stem = nn.Sequential(*first, *second)
        self.encoders = nn.ModuleList()
        self.decoders = nn.ModuleList()
        for k in range(4):
            down = SparseConvBlock(widths[k], widths[k], 2, stride=2)
            self.encoders.append(nn.Sequential(down, *_residual(widths[k], widths[k + 1])))
        for k in range(4):
            up = SparseConvTransposeBlock(widths[k + 4], widths[k + 5], 2, stride=2)
            fuse = nn.Sequential(*_residual(widths[k + 5] + widths[3 - k], widths[k + 5]))
            self.decoders.append(nn.ModuleDict({"upsample": up, "fuse": fuse}))

    def forward(self, x: SparseTensor) -> list[SparseTensor]:
        made = [self.stem(x)]
        for encoder in self.encoders:
            made.append(encoder(made[-1]))
        for level, decoder in zip((3, 2, 1, 0), self.decoders, strict=True):
            parts: Any = decoder
            up = parts["upsample"](made[-1])
            made.append(parts["fuse"](cat([up, made[level]])))
        return made


def _residual(channels_in: int, channels_out: int) -> tuple[SparseResBlock, SparseResBlock]:
    return SparseResBlock(channels_in, channels_out, 3), SparseResBlock(channels_out, channels_out, 3)


class SparseResUNet42(SparseResUNet):
    def __init__(self, **kwargs: Any) -> None:
        super().__init__(32, [32, 64, 128, 256], [256, 128, 96, 96], **kwargs)
