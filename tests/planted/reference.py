"""floor(values), under one name for each fault."""

from __future__ import annotations

import torch
from torch import Tensor


def _floor(values: Tensor) -> Tensor:
    return values.to(torch.float32).floor().to(torch.int32)


def right(values: Tensor) -> Tensor:
    return _floor(values)


def writes_beyond(values: Tensor) -> Tensor:
    return _floor(values)


def off_by_one_ulp(values: Tensor) -> Tensor:
    return _floor(values)


def shares_scratch(values: Tensor) -> Tensor:
    return _floor(values)


def hangs(values: Tensor) -> Tensor:
    return _floor(values)


def segfaults(values: Tensor) -> Tensor:
    return _floor(values)


def fails_unclearly(values: Tensor) -> Tensor:
    return _floor(values)


def accepts_anything(values: Tensor) -> Tensor:
    return _floor(values)
