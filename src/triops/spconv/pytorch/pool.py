"""Names of `spconv.pytorch.pool`: the pools of `triops.nn`, and a maximum that starts at 0 as spconv's does."""

from triops import nn
from triops.nn.sparse_pool import (
    SparseAvgPool,
    SparseAvgPool1d,
    SparseAvgPool2d,
    SparseAvgPool3d,
    SparseAvgPool4d,
    SparseGlobalAvgPool,
    SparseGlobalMaxPool,
)
from triops.ops.sparse_pool import sparse_max_pool_from_zero


class SparseMaxPool(nn.SparseMaxPool):
    """See `triops.nn.SparseMaxPool`; a window of negative features alone gives 0, and every input that equals the
    output of its window gets the gradient.

    >>> import torch
    >>> import triops.spconv.pytorch as spconv
    >>> sites = torch.tensor([[0, 0, 0, 1], [0, 2, 2, 0]], dtype=torch.int32)
    >>> x = spconv.SparseConvTensor(torch.tensor([[-3.0], [5.0]]), sites, [4, 4, 4], 1)
    >>> spconv.SparseMaxPool3d(2)(x).features
    tensor([[0.],
            [5.]])
    """

    _pool = staticmethod(sparse_max_pool_from_zero)


class SparseMaxPool1d(SparseMaxPool, nn.SparseMaxPool1d):
    """See `SparseMaxPool`."""


class SparseMaxPool2d(SparseMaxPool, nn.SparseMaxPool2d):
    """See `SparseMaxPool`."""


class SparseMaxPool3d(SparseMaxPool, nn.SparseMaxPool3d):
    """See `SparseMaxPool`."""


class SparseMaxPool4d(SparseMaxPool, nn.SparseMaxPool4d):
    """See `SparseMaxPool`."""


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
