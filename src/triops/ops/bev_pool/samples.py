"""Inputs of bev_pool_index, bev_pool_forward and bev_pool_backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from triops._op import OPERATORS
from triops._sample import BadCall, Sample, Sized, Standard, Work, bytes_of
from triops.ops.bev_pool import BevPoolIndex, bev_pool, bev_pool_index

_I, _F, _B = "bev_pool_index", "bev_pool_forward", "bev_pool_backward"
_Make = Callable[[torch.dtype], tuple[Any, ...]]
_Scene = Callable[[torch.dtype], tuple[Tensor, Tensor | None, Tensor, int]]  # features, depth, cells, number of cells
_ONE = (torch.float32,)


def lifted_cells(cameras: int, depths: int, height: int, width: int, cells: int, cell_size: float) -> Tensor:
    """The cell of each pixel at each depth, seen by cameras that look all around from the middle of a square grid.

    As in a car: the ground rises in the image, cells near the cameras get many points and far ones few.
    """
    distance = torch.linspace(1.0, 60.0, depths).view(1, depths, 1, 1)
    across = torch.linspace(-0.6, 0.6, width).view(1, 1, 1, width)
    up = torch.linspace(0.35, -0.35, height).view(1, 1, height, 1)
    heading = torch.arange(cameras).view(-1, 1, 1, 1) * (2 * torch.pi / cameras)
    forward, left = distance.expand(cameras, depths, height, width), distance * across
    x = forward * heading.cos() - left * heading.sin()
    y = forward * heading.sin() + left * heading.cos()
    z = 1.6 + distance * up
    column, row = ((axis / cell_size + cells / 2).floor().long() for axis in (x, y))
    inside = (column >= 0) & (column < cells) & (row >= 0) & (row < cells) & (z > -5) & (z < 3)
    return torch.where(inside, row * cells + column, -1)


def _lifted(cameras: int, depths: int, height: int, width: int, channels: int, cells: int, size: float) -> _Scene:
    def make(dtype: torch.dtype) -> tuple[Tensor, Tensor | None, Tensor, int]:
        g = torch.Generator().manual_seed(0)
        features = torch.randn(cameras * height * width, channels, generator=g)
        depth = torch.randn(cameras, depths, height * width, generator=g).softmax(1)
        where = lifted_cells(cameras, depths, height, width, cells, size).flatten().int()
        return features.to(dtype), depth.to(dtype), where, cells * cells

    return make


def _random(
    points: int, channels: int, cells: int, depth: tuple[int, int, int] | None = None, lowest: int = -2, above: int = 2,
    index: torch.dtype = torch.int32, seed: int = 0,
) -> _Scene:  # fmt: skip
    """Points anywhere, some in no cell. `depth`: images, depths and pixels, in place of points."""

    def make(dtype: torch.dtype) -> tuple[Tensor, Tensor | None, Tensor, int]:
        g = torch.Generator().manual_seed(seed)
        rows, count = (points, points) if depth is None else (depth[0] * depth[2], depth[0] * depth[1] * depth[2])
        features = torch.randn(rows, channels, generator=g).to(dtype)
        weights = None if depth is None else torch.rand(depth, generator=g).to(dtype)
        return features, weights, torch.randint(lowest, cells + above, (count,), generator=g).to(index), cells

    return make


def _one_cell(points: int, channels: int) -> _Scene:
    def make(dtype: torch.dtype) -> tuple[Tensor, Tensor | None, Tensor, int]:
        features = torch.randn(points, channels, generator=torch.Generator().manual_seed(5)).to(dtype)
        return features, None, torch.full((points,), 1, dtype=torch.int32), 3

    return make


def _runs(channels: int) -> _Scene:
    """Cells of 1, 127, 128, 129, 256 and 300 points, so that they end before, at and after the ends of blocks."""

    def make(dtype: torch.dtype) -> tuple[Tensor, Tensor | None, Tensor, int]:
        g = torch.Generator().manual_seed(6)
        lengths = torch.tensor([1, 127, 128, 0, 129, 256, 300, 2])
        cells = torch.arange(8).repeat_interleave(lengths)[torch.randperm(int(lengths.sum()), generator=g)]
        return torch.randn(len(cells), channels, generator=g).to(dtype), None, cells.int(), 8

    return make


def _index(scene: _Scene) -> _Make:
    def make(dtype: torch.dtype) -> tuple[Any, ...]:
        _, _, cells, count = scene(dtype)
        return cells, count

    return make


def _forward(scene: _Scene) -> _Make:
    def make(dtype: torch.dtype) -> tuple[Any, ...]:
        features, depth, cells, count = scene(dtype)
        return features, depth, cells, *OPERATORS[_I](cells, count)

    return make


def _backward(scene: _Scene) -> _Make:
    def make(dtype: torch.dtype) -> tuple[Any, ...]:
        features, depth, cells, count = scene(dtype)
        grad = torch.randn(count, features.shape[1], generator=torch.Generator().manual_seed(9)).to(dtype)
        return grad, features, depth, cells

    return make


_BEVFUSION = _lifted(6, 118, 32, 88, 80, 360, 0.3)
_CASES: list[tuple[str, _Scene, Any, bool]] = [
    ("BEVFusion, 6 x 118 x 32 x 88 points, 80 channels", _BEVFUSION, "network", True),
    ("BEVDet, 6 x 59 x 16 x 44 points, 64 channels", _lifted(6, 59, 16, 44, 64, 128, 0.8), "network", False),
    ("2 images of 5 depths and 6 pixels, 20 channels", _random(0, 20, 12, (2, 5, 6)), "general", False),
    ("60 points, 3 channels", _random(60, 3, 9), "general", False),
    ("1000 points, 17 channels, int64", _random(1000, 17, 40, index=torch.int64, seed=1), "general", False),
    ("3 images of 7 depths and 33 pixels, 80 channels", _random(0, 80, 50, (3, 7, 33), seed=2), "general", False),
    ("no points", _random(0, 4, 5), "boundary", False),
    ("no cells", _random(30, 4, 0), "boundary", False),
    ("no channels", _random(30, 0, 5), "boundary", False),
    ("no depths", _random(0, 4, 5, (2, 0, 6)), "boundary", False),
    ("one image, depth and pixel", _random(0, 1, 1, (1, 1, 1), lowest=0, above=0), "boundary", False),
    ("one point", _random(1, 1, 1, lowest=0, above=0), "boundary", False),
    ("all in no cell", _random(40, 3, 5, lowest=-9, above=-6), "boundary", False),
    ("one cell of 1000 points", _one_cell(1000, 5), "boundary", False),
    ("runs around the ends of blocks", _runs(24), "boundary", False),
    ("300 channels", _random(200, 300, 20, seed=3), "boundary", False),
    ("300 channels and depths", _random(0, 300, 20, (2, 3, 9), seed=4), "boundary", False),
]
SAMPLES = [
    Sample(op, name, make(scene), scale, _ONE if op == _I else Sample.dtypes, demo=i == 1, gpu_only=large)
    for op, make in ((_I, _index), (_F, _forward), (_B, _backward))
    for i, (name, scene, scale, large) in enumerate(_CASES)
]
SAMPLES += [
    Sample(_F, "12 points, to differentiate", _forward(_random(12, 2, 5, seed=7)), gradcheck=True),
    Sample(_F, "lifted, to differentiate", _forward(_random(0, 3, 5, (2, 3, 4), seed=8)), gradcheck=True),
]


SIZED = [
    Sized(op, name, lambda draw, make=make, scene=scene: make(scene(draw)))  # type: ignore[misc]
    for op, make in ((_I, _index), (_F, _forward), (_B, _backward))
    for name, scene in (
        ("points", lambda draw: _random(draw(90_000), 16, draw(2000))),
        ("lifted", lambda draw: _random(0, 16, draw(2000), (draw(6), draw(30), draw(300)))),
    )
]


def _bad_calls() -> list[BadCall]:
    features, cells = torch.zeros(5, 2), torch.zeros(5, dtype=torch.int32)
    image, depth, where = torch.zeros(2, 3, 4, 2), torch.zeros(2, 6, 3, 4), torch.zeros(2, 6, 3, 4, dtype=torch.int32)
    order, starts = torch.arange(5, dtype=torch.int32), torch.tensor([0, 5], dtype=torch.int32)

    def bad(what: str, error: type[Exception], match: str, *args: Any) -> BadCall:
        return BadCall(what, lambda: bev_pool(*args), error, match)

    def put(tensor: Tensor, at: int, value: int) -> Tensor:
        changed = tensor.clone()
        changed[at] = value
        return changed

    return [
        bad("features of rank 3", ValueError, r"features must have shape \[P, C\], got", features[None], cells, 1),
        bad("cells of rank 2", ValueError, r"cells must have shape \[P\]", features, cells[None], 1),
        bad("fewer cells", ValueError, r"P = 5 as in features, got \[4\]", features, cells[1:], 1),
        bad("an image without depth", ValueError, r"features must have shape \[P, C\]", image, where, 1),
        bad("another image", ValueError, "W = 4 as in features", image, where, 1, depth[..., 1:]),
        bad("cells of other depths", ValueError, "D = 6 as in depth", image, where[:, 1:], 1, depth),
        bad("integer features", TypeError, "features must be float32.*got int64", features.long(), cells, 1),
        bad("float cells", TypeError, "cells must be int32 or int64, got float32", features, cells.float(), 1),
        bad("another dtype", TypeError, "depth float64", image, where, 1, depth.double()),
        bad("unequal devices", ValueError, "cells on meta", features, cells.to("meta"), 1),
        bad("negative number", ValueError, "num_cells must be at least 0, got -1", features, cells, -1),
        bad("a number as a float", TypeError, "num_cells must be an integer, got float", features, cells, 1.5),
        bad("a list", TypeError, "cells must be a Tensor, got list", features, [1], 1),
        bad("an index of another grid", ValueError, "index must be of num_cells 2", features, cells, 2, None,
            BevPoolIndex(order, starts)),
        bad("an index of other points", ValueError, "P = 5 as in cells", features, cells, 1, None,
            BevPoolIndex(order[1:], starts)),
        bad("an index of int64", TypeError, "order must be int32", features, cells, 1, None,
            BevPoolIndex(order.long(), starts)),
        bad("a point too high", IndexError, r"order must lie in 0\.\.4", features, cells, 1, None,
            BevPoolIndex(put(order, 2, 5), starts)),
        bad("a point below 0", IndexError, r"order must lie in 0\.\.4", features, cells, 1, None,
            BevPoolIndex(put(order, 2, -1), starts)),
        bad("a start behind the end", IndexError, r"starts must ascend within 0\.\.5", features, cells, 1, None,
            BevPoolIndex(order, put(starts, 1, 6))),
        bad("starts that fall", IndexError, r"starts must ascend", features, cells, 1, None,
            BevPoolIndex(order, torch.tensor([4, 2], dtype=torch.int32))),
        BadCall("index of floats", lambda: bev_pool_index(features, 1), TypeError, "cells must be int32 or int64"),
        BadCall("too many cells", lambda: bev_pool_index(cells, 2**31), ValueError, r"at most 2\*\*30"),
        BadCall("backward of another width", lambda: OPERATORS[_B](torch.zeros(3, 4), features, None, cells),
                ValueError, "C = 4 as in grad"),
        BadCall("forward of other rows", lambda: OPERATORS[_F](features[1:], None, cells, order, starts),
                ValueError, "one row per point, got 4 and 5"),
        BadCall("depth of other rows", lambda: OPERATORS[_F](features, torch.zeros(1, 2, 3), cells, order, starts),
                ValueError, "must go with 3 rows of features and 6 cells, got 5 and 5"),
    ]  # fmt: skip


BAD_CALLS = _bad_calls()

STANDARD = {
    _I: Standard(why_slower="points are sorted by cell"),
    _F: Standard(error_scale="row", why_slower="rows of features are gathered once per point"),
    _B: Standard(error_scale="row", why_slower="rows of the gradient are gathered once per point"),
}


def work(operator: str, args: tuple[Any, ...]) -> Work:
    if operator == _I:
        cells, count = args
        return Work(bytes_of(cells) + 4 * (len(cells) + count), len(cells))
    if operator == _F:
        features, depth, cells, order, starts = args
        size = features.element_size()
        out = (len(starts) - 1) * features.shape[1] * size
        return Work(bytes_of((features, depth, order, starts)) + out, 2 * len(cells) * features.shape[1])
    grad, features, depth, cells = args
    return Work(
        bytes_of(args) + bytes_of((features, depth)), (4 if depth is not None else 1) * len(cells) * grad.shape[1]
    )


def baselines(operator: str) -> dict[str, Callable[..., Any]]:
    functions: dict[str, Callable[..., Any]] = {
        _I: _vectorised_index, _F: _vectorised_forward, _B: _vectorised_backward
    }  # fmt: skip
    return {"torch": functions[operator]}


def _vectorised_index(cells: Tensor, num_cells: int) -> tuple[Tensor, Tensor]:
    key = torch.where((cells >= 0) & (cells < num_cells), cells, num_cells).long()
    counts = torch.bincount(key, minlength=num_cells + 1)
    return key.argsort(stable=True).int(), (counts.cumsum(0) - counts).int()


def _vectorised_forward(features: Tensor, depth: Tensor | None, cells: Tensor, order: Tensor, starts: Tensor) -> Tensor:
    """The plain formulation in torch: the points of a cell by a scatter, features of all points in memory."""
    num_cells = len(starts) - 1
    rows = features
    if depth is not None:
        images, _, pixels = depth.shape
        rows = (depth[..., None] * features.view(images, 1, pixels, features.shape[1])).flatten(0, 2)
    kept = ((cells >= 0) & (cells < num_cells)).nonzero()[:, 0]
    return features.new_zeros((num_cells, features.shape[1])).index_add_(0, cells[kept].long(), rows[kept])


def _vectorised_backward(grad: Tensor, features: Tensor, depth: Tensor | None, cells: Tensor) -> tuple[Tensor, ...]:
    padded = torch.cat([grad, grad.new_zeros((1, grad.shape[1]))])
    above = padded[torch.where((cells >= 0) & (cells < len(grad)), cells, len(grad)).long()]
    if depth is None:
        return above, grad.new_zeros(0)
    images, depths, pixels = depth.shape
    above = above.view(images, depths, pixels, grad.shape[1])
    grad_features = torch.einsum("ndsc,nds->nsc", above, depth).flatten(0, 1)
    return grad_features, torch.einsum("ndsc,nsc->nds", above, features.view(images, pixels, grad.shape[1]))
