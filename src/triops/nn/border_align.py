"""BorderAlign as a module."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor, nn

from triops.ops.border_align import border_align


class BorderAlign(nn.Module):
    """See `triops.border_align`.

    >>> import torch, triops.nn
    >>> layer = triops.nn.BorderAlign(pool_size=10)
    >>> layer(torch.zeros(2, 8, 5, 6), torch.zeros(2, 3, 4)).shape
    torch.Size([2, 2, 3, 4])
    >>> layer
    BorderAlign(pool_size=10)
    """

    def __init__(self, pool_size: int) -> None:
        super().__init__()
        self.pool_size = pool_size

    def forward(self, input: Tensor, boxes: Tensor) -> Tensor:
        return border_align(input, boxes, self.pool_size)

    if TYPE_CHECKING:
        __call__ = forward

    def extra_repr(self) -> str:
        return f"pool_size={self.pool_size}"
