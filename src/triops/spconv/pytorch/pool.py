"""Names of `spconv.pytorch.pool`: pools with the maxima, the means and the gradients that spconv's have."""

from typing import Any

from torch import Tensor

from triops import nn
from triops.nn.sparse_tensor import SparseConvTensor
from triops.ops.sparse_pool import sparse_avg_pool_times_count, sparse_max_pool_from_zero
from triops.spconv.pytorch.layer import Layer
from triops.spconv.pytorch.modules import SparseModule


class _Pool(Layer):
    IMPLICIT_GEMM_UP_TO = 128

    def forward(self, input: SparseConvTensor) -> SparseConvTensor:
        self._check_call(input)
        begun = self._begun(input)
        output: SparseConvTensor = super().forward(input)
        self._done(input, output, begun)
        return self._checked(output)

    def _recorded_parameters(self, input: SparseConvTensor) -> dict[str, Any]:
        return {**super()._recorded_parameters(input), "channels": input.features.shape[1]}


class SparseMaxPool(_Pool, nn.SparseMaxPool):
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

    RECORDED_AS = "SparseMaxPool"

    _pool = staticmethod(sparse_max_pool_from_zero)


class SparseMaxPool1d(SparseMaxPool, nn.SparseMaxPool1d):
    """See `SparseMaxPool`."""


class SparseMaxPool2d(SparseMaxPool, nn.SparseMaxPool2d):
    """See `SparseMaxPool`."""


class SparseMaxPool3d(SparseMaxPool, nn.SparseMaxPool3d):
    """See `SparseMaxPool`."""


class SparseMaxPool4d(SparseMaxPool, nn.SparseMaxPool4d):
    """See `SparseMaxPool`."""


class SparseAvgPool(_Pool, nn.SparseAvgPool):
    """See `triops.nn.SparseAvgPool`; the gradient is multiplied by the number of sites in a window, not divided by it.

    >>> import torch
    >>> import triops.spconv.pytorch as spconv
    >>> features = torch.tensor([[1.0], [3.0]], requires_grad=True)
    >>> x = spconv.SparseConvTensor(features, torch.tensor([[0, 0], [0, 1]], dtype=torch.int32), [4], 1)
    >>> pooled = spconv.SparseAvgPool1d(2)(x).features
    >>> pooled.sum().backward()
    >>> pooled.tolist(), features.grad.tolist()
    ([[2.0]], [[2.0], [2.0]])
    """

    RECORDED_AS = "SparseAvgPool"

    _pool = staticmethod(sparse_avg_pool_times_count)


class SparseAvgPool1d(SparseAvgPool, nn.SparseAvgPool1d):
    """See `SparseAvgPool`."""


class SparseAvgPool2d(SparseAvgPool, nn.SparseAvgPool2d):
    """See `SparseAvgPool`."""


class SparseAvgPool3d(SparseAvgPool, nn.SparseAvgPool3d):
    """See `SparseAvgPool`."""


class SparseAvgPool4d(SparseAvgPool, nn.SparseAvgPool4d):
    """See `SparseAvgPool`."""


class SparseGlobalMaxPool(SparseModule, nn.SparseGlobalMaxPool):
    """See `triops.nn.SparseGlobalMaxPool`."""


class SparseGlobalAvgPool(SparseModule, nn.SparseGlobalAvgPool):
    """The mean of channel 0 of each element of the batch: [B], as in spconv.

    `triops.nn.SparseGlobalAvgPool` gives the mean of every channel: [B, C].

    >>> import torch
    >>> import triops.spconv.pytorch as spconv
    >>> sites = torch.tensor([[0, 1], [0, 3]], dtype=torch.int32)
    >>> spconv.SparseGlobalAvgPool()(spconv.SparseConvTensor(torch.tensor([[4.0, 7.0], [2.0, 7.0]]), sites, [5], 1))
    tensor([3.])
    """

    def forward(self, input: SparseConvTensor) -> Tensor:
        return super().forward(input)[:, 0]


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
