"""When a result is good enough, and how much of the machine a case should use.

Index outputs equal the reference at the kernel's own dtype bit for bit. Float outputs are measured against the
reference run in float64 on the same inputs:
    static    diff1, diff2 and peak within a fixed threshold
    dynamic   diff1, diff2, diff3 and peak within ten times what the reference loses at the kernel's dtype, or within
              the static threshold, whichever is larger
    exact     bit for bit the reference at the kernel's own dtype
and in all cases NaN where the baseline has NaN, inf where it has inf, and (from a hundred unequal values on) no bias
that the reference at the kernel's dtype does not have.

A rounding can flip a predicate or overflow, and then float64 answers another question. So a value that is NaN or
infinite in one of the two references only takes the one at the kernel's dtype as its baseline; and where that
reference is so far from the float64 one that no rounding explains it, it is the baseline of the whole output,
within the static threshold or a few units in the last place.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from triops._sample import Standard, tensors_of
from triops.acceptance.diffs import Diffs, compare

RATE = 10  # how much worse than plain torch at the same dtype a dynamic threshold lets a kernel be
ENOUGH_FOR_BIAS = 100  # unequal values below which diff4 says nothing
NOT_ROUNDING = 100  # times the static threshold: what rounding cannot explain


@dataclass(frozen=True)
class Judgement:
    """One output of one call."""

    kind: str  # exact, static or dynamic
    baseline: str  # "float64", or "own dtype"
    diffs: Diffs
    limits: dict[str, float]  # what each measure may be
    flips: int  # values that the float64 reference decides otherwise
    failures: list[str] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        return not self.failures


@dataclass(frozen=True)
class _Baseline:
    """What an output is compared with, and how far from it the output may be."""

    name: str  # "float64", or "own dtype"
    values: Tensor
    limits: dict[str, float]
    flips: int
    torch_bias: float | None = None  # diff4 of the reference at the kernel's dtype


def judge(got: Any, own: Any, float64: Any, standard: Standard) -> list[Judgement]:
    """Each output of a kernel against the reference at its own dtype and the reference in float64."""
    outputs, owns, float64s = tensors_of(got), tensors_of(own), tensors_of(float64)
    if len(outputs) != len(owns):
        failure = f"{len(outputs)} outputs instead of {len(owns)}"
        return [Judgement("exact", "own dtype", Diffs(), {}, 0, [failure])]
    return [_judge_output(e, o, f, standard) for e, o, f in zip(outputs, owns, float64s, strict=True)]


def static_threshold(dtype: torch.dtype, standard: Standard) -> float:
    if dtype == torch.float64:
        return 1e-12
    return standard.float32 if dtype == torch.float32 else standard.half


def _judge_output(e: Tensor, own: Tensor, float64: Tensor, standard: Standard) -> Judgement:
    kind = standard.floats if own.is_floating_point() else "exact"
    if (e.shape, e.dtype) != (own.shape, own.dtype):
        failure = f"{_describe(e)} instead of {_describe(own)}"
        return Judgement(kind, "own dtype", Diffs(count=e.numel()), {}, 0, [failure])
    choose = _exact_baseline if kind == "exact" else _float_baseline
    baseline = choose(own.to(e.device), float64.to(e.device), standard)
    return _verdict(kind, compare(e, baseline.values), baseline)


def _exact_baseline(own: Tensor, float64: Tensor, standard: Standard) -> _Baseline:
    # A data-dependent size may itself be what float64 decides otherwise.
    same_size = float64.shape == own.shape
    flips = _other_decisions(own, float64, NOT_ROUNDING * standard.half) if same_size else own.numel()
    return _Baseline("own dtype", own, {"diff3": 0.0}, flips)


def _float_baseline(own: Tensor, float64: Tensor, standard: Standard) -> _Baseline:
    """The float64 reference, where rounding alone explains how far the one at the kernel's own dtype is from it."""
    static = static_threshold(own.dtype, standard)
    near_own = _limits(max(static, 4 * torch.finfo(own.dtype).eps))
    if float64.shape != own.shape:
        return _Baseline("own dtype", own, near_own, own.numel())
    other_class = _class(float64.to(own.dtype)) != _class(own)
    values = torch.where(other_class, own.double(), float64.double())
    lost = compare(own, values)
    explained = static if standard.floats == "static" else NOT_ROUNDING * static
    if lost.peak > explained or (standard.floats == "static" and lost.diff1 > static):
        return _Baseline("own dtype", own, near_own, _other_decisions(own, float64, explained))
    limits = _limits(static)
    # No reference is more precise than float64, so nothing tells what float64 itself loses.
    if standard.floats == "dynamic" and own.dtype != torch.float64:
        limits = {m: max(RATE * getattr(lost, m), static) for m in ("diff1", "diff2", "diff3", "peak")}
    return _Baseline("float64", values, limits, int(other_class.sum()), lost.diff4)


