"""gather_points and group_points: features of points, by index."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from triops import _check, _op
from triops.ops.gather_points import reference


def gather_points(features: Tensor, indices: Tensor) -> Tensor:
    """Features of the points that `indices` name. Differentiable in `features`.

    Args:
        features: float tensor [B, C, N], or [N, C] for clouds of unequal length in one tensor.
        indices: int32 or int64 tensor [B, M] of indices within the cloud, or [M] of rows of all points. -1 is no point.

    Returns:
        Tensor [B, C, M], or [M, C]; 0 for index -1. Gradients are summed in float32 for half types. They are the same
        bits on every run on a CPU, and on a GPU under `torch.use_deterministic_algorithms(True)`.

    Raises:
        ValueError, TypeError: on a wrong rank, batch, dtype or device.
        IndexError: when an index is not in -1..N - 1. On a GPU it counts as -1, unless TRIOPS_CHECK=1 asks for the
            error there too.

    >>> import torch, triops
    >>> triops.gather_points(torch.tensor([[[5.0, 6, 7]]]), torch.tensor([[2, 0, -1]]))
    tensor([[[7., 5., 0.]]])
    """
    return _gather("gather_points", features, indices, 1)


def group_points(features: Tensor, indices: Tensor) -> Tensor:
    """Features of the neighbors of each point. Differentiable in `features`.

    Args:
        features: float tensor [B, C, N], or [N, C] for clouds of unequal length in one tensor.
        indices: int32 or int64 tensor [B, M, K] of indices within the cloud, or [M, K] of rows of all points, as from
            `ball_query` or `knn`. -1 is no point.

    Returns:
        Tensor [B, C, M, K], or [M, K, C]; all else as for `gather_points`.

    Raises:
        As `gather_points`.

    >>> import torch, triops
    >>> triops.group_points(torch.tensor([[5.0], [6], [7]]), torch.tensor([[2, 0], [1, -1]])).flatten(1)
    tensor([[7., 5.],
            [6., 0.]])
    """
    return _gather("group_points", features, indices, 2)


def _gather(name: str, features: Tensor, indices: Tensor, axes: int) -> Tensor:
    """`indices` with `axes` axes behind that of the batch."""
    if axes == 1 and type(features) is Tensor and type(indices) is Tensor and features.dim() == 3 == indices.dim() + 1:
        return _gather_points(features, indices, False)  # type: ignore[no-any-return]
    c = _check.Checker(name)
    for argument, value in (("features", features), ("indices", indices)):
        if not isinstance(value, Tensor):
            c.fail(f"{argument} must be a Tensor, got {type(value).__name__}", TypeError)
    places = ("M", "K")[:axes]
    if features.dim() == 2:
        c.shape("features", features, "N", "C")
        c.shape("indices", indices, *places)
        found = _gather_points(features[None], indices.reshape(1, indices.numel()), True)
        return found.view(*indices.shape, features.shape[1])  # type: ignore[no-any-return]
    c.shape("features", features, "B", "C", "N")
    c.shape("indices", indices, "B", *places)
    batch, channels, _ = features.shape
    found = _gather_points(features, indices.reshape(batch, indices[:1].numel() if batch else 0), False)
    return found.view(batch, channels, *indices.shape[1:])  # type: ignore[no-any-return]


def gather_points_backward(grad_output: Tensor, indices: Tensor, count: int, channels_last: bool = False) -> Tensor:
    """Gradient [B, C, count] of the features of `gather_points`; called by autograd, and public.

    grad_output: [B, C, M]. indices: [B, M]. channels_last: grad_output is [B, M, C] and the gradient [B, count, C].
    Errors as for `gather_points`.
    """
    return _gather_points_backward(grad_output, indices, count, channels_last)  # type: ignore[no-any-return]


def _check_call(c: _check.Checker, name: str, features: Tensor, indices: Tensor, axes: tuple[str, ...]) -> None:
    c.shape(name, features, *axes)
    c.shape("indices", indices, "B", "M")
    c.dtype(name, features, _check.FLOATS)
    c.dtype("indices", indices, _check.INDICES)
    c.same_device(**{name: features, "indices": indices})


def _check_forward(features: Tensor, indices: Tensor, channels_last: bool) -> None:
    c = _check.Checker("gather_points")
    _check_call(c, "features", features, indices, ("B", "N", "C") if channels_last else ("B", "C", "N"))
    _check_count(c, "N", features.shape[1 if channels_last else 2])


def _check_backward(grad_output: Tensor, indices: Tensor, count: int, channels_last: bool) -> None:
    c = _check.Checker("gather_points_backward")
    _check_call(c, "grad_output", grad_output, indices, ("B", "M", "C") if channels_last else ("B", "C", "M"))
    c.at_least("count", count, 0)
    _check_count(c, "count", count)


def _check_count(c: _check.Checker, name: str, count: int) -> None:
    if _check.too_many(count):
        c.fail(f"{name} must be at most 2**30, got {count}")


def _fake_forward(features: Tensor, indices: Tensor, channels_last: bool) -> Tensor:
    batch, places = indices.shape
    channels = features.shape[2 if channels_last else 1]
    return features.new_empty((batch, places, channels) if channels_last else (batch, channels, places))


def _fake_backward(grad_output: Tensor, indices: Tensor, count: int, channels_last: bool) -> Tensor:
    batch = indices.shape[0]
    channels = grad_output.shape[2 if channels_last else 1]
    return grad_output.new_empty((batch, count, channels) if channels_last else (batch, channels, count))


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    features, indices, ctx.channels_last = inputs
    ctx.count = features.shape[1 if ctx.channels_last else 2]
    ctx.save_for_backward(indices)


def _backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None, None]:
    return _gather_points_backward(grad_output, *ctx.saved_tensors, ctx.count, ctx.channels_last), None, None


_gather_points_backward = _op.define(
    reference.gather_points_backward, check=_check_backward, fake=_fake_backward, backward=_op.no_second_derivative
)
_gather_points = _op.define(
    reference.gather_points, check=_check_forward, fake=_fake_forward, setup_context=_setup_context, backward=_backward
)

__all__ = ["gather_points", "gather_points_backward", "group_points"]
