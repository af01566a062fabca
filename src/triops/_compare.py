"""When two results of one call are the same: the rule of the tests, the soak and the benchmarks.

Integers and booleans are equal bit for bit. Floats agree within a few units in the last place of what a rounding error
is small against: the value itself, or, where a value is a sum whose terms may cancel (`Standard.error_scale`), the
largest value of its row or of a row in the middle, whichever is larger. No error is small against 1: a loss of 1e-5 has
as many correct digits as one of 10.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from triops._sample import tensors_of

ErrorScale = Literal["value", "row"]

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}

# What subnormal numbers may be off by: they may be flushed to zero, and in float16 have few digits left.
FLOOR = {d: torch.finfo(d).tiny for d in TOLERANCE} | {torch.float16: 4 * 2**-24}


def difference(got: Any, expected: Any, error_scale: ErrorScale = "value") -> str:
    """In words, how two results of one call differ; empty where they agree.

    >>> import torch
    >>> difference(torch.tensor([10.0, 1e-5]), torch.tensor([10.0, 2e-5]))
    'output 0: 1 of 2 values differ, worst at [1]: 1e-05 instead of 2e-05'
    >>> difference(torch.tensor([10.0, 1e-5]), torch.tensor([10.0, 2e-5]), "row")
    ''
    """
    got, expected = tensors_of(got), tensors_of(expected)
    if len(got) != len(expected):
        return f"{len(got)} outputs instead of {len(expected)}"
    for i, (g, e) in enumerate(zip(got, expected, strict=True)):
        if (g.dtype, g.shape) != (e.dtype, e.shape):
            return f"output {i}: {g.dtype} {list(g.shape)} instead of {e.dtype} {list(e.shape)}"
        excess = _excess(g, e.to(g.device), error_scale)
        wrong = int((excess > 0).sum())
        if wrong:
            at = int(excess.flatten().argmax())
            place = [int(p) for p in torch.unravel_index(torch.tensor(at), g.shape)]
            values = f"{g.flatten()[at].item():.6g} instead of {e.flatten()[at].item():.6g}"
            return f"output {i}: {wrong:,} of {g.numel():,} values differ, worst at {place}: {values}"
    return ""


def _excess(got: Tensor, expected: Tensor, error_scale: ErrorScale) -> Tensor:
    """Above 0 where a value is wrong, the more the worse."""
    if not expected.is_floating_point() or expected.numel() == 0:
        return (got != expected).double()
    g, e = got.double(), expected.double()
    both = g.isfinite() & e.isfinite()
    size = torch.where(both, e, 0).abs()
    if error_scale == "row" and size.dim():
        size = size.amax(-1, keepdim=True)
        if (size > 0).any():
            size = size.clamp(min=size[size > 0].median().item())
    allowed = TOLERANCE[expected.dtype] * size + FLOOR[expected.dtype]
    error = torch.where(both, g - e, 0).abs()
    # NaN and inf have their places
    same = both | (g == e) | (g.isnan() & e.isnan())
    return torch.where(same, (error - allowed) / allowed, torch.inf)
