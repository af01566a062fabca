"""Names of `spconv.pytorch.core`."""

from triops.nn.sparse_tensor import IndiceData, SparseConvTensor

__all__ = ["IndiceData", "SparseConvTensor"]
