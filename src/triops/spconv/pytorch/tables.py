"""Names of `spconv.pytorch.tables`."""

from collections.abc import Sequence

from triops.nn.sparse_modules import AddTable, ConcatTable, JoinTable, SparseModule
from triops.nn.sparse_tensor import SparseConvTensor
from triops.spconv.pytorch.functional import sparse_add


class AddTableMisaligned(SparseModule):
    """The sum of sparse tensors whose sites may differ; see `spconv.pytorch.functional.sparse_add`."""

    def forward(self, input: Sequence[SparseConvTensor]) -> SparseConvTensor:
        return sparse_add(*input)


__all__ = ["AddTable", "AddTableMisaligned", "ConcatTable", "JoinTable"]
