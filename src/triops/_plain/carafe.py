"""CARAFE: upsampling by a kernel of its own for every output pixel."""

from __future__ import annotations

from collections.abc import Iterator

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
    windows, weights = _windows(padded, k), wide(masks).view(n, g, k, k, h, s, w, s)
    output = torch.zeros((), dtype=padded.dtype, device=padded.device)
    for rows in _rows(features, k):
        output = output + torch.einsum("ngchwij,ngijhswt->ngchswt", windows[..., rows, :], weights[:, :, rows])
    return output.reshape(n, c, h * s, w * s).to(features.dtype)


def carafe_backward(
    grad_output: Tensor, features: Tensor, masks: Tensor, kernel_size: int, group_size: int, scale_factor: int
) -> tuple[Tensor, Tensor]:
    """The gradients of `carafe` to features and masks, without computing its output once more."""
    n, c, h, w = features.shape
    k, g, s = kernel_size, group_size, scale_factor
    padded = functional.pad(wide(features), [k // 2] * 4).view(n, g, c // g, h + k - 1, w + k - 1)
    windows, weights = _windows(padded, k), wide(masks).view(n, g, k, k, h, s, w, s)
    grad = wide(grad_output).view(n, g, c // g, h, s, w, s)
    of_padded, of_weights = torch.zeros_like(padded), torch.empty_like(weights)
    for rows in _rows(features, k):
        of_weights[:, :, rows] = torch.einsum("ngchwij,ngchswt->ngijhswt", windows[..., rows, :], grad)
        of_windows = torch.einsum("ngijhswt,ngchswt->ijngchw", weights[:, :, rows], grad)
        for i, of_row in enumerate(of_windows, rows.start):
            for j, of_tap in enumerate(of_row):
                of_padded[..., i : i + h, j : j + w] += of_tap
    edge = k // 2
    of_features = of_padded[..., edge : edge + h, edge : edge + w].reshape(features.shape)
    return of_features.to(features.dtype), of_weights.view(masks.shape).to(masks.dtype)


def _windows(padded: Tensor, k: int) -> Tensor:
    """[N, G, C, H + K - 1, W + K - 1] -> [N, G, C, H, W, K, K], a view."""
    return padded.unfold(3, k, 1).unfold(4, k, 1)


def _rows(features: Tensor, k: int) -> Iterator[slice]:
    """Rows of the kernel to take at once: a product copies its windows, which may be many times the output."""
    rows = max(1, min(k, _COPIED // max(1, k * features.numel())))
    return (slice(start, min(start + rows, k)) for start in range(0, k, rows))
