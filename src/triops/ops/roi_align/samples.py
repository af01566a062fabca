"""Inputs of roi_align_forward and roi_align_backward."""

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
from triops.ops.roi_align import roi_align, roi_align_backward, roi_align_forward
from triops.ops.roi_align.reference import empty_outputs

_F, _B = "roi_align_forward", "roi_align_backward"


def maps(
    shape: tuple[int, int, int, int], total: int, bins: tuple[int, int] = (7, 7), ratio: int = 2, *,
    aligned: bool = True, mode: str = "avg", channels_last: bool = False, scale: float = 0.25, seed: int = 0,
    boxes: list[list[float]] | None = None,
) -> Make:  # fmt: skip
    """Boxes of any size over and around the map, or those that are given, shared out among the images."""

    def make(dtype: torch.dtype) -> tuple[Any, ...]:
        input = scenes.feature_map(shape, dtype, channels_last=channels_last, seed=seed)
        own = scenes.boxes_on_maps(shape, total, scale=scale, seed=seed, boxes=boxes).to(compute_dtype(dtype))
        return input, own, *bins, scale, ratio, aligned, mode

    return make


def _backward(make: Make) -> Make:
    def made(dtype: torch.dtype) -> tuple[Any, ...]:
        input, *rest = make(dtype)
        if rest[-1] == "avg":  # nothing of the forward is read but its shape
            output, *positions = empty_outputs(input, rest[0], rest[1], rest[2], "avg")
        else:
            output, *positions = roi_align_forward(input, *rest)
        g = torch.Generator().manual_seed(9)
        grad = torch.randn(output.shape, generator=g).to(dtype)
        channels_last = input.stride(1) == 1 and not input.is_contiguous()
        if channels_last:
            grad = grad.contiguous(memory_format=torch.channels_last)
        return grad, rest[0], *positions, input.shape[0], *input.shape[2:], *rest[3:], channels_last

    return made


_LARGE = (2, 256, 200, 304)  # the largest map of a feature pyramid
_CASES: list[Case] = [
    ("[2, 256, 200, 304] NHWC, 1,024 boxes, 7 x 7, 2 samples", maps(_LARGE, 1024, channels_last=True), "large"),
    ("[2, 256, 200, 304] NCHW, 1,024 boxes, 7 x 7, 2 samples", maps(_LARGE, 1024), "large"),
    ("[2, 256, 200, 304] NHWC, 1,024 boxes, adaptive", maps(_LARGE, 1024, ratio=0, channels_last=True), "large"),
    ("[2, 256, 200, 304] NCHW, 1,024 boxes, adaptive", maps(_LARGE, 1024, ratio=0), "large"),
    ("[1, 64, 50, 76] NCHW, 100 boxes, adaptive", maps((1, 64, 50, 76), 100, ratio=0), "network"),
    ("[1, 64, 50, 76] NHWC, 100 boxes, 2 samples", maps((1, 64, 50, 76), 100, channels_last=True), "network"),
    ("a few boxes, adaptive", maps((2, 5, 6, 7), 3, (2, 3), 0), "general"),
    ("a few boxes, NHWC, not aligned", maps((2, 5, 6, 7), 4, (3, 2), 2, channels_last=True, aligned=False), "general"),
    ("the highest, adaptive, NHWC", maps((2, 6, 7, 6), 4, (2, 2), -1, mode="max", channels_last=True), "general"),
    ("the highest, not aligned", maps((1, 3, 7, 6), 3, (1, 2), 2, mode="max", aligned=False, scale=1.0), "general"),
    *((f"strange boxes, {mode}, {'aligned' if aligned else 'not aligned'}, {ratio} samples",
       maps((1, 3, 4, 6), 0, (1, 2), ratio, mode=mode, aligned=aligned, scale=1.0, boxes=scenes.STRANGE_BOXES,
            channels_last=aligned), "boundary")
      for mode, aligned, ratio in (("avg", True, 0), ("avg", False, 2), ("max", True, 0), ("max", True, 2))),
    ("one box on a large map, adaptive", maps((1, 3, 40, 50), 1, (1, 2), 0), "boundary"),
    ("one box on a large map, the highest", maps((1, 3, 40, 50), 1, (1, 2), 2, mode="max"), "boundary"),
    ("no rows, the highest", maps((1, 3, 0, 8), 2, (1, 1), mode="max"), "boundary"),
    *small_cases(maps),
]  # fmt: skip
_KINDS: Kinds = ((_F, lambda case: case), (_B, _backward))
SAMPLES = samples(
    _KINDS, _CASES, "[1, 64, 50, 76] NCHW", dtypes=lambda name: FLOATS[:1] if "not aligned" in name else FLOATS
)
SIZED = sized(_KINDS, maps, ratio=0)


