"""A ranked bitmap of sites on GPU: which places of a grid are active, and how many active ones come before each.

`ranks[w]` int64 stands for 32 places: active places before word w << 32 | the bits of its own.
"""

import triton
import triton.language as tl

from triops._gpu.arithmetic import popcount


@triton.jit
def rank_of(ranks, flat, wanted):
    """-> whether a place is active, and how many active ones come before it; where wanted"""
    entry = tl.load(ranks + (flat >> 5), mask=wanted, other=0)
    bit = (flat & 31).to(tl.int64)
    below = (tl.full(flat.shape, 1, tl.int64) << bit) - 1
    return ((entry >> bit) & 1) != 0, (entry >> 32).to(tl.int32) + popcount((entry & below).to(tl.int32))
