"""Correlation of two feature maps over displacements, as optical flow networks compute it."""

from __future__ import annotations

from types import EllipsisType

import torch
from torch import Tensor
from torch.nn import functional

from triops._plain import wide

Pair = tuple[int, int]
Index = tuple[EllipsisType, slice, slice]


def correlation(
    first: Tensor, second: Tensor, kernel: Pair, patch: Pair, padding: Pair, dilation: Pair, patch_dilation: Pair,
    stride: Pair,
) -> Tensor:  # fmt: skip
    """Two maps [N, C, H, W] -> [N, PH, PW, OH, OW]: products of windows of one with displaced windows of the other.

    Windows have the size `kernel`, with gaps of `dilation`, and start every `stride` pixels of the padded first map.
    Displacements are multiples of `patch_dilation`, around 0. Pixels off the maps are 0.
    """
    shifted, windows = _displaced(wide(second), patch, patch_dilation)
    products = [(wide(first) * shifted[window]).sum(1) for window in windows]
    maps = functional.pad(torch.stack(products, 1), [padding[1], padding[1], padding[0], padding[0]])
    taps = _taps(maps, kernel, dilation, stride)
    output = sum((maps[tap] for tap in taps[1:]), maps[taps[0]])
    return output.view(len(output), *patch, *output.shape[2:]).to(first.dtype)


def correlation_backward(
    grad_output: Tensor, first: Tensor, second: Tensor, kernel: Pair, patch: Pair, padding: Pair, dilation: Pair,
    patch_dilation: Pair, stride: Pair,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The gradients of `correlation` to both maps, added up in place, displacement by displacement."""
    n, _, h, w = first.shape
    grad, values = wide(grad_output).flatten(1, 2), wide(first)
    maps = grad.new_zeros(n, grad.shape[1], h + 2 * padding[0], w + 2 * padding[1])
    for tap in _taps(maps, kernel, dilation, stride):
        maps[tap] += grad
    of_products = maps[..., padding[0] : padding[0] + h, padding[1] : padding[1] + w]
    shifted, windows = _displaced(wide(second), patch, patch_dilation)
    of_first, of_shifted = torch.zeros_like(values), torch.zeros_like(shifted)
    for of_product, window in zip(of_products.split(1, 1), windows, strict=True):
        of_first.addcmul_(of_product, shifted[window])
        of_shifted[window].addcmul_(of_product, values)
    top, left = (gap * (count - 1) // 2 for gap, count in zip(patch_dilation, patch, strict=True))
    of_second = of_shifted[..., top : top + h, left : left + w]
    return of_first.to(first.dtype), of_second.to(second.dtype)


def _displaced(second: Tensor, patch: Pair, gap: Pair) -> tuple[Tensor, list[Index]]:
    """The second map with zeros around it, and where in it each displacement reads, in the order of the patch."""
    h, w = second.shape[2:]
    down, right = (step * (count - 1) for step, count in zip(gap, patch, strict=True))
    shifted = functional.pad(second, [right // 2, right - right // 2, down // 2, down - down // 2])
    starts = [(i * gap[0], j * gap[1]) for i in range(patch[0]) for j in range(patch[1])]
    return shifted, [(..., slice(y, y + h), slice(x, x + w)) for y, x in starts]


def _taps(maps: Tensor, kernel: Pair, dilation: Pair, stride: Pair) -> list[Index]:
    """What each pixel of the kernel reads of padded maps."""
    rows, columns = (
        [slice(tap * gap, tap * gap + size - (taps - 1) * gap, step) for tap in range(taps)]
        for size, taps, gap, step in zip(maps.shape[2:], kernel, dilation, stride, strict=True)
    )
    return [(..., row, column) for row in rows for column in columns]
