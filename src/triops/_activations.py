"""The activations that a fused convolution knows, in the order in which kernels number them."""

from __future__ import annotations

from math import inf

from torch import Tensor
from torch.nn import functional as F

ACTIVATIONS = ("none", "relu", "sigmoid", "leaky_relu", "gelu", "silu")


def activate(values: Tensor, activation: str, alpha: float) -> Tensor:
    """`alpha` is the slope of leaky_relu below 0; gelu is the exact one."""
    if activation == "relu":
        return F.relu(values)
    if activation == "sigmoid":
        return values.sigmoid()
    if activation == "leaky_relu":
        return F.leaky_relu(values, alpha)
    if activation == "gelu":
        return F.gelu(values).masked_fill(values == inf, inf)  # of torch on CPU, NaN
    return F.silu(values) if activation == "silu" else values
