"""Lists of pairs on GPU, out of the neighbor tables that `submanifold_gpu.py` and `strided_gpu.py` make."""

import math

import torch
import triton.language as tl

from triops import _gpu
from triops._gpu import cdiv
from triops._gpu.pinned import pinned_counter
from triops._gpu.scan import before_block, running_sums
from triops.ops.rulebook.geometry import refuse_outside_sites
from triops.ops.rulebook.strided_gpu import GRAIN, output_sites, output_table, plan
from triops.ops.rulebook.submanifold_gpu import submanifold_table

PACK_WARPS = 4


def padded_pairs(
    indices, batch_size, spatial_shape, kernel_size, stride, padding, dilation, out_padding, subm, transpose
):
    refuse_outside_sites("get_indice_pairs", indices, batch_size, spatial_shape)
    indices, volume = indices.contiguous(), math.prod(kernel_size)
    if indices.shape[0] == 0:
        return _no_sites(indices, volume)
    pairs = torch.empty((volume, 2, indices.shape[0]), dtype=torch.int32, device=indices.device)
    if subm:
        out_indices = torch.empty_like(indices)
        table, found = submanifold_table(
            indices, batch_size, spatial_shape, kernel_size, dilation, copy=out_indices, counts=True
        )
        return out_indices, pairs, _pack(table, found.zeros32, found.start + 2, pairs, mirror=True)
    lists = spatial_shape, kernel_size, stride, padding, dilation, out_padding
    convolution = plan(batch_size, *map(tuple, lists), transpose)
    total = pinned_counter(indices.device)
    found = output_sites(indices, convolution, scratch=pairs)
    sites = found.list_most_sites(total.expect())
    outputs, counts = output_table(found)
    num = _pack(outputs, counts, 0, pairs, mirror=False)
    return _trimmed(sites, total.wait()), pairs, num


def _no_sites(indices, volume):
    pairs = indices.new_empty((volume, 2, 0), dtype=torch.int32)
    return torch.empty_like(indices), pairs, indices.new_zeros(volume, dtype=torch.int32)


def _trimmed(sites, length):
    """The first rows of a buffer that was made for the worst case, without holding on to all of it."""
    wasted = (sites.shape[0] - length) * sites.shape[1] * sites.element_size()
    return sites[:length].clone() if wasted > 16 << 20 else sites[:length]


def _pack(table, counts, start, pairs, mirror):
    """table int32 [K, L]: the output row of an input row, offsets in reverse order with `mirror`. Fills pairs. -> num

    counts from `start` int32 [K, blocks]: how many there are in every GRAIN entries of the table.
    """
    volume, count = table.shape
    blocks = cdiv(count, GRAIN)
    counts, start, summed = running_sums(counts, start, volume, blocks)
    num = torch.empty(volume, dtype=torch.int32, device=table.device)
    _pack_kernel[(blocks, volume)](
        table, counts, start, pairs, num, count, blocks, summed, volume,
        MIRROR=mirror, BLOCK=GRAIN, num_warps=PACK_WARPS,
    )  # fmt: skip
    return num


@_gpu.kernel
def _pack_kernel(
    table, counts, start, pairs, num, count, blocks, summed, volume, MIRROR: tl.constexpr, BLOCK: tl.constexpr
):
    """BLOCK entries of one offset: the rows among them close up behind those of the blocks before, -1 fills the end."""
    p = tl.program_id(0)
    k = tl.program_id(1).to(tl.int64)
    source = k
    if MIRROR:
        source = volume - 1 - k
    i = p * BLOCK + tl.arange(0, BLOCK)
    valid = i < count
    row = tl.load(table + source * count + i, mask=valid, other=-1)
    before, total = before_block(counts + start + source * blocks, blocks, summed, p)
    inputs = pairs + 2 * k * count
    outputs = inputs + count
    tl.store(inputs + i, -1, mask=valid & (i >= total))
    tl.store(outputs + i, -1, mask=valid & (i >= total))
    hit = row >= 0
    if tl.max(hit.to(tl.int32), 0) > 0:
        at = before + tl.cumsum(hit.to(tl.int32), 0) - 1
        tl.store(inputs + at, i, mask=hit)
        tl.store(outputs + at, row, mask=hit)
    if p == 0:
        tl.store(num + k, total)
