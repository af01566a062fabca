"""Reductions of sorted elements: by index pointers (`segment_*_csr`) or by a sorted index (`segment_*_coo`)."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from triops._dtypes import compute_dtype
from triops.compat.torch_scatter._scatter import extreme, scatter_mean, scatter_sum


def segment_sum_csr(src: Tensor, indptr: Tensor, out: Tensor | None = None) -> Tensor:
    """The sums of `src[..., indptr[i] : indptr[i + 1], ...]`. Differentiable, and the same bits on every run.

    Args:
        src: the elements, reduced along the last axis that `indptr` has.
        indptr: int64 [S + 1], ascending; with more axes it broadcasts to the first ones of `src`.
        out: what the sums are written to.

    >>> import torch
    >>> from triops.compat.torch_scatter import segment_csr
    >>> segment_csr(torch.tensor([1.0, 2.0, 4.0, 8.0]), torch.tensor([0, 1, 1, 4]), reduce="sum")
    tensor([ 1.,  0., 14.])
    """
    if indptr.dim() == 1 and indptr.shape[0] and src.is_floating_point():
        wide = src.to(compute_dtype(src.dtype))
        total = torch.segment_reduce(wide, "sum", offsets=indptr, axis=0, initial=0, unsafe=True).to(src.dtype)
    else:
        where, dim, segments = _by_pointers(src, indptr)
        total = scatter_sum(src, where, dim, None, segments + 1).narrow(dim, 0, segments)
    return total if out is None else out.copy_(total)


def segment_add_csr(src: Tensor, indptr: Tensor, out: Tensor | None = None) -> Tensor:
    """See `segment_sum_csr`."""
    return segment_sum_csr(src, indptr, out)


def segment_mean_csr(src: Tensor, indptr: Tensor, out: Tensor | None = None) -> Tensor:
    """As `segment_sum_csr`, divided by the number of elements; 0 for a segment without any. Integers round down."""
    total = segment_sum_csr(src, indptr)
    count = indptr.diff(dim=-1).clamp(min=1)
    count = count.view(*count.shape, *([1] * (src.dim() - count.dim())))
    mean = total / count if src.is_floating_point() else total.div(count, rounding_mode="floor")
    mean = mean.to(src.dtype)
    return mean if out is None else out.copy_(mean)


def segment_min_csr(src: Tensor, indptr: Tensor, out: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The lowest element of each segment and its place; 0 and the number of elements for a segment without any."""
    return _extreme_csr(src, indptr, out, "amin")


