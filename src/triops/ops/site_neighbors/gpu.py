"""site_neighbors on GPU: a hash of the sites by their coordinates, which every center asks for every offset.

A slot holds a row and 32 bits of its site's hash; where these agree, the coordinates of that row are compared. So no
grid is needed, nobody waits for the bounds of the sites, and no coordinate is too large.
"""

import torch
import triton
import triton.language as tl

from triops import _gpu
from triops._gpu.site_hash import claim

# One warp per program: a block waits for its longest chain of probes.
INSERT_BLOCK, FIND_BLOCK, WARPS = _gpu.block(32, interpreted=1024), _gpu.block(64, interpreted=1024), 1
TILE = _gpu.block(4, interpreted=32)  # offsets of one program


def site_neighbors(indices, centers, offsets):
    indices, centers, offsets = indices.contiguous(), centers.contiguous(), offsets.contiguous()
    sites, columns = indices.shape
    table = torch.empty((offsets.shape[0], centers.shape[0]), dtype=torch.int32, device=indices.device)
    if table.numel() == 0:
        return table
    bits = max((2 * sites).bit_length(), 4)  # at least every third slot stays free, so every search ends
    slots = torch.zeros(1 << bits, dtype=torch.int64, device=indices.device)
    if sites:
        _insert_kernel[(_gpu.cdiv(sites, INSERT_BLOCK),)](
            indices, slots, sites, bits, COLUMNS=columns, BLOCK=INSERT_BLOCK, num_warps=WARPS
        )
    _find_kernel[(_gpu.cdiv(centers.shape[0], FIND_BLOCK), _gpu.cdiv(offsets.shape[0], TILE))](
        indices, centers, offsets, slots, table, centers.shape[0], offsets.shape[0], bits,
        COLUMNS=columns, BLOCK=FIND_BLOCK, TILE=TILE, num_warps=WARPS,
    )  # fmt: skip
    return table


@triton.jit
def _mixed(hashed, value):
    hashed = (hashed ^ value.to(tl.uint64, bitcast=True)) * 0x1E3779B97F4A7C15
    return hashed ^ (hashed >> 29)


@triton.jit
def _probe(hashed, bits):
    """-> first slot, an odd step to the next (linear probing makes longer chains), and what a slot says of a hash."""
    hashed = (hashed ^ (hashed >> 32)) * 0x3F58476D1CE4E5B9
    hashed = hashed ^ (hashed >> 32)
    slot = (hashed >> 33).to(tl.int32) & _last(bits)
    return slot, ((hashed >> 20) & 1023).to(tl.int32) | 1, hashed.to(tl.uint32).to(tl.int32, bitcast=True)


@triton.jit
def _last(bits):
    """The last slot; as a shift of 1 it would pass int32 on the way."""
    return (tl.full((), 2147483647, tl.int32) >> (31 - bits)).to(tl.int32)


@triton.jit
def _entry(mark, row):
    """Never 0, which is a free slot, nor -1."""
    return (mark.to(tl.int64) << 32) | (row.to(tl.int64) + 1)


@triton.jit
def _marked(entry, mark):
    """-> whether a slot is taken by a site of such a hash, and the row of whatever site it is."""
    return (entry != 0) & ((entry >> 32).to(tl.int32) == mark), (entry & 0xFFFFFFFF) - 1


@_gpu.kernel
def _insert_kernel(indices, slots, sites, bits, COLUMNS: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    at = indices + i.to(tl.int64) * COLUMNS
    valid = i < sites
    hashed = tl.zeros((BLOCK,), tl.uint64)
    for c in tl.static_range(COLUMNS):
        hashed = _mixed(hashed, tl.load(at + c, mask=valid, other=-1).to(tl.int64))
    slot, step, mark = _probe(hashed, bits)
    entry = _entry(mark, i)
    pending = tl.load(at, mask=valid, other=-1) >= 0
    while tl.max(pending.to(tl.int32), 0) > 0:
        old = claim(slots + slot, entry, pending)
        same, row = _marked(old, mark)
        same = same & pending
        for c in tl.static_range(COLUMNS):
            same = same & (
                tl.load(indices + row * COLUMNS + c, mask=same, other=0) == tl.load(at + c, mask=same, other=0)
            )
        tl.atomic_min(slots + slot, entry, mask=same, sem="relaxed")  # the lowest row of a site, whichever came first
        pending = pending & (old != 0) & (same == 0)
        slot = tl.where(pending, (slot + step) & _last(bits), slot)


@triton.jit
def _wanted(centers, offsets, a, k, count, volume, c: tl.constexpr, COLUMNS: tl.constexpr):
    """Coordinate c of centers [1, BLOCK] moved by offsets [TILE, 1]. -> int64, and whether int64 holds it"""
    center = tl.load(centers + a.to(tl.int64) * COLUMNS + c, mask=a < count, other=-1).to(tl.int64)
    if c == 0:
        return center + k * 0, center + k * 0 >= 0
    else:
        step = tl.load(offsets + k * (COLUMNS - 1) + (c - 1), mask=k < volume, other=0).to(tl.int64)
        return center + step, (center + step < center) == (step < 0)


@_gpu.kernel
def _find_kernel(
    indices, centers, offsets, slots, table, count, volume, bits,
    COLUMNS: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """TILE offsets for BLOCK centers."""
    a = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK))[None, :]
    k = (tl.program_id(1) * TILE + tl.arange(0, TILE))[:, None]
    valid = (a < count) & (k < volume)
    pending = valid
    hashed = tl.zeros((TILE, BLOCK), tl.uint64)
    for c in tl.static_range(COLUMNS):
        value, exists = _wanted(centers, offsets, a, k, count, volume, c, COLUMNS)
        hashed = _mixed(hashed, value)
        pending = pending & exists
    slot, step, mark = _probe(hashed, bits)
    found = tl.full((TILE, BLOCK), -1, tl.int32)
    while tl.max(tl.max(pending.to(tl.int32), 1), 0) > 0:
        entry = tl.load(slots + slot, mask=pending, other=0)
        same, row = _marked(entry, mark)
        for c in tl.static_range(COLUMNS):
            value, _ = _wanted(centers, offsets, a, k, count, volume, c, COLUMNS)
            same = same & (tl.load(indices + row * COLUMNS + c, mask=same, other=0) == value)
        found = tl.where(same, row.to(tl.int32), found)
        pending = pending & (entry != 0) & (same == 0)
        slot = tl.where(pending, (slot + step) & _last(bits), slot)
    tl.store(table + k.to(tl.int64) * count + a, found, mask=valid)
