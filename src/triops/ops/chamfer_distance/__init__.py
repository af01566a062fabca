"""chamfer_distance: how far the points of two sets are from the nearest of the other."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from triops import _check, _op
from triops._dtypes import compute_dtype
from triops.ops.chamfer_distance import reference


def chamfer_distance(xyz1: Tensor, xyz2: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Squared distances of the points of two sets to the nearest point of the other set, and its indices.

    The mean of both distances is the Chamfer distance of the sets. Differentiable in both. Of equal distances, in
    float32 (float64 for float64), the lower index is nearer.

    Args:
        xyz1: float tensor [B, N, 2] or [B, N, 3].
        xyz2: tensor [B, M, 2] or [B, M, 3] of the same dtype.

    Returns:
        Squared distances [B, N] and [B, M], float32, or float64 for float64, and int32 indices of the same shapes.
        A point without any other that is a finite distance away has distance inf and index -1, and no gradient.

    Raises:
        ValueError, TypeError: on a wrong shape, dtype or device.

    >>> import torch, triops
    >>> one, two = torch.tensor([[[0.0, 0], [3, 0]]]), torch.tensor([[[1.0, 0]]])
    >>> triops.chamfer_distance(one, two)[:3]
    (tensor([[1., 4.]]), tensor([[1.]]), tensor([[0, 0]], dtype=torch.int32))
    """
    return _chamfer_distance(xyz1, xyz2)  # type: ignore[no-any-return]


def chamfer_distance_backward(
    xyz1: Tensor, xyz2: Tensor, idx1: Tensor, idx2: Tensor, grad_dist1: Tensor, grad_dist2: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradients of xyz1 and xyz2, given those of the two distances; called by autograd, and public.

    idx1 [B, N], idx2 [B, M]: from `chamfer_distance`. grad_dist1 [B, N], grad_dist2 [B, M]: of the dtype of the
    distances. The same bits on every run on a CPU, and on a GPU under `torch.use_deterministic_algorithms(True)`.
    An index that is not there raises IndexError on a CPU and is passed over on a GPU.
    """
    return _chamfer_distance_backward(  # type: ignore[no-any-return]
        xyz1, xyz2, idx1, idx2, grad_dist1, grad_dist2
    )


def _check_sets(c: _check.Checker, xyz1: Tensor, xyz2: Tensor) -> None:
    if xyz1.dim() != 3 or xyz1.shape[2] not in (2, 3):
        c.fail(f"xyz1 must have shape [B, N, 2] or [B, N, 3], got {list(xyz1.shape)}")
    c.shape("xyz1", xyz1, "B", "N", "D")
    c.shape("xyz2", xyz2, "B", "M", "D")
    c.dtype("xyz1", xyz1, _check.FLOATS)
    c.same_dtype(xyz1=xyz1, xyz2=xyz2)
    c.same_device(xyz1=xyz1, xyz2=xyz2)
    for name, points in (("xyz1", xyz1), ("xyz2", xyz2)):
        if _check.too_many(points.shape[0] * points.shape[1]):
            c.fail(f"{name} must be at most 2**30 points, since indices are int32, got {list(points.shape)}")


def _check_forward(xyz1: Tensor, xyz2: Tensor) -> None:
    _check_sets(_check.Checker("chamfer_distance"), xyz1, xyz2)


def _check_backward(
    xyz1: Tensor, xyz2: Tensor, idx1: Tensor, idx2: Tensor, grad_dist1: Tensor, grad_dist2: Tensor
) -> None:
    c = _check.Checker("chamfer_distance_backward")
    _check_sets(c, xyz1, xyz2)
    real = compute_dtype(xyz1.dtype)
    for name, tensor, count, dtype in (
        ("idx1", idx1, "N", torch.int32), ("idx2", idx2, "M", torch.int32),
        ("grad_dist1", grad_dist1, "N", real), ("grad_dist2", grad_dist2, "M", real),
    ):  # fmt: skip
        c.shape(name, tensor, "B", count)
        c.dtype(name, tensor, (dtype,))
        c.same_device(**{"xyz1": xyz1, name: tensor})


def _fake_forward(xyz1: Tensor, xyz2: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    distances = [t.new_empty(t.shape[:2], dtype=compute_dtype(t.dtype)) for t in (xyz1, xyz2)]
    return distances[0], distances[1], *(torch.empty_like(d, dtype=torch.int32) for d in distances)  # type: ignore[return-value]


def _fake_backward(
    xyz1: Tensor, xyz2: Tensor, idx1: Tensor, idx2: Tensor, grad_dist1: Tensor, grad_dist2: Tensor
) -> tuple[Tensor, Tensor]:
    return xyz1.new_empty(xyz1.shape), xyz2.new_empty(xyz2.shape)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.mark_non_differentiable(*output[2:])
    ctx.save_for_backward(*inputs, *output[2:])


def _backward(ctx: Any, grad_dist1: Tensor, grad_dist2: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return _chamfer_distance_backward(*ctx.saved_tensors, grad_dist1, grad_dist2)  # type: ignore[no-any-return]


_chamfer_distance_backward = _op.define(
    reference.chamfer_distance_backward, check=_check_backward, fake=_fake_backward, backward=_op.no_second_derivative
)
_chamfer_distance = _op.define(
    reference.chamfer_distance, check=_check_forward, fake=_fake_forward, setup_context=_setup_context,
    backward=_backward,
)  # fmt: skip
