"""Inputs of prroi_pool, prroi_pool_backward and prroi_pool_boxes_backward."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from triops import scenes
from triops._dtypes import compute_dtype
from triops._roi_samples import Case, Kinds, Make, gradient_like, samples, sized, small_cases
from triops._sample import BadCall, Standard, Work, bytes_of, compiled_mmcv
from triops.ops.prroi_pool import prroi_pool, prroi_pool_backward, prroi_pool_boxes_backward

_F, _B, _C = "prroi_pool", "prroi_pool_backward", "prroi_pool_boxes_backward"


def maps(
    shape: tuple[int, int, int, int], total: int, bins: tuple[int, int] = (7, 7), *, channels_last: bool = False,
    scale: float = 0.25, boxes: list[list[float]] | None = None,
) -> Make:  # fmt: skip
    """Boxes of any size over and around the map, or those that are given."""

    def make(dtype: torch.dtype) -> tuple[Any, ...]:
        input = scenes.feature_map(shape, dtype, channels_last=channels_last)
        own = scenes.boxes_on_maps(shape, total, scale=scale, boxes=boxes).to(compute_dtype(dtype))
        return input, own, *bins, scale

    return make


def _backward(make: Make) -> Make:
    def made(dtype: torch.dtype) -> tuple[Any, ...]:
        input, boxes, rows, columns, scale = make(dtype)
        grad, channels_last = gradient_like(input, len(boxes), rows, columns)
        return grad, boxes, input.shape[0], *input.shape[2:], scale, channels_last

    return made


def _boxes_backward(make: Make) -> Make:
    def made(dtype: torch.dtype) -> tuple[Any, ...]:
        input, boxes, rows, columns, scale = make(dtype)
        return gradient_like(input, len(boxes), rows, columns)[0], input, boxes, scale

    return made


_LARGE = (2, 256, 100, 152)
_CASES: list[Case] = [
    ("[2, 256, 100, 152] NHWC, 512 boxes, 7 x 7", maps(_LARGE, 512, channels_last=True), "large"),
    ("[2, 256, 100, 152] NCHW, 512 boxes, 7 x 7", maps(_LARGE, 512), "large"),
    ("[1, 32, 40, 48] NCHW, 20 boxes, 7 x 7", maps((1, 32, 40, 48), 20), "network"),
    ("[1, 32, 40, 48] NHWC, 20 boxes, 7 x 7", maps((1, 32, 40, 48), 20, channels_last=True), "network"),
    ("a few boxes", maps((2, 5, 6, 7), 3, (2, 3)), "general"),
    ("a few boxes, NHWC", maps((2, 6, 7, 6), 3, (3, 2), channels_last=True), "general"),
    ("strange boxes", maps((1, 3, 4, 6), 0, (2, 1), scale=1.0, boxes=scenes.STRANGE_BOXES), "boundary"),
    *small_cases(maps),
]  # fmt: skip
_KINDS: Kinds = ((_F, lambda case: case), (_B, _backward), (_C, _boxes_backward))
SAMPLES = samples(_KINDS, _CASES, "[1, 32, 40, 48] NCHW")
SIZED = sized(_KINDS, maps)


def _bad_calls() -> list[BadCall]:
    input, boxes = torch.zeros(2, 3, 5, 6), torch.zeros(4, 5)
    good: dict[str, Any] = {"input": input, "boxes": boxes, "output_size": 2}
    grad = torch.zeros(4, 3, 2, 2)

    def bad(what: str, error: type[Exception], match: str, **changed: Any) -> BadCall:
        return BadCall(f"prroi_pool: {what}", lambda: prroi_pool(**{**good, **changed}), error, match)

    def back(what: str, error: type[Exception], match: str, *args: Any) -> BadCall:
        return BadCall(f"{_B}: {what}", lambda: prroi_pool_backward(*args), error, match)

    def to_boxes(what: str, error: type[Exception], match: str, *args: Any) -> BadCall:
        return BadCall(f"{_C}: {what}", lambda: prroi_pool_boxes_backward(*args), error, match)

    return [
        bad("input of rank 3", ValueError, r"input must have shape \[N, C, H, W\]", input=input[0]),
        bad("boxes of 4 columns", ValueError, r"boxes must have shape \[K, 5\]", boxes=boxes[:, 1:]),
        bad("boxes of another dtype", TypeError, "boxes float64", boxes=boxes.double()),
        bad("unequal devices", ValueError, "boxes on meta", boxes=boxes.to("meta")),
        bad("no bins", ValueError, "output_size must be at least 1, got 0", output_size=0),
        bad("a scale that is not finite", ValueError, "spatial_scale must be finite", spatial_scale=math.inf),
        bad("an image that is not there", IndexError, "images from 0 to 1", boxes=boxes + 2),
        bad("an image that is no number", IndexError, "images from 0 to 1", boxes=boxes + math.nan),
        back("a negative height", ValueError, "height must be at least 0", grad, boxes, 2, -5, 6, 1.0),
        back("an image that is not there", IndexError, "images from 0 to 1", grad, boxes - 3, 2, 5, 6, 1.0),
        to_boxes("other channels", ValueError, "grad_output must have shape", grad[:, :2], input, boxes, 1.0),
        to_boxes("another dtype", TypeError, "grad_output float64", grad.double(), input, boxes, 1.0),
        to_boxes("an image that is not there", IndexError, "images from 0 to 1", grad, input, boxes - 3, 1.0),
    ]


BAD_CALLS = _bad_calls()

STANDARD = {
    op: Standard(error_scale="row", why_slower="the pixels of a bin are gathered wherever a box lies")
    for op in (_F, _B, _C)
}


def work(operator: str, args: tuple[Any, ...]) -> Work:
    if operator == _F:
        input, boxes, rows, columns = args[:4]
        outputs = len(boxes) * input.shape[1] * rows * columns
        return Work(bytes_of(args) + outputs * input.element_size(), 8 * outputs)
    grad = args[0]
    if operator == _C:
        return Work(bytes_of(args) + bytes_of([args[2]]), 24 * grad.numel())
    return Work(bytes_of(args) + grad.shape[1] * args[2] * args[3] * args[4] * grad.element_size(), 8 * grad.numel())


def baselines(operator: str) -> dict[str, Callable[..., Any]]:
    mmcv = compiled_mmcv()
    if operator != _F or mmcv is None:
        return {}

    def compiled(input: Tensor, boxes: Tensor, rows: int, columns: int, scale: float) -> Tensor:
        output = input.new_zeros((len(boxes), input.shape[1], rows, columns))
        mmcv.prroi_pool_forward(
            input, boxes.to(input.dtype), output, pooled_height=rows, pooled_width=columns, spatial_scale=scale
        )
        return output

    return {"mmcv": compiled}


def by_products(input: Tensor, boxes: Tensor, output_size: int, scale: float) -> Tensor:
    """What one writes in torch, for boxes with an area: two products with dense weights per box; autograd does the
    rest."""
    number = torch.arange(output_size, device=input.device)
    outputs = []
    for box in boxes:
        x1, y1, x2, y2 = box[1:] * scale
        weights = []
        for low, high, size in ((y1, y2, input.shape[2]), (x1, x2, input.shape[3])):
            edges = low + (high - low) / output_size * torch.stack([number, number + 1])[..., None]
            place = (edges - torch.arange(size, device=input.device)).clamp(-1, 1)
            until = 0.5 + place - place * place.abs() / 2  # integral of the hat function
            weights.append((until[1] - until[0]) / ((high - low) / output_size))
        outputs.append(weights[0] @ input[int(box[0])] @ weights[1].t())
    return torch.stack(outputs)