def segment_max_csr(src: Tensor, indptr: Tensor, out: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The highest element of each segment and its place; see `segment_min_csr`."""
    return _extreme_csr(src, indptr, out, "amax")


def segment_csr(src: Tensor, indptr: Tensor, out: Tensor | None = None, reduce: str = "sum") -> Tensor:
    """One of the reductions by its name: "sum" or "add", "mean", "min" or "max"."""
    if reduce in ("sum", "add"):
        return segment_sum_csr(src, indptr, out)
    if reduce == "mean":
        return segment_mean_csr(src, indptr, out)
    if reduce in ("min", "max"):
        return (segment_min_csr if reduce == "min" else segment_max_csr)(src, indptr, out)[0]
    raise ValueError(f"segment_csr: reduce must be 'sum', 'add', 'mean', 'min' or 'max', got {reduce!r}")


def gather_csr(src: Tensor, indptr: Tensor, out: Tensor | None = None) -> Tensor:
    """Each element of `src` as often as its segment is long: the reverse of `segment_csr`. Differentiable.

    >>> import torch
    >>> from triops.compat.torch_scatter import gather_csr
    >>> gather_csr(torch.tensor([5.0, 7.0, 9.0]), torch.tensor([0, 1, 1, 4]))
    tensor([5., 9., 9., 9.])
    """
    dim = indptr.dim() - 1
    length = out.shape[dim] if out is not None else int(indptr.flatten()[-1]) if indptr.numel() else 0
    lead = indptr.expand(*src.shape[:dim], indptr.shape[-1])
    where = _segment_of_place(lead, length)
    where = where.view(*where.shape, *([1] * (src.dim() - where.dim()))).expand(
        *where.shape, *src.shape[dim + 1 :]
    )  # fmt: skip
    found = src.gather(dim, where.clamp(0, max(src.shape[dim] - 1, 0)))
    return found if out is None else out.copy_(found)


def segment_sum_coo(src: Tensor, index: Tensor, out: Tensor | None = None, dim_size: int | None = None) -> Tensor:
    """The sum of the elements of each index along the last axis that `index` has; it need not be sorted here.

    Args:
        src: the elements.
        index: int64 [N]; with more axes it broadcasts to the first ones of `src`.
        out: what the sums are added to, in place.
        dim_size: the length of the result; the highest index and one if not given.
    """
    where, dim = _by_index(src, index)
    return scatter_sum(src, index if index.dim() == 1 else where, dim, out, dim_size)


def segment_add_coo(src: Tensor, index: Tensor, out: Tensor | None = None, dim_size: int | None = None) -> Tensor:
    """See `segment_sum_coo`."""
    return segment_sum_coo(src, index, out, dim_size)


def segment_mean_coo(src: Tensor, index: Tensor, out: Tensor | None = None, dim_size: int | None = None) -> Tensor:
    """The mean of the elements of each index; 0 where there is none. Arguments as in `segment_sum_coo`."""
    where, dim = _by_index(src, index)
    return scatter_mean(src, index if index.dim() == 1 else where, dim, out, dim_size)


def segment_min_coo(
    src: Tensor, index: Tensor, out: Tensor | None = None, dim_size: int | None = None
) -> tuple[Tensor, Tensor]:
    """The lowest element of each index, and where it was; see `scatter_min`."""
    where, dim = _by_index(src, index)
    return extreme(src, where, dim, out, dim_size, "amin")


def segment_max_coo(
    src: Tensor, index: Tensor, out: Tensor | None = None, dim_size: int | None = None
) -> tuple[Tensor, Tensor]:
    """The highest element of each index, and where it was; see `scatter_max`."""
    where, dim = _by_index(src, index)
    return extreme(src, where, dim, out, dim_size, "amax")


def segment_coo(
    src: Tensor, index: Tensor, out: Tensor | None = None, dim_size: int | None = None, reduce: str = "sum"
) -> Tensor:
    """One of the reductions by its name: "sum" or "add", "mean", "min" or "max"."""
    if reduce in ("sum", "add"):
        return segment_sum_coo(src, index, out, dim_size)
    if reduce == "mean":
        return segment_mean_coo(src, index, out, dim_size)
    if reduce in ("min", "max"):
        return (segment_min_coo if reduce == "min" else segment_max_coo)(src, index, out, dim_size)[0]
    raise ValueError(f"segment_coo: reduce must be 'sum', 'add', 'mean', 'min' or 'max', got {reduce!r}")


def gather_coo(src: Tensor, index: Tensor, out: Tensor | None = None) -> Tensor:
    """The elements of `src` at `index` along the last axis that it has. Differentiable."""
    dim = index.dim() - 1
    where = index.expand(*src.shape[:dim], index.shape[-1])
    where = where.view(*where.shape, *([1] * (src.dim() - where.dim()))).expand(*where.shape, *src.shape[dim + 1 :])
    found = src.gather(dim, where)
    return found if out is None else out.copy_(found)


def _extreme_csr(src: Tensor, indptr: Tensor, out: Tensor | None, reduce: str) -> tuple[Tensor, Tensor]:
    where, dim, segments = _by_pointers(src, indptr)
    values, places = extreme(src, where, dim, None, segments + 1, reduce)
    values, places = values.narrow(dim, 0, segments), places.narrow(dim, 0, segments)
    return (values if out is None else out.copy_(values)), places


def _by_index(src: Tensor, index: Tensor) -> tuple[Tensor, int]:
    """A sorted index in the shape of `src`, and the axis that it counts along."""
    dim = index.dim() - 1
    where = index.expand(*src.shape[: dim + 1])
    return where.view(*where.shape, *([1] * (src.dim() - where.dim()))).expand(src.shape), dim


def _by_pointers(src: Tensor, indptr: Tensor) -> tuple[Tensor, int, int]:
    """The segment of each element in the shape of `src`, the axis of segments, and how many there are.

    Elements in front of the first segment and behind the last count to one more segment, which callers drop.
    """
    dim, segments = indptr.dim() - 1, max(indptr.shape[-1] - 1, 0)
    where = _segment_of_place(indptr.expand(*src.shape[:dim], indptr.shape[-1]), src.shape[dim])
    where = torch.where(where < 0, segments, where)
    return where.view(*where.shape, *([1] * (src.dim() - where.dim()))).expand(src.shape), dim, segments


def _segment_of_place(indptr: Tensor, length: int) -> Tensor:
    """[..., S + 1] -> int64 [..., length]: the segment that holds each place; -1 or S outside of all."""
    places = torch.arange(length, device=indptr.device).expand(*indptr.shape[:-1], length)
    if indptr.shape[-1] == 0:
        return F.pad(places[..., :0], (0, length), value=-1)
    return torch.searchsorted(indptr.contiguous(), places.contiguous(), right=True) - 1
