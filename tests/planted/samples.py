"""Inputs of the operators with planted faults: values of which some lie just below a whole number."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from triops._op import OPERATORS
from triops._sample import BadCall, Sample, Sized

NAMES = [name for name, operator in OPERATORS.items() if operator.package == "planted"]


def _values(count: int) -> Callable[[torch.dtype], tuple[Any, ...]]:
    def make(dtype: torch.dtype) -> tuple[Any, ...]:
        values = torch.rand(count, generator=torch.Generator().manual_seed(count)) * 9
        values[::3] = torch.nextafter(values[::3].round() + 1, torch.tensor(0.0))
        return (values.to(dtype),)

    return make


SAMPLES = [Sample(name, f"{n} values", _values(n), dtypes=(torch.float32,)) for name in NAMES for n in (8, 100)]
SIZED = [Sized(name, "values", lambda draw: _values(draw(100))) for name in NAMES]
BAD_CALLS = [
    BadCall("accepts_anything: integers", lambda: OPERATORS["accepts_anything"](torch.zeros(3).int()), TypeError,
            "values must be float32")
]  # fmt: skip
