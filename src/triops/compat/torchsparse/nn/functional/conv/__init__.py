"""Convolutions of sparse tensors."""

from triops.compat.torchsparse.nn.functional.conv import conv_config
from triops.compat.torchsparse.nn.functional.conv.conv import conv3d
from triops.compat.torchsparse.nn.functional.conv.conv_config import Dataflow
from triops.compat.torchsparse.nn.functional.conv.conv_mode import (
    ConvMode,
    get_conv_mode,
    get_downsample_mode,
    get_kmap_mode,
    set_conv_mode,
    set_downsample_mode,
    set_kmap_mode,
)
from triops.compat.torchsparse.nn.functional.conv.kmap import (
    build_kernel_map,
    convert_transposed_out_in_map,
    spupsample_generative,
    transpose_kernel_map,
)

__all__ = [
    "ConvMode",
    "Dataflow",
    "build_kernel_map",
    "conv3d",
    "conv_config",
    "convert_transposed_out_in_map",
    "get_conv_mode",
    "get_downsample_mode",
    "get_kmap_mode",
    "set_conv_mode",
    "set_downsample_mode",
    "set_kmap_mode",
    "spupsample_generative",
    "transpose_kernel_map",
]
