"""Initial weights: `MinkowskiEngine.utils.init`."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def kaiming_normal_(tensor: Tensor, a: float = 0, mode: str = "fan_in", nonlinearity: str = "leaky_relu") -> Tensor:
    """Normal weights in place, for a kernel [K, Cin, Cout]. One of [Cin, Cout] is taken for a linear layer's
    [out, in], as in MinkowskiEngine."""
    if tensor.dim() < 2:
        raise ValueError(f"kaiming_normal_: tensor must have 2 axes or more, got {tensor.dim()}")
    if mode.lower() not in ("fan_in", "fan_out"):
        raise ValueError(f"kaiming_normal_: mode must be 'fan_in' or 'fan_out', got {mode!r}")
    if tensor.dim() == 2:
        fans = {"fan_in": tensor.shape[1], "fan_out": tensor.shape[0]}
    else:
        fans = {"fan_in": tensor.shape[0] * tensor.shape[1], "fan_out": tensor.shape[0] * tensor.shape[2]}
    gain = torch.nn.init.calculate_gain(nonlinearity, a)  # type: ignore[arg-type]
    with torch.no_grad():
        return tensor.normal_(0, gain / math.sqrt(fans[mode.lower()]))


__all__ = ["kaiming_normal_"]
