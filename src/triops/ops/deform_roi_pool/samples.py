"""Inputs of deform_roi_pool and deform_roi_pool_backward."""

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
from triops._roi_samples import Case, Kinds, Make, gradient_like, samples, sized, small_cases
from triops._sample import BadCall, Standard, Work, bytes_of, compiled_mmcv
from triops.ops.deform_roi_pool import deform_roi_pool, deform_roi_pool_backward

_F, _B = "deform_roi_pool", "deform_roi_pool_backward"


def maps(
    shape: tuple[int, int, int, int], total: int, bins: tuple[int, int] = (7, 7), ratio: int = 2, *,
    moved: bool = True, channels_last: bool = False, scale: float = 0.25, gamma: float = 0.1,
    boxes: list[list[float]] | None = None, offsets: list[float] | None = None, coordinates: torch.dtype | None = None,
) -> Make:  # fmt: skip
    """Boxes of any size over and around the map, or those that are given, with offsets of about 1, or some of those
    that are given in turn. coordinates: the dtype of boxes and offsets, if not that of the map."""

    def make(dtype: torch.dtype) -> tuple[Any, ...]:
        input = scenes.feature_map(shape, dtype, channels_last=channels_last)
        of_places = coordinates or compute_dtype(dtype)
        own = scenes.boxes_on_maps(shape, total, scale=scale, boxes=boxes).to(of_places)
        offset = scenes.feature_map((len(own), 2, *bins), of_places, seed=5)
        if offsets is not None:
            offset = torch.tensor(offsets, dtype=of_places).repeat(offset.numel())[: offset.numel()].view(offset.shape)
        return input, own, offset if moved else None, *bins, scale, ratio, gamma

    return make


def _backward(make: Make) -> Make:
    def made(dtype: torch.dtype) -> tuple[Any, ...]:
        input, boxes, offset, *bins, scale, ratio, gamma = make(dtype)
        return gradient_like(input, len(boxes), *bins)[0], input, boxes, offset, scale, ratio, gamma, True, True

    return made


_LARGE = (2, 256, 100, 152)
_STRANGE = [0.0, 1.0, -30.0, math.nan, 0.25, math.inf, 1e30, -3e38]
_CASES: list[Case] = [
    ("[2, 256, 100, 152] NHWC, 512 boxes, 7 x 7, 2 samples", maps(_LARGE, 512, channels_last=True), "large"),
    ("[2, 256, 100, 152] NCHW, 512 boxes, 7 x 7, 2 samples", maps(_LARGE, 512), "large"),
    ("[2, 256, 100, 152] NHWC, 512 boxes, adaptive", maps(_LARGE, 512, ratio=0, channels_last=True), "large"),
    ("[1, 32, 40, 48] NCHW, 20 boxes, adaptive", maps((1, 32, 40, 48), 20, ratio=0), "network"),
    ("[1, 32, 40, 48] NHWC, 20 boxes, 2 samples", maps((1, 32, 40, 48), 20, channels_last=True), "network"),
    ("a few boxes, adaptive", maps((2, 5, 6, 7), 3, (2, 3), 0, gamma=0.3), "general"),
    ("a few boxes, NHWC, without offsets", maps((2, 6, 7, 6), 3, (3, 2), 3, moved=False, channels_last=True),
     "general"),
    ("float32 places", maps((1, 4, 6, 7), 3, (2, 2), coordinates=torch.float32), "general"),
    ("strange boxes", maps((1, 3, 4, 6), 0, (2, 1), 0, scale=1.0, boxes=scenes.STRANGE_BOXES), "boundary"),
    ("strange offsets", maps((1, 3, 4, 6), 5, (3, 3), 2, scale=0.5, offsets=_STRANGE), "boundary"),
    ("strange offsets, adaptive, NHWC",
     maps((1, 3, 4, 6), 5, (3, 3), 0, scale=0.5, offsets=_STRANGE, channels_last=True), "boundary"),
    *small_cases(maps),
]  # fmt: skip
_KINDS: Kinds = ((_F, lambda case: case), (_B, _backward))
SAMPLES = samples(
    _KINDS, _CASES, "[1, 32, 40, 48] NCHW", dtypes=lambda name: FLOATS[1:3] if name == "float32 places" else FLOATS
)
SIZED = sized(_KINDS, maps)


