"""Names of `spconv.pytorch.identity`."""

from triops.nn.sparse_modules import Identity

__all__ = ["Identity"]
