"""Names of `spconv.pytorch.pool`: the pools of `triops.nn`, and a maximum that starts at 0 as spconv's does."""

from triops import nn
from triops.ops.sparse_pool import sparse_max_pool_from_zero
from triops.spconv.pytorch.modules import SparseModule


class SparseMaxPool(SparseModule, nn.SparseMaxPool):
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


class SparseAvgPool(SparseModule, nn.SparseAvgPool):
    """See `triops.nn.SparseAvgPool`."""


class SparseAvgPool1d(SparseAvgPool, nn.SparseAvgPool1d):
    """See `triops.nn.SparseAvgPool`."""


class SparseAvgPool2d(SparseAvgPool, nn.SparseAvgPool2d):
    """See `triops.nn.SparseAvgPool`."""


class SparseAvgPool3d(SparseAvgPool, nn.SparseAvgPool3d):
    """See `triops.nn.SparseAvgPool`."""


class SparseAvgPool4d(SparseAvgPool, nn.SparseAvgPool4d):
    """See `triops.nn.SparseAvgPool`."""


class SparseGlobalMaxPool(SparseModule, nn.SparseGlobalMaxPool):
    """See `triops.nn.SparseGlobalMaxPool`."""


class SparseGlobalAvgPool(SparseModule, nn.SparseGlobalAvgPool):
    """See `triops.nn.SparseGlobalAvgPool`."""


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
