"""Names of `spconv.pytorch.identity`."""

from collections.abc import Sequence

from triops import nn
from triops.spconv.pytorch.modules import SparseModule


class Identity(SparseModule, nn.Identity):
    """See `triops.nn.Identity`."""

    def input_spatial_size(self, out_size: Sequence[int]) -> Sequence[int]:
        """The grid of the input for a grid of the output: the same."""
        return out_size


__all__ = ["Identity"]
