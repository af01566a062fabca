"""Malformed calls of every operator: an answer or a clear error, never a crash, a hang or another exception.

Each example takes a good call and spoils one or two arguments. Values of index tensors are spoilt, too:
whatever they hold, nothing may be read or written out of bounds (the interpreter would die of it).
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from triops import _sample
from triops._op import OPERATORS, reference_backend

CLEAR = (ValueError, TypeError, IndexError)
GOOD = {
    name: next(s for s in _sample.all_samples() if s.operator == name and s.scale == "general").make(torch.float32)
    for name in OPERATORS
}
INTS = st.sampled_from([-(2**31), -7, -1, 0, 1, 2, 3, 5, 2**31 - 1, 2**62])
STRANGERS = st.sampled_from(
    [None, "nonsense", b"", 1.5, True, [], [1, 2, 3], {}, 3 + 4j, object(), (), torch.Size([2]), 2**70]
)
DTYPES = st.sampled_from(
    [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int8, torch.bool,
     torch.complex64]
)  # fmt: skip


@st.composite
def spoilt_tensor(draw: st.DrawFn, tensor: torch.Tensor) -> Any:
    kinds = ["dtype", "shape", "device", "layout", "values", "empty", "cut", "stranger", "strided"]
    kind = draw(st.sampled_from(kinds))
    if kind == "dtype":
        return tensor.to(draw(DTYPES))
    if kind == "shape":
        return torch.zeros(draw(st.lists(st.integers(0, 9), max_size=6)), dtype=tensor.dtype)
    if kind == "device":
        return tensor.to("meta")
    if kind == "layout":
        return tensor.to_sparse() if tensor.dim() else tensor
    if kind == "values":
        if tensor.dtype.is_floating_point:
            return torch.full_like(tensor, draw(st.sampled_from([float("nan"), float("inf"), -1e38, 1e38, 1e-45])))
        fits = INTS.filter(lambda value: abs(value) < 2**31)
        return tensor if tensor.dtype == torch.bool else torch.full_like(tensor, draw(fits))
    if kind == "empty":
        dimension = draw(st.integers(0, max(tensor.dim() - 1, 0)))
        return tensor.narrow(dimension, 0, 0) if tensor.dim() else tensor
    if kind == "cut":
        dimension = draw(st.integers(0, max(tensor.dim() - 1, 0)))
        return tensor.narrow(dimension, 0, max(tensor.shape[dimension] - 1, 0)) if tensor.dim() else tensor
    if kind == "strided":
        return tensor.expand(2, *tensor.shape)[draw(st.integers(0, 1))].transpose(0, -1) if tensor.dim() else tensor
    return draw(STRANGERS)


@st.composite
def spoilt_call(draw: st.DrawFn, name: str) -> tuple[Any, ...]:
    args = list(GOOD[name])
    for position in draw(st.lists(st.integers(0, len(args) - 1), min_size=1, max_size=2, unique=True)):
        value = args[position]
        if isinstance(value, torch.Tensor):
            args[position] = draw(spoilt_tensor(value))
        elif isinstance(value, list):
            entries = st.lists(INTS, max_size=5)
            args[position] = draw(st.one_of(entries, STRANGERS))
        elif isinstance(value, bool):
            args[position] = draw(st.one_of(st.booleans(), STRANGERS))
        elif isinstance(value, int):
            args[position] = draw(st.one_of(INTS, STRANGERS))
        elif isinstance(value, float):
            args[position] = draw(st.one_of(st.floats(), STRANGERS))
        else:
            args[position] = draw(st.one_of(st.text(max_size=8), STRANGERS))
    return tuple(args)


@pytest.mark.parametrize("name", sorted(OPERATORS))
@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(data=st.data())
def test_a_spoilt_call_is_answered_or_refused_clearly(name: str, data: st.DataObject) -> None:
    args = data.draw(spoilt_call(name))
    try:
        OPERATORS[name](*args)
    except CLEAR:
        return
    except MemoryError:
        return
    except RuntimeError as error:
        # torch's own errors that may pass through: an output that no memory can hold, or of a size that meta tensors
        # cannot tell
        if not any(word in str(error).lower() for word in ("memory", "storage size", "overflow", "meta tensors")):
            raise


@pytest.mark.parametrize("name", sorted(OPERATORS))
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_reference_and_kernel_refuse_the_same_calls(name: str, data: st.DataObject) -> None:
    args = data.draw(spoilt_call(name))

    def outcome() -> str:
        try:
            OPERATORS[name](*args)
        except Exception as error:
            return type(error).__name__
        return "answer"

    kernel = outcome()
    with reference_backend():
        assert outcome() == kernel
