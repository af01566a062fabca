"""A GPU kernel with a fault, which a sanitizer must find."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _fill_kernel(out, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    tl.store(out + tl.arange(0, BLOCK), 1.0)


def fill(out: Tensor, count: int) -> None:
    """Fill `count` numbers from the first of `out` on, however many it has."""
    _fill_kernel[(1,)](out, count)
