"""three_interpolate: features at places between points, as weighted sums over their neighbors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from triops import _check, _op
from triops.ops.three_interpolate import reference

HALVES = (torch.float16, torch.bfloat16)


def three_interpolate(features: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
    """Weighted sums of the features of neighbors. Differentiable in features and weights.

    Args:
        features: float tensor [B, C, M], or [M, C] for clouds of unequal length in one tensor.
        indices: int32 or int64 tensor [B, N, K] of indices within the cloud, or [N, K] of rows of all points, as from
            `three_nn`: K is 3, or any other number. -1 is no point.
        weights: tensor of the shape of `indices`, of the features' dtype, or float32 where that is a half type.

    Returns:
        Tensor [B, C, N], or [N, C], of the features' dtype. Half types are computed in float32 and rounded once.

    Raises:
        ValueError, TypeError: on a wrong rank, shape, dtype or device.
        IndexError: when an index is not in -1..M - 1. On a GPU it counts as -1, unless TRIOPS_CHECK=1 asks for the
            error there too.

    >>> import torch, triops
    >>> features = torch.tensor([[[10.0, 20, 40]]])
    >>> triops.three_interpolate(features, torch.tensor([[[0, 1, 2]]]), torch.tensor([[[0.5, 0.25, 0.25]]]))
    tensor([[[20.]]])
    """
    c = _check.Checker("three_interpolate")
    for name, value in (("features", features), ("indices", indices), ("weights", weights)):
        if not isinstance(value, Tensor):
            c.fail(f"{name} must be a Tensor, got {type(value).__name__}", TypeError)
    if features.dim() == 2:
        c.shape("features", features, "M", "C")
        c.shape("indices", indices, "N", "K")
        c.shape("weights", weights, "N", "K")
        return _three_interpolate(features[None], indices[None], weights[None], True)[0]  # type: ignore[no-any-return]
    return _three_interpolate(features, indices, weights, False)  # type: ignore[no-any-return]


def three_interpolate_backward(
    grad_output: Tensor, features: Tensor, indices: Tensor, weights: Tensor, channels_last: bool = False,
    of_weights: bool = True,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Gradients of features and weights of `three_interpolate`; called by autograd, and public.

    grad_output: [B, C, N]; features: [B, C, M], of whose values only the second gradient depends. channels_last: these
    are [B, N, C] and [B, M, C]. of_weights: False spares the second gradient, which is then empty.
    The same bits on every run on a CPU, and on a GPU under `torch.use_deterministic_algorithms(True)`.
    """
    return _three_interpolate_backward(  # type: ignore[no-any-return]
        grad_output, features, indices, weights, channels_last, of_weights
    )


def _check_call(c: _check.Checker, features: Tensor, indices: Tensor, weights: Tensor, channels_last: bool) -> None:
    c.shape("features", features, *(("B", "M", "C") if channels_last else ("B", "C", "M")))
    c.shape("indices", indices, "B", "N", "K")
    c.shape("weights", weights, "B", "N", "K")
    c.dtype("features", features, _check.FLOATS)
    c.dtype("indices", indices, _check.INDICES)
    if not (weights.dtype == torch.float32 and features.dtype in HALVES):
        c.same_dtype(features=features, weights=weights)
    c.same_device(features=features, indices=indices, weights=weights)
    if _check.too_many(features.shape[1 if channels_last else 2]):
        c.fail(f"features must be of at most 2**30 points, got {features.shape[1 if channels_last else 2]}")


def _check_forward(features: Tensor, indices: Tensor, weights: Tensor, channels_last: bool) -> None:
    _check_call(_check.Checker("three_interpolate"), features, indices, weights, channels_last)


def _check_backward(
    grad_output: Tensor, features: Tensor, indices: Tensor, weights: Tensor, channels_last: bool, of_weights: bool
) -> None:
    c = _check.Checker("three_interpolate_backward")
    _check_call(c, features, indices, weights, channels_last)
    c.shape("grad_output", grad_output, *(("B", "N", "C") if channels_last else ("B", "C", "N")))
    c.same_dtype(features=features, grad_output=grad_output)
    c.same_device(features=features, grad_output=grad_output)


def _fake_forward(features: Tensor, indices: Tensor, weights: Tensor, channels_last: bool) -> Tensor:
    batch, places, _ = indices.shape
    channels = features.shape[2 if channels_last else 1]
    return features.new_empty((batch, places, channels) if channels_last else (batch, channels, places))


def _fake_backward(
    grad_output: Tensor, features: Tensor, indices: Tensor, weights: Tensor, channels_last: bool, of_weights: bool
) -> tuple[Tensor, Tensor]:
    return features.new_empty(features.shape), weights.new_empty(weights.shape if of_weights else (0,))


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    features, indices, weights, ctx.channels_last = inputs
    ctx.save_for_backward(features, indices, weights)


def _backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
    of_weights = ctx.needs_input_grad[2]
    grads = _three_interpolate_backward(grad_output, *ctx.saved_tensors, ctx.channels_last, of_weights)
    return grads[0], None, grads[1] if of_weights else None, None


_three_interpolate_backward = _op.define(
    reference.three_interpolate_backward, check=_check_backward, fake=_fake_backward, backward=_op.no_second_derivative
)
_three_interpolate = _op.define(
    reference.three_interpolate, check=_check_forward, fake=_fake_forward, setup_context=_setup_context,
    backward=_backward,
)  # fmt: skip

__all__ = ["three_interpolate", "three_interpolate_backward"]
