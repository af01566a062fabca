"""Loads and stores of a run of elements whose length may be any number.

A mask whose bound is not compiled in costs the 16-byte loads and stores, and counts are not compiled in. So a block
that lies wholly inside is loaded and stored without a mask.
"""

import triton
import triton.language as tl


@triton.jit
def load_run(at, mask, whole, other):
    """tl.load(at, mask, other), `whole` where the mask is true everywhere."""
    if whole:  # noqa: SIM108 - a branch of the kernel
        value = tl.load(at)
    else:
        value = tl.load(at, mask=mask, other=other)
    return value


@triton.jit
def store_run(at, value, mask, whole):
    """tl.store(at, value, mask), `whole` where the mask is true everywhere."""
    if whole:
        tl.store(at, value)
    else:
        tl.store(at, value, mask=mask)
