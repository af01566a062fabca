"""MinkowskiEngine without a compiler: importing this module supplies `MinkowskiEngine`, unless it is installed.

Over triops' operators, on any device. The names are here too, to be used directly; docs/dropin/minkowski.md says what
differs.
"""

from triops.compat import _finder
from triops.compat.minkowski_engine import functional as MinkowskiFunctional
from triops.compat.minkowski_engine import modules, ops, utils
from triops.compat.minkowski_engine.broadcast import (
    MinkowskiBroadcast,
    MinkowskiBroadcastAddition,
    MinkowskiBroadcastConcatenation,
    MinkowskiBroadcastFunction,
    MinkowskiBroadcastMultiplication,
)
from triops.compat.minkowski_engine.channelwise import (
    MinkowskiChannelwiseConvolution,
)
from triops.compat.minkowski_engine.common import (
    MinkowskiModuleBase,
    convert_to_int_tensor,
)
from triops.compat.minkowski_engine.convolution import (
    MinkowskiConvolution,
    MinkowskiConvolutionFunction,
    MinkowskiConvolutionTranspose,
    MinkowskiConvolutionTransposeFunction,
    MinkowskiGenerativeConvolutionTranspose,
)
from triops.compat.minkowski_engine.diagnostics import (
    cuda_version,
    cudart_version,
    get_gpu_memory_info,
    is_cuda_available,
    print_diagnostics,
)
from triops.compat.minkowski_engine.interpolation import (
    MinkowskiInterpolation,
    MinkowskiInterpolationFunction,
)
from triops.compat.minkowski_engine.kernels import (
    KernelGenerator,
    KernelRegion,
    convert_region_type,
    get_kernel_volume,
)
from triops.compat.minkowski_engine.keys import (
    BroadcastMode,
    CoordinateMapKey,
    CoordinateMapType,
    GPUMemoryAllocatorType,
    MinkowskiAlgorithm,
    PoolingMode,
    RegionType,
)
from triops.compat.minkowski_engine.manager import (
    CoordinateManager,
    CoordsManager,
    set_gpu_allocator,
    set_memory_manager_backend,
)
from triops.compat.minkowski_engine.network import (
    MinkowskiNetwork,
)
from triops.compat.minkowski_engine.nonlinearity import (
    MinkowskiAdaptiveLogSoftmaxWithLoss,
    MinkowskiAlphaDropout,
    MinkowskiCELU,
    MinkowskiDropout,
    MinkowskiELU,
    MinkowskiGELU,
    MinkowskiHardshrink,
    MinkowskiHardsigmoid,
    MinkowskiHardswish,
    MinkowskiHardtanh,
    MinkowskiLeakyReLU,
    MinkowskiLogSigmoid,
    MinkowskiLogSoftmax,
    MinkowskiPReLU,
    MinkowskiReLU,
    MinkowskiReLU6,
    MinkowskiRReLU,
    MinkowskiSELU,
    MinkowskiSigmoid,
    MinkowskiSiLU,
    MinkowskiSinusoidal,
    MinkowskiSoftmax,
    MinkowskiSoftmin,
    MinkowskiSoftplus,
    MinkowskiSoftshrink,
    MinkowskiSoftsign,
    MinkowskiTanh,
    MinkowskiTanhshrink,
    MinkowskiThreshold,
)
from triops.compat.minkowski_engine.normalization import (
    MinkowskiBatchNorm,
    MinkowskiInstanceNorm,
    MinkowskiInstanceNormFunction,
    MinkowskiStableInstanceNorm,
    MinkowskiSyncBatchNorm,
)
from triops.compat.minkowski_engine.ops import (
    MinkowskiLinear,
    MinkowskiStackCat,
    MinkowskiStackMean,
    MinkowskiStackSum,
    MinkowskiStackVar,
    MinkowskiToDenseTensor,
    MinkowskiToFeature,
    MinkowskiToSparseTensor,
    cat,
    dense_coordinates,
    mean,
    to_sparse,
    to_sparse_all,
    var,
)
from triops.compat.minkowski_engine.ops import _sum as sum
from triops.compat.minkowski_engine.pooling import (
    MinkowskiAvgPooling,
    MinkowskiDirectMaxPoolingFunction,
    MinkowskiGlobalAvgPooling,
    MinkowskiGlobalMaxPooling,
    MinkowskiGlobalPooling,
    MinkowskiGlobalPoolingFunction,
    MinkowskiGlobalSumPooling,
    MinkowskiLocalPoolingFunction,
    MinkowskiLocalPoolingTransposeFunction,
    MinkowskiMaxPooling,
    MinkowskiPoolingTranspose,
    MinkowskiSumPooling,
)
from triops.compat.minkowski_engine.pruning import (
    MinkowskiPruning,
    MinkowskiPruningFunction,
)
from triops.compat.minkowski_engine.sparse_matrix import (
    MinkowskiSPMMAverageFunction,
    MinkowskiSPMMFunction,
    spmm,
)
from triops.compat.minkowski_engine.sparse_tensor import (
    SparseTensor,
)
from triops.compat.minkowski_engine.tensor import (
    SparseTensorOperationMode,
    SparseTensorQuantizationMode,
    clear_global_coordinate_manager,
    global_coordinate_manager,
    set_global_coordinate_manager,
    set_sparse_tensor_operation_mode,
    sparse_tensor_operation_mode,
)
from triops.compat.minkowski_engine.tensor_field import (
    TensorField,
)
from triops.compat.minkowski_engine.union import (
    MinkowskiUnion,
    MinkowskiUnionFunction,
)

