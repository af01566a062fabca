"""ingroup_inds on GPU: a stable sort groups the elements; one kernel numbers the runs.

A block of sorted elements finds where its runs begin by a scan. The run it begins with may have begun in an earlier
block: a binary search finds where.
"""

import torch
import triton
import triton.language as tl

from triops import _gpu

BLOCK = 1024


def ingroup_inds(group_inds):
    total = group_inds.shape[0]
    out = torch.empty(total, dtype=torch.int32, device=group_inds.device)
    if total:
        ascending, order = group_inds.sort(stable=True)
        _number_kernel[(_gpu.cdiv(total, BLOCK),)](ascending, order, out, total, BLOCK=BLOCK, num_warps=4)
    return out


@triton.jit
def _later(a, b):
    return tl.maximum(a, b)


@_gpu.kernel
def _number_kernel(ascending, order, out, total, BLOCK: tl.constexpr):
    first = tl.program_id(0) * BLOCK
    i = first + tl.arange(0, BLOCK)
    inside = i < total
    key = tl.load(ascending + i, mask=inside, other=0)
    before = tl.load(ascending + i - 1, mask=inside & (i > 0), other=0)

    # the lowest index of the first key, in [low, high]
    wanted = tl.load(ascending + first)
    low, high = tl.cast(0, tl.int32), tl.cast(first, tl.int32)
    while low < high:
        middle = (low + high) // 2
        if tl.load(ascending + middle) < wanted:
            low = middle + 1
        else:
            high = middle

    begins = tl.where((i > first) & (key != before), i, low)
    begin = tl.associative_scan(begins, 0, _later)
    tl.store(out + tl.load(order + i, mask=inside, other=0), i - begin, mask=inside)
