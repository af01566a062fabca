"""Inputs of roi_pool_forward and roi_pool_backward."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from triops import scenes
from triops._dtypes import compute_dtype
from triops._roi_samples import Case, Kinds, Make, samples, sized, small_cases
from triops._sample import BadCall, Standard, Work, bytes_of, compiled_mmcv
from triops.ops.roi_pool import roi_pool, roi_pool_backward
from triops.ops.roi_pool.reference import NONE, bins

_F, _B = "roi_pool_forward", "roi_pool_backward"


def maps(
    shape: tuple[int, int, int, int], total: int, size: tuple[int, int] = (7, 7), *, channels_last: bool = False,
    scale: float = 0.25, boxes: list[list[float]] | None = None, rounded: bool = False,
) -> Make:  # fmt: skip
    """Boxes of any size over and around the map, or those that are given; `rounded` features have equal maxima."""

    def make(dtype: torch.dtype) -> tuple[Any, ...]:
        input = scenes.feature_map(shape, dtype, channels_last=channels_last)
        own = scenes.boxes_on_maps(shape, total, scale=scale, boxes=boxes).to(compute_dtype(dtype))
        return input.round() if rounded else input, own, *size, scale

    return make


def _backward(make: Make) -> Make:
    """A pixel of each bin, drawn at random, stands for its maximum: that takes no forward."""

    def made(dtype: torch.dtype) -> tuple[Any, ...]:
        input, boxes, rows, columns, scale = make(dtype)
        height, width = input.shape[2:]
        shape = len(boxes), input.shape[1], rows, columns
        top, bottom, left, right = bins(boxes, rows, columns, scale, height, width, dtype)
        top, bottom = (edge[:, None, :, None] for edge in (top, bottom))
        left, right = (edge[:, None, None, :] for edge in (left, right))
        drawn = torch.rand((2, *shape), generator=torch.Generator().manual_seed(8))
        row, column = top + (drawn[0] * (bottom - top)).long(), left + (drawn[1] * (right - left)).long()
        argmax = torch.where((top < bottom) & (left < right), row * width + column, NONE).int()
        channels_last = input.stride(1) == 1 and not input.is_contiguous()
        if channels_last:
            argmax = argmax.contiguous(memory_format=torch.channels_last)
        grad = scenes.feature_map(shape, dtype, channels_last=channels_last, seed=9)
        return grad, boxes, argmax, input.shape[0], height, width, channels_last

    return made


_LARGE = (2, 256, 200, 304)  # the largest map of a feature pyramid
_NOT_FINITE = torch.tensor([[math.nan, -math.inf, math.inf], [-3e38, -3.4028235e38, math.nan]]).repeat(2, 2)


def _strange_features(dtype: torch.dtype) -> tuple[Any, ...]:
    boxes = torch.tensor([[0.0, x, y, x + 1, y + 1] for y in range(3) for x in range(5)])
    return _NOT_FINITE[None, None].to(dtype), boxes.to(compute_dtype(dtype)), 2, 2, 1.0


_CASES: list[Case] = [
    ("[2, 256, 200, 304] NHWC, 1,024 boxes, 7 x 7", maps(_LARGE, 1024, channels_last=True), "large"),
    ("[2, 256, 200, 304] NCHW, 1,024 boxes, 7 x 7", maps(_LARGE, 1024), "large"),
    ("[1, 64, 50, 76] NCHW, 100 boxes, 7 x 7", maps((1, 64, 50, 76), 100), "network"),
    ("[1, 64, 50, 76] NHWC, 100 boxes, 7 x 7", maps((1, 64, 50, 76), 100, channels_last=True), "network"),
    ("a few boxes", maps((2, 5, 6, 7), 5, (2, 3)), "general"),
    ("a few boxes, NHWC, equal maxima", maps((2, 6, 7, 6), 5, (3, 2), channels_last=True, rounded=True), "general"),
    ("strange boxes", maps((1, 3, 4, 6), 0, (1, 2), scale=1.0, boxes=scenes.STRANGE_BOXES), "boundary"),
    ("strange boxes, NHWC", maps((1, 3, 4, 6), 0, (3, 2), scale=0.5, boxes=scenes.STRANGE_BOXES, channels_last=True),
     "boundary"),
    ("features that are not finite", _strange_features, "boundary"),
    *small_cases(maps),
]  # fmt: skip
_KINDS: Kinds = ((_F, lambda case: case), (_B, _backward))
SAMPLES = samples(_KINDS, _CASES, "[1, 64, 50, 76] NCHW")
SIZED = sized(_KINDS, maps)


def _bad_calls() -> list[BadCall]:
    input, boxes = torch.zeros(2, 3, 5, 6), torch.zeros(4, 5)
    good: dict[str, Any] = {"input": input, "boxes": boxes, "output_size": 2}
    grad, argmax = torch.zeros(4, 3, 2, 2), torch.zeros(4, 3, 2, 2, dtype=torch.int32)

    def bad(what: str, error: type[Exception], match: str, **changed: Any) -> BadCall:
        return BadCall(f"roi_pool: {what}", lambda: roi_pool(**{**good, **changed}), error, match)

    def back(what: str, error: type[Exception], match: str, *args: Any) -> BadCall:
        return BadCall(f"roi_pool_backward: {what}", lambda: roi_pool_backward(*args), error, match)

    return [
        bad("input of rank 3", ValueError, r"input must have shape \[N, C, H, W\]", input=input[0]),
        bad("boxes of 4 columns", ValueError, r"boxes must have shape \[K, 5\]", boxes=boxes[:, 1:]),
        bad("a list of other length", ValueError, "one Tensor per image .*got 1 for 2", boxes=[boxes[:, 1:]]),
        bad("boxes of another dtype", TypeError, "boxes float64", boxes=boxes.double()),
        bad("unequal devices", ValueError, "boxes on meta", boxes=boxes.to("meta")),
        bad("no bins", ValueError, "output_size must be at least 1, got 0", output_size=0),
        bad("a scale that is not finite", ValueError, "spatial_scale must be finite", spatial_scale=math.inf),
        bad("an image that is not there", IndexError, "images from 0 to 1", boxes=boxes + 2),
        bad("an image that is no number", IndexError, "images from 0 to 1", boxes=boxes + math.nan),
        back("pixels of another shape", ValueError, "argmax must have shape", grad, boxes, argmax[:1], 2, 5, 6),
        back("pixels of another dtype", TypeError, "argmax must be int32", grad, boxes, argmax.long(), 2, 5, 6),
        back("a negative height", ValueError, "height must be at least 0", grad, boxes, argmax, 2, -5, 6),
        back("too many pixels", ValueError, "at most 2.*30 pixels", grad, boxes, argmax, 2, 2**20, 2**20),
        back("an image that is not there", IndexError, "images from 0 to 1", grad, boxes - 3, argmax, 2, 5, 6),
    ]


BAD_CALLS = _bad_calls()

STANDARD = {
    _F: Standard(floats="exact", why_slower="the pixels of a bin are read wherever a box lies"),
    _B: Standard(error_scale="row", why_slower="gradients are added wherever the maxima lie"),
}


def work(operator: str, args: tuple[Any, ...]) -> Work:
    if operator == _F:
        input, boxes, rows, columns = args[:4]
        outputs = len(boxes) * input.shape[1] * rows * columns
        return Work(bytes_of(args) + outputs * (input.element_size() + 4), outputs)
    grad = args[0]
    return Work(bytes_of(args) + grad.shape[1] * args[3] * args[4] * args[5] * grad.element_size(), grad.numel())


def baselines(operator: str) -> dict[str, Callable[..., Any]]:
    mmcv = compiled_mmcv()
    if operator == _B or mmcv is None:
        return {}

    def compiled(input: Tensor, boxes: Tensor, rows: int, columns: int, scale: float) -> tuple[Tensor, Tensor]:
        output = input.new_zeros((len(boxes), input.shape[1], rows, columns))
        argmax = torch.zeros_like(output, dtype=torch.int32)
        mmcv.roi_pool_forward(
            input, boxes.to(input.dtype), output, argmax, pooled_height=rows, pooled_width=columns, spatial_scale=scale
        )
        return output, argmax

    return {"mmcv": compiled}
