"""Inputs of deform_conv2d and deform_conv2d_backward."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from triops._check import FLOATS
from triops._sample import BadCall, Sample, Sized, Standard, Work, bytes_of, compiled_mmcv
from triops.ops.deform_conv2d import deform_conv2d, deform_conv2d_backward

_F, _B = "deform_conv2d", "deform_conv2d_backward"
_Make = Callable[[torch.dtype], tuple[Any, ...]]


def convolution(
    shape: tuple[int, int, int, int], outputs: int, kernel: tuple[int, int] = (3, 3), *, stride: int = 1,
    padding: int = 1, dilation: int = 1, groups: int = 1, offset_groups: int = 1, masked: bool = True,
    bias: bool = True, channels_last: bool = False, spread: float = 1.0, coordinates: torch.dtype | None = None,
    seed: int = 0,
) -> _Make:  # fmt: skip
    """A layer as networks have it. spread: of the offsets, in pixels. coordinates: the dtype of offset and mask, if
    another."""

    def make(dtype: torch.dtype) -> tuple[Any, ...]:
        g = torch.Generator().manual_seed(seed)
        batch, channels, *sizes = shape
        pairs = zip(sizes, kernel, strict=True)
        out = [max((size + 2 * padding - dilation * (k - 1) - 1) // stride + 1, 0) for size, k in pairs]
        taps = offset_groups * kernel[0] * kernel[1]
        input = torch.randn(shape, generator=g).to(dtype)
        offset = spread * torch.randn(batch, 2 * taps, *out, generator=g)
        mask = torch.rand(batch, taps, *out, generator=g)
        scale = max(channels // groups * kernel[0] * kernel[1], 1) ** -0.5
        weight = scale * torch.randn(outputs, channels // groups, *kernel, generator=g)
        shift = torch.randn(outputs, generator=g)
        tensors = [input, offset.to(coordinates or dtype), weight.to(dtype), mask.to(coordinates or dtype)]
        if channels_last:
            tensors = [t.contiguous(memory_format=torch.channels_last) for t in tensors]
        return (*tensors[:3], tensors[3] if masked else None, shift.to(dtype) if bias else None, [stride] * 2,
                [padding] * 2, [dilation] * 2)  # fmt: skip

    return make


def _backward(make: _Make) -> _Make:
    def made(dtype: torch.dtype) -> tuple[Any, ...]:
        input, offset, weight, mask, _, *steps = make(dtype)
        g = torch.Generator().manual_seed(9)
        grad = torch.randn(input.shape[0], weight.shape[0], *offset.shape[2:], generator=g).to(dtype)
        if input.stride(1) == 1 and not input.is_contiguous():
            grad = grad.contiguous(memory_format=torch.channels_last)
        return grad, input, offset, weight, mask, *steps, True, True

    return made


def _on_the_border(dtype: torch.dtype) -> tuple[Any, ...]:
    """Samples at and around the borders of a map of 3 x 4, beyond them, and not finite; some masks are not either."""
    input, offset, *rest = convolution((1, 5, 3, 4), 3, (1, 1), padding=5, seed=1)(dtype)
    places = torch.tensor(
        [math.nan, -1e30, -1.5, -1.0, -0.999, -0.25, 0.0, 1.0, 1.5, 2.0, 2.75, 3.0, 4.0, math.inf], dtype=dtype
    )
    offset[0, 0] = (places[:13] + 5 - torch.arange(13))[:, None]  # an output of 13 x 14
    offset[0, 1] = places + 5 - torch.arange(14)
    return input, offset, *rest


def _not_finite(dtype: torch.dtype) -> tuple[Any, ...]:
    """Infinite and NaN pixels and masks, some of them where a sample lies off the map or half off it."""
    input, offset, weight, mask, *rest = convolution((1, 5, 6, 7), 3, spread=3.0, seed=3)(dtype)
    input[0, 1, 2, 3], input[0, 3, 4, 1] = math.inf, math.nan
    mask[0, 4, ::3], mask[0, 2, 1::4], mask[0, 0, 0] = math.nan, -math.inf, math.nan
    offset[0, ::5, 1], offset[0, 3, :, 2], offset[0, 8, 3] = math.nan, -math.inf, 1e30
    return input, offset, weight, mask, *rest


_LARGE, _CAMERAS, _SMALL = (2, 256, 100, 152), (6, 64, 232, 400), (2, 256, 25, 38)
_CASES: list[tuple[str, _Make, Any]] = [
    ("256 to 256, [2, 256, 100, 152] NCHW", convolution(_LARGE, 256), "large"),
    ("256 to 256, [2, 256, 100, 152] NHWC", convolution(_LARGE, 256, channels_last=True), "large"),
    ("64 to 64, [6, 64, 232, 400] NCHW", convolution(_CAMERAS, 64), "large"),
    ("64 to 64, [6, 64, 232, 400] NHWC", convolution(_CAMERAS, 64, channels_last=True), "large"),
    ("256 to 256, [2, 256, 25, 38] NCHW", convolution(_SMALL, 256), "large"),
    ("256 to 256, [2, 256, 25, 38] NHWC", convolution(_SMALL, 256, channels_last=True), "large"),
    ("64 to 64, [1, 64, 25, 38]", convolution((1, 64, 25, 38), 64), "network"),
    ("2 offset groups", convolution((1, 8, 4, 5), 6, (1, 2), offset_groups=2), "general"),
    ("v1, groups, stride 2, dilation 2, NHWC",
     convolution((2, 12, 7, 6), 4, (1, 2), stride=2, padding=2, dilation=2, groups=2, offset_groups=3, masked=False,
                 channels_last=True), "general"),
    ("float32 offsets", convolution((1, 20, 5, 4), 33, (1, 1), padding=0, coordinates=torch.float32, bias=False),
     "general"),
    ("borders and beyond", _on_the_border, "boundary"),
    ("not finite", _not_finite, "boundary"),
    ("no images", convolution((0, 4, 5, 6), 4), "boundary"),
    ("no channels", convolution((1, 0, 5, 6), 4), "boundary"),
    ("no outputs", convolution((1, 4, 5, 6), 0), "boundary"),
    ("no rows", convolution((1, 4, 0, 6), 4, padding=2), "boundary"),
    ("one of everything", convolution((1, 1, 1, 1), 1, (1, 1), padding=0), "boundary"),
    ("70 to 130 channels, 300 pixels, NHWC", convolution((1, 70, 15, 20), 130, (1, 1), padding=0, channels_last=True),
     "boundary"),
    ("a group per channel", convolution((1, 3, 4, 5), 6, (1, 2), groups=3), "boundary"),
]  # fmt: skip
SAMPLES = [
    Sample(op, name, make(case), "network" if scale == "large" else scale,
           (torch.float32,) if scale == "boundary" or name.startswith("v1") else
           FLOATS[:3] if name == "float32 offsets" else FLOATS,
           demo=name == "64 to 64, [1, 64, 25, 38]", gpu_only=scale == "large")
    for op, make in ((_F, lambda case: case), (_B, _backward))
    for name, case, scale in _CASES
]  # fmt: skip
SAMPLES.append(
    Sample(_F, "to differentiate", convolution((1, 4, 3, 4), 2, (2, 2), groups=2, offset_groups=2, seed=5),
           dtypes=FLOATS[:1], gradcheck=True)
)  # fmt: skip


def _sized(draw: Callable[[int], int]) -> _Make:
    return convolution((draw(3), 32, draw(60), draw(60)), 16)


SIZED = [Sized(_F, "maps", _sized), Sized(_B, "maps", lambda draw: _backward(_sized(draw)))]


def _bad_calls() -> list[BadCall]:
    input, offset, weight, mask, bias, *_ = convolution((2, 6, 5, 7), 4, padding=0)(torch.float32)
    good: dict[str, Any] = {"input": input, "offset": offset, "weight": weight, "bias": bias, "mask": mask}

    def bad(what: str, error: type[Exception], match: str, **changed: Any) -> BadCall:
        return BadCall(f"{_F}: {what}", lambda: deform_conv2d(**{**good, **changed}), error, match)

    return [
        bad("input of rank 3", ValueError, r"input must have shape \[B, C, H, W\]", input=input[0]),
        bad("offsets of one image", ValueError, "B = 2 as in input", offset=offset[:1]),
        bad("offsets of 17 channels", ValueError, r"offset must have .*G \* 18 channels.*got 17", offset=offset[:, 1:]),
        bad("4 offset groups for 6 channels", ValueError, "G divide C = 6, got 72", offset=offset.repeat(1, 4, 1, 1)),
        bad("offsets of another size", ValueError, "OH of offset must be 3 .*got 2", offset=offset[:, :, 1:],
            mask=None),
        bad("a mask of 8 taps", ValueError, r"mask must have G \* kH \* kW = 9 channels, got 8", mask=mask[:, 1:]),
        bad("a mask of another size", ValueError, "OW = 5 as in offset", mask=mask[..., 1:]),
        bad("a weight of 4 channels", ValueError, "must divide C = 6, got 4", weight=weight[:, :4]),
        bad("3 outputs in 2 groups", ValueError, "groups = 2 must divide the N = 3", weight=weight[:3, :3]),
        bad("a weight without taps", ValueError, "at least one tap", weight=weight[..., :0]),
        bad("a bias of 3", ValueError, r"bias must have shape \[N\] with N = 4", bias=bias[:3]),
        bad("a kernel larger than the map", ValueError, "kernel must fit .*got 9 pixels for 5 along H", dilation=4),
        bad("integer input", TypeError, "input must be float32.*got int64", input=input.long()),
        bad("a weight of another dtype", TypeError, "weight float64", weight=weight.double()),
        bad("half offsets of a float32 map", TypeError, "offset must be float32, got float16", offset=offset.half()),
        bad("unequal devices", ValueError, "mask on meta", mask=mask.to("meta")),
        bad("a stride of 0", ValueError, "stride must be at least 1, got 0", stride=0),
        bad("three strides", ValueError, "stride must be one integer or two", stride=(1, 2, 3)),
        bad("a padding of -1", ValueError, "padding must be at least 0", padding=(0, -1)),
        bad("a dilation of 1.5", TypeError, "dilation must be a sequence of integers, got float", dilation=1.5),
        bad("a huge padding", ValueError, "padding must be at most 1048576", padding=2**30),
        bad("weight None", TypeError, "weight must be a Tensor", weight=None),
        BadCall(f"{_B}: a gradient of another size", lambda: deform_conv2d_backward(
            input, input, offset, weight, mask, 1, 0, 1), ValueError, "grad must have shape"),
    ]  # fmt: skip


BAD_CALLS = _bad_calls()

_READS = "four pixels per tap are gathered wherever the offsets point"
# Gradients are sums over channels, taps and corners, in an order of each backend's own: where they cancel, the error of
# one small value says nothing, so those of all values and the largest count.
STANDARD = {
    _F: Standard(error_scale="row", arithmetic="matrix", why_slower=_READS),
    _B: Standard(floats="static", error_scale="row", arithmetic="matrix", why_slower=_READS),
}


def work(operator: str, args: tuple[Any, ...]) -> Work:
    input, offset, weight = args[:3] if operator == _F else args[1:4]
    pixels = offset.shape[0] * offset.shape[2] * offset.shape[3]
    products = pixels * weight.numel()
    if operator == _F:
        return Work(bytes_of(args) + pixels * weight.shape[0] * input.element_size(), 2 * products)
    return Work(bytes_of(args) + bytes_of(args[1:]), 4 * products)


def baselines(operator: str) -> dict[str, Callable[..., Any]]:
    if operator == _B:
        return {"torch": _differentiated}
    found: dict[str, Callable[..., Any]] = {"torch": by_grid_sample}
    mmcv = compiled_mmcv()
    if mmcv is not None:

        def compiled(
            input: Tensor, offset: Tensor, weight: Tensor, mask: Tensor | None, bias: Tensor | None, stride: list[int],
            padding: list[int], dilation: list[int],
        ) -> Tensor:  # fmt: skip
            output = input.new_empty((input.shape[0], weight.shape[0], *offset.shape[2:]))
            none = input.new_empty(0)
            mask = torch.ones_like(offset[:, ::2]) if mask is None else mask
            mmcv.modulated_deform_conv_forward(
                input, weight, none if bias is None else bias, none, offset.to(input.dtype), mask.to(input.dtype),
                output, none, kernel_h=weight.shape[2], kernel_w=weight.shape[3], stride_h=stride[0],
                stride_w=stride[1], pad_h=padding[0], pad_w=padding[1], dilation_h=dilation[0],
                dilation_w=dilation[1], group=input.shape[1] // weight.shape[1],
                deformable_group=offset.shape[1] // (2 * weight[0, 0].numel()), with_bias=bias is not None,
            )  # fmt: skip
            return output

        found["mmcv"] = compiled
    try:
        from torchvision.ops import deform_conv2d as peer  # type: ignore[import-not-found, unused-ignore]
    except ImportError:
        return found

    def torchvision(
        input: Tensor, offset: Tensor, weight: Tensor, mask: Tensor | None, bias: Tensor | None, stride: list[int],
        padding: list[int], dilation: list[int],
    ) -> Tensor:  # fmt: skip
        of_map = [t if t is None else t.to(input.dtype) for t in (offset, mask)]
        return peer(  # type: ignore[no-any-return]
            input, of_map[0], weight, bias, tuple(stride), tuple(padding), tuple(dilation), of_map[1]
        )

    found["torchvision"] = torchvision
    return found


def by_grid_sample(
    input: Tensor, offset: Tensor, weight: Tensor, mask: Tensor | None, bias: Tensor | None, stride: list[int],
    padding: list[int], dilation: list[int],
) -> Tensor:  # fmt: skip
    """What one writes in torch: one `grid_sample` per tap, and a product."""
    (batch, channels, height, width), (outputs, own, rows, columns) = input.shape, weight.shape
    out_height, out_width = offset.shape[2:]
    places = offset.reshape(-1, rows * columns, 2, out_height, out_width)  # [B * G, taps, 2, OH, OW]
    masks = None if mask is None else mask.reshape(len(places), 1, rows * columns, out_height, out_width)
    maps = input.reshape(len(places), -1, height, width)
    y = (torch.arange(out_height, device=input.device) * stride[0] - padding[0])[:, None]
    x = torch.arange(out_width, device=input.device) * stride[1] - padding[1]
    read = []
    for tap in range(rows * columns):
        at_y = y + tap // columns * dilation[0] + places[:, tap, 0]
        at_x = x + tap % columns * dilation[1] + places[:, tap, 1]
        grid = torch.stack([(2 * at_x + 1) / width - 1, (2 * at_y + 1) / height - 1], -1).to(input.dtype)
        found = F.grid_sample(maps, grid, align_corners=False)
        read.append(found if masks is None else found * masks[:, :, tap].to(input.dtype))
    groups = channels // own
    found = torch.stack(read, 2).view(batch, groups, own * rows * columns, out_height * out_width)
    out = weight.reshape(groups, outputs // groups, -1) @ found
    out = out.view(batch, outputs, out_height, out_width)
    return out if bias is None else out + bias.view(-1, 1, 1)


def _differentiated(
    grad: Tensor, input: Tensor, offset: Tensor, weight: Tensor, mask: Tensor | None, stride: list[int],
    padding: list[int], dilation: list[int], of_inputs: bool, of_weight: bool,
) -> Any:  # fmt: skip
    leaves = [t.detach().requires_grad_() for t in (input, offset, weight)]
    masks = None if mask is None else mask.detach().requires_grad_()
    with torch.enable_grad():
        out = by_grid_sample(leaves[0], leaves[1], leaves[2], masks, None, stride, padding, dilation)
    grads = torch.autograd.grad(out, leaves if masks is None else [*leaves, masks], grad)
    return grads[0], grads[1], input.new_empty(0) if masks is None else grads[3], grads[2]