def _bad_calls() -> list[BadCall]:
    input, boxes, offset, grad = (
        torch.zeros(2, 3, 5, 6),
        torch.zeros(4, 5),
        torch.zeros(4, 2, 2, 2),
        torch.zeros(4, 3, 2, 2),
    )
    good: dict[str, Any] = {"input": input, "boxes": boxes, "offset": offset, "output_size": 2}

    def bad(what: str, error: type[Exception], match: str, **changed: Any) -> BadCall:
        return BadCall(f"{_F}: {what}", lambda: deform_roi_pool(**{**good, **changed}), error, match)

    def back(
        what: str, error: type[Exception], match: str, grad: Tensor, boxes: Tensor, offset: Tensor | None
    ) -> BadCall:
        return BadCall(
            f"{_B}: {what}", lambda: deform_roi_pool_backward(grad, input, boxes, offset, 1.0, 2, 0.1), error, match
        )

    return [
        bad("input of rank 3", ValueError, r"input must have shape \[N, C, H, W\]", input=input[0]),
        bad("boxes of 4 columns", ValueError, r"boxes must have shape \[K, 5\]", boxes=boxes[:, 1:]),
        bad("boxes of another dtype", TypeError, "boxes float64", boxes=boxes.double()),
        bad("offsets of 3 boxes", ValueError, "K = 4 as in boxes", offset=offset[:3]),
        bad("offsets of other bins", ValueError, "offset must have 2 x 2 bins, got 2 x 1", offset=offset[..., :1]),
        bad("offsets of three axes", ValueError, r"offset must have shape \[K, 2, PH, PW\]",
            offset=torch.zeros(4, 3, 2, 2)),
        bad("integer offsets", TypeError, "offset must be float32, got int64", offset=offset.long()),
        bad("unequal devices", ValueError, "offset on meta", offset=offset.to("meta")),
        bad("no bins", ValueError, "output_size must be at least 1, got 0", output_size=0),
        bad("a scale that is not finite", ValueError, "spatial_scale must be finite", spatial_scale=math.inf),
        bad("a gamma that is not finite", ValueError, "gamma must be finite", gamma=math.nan),
        bad("2000 samples", ValueError, "sampling_ratio must be at most 1024, got 2000", sampling_ratio=2000),
        bad("an image that is not there", IndexError, "images from 0 to 1", boxes=boxes + 2),
        back("other channels", ValueError, "grad_output must have shape", grad[:, :2], boxes, offset),
        back("another dtype", TypeError, "grad_output float64", grad.double(), boxes, offset),
        back("an image that is not there", IndexError, "images from 0 to 1", grad, boxes - 3, None),
    ]  # fmt: skip


BAD_CALLS = _bad_calls()

STANDARD = {
    op: Standard(error_scale="row", why_slower="the pixels of a bin are gathered wherever a box lies")
    for op in (_F, _B)
}


def work(operator: str, args: tuple[Any, ...]) -> Work:
    if operator == _F:
        input, boxes, _, rows, columns, _, ratio, _ = args
        outputs = len(boxes) * input.shape[1] * rows * columns
        return Work(bytes_of(args) + outputs * input.element_size(), 8 * outputs * max(ratio, 1) ** 2)
    return Work(bytes_of(args) + bytes_of([t for t in args[1:4:2] if t is not None]), 24 * args[0].numel())


def baselines(operator: str) -> dict[str, Callable[..., Any]]:
    if operator != _F:
        return {}
    mmcv, found = compiled_mmcv(), {"torch": by_grid_sample}

    def compiled(
        input: Tensor, boxes: Tensor, offset: Tensor | None, rows: int, columns: int, scale: float, ratio: int,
        gamma: float,
    ) -> Tensor:  # fmt: skip
        output = input.new_zeros((len(boxes), input.shape[1], rows, columns))
        moved = input.new_zeros(0) if offset is None else offset.to(input.dtype)
        mmcv.deform_roi_pool_forward(
            input, boxes.to(input.dtype), moved, output, pooled_height=rows, pooled_width=columns, spatial_scale=scale,
            sampling_ratio=ratio, gamma=gamma,
        )  # fmt: skip
        return output

    if mmcv is not None:
        found["mmcv"] = compiled
    return found


def by_grid_sample(
    input: Tensor, boxes: Tensor, offset: Tensor | None, rows: int, columns: int, scale: float, ratio: int,
    gamma: float,
) -> Tensor:  # fmt: skip
    """What one writes in torch: one `grid_sample` per box, and a mean."""
    height, width = input.shape[2:]
    outputs = []
    for k, box in enumerate(boxes.to(compute_dtype(input.dtype))):
        low, size = box[1:3] * scale - 0.5, (box[3:] - box[1:3]) * scale
        length = size / torch.tensor([columns, rows], device=box.device)
        counts = [ratio, ratio] if ratio > 0 else [max(int(n), 1) for n in length.ceil().tolist()]
        place = torch.stack(torch.meshgrid(torch.arange(columns), torch.arange(rows), indexing="xy"), -1).to(box)
        base = low + place * length  # [rows, columns, 2]
        if offset is not None:
            base = base + gamma * size * offset[k].to(box.dtype).permute(1, 2, 0)
        steps = [(torch.arange(n, device=box.device) + 0.5) * part / n for n, part in zip(counts, length, strict=True)]
        x = base[..., 0, None] + steps[0]
        y = base[..., 1, None] + steps[1]
        shape = rows, columns, counts[1], counts[0]
        grid = torch.stack([((2 * x + 1) / width - 1)[..., None, :].expand(shape),
                            ((2 * y + 1) / height - 1)[..., None].expand(shape)], -1)  # fmt: skip
        read = F.grid_sample(input[int(box[0])][None], grid.view(1, rows * columns, -1, 2).to(input.dtype),
                             align_corners=False, padding_mode="border")  # fmt: skip
        on_map = ((x >= -1) & (x <= width))[..., None, :] & ((y >= -1) & (y <= height))[..., None]
        outputs.append((read * on_map.view(rows * columns, -1)).mean(3).view(-1, rows, columns))
    return torch.stack(outputs) if outputs else input.new_zeros((0, input.shape[1], rows, columns))
