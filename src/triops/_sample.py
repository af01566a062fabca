"""Samples: the inputs that tests, acceptance, benchmarks, compile checks, demo and docs all read.

Each operator folder has a `samples.py` with
    SAMPLES    list of Sample
    BAD_CALLS  list of BadCall
    SIZED      list of Sized, at least one for each operator with a GPU kernel
    work(operator, args) -> Work             what a call must at least move and compute
    baselines(operator) -> dict[str, fn]     what else computes the same: plain torch, installed peers
and, where the usual standard does not fit, STANDARD: dict from operator to Standard; where an output holds places that
the operator leaves open, specified(operator, args, outputs) -> outputs with one value in all of those; where optional
arguments say the same as others, DERIVED: dict from operator to their names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from triops._check import FLOATS
from triops._op import OPERATORS, Operator


@dataclass(frozen=True)
class Sample:
    """One input of a registered operator. `make(dtype)` returns its positional arguments, on the CPU, seeded."""

    operator: str
    name: str
    make: Callable[[torch.dtype], tuple[Any, ...]]
    scale: Literal["network", "general", "boundary"] = "general"
    dtypes: tuple[torch.dtype, ...] = FLOATS
    gradcheck: bool = False  # small, and away from the places where the derivative jumps
    demo: bool = False  # shown by `triops demo`
    gpu_only: bool = False  # too large for a CPU: left out where there is no GPU

    def __str__(self) -> str:
        return f"{self.operator}[{self.name}]"


@dataclass(frozen=True)
class Sized:
    """Calls of one operator that differ in their counts alone: what a network fixes, such as channels, stays.

    No call after the first of a dtype may compile a GPU kernel. `make(draw)` is the `make` of a sample, with every
    count drawn: `draw(n)` is one from 1 to n.
    """

    operator: str
    name: str
    make: Callable[[Callable[[int], int]], Callable[[torch.dtype], tuple[Any, ...]]]

    def __str__(self) -> str:
        return f"{self.operator}[{self.name}]"


@dataclass(frozen=True)
class BadCall:
    """A malformed call of a public function, the error it must raise, and words its message must hold."""

    name: str
    call: Callable[[], Any]
    error: type[Exception]
    match: str

    def __str__(self) -> str:
        return self.name


class Work(NamedTuple):
    """What no implementation can avoid: each input read once, each output written once; and the arithmetic."""

    bytes: int
    ops: int


@dataclass(frozen=True)
class Standard:
    """What `triops check` holds an operator to. Indices are always exact; see `triops.acceptance.standard`."""

    floats: Literal["dynamic", "static", "exact"] = "dynamic"  # how float outputs are judged
    float32: float = 1e-5  # static thresholds
    half: float = 1e-3
    error_scale: Literal["value", "row"] = "value"  # "row": values are sums whose terms may cancel; see `_compare`
    network: float = 0.6  # the efficiency that network-scale and general cases should reach
    general: float = 0.3
    arithmetic: Literal["vector", "matrix"] = "vector"  # "matrix": the peak is that of matrix products at the dtype
    why_slower: str = ""  # said of a case below its efficiency, where its size alone does not explain it


def module_of(operator: Operator) -> ModuleType:
    return import_module(f"{operator.package}.samples")


def standard_of(operator: Operator) -> Standard:
    declared: dict[str, Standard] = getattr(module_of(operator), "STANDARD", {})
    return declared.get(operator.name, Standard())


def specified(operator: Operator, args: tuple[Any, ...], outputs: Any) -> list[Tensor]:
    """The outputs of a call, without what the operator leaves open: what two backends must agree on."""
    rule = getattr(module_of(operator), "specified", None)
    found = tensors_of(outputs)
    return found if rule is None else rule(operator.name, args, found)


def modules() -> list[ModuleType]:
    """The sample modules of all operators, each once, in the order of definition."""
    return list(dict.fromkeys(module_of(op) for op in OPERATORS.values()))


def all_samples() -> list[Sample]:
    return [
        sample for module in modules() for sample in module.SAMPLES if torch.cuda.is_available() or not sample.gpu_only
    ]


def all_sized() -> list[Sized]:
    return [sized for module in modules() for sized in getattr(module, "SIZED", [])]


def all_bad_calls() -> list[BadCall]:
    return [bad for module in modules() for bad in module.BAD_CALLS]


def tensors_of(values: Any) -> list[Tensor]:
    """The tensors among a call's arguments or results."""
    return [v for v in (values if isinstance(values, tuple | list) else (values,)) if isinstance(v, Tensor)]


def bytes_of(values: Any) -> int:
    return sum(t.numel() * t.element_size() for t in tensors_of(values))


def to_device(values: Iterable[Any], device: torch.device | str) -> tuple[Any, ...]:
    return tuple(v.to(device) if isinstance(v, Tensor) else v for v in values)


def compiled_mmcv() -> Any:
    """mmcv's own compiled operators where they are installed, else None: not the ones that triops lends it."""
    try:
        from mmcv import _ext
    except ImportError:
        return None
    return None if getattr(_ext, "__triops__", False) else _ext
