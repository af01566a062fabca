"""`MinkowskiEngineBackend._C`: the names of the compiled module that programs use."""

from __future__ import annotations

from triops.compat.minkowski_engine.diagnostics import (
    cuda_version,
    cudart_version,
    get_gpu_memory_info,
    is_cuda_available,
)
from triops.compat.minkowski_engine.keys import (
    BroadcastMode,
    ConvolutionMode,
    CoordinateMapKey,
    CoordinateMapType,
    CUDAKernelMapMode,
    GPUMemoryAllocatorType,
    MinkowskiAlgorithm,
    PoolingMode,
    RegionType,
)
from triops.compat.minkowski_engine.utils.quantization import (
    quantize_label_np,
    quantize_label_th,
    quantize_np,
    quantize_th,
)

__all__ = [
    "BroadcastMode", "CUDAKernelMapMode", "ConvolutionMode", "CoordinateMapKey", "CoordinateMapType",
    "GPUMemoryAllocatorType", "MinkowskiAlgorithm", "PoolingMode", "RegionType", "cuda_version", "cudart_version",
    "get_gpu_memory_info", "is_cuda_available", "quantize_label_np", "quantize_label_th", "quantize_np", "quantize_th",
]  # fmt: skip
