"""What is made of several reductions: softmax, logsumexp and standard deviation by index."""

from __future__ import annotations

import torch
from torch import Tensor

from triops.compat.torch_scatter._scatter import scatter_max, scatter_sum
from triops.compat.torch_scatter.utils import broadcast


def scatter_softmax(src: Tensor, index: Tensor, dim: int = -1, dim_size: int | None = None) -> Tensor:
    """The softmax over the elements of each index, in the shape of `src`. Differentiable.

    >>> import torch
    >>> from triops.compat.torch_scatter import scatter_softmax
    >>> scatter_softmax(torch.tensor([0.0, 1.0, 0.0]), torch.tensor([0, 1, 0]))
    tensor([0.5000, 1.0000, 0.5000])
    """
    recentered, where = _recentered("scatter_softmax", src, index, dim, dim_size)
    powers = recentered.exp()
    return powers / scatter_sum(powers, where, dim, dim_size=dim_size).gather(dim, where)


def scatter_log_softmax(
    src: Tensor, index: Tensor, dim: int = -1, eps: float = 1e-12, dim_size: int | None = None
) -> Tensor:
    """The logarithm of `scatter_softmax`."""
    recentered, where = _recentered("scatter_log_softmax", src, index, dim, dim_size)
    total = scatter_sum(recentered.exp(), where, dim, dim_size=dim_size)
    return recentered - (total + eps).log().gather(dim, where)


def scatter_logsumexp(
    src: Tensor, index: Tensor, dim: int = -1, out: Tensor | None = None, dim_size: int | None = None,
    eps: float = 1e-12,
) -> Tensor:  # fmt: skip
    """The logarithm of the sum of exponentials of each index; 0 where there is no element, or what `out` holds."""
    if not src.is_floating_point():
        raise ValueError(f"scatter_logsumexp: src must be a float tensor, got {src.dtype}")
    where = broadcast(index, src, dim)
    size = list(src.shape)
    size[dim] = out.shape[dim] if out is not None else int(where.max()) + 1 if dim_size is None else dim_size
    with torch.no_grad():
        highest = src.new_full(size, -torch.inf).scatter_reduce_(dim, where, src, "amax")
    recentered = src - highest.gather(dim, where)
    recentered = torch.where(recentered.isnan(), -torch.inf, recentered)
    total = scatter_sum(recentered.exp(), where, dim, dim_size=size[dim])
    if out is not None:
        total = total + (out - highest).exp()
    result = (total + eps).log() + highest
    if out is None:
        return torch.where(result.isneginf(), 0.0, result)
    return out.copy_(torch.where(result.isfinite(), result, out))


def scatter_std(
    src: Tensor, index: Tensor, dim: int = -1, out: Tensor | None = None, dim_size: int | None = None,
    unbiased: bool = True,
) -> Tensor:  # fmt: skip
    """The standard deviation of the elements of each index, with a 1e-6 in the divisor as in torch_scatter."""
    dim %= src.dim()
    if out is not None:
        dim_size = out.shape[dim]
    where = broadcast(index, src, dim)
    total = scatter_sum(src, where, dim, dim_size=dim_size)
    axis = min(dim, index.dim() - 1)
    count = scatter_sum(torch.ones_like(index, dtype=src.dtype), index, axis, dim_size=total.shape[dim])
    count = broadcast(count, total, dim).clamp(min=1)
    squares = (src - (total / count).gather(dim, where)).square()
    spread = scatter_sum(squares, where, dim, out, dim_size)
    if unbiased:
        count = (count - 1).clamp(min=1)
    return (spread / (count + 1e-6)).sqrt()


def _recentered(name: str, src: Tensor, index: Tensor, dim: int, dim_size: int | None) -> tuple[Tensor, Tensor]:
    """Elements below the highest of their index, and the index in the shape of `src`."""
    if not src.is_floating_point():
        raise ValueError(f"{name}: src must be a float tensor, got {src.dtype}")
    where = broadcast(index, src, dim)
    highest = scatter_max(src, where, dim, dim_size=dim_size)[0]
    return src - highest.gather(dim, where), where
