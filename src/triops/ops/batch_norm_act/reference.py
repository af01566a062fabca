"""The specification of batch_norm_act and its gradient."""

import math
from typing import Optional

import torch
from torch import Tensor

from triops._activations import activate
from triops._dtypes import compute_dtype


def batch_norm_act(
    features: Tensor, weight: Optional[Tensor], bias: Optional[Tensor], running_mean: Optional[Tensor],  # noqa: UP045
    running_var: Optional[Tensor], active: Optional[Tensor], training: bool, share: float, eps: float,  # noqa: UP045
    activation: str, alpha: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """features [N, C] -> the same normalised and activated; mean and 1 / deviation [2, C]; new running values [2, C].

    The last are [0, C] where not training. `active` int32 [1]: how many rows count; those behind give zeros.
    """
    real = compute_dtype(features.dtype)
    values, counted = features.to(real), _counted(features, active)
    if training:
        count = counted.sum().to(real)
        mean = torch.where(counted, values, 0.0).sum(0) / count.clamp(min=1)
        mean = mean + torch.where(counted, values - mean, 0.0).sum(0) / count.clamp(min=1)  # what rounding has left
        squares = torch.where(counted, (values - mean).square(), 0.0).sum(0)
        variance = squares / count.clamp(min=1)
        seen = torch.stack([mean, squares / (count - 1).clamp(min=1)])
        before = seen
        if running_mean is not None and running_var is not None:
            before = torch.stack([running_mean.to(real), running_var.to(real)])
        running = torch.where(count > 0, before + (seen - before) * share, before)
    else:
        assert running_mean is not None
        assert running_var is not None
        mean, variance = running_mean.to(real), running_var.to(real)
        running = values.new_empty((0, features.shape[1]))
    inverse = torch.rsqrt(variance + eps)
    out = activate(_affine((values - mean) * inverse, weight, bias), activation, alpha)
    return torch.where(counted, out, 0.0).to(features.dtype), torch.stack([mean, inverse]), running


def batch_norm_act_backward(
    grad: Tensor, features: Tensor, weight: Optional[Tensor], bias: Optional[Tensor], statistics: Tensor,  # noqa: UP045
    active: Optional[Tensor], training: bool, activation: str, alpha: float,  # noqa: UP045
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """-> gradients of features [N, C], and of weight and bias [C] in the dtype of the statistics."""
    values, counted = features.to(statistics.dtype), _counted(features, active)
    mean, inverse = statistics
    normal = (values - mean) * inverse
    outer = grad.to(values.dtype) * slope(_affine(normal, weight, bias), activation, alpha)
    normal, outer = (torch.where(counted, t, 0.0) for t in (normal, outer))
    grad_weight, grad_bias = (outer * normal).sum(0), outer.sum(0)
    inner = outer
    if training:
        count = counted.sum().clamp(min=1).to(values.dtype)
        inner = outer - (grad_bias + normal * grad_weight) / count
    inner = inner * inverse if weight is None else inner * (inverse * weight)
    return torch.where(counted, inner, 0.0).to(features.dtype), grad_weight, grad_bias


def _counted(features: Tensor, active: Optional[Tensor]) -> Tensor:  # noqa: UP045
    """bool [N, 1]: which rows count."""
    rows = torch.arange(features.shape[0], device=features.device)[:, None]
    return rows < features.shape[0] if active is None else rows < active


def _affine(normal: Tensor, weight: Optional[Tensor], bias: Optional[Tensor]) -> Tensor:  # noqa: UP045
    normal = normal if weight is None else normal * weight.to(normal.dtype)
    return normal if bias is None else normal + bias.to(normal.dtype)


def slope(z: Tensor, activation: str, alpha: float) -> Tensor:
    """The derivative of `activate` at z; as in torch, at 0 that from below."""
    if activation == "relu":
        return torch.where(z <= 0, torch.zeros_like(z), 1.0)
    if activation == "leaky_relu":
        return torch.where(z <= 0, torch.full_like(z, alpha), 1.0)
    if activation == "gelu":
        return 0.5 * (1 + torch.erf(z * math.sqrt(0.5))) + z * torch.exp(-0.5 * z * z) * (1 / math.sqrt(2 * math.pi))
    if activation in ("sigmoid", "silu"):
        s = z.sigmoid()
        return s * (1 - s) if activation == "sigmoid" else s * (1 + z * (1 - s))
    return torch.ones_like(z)
