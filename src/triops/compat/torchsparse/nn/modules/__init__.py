"""The modules of `torchsparse.nn`."""

from triops.compat.torchsparse.nn.modules.activation import LeakyReLU, ReLU, SiLU
from triops.compat.torchsparse.nn.modules.bev import (
    ToBEVConvolution,
    ToBEVHeightCompression,
    ToBEVReduction,
    ToDenseBEVConvolution,
)
from triops.compat.torchsparse.nn.modules.conv import Conv3d
from triops.compat.torchsparse.nn.modules.crop import SparseCrop
from triops.compat.torchsparse.nn.modules.norm import BatchNorm, GroupNorm, InstanceNorm
from triops.compat.torchsparse.nn.modules.pooling import GlobalAvgPool, GlobalMaxPool

__all__ = [
    "BatchNorm",
    "Conv3d",
    "GlobalAvgPool",
    "GlobalMaxPool",
    "GroupNorm",
    "InstanceNorm",
    "LeakyReLU",
    "ReLU",
    "SiLU",
    "SparseCrop",
    "ToBEVConvolution",
    "ToBEVHeightCompression",
    "ToBEVReduction",
    "ToDenseBEVConvolution",
]
