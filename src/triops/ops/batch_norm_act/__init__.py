"""Batch normalisation and the activation behind it as one operator, over the rows that count."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from triops import _check, _op
from triops._activations import ACTIVATIONS
from triops._dtypes import compute_dtype
from triops.ops.batch_norm_act import reference


def batch_norm_act(
    features: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
    activation: str = "none",
    alpha: float = 0.0,
    active: Tensor | None = None,
) -> Tensor:
    """`activation(batch_norm(features))`, differentiable in features, weight and bias.

    As `torch.nn.functional.batch_norm`, which is what it gives without an activation, with two additions: statistics
    are float32 for half types whatever the weight's dtype is, and rows from number `active` on do not count.

    Args:
        features: float [N, C].
        running_mean, running_var: float [C], changed in place while training; or both None.
        weight, bias: float [C] or None.
        training: normalise by the mean and variance of the rows that count; else by the running ones.
        momentum: the share of a batch in the running values.
        eps: added to the variance.
        activation: "none", "relu", "sigmoid", "leaky_relu", "gelu" (exact) or "silu".
        alpha: the slope of leaky_relu below 0.
        active: int32 [1], how many rows count, which the host need not know; None for all. The others give zeros and
            get gradients of zero. Where none counts, the running values stay.

    Returns:
        [N, C], of the dtype of features.

    Raises:
        ValueError, TypeError: on a wrong shape, dtype, device or option; on a single row while training, as torch does.

    >>> import torch, triops
    >>> x = torch.tensor([[1.0], [3.0], [99.0]])
    >>> triops.batch_norm_act(x, None, None, training=True, activation="relu", active=torch.tensor([2]).int())
    tensor([[0.0000],
            [1.0000],
            [0.0000]])
    """
    single = (
        training and not torch.compiler.is_compiling() and isinstance(features, Tensor) and len(features.shape) == 2
    )
    if single and active is None and features.shape[0] == 1:
        raise ValueError(
            f"batch_norm_act: features must have more than one row while training, got shape {list(features.shape)}"
        )
    out, _, running = _batch_norm_act(
        features, weight, bias, running_mean, running_var, active, training, momentum, eps, activation, alpha
    )
    if training and running_mean is not None and running_var is not None:
        torch._foreach_copy_((running_mean, running_var), running.unbind())  # neither has a gradient
    return out  # type: ignore[no-any-return]


def _check_forward(
    features: Tensor, weight: Tensor | None, bias: Tensor | None, running_mean: Tensor | None,
    running_var: Tensor | None, active: Tensor | None, training: bool, share: float, eps: float, activation: str,
    alpha: float,
) -> None:  # fmt: skip
    c = _check.Checker("batch_norm_act")
    _check_features(c, "features", features)
    _check_vectors(c, features, weight=weight, bias=bias, running_mean=running_mean, running_var=running_var)
    if (running_mean is None) != (running_var is None):
        c.fail("running_mean and running_var must both be tensors or both None")
    if not training and running_mean is None:
        c.fail("running_mean and running_var must be tensors where not training, got None")
    _check_options(c, features, active, activation, alpha)
    c.finite("momentum", share)
    c.finite("eps", eps)


def _check_backward(
    grad: Tensor, features: Tensor, weight: Tensor | None, bias: Tensor | None, statistics: Tensor,
    active: Tensor | None, training: bool, activation: str, alpha: float,
) -> None:  # fmt: skip
    c = _check.Checker("batch_norm_act_backward")
    _check_features(c, "features", features)
    _check_features(c, "grad", grad)
    c.same_dtype(grad=grad, features=features)
    _check_vectors(c, features, weight=weight, bias=bias)
    c.shape("statistics", statistics, 2, "C")
    c.dtype("statistics", statistics, (compute_dtype(features.dtype),))
    c.same_device(features=features, grad=grad, statistics=statistics)
    _check_options(c, features, active, activation, alpha)


def _check_features(c: _check.Checker, name: str, features: Tensor) -> None:
    c.shape(name, features, "N", "C")
    c.dtype(name, features, _check.FLOATS)


def _check_vectors(c: _check.Checker, features: Tensor, **vectors: Tensor | None) -> None:
    for name, vector in vectors.items():
        if vector is not None:
            c.shape(name, vector, "C")
            c.dtype(name, vector, _check.FLOATS)
            c.same_device(**{"features": features, name: vector})


def _check_options(c: _check.Checker, features: Tensor, active: Tensor | None, activation: str, alpha: float) -> None:
    if active is not None:
        c.shape("active", active, 1)
        c.dtype("active", active, (torch.int32,))
        c.same_device(features=features, active=active)
    c.choice("activation", activation, ACTIVATIONS)
    c.finite("alpha", alpha)


def _fake_forward(
    features: Tensor, weight: Tensor | None, bias: Tensor | None, running_mean: Tensor | None,
    running_var: Tensor | None, active: Tensor | None, training: bool, share: float, eps: float, activation: str,
    alpha: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    channels, real = features.shape[1], compute_dtype(features.dtype)
    statistics = features.new_empty((2, channels), dtype=real)
    return features.new_empty(features.shape), statistics, statistics.new_empty((2 if training else 0, channels))


def _fake_backward(
    grad: Tensor, features: Tensor, weight: Tensor | None, bias: Tensor | None, statistics: Tensor,
    active: Tensor | None, training: bool, activation: str, alpha: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    channels = features.shape[1]
    return features.new_empty(features.shape), statistics.new_empty((channels,)), statistics.new_empty((channels,))


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    features, weight, bias, _, _, active, ctx.training, _, _, ctx.activation, ctx.alpha = inputs
    ctx.mark_non_differentiable(output[1], output[2])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(features, weight, bias, output[1], active)


def _backward(ctx: Any, grad: Tensor | None, *others: Tensor | None) -> tuple[Any, ...]:
    features, weight, bias, statistics, active = ctx.saved_tensors
    if grad is None:
        return (None,) * 11
    of_features, of_weight, of_bias = _batch_norm_act_backward.of_backward(
        grad, features, weight, bias, statistics, active, ctx.training, ctx.activation, ctx.alpha
    )
    of_weight = None if weight is None else of_weight.to(weight.dtype)
    of_bias = None if bias is None else of_bias.to(bias.dtype)
    return of_features, of_weight, of_bias, *(None,) * 8


_batch_norm_act_backward = _op.define(
    reference.batch_norm_act_backward, check=_check_backward, fake=_fake_backward, backward=_op.no_second_derivative
)
_batch_norm_act = _op.define(
    reference.batch_norm_act, check=_check_forward, fake=_fake_forward, setup_context=_setup_context,
    backward=_backward,
)  # fmt: skip
