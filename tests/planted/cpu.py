"""The kernels with the faults."""

from __future__ import annotations

import ctypes
import time

import torch
from torch import Tensor

from planted import reference

right = accepts_anything = reference.right

_scratch = torch.zeros(4096)


def writes_beyond(values: Tensor) -> Tensor:
    out = torch.empty(values.shape, dtype=torch.int32)
    out.copy_(values.floor())
    ctypes.memset(out.data_ptr() + 4 * out.numel(), 1, 4)
    return out


def off_by_one_ulp(values: Tensor) -> Tensor:
    return torch.nextafter(values, torch.tensor(torch.inf)).floor().to(torch.int32)


def shares_scratch(values: Tensor) -> Tensor:
    """Right as long as no other thread calls."""
    scratch = _scratch[: values.shape[0]]
    scratch.copy_(values)
    time.sleep(0.01)
    return scratch.floor().to(torch.int32)


def hangs(values: Tensor) -> Tensor:
    while values.shape[0] > 3:
        time.sleep(0.01)
    return reference.hangs(values)


def segfaults(values: Tensor) -> Tensor:
    if values.shape[0] > 3:
        ctypes.string_at(8)
    return reference.segfaults(values)


def fails_unclearly(values: Tensor) -> Tensor:
    if values.shape[0] > 3:
        raise KeyError("nothing that a user can use")
    return reference.fails_unclearly(values)
