"""The half types of CPU kernels: every bit pattern widens as torch does, and every rounding is torch's."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from triops._cpu.half import as_bits, narrow, widen
from triops._cpu.jit import jit

HALVES = [torch.float16, torch.bfloat16]


@jit
def _widen_all(source: Any, target: Any) -> None:
    for i in range(np.uint32(source.shape[0])):
        target[i] = widen(source[i])


@jit
def _narrow_all(source: Any, target: Any) -> None:
    for i in range(np.uint32(source.shape[0])):
        target[i] = narrow(source[i], target)


@pytest.mark.parametrize("dtype", HALVES)
def test_all_65536_patterns_widen_as_torch_does(dtype: torch.dtype) -> None:
    halves = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(dtype)
    got = torch.empty(65536)
    _widen_all(as_bits(halves), got.numpy())
    torch.testing.assert_close(got, halves.float(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", HALVES)
def test_rounding_is_to_nearest_even_as_in_torch(dtype: torch.dtype) -> None:
    halves = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(dtype).float()
    finite = halves[halves.isfinite()].sort().values
    between = (finite[1:].double() + finite[:-1].double()).float() / 2  # every tie
    random = torch.randint(-(2**31), 2**31 - 1, (200_000,), generator=torch.Generator().manual_seed(0)).int()
    special = torch.tensor([torch.nan, -torch.nan, torch.inf, -torch.inf, 0.0, -0.0, 1e-45, 65519.9, 65520.0, 3.4e38])
    values = torch.cat(
        [halves, between, between * (1 + 1e-6), between * (1 - 1e-6), random.view(torch.float32), special]
    )
    got = torch.empty(len(values), dtype=dtype)
    _narrow_all(values.numpy(), as_bits(got))
    torch.testing.assert_close(got, values.to(dtype), rtol=0, atol=0, equal_nan=True)


def test_other_floats_pass_through() -> None:
    for dtype in (torch.float32, torch.float64):
        values = torch.tensor([1.1, torch.inf], dtype=dtype)
        got = torch.empty_like(values)
        _widen_all(as_bits(values), got.numpy())
        assert torch.equal(got, values)
        _narrow_all(values.numpy(), as_bits(got))
        assert torch.equal(got, values)


def test_the_bits_of_a_contiguous_tensor_are_its_own_memory() -> None:
    tensor = torch.zeros(3, dtype=torch.bfloat16)
    as_bits(tensor)[1] = 0x3F80
    assert tensor.tolist() == [0, 1, 0]
