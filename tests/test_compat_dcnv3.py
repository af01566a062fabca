"""Facts about the module `DCNv3` of InternImage."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from triops.compat import ms_deform_attn

MODULE = ms_deform_attn.extension("DCNv3")
CASES = [  # height, width, kernel, stride, padding, dilation, each as (h, w), scale, without centre
    (6, 7, (3, 3), (1, 1), (1, 1), (1, 1), 1.0, False),
    (6, 7, (3, 3), (1, 2), (1, 1), (2, 1), 0.7, True),
    (5, 8, (2, 3), (2, 1), (0, 2), (1, 2), 2.0, False),
    (5, 4, (1, 4), (1, 1), (1, 0), (1, 1), 1.0, False),
    (7, 7, (5, 5), (2, 2), (2, 2), (1, 1), 1.3, True),
]


def read(image: Tensor, y: Tensor, x: Tensor) -> Tensor:
    """image [H, W, C], bilinear, zeros around it."""
    top, left = y.floor(), x.floor()
    total = 0
    for row, column in ((0, 0), (0, 1), (1, 0), (1, 1)):
        r, c = int(top) + row, int(left) + column
        if 0 <= r < image.shape[0] and 0 <= c < image.shape[1]:
            total = total + image[r, c] * (1 - (y - r).abs()) * (1 - (x - c).abs())
    return total


def plain(
    input: Tensor, offset: Tensor, mask: Tensor, kernel: tuple[int, int], stride: tuple[int, int],
    pad: tuple[int, int], dilation: tuple[int, int], group: int, scale: float, hollow: bool,
) -> Tensor:  # fmt: skip
    """Tap by tap: the taps of a filter, column by column, spread by `scale` about its middle one."""
    batch, rows, columns, _ = offset.shape
    centre = [d * (k - 1) // 2 for d, k in zip(dilation, kernel, strict=True)]
    taps = [(j, i) for i in range(kernel[1]) for j in range(kernel[0])]
    if hollow:
        taps.remove((kernel[0] // 2, kernel[1] // 2))
    images = input.unflatten(3, (group, -1))
    offset, mask = offset.unflatten(3, (group, len(taps), 2)), mask.unflatten(3, (group, len(taps)))
    result = []
    for n, r, c, g in torch.cartesian_prod(*map(torch.arange, (batch, rows, columns, group))).tolist():
        total = torch.zeros(images.shape[4], dtype=input.dtype)
        for p, (j, i) in enumerate(taps):
            dx, dy = offset[n, r, c, g, p]
            y = r * stride[0] - pad[0] + centre[0] + (j * dilation[0] - centre[0] + dy) * scale
            x = c * stride[1] - pad[1] + centre[1] + (i * dilation[1] - centre[1] + dx) * scale
            total = total + read(images[n, :, :, g], y, x) * mask[n, r, c, g, p]
        result.append(total)
    return torch.stack(result).view(batch, rows, columns, -1)


@pytest.mark.parametrize("case", CASES)
def test_taps_are_read_at_offsets_with_gradients(case: tuple[Any, ...]) -> None:
    height, width, kernel, stride, pad, dilation, scale, hollow = case
    g = torch.Generator().manual_seed(0)
    rows, columns = (
        (n + 2 * p - d * (k - 1) - 1) // s + 1
        for n, p, d, k, s in zip((height, width), pad, dilation, kernel, stride, strict=True)
    )
    batch, group, channels = 1, 2, 3
    taps = kernel[0] * kernel[1] - hollow
    input = torch.randn(batch, height, width, group * channels, dtype=torch.float64, generator=g).requires_grad_()
    offset = torch.randn(batch, rows, columns, group * taps * 2, dtype=torch.float64, generator=g).requires_grad_()
    mask = torch.randn(batch, rows, columns, group * taps, dtype=torch.float64, generator=g).requires_grad_()
    expected = plain(input, offset, mask, kernel, stride, pad, dilation, group, scale, hollow)
    operands = [t.detach() for t in (input, offset, mask)]
    sizes = *kernel, *stride, *pad, *dilation, group, channels, scale
    torch.testing.assert_close(MODULE.dcnv3_forward(*operands, *sizes, 64, hollow), expected.detach())
    grad = torch.randn(expected.shape, dtype=torch.float64, generator=g)
    wanted = torch.autograd.grad(expected, (input, offset, mask), grad)
    found = MODULE.dcnv3_backward(*operands, *sizes, grad, 64, hollow)
    for got, want in zip(found, wanted, strict=True):
        torch.testing.assert_close(got, want)

    halves = [t.half() for t in operands]
    exact = MODULE.dcnv3_forward(*(t.double() for t in halves), *sizes, 64, hollow)
    torch.testing.assert_close(MODULE.dcnv3_forward(*halves, *sizes, 64, hollow), exact.half(), rtol=1e-3, atol=1e-3)
    assert [t.dtype for t in MODULE.dcnv3_backward(*halves, *sizes, grad.half(), 64, hollow)] == [torch.float16] * 3


def test_a_wrong_size_is_refused() -> None:
    input, offset, mask = torch.zeros(1, 4, 4, 2), torch.zeros(1, 4, 4, 18), torch.zeros(1, 4, 4, 9)
    sizes = 3, 3, 1, 1, 1, 1, 1, 1
    with pytest.raises(ValueError, match=r"input must have 1 \* 3 channels, got 2"):
        MODULE.dcnv3_forward(input, offset, mask, *sizes, 1, 3, 1.0, 64)
    with pytest.raises(ValueError, match=r"mask must have shape \[1, 4, 4, 9\], got \[1, 4, 4, 8\]"):
        MODULE.dcnv3_forward(input, offset, mask[..., :8], *sizes, 1, 2, 1.0, 64)
    with pytest.raises(ValueError, match="remove_center"):
        MODULE.dcnv3_forward(input, offset, mask, 2, *sizes[1:], 1, 2, 1.0, 64, 1)


def test_setuptools_is_told_the_version_that_internimage_asks_for(monkeypatch: pytest.MonkeyPatch) -> None:
    added: dict[str, Any] = {}
    stub: Any = ModuleType("pkg_resources")
    stub.__spec__ = SimpleNamespace()
    stub.Distribution = SimpleNamespace
    stub.working_set = SimpleNamespace(by_key={}, add=lambda made: added.update(vars(made)))
    monkeypatch.setitem(sys.modules, "pkg_resources", stub)
    ms_deform_attn.extension("DCNv3")
    assert added == {"project_name": "DCNv3", "version": "1.1"}
