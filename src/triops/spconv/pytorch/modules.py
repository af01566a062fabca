"""Names of `spconv.pytorch.modules`."""

from torch import nn

from triops.nn.sparse_conv import SparseConvolution
from triops.nn.sparse_modules import (
    SparseBatchNorm,
    SparseIdentity,
    SparseModule,
    SparseReLU,
    SparseSequential,
    SparseSyncBatchNorm,
    assign_name_for_sparse_modules,
    is_spconv_module,
)


def is_sparse_conv(module: nn.Module) -> bool:
    return isinstance(module, SparseConvolution)


__all__ = [
    "SparseBatchNorm",
    "SparseIdentity",
    "SparseModule",
    "SparseReLU",
    "SparseSequential",
    "SparseSyncBatchNorm",
    "assign_name_for_sparse_modules",
    "is_sparse_conv",
    "is_spconv_module",
]
