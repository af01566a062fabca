"""roipoint_pool3d: the points of each 3D box, with their features."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from triops import _check, _op
from triops._geometry.box.reference import Z_ORIGINS, ZOrigin
from triops.ops.gather_points import gather_points_backward
from triops.ops.roipoint_pool3d import reference

MOST_SAMPLES = 2**24


def roipoint_pool3d(
    points: Tensor,
    features: Tensor,
    boxes: Tensor,
    count: int = 512,
    *,
    z_origin: ZOrigin = "bottom",
    margin: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Coordinates and features of the first points in each box. Differentiable in points and features.

    Whether a point is in a box is decided as in `points_in_boxes`.

    Args:
        points: float tensor [B, N, 3].
        features: float tensor [B, N, C].
        boxes: tensor [B, M, 7] of the points' dtype: `(cx, cy, cz, dx, dy, dz, heading)`.
        count: points taken of each box: the lowest in order; a box with fewer repeats its own from the first on.
        z_origin: "bottom" where `cz` is the bottom face of the box (mmdetection3d), or "center" (OpenPCDet).
        margin: added to the half sizes in x and y.

    Returns:
        pooled [B, M, count, 3 + C] of the features' dtype: coordinates, then features; 0 for a box without points.
        empty, bool [B, M]: whether a box has none.

    Raises:
        ValueError, TypeError: on a wrong rank, shape, dtype, device, count or option.

    >>> import torch, triops
    >>> points = torch.tensor([[[0.0, 0, 1], [5, 5, 5], [0.5, 0, 1]]])
    >>> boxes = torch.tensor([[[0.0, 0, 0, 2, 2, 2, 0], [90, 0, 0, 2, 2, 2, 0]]])
    >>> pooled, empty = triops.roipoint_pool3d(points, torch.tensor([[[7.0], [8], [9]]]), boxes, 3)
    >>> pooled[0, 0, :, 3].tolist(), empty.tolist()
    ([7.0, 9.0, 7.0], [[False, True]])
    """
    pooled, indices = _roipoint_pool3d(points, features, boxes, count, z_origin, margin)
    return pooled, indices[:, :, 0] < 0


def roipoint_pool3d_indices(
    points: Tensor,
    features: Tensor,
    boxes: Tensor,
    count: int = 512,
    *,
    z_origin: ZOrigin = "bottom",
    margin: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """`roipoint_pool3d`, and int32 [B, M, count] with the points that were taken in place of `empty`; -1 for none."""
    return _roipoint_pool3d(points, features, boxes, count, z_origin, margin)  # type: ignore[no-any-return]


def _check_call(points: Tensor, features: Tensor, boxes: Tensor, count: int, z_origin: str, margin: float) -> None:
    c = _check.Checker("roipoint_pool3d")
    c.shape("points", points, "B", "N", 3)
    c.shape("features", features, "B", "N", "C")
    c.shape("boxes", boxes, "B", "M", 7)
    c.dtype("points", points, _check.FLOATS)
    c.dtype("features", features, _check.FLOATS)
    c.same_dtype(points=points, boxes=boxes)
    c.same_device(points=points, features=features, boxes=boxes)
    c.at_least("count", count, 1)
    if not isinstance(count, torch.SymInt) and count > MOST_SAMPLES:
        c.fail(f"count must be at most {MOST_SAMPLES}, got {count}")
    c.choice("z_origin", z_origin, Z_ORIGINS)
    c.finite("margin", margin)
    for name, size in (("points", points.shape[1]), ("boxes", boxes.shape[1])):
        if _check.too_many(size):
            c.fail(f"{name} must be at most 2**30 per batch element, got {size}")


def _fake(
    points: Tensor, features: Tensor, boxes: Tensor, count: int, z_origin: str, margin: float
) -> tuple[Tensor, Tensor]:
    shape = (*boxes.shape[:2], count)
    return features.new_empty((*shape, 3 + features.shape[2])), features.new_empty(shape, dtype=torch.int32)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    points = inputs[0]
    ctx.mark_non_differentiable(output[1])
    ctx.count, ctx.dtype = points.shape[1], points.dtype
    ctx.save_for_backward(output[1])


def _backward(ctx: Any, grad: Tensor, _: Any) -> tuple[Tensor | None, ...]:
    (indices,) = ctx.saved_tensors
    grad, indices = grad.flatten(1, 2), indices.flatten(1)
    of_points = of_features = None
    if ctx.needs_input_grad[0]:
        of_points = gather_points_backward(grad[..., :3].contiguous(), indices, ctx.count, True).to(ctx.dtype)
    if ctx.needs_input_grad[1]:
        of_features = gather_points_backward(grad[..., 3:].contiguous(), indices, ctx.count, True)
    return of_points, of_features, None, None, None, None


_roipoint_pool3d = _op.define(
    reference.roipoint_pool3d, check=_check_call, fake=_fake, setup_context=_setup_context, backward=_backward
)

__all__ = ["roipoint_pool3d", "roipoint_pool3d_indices"]
