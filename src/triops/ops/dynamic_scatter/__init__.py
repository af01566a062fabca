"""dynamic_scatter: the features of all points of a voxel, reduced to one row."""

from __future__ import annotations

from typing import Any, Literal, get_args

import torch
from torch import Tensor

from triops import _check, _op
from triops.ops.dynamic_scatter import reference

Reduce = Literal["mean", "max", "sum"]
REDUCTIONS: tuple[Reduce, ...] = get_args(Reduce)
MAX_AXES = 8


def dynamic_scatter(features: Tensor, coords: Tensor, reduce: Reduce = "mean") -> tuple[Tensor, Tensor]:
    """Reduce the features of the points that share a voxel. Differentiable in `features`.

    Args:
        features: float tensor [N, C].
        coords: int32 or int64 tensor [N, D], D from 1 to 8: the voxel of each point, as from `dynamic_voxelize`, or
            with the batch in front. A row with a negative coordinate is left out.
        reduce: "mean", "max" (NaN never wins; a voxel of only NaN is -inf) or "sum".

    Returns:
        reduced [V, C], of the dtype of `features`: one row per voxel. Half types are summed in float32.
        voxel_coords [V, D], of the dtype of `coords`: the voxels in ascending order of their coordinates.
        V is 0 without points, or without valid ones. On a GPU this waits for V.

    Raises:
        ValueError, TypeError: on a wrong rank, number of points, dtype, device or reduction.

    The same bits on every run, forward and backward. Of several points that hold the maximum the lowest gets the
    gradient.

    >>> import torch, triops
    >>> features = torch.tensor([[1.0], [2.0], [6.0], [9.0]])
    >>> coords = torch.tensor([[0, 0, 5], [0, 0, 2], [0, 0, 5], [-1, -1, -1]])
    >>> reduced, voxel_coords = triops.dynamic_scatter(features, coords, "mean")
    >>> reduced.flatten().tolist(), voxel_coords.tolist()
    ([2.0, 3.5], [[0, 0, 2], [0, 0, 5]])
    """
    reduced, voxel_coords, _, _ = _forward(features, coords, reduce)
    return reduced, voxel_coords


