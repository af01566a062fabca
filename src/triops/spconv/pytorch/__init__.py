"""Names of `spconv.pytorch`: see docs/sparse.md for what differs.

>>> import triops.spconv.pytorch as spconv
>>> spconv.SubMConv3d(4, 16, 3, padding=1, bias=False, indice_key="subm1")
SubMConv3d(4, 16, kernel_size=[3, 3, 3], padding=[1, 1, 1], indice_key='subm1', bias=False)
"""

from triops.nn.sparse_modules import RemoveGrid, ToDense
from triops.spconv.core import ConvAlgo
from triops.spconv.pytorch import conv, core, identity, modules, ops, pool, tables
from triops.spconv.pytorch.conv import (
    SparseConv1d,
    SparseConv2d,
    SparseConv3d,
    SparseConv4d,
    SparseConvolution,
    SparseConvTranspose1d,
    SparseConvTranspose2d,
    SparseConvTranspose3d,
    SparseConvTranspose4d,
    SparseInverseConv1d,
    SparseInverseConv2d,
    SparseInverseConv3d,
    SparseInverseConv4d,
    SubMConv1d,
    SubMConv2d,
    SubMConv3d,
    SubMConv4d,
)
from triops.spconv.pytorch.core import (
    IndiceData,
    SparseConvTensor,
)
from triops.spconv.pytorch.identity import (
    Identity,
)
from triops.spconv.pytorch.modules import (
    SparseBatchNorm,
    SparseIdentity,
    SparseModule,
    SparseReLU,
    SparseSequential,
    SparseSyncBatchNorm,
    assign_name_for_sparse_modules,
)
from triops.spconv.pytorch.pool import (
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
from triops.spconv.pytorch.tables import (
    AddTable,
    ConcatTable,
    JoinTable,
)

__all__ = [
    "AddTable",
    "ConcatTable",
    "ConvAlgo",
    "Identity",
    "IndiceData",
    "JoinTable",
    "RemoveGrid",
    "SparseAvgPool",
    "SparseAvgPool1d",
    "SparseAvgPool2d",
    "SparseAvgPool3d",
    "SparseAvgPool4d",
    "SparseBatchNorm",
    "SparseConv1d",
    "SparseConv2d",
    "SparseConv3d",
    "SparseConv4d",
    "SparseConvTensor",
    "SparseConvTranspose1d",
    "SparseConvTranspose2d",
    "SparseConvTranspose3d",
    "SparseConvTranspose4d",
    "SparseConvolution",
    "SparseGlobalAvgPool",
    "SparseGlobalMaxPool",
    "SparseIdentity",
    "SparseInverseConv1d",
    "SparseInverseConv2d",
    "SparseInverseConv3d",
    "SparseInverseConv4d",
    "SparseMaxPool",
    "SparseMaxPool1d",
    "SparseMaxPool2d",
    "SparseMaxPool3d",
    "SparseMaxPool4d",
    "SparseModule",
    "SparseReLU",
    "SparseSequential",
    "SparseSyncBatchNorm",
    "SubMConv1d",
    "SubMConv2d",
    "SubMConv3d",
    "SubMConv4d",
    "ToDense",
    "assign_name_for_sparse_modules",
    "conv",
    "core",
    "identity",
    "modules",
    "ops",
    "pool",
    "tables",
]
