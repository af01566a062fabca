"""Correlation of two feature maps over displacements, as optical flow networks compute it."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from triops._plain import wide

Pair = tuple[int, int]


def correlation(
    first: Tensor, second: Tensor, kernel: Pair, patch: Pair, padding: Pair, dilation: Pair, patch_dilation: Pair,
    stride: Pair,
) -> Tensor:  # fmt: skip
    """Two maps [N, C, H, W] -> [N, PH, PW, OH, OW]: products of windows of one with displaced windows of the other.

    Windows have the size `kernel`, with gaps of `dilation`, and start every `stride` pixels of the padded first map.
    Displacements are multiples of `patch_dilation`, around 0. Pixels off the maps are 0.
    """
    h, w = first.shape[2:]
    reach = [gap * (count - 1) // 2 for gap, count in zip(patch_dilation, patch, strict=True)]
    shifted = functional.pad(wide(second), [reach[1], reach[1], reach[0], reach[0]])
    products = [
        (wide(first) * shifted[..., i * patch_dilation[0] :, j * patch_dilation[1] :][..., :h, :w]).sum(1)
        for i in range(patch[0])
        for j in range(patch[1])
    ]
    maps = functional.pad(torch.stack(products, 1), [padding[1], padding[1], padding[0], padding[0]])
    rows, columns = (
        (size - (taps - 1) * gap - 1) // step + 1
        for size, taps, gap, step in zip(maps.shape[2:], kernel, dilation, stride, strict=True)
    )
    output = torch.zeros((), dtype=maps.dtype, device=maps.device)
    for i in range(kernel[0]):
        for j in range(kernel[1]):
            window = maps[..., i * dilation[0] :, j * dilation[1] :][..., :: stride[0], :: stride[1]]
            output = output + window[..., :rows, :columns]
    return output.view(-1, *patch, rows, columns).to(first.dtype)