def dynamic_scatter_forward(
    features: Tensor, coords: Tensor, reduce: Reduce = "mean"
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`dynamic_scatter` with everything that its backward needs. Arguments and errors as for `dynamic_scatter`.

    Returns:
        reduced [V, C], voxel_coords [V, D], point_to_voxel int32 [N] (-1 for a point that was left out),
        counts int32 [V]: the points of each voxel.

    >>> import torch, triops
    >>> coords = torch.tensor([[5], [2], [5], [-1]])
    >>> _, _, point_to_voxel, counts = triops.dynamic_scatter_forward(torch.ones(4, 1), coords, "sum")
    >>> point_to_voxel.tolist(), counts.tolist()
    ([1, 0, 1, -1], [1, 2])
    """
    return _forward(features, coords, reduce)  # type: ignore[no-any-return]


def dynamic_scatter_backward(
    grad_reduced: Tensor,
    features: Tensor,
    reduced: Tensor,
    point_to_voxel: Tensor,
    counts: Tensor,
    reduce: Reduce = "mean",
) -> Tensor:
    """Gradient of the features of `dynamic_scatter`; called by autograd, and public.

    Args:
        grad_reduced: float tensor [V, C].
        features: tensor [N, C] of the same dtype; its values are read by "max" only.
        reduced: tensor [V, C] of the same dtype, as `dynamic_scatter_forward` returned it; likewise.
        point_to_voxel: int32 tensor [N], likewise returned.
        counts: int32 tensor [V], likewise; read by "mean" only.
        reduce: "mean", "max" or "sum".

    Returns:
        Tensor [N, C] of the dtype of `features`; 0 for a point that was left out.

    Raises:
        ValueError, TypeError: on a wrong rank, shape, dtype, device or reduction.
        IndexError: when point_to_voxel is not in -1..V - 1. On a GPU such a point gets 0, unless TRIOPS_CHECK=1 asks
            for the error there too.

    >>> import torch, triops
    >>> point_to_voxel, counts = torch.tensor([0, 0, -1], dtype=torch.int32), torch.tensor([2], dtype=torch.int32)
    >>> grad = triops.dynamic_scatter_backward(
    ...     torch.ones(1, 1), torch.zeros(3, 1), torch.zeros(1, 1), point_to_voxel, counts, "mean")
    >>> grad.flatten().tolist()
    [0.5, 0.5, 0.0]
    """
    return _backward_operator(  # type: ignore[no-any-return]
        grad_reduced, features, reduced, point_to_voxel, counts, reduce
    )


def _check_forward(features: Tensor, coords: Tensor, reduce: str) -> None:
    c = _check.Checker("dynamic_scatter")
    c.shape("features", features, "N", "C")
    c.shape("coords", coords, "N", "D")
    if not 1 <= coords.shape[1] <= MAX_AXES:
        c.fail(f"coords must have shape [N, D] with D from 1 to {MAX_AXES}, got {list(coords.shape)}")
    c.dtype("features", features, _check.FLOATS)
    c.dtype("coords", coords, _check.INDICES)
    c.same_device(features=features, coords=coords)
    _check_points(c, features)
    c.choice("reduce", reduce, REDUCTIONS)


def _check_points(c: _check.Checker, features: Tensor) -> None:
    if _check.too_many(features.shape[0]):
        c.fail(f"features must be of at most 2**30 points, since indices are int32, got {features.shape[0]}")


def _check_backward(
    grad_reduced: Tensor, features: Tensor, reduced: Tensor, point_to_voxel: Tensor, counts: Tensor, reduce: str
) -> None:
    c = _check.Checker("dynamic_scatter_backward")
    c.shape("grad_reduced", grad_reduced, "V", "C")
    c.shape("features", features, "N", "C")
    c.shape("reduced", reduced, "V", "C")
    c.shape("point_to_voxel", point_to_voxel, "N")
    c.shape("counts", counts, "V")
    c.dtype("grad_reduced", grad_reduced, _check.FLOATS)
    c.same_dtype(grad_reduced=grad_reduced, features=features, reduced=reduced)
    c.dtype("point_to_voxel", point_to_voxel, (torch.int32,))
    c.dtype("counts", counts, (torch.int32,))
    c.same_device(
        grad_reduced=grad_reduced, features=features, reduced=reduced, point_to_voxel=point_to_voxel, counts=counts
    )
    _check_points(c, features)
    c.choice("reduce", reduce, REDUCTIONS)


def _fake_forward(features: Tensor, coords: Tensor, reduce: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    voxels = torch.library.get_ctx().new_dynamic_size()
    return (
        features.new_empty((voxels, features.shape[1])),
        coords.new_empty((voxels, coords.shape[1])),
        coords.new_empty((coords.shape[0],), dtype=torch.int32),
        coords.new_empty((voxels,), dtype=torch.int32),
    )


def _fake_backward(
    grad_reduced: Tensor, features: Tensor, reduced: Tensor, point_to_voxel: Tensor, counts: Tensor, reduce: str
) -> Tensor:
    return features.new_empty(features.shape)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    features, _, ctx.reduce = inputs
    reduced, _, point_to_voxel, counts = output
    ctx.set_materialize_grads(False)
    ctx.points = features.shape[0]
    kept = (features, reduced) if ctx.reduce == "max" else ()  # the others do not read them
    ctx.save_for_backward(point_to_voxel, counts, *kept)


def _backward(ctx: Any, grad_reduced: Tensor | None, *_: None) -> tuple[Tensor | None, None, None]:
    if grad_reduced is None:
        return None, None, None
    point_to_voxel, counts, *kept = ctx.saved_tensors
    unread = grad_reduced.new_empty((1, 1)).expand(ctx.points, grad_reduced.shape[1])
    features, reduced = kept if kept else (unread, grad_reduced)
    return _backward_operator(grad_reduced, features, reduced, point_to_voxel, counts, ctx.reduce), None, None


_backward_operator = _op.define(
    reference.dynamic_scatter_backward,
    check=_check_backward,
    fake=_fake_backward,
    backward=_op.no_second_derivative,
)
_forward = _op.define(
    reference.dynamic_scatter_forward,
    check=_check_forward,
    fake=_fake_forward,
    setup_context=_setup_context,
    backward=_backward,
)
_forward.dynamic_output = True
