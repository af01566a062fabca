"""Synchronised batch normalisation of `mmcv._ext`, in plain torch.

Each process computes its part; mmcv's Python layer sums the parts over `torch.distributed` between these functions.
Inputs are [N, C, S], statistics float32 [C].
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor


def sync_bn_forward_mean(input: Tensor, mean: Tensor) -> None:
    mean.copy_(input.to(mean.dtype).mean((0, 2)))


def sync_bn_forward_var(input: Tensor, mean: Tensor, var: Tensor) -> None:
    """Around the mean of all processes."""
    var.copy_((input.to(var.dtype) - mean[:, None]).square().mean((0, 2)))


def sync_bn_forward_output(
    input: Tensor, mean: Tensor, var: Tensor, weight: Tensor | None, bias: Tensor | None,
    running_mean: Tensor | None, running_var: Tensor | None, norm: Tensor, std: Tensor, output: Tensor, eps: float,
    momentum: float | Tensor, group_size: int,
) -> None:  # fmt: skip
    std.copy_((var + eps).sqrt())
    norm.copy_((input.to(mean.dtype) - mean[:, None]) / std[:, None])
    if weight is None or bias is None:
        output.copy_(norm)
    else:
        output.copy_(norm * weight[:, None] + bias[:, None])
    if running_mean is not None and running_var is not None:
        count = input.shape[0] * input.shape[2] * group_size
        unbiased = var * count / (count - 1) if count > 1 else var
        running_mean.copy_(momentum * mean + (1 - momentum) * running_mean)
        running_var.copy_(momentum * unbiased + (1 - momentum) * running_var)


def sync_bn_backward_param(grad_output: Tensor, norm: Tensor, grad_weight: Tensor, grad_bias: Tensor) -> None:
    grad = grad_output.to(norm.dtype)
    grad_weight.copy_((grad * norm).sum((0, 2)))
    grad_bias.copy_(grad.sum((0, 2)))


def sync_bn_backward_data(
    grad_output: Tensor, weight: Tensor, grad_weight: Tensor, grad_bias: Tensor, norm: Tensor, std: Tensor,
    grad_input: Tensor,
) -> None:  # fmt: skip
    count = grad_output.shape[0] * grad_output.shape[2]
    shared = (grad_weight[:, None] * norm + grad_bias[:, None]) / count
    grad_input.copy_(weight[:, None] * (grad_output.to(norm.dtype) - shared) / std[:, None])


FUNCTIONS: dict[str, Callable[..., Any]] = {
    function.__name__: function
    for function in (
        sync_bn_forward_mean, sync_bn_forward_var, sync_bn_forward_output, sync_bn_backward_param,
        sync_bn_backward_data,
    )
}  # fmt: skip
