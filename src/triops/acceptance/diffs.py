"""How far a result `e` is from its baseline `b`: numbers, with nothing judged yet.

    diff1 = sum|e-b| / sum|b|
    diff2 = sqrt(sum (e-b)^2 / sum b^2)
    diff3 = max(|e-b|/|b| where |b| > threshold, |e-b| elsewhere)
    diff4 = #(e<b) / #(e!=b)                the share of values that are too low: 0 or 1 is a bias
    peak  = max|e-b| / max|b|               one wrong value among millions, which sums do not see

A quotient with a zero below is 0 if the part above is zero too, else inf. NaN and inf do not enter the sums: their
places are compared one by one, and every other value still counts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

# Below this a baseline counts as zero, and diff3 takes the absolute error.
SMALL = {torch.float64: 1e-12, torch.float32: 1e-6, torch.float16: 1e-4, torch.bfloat16: 1e-4}

_LARGEST = torch.finfo(torch.float64).max


@dataclass(frozen=True)
class Diffs:
    count: int = 0  # values compared
    diff1: float = 0.0
    diff2: float = 0.0
    diff3: float = 0.0
    diff4: float | None = None  # None: every value is equal
    peak: float = 0.0
    unequal: int = 0  # finite values that differ at all
    wrong_nan: int = 0  # NaN on one side only
    wrong_inf: int = 0  # inf on one side only, or of the other sign
    first: tuple[int, ...] | None = None  # where the worst value is
    got: float = 0.0  # that value,
    expected: float = 0.0  # and what it should be


def compare(e: Tensor, b: Tensor) -> Diffs:
    """`e` and `b` of one shape; `b` may be wider, and is then rounded only to tell where `e` must be infinite.

    >>> import torch
    >>> compare(torch.tensor([1.0, 2.0, 5.0]), torch.tensor([1.0, 2.0, 4.0])).diff3
    0.25
    """
    if e.numel() == 0:
        return Diffs()
    b = b.to(e.device)
    if not e.is_floating_point():
        return _compare_integers(e, b)
    as_stored = b.to(e.dtype)
    nan = e.isnan() != as_stored.isnan()
    inf = (e.isinf() | as_stored.isinf()) & (e != as_stored) & ~e.isnan() & ~as_stored.isnan()
    finite = e.isfinite() & as_stored.isfinite()
    e64 = torch.where(finite, e, 0).double()
    b64 = torch.where(finite, b, 0).double()
    error = (e64 - b64).abs().clamp(max=_LARGEST)
    size = b64.abs()
    large = size > SMALL[e.dtype]
    relative = torch.where(large, error / torch.where(large, size, 1), error)
    unequal, low = int((error > 0).sum()), int((e64 < b64).sum())
    worst_error, largest = float(error.max()), float(size.max())
    # Squares of what is scaled to 1 neither overflow nor vanish.
    unit_error, unit = error / (worst_error or 1.0), size / (largest or 1.0)
    ratio2 = math.sqrt(_quotient(float(unit_error.square().sum()), float(unit.square().sum())))
    total_error, total = float(unit_error.sum()), float(unit.sum())
    scale = _quotient(worst_error, largest)
    broken = nan | inf
    wrong = int(broken.sum())
    at = int(broken.flatten().byte().argmax() if wrong else relative.flatten().argmax())
    return Diffs(
        count=e.numel(),
        diff1=_product(_quotient(total_error, total), scale),
        diff2=_product(ratio2, scale),
        diff3=float(relative.max()),
        diff4=low / unequal if unequal else None,
        peak=scale,
        unequal=unequal,
        wrong_nan=int(nan.sum()),
        wrong_inf=int(inf.sum()),
        first=_place(at, e.shape) if wrong or unequal else None,
        got=float(e.flatten()[at]),
        expected=float(b.flatten()[at]),
    )


def _compare_integers(e: Tensor, b: Tensor) -> Diffs:
    differs = e != b
    unequal = int(differs.sum())
    if unequal == 0:
        return Diffs(count=e.numel(), got=float(e.flatten()[0]), expected=float(b.flatten()[0]))
    e64, b64 = e.double(), b.double()
    error, size = (e64 - b64).abs(), b64.abs()
    relative = torch.where(size > 0, error / torch.where(size > 0, size, 1), error)
    at = int(differs.flatten().byte().argmax())
    return Diffs(
        count=e.numel(),
        diff1=_quotient(float(error.sum()), float(size.sum())),
        diff2=math.sqrt(_quotient(float(error.square().sum()), float(size.square().sum()))),
        diff3=float(relative.max()) or math.ulp(0.0),  # beyond 2**53 float64 may not see what differs
        diff4=int((e < b).sum()) / unequal,
        peak=_quotient(float(error.max()), float(size.max())),
        unequal=unequal,
        first=_place(at, e.shape),
        got=float(e64.flatten()[at]),
        expected=float(b64.flatten()[at]),
    )


def _quotient(above: float, below: float) -> float:
    if below == 0:
        return 0.0 if above == 0 else math.inf
    return above / below


def _product(a: float, b: float) -> float:
    return 0.0 if a == 0 or b == 0 else a * b


def _place(at: int, shape: torch.Size) -> tuple[int, ...]:
    place = []
    for size in reversed(shape):
        place.append(at % size)
        at //= size
    return tuple(reversed(place))
