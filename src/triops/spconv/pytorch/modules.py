"""Names of `spconv.pytorch.modules`."""

import time
from typing import Any

import torch
from torch import Tensor, nn

import triops.nn as sparse
from triops.nn.sparse_conv import SparseConvolution
from triops.nn.sparse_modules import (
    SparseBatchNorm,
    SparseIdentity,
    SparseReLU,
    SparseSyncBatchNorm,
    assign_name_for_sparse_modules,
    is_spconv_module,
)
from triops.nn.sparse_tensor import SparseConvTensor
from triops.spconv.errors import refusal


class SparseModule(sparse.SparseModule):
    """See `triops.nn.SparseModule`; what is refused is an AssertionError too, as in spconv.

    A class of its own: mmdetection3d replaces functions in it.
    """

    def _fail(self, message: str, error: type[Exception] = ValueError) -> None:
        super()._fail(message, refusal(error))


class SparseSequential(SparseModule, sparse.SparseSequential):
    """See `triops.nn.SparseSequential`."""


class ToDense(SparseModule, sparse.ToDense):
    """See `triops.nn.ToDense`."""


class RemoveGrid(SparseModule, sparse.RemoveGrid):
    """See `triops.nn.RemoveGrid`."""


def is_sparse_conv(module: nn.Module) -> bool:
    return isinstance(module, SparseConvolution)


class PrintTensorMeta(nn.Module):
    """Returns its input; prints the smallest, the largest and the mean value of a tensor or of sparse features."""

    def forward(self, x: Tensor | SparseConvTensor) -> Tensor | SparseConvTensor:
        values = x if isinstance(x, Tensor) else x.features
        print(values.min(), values.max(), values.mean())
        return x


class PrintCurrentTime(nn.Module):
    """Returns its input; prints the seconds since it was made, or since a call with `reset`."""

    def __init__(self) -> None:
        super().__init__()
        self.first_time = time.time()

    def forward(self, x: Any, msg: str = "", reset: bool = False) -> Any:
        if reset:
            self.first_time = time.time()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        print(msg, time.time() - self.first_time)
        return x


__all__ = [
    "PrintCurrentTime",
    "PrintTensorMeta",
    "RemoveGrid",
    "SparseBatchNorm",
    "SparseIdentity",
    "SparseModule",
    "SparseReLU",
    "SparseSequential",
    "SparseSyncBatchNorm",
    "ToDense",
    "assign_name_for_sparse_modules",
    "is_sparse_conv",
    "is_spconv_module",
]
