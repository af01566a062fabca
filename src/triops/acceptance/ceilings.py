"""What this machine can do at most, measured in the run that is judged by it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch

from triops.acceptance.timing import events_seconds, measure


@dataclass(frozen=True)
class Ceilings:
    bandwidth: float  # bytes a second, read and written, by a large copy
    vector: float  # float32 operations a second outside tensor cores, by a product of matrices
    call: float  # seconds of the cheapest call: adding one to one number
    device: str

    def peak(self, arithmetic: str, dtype: torch.dtype) -> float:
        """Operations a second that a case is held against."""
        if arithmetic == "vector" and dtype != torch.float64:
            return self.vector
        peak = matrix_peak(self.device, dtype if dtype.is_floating_point else torch.float32)
        # A CPU without half arithmetic multiplies half matrices slower than float32 ones: no ceiling for a kernel.
        return peak if dtype == torch.float64 else max(peak, self.vector)


@functools.cache
def measured(device: str) -> Ceilings:
    # Larger than the caches; a CPU's copy of this takes a tenth of a second.
    size = 2**30 if device == "cuda" else 2**27
    source, target = (torch.ones(size, dtype=torch.uint8, device=device) for _ in range(2))
    one = torch.ones(1, device=device)
    return Ceilings(
        bandwidth=2 * size / _seconds(lambda: target.copy_(source), device),
        vector=matrix_peak(device, torch.float32),
        call=measure(lambda: one + one, device, 0.05).seconds,
        device=device,
    )


@functools.cache
def matrix_peak(device: str, dtype: torch.dtype) -> float:
    """Operations a second of a large product of matrices; true float32, not TF32."""
    n = 8192 if device == "cuda" else 1024
    a, b = (torch.ones(n, n, dtype=dtype, device=device) for _ in range(2))
    allowed = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    try:
        a @ b
        return 2 * n**3 / _seconds(lambda: a @ b, device)
    finally:
        torch.backends.cuda.matmul.allow_tf32 = allowed


def _seconds(call: Callable[[], object], device: str) -> float:
    return measure(call, device, 0.2).seconds if device == "cpu" else events_seconds(call, 0.2)
