"""Pooling of sparse tensors: over a sliding window, and over each whole grid."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F

from triops import _check
from triops.nn._window import Window
from triops.nn.sparse_modules import SparseModule
from triops.nn.sparse_tensor import SparseConvTensor
from triops.ops.rulebook import Rulebook, submanifold_neighbors
from triops.ops.rulebook.geometry import Ints
from triops.ops.sparse_pool import sparse_avg_pool, sparse_max_pool


class _Pool(Window):
    """The base of pools over a window.

    Args:
        ndim: number of spatial dimensions.
        kernel_size, stride, padding, dilation: an integer, or one for each axis; stride None means kernel_size.
        indice_key: as in a convolution: an inverse convolution with this key leads back to the input's sites.
        subm: keep the input's sites (stride 1).
        algo: taken for the sake of programs written for spconv, without effect.
        record_voxel_count: keep the largest number of output sites seen in a buffer.
        name: what errors call the layer.
    """

    _pool: Callable[[Tensor, Rulebook], Tensor]

    def __init__(
        self, ndim: int, kernel_size: Ints = 3, stride: Ints | None = 1, padding: Ints = 0, dilation: Ints = 1,
        indice_key: str | None = None, subm: bool = False, algo: Any = None, record_voxel_count: bool = False,
        name: str | None = None,
    ) -> None:  # fmt: skip
        super().__init__(
            ndim, kernel_size, kernel_size if stride is None else stride, padding, dilation, 0, subm, False,
            indice_key, record_voxel_count, name,
        )  # fmt: skip
        self.algo = algo

    def forward(self, input: SparseConvTensor) -> SparseConvTensor:
        self._check_input(input)
        rulebook, _ = self._rulebooks(input, lambda found: found)
        return self._output(input, type(self)._pool(input.features, rulebook), rulebook)

    if TYPE_CHECKING:
        __call__ = forward


class SparseMaxPool(_Pool):
    """The largest feature of the active sites in each window, channel by channel; see `triops.sparse_max_pool`.

    Inactive sites take no part, so negative features survive. A tie gives the gradient to the first site.
    """

    _pool = staticmethod(sparse_max_pool)


class SparseAvgPool(_Pool):
    """The mean feature of the active sites in each window; see `triops.sparse_avg_pool`."""

    _pool = staticmethod(sparse_avg_pool)


class _FixedPool(_Pool):
    """A pool of a fixed number of dimensions: `DIMENSIONS`. Stride defaults to the window."""

    DIMENSIONS = 0

    def __init__(
        self, kernel_size: Ints, stride: Ints | None = None, padding: Ints = 0, dilation: Ints = 1,
        indice_key: str | None = None, algo: Any = None, record_voxel_count: bool = False, name: str | None = None,
    ) -> None:  # fmt: skip
        super().__init__(
            self.DIMENSIONS, kernel_size, stride, padding, dilation, indice_key, algo=algo,
            record_voxel_count=record_voxel_count, name=name,
        )  # fmt: skip


class SparseMaxPool1d(_FixedPool, SparseMaxPool):
    """Max pooling on a line; see `SparseMaxPool`."""

    DIMENSIONS = 1


class SparseMaxPool2d(_FixedPool, SparseMaxPool):
    """Max pooling in the plane; see `SparseMaxPool`."""

    DIMENSIONS = 2


class SparseMaxPool3d(_FixedPool, SparseMaxPool):
    """Max pooling in space; see `SparseMaxPool`.

    >>> import torch
    >>> from triops.nn import SparseConvTensor
    >>> sites = torch.tensor([[0, 0, 0, 1], [0, 1, 1, 0]], dtype=torch.int32)
    >>> SparseMaxPool3d(2)(SparseConvTensor(torch.tensor([[-3.0], [-5.0]]), sites, [4, 4, 4], 1)).features
    tensor([[-3.]])
    """

    DIMENSIONS = 3


class SparseMaxPool4d(_FixedPool, SparseMaxPool):
    """Max pooling in four dimensions; see `SparseMaxPool`."""

    DIMENSIONS = 4


class SparseAvgPool1d(_FixedPool, SparseAvgPool):
    """Average pooling on a line; see `SparseAvgPool`."""

    DIMENSIONS = 1


class SparseAvgPool2d(_FixedPool, SparseAvgPool):
    """Average pooling in the plane; see `SparseAvgPool`."""

    DIMENSIONS = 2


class SparseAvgPool3d(_FixedPool, SparseAvgPool):
    """Average pooling in space; see `SparseAvgPool`."""

    DIMENSIONS = 3


class SparseAvgPool4d(_FixedPool, SparseAvgPool):
    """Average pooling in four dimensions; see `SparseAvgPool`."""

    DIMENSIONS = 4


class SparseGlobalMaxPool(SparseModule):
    """The largest feature of each element of the batch, channel by channel: [B, C]; 0 where it has no sites.

    Rows outside the grid do not count; of several rows at one site the lowest does.

    >>> import torch
    >>> from triops.nn import SparseConvTensor
    >>> x = SparseConvTensor(torch.tensor([[-4.0], [-2.0]]), torch.tensor([[0, 1], [0, 3]], dtype=torch.int32), [5], 2)
    >>> SparseGlobalMaxPool()(x)
    tensor([[-2.],
            [ 0.]])
    """

    def forward(self, input: SparseConvTensor) -> Tensor:
        features, batch_size = _features(self, input), input.batch_size
        element = _element(input)[:, None].expand_as(features)
        rows = torch.arange(features.shape[0], device=features.device)[:, None]
        shape = (batch_size + 1, features.shape[1])
        with torch.no_grad():
            largest = features.new_full(shape, -torch.inf).scatter_reduce(0, element, features, "amax")
            is_largest = (features == largest.gather(0, element)) | features.isnan()
            # The first of equals, so that one site alone gets the gradient; row N, of zeros, where there is none.
            candidates = torch.where(is_largest, rows, features.shape[0])
            none = torch.full(shape, features.shape[0], dtype=rows.dtype, device=rows.device)
            first = none.scatter_reduce(0, element, candidates, "amin")[:batch_size]
        return F.pad(features, (0, 0, 0, 1)).gather(0, first)

    if TYPE_CHECKING:
        __call__ = forward


class SparseGlobalAvgPool(SparseModule):
    """The mean feature of each element of the batch: [B, C]; 0 where it has no sites.

    Rows outside the grid do not count; of several rows at one site the lowest does.

    >>> import torch
    >>> from triops.nn import SparseConvTensor
    >>> x = SparseConvTensor(torch.tensor([[4.0], [2.0]]), torch.tensor([[0, 1], [0, 3]], dtype=torch.int32), [5], 2)
    >>> SparseGlobalAvgPool()(x)
    tensor([[3.],
            [0.]])
    """

    def forward(self, input: SparseConvTensor) -> Tensor:
        features, batch_size = _features(self, input), input.batch_size
        element = _element(input)
        wide = features if features.dtype == torch.float64 else features.float()  # half types would lose count
        total = wide.new_zeros((batch_size + 1, features.shape[1])).index_add(0, element, wide)
        count = wide.new_zeros(batch_size + 1).index_add(0, element, wide.new_ones(features.shape[:1]))
        return (total / count.clamp(min=1)[:, None])[:batch_size].to(features.dtype)

    if TYPE_CHECKING:
        __call__ = forward


def _features(pool: SparseModule, input: SparseConvTensor) -> Tensor:
    pool.require_sparse(input)
    _check.Checker(pool.label).dtype("features", input.features, _check.FLOATS)
    return input.features


def _element(input: SparseConvTensor) -> Tensor:
    """The batch element of each row; `batch_size`, a place that is cut off again, for rows that stand for no site.

    Those outside the grid, and all rows of a site but the lowest, meet nothing under a kernel of one offset.
    """
    met = submanifold_neighbors(input.indices, input.batch_size, input.spatial_shape, 1)[0]
    return torch.where(met >= 0, input.indices[:, 0].long(), input.batch_size)
