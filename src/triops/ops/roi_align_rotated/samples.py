"""Inputs of roi_align_rotated and roi_align_rotated_backward."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from triops import scenes
from triops._check import FLOATS
from triops._dtypes import compute_dtype
from triops._roi_samples import Case, Kinds, Make, samples, sized, small_cases
from triops._sample import BadCall, Standard, Work, bytes_of, compiled_mmcv
from triops.ops.roi_align_rotated import riroi_align_rotated, roi_align_rotated, roi_align_rotated_backward

_F, _B = "roi_align_rotated", "roi_align_rotated_backward"


def maps(
    shape: tuple[int, int, int, int], total: int, bins: tuple[int, int] = (7, 7), ratio: int = 2, *,
    aligned: bool = True, clockwise: bool = True, orientations: int = 1, channels_last: bool = False,
    scale: float = 0.125, boxes: list[list[float]] | None = None,
) -> Make:  # fmt: skip
    """Boxes of any size and angle over and around the map, or those that are given, shared out among the images."""

    def make(dtype: torch.dtype) -> tuple[Any, ...]:
        input = scenes.feature_map(shape, dtype, channels_last=channels_last)
        own = scenes.rotated_boxes_on_maps(shape, total, scale=scale, boxes=boxes).to(compute_dtype(dtype))
        return input, own, *bins, scale, ratio, aligned, clockwise, orientations

    return make


def _backward(make: Make) -> Make:
    def made(dtype: torch.dtype) -> tuple[Any, ...]:
        input, boxes, rows, columns, *rest = make(dtype)
        shape = len(boxes), input.shape[1], rows, columns
        channels_last = input.stride(1) == 1 and not input.is_contiguous()
        grad = scenes.feature_map(shape, dtype, channels_last=channels_last, seed=9)
        return grad, boxes, input.shape[0], *input.shape[2:], *rest, channels_last

    return made


_LARGE = (2, 256, 128, 128)
_STRANGE: list[list[float]] = [
    [2.0, 2, 4, 4, 0.3], [3, 2, 9, 12, 1.0], [-30, -30, 5, 5, 0.5], [3, 2, 0, 0, 0], [3, 2, -3, -2, 1],
    [-1, -1, 1, 1, 0],
    [math.nan, 0, 4, 4, 0], [2, 2, math.inf, 1, 0], [2, 2, 3, 3, math.nan], [2, 2, 3, 3, 1e6], [2, 2, 3, 3, 1e5],
    [0, 0, 3e38, 3e38, 0.7], [0, 0, 1e29, 1e29, 0.7], [5, -3, 3e5, 9e4, 2.0], [1e9, 2e9, 2e9, 4e9, -1.2],
]  # fmt: skip
_CASES: list[Case] = [
    ("[2, 256, 128, 128] NHWC, 512 boxes, 7 x 7, 2 samples", maps(_LARGE, 512, channels_last=True), "large"),
    ("[2, 256, 128, 128] NCHW, 512 boxes, 7 x 7, 2 samples", maps(_LARGE, 512), "large"),
    ("[2, 256, 128, 128] NHWC, 512 boxes, adaptive", maps(_LARGE, 512, ratio=0, channels_last=True), "large"),
    ("[2, 256, 128, 128] NHWC, 512 boxes, 8 orientations", maps(_LARGE, 512, orientations=8, channels_last=True),
     "large"),
    ("[1, 64, 40, 48] NCHW, 60 boxes, 2 samples", maps((1, 64, 40, 48), 60), "network"),
    ("[1, 64, 40, 48] NHWC, 60 boxes, adaptive", maps((1, 64, 40, 48), 60, ratio=0, channels_last=True), "network"),
    ("a few boxes, adaptive", maps((2, 5, 6, 7), 3, (2, 3), 0), "general"),
    ("a few boxes, NHWC, not aligned", maps((2, 5, 6, 7), 4, (3, 2), channels_last=True, aligned=False), "general"),
    ("oriented channels", maps((2, 6, 6, 7), 4, (2, 2), aligned=False, orientations=3, clockwise=False), "general"),
    *((f"strange boxes, {'aligned' if aligned else 'not aligned'}, {ratio} samples",
       maps((1, 4, 4, 6), 0, (1, 2), ratio, aligned=aligned, scale=1.0, boxes=_STRANGE, channels_last=aligned,
            orientations=2 - aligned), "boundary") for aligned, ratio in ((True, 0), (False, 2))),
    ("no rows, oriented channels", maps((1, 4, 0, 8), 2, (1, 1), orientations=4), "boundary"),
    *small_cases(maps),
]  # fmt: skip
_KINDS: Kinds = ((_F, lambda case: case), (_B, _backward))
SAMPLES = samples(
    _KINDS, _CASES, "[1, 64, 40, 48] NCHW", dtypes=lambda name: FLOATS[:1] if "not aligned" in name else FLOATS
)
SIZED = sized(_KINDS, maps, ratio=0)


def _bad_calls() -> list[BadCall]:
    input, boxes = torch.zeros(2, 8, 5, 6), torch.zeros(4, 6)
    good: dict[str, Any] = {"input": input, "boxes": boxes, "output_size": 2}
    grad = torch.zeros(4, 8, 2, 2)

    def bad(what: str, error: type[Exception], match: str, **changed: Any) -> BadCall:
        return BadCall(f"roi_align_rotated: {what}", lambda: roi_align_rotated(**{**good, **changed}), error, match)

    def oriented(what: str, error: type[Exception], match: str, **changed: Any) -> BadCall:
        return BadCall(f"riroi_align_rotated: {what}", lambda: riroi_align_rotated(**{**good, **changed}), error, match)

    def back(what: str, error: type[Exception], match: str, *args: Any) -> BadCall:
        return BadCall(f"{_B}: {what}", lambda: roi_align_rotated_backward(*args), error, match)

    return [
        bad("input of rank 3", ValueError, r"input must have shape \[N, C, H, W\]", input=input[0]),
        bad("boxes of 5 columns", ValueError, r"boxes must have shape \[K, 6\]", boxes=boxes[:, 1:]),
        bad("integer input", TypeError, "input must be float32.*got int64", input=input.long()),
        bad("boxes of another dtype", TypeError, "boxes float64", boxes=boxes.double()),
        bad("unequal devices", ValueError, "boxes on meta", boxes=boxes.to("meta")),
        bad("no bins", ValueError, "output_size must be at least 1, got 0", output_size=0),
        bad("2,000 samples", ValueError, "sampling_ratio must be at most 1024, got 2000", sampling_ratio=2000),
        bad("a scale that is not finite", ValueError, "spatial_scale must be finite", spatial_scale=math.inf),
        bad("an image that is not there", IndexError, "images from 0 to 1", boxes=boxes + 2),
        bad("an image that is no number", IndexError, "images from 0 to 1", boxes=boxes + math.nan),
        oriented("no orientations", ValueError, "num_orientations must be at least 1", num_orientations=0),
        oriented("2.5 orientations", TypeError, "num_orientations must be an integer", num_orientations=2.5),
        oriented("other channels", ValueError, "multiple of the 3 orientations, got 8", num_orientations=3),
        oriented("2,000 samples", ValueError, "num_samples must be at most 1024, got 2000", num_samples=2000),
        back("a negative height", ValueError, "height must be at least 0", grad, boxes, 2, -5, 6, 1.0, 2, True, True),
        back("other channels", ValueError, "multiple of the 3", grad, boxes, 2, 5, 6, 1.0, 2, True, True, 3),
        back("an image that is not there", IndexError, "0 to 1", grad, boxes - 3, 2, 5, 6, 1.0, 2, True, True),
    ]


BAD_CALLS = _bad_calls()

STANDARD = {
    op: Standard(error_scale="row", why_slower="four pixels per sample are gathered wherever a box lies")
    for op in (_F, _B)
}


def work(operator: str, args: tuple[Any, ...]) -> Work:
    if operator == _F:
        input, boxes, rows, columns = args[:4]
        outputs, size, ratio = len(boxes) * input.shape[1] * rows * columns, input.element_size(), args[5]
        rest = outputs * size
    else:
        outputs, size, ratio = args[0].numel(), args[0].element_size(), args[6]
        rest = args[0].shape[1] * args[2] * args[3] * args[4] * size
    return Work(bytes_of(args) + rest, 8 * outputs * max(ratio, 1) ** 2)


def baselines(operator: str) -> dict[str, Callable[..., Any]]:
    mmcv = compiled_mmcv()
    if operator == _B or mmcv is None:
        return {}

    def compiled(
        input: Tensor, boxes: Tensor, rows: int, columns: int, scale: float, ratio: int, aligned: bool,
        clockwise: bool, orientations: int,
    ) -> Tensor:  # fmt: skip
        output, boxes = input.new_zeros((len(boxes), input.shape[1], rows, columns)), boxes.to(input.dtype)
        bins: dict[str, Any] = {"pooled_height": rows, "pooled_width": columns, "spatial_scale": scale}
        if orientations > 1:
            mmcv.riroi_align_rotated_forward(
                input, boxes, output, **bins, num_samples=ratio, num_orientations=orientations, clockwise=clockwise
            )
        else:
            mmcv.roi_align_rotated_forward(
                input, boxes, output, **bins, sampling_ratio=ratio, aligned=aligned, clockwise=clockwise
            )
        return output

    return {"mmcv": compiled}


def by_grid_sample(input: Tensor, boxes: Tensor, output_size: int, scale: float, ratio: int) -> Tensor:
    """What one writes in torch for aligned, clockwise boxes and a fixed number of samples: one `grid_sample` each."""
    height, width = input.shape[2:]
    step = (torch.arange(output_size * ratio, device=input.device) + 0.5) / (output_size * ratio) - 0.5
    outputs = []
    for image, cx, cy, w, h, angle in boxes.tolist():
        yy, xx = step[:, None] * h, step * w
        x = (cx + xx * math.cos(angle) - yy * math.sin(angle)) * scale
        y = (cy + xx * math.sin(angle) + yy * math.cos(angle)) * scale
        grid = torch.stack([2 * x / width - 1, 2 * y / height - 1], -1)
        found = F.grid_sample(input[int(image)][None], grid[None], padding_mode="border", align_corners=False)
        outputs.append(F.avg_pool2d(found, ratio))
    return torch.cat(outputs)
