"""roiaware_pool3d: divide each RoI into cells and pool the features of the points in every cell."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from triops import _check, _op
from triops._geometry.box.reference import Z_ORIGINS, ZOrigin
from triops.ops.roiaware_pool3d import reference

Mode = Literal["max", "avg"]
MODES: tuple[Mode, ...] = get_args(Mode)
_INT32_MAX = 2**31 - 1


def roiaware_pool3d(
    rois: Tensor,
    points: Tensor,
    features: Tensor,
    out_size: int | Sequence[int],
    max_points_per_voxel: int = 128,
    mode: Mode = "max",
    *,
    z_origin: ZOrigin = "bottom",
    margin: float = 0.0,
) -> Tensor:
    """Pool the features of the points in every cell of every RoI. Differentiable in `features`.

    A RoI is a box `(cx, cy, cz, dx, dy, dz, heading)`; a point belongs to it as in `points_in_boxes`, and to
    the cell `trunc((l + d / 2) / (d / cells))` along each of its axes. A cell keeps the first
    `max_points_per_voxel - 1` of its points, lowest index first, and drops the rest.

    Args:
        rois: float tensor [R, 7]. RoIs may overlap: a point belongs to every RoI that holds it.
        points: tensor [P, 3] of the dtype of `rois`.
        features: float tensor [P, C], of any float dtype.
        out_size: cells along x, y and z of a RoI: three integers, or one for all.
        max_points_per_voxel: slots of a cell's list. One holds the count, so 1 leaves no room for any point.
        mode: "max" (of equal values the lowest index wins; NaN and -inf never win) or "avg".
        z_origin: "bottom" where `cz` is the bottom face of the box (mmdetection3d), or "center".
        margin: added to the half sizes in x and y.

    Returns:
        Tensor [R, X, Y, Z, C] of the dtype of `features`; 0 where a cell has no point. Half types are
        averaged in float32.

    Raises:
        ValueError, TypeError: on a wrong rank, last dimension, number of points, dtype, device, size or option.

    >>> import torch, triops
    >>> rois = torch.tensor([[0.0, 0.0, 0.0, 4.0, 2.0, 2.0, 0.0]])
    >>> points = torch.tensor([[-1.0, 0.0, 1.0], [1.0, 0.0, 1.0], [1.5, 0.0, 1.0], [9.0, 0.0, 1.0]])
    >>> features = torch.tensor([[1.0], [2.0], [3.0], [4.0]])
    >>> triops.roiaware_pool3d(rois, points, features, (2, 1, 1)).flatten()
    tensor([1., 3.])
    >>> triops.roiaware_pool3d(rois, points, features, (2, 1, 1), mode="avg").flatten()
    tensor([1.0000, 2.5000])
    """
    x, y, z = _three("roiaware_pool3d", out_size)
    return _forward(rois, points, features, x, y, z, max_points_per_voxel, mode, z_origin, margin)[0]  # type: ignore[no-any-return]


def roiaware_pool3d_forward(
    rois: Tensor,
    points: Tensor,
    features: Tensor,
    out_size: int | Sequence[int],
    max_points_per_voxel: int = 128,
    mode: Mode = "max",
    *,
    z_origin: ZOrigin = "bottom",
    margin: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """`roiaware_pool3d` with everything that its backward needs. Arguments and errors as for `roiaware_pool3d`.

    Returns:
        pooled: [R, X, Y, Z, C].
        argmax: int32 [R, X, Y, Z, C], the point each maximum came from; -1 where there is none, and for "avg".
        point_indices: int32 [R, X, Y, Z, max_points_per_voxel]. Slot 0 is the count n, slots 1..n hold the
            cell's points in ascending order, the rest is 0.

    >>> import torch, triops
    >>> rois = torch.tensor([[0.0, 0.0, 0.0, 4.0, 2.0, 2.0, 0.0]])
    >>> points = torch.tensor([[-1.0, 0.0, 1.0], [1.0, 0.0, 1.0], [1.5, 0.0, 1.0]])
    >>> _, argmax, point_indices = triops.roiaware_pool3d_forward(rois, points, torch.ones(3, 1), (2, 1, 1), 4)
    >>> argmax.flatten(), point_indices.flatten(0, 3)
    (tensor([0, 1], dtype=torch.int32), tensor([[1, 0, 0, 0],
            [2, 1, 2, 0]], dtype=torch.int32))
    """
    x, y, z = _three("roiaware_pool3d_forward", out_size)
    return _forward(rois, points, features, x, y, z, max_points_per_voxel, mode, z_origin, margin)  # type: ignore[no-any-return]


def roiaware_pool3d_backward(
    point_indices: Tensor, argmax: Tensor, grad_out: Tensor, num_points: int, mode: Mode = "max"
) -> Tensor:
    """Gradient of the features of `roiaware_pool3d`; called by autograd, and public.

    "max" adds `grad_out[v, c]` to `grad_in[argmax[v, c], c]`, skipping -1, and does not read `point_indices`;
    "avg" adds `grad_out[v] / n` to each of the n points listed for the cell, and does not read `argmax`.

    Args:
        point_indices: int32 tensor [R, X, Y, Z, slots] as `roiaware_pool3d_forward` returns it.
        argmax: int32 tensor [R, X, Y, Z, C], likewise.
        grad_out: float tensor [R, X, Y, Z, C].
        num_points: rows of the result.
        mode: "max" or "avg".

    Returns:
        Tensor [num_points, C] of the dtype of `grad_out`. Half types are summed in float32. The same bits on
        every run under `torch.use_deterministic_algorithms(True)`.

    Raises:
        ValueError, TypeError: on a wrong rank, shape, dtype, device or option.
        IndexError: when an index that `mode` reads is not below `num_points`, or a count not below `slots`. On
            a GPU such an index or cell is skipped, unless TRIOPS_CHECK=1 asks for the error there too.

    >>> import torch, triops
    >>> point_indices = torch.tensor([2, 0, 2, 0], dtype=torch.int32).view(1, 1, 1, 1, 4)
    >>> argmax = torch.tensor([2], dtype=torch.int32).view(1, 1, 1, 1, 1)
    >>> grad_out = torch.ones(1, 1, 1, 1, 1)
    >>> triops.roiaware_pool3d_backward(point_indices, argmax, grad_out, 3, "max").flatten()
    tensor([0., 0., 1.])
    >>> triops.roiaware_pool3d_backward(point_indices, argmax, grad_out, 3, "avg").flatten()
    tensor([0.5000, 0.0000, 0.5000])
    """
    return _backward_operator(point_indices, argmax, grad_out, num_points, mode)  # type: ignore[no-any-return]


def _three(operator: str, out_size: int | Sequence[int]) -> tuple[int, int, int]:
    check = _check.Checker(operator)
    one = _check.as_integer(out_size)
    sizes = check.integers("out_size", out_size) if one is None else [one] * 3
    if len(sizes) != 3:
        check.fail(f"out_size must be one integer or three, got {len(sizes)} values")
    x, y, z = sizes
    return x, y, z


def _check_forward(
    rois: Tensor,
    points: Tensor,
    features: Tensor,
    out_x: int,
    out_y: int,
    out_z: int,
    max_points_per_voxel: int,
    mode: str,
    z_origin: str,
    margin: float,
) -> None:
    c = _check.Checker("roiaware_pool3d")
    c.shape("rois", rois, "R", 7)
    c.shape("points", points, "P", 3)
    c.shape("features", features, "P", "C")
    c.dtype("rois", rois, _check.FLOATS)
    c.same_dtype(rois=rois, points=points)
    c.dtype("features", features, _check.FLOATS)
    c.same_device(rois=rois, points=points, features=features)
    for name, size in (("out_x", out_x), ("out_y", out_y), ("out_z", out_z)):
        c.at_least(name, size, 1)
    if out_x * out_y * out_z > _INT32_MAX:
        c.fail(f"out_size must give at most {_INT32_MAX} cells a RoI, got {out_x} x {out_y} x {out_z}")
    c.at_least("max_points_per_voxel", max_points_per_voxel, 1)
    if max_points_per_voxel > _INT32_MAX:
        c.fail(f"max_points_per_voxel must be at most {_INT32_MAX}, since counts are int32, got {max_points_per_voxel}")
    if _check.too_many(points.shape[0]):
        c.fail(f"points must be at most 2**30, since indices are int32, got {points.shape[0]}")
    c.choice("mode", mode, MODES)
    c.choice("z_origin", z_origin, Z_ORIGINS)
    c.finite("margin", margin)


def _check_backward(point_indices: Tensor, argmax: Tensor, grad_out: Tensor, num_points: int, mode: str) -> None:
    c = _check.Checker("roiaware_pool3d_backward")
    c.shape("point_indices", point_indices, "R", "X", "Y", "Z", "slots")
    c.shape("argmax", argmax, "R", "X", "Y", "Z", "C")
    c.shape("grad_out", grad_out, "R", "X", "Y", "Z", "C")
    c.dtype("point_indices", point_indices, (torch.int32,))
    c.dtype("argmax", argmax, (torch.int32,))
    c.dtype("grad_out", grad_out, _check.FLOATS)
    c.same_device(point_indices=point_indices, argmax=argmax, grad_out=grad_out)
    c.at_least("slots of point_indices", point_indices.shape[4], 1)
    c.at_least("num_points", num_points, 0)
    if num_points > _INT32_MAX:
        c.fail(f"num_points must be at most {_INT32_MAX}, since indices are int32, got {num_points}")
    c.choice("mode", mode, MODES)


def _fake_forward(
    rois: Tensor,
    points: Tensor,
    features: Tensor,
    out_x: int,
    out_y: int,
    out_z: int,
    max_points_per_voxel: int,
    mode: str,
    z_origin: str,
    margin: float,
) -> tuple[Tensor, Tensor, Tensor]:
    shape = (rois.shape[0], out_x, out_y, out_z)
    return (
        features.new_empty((*shape, features.shape[1])),
        features.new_empty((*shape, features.shape[1]), dtype=torch.int32),
        features.new_empty((*shape, max_points_per_voxel), dtype=torch.int32),
    )


def _fake_backward(point_indices: Tensor, argmax: Tensor, grad_out: Tensor, num_points: int, mode: str) -> Tensor:
    return grad_out.new_empty((num_points, grad_out.shape[4]))


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    _, argmax, point_indices = output
    ctx.num_points, ctx.mode = inputs[2].shape[0], inputs[7]
    ctx.set_materialize_grads(False)
    # Only the tensor that the mode reads is saved, and the shape of the other, since the lists are large.
    read, unread = (argmax, point_indices) if ctx.mode == "max" else (point_indices, argmax)
    ctx.unread_shape = unread.shape
    ctx.save_for_backward(read)


def _backward(ctx: Any, grad_out: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
    grad_features = None
    if grad_out is not None:
        (read,) = ctx.saved_tensors
        unread = read.new_empty((1,) * 5).expand(ctx.unread_shape)
        point_indices, argmax = (unread, read) if ctx.mode == "max" else (read, unread)
        grad_features = _backward_operator(point_indices, argmax, grad_out, ctx.num_points, ctx.mode)
    return None, None, grad_features, *(None,) * 7


_backward_operator = _op.define(
    reference.roiaware_pool3d_backward,
    check=_check_backward,
    fake=_fake_backward,
    backward=_op.no_second_derivative,
)
_forward = _op.define(
    reference.roiaware_pool3d_forward,
    check=_check_forward,
    fake=_fake_forward,
    setup_context=_setup_context,
    backward=_backward,
)
