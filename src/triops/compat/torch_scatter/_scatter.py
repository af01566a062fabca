"""Reductions by an index per element: `torch_scatter.scatter_*`."""

from __future__ import annotations

import torch
from torch import Tensor

from triops.compat.torch_scatter.utils import broadcast


def scatter_sum(
    src: Tensor, index: Tensor, dim: int = -1, out: Tensor | None = None, dim_size: int | None = None
) -> Tensor:
    """The sum of the elements of each index along `dim`. Differentiable.

    Args:
        src: the elements.
        index: int64, of the shape of `src` or one that broadcasts to it (a vector lies along `dim`).
        out: what the sums are added to, in place.
        dim_size: the length of the result along `dim`; the highest index and one if not given.

    >>> import torch
    >>> from triops.compat.torch_scatter import scatter_sum
    >>> scatter_sum(torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]), torch.tensor([1, 0, 1]), dim=0)
    tensor([[3., 4.],
            [6., 8.]])
    """
    where = broadcast(index, src, dim)
    if out is None:
        out = src.new_zeros(_size(src, where, dim, dim_size))
    if index.dim() == 1:  # whole rows: nothing else has to be looked up per element
        return out.index_add_(dim, index, src)
    return out.scatter_add_(dim, where, src)


def scatter_add(
    src: Tensor, index: Tensor, dim: int = -1, out: Tensor | None = None, dim_size: int | None = None
) -> Tensor:
    """See `scatter_sum`."""
    return scatter_sum(src, index, dim, out, dim_size)


def scatter_mul(
    src: Tensor, index: Tensor, dim: int = -1, out: Tensor | None = None, dim_size: int | None = None
) -> Tensor:
    """The product of the elements of each index; 1 where there is none. Arguments as in `scatter_sum`."""
    where = broadcast(index, src, dim)
    if out is None:
        out = src.new_ones(_size(src, where, dim, dim_size))
    return out.scatter_reduce_(dim, where, src, "prod")


def scatter_mean(
    src: Tensor, index: Tensor, dim: int = -1, out: Tensor | None = None, dim_size: int | None = None
) -> Tensor:
    """The mean of the elements of each index; 0 where there is none. Integers are rounded down.

    With `out`, the sums are added to it before the division by the number of elements.
    """
    total = scatter_sum(src, index, dim, out, dim_size)
    axis = min(dim % src.dim(), index.dim() - 1)
    count = scatter_sum(torch.ones_like(index, dtype=src.dtype), index, axis, None, total.shape[dim])
    count = broadcast(count.clamp_(min=1), total, dim)
    if total.is_floating_point():
        return total.true_divide_(count)
    return total.div_(count, rounding_mode="floor")


def scatter_min(
    src: Tensor, index: Tensor, dim: int = -1, out: Tensor | None = None, dim_size: int | None = None
) -> tuple[Tensor, Tensor]:
    """The lowest element of each index, and where along `dim` it was: the first of equals, which gets the gradient.

    An index without elements gives 0, or with `out` what it holds, and `src.shape[dim]` for where. With `out`, an
    element has to be below what it holds. Arguments as in `scatter_sum`.
    """
    return extreme(src, broadcast(index, src, dim), dim, out, dim_size, "amin")


def scatter_max(
    src: Tensor, index: Tensor, dim: int = -1, out: Tensor | None = None, dim_size: int | None = None
) -> tuple[Tensor, Tensor]:
    """The highest element of each index; see `scatter_min`.

    >>> import torch
    >>> from triops.compat.torch_scatter import scatter_max
    >>> scatter_max(torch.tensor([3.0, 7.0, 7.0, 1.0]), torch.tensor([0, 2, 2, 0]))
    (tensor([3., 0., 7.]), tensor([0, 4, 1]))
    """
    return extreme(src, broadcast(index, src, dim), dim, out, dim_size, "amax")


def scatter(
    src: Tensor, index: Tensor, dim: int = -1, out: Tensor | None = None, dim_size: int | None = None,
    reduce: str = "sum",
) -> Tensor:  # fmt: skip
    """One of the reductions by its name: "sum" or "add", "mul", "mean", "min" or "max"."""
    if reduce in ("min", "max"):
        return (scatter_min if reduce == "min" else scatter_max)(src, index, dim, out, dim_size)[0]
    reductions = {"sum": scatter_sum, "add": scatter_sum, "mul": scatter_mul, "mean": scatter_mean}
    if reduce not in reductions:
        raise ValueError(f"scatter: reduce must be 'sum', 'add', 'mul', 'mean', 'min' or 'max', got {reduce!r}")
    return reductions[reduce](src, index, dim, out, dim_size)


def extreme(
    src: Tensor, where: Tensor, dim: int, out: Tensor | None, dim_size: int | None, reduce: str
) -> tuple[Tensor, Tensor]:
    """Lowest ("amin") or highest ("amax") elements and their places; `where` has the shape of `src`."""
    none = src.shape[dim]
    with torch.no_grad():
        best = src.new_zeros(_size(src, where, dim, dim_size)) if out is None else out.clone()
        start = best.clone()
        best.scatter_reduce_(dim, where, src, reduce, include_self=out is not None)
        place = _positions(src, dim)
        found = src == best.gather(dim, where)
        if out is not None:
            found &= src != start.gather(dim, where)  # what `out` holds already stays
        candidates = torch.where(found, place, none)
        arg = torch.full_like(best, none, dtype=torch.int64).scatter_reduce_(dim, where, candidates, "amin")
    # one more element behind the last answers for an index without any
    spare = src.new_zeros([1 if axis == dim % src.dim() else size for axis, size in enumerate(src.shape)])
    taken = torch.cat([src, spare], dim).gather(dim, arg)
    if out is None:
        return taken, arg
    return out.copy_(torch.where(arg == none, start, taken)), arg


def _positions(src: Tensor, dim: int) -> Tensor:
    """The place of each element along `dim`, in the shape of `src`."""
    shape = [1] * src.dim()
    shape[dim] = -1
    return torch.arange(src.shape[dim], device=src.device).view(shape).expand(src.shape)


def _size(src: Tensor, where: Tensor, dim: int, dim_size: int | None) -> list[int]:
    size = list(src.shape)
    if dim_size is not None:
        size[dim] = dim_size
    else:
        size[dim] = int(where.max()) + 1 if where.numel() else 0
    return size