def _limits(threshold: float) -> dict[str, float]:
    return dict.fromkeys(("diff1", "diff2", "peak"), threshold)


def _class(values: Tensor) -> Tensor:
    """0 where finite, 1 and -1 where infinite, 2 where NaN."""
    return torch.where(values.isnan(), 2, torch.where(values.isinf(), values.sign(), 0)).to(torch.int8)


def _other_decisions(own: Tensor, float64: Tensor, share: float) -> int:
    """How many values float64 decides otherwise: other integers, floats off by more than a share of the largest."""
    if not own.is_floating_point():
        return int((own != float64).sum())
    if own.numel() == 0:
        return 0
    other_class = _class(float64.to(own.dtype)) != _class(own)
    error = torch.where(own.isfinite() & float64.isfinite(), own.double() - float64, 0).abs()
    largest = torch.where(float64.isfinite(), float64, 0).abs().max()
    return int((other_class | (error > share * largest)).sum())


def _verdict(kind: str, diffs: Diffs, baseline: _Baseline) -> Judgement:
    failures = []
    where = f", first at {list(diffs.first)}" if diffs.first is not None else ""
    if diffs.wrong_nan:
        failures.append(f"{diffs.wrong_nan:,} of {diffs.count:,} values are NaN on one side only{where}")
    if diffs.wrong_inf:
        failures.append(
            f"{diffs.wrong_inf:,} of {diffs.count:,} values are infinite on one side or of another sign{where}"
        )
    if kind == "exact" and diffs.unequal:
        seen = f": {_number(diffs.got)} instead of {_number(diffs.expected)}"
        failures.append(f"{diffs.unequal:,} of {diffs.count:,} values differ{where}{seen}")
    elif kind != "exact":
        over = [
            f"{m} {getattr(diffs, m):.2g} > {limit:.2g}"
            for m, limit in baseline.limits.items()
            if not getattr(diffs, m) <= limit
        ]
        if over:
            seen = f"; worst{where.removeprefix(', first')}: {_number(diffs.got)} instead of {_number(diffs.expected)}"
            failures.append(", ".join(over) + seen)
        # Equal values round alike, all of them up or all down: no bias where plain torch shows the same.
        if diffs.unequal >= ENOUGH_FOR_BIAS and diffs.diff4 in (0.0, 1.0) and diffs.diff4 != baseline.torch_bias:
            low = "low" if diffs.diff4 else "high"
            failures.append(f"a bias: all {diffs.unequal:,} unequal values are too {low} (diff4 = {diffs.diff4:.0f})")
    return Judgement(kind, baseline.name, diffs, baseline.limits, baseline.flips, failures)


def _describe(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def _number(value: float) -> str:
    return f"{value:.0f}" if math.isfinite(value) and value == int(value) and abs(value) < 1e15 else f"{value:.6g}"


# Performance


@dataclass(frozen=True)
class Efficiency:
    """How much of the machine a call used. The larger side is what bounds it."""

    io: float
    compute: float
    line: float | None  # what the case should reach; None where nothing is asked
    why: str = ""  # the reason, where it does not

    @property
    def best(self) -> float:
        return max(self.io, self.compute)

    @property
    def bound(self) -> str:
        return "memory" if self.io >= self.compute else "arithmetic"

    @property
    def reached(self) -> bool:
        return self.line is None or self.best >= self.line


def efficiency(
    seconds: float, moved: int, ops: int, bandwidth: float, peak: float, call_seconds: float, scale: str,
    standard: Standard,
) -> Efficiency:  # fmt: skip
    """`call_seconds`: what the cheapest possible call costs on this machine."""
    io, compute = moved / (seconds * bandwidth), ops / (seconds * peak)
    line = {"network": standard.network, "general": standard.general}.get(scale)
    found = Efficiency(io, compute, line)
    if found.reached or line is None:
        return found
    floor = max(moved / bandwidth, ops / peak)
    if floor / (floor + call_seconds) < line:
        why = (
            f"too small: any call costs {call_seconds * 1e6:.1f} us here, its data and arithmetic {floor * 1e6:.2g} us"
        )
    else:
        why = standard.why_slower or "no reason is on record"
    return Efficiency(io, compute, line, why)


def is_regression(before: float, now: float) -> bool:
    """The gate between two runs on one machine, in seconds: 5 us below 100 us, 4 % above.

    >>> is_regression(50e-6, 54e-6), is_regression(50e-6, 56e-6), is_regression(1e-3, 1.05e-3)
    (False, True, True)
    """
    return now - before > (5e-6 if before < 100e-6 else 0.04 * before)
