"""torch_geometric from 2.8 on asks pyg-lib, and not torch_cluster, for these functions, as operators of `torch.ops`.

They are registered where torch_geometric finds no pyg-lib, and its flags for them set. What else pyg-lib has (sampling
of graphs, products of segments, graclus) stays missing, and torch_geometric knows it.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import torch
from torch import Tensor

from triops.compat import torch_cluster


def grid_cluster(pos: Tensor, size: Tensor, start: Tensor | None = None, end: Tensor | None = None) -> Tensor:
    return torch_cluster.grid_cluster(pos, size, start, end)


def fps(src: Tensor, ptr: Tensor, ratio: float, random_start: bool = True) -> Tensor:
    return torch_cluster.fps(src, ratio=ratio, random_start=random_start, ptr=ptr)


def knn(
    x: Tensor, y: Tensor, ptr_x: Tensor | None, ptr_y: Tensor | None, k: int, cosine: bool = False,
    num_workers: int = 1,
) -> Tensor:  # fmt: skip
    return torch_cluster.knn(x, y, k, elements(ptr_x), elements(ptr_y), cosine)


def radius(
    x: Tensor, y: Tensor, ptr_x: Tensor | None, ptr_y: Tensor | None, r: float, max_num_neighbors: int = 32,
    num_workers: int = 1, ignore_same_index: bool = False,
) -> Tensor:  # fmt: skip
    return torch_cluster.radius(
        x, y, r, elements(ptr_x), elements(ptr_y), max_num_neighbors, ignore_same_index=ignore_same_index
    )


def nearest(x: Tensor, y: Tensor, ptr_x: Tensor | None, ptr_y: Tensor | None) -> Tensor:
    return torch_cluster.nearest(x, y, elements(ptr_x), elements(ptr_y))


def elements(ptr: Tensor | None) -> Tensor | None:
    """The element of each row, given where elements begin and the last one ends."""
    return None if ptr is None else torch.arange(len(ptr) - 1, device=ptr.device).repeat_interleave(ptr.diff())


OPERATORS: dict[str, Callable[..., Tensor]] = {
    "WITH_GRID_CLUSTER": grid_cluster, "WITH_FPS": fps, "WITH_KNN": knn, "WITH_RADIUS": radius,
    "WITH_NEAREST": nearest,
}  # fmt: skip
LIBRARY = torch.library.Library("pyg", "FRAGMENT")


def complete(module: ModuleType) -> None:
    """Given `torch_geometric.typing` as executed: register what it found missing, and say that it is there."""
    for flag, function in OPERATORS.items():
        if getattr(module, flag, None) is False:
            if not hasattr(torch.ops.pyg, function.__name__):
                LIBRARY.define(function.__name__ + torch.library.infer_schema(function, mutates_args=()))
                LIBRARY.impl(function.__name__, function, "CompositeExplicitAutograd")
            setattr(module, flag, True)
