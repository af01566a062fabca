"""Names of `spconv.pytorch.tables`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from triops import nn
from triops.nn.sparse_tensor import SparseConvTensor
from triops.spconv.pytorch.functional import sparse_add
from triops.spconv.pytorch.modules import SparseModule


class _SameGrid:
    def input_spatial_size(self, out_size: Sequence[int]) -> Sequence[int]:
        """The grid of the inputs for a grid of the output: the same."""
        return out_size


class JoinTable(_SameGrid, SparseModule, nn.JoinTable):
    """See `triops.nn.JoinTable`."""


class AddTable(_SameGrid, SparseModule, nn.AddTable):
    """See `triops.nn.AddTable`."""


class ConcatTable(SparseModule, nn.ConcatTable):
    """See `triops.nn.ConcatTable`."""

    def input_spatial_size(self, out_size: Sequence[int]) -> Any:
        """The grid of the input for a grid of the outputs, as the first of its modules says it."""
        first: Any = self._modules["0"]
        return first.input_spatial_size(out_size)


class AddTableMisaligned(_SameGrid, SparseModule):
    """The sum of sparse tensors whose sites may differ; see `spconv.pytorch.functional.sparse_add`."""

    def forward(self, input: Sequence[SparseConvTensor]) -> SparseConvTensor:
        return sparse_add(*input)


__all__ = ["AddTable", "AddTableMisaligned", "ConcatTable", "JoinTable"]
