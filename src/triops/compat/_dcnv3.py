"""DCNv3 of InternImage, which it compiles as the module `DCNv3` and detrex into `detrex._C`.

A filter of InternImage reads its taps at learned offsets, with learned weights per group of channels: deformable
attention whose queries are the output's pixels, whose heads are the groups, and whose places are the taps.
"""

from __future__ import annotations

import importlib
import importlib.util
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import triops
from triops._dtypes import compute_dtype

VERSION = "1.1"  # of the module that knows filters without their centre


def dcnv3_forward(
    input: Tensor, offset: Tensor, mask: Tensor, kernel_h: int, kernel_w: int, stride_h: int, stride_w: int,
    pad_h: int, pad_w: int, dilation_h: int, dilation_w: int, group: int, group_channels: int, offset_scale: float,
    im2col_step: int, remove_center: int = 0,
) -> Tensor:  # fmt: skip
    """input [N, H, W, group * group_channels], offset [N, PH, PW, group * taps * 2] of (x, y), mask
    [N, PH, PW, group * taps] -> [N, PH, PW, group * group_channels]. Taps go from column to column.

    `im2col_step`, how many images the compiled function takes at a time, is not needed here.
    """
    sizes = kernel_h, kernel_w, stride_h, stride_w, pad_h, pad_w, dilation_h, dilation_w, group, group_channels
    operands = _as_attention(input, offset, mask, *sizes, offset_scale, bool(remove_center))
    return triops.ms_deform_attn(*operands).view(*offset.shape[:3], -1)


def dcnv3_backward(
    input: Tensor, offset: Tensor, mask: Tensor, kernel_h: int, kernel_w: int, stride_h: int, stride_w: int,
    pad_h: int, pad_w: int, dilation_h: int, dilation_w: int, group: int, group_channels: int, offset_scale: float,
    grad_output: Tensor, im2col_step: int, remove_center: int = 0,
) -> list[Tensor]:  # fmt: skip
    """Gradients of input, offset and mask, each of the dtype of its own."""
    sizes = kernel_h, kernel_w, stride_h, stride_w, pad_h, pad_w, dilation_h, dilation_w, group, group_channels
    operands = _as_attention(input, offset, mask, *sizes, offset_scale, bool(remove_center))
    grad = grad_output.to(input.dtype).reshape(input.shape[0], -1, input.shape[3])
    of_input, of_places, of_mask = triops.ms_deform_attn_backward(grad.contiguous(), *operands)
    height, width = input.shape[1:3]
    of_offset = torch.stack(
        [of_places[..., 0] * (offset_scale / width), of_places[..., 1] * (offset_scale / height)], -1
    )
    found = of_input.view(input.shape), of_offset.view(offset.shape), of_mask.view(mask.shape)
    return [made.to(given.dtype) for made, given in zip(found, (input, offset, mask), strict=True)]


def _as_attention(
    input: Tensor, offset: Tensor, mask: Tensor, kernel_h: int, kernel_w: int, stride_h: int, stride_w: int,
    pad_h: int, pad_w: int, dilation_h: int, dilation_w: int, group: int, group_channels: int, offset_scale: float,
    remove_center: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Value, shapes, starts, locations and weights of one level, as deformable attention has them."""
    batch, height, width, channels = input.shape
    if channels != group * group_channels:
        raise ValueError(f"dcnv3: input must have {group} * {group_channels} channels, got {channels}")
    if remove_center and not kernel_h == kernel_w % 2 * kernel_w:
        raise ValueError(f"dcnv3: remove_center must be 0 but for odd square kernels, got {kernel_h} x {kernel_w}")
    taps = kernel_h * kernel_w - remove_center
    rows = (height + 2 * pad_h - dilation_h * (kernel_h - 1) - 1) // stride_h + 1
    columns = (width + 2 * pad_w - dilation_w * (kernel_w - 1) - 1) // stride_w + 1
    for name, tensor, numbers in (("offset", offset, 2 * group * taps), ("mask", mask, group * taps)):
        if tensor.shape != (batch, rows, columns, numbers):
            expected = [batch, rows, columns, numbers]
            raise ValueError(f"dcnv3: {name} must have shape {expected}, got {list(tensor.shape)}")

    dtype, device = compute_dtype(input.dtype), input.device
    x = _taps(columns, stride_w, pad_w, kernel_w, dilation_w, offset_scale, dtype, device)  # [PW, kernel_w]
    y = _taps(rows, stride_h, pad_h, kernel_h, dilation_h, offset_scale, dtype, device)  # [PH, kernel_h]
    learned = offset.to(dtype).reshape(batch, rows, columns, group, taps, 2)
    places = []
    for axis, (regular, size) in enumerate(((x[None, :, :, None], width), (y[:, None, None, :], height))):
        pixels = regular.expand(rows, columns, kernel_w, kernel_h).flatten(2)  # [PH, PW, taps]
        if remove_center:
            pixels = torch.cat([pixels[..., : taps // 2], pixels[..., taps // 2 + 1 :]], 2)
        places.append((pixels[:, :, None] + learned[..., axis] * offset_scale + 0.5) / size)
    shape = torch.zeros((1, 2), dtype=torch.int64, device=device)
    shape[:, 0], shape[:, 1] = height, width
    return (
        input.reshape(batch, height * width, group, group_channels),
        shape,
        torch.zeros(1, dtype=torch.int64, device=device),
        torch.stack(places, -1).view(batch, rows * columns, group, 1, taps, 2),
        mask.to(dtype).reshape(batch, rows * columns, group, 1, taps),
    )


def _taps(
    count: int, stride: int, pad: int, kernel: int, dilation: int, scale: float, dtype: torch.dtype,
    device: torch.device,
) -> Tensor:  # fmt: skip
    """The pixels that each output along an axis reads, [count, kernel]; `scale` spreads them about the middle one."""
    reach = dilation * (kernel - 1) // 2
    middle = torch.arange(count, dtype=dtype, device=device) * stride + (reach - pad)
    steps = torch.arange(kernel, dtype=dtype, device=device) * dilation - reach
    return middle[:, None] + steps * scale


def announce() -> None:
    """Say that there is a distribution `DCNv3`, whose version InternImage's classification reads from setuptools."""
    if importlib.util.find_spec("pkg_resources") is None:
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        setuptools: Any = importlib.import_module("pkg_resources")
    if "dcnv3" not in setuptools.working_set.by_key:
        setuptools.working_set.add(setuptools.Distribution(project_name="DCNv3", version=VERSION))


FUNCTIONS: dict[str, Callable[..., Any]] = {function.__name__: function for function in (dcnv3_forward, dcnv3_backward)}
