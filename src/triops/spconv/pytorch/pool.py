"""Names of `spconv.pytorch.pool`."""

from triops.nn.sparse_pool import (
    SparseAvgPool,
    SparseAvgPool1d,
    SparseAvgPool2d,
    SparseAvgPool3d,
    SparseAvgPool4d,
    SparseGlobalAvgPool,
    SparseGlobalMaxPool,
    SparseMaxPool,
    SparseMaxPool1d,
    SparseMaxPool2d,
    SparseMaxPool3d,
    SparseMaxPool4d,
)

ALL_POOL_LAYERS = {
    SparseAvgPool, SparseAvgPool1d, SparseAvgPool2d, SparseAvgPool3d, SparseMaxPool, SparseMaxPool1d, SparseMaxPool2d,
    SparseMaxPool3d, SparseMaxPool4d,
}  # fmt: skip

__all__ = [
    "ALL_POOL_LAYERS",
    "SparseAvgPool",
    "SparseAvgPool1d",
    "SparseAvgPool2d",
    "SparseAvgPool3d",
    "SparseAvgPool4d",
    "SparseGlobalAvgPool",
    "SparseGlobalMaxPool",
    "SparseMaxPool",
    "SparseMaxPool1d",
    "SparseMaxPool2d",
    "SparseMaxPool3d",
    "SparseMaxPool4d",
]
