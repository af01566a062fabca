"""bev_pool: features of camera pixels, lifted to points in space, summed by the cells of a bird's-eye grid."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from triops import _check, _op
from triops.ops.bev_pool import reference


class BevPoolIndex(NamedTuple):
    """The points sorted by cell, which `bev_pool` reads. It depends on the cells only."""

    order: Tensor  # int32 [P]: the points by cell, then in their own order; those of no cell come last
    starts: Tensor  # int32 [num_cells + 1]: where in `order` the points of each cell begin


def bev_pool(
    features: Tensor, cells: Tensor, num_cells: int, depth: Tensor | None = None, index: BevPoolIndex | None = None
) -> Tensor:
    """Sum the features of points by the cells they lie in. Differentiable in `features` and `depth`.

    With `depth` the points are those of a lifted image (Lift-Splat-Shoot, BEVDet, BEVFusion): each pixel of each camera
    at each of D depths, with the pixel's feature times the probability of the depth. The product is never stored.

    Args:
        features: float tensor [P, C]; with depth [N, H, W, C], the features of N images. Half types are summed in
            float32 and rounded once.
        cells: int32 or int64 tensor [P]; with depth [N, D, H, W]: the cell of each point. A number outside of
            0..num_cells - 1 means no cell.
        num_cells: the number of cells, of all batch elements together.
        depth: tensor [N, D, H, W] of the dtype of `features`: the weight of each point.
        index: of `bev_pool_index(cells, num_cells)`. It depends only on calibration and grid, so keep it while those
            stay the same; without it every call sorts the points.

    Returns:
        tensor [num_cells, C] of the dtype of `features`; 0 for a cell without points. The same bits on every run,
        forward and backward.

    Raises:
        ValueError, TypeError: on a wrong shape, dtype or device, or more than 2**30 points or cells.
        IndexError: on a CPU, when `index` holds numbers that are not rows; on a GPU they are skipped, unless
            TRIOPS_CHECK=1 asks for the error there too.

    >>> import torch, triops
    >>> triops.bev_pool(torch.tensor([[1.0], [2.0], [4.0]]), torch.tensor([2, -1, 2]), 3).flatten()
    tensor([0., 0., 5.])
    >>> image, depth = torch.tensor([[[[10.0], [20.0]]]]), torch.tensor([[[[0.5, 0.25]], [[0.5, 0.75]]]])
    >>> triops.bev_pool(image, torch.tensor([[[[0, 1]], [[1, 1]]]]), 2, depth).flatten()
    tensor([ 5., 25.])
    """
    _check_shapes(features, cells, depth)
    order, starts = bev_pool_index(cells, num_cells) if index is None else index
    c = _check.Checker("bev_pool")
    if starts.dim() != 1 or (starts.shape[0] != num_cells + 1 and not isinstance(num_cells, torch.SymInt)):
        c.fail(f"index must be of num_cells {num_cells}, got starts of shape {list(starts.shape)}")
    if depth is None:
        return _forward(features, None, cells, order, starts)  # type: ignore[no-any-return]
    weights = depth.flatten(2)
    return _forward(features.flatten(0, 2), weights, cells.flatten(), order, starts)  # type: ignore[no-any-return]


def bev_pool_index(cells: Tensor, num_cells: int) -> BevPoolIndex:
    """Sort points by their cells, for `bev_pool`. Stable, so that the result is the same on every backend.

    Args:
        cells: int32 or int64 tensor of any shape: the cell of each point; a number outside of 0..num_cells - 1
            means no cell.
        num_cells: the number of cells.

    Returns:
        order int32 [P], starts int32 [num_cells + 1]; see `BevPoolIndex`. Sizes depend on no data, so it works in a
        CUDA graph.

    Raises:
        ValueError, TypeError: on a wrong dtype or number, or more than 2**30 points or cells.

    >>> import torch, triops
    >>> triops.bev_pool_index(torch.tensor([2, -1, 0, 2]), 3)
    BevPoolIndex(order=tensor([2, 0, 3, 1], dtype=torch.int32), starts=tensor([0, 1, 1, 3], dtype=torch.int32))
    """
    return BevPoolIndex(*_index(cells.flatten() if isinstance(cells, Tensor) else cells, num_cells))


def _check_shapes(features: Tensor, cells: Tensor, depth: Tensor | None) -> None:
    c = _check.Checker("bev_pool")
    for name, value in (("features", features), ("cells", cells), ("depth", depth)):
        if not isinstance(value, Tensor) and not (name == "depth" and value is None):
            c.fail(f"{name} must be a Tensor, got {type(value).__name__}", TypeError)
    if depth is None:
        c.shape("features", features, "P", "C")
        c.shape("cells", cells, "P")
    else:
        c.shape("features", features, "N", "H", "W", "C")
        c.shape("depth", depth, "N", "D", "H", "W")
        c.shape("cells", cells, "N", "D", "H", "W")


def _check_index(cells: Tensor, num_cells: int) -> None:
    c = _check.Checker("bev_pool_index")
    c.shape("cells", cells, "P")
    c.dtype("cells", cells, _check.INDICES)
    c.at_least("num_cells", num_cells, 0)
    _check_counts(c, cells, num_cells)


def _check_counts(c: _check.Checker, cells: Tensor, num_cells: int) -> None:
    if _check.too_many(cells.shape[0]) or _check.too_many(num_cells):
        c.fail(
            f"cells must be of at most 2**30 points and num_cells at most 2**30, since indices are int32, "
            f"got {cells.shape[0]} and {num_cells}"
        )


def _check_forward(features: Tensor, depth: Tensor | None, cells: Tensor, order: Tensor, starts: Tensor) -> None:
    c = _check.Checker("bev_pool")
    _check_operands(c, features, depth, cells)
    c.shape("order", order, "P")
    c.shape("starts", starts, "num_cells + 1")
    c.at_least("the length of starts", starts.shape[0], 1)
    c.dtype("order", order, (torch.int32,))
    c.dtype("starts", starts, (torch.int32,))
    c.same_device(features=features, order=order, starts=starts)
    _check_counts(c, cells, starts.shape[0] - 1)


def _check_backward(grad: Tensor, features: Tensor, depth: Tensor | None, cells: Tensor) -> None:
    c = _check.Checker("bev_pool_backward")
    c.shape("grad", grad, "num_cells", "C")
    _check_operands(c, features, depth, cells)
    c.same_dtype(grad=grad, features=features)
    c.same_device(grad=grad, features=features)
    _check_counts(c, cells, grad.shape[0])


def _check_operands(c: _check.Checker, features: Tensor, depth: Tensor | None, cells: Tensor) -> None:
    c.shape("features", features, "R", "C")
    c.shape("cells", cells, "P")
    c.dtype("features", features, _check.FLOATS)
    c.dtype("cells", cells, _check.INDICES)
    c.same_device(features=features, cells=cells)
    if depth is None:
        if features.shape[0] != cells.shape[0]:
            c.fail(f"features must have one row per point, got {features.shape[0]} and {cells.shape[0]} points")
        return
    c.shape("depth", depth, "N", "D", "S")
    c.same_dtype(features=features, depth=depth)
    c.same_device(features=features, depth=depth)
    images, depths, pixels = depth.shape
    if features.shape[0] != images * pixels or cells.shape[0] != images * depths * pixels:
        c.fail(
            f"depth of shape {list(depth.shape)} must go with {images * pixels} rows of features and "
            f"{images * depths * pixels} cells, got {features.shape[0]} and {cells.shape[0]}"
        )


def _fake_index(cells: Tensor, num_cells: int) -> tuple[Tensor, Tensor]:
    return cells.new_empty(cells.shape, dtype=torch.int32), cells.new_empty((num_cells + 1,), dtype=torch.int32)


def _fake_forward(features: Tensor, depth: Tensor | None, cells: Tensor, order: Tensor, starts: Tensor) -> Tensor:
    return features.new_empty((starts.shape[0] - 1, features.shape[1]))


def _fake_backward(grad: Tensor, features: Tensor, depth: Tensor | None, cells: Tensor) -> tuple[Tensor, Tensor]:
    grad_depth = features.new_empty((0,) if depth is None else depth.shape)
    return features.new_empty(features.shape), grad_depth


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    features, depth, cells, _, _ = inputs
    ctx.weighted = depth is not None
    ctx.save_for_backward(features, cells, *([depth] if depth is not None else []))


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    features, cells, *depth = ctx.saved_tensors
    grad_features, grad_depth = _backward_operator(grad, features, depth[0] if depth else None, cells)
    return grad_features, grad_depth if depth else None, None, None, None


_index = _op.define(reference.bev_pool_index, check=_check_index, fake=_fake_index)
_backward_operator = _op.define(
    reference.bev_pool_backward, check=_check_backward, fake=_fake_backward, backward=_op.no_second_derivative
)
_forward = _op.define(
    reference.bev_pool_forward,
    check=_check_forward,
    fake=_fake_forward,
    setup_context=_setup_context,
    backward=_backward,
)