def _bad_calls() -> list[BadCall]:
    input, boxes = torch.zeros(2, 3, 5, 6), torch.zeros(4, 5)
    good: dict[str, Any] = {"input": input, "boxes": boxes, "output_size": 2}
    grad, none = torch.zeros(4, 3, 2, 2), torch.zeros(0)

    def bad(what: str, error: type[Exception], match: str, **changed: Any) -> BadCall:
        return BadCall(f"roi_align: {what}", lambda: roi_align(**{**good, **changed}), error, match)

    def back(what: str, error: type[Exception], match: str, *args: Any) -> BadCall:
        return BadCall(f"roi_align_backward: {what}", lambda: roi_align_backward(*args), error, match)

    return [
        bad("input of rank 3", ValueError, r"input must have shape \[N, C, H, W\]", input=input[0]),
        bad("boxes of 4 columns", ValueError, r"boxes must have shape \[K, 5\].*the image of each", boxes=boxes[:, 1:]),
        bad("a list of other length", ValueError, "one Tensor per image .*got 1 for 2", boxes=[boxes[:, 1:]]),
        bad("a list of 5 columns", ValueError, r"boxes of image 0 must be .*\[L, 4\], got \[4, 5\]", boxes=[boxes] * 2),
        bad("a list of lists", TypeError, "boxes must be a Tensor", boxes=[[0.0] * 5] * 2),
        bad("integer input", TypeError, "input must be float32.*got int64", input=input.long()),
        bad("boxes of another dtype", TypeError, "boxes float64", boxes=boxes.double()),
        bad("unequal devices", ValueError, "boxes on meta", boxes=boxes.to("meta")),
        bad("no bins", ValueError, "output_size must be at least 1, got 0", output_size=0),
        bad("three sizes", ValueError, "output_size must be one integer or two", output_size=(1, 2, 3)),
        bad("a size of 2.5", TypeError, "output_size must be", output_size=2.5),
        bad("2,000 samples", ValueError, "sampling_ratio must be at most 1024, got 2000", sampling_ratio=2000),
        bad("a scale that is not finite", ValueError, "spatial_scale must be finite", spatial_scale=math.inf),
        bad("another mode", ValueError, "mode must be 'avg' or 'max', got 'sum'", mode="sum"),
        bad("an image that is not there", IndexError, "images from 0 to 1", boxes=boxes + 2),
        bad("an image that is no number", IndexError, "images from 0 to 1", boxes=boxes + math.nan),
        back("positions of another shape", ValueError, "argmax_y must have shape",
             grad, boxes, grad[:1], grad, 2, 5, 6, 1.0, 2, True, "max"),
        back("positions in mode avg", ValueError, r"argmax_y must have shape \[0\]",
             grad, boxes, grad, grad, 2, 5, 6, 1.0, 2, True, "avg"),
        back("positions of another dtype", TypeError, "argmax_x must be float32, got float64",
             grad, boxes, none, none.double(), 2, 5, 6, 1.0, 2, True, "avg"),
        back("a negative height", ValueError, "height must be at least 0",
             grad, boxes, none, none, 2, -5, 6, 1.0, 2, True, "avg"),
        back("an image that is not there", IndexError, "images from 0 to 1",
             grad, boxes - 3, none, none, 2, 5, 6, 1.0, 2, True, "avg"),
    ]  # fmt: skip


BAD_CALLS = _bad_calls()

STANDARD = {
    op: Standard(error_scale="row", why_slower="four pixels per sample are gathered wherever a box lies")
    for op in (_F, _B)
}


def work(operator: str, args: tuple[Any, ...]) -> Work:
    if operator == _F:
        input, boxes, rows, columns = args[:4]
        outputs, size = len(boxes) * input.shape[1] * rows * columns, input.element_size()
    else:
        outputs, size = args[0].numel(), args[0].element_size()
    ratio = args[5] if operator == _F else args[8]
    samples = max(ratio, 1) ** 2
    rest = outputs * size if operator == _F else args[0].shape[1] * args[4] * args[5] * args[6] * size
    return Work(bytes_of(args) + rest, 8 * outputs * samples)


def baselines(operator: str) -> dict[str, Callable[..., Any]]:
    if operator == _B:
        return {}
    found: dict[str, Callable[..., Any]] = {}
    mmcv = compiled_mmcv()
    if mmcv is not None:

        def compiled(
            input: Tensor, boxes: Tensor, rows: int, columns: int, scale: float, ratio: int, aligned: bool, mode: str
        ) -> Tensor:
            output = input.new_zeros((len(boxes), input.shape[1], rows, columns))
            places = [torch.zeros_like(output) if mode == "max" else input.new_zeros(0) for _ in range(2)]
            mmcv.roi_align_forward(
                input, boxes.to(input.dtype), output, *places, aligned_height=rows, aligned_width=columns,
                spatial_scale=scale, sampling_ratio=ratio, pool_mode=("max", "avg").index(mode), aligned=aligned,
            )  # fmt: skip
            return output

        found["mmcv"] = compiled
    try:
        from torchvision.ops import roi_align as peer  # type: ignore[import-not-found, unused-ignore]
    except ImportError:
        return found

    def torchvision(
        input: Tensor, boxes: Tensor, rows: int, columns: int, scale: float, ratio: int, aligned: bool, mode: str
    ) -> Tensor:
        return peer(input, boxes.to(input.dtype), (rows, columns), scale, ratio, aligned)  # type: ignore[no-any-return]

    found["torchvision"] = torchvision
    return found


def by_grid_sample(input: Tensor, boxes: Tensor, output_size: int, scale: float, ratio: int) -> Tensor:
    """What one writes in torch for mean, aligned, and a fixed number of samples: one `grid_sample` per box."""
    height, width = input.shape[2:]
    step = (torch.arange(output_size * ratio, device=input.device) + 0.5) / (output_size * ratio)
    outputs = []
    for image, x1, y1, x2, y2 in (boxes * torch.tensor([1.0] + 4 * [scale])).tolist():
        x, y = x1 + step * (x2 - x1), y1 + step * (y2 - y1)
        grid = torch.stack(torch.meshgrid(2 * x / width - 1, 2 * y / height - 1, indexing="xy"), -1)
        found = F.grid_sample(input[int(image)][None], grid[None], padding_mode="border", align_corners=False)
        outputs.append(F.avg_pool2d(found, ratio))
    return torch.cat(outputs)
