"""Prefix sums across blocks: each has stored its count, and the next kernel needs the sum of those before."""

import triton
import triton.language as tl

MAX_SUMMED_BLOCKS = 1024  # counters that a program adds up itself; beyond, they are summed beforehand


@triton.jit
def before_block(counts, blocks, SUMMED: tl.constexpr, BLOCKS: tl.constexpr):
    """Of counts by block, or of their running sum. -> what the blocks before this program's have, and all of them"""
    p = tl.program_id(0)
    if SUMMED:
        before = tl.load(counts + p - 1, mask=p > 0, other=0)
        everything = tl.load(counts + blocks - 1)
    else:
        e = tl.arange(0, BLOCKS)
        each = tl.load(counts + e, mask=e < blocks, other=0)
        before = tl.sum(tl.where(e < p, each, 0), 0)
        everything = tl.sum(each, 0)
    return before, everything
