"""The blocks of the backbones."""

from triops.compat.torchsparse.backbones.modules.blocks import (
    SparseConvBlock,
    SparseConvTransposeBlock,
    SparseResBlock,
)

__all__ = ["SparseConvBlock", "SparseConvTransposeBlock", "SparseResBlock"]
