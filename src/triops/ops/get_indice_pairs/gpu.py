"""The rulebook on GPU. `submanifold/gpu.py` and `strided/gpu.py` make neighbour tables; here they become pairs."""

import math

import torch
import triton.language as tl

from triops import _gpu
from triops._gpu import cdiv, next_power_of_2
from triops.ops.get_indice_pairs.geometry import refuse_outside_sites
from triops.ops.get_indice_pairs.strided.gpu import invert_table, plan, sparse_table
from triops.ops.get_indice_pairs.submanifold.gpu import GRAIN, submanifold_table

PACK_WARPS = 4
MAX_SUMMED_BLOCKS = 1024  # counters that a packing program adds up itself; beyond, they are summed beforehand


def get_indice_pairs(
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
    sites, total, outputs, counts, start = sparse_table(indices, convolution, scratch=pairs)
    num = _pack(outputs, counts, start, pairs, mirror=False)
    return _cut(sites, total.wait()), pairs, num


def compact_indice_pairs(
    indices, batch_size, spatial_shape, kernel_size, stride, padding, dilation, out_padding, subm, transpose
):
    out_indices, pairs, num = get_indice_pairs(
        indices, batch_size, spatial_shape, kernel_size, stride, padding, dilation, out_padding, subm, transpose
    )
    offsets = torch.zeros(num.shape[0] + 1, dtype=torch.int64, device=num.device)
    torch.cumsum(num, 0, out=offsets[1:])
    return out_indices, pairs.transpose(0, 1)[:, pairs[:, 0] >= 0], offsets


def submanifold_neighbors(indices, batch_size, spatial_shape, kernel_size, dilation):
    refuse_outside_sites("submanifold_neighbors", indices, batch_size, spatial_shape)
    if indices.shape[0] == 0:
        return indices.new_empty((math.prod(kernel_size), 0), dtype=torch.int32)
    return submanifold_table(indices.contiguous(), batch_size, spatial_shape, kernel_size, dilation)[0]


def sparse_neighbors(
    indices, batch_size, spatial_shape, kernel_size, stride, padding, dilation, out_padding, transpose
):
    refuse_outside_sites("sparse_neighbors", indices, batch_size, spatial_shape)
    indices = indices.contiguous()
    if indices.shape[0] == 0:
        nothing = indices.new_empty((math.prod(kernel_size), 0), dtype=torch.int32)
        return torch.empty_like(indices), nothing, nothing.clone()
    lists = spatial_shape, kernel_size, stride, padding, dilation, out_padding
    convolution = plan(batch_size, *map(tuple, lists), transpose)
    sites, total, outputs, *_ = sparse_table(indices, convolution)
    out_indices = _cut(sites, total.wait())
    return out_indices, invert_table(outputs, out_indices.shape[0]), outputs


def _no_sites(indices, volume):
    pairs = indices.new_empty((volume, 2, 0), dtype=torch.int32)
    return torch.empty_like(indices), pairs, indices.new_zeros(volume, dtype=torch.int32)


def _cut(sites, length):
    """The first rows of a buffer that was made for the worst case, without holding on to all of it."""
    wasted = (sites.shape[0] - length) * sites.shape[1] * sites.element_size()
    return sites[:length].clone() if wasted > 16 << 20 else sites[:length]


def _pack(table, counts, start, pairs, mirror):
    """table int32 [K, L]: the output row of an input row, offsets in reverse order with `mirror`. Fills pairs. -> num

    counts from `start` int32 [K, blocks]: how many there are in every GRAIN entries of the table.
    """
    volume, count = table.shape
    blocks = cdiv(count, GRAIN)
    summed = blocks > MAX_SUMMED_BLOCKS
    if summed:
        counts = counts.view(-1)[start : start + volume * blocks].view(volume, blocks).cumsum(1, dtype=torch.int32)
        start = 0
    num = torch.empty(volume, dtype=torch.int32, device=table.device)
    _pack_kernel[(blocks, volume)](
        table, counts, start, pairs, num, count, blocks, volume,
        MIRROR=mirror, SUMMED=summed, BLOCKS=1 if summed else next_power_of_2(blocks), BLOCK=GRAIN,
        num_warps=PACK_WARPS,
    )  # fmt: skip
    return num


@_gpu.kernel(varying=("start", "count", "blocks"))
def _pack_kernel(
    table, counts, start, pairs, num, count, blocks, volume,
    MIRROR: tl.constexpr, SUMMED: tl.constexpr, BLOCKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """BLOCK entries of one offset: the rows among them close up behind those of the blocks before, -1 fills the end."""
    p = tl.program_id(0)
    k = tl.program_id(1).to(tl.int64)
    source = k
    if MIRROR:
        source = volume - 1 - k
    i = p * BLOCK + tl.arange(0, BLOCK)
    valid = i < count
    row = tl.load(table + source * count + i, mask=valid, other=-1)
    counts += start
    if SUMMED:
        total = tl.load(counts + source * blocks + blocks - 1)
        before = tl.load(counts + source * blocks + p - 1, mask=p > 0, other=0)
    else:
        e = tl.arange(0, BLOCKS)
        sums = tl.load(counts + source * blocks + e, mask=e < blocks, other=0)
        total = tl.sum(sums, 0)
        before = tl.sum(tl.where(e < p, sums, 0), 0)
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
