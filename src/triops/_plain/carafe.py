"""CARAFE: upsampling by a kernel of its own for every output pixel."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from triops._plain import wide

_COPIED = 1 << 24  # elements


def carafe(features: Tensor, masks: Tensor, kernel_size: int, group_size: int, scale_factor: int) -> Tensor:
    """features [N, C, H, W], masks [N, G * K * K, H * S, W * S] -> [N, C, H * S, W * S].

    An output pixel is the sum of the K x K features around the input pixel that it comes from, weighted by its mask.
    Features off the map are 0. Channels share the masks of their group.
    """
    n, c, h, w = features.shape
    k, g, s = kernel_size, group_size, scale_factor
    padded = functional.pad(wide(features), [k // 2] * 4).view(n, g, c // g, h + k - 1, w + k - 1)
    windows = padded.unfold(3, k, 1).unfold(4, k, 1)  # [n, g, c, h, w, k, k], a view
    weights = wide(masks).view(n, g, k, k, h, s, w, s)
    output = torch.zeros((), dtype=padded.dtype, device=padded.device)
    # A product copies its windows, which for all rows of the kernel at once may be many times the output.
    rows = max(1, min(k, _COPIED // max(1, k * features.numel())))
    for i in range(0, k, rows):
        taps = windows[..., i : i + rows, :], weights[:, :, i : i + rows]
        output = output + torch.einsum("ngchwij,ngijhswt->ngchswt", *taps)
    return output.reshape(n, c, h * s, w * s).to(features.dtype)