__version__ = "0.5.4+triops"  # the MinkowskiEngine whose interface this follows, and who supplies it
MinkowskiOps = ops
__all__ = [
    "BroadcastMode",
    "CoordinateManager",
    "CoordinateMapKey",
    "CoordinateMapType",
    "CoordsManager",
    "GPUMemoryAllocatorType",
    "KernelGenerator",
    "KernelRegion",
    "MinkowskiAdaptiveLogSoftmaxWithLoss",
    "MinkowskiAlgorithm",
    "MinkowskiAlphaDropout",
    "MinkowskiAvgPooling",
    "MinkowskiBatchNorm",
    "MinkowskiBroadcast",
    "MinkowskiBroadcastAddition",
    "MinkowskiBroadcastConcatenation",
    "MinkowskiBroadcastFunction",
    "MinkowskiBroadcastMultiplication",
    "MinkowskiCELU",
    "MinkowskiChannelwiseConvolution",
    "MinkowskiConvolution",
    "MinkowskiConvolutionFunction",
    "MinkowskiConvolutionTranspose",
    "MinkowskiConvolutionTransposeFunction",
    "MinkowskiDirectMaxPoolingFunction",
    "MinkowskiDropout",
    "MinkowskiELU",
    "MinkowskiFunctional",
    "MinkowskiGELU",
    "MinkowskiGenerativeConvolutionTranspose",
    "MinkowskiGlobalAvgPooling",
    "MinkowskiGlobalMaxPooling",
    "MinkowskiGlobalPooling",
    "MinkowskiGlobalPoolingFunction",
    "MinkowskiGlobalSumPooling",
    "MinkowskiHardshrink",
    "MinkowskiHardsigmoid",
    "MinkowskiHardswish",
    "MinkowskiHardtanh",
    "MinkowskiInstanceNorm",
    "MinkowskiInstanceNormFunction",
    "MinkowskiInterpolation",
    "MinkowskiInterpolationFunction",
    "MinkowskiLeakyReLU",
    "MinkowskiLinear",
    "MinkowskiLocalPoolingFunction",
    "MinkowskiLocalPoolingTransposeFunction",
    "MinkowskiLogSigmoid",
    "MinkowskiLogSoftmax",
    "MinkowskiMaxPooling",
    "MinkowskiModuleBase",
    "MinkowskiNetwork",
    "MinkowskiOps",
    "MinkowskiPReLU",
    "MinkowskiPoolingTranspose",
    "MinkowskiPruning",
    "MinkowskiPruningFunction",
    "MinkowskiRReLU",
    "MinkowskiReLU",
    "MinkowskiReLU6",
    "MinkowskiSELU",
    "MinkowskiSPMMAverageFunction",
    "MinkowskiSPMMFunction",
    "MinkowskiSiLU",
    "MinkowskiSigmoid",
    "MinkowskiSinusoidal",
    "MinkowskiSoftmax",
    "MinkowskiSoftmin",
    "MinkowskiSoftplus",
    "MinkowskiSoftshrink",
    "MinkowskiSoftsign",
    "MinkowskiStableInstanceNorm",
    "MinkowskiStackCat",
    "MinkowskiStackMean",
    "MinkowskiStackSum",
    "MinkowskiStackVar",
    "MinkowskiSumPooling",
    "MinkowskiSyncBatchNorm",
    "MinkowskiTanh",
    "MinkowskiTanhshrink",
    "MinkowskiThreshold",
    "MinkowskiToDenseTensor",
    "MinkowskiToFeature",
    "MinkowskiToSparseTensor",
    "MinkowskiUnion",
    "MinkowskiUnionFunction",
    "PoolingMode",
    "RegionType",
    "SparseTensor",
    "SparseTensorOperationMode",
    "SparseTensorQuantizationMode",
    "TensorField",
    "cat",
    "clear_global_coordinate_manager",
    "convert_region_type",
    "convert_to_int_tensor",
    "cuda_version",
    "cudart_version",
    "dense_coordinates",
    "get_gpu_memory_info",
    "get_kernel_volume",
    "global_coordinate_manager",
    "is_cuda_available",
    "mean",
    "modules",
    "print_diagnostics",
    "set_global_coordinate_manager",
    "set_gpu_allocator",
    "set_memory_manager_backend",
    "set_sparse_tensor_operation_mode",
    "sparse_tensor_operation_mode",
    "spmm",
    "sum",
    "to_sparse",
    "to_sparse_all",
    "utils",
    "var",
]

_finder.install("MinkowskiEngine", "MinkowskiEngineBackend")
