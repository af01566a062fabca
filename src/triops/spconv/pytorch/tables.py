"""Names of `spconv.pytorch.tables`."""

from triops.nn.sparse_modules import AddTable, ConcatTable, JoinTable

__all__ = ["AddTable", "ConcatTable", "JoinTable"]
