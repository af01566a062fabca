"""What the samples of the operators that pool boxes from feature maps share.

A case is a name, the `make` of a sample and its scale, "large" for one that only a GPU runs. The operators of a folder
share their cases: `kinds` says how a case of the forward becomes one of each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from triops import scenes
from triops._check import FLOATS
from triops._sample import Sample, Sized

Make = Callable[[torch.dtype], tuple[Any, ...]]
Case = tuple[str, Make, Any]
Kinds = Sequence[tuple[str, Callable[[Make], Make]]]


def small_cases(maps: Callable[..., Make]) -> list[Case]:
    """Sizes of 0 and 1 and sizes around the blocks of kernels. maps(shape, boxes, bins, channels_last=...)"""
    return [
        ("no boxes", maps((1, 3, 6, 8), 0), "boundary"),
        ("no channels", maps((1, 0, 6, 8), 2), "boundary"),
        ("no images", maps((0, 3, 6, 8), 0), "boundary"),
        ("no rows", maps((1, 3, 0, 8), 2, (1, 1)), "boundary"),
        ("one of everything", maps((1, 1, 1, 1), 1, (1, 1)), "boundary"),
        ("300 channels, NHWC", maps((1, 300, 3, 3), 2, (1, 2), channels_last=True), "boundary"),
        ("70 bins", maps((1, 3, 9, 9), 1, (7, 10)), "boundary"),
    ]


def samples(
    kinds: Kinds, cases: Sequence[Case], demo: str, dtypes: Callable[[str], Sequence[torch.dtype]] = lambda name: FLOATS
) -> list[Sample]:
    """demo: how the name of the case for `triops demo` begins. dtypes: those of a case that is not at a boundary."""
    return [
        Sample(op, name, make(case), "network" if scale == "large" else scale,
               (torch.float32,) if scale == "boundary" else tuple(dtypes(name)),
               demo=name.startswith(demo), gpu_only=scale == "large")
        for op, make in kinds
        for name, case, scale in cases
    ]  # fmt: skip


def sized(kinds: Kinds, maps: Callable[..., Make], **options: Any) -> list[Sized]:
    """Maps and boxes of any number and size, in both memory formats."""

    def drawn(draw: Callable[[int], int], channels_last: bool) -> Make:
        return maps((draw(3), 16, draw(60), draw(60)), draw(300), channels_last=channels_last, **options)

    return [
        Sized(op, layout, lambda draw, make=make, layout=layout: make(drawn(draw, layout == "NHWC")))  # type: ignore[misc]
        for op, make in kinds
        for layout in ("NCHW", "NHWC")
    ]


def gradient_like(input: Tensor, total: int, rows: int, columns: int) -> tuple[Tensor, bool]:
    """A gradient [total, C, rows, columns] of pooled features, lying as the input does; whether it is channels-last."""
    channels_last = input.stride(1) == 1 and not input.is_contiguous()
    shape = total, input.shape[1], rows, columns
    return scenes.feature_map(shape, input.dtype, channels_last=channels_last, seed=9), channels_last
