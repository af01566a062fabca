"""What the test files share: devices, comparison by the operators' contract, and poisoned allocations."""

from __future__ import annotations

from typing import Any

import torch

from triops import _sample
from triops._op import OPERATORS
from triops.acceptance.inputs import poisoned_allocations as poisoned_allocations

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
GPU = "cuda" if torch.cuda.is_available() else "cpu"  # "cpu": the GPU kernels run in Triton's interpreter

# What a float result may differ from the reference at the same dtype: a few units in the last place.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def device_of(backend: str) -> str:
    return GPU if backend == "gpu" else "cpu"


def small(samples: list[_sample.Sample]) -> list[_sample.Sample]:
    return [s for s in samples if s.scale != "network"]


def assert_same(got: Any, expected: Any, what: str = "") -> None:
    """Integers and booleans bit for bit, floats within TOLERANCE, NaN and inf in the same places."""
    got, expected = _sample.tensors_of(got), _sample.tensors_of(expected)
    assert len(got) == len(expected), what
    for g, e in zip(got, expected, strict=True):
        g, e = g.cpu(), e.cpu()
        assert (g.dtype, g.shape) == (e.dtype, e.shape), what
        if e.is_floating_point():
            tolerance = TOLERANCE[e.dtype]
            torch.testing.assert_close(
                g, e, rtol=tolerance, atol=tolerance, equal_nan=True, msg=lambda m: f"{what}: {m}"
            )
        else:
            wrong = (g != e).nonzero()
            assert len(wrong) == 0, f"{what}: {len(wrong)} of {e.numel()} differ, first at {wrong[0].tolist()}"


def run(backend: str, operator: str, args: tuple[Any, ...]) -> Any:
    """An operator's kernel, called as the dispatcher would, on the device its backend needs. -> what it specifies"""
    op, moved = OPERATORS[operator], _sample.to_device(args, device_of(backend))
    got = op.kernel(backend)(*moved)
    found = _sample.specified(op, moved, got)
    return found[0] if isinstance(got, torch.Tensor) else tuple(found)
