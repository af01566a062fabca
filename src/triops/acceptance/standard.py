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


def judge(got: Any, own: Any, wide: Any, standard: Standard) -> list[Judgement]:
    """Each output of a kernel against the reference at its own dtype and the reference in float64."""
    outputs, owns, wides = tensors_of(got), tensors_of(own), tensors_of(wide)
    if len(outputs) != len(owns):
        failure = f"{len(outputs)} outputs instead of {len(owns)}"
        return [Judgement("exact", "own dtype", Diffs(), {}, 0, [failure])]
    return [_judge_output(e, o, w, standard) for e, o, w in zip(outputs, owns, wides, strict=True)]


def static_threshold(dtype: torch.dtype, standard: Standard) -> float:
    if dtype == torch.float64:
        return 1e-12
    return standard.float32 if dtype == torch.float32 else standard.half


def _judge_output(e: Tensor, own: Tensor, wide: Tensor, standard: Standard) -> Judgement:
    exact = not own.is_floating_point() or standard.floats == "exact"
    kind = "exact" if exact else standard.floats
    if (e.shape, e.dtype) != (own.shape, own.dtype):
        failure = f"{_describe(e)} instead of {_describe(own)}"
        return Judgement(kind, "own dtype", Diffs(count=e.numel()), {}, 0, [failure])
    own, wide = own.to(e.device), wide.to(e.device)
    if exact:
        diffs = compare(e, own)
        # A data-dependent size may itself be what float64 decides otherwise.
        flips = own.numel() if wide.shape != own.shape else _other_decisions(own, wide, NOT_ROUNDING * standard.half)
        return _verdict(kind, "own dtype", diffs, {"diff3": 0.0}, flips)

    static = static_threshold(e.dtype, standard)
    tolerance = max(static, 4 * torch.finfo(e.dtype).eps)
    if wide.shape != own.shape:
        return _verdict(kind, "own dtype", compare(e, own), _limits(tolerance), own.numel())
    other_class = _class(wide.to(own.dtype)) != _class(own)
    baseline = torch.where(other_class, own.double(), wide.double())
    torch_diffs = compare(own, baseline)
    explained = static if standard.floats == "static" else NOT_ROUNDING * static
    if torch_diffs.peak > explained or (standard.floats == "static" and torch_diffs.diff1 > static):
        return _verdict(kind, "own dtype", compare(e, own), _limits(tolerance), _other_decisions(own, wide, explained))
    limits = _limits(static)
    if standard.floats == "dynamic" and e.dtype != torch.float64:  # nothing wider tells what float64 itself loses
        measured = {m: getattr(torch_diffs, m) for m in ("diff1", "diff2", "diff3", "peak")}
        limits = {m: max(RATE * loss, static) for m, loss in measured.items()}
    return _verdict(kind, "float64", compare(e, baseline), limits, int(other_class.sum()), torch_diffs.diff4)


def _limits(threshold: float) -> dict[str, float]:
    return dict.fromkeys(("diff1", "diff2", "peak"), threshold)


def _class(values: Tensor) -> Tensor:
    """0 where finite, 1 and -1 where infinite, 2 where NaN."""
    return torch.where(values.isnan(), 2, torch.where(values.isinf(), values.sign(), 0)).to(torch.int8)


def _other_decisions(own: Tensor, wide: Tensor, share: float) -> int:
    """How many values float64 decides otherwise: other integers, floats off by more than a share of the largest."""
    if not own.is_floating_point():
        return int((own != wide).sum())
    if own.numel() == 0:
        return 0
    other_class = _class(wide.to(own.dtype)) != _class(own)
    error = torch.where(own.isfinite() & wide.isfinite(), own.double() - wide, 0).abs()
    largest = torch.where(wide.isfinite(), wide, 0).abs().max()
    return int((other_class | (error > share * largest)).sum())


def _verdict(
    kind: str, baseline: str, diffs: Diffs, limits: dict[str, float], flips: int, torch_bias: float | None = None
) -> Judgement:  # fmt: skip
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
            for m, limit in limits.items()
            if not getattr(diffs, m) <= limit
        ]
        if over:
            seen = f"; worst{where.removeprefix(', first')}: {_number(diffs.got)} instead of {_number(diffs.expected)}"
            failures.append(", ".join(over) + seen)
        # Equal values round alike, all of them up or all down: no bias where plain torch shows the same.
        if diffs.unequal >= ENOUGH_FOR_BIAS and diffs.diff4 in (0.0, 1.0) and diffs.diff4 != torch_bias:
            low = "low" if diffs.diff4 else "high"
            failures.append(f"a bias: all {diffs.unequal:,} unequal values are too {low} (diff4 = {diffs.diff4:.0f})")
    return Judgement(kind, baseline, diffs, limits, flips, failures)


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
