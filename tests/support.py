"""What the test files share: devices, comparison by the operators' contract, and kernels in guarded memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from triops import _sample
from triops._compare import TOLERANCE as TOLERANCE
from triops._compare import ErrorScale, difference
from triops._op import OPERATORS, Operator
from triops.acceptance.guards import guarded_memory

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
GPU = "cuda" if torch.cuda.is_available() else "cpu"  # "cpu": the GPU kernels run in Triton's interpreter


# A backend and as many clouds as `make test` has time for; the interpreter's thousand are in `make test-full`.
CLOUDS = [("cpu", 1000), ("gpu", 16), pytest.param("gpu", 1000, marks=pytest.mark.full)]


def random_clouds(count: int) -> tuple[Tensor, Tensor]:
    """Ragged clouds of up to 39 points, of which a quarter have duplicates and a quarter are collinear; offsets."""
    draw = torch.Generator().manual_seed(7)
    lengths = torch.randint(1, 40, (count,), generator=draw)
    points = torch.randn(int(lengths.sum()), 3, generator=draw)
    owner = torch.repeat_interleave(torch.arange(count), lengths)
    points = torch.where((owner % 4 == 1)[:, None], points.round(), points)
    points[owner % 4 == 2, 1:] = 0
    return points, torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])


def device_of(backend: str) -> str:
    return GPU if backend == "gpu" else "cpu"


def small(samples: list[_sample.Sample]) -> list[_sample.Sample]:
    return [s for s in samples if s.scale != "network"]


def assert_same(got: Any, expected: Any, what: str = "", *, operator: str | None = None) -> None:
    """Integers and booleans bit for bit, floats within rounding; `operator`: of whose results (see `_compare`)."""
    found = difference(got, expected, "value" if operator is None else error_scale(operator))
    assert not found, f"{what}: {found}"


def error_scale(operator: str) -> ErrorScale:
    return _sample.standard_of(OPERATORS[operator]).error_scale


def run(backend: str, operator: str, args: tuple[Any, ...]) -> Any:
    """An operator's kernel, called as the dispatcher would, on the device its backend needs. -> what it specifies"""
    op, moved = OPERATORS[operator], _sample.to_device(args, device_of(backend))
    return _specified(op, moved, op.kernel(backend)(*moved))


def run_guarded(backend: str, operator: str, args: tuple[Any, ...], offset: int = 0) -> Any:
    """`run`, in memory that shows writes outside of buffers and elements that nobody wrote.

    offset: elements by which the inputs' addresses lie beyond an aligned one.
    """
    op = OPERATORS[operator]
    with guarded_memory() as guards:
        placed = guards.place(_sample.to_device(args, device_of(backend)), offset=offset, names=op.parameters)
        out = op.kernel(backend)(*placed)
        damage = guards.damage()
    assert not damage, f"{operator} on {backend}: {'; '.join(damage)}"
    return _specified(op, placed, out)


def _specified(op: Operator, args: tuple[Any, ...], got: Any) -> Any:
    found = _sample.specified(op, args, got)
    return found[0] if isinstance(got, torch.Tensor) else tuple(found)
