"""`torchsparse.nn.functional`."""

from triops.compat.torchsparse.nn.functional.activation import leaky_relu, relu, silu
from triops.compat.torchsparse.nn.functional.conv import (
    ConvMode,
    Dataflow,
    build_kernel_map,
    conv3d,
    conv_config,
    convert_transposed_out_in_map,
    get_conv_mode,
    get_downsample_mode,
    get_kmap_mode,
    set_conv_mode,
    set_downsample_mode,
    set_kmap_mode,
    spupsample_generative,
    transpose_kernel_map,
)
from triops.compat.torchsparse.nn.functional.count import spcount
from triops.compat.torchsparse.nn.functional.crop import spcrop
from triops.compat.torchsparse.nn.functional.devoxelize import calc_ti_weights, spdevoxelize
from triops.compat.torchsparse.nn.functional.downsample import spdownsample
from triops.compat.torchsparse.nn.functional.hash import sphash
from triops.compat.torchsparse.nn.functional.pooling import global_avg_pool, global_max_pool
from triops.compat.torchsparse.nn.functional.query import sphashquery
from triops.compat.torchsparse.nn.functional.voxelize import spvoxelize

__all__ = [
    "ConvMode",
    "Dataflow",
    "build_kernel_map",
    "calc_ti_weights",
    "conv3d",
    "conv_config",
    "convert_transposed_out_in_map",
    "get_conv_mode",
    "get_downsample_mode",
    "get_kmap_mode",
    "global_avg_pool",
    "global_max_pool",
    "leaky_relu",
    "relu",
    "set_conv_mode",
    "set_downsample_mode",
    "set_kmap_mode",
    "silu",
    "spcount",
    "spcrop",
    "spdevoxelize",
    "spdownsample",
    "sphash",
    "sphashquery",
    "spupsample_generative",
    "spvoxelize",
    "transpose_kernel_map",
]
