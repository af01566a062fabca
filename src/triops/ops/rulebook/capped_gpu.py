"""Tables of a fixed capacity on GPU: what comes behind the true number of outputs is inactive, and no host waits."""

import torch
import triton.language as tl

from triops import _gpu
from triops._gpu import cdiv

BLOCK = 1024


def cap(sites, outputs, count, capacity):
    """sites [most, 1 + D], of which the first `count` are there, -> [capacity, 1 + D], -1 behind them; and outputs
    int32 [K, L] inverted -> inputs int32 [K, capacity]. Entries of `outputs` behind the capacity become -1."""
    offsets, length = outputs.shape
    columns = sites.shape[1]
    kept = torch.empty((capacity, columns), dtype=sites.dtype, device=sites.device)
    inputs = torch.full((offsets, capacity), -1, dtype=torch.int32, device=sites.device)
    if capacity:
        _sites_kernel[(cdiv(capacity * columns, BLOCK),)](
            sites, kept, count, capacity * columns, sites.shape[0], columns, BLOCK=BLOCK, num_warps=4
        )
    _invert_kernel[(cdiv(length, BLOCK), offsets)](outputs, inputs, length, capacity, BLOCK=BLOCK, num_warps=4)
    return kept, inputs


@_gpu.kernel
def _sites_kernel(sites, kept, count, size, most, columns, BLOCK: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    active = place // columns < tl.minimum(tl.load(count), most)
    tl.store(kept + place, tl.load(sites + place, mask=active, other=-1), mask=place < size)


@_gpu.kernel
def _invert_kernel(outputs, inputs, length, capacity, BLOCK: tl.constexpr):
    k = tl.program_id(1).to(tl.int64)
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    at = outputs + k * length + i
    o = tl.load(at, mask=i < length, other=-1)
    tl.store(at, -1, mask=(i < length) & (o >= capacity))
    tl.store(inputs + k * capacity + o, i, mask=(o >= 0) & (o < capacity))
