"""torch_cluster without a compiler: importing this module supplies `torch_cluster`, unless it is installed.

knn, radius, fps, grid_cluster and nearest on any device, most in plain torch; the functions are here to be called
directly, too. graclus_cluster, random_walk and neighbor_sampler are not there and raise by name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from triops.compat import _finder
from triops.compat.torch_cluster import _neighbors

FLOWS = ("source_to_target", "target_to_source")


def knn(
    x: Tensor, y: Tensor, k: int, batch_x: Tensor | None = None, batch_y: Tensor | None = None, cosine: bool = False,
    num_workers: int = 1, batch_size: int | None = None,
) -> Tensor:  # fmt: skip
    """For each row of y the k nearest rows of x: int64 [2, E] of rows of y and of x, nearest first.

    Args:
        x, y: float tensors [N, F] and [M, F], or vectors.
        batch_x, batch_y: int64 [N] and [M], ascending: neighbours are looked for within the same element.
        cosine: by cosine distance.
        num_workers, batch_size: taken, without effect.

    Of equal distances the lower index is nearer. Fewer than k points in an element give as many as there are.

    >>> import torch
    >>> from triops.compat.torch_cluster import knn
    >>> knn(torch.tensor([0.0, 1.0, 5.0]), torch.tensor([0.9, 4.0]), k=2)
    tensor([[0, 0, 1, 1],
            [1, 0, 2, 1]])
    """
    rows, columns = [], []
    for points, queries, first_x, first_y in _elements("knn", x, y, batch_x, batch_y):
        index, exists = _neighbors.nearest(points, queries, k, cosine)
        row = torch.arange(first_y, first_y + index.shape[0], device=x.device)[:, None].expand_as(index)
        rows.append(row[exists])
        columns.append(index[exists] + first_x)
    return _pairs(rows, columns, x)


def knn_graph(
    x: Tensor, k: int, batch: Tensor | None = None, loop: bool = False, flow: str = "source_to_target",
    cosine: bool = False, num_workers: int = 1, batch_size: int | None = None,
) -> Tensor:  # fmt: skip
    """Edges from the k nearest rows to each row of x: int64 [2, E]; see `knn`. `loop`: a row is its own neighbour."""
    _check_flow("knn_graph", flow)
    found = knn(x, x, k if loop else k + 1, batch, batch, cosine)
    edges = found.flip(0) if flow == "source_to_target" else found
    return edges if loop else edges[:, edges[0] != edges[1]]


def radius(
    x: Tensor, y: Tensor, r: float, batch_x: Tensor | None = None, batch_y: Tensor | None = None,
    max_num_neighbors: int = 32, num_workers: int = 1, batch_size: int | None = None, ignore_same_index: bool = False,
) -> Tensor:  # fmt: skip
    """For each row of y the rows of x that are closer than r: int64 [2, E] of rows of y and of x, ascending.

    Args:
        x, y, batch_x, batch_y: as in `knn`.
        max_num_neighbors: of more neighbours those with the lowest indices are kept.
        ignore_same_index: leave out the row of x that has the number of the row of y.

    >>> import torch
    >>> from triops.compat.torch_cluster import radius
    >>> radius(torch.tensor([0.0, 1.0, 5.0]), torch.tensor([0.9, 4.0]), r=1.0)
    tensor([[0, 0],
            [0, 1]])
    """
    rows, columns = [], []
    for points, queries, first_x, first_y in _elements("radius", x, y, batch_x, batch_y):
        same = ignore_same_index and first_x == first_y  # x and y of one numbering
        row, column = _neighbors.within(points, queries, r, max_num_neighbors, same)
        rows.append(row + first_y)
        columns.append(column + first_x)
    return _pairs(rows, columns, x)


def radius_graph(
    x: Tensor, r: float, batch: Tensor | None = None, loop: bool = False, max_num_neighbors: int = 32,
    flow: str = "source_to_target", num_workers: int = 1, batch_size: int | None = None,
) -> Tensor:  # fmt: skip
    """Edges from all rows closer than r to each row of x: int64 [2, E]; see `radius`."""
    _check_flow("radius_graph", flow)
    found = radius(x, x, r, batch, batch, max_num_neighbors, ignore_same_index=not loop)
    return found.flip(0) if flow == "source_to_target" else found


def fps(
    src: Tensor, batch: Tensor | None = None, ratio: Tensor | float | None = None, random_start: bool = True,
    batch_size: int | None = None, ptr: Tensor | list[int] | None = None,
) -> Tensor:  # fmt: skip
    """Furthest point sampling: int64 rows of src, of each element `ceil(ratio * rows)` of them.

    Args:
        src: float tensor [N, F], or a vector.
        batch: int64 [N], ascending; or `ptr`, where each element begins and the last one ends.
        ratio: a number, or one for each element; 0.5 if not given.
        random_start: begin with any row (by torch's random numbers), not with the first of the element.

    Each sample is the row furthest from all before it, of equals the lowest.

    >>> import torch
    >>> from triops.compat.torch_cluster import fps
    >>> fps(torch.tensor([0.0, 1.0, 5.0, 2.0]), ratio=0.75, random_start=False)
    tensor([0, 2, 3])
    """
    rows = src[:, None] if src.dim() == 1 else src.flatten(1)
    if ptr is not None:
        pointers = torch.as_tensor(ptr, dtype=torch.int64, device=src.device)
    elif batch is not None:
        count = int(batch.max()) + 1 if batch_size is None and batch.numel() else batch_size or 0
        pointers = _pointers(batch, count)
    else:
        pointers = torch.tensor([0, src.shape[0]], device=src.device)
    lengths = pointers.diff()
    share = torch.as_tensor(0.5 if ratio is None else ratio, dtype=torch.float32, device=src.device)
    counts = (lengths.float() * share).ceil().long()
    if counts.numel() == 0 or int(counts.max()) == 0:
        return torch.empty(0, dtype=torch.int64, device=src.device)
    starts = torch.zeros_like(lengths)
    if random_start:
        starts = (torch.rand(lengths.shape, device=src.device) * lengths).long().clamp(max=lengths - 1).clamp(min=0)
    return _neighbors.furthest(rows, pointers, counts, starts)


def grid_cluster(pos: Tensor, size: Tensor, start: Tensor | None = None, end: Tensor | None = None) -> Tensor:
    """The cell of a regular grid that each row lies in: int64 [N], the first coordinate fastest.

    Args:
        pos: float tensor [N, F].
        size: [F], the size of a cell.
        start, end: [F], where the grid begins and ends; the lowest and highest coordinates if not given.

    >>> import torch
    >>> from triops.compat.torch_cluster import grid_cluster
    >>> grid_cluster(torch.tensor([[0.0, 0.0], [11.0, 9.0], [2.0, 8.0]]), torch.tensor([5.0, 5.0]))
    tensor([0, 5, 3])
    """
    if pos.shape[0] == 0:
        return torch.empty(0, dtype=torch.int64, device=pos.device)
    pos = pos[:, None] if pos.dim() == 1 else pos.flatten(1)
    start = pos.min(0).values if start is None else start
    end = pos.max(0).values if end is None else end
    cells = ((end - start) / size).long() + 1
    strides = torch.cat([cells.new_ones(1), cells.cumprod(0)[:-1]])
    return (((pos - start) / size).long() * strides).sum(1)


def nearest(x: Tensor, y: Tensor, batch_x: Tensor | None = None, batch_y: Tensor | None = None) -> Tensor:
    """The row of y that is nearest to each row of x: int64 [N], within the same element of the batch.

    >>> import torch
    >>> from triops.compat.torch_cluster import nearest
    >>> nearest(torch.tensor([0.2, 7.0]), torch.tensor([5.0, 0.0]))
    tensor([1, 0])
    """
    of_x, of_y = (
        set() if t.shape[0] == 0 else {0} if batch is None else set(batch.unique().tolist())
        for t, batch in ((x, batch_x), (y, batch_y))
    )
    if of_x != of_y:
        raise ValueError(f"nearest: batch_x and batch_y must hold the same elements, got {of_x} and {of_y}")
    return knn(y, x, 1, batch_y, batch_x)[1]


def _missing(name: str) -> Callable[..., Any]:
    def missing(*args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"torch_cluster.{name}: triops does not have this function")

    missing.__name__ = name
    return missing


graclus_cluster = _missing("graclus_cluster")
random_walk = _missing("random_walk")
neighbor_sampler = _missing("neighbor_sampler")


def _elements(
    name: str, x: Tensor, y: Tensor, batch_x: Tensor | None, batch_y: Tensor | None
) -> Iterator[tuple[Tensor, Tensor, int, int]]:
    """Points and queries of each element of the batch that has both, and the numbers of the first of them."""
    x, y = (t[:, None] if t.dim() == 1 else t for t in (x, y))
    if x.dim() != 2 or y.dim() != 2 or x.shape[1] != y.shape[1]:
        raise ValueError(f"{name}: x and y must have shapes [N, F] and [M, F], got {list(x.shape)} and {list(y.shape)}")
    for key, batch, rows in (("batch_x", batch_x, x), ("batch_y", batch_y, y)):
        if batch is not None and batch.numel() != rows.shape[0]:
            raise ValueError(f"{name}: {key} must have {rows.shape[0]} entries, got {batch.numel()}")
        if batch is not None and bool((batch[1:] < batch[:-1]).any()):
            raise ValueError(f"{name}: {key} must ascend")
    if x.shape[0] == 0 or y.shape[0] == 0:
        return
    count = max([1, *(int(batch.max()) + 1 for batch in (batch_x, batch_y) if batch is not None)])
    bounds_x, bounds_y = (
        [0, rows.shape[0], *[rows.shape[0]] * (count - 1)] if batch is None else _pointers(batch, count).tolist()
        for batch, rows in ((batch_x, x), (batch_y, y))
    )
    for element in range(count):
        points = x[bounds_x[element] : bounds_x[element + 1]]
        queries = y[bounds_y[element] : bounds_y[element + 1]]
        if len(points) and len(queries):
            yield points, queries, bounds_x[element], bounds_y[element]


def _pointers(batch: Tensor, count: int) -> Tensor:
    return torch.searchsorted(batch.contiguous(), torch.arange(count + 1, device=batch.device, dtype=batch.dtype))


def _pairs(rows: list[Tensor], columns: list[Tensor], like: Tensor) -> Tensor:
    if not rows:
        return torch.empty((2, 0), dtype=torch.int64, device=like.device)
    return torch.stack([torch.cat(rows), torch.cat(columns)])


def _check_flow(name: str, flow: str) -> None:
    if flow not in FLOWS:
        raise ValueError(f"{name}: flow must be {FLOWS[0]!r} or {FLOWS[1]!r}, got {flow!r}")


__version__ = "1.6.3"  # of torch_cluster, whose interface this follows; programs ask for it
__all__ = [
    "fps",
    "graclus_cluster",
    "grid_cluster",
    "knn",
    "knn_graph",
    "nearest",
    "neighbor_sampler",
    "radius",
    "radius_graph",
    "random_walk",
]

_finder.install("torch_cluster")
