"""Prefix sums across blocks: each has stored its count, and the next kernel needs the sum of those before."""

import torch
import triton
import triton.language as tl

MAX_ADDED = 1024  # counters that a program adds up itself; beyond, they are summed beforehand
_MAX_ADDED = tl.constexpr(MAX_ADDED)


def running_sums(counts, start, rows, blocks):
    """Counts int32 [rows, blocks] from counts[start] on, as `before_block` takes them. -> counts, start, summed

    An offset and not a view: the alignment of a view would change with the counts, and kernels are compiled for it.
    """
    if blocks <= MAX_ADDED:
        return counts, start, 0
    counts = counts.view(-1)[start : start + rows * blocks].view(rows, blocks)
    return counts.cumsum(1, dtype=torch.int32), 0, 1


@triton.jit
def before_block(counts, blocks, summed, p):
    """Of counts by block, or of their running sums. -> what the blocks before block p have, and all of them"""
    if summed != 0:
        before = tl.load(counts + p - 1, mask=p > 0, other=0)
        everything = tl.load(counts + blocks - 1)
    else:
        # As many as there can be, however many there are: that number must not be compiled in.
        e = tl.arange(0, _MAX_ADDED)
        each = tl.load(counts + e, mask=e < blocks, other=0)
        before = tl.sum(tl.where(e < p, each, 0), 0)
        everything = tl.sum(each, 0)
    return before, everything
