"""Names of `torch_scatter.utils`."""

from __future__ import annotations

from torch import Tensor


def broadcast(src: Tensor, other: Tensor, dim: int) -> Tensor:
    """`src` in the shape of `other`: a vector lies along `dim`, anything else gets its missing last axes."""
    if dim < 0:
        dim += other.dim()
    if src.dim() == 1:
        src = src.view(*([1] * dim), -1)
    return src.view(*src.shape, *([1] * (other.dim() - src.dim()))).expand(other.shape)


__all__ = ["broadcast"]
