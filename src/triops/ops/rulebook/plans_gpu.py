"""The plans of a table on GPU: tiles of rows for a convolution, packed pairs for its weight gradient.

Rows are sorted by which offsets they have, so that the rows of a tile have the same ones and a visit (a tile under one
offset) wastes few rows: see `reference.row_tiles`. Nothing here waits for the GPU.
"""

import torch
import triton
import triton.language as tl

from triops import _check, _gpu
from triops._gpu.scan import before_block, running_sums
from triops.ops.rulebook.plans import pairs_size, tiles_size
from triops.ops.rulebook.reference import MASK_BITS, ODDS, SAMPLE
from triops.ops.rulebook.tables import refuse_rows_outside

SAMPLES = tl.constexpr(SAMPLE)
LEAST_ODDS, MOST_ODDS = tl.constexpr(ODDS[0]), tl.constexpr(ODDS[1])
OFFSETS_PER_STEP = 32
UNROLL = 9  # loads of one row under way together
LOOKUPS = 512  # per program at a time


def row_tiles(table, rows, tile):
    return make_tiles("row_tiles", "table", table, rows, tile)


def packed_pairs(table, rows):
    return pack("packed_pairs", "table", table, rows)


def make_tiles(operator, name, table, rows, tile):
    """The plan of tiles, for an operator that knows the table by another name."""
    if _check.strict():
        refuse_rows_outside(operator, name, table, rows)
    table = table.contiguous()
    offsets, columns = table.shape
    plan = torch.empty(tiles_size(table, tile), dtype=torch.int32, device=table.device)
    if columns == 0:
        return plan
    bits = _bits_of(table, rows)
    masks = torch.empty(columns, dtype=torch.int32, device=table.device)
    codes = torch.empty(columns, dtype=torch.int16, device=table.device)
    block = _gpu.block(128, interpreted=4096)
    _code_kernel[(_gpu.cdiv(columns, block),)](
        table, bits, masks, codes, columns, rows, offsets, MOST=MASK_BITS, UNROLL=UNROLL, BLOCK=block, num_warps=4,
        enable_fp_fusion=False,
    )  # fmt: skip
    order = codes.sort(stable=True).indices
    tiles = _gpu.cdiv(columns, tile)
    _tile_kernel[(tiles,)](
        table, bits, masks, order, plan, tiles, columns, rows, offsets,
        AT_ONCE=min(_gpu.next_power_of_2(offsets), OFFSETS_PER_STEP), TOGETHER=max(LOOKUPS // tile, 1), TILE=tile,
        num_warps=1,
    )  # fmt: skip
    return plan


def pack(operator, name, table, rows):
    """The plan of pairs, likewise."""
    if _check.strict():
        refuse_rows_outside(operator, name, table, rows)
    table = table.contiguous()
    offsets, columns = table.shape
    plan = torch.empty(pairs_size(table), dtype=torch.int32, device=table.device)
    if columns == 0:
        return plan.zero_()
    if offsets == 0:
        return plan
    block = _gpu.block(1024, interpreted=4096)
    blocks = _gpu.cdiv(columns, block)
    found = torch.empty(offsets, blocks, dtype=torch.int32, device=table.device)
    grid = (offsets * blocks,)
    _count_kernel[grid](table, found, columns, rows, blocks, BLOCK=block, num_warps=4)
    found, _, summed = running_sums(found, 0, offsets, blocks)
    _pack_kernel[grid](table, found, plan, columns, rows, blocks, summed, offsets, BLOCK=block, num_warps=4)
    return plan


def _bits_of(table, rows):
    """int32 [2, K]: which bit of a row's mask stands for each offset, and how many of SAMPLE rows have that bit.

    The most common offset has bit 0; of more than MASK_BITS only the rarest have one, the others a number below 0.
    """
    offsets, columns = table.shape
    seen = torch.empty(offsets, dtype=torch.int32, device=table.device)
    bits = torch.empty(2, offsets, dtype=torch.int32, device=table.device)
    _seen_kernel[(offsets,)](table, seen, columns, rows, max(columns // SAMPLE, 1), SAMPLE=SAMPLE, num_warps=4)
    padded = _gpu.next_power_of_2(offsets)
    some = min(padded, 32)
    _bits_kernel[(_gpu.cdiv(offsets, some),)](
        seen, bits, offsets, MOST=MASK_BITS, PADDED=padded, BLOCK=some, num_warps=4
    )
    return bits


@_gpu.kernel
def _seen_kernel(table, seen, outputs, count, step, SAMPLE: tl.constexpr):
    tap = tl.program_id(0).to(tl.int64)
    row = tl.arange(0, SAMPLE).to(tl.int64) * step
    met = tl.load(table + tap * outputs + row, mask=row < outputs, other=-1)
    tl.store(seen + tap, tl.sum(((met >= 0) & (met < count)).to(tl.int32), 0))


@_gpu.kernel
def _bits_kernel(seen, bits, taps, MOST: tl.constexpr, PADDED: tl.constexpr, BLOCK: tl.constexpr):
    tap = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    every = tl.arange(0, PADDED)[None, :]
    frequency = tl.load(seen + every, mask=every < taps, other=-1)
    own = tl.load(seen + tap, mask=tap < taps, other=-1)
    more_common = (frequency > own[:, None]) | ((frequency == own[:, None]) & (every < tap[:, None]))
    bit = tl.sum(more_common.to(tl.int32), 1) - tl.maximum(taps - MOST, 0)
    tl.store(bits + tap, bit, mask=tap < taps)
    tl.store(bits + taps + bit, own, mask=(tap < taps) & (bit >= 0))


@_gpu.kernel
def _code_kernel(
    table, bits, masks, codes, outputs, count, taps, MOST: tl.constexpr, UNROLL: tl.constexpr, BLOCK: tl.constexpr
):
    """A row's mask of offsets, and 16 bits of its place among all masks.

    Masks are ordered by their rank as a Gray code. The code is the share of rows that come before, as if offsets
    occurred independently of each other: common masks get codes of their own, rare ones share theirs.
    """
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    exists = row < outputs
    mask = tl.zeros([BLOCK], tl.int32)
    at = table + row
    for tap in tl.range(0, taps, loop_unroll_factor=UNROLL):
        met = tl.load(at, mask=exists, other=-1)
        bit = tl.load(bits + tap)
        has = (met >= 0) & (met < count) & (bit >= 0)
        mask |= has.to(tl.int32) << tl.maximum(bit, 0)
        at += outputs
    before = tl.zeros([BLOCK], tl.float32)
    share = before + 1
    parity = tl.zeros([BLOCK], tl.int32)
    top = tl.minimum(taps, MOST) - 1
    for i in tl.range(0, top + 1, loop_unroll_factor=UNROLL):
        bit = top - i
        # Rare and common offsets are taken for less so: they come together, and would share too few codes.
        odds = tl.minimum(tl.maximum(tl.load(bits + taps + bit).to(tl.float32) * (1 / SAMPLES), LEAST_ODDS), MOST_ODDS)
        has = (mask >> bit) & 1
        first = tl.where(parity == 1, odds, 1 - odds)
        parity ^= has
        before += tl.where(parity == 1, share * first, 0.0)
        share *= tl.where(has == 1, odds, 1 - odds)
    tl.store(masks + row, mask, mask=exists)
    tl.store(codes + row, (tl.minimum(before * 65536, 65535) - 32768).to(tl.int16), mask=exists)


@_gpu.kernel
def _tile_kernel(
    table, bits, masks, order, plan, tiles, outputs, count, taps,
    AT_ONCE: tl.constexpr, TOGETHER: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """A tile's visits. The masks of its rows tell which offsets any of them has: only those are looked up."""
    neighbors, rows, taps_of, counts = parts_of_tiles(plan, tiles, taps, TILE)
    tile = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, TILE)
    place = tile * TILE + lane
    row = tl.load(order + place, mask=place < outputs, other=-1)
    exists = row >= 0
    mask = tl.load(masks + row, mask=exists, other=0)
    tl.store(rows + place, row.to(tl.int32))
    union = tl.reduce(mask, 0, _or)
    visits = tl.zeros([], tl.int32)
    for first in range(0, taps, AT_ONCE):
        tap = first + tl.arange(0, AT_ONCE)
        bit = tl.load(bits + tap, mask=tap < taps, other=0)
        # an offset without a bit has to be looked up to know
        listed = (tap < taps) & (((union >> tl.maximum(bit, 0)) & 1 == 1) | (bit < 0))
        number = tl.cumsum(listed.to(tl.int32), 0) - 1
        for begin in range(0, tl.sum(listed.to(tl.int32), 0), TOGETHER):
            wanted = begin + tl.arange(0, TOGETHER)
            chosen = listed[None, :] & (number[None, :] == wanted[:, None])
            some = tl.sum(chosen.to(tl.int32), 1) > 0
            which = tl.sum(tl.where(chosen, tap[None, :], 0), 1)
            met = tl.load(
                table + which[:, None].to(tl.int64) * outputs + row[None, :],
                mask=some[:, None] & exists[None, :], other=-1,
            )  # fmt: skip
            met = tl.where((met >= 0) & (met < count), met, -1)
            some = tl.max(met, 1) >= 0
            visit = tile * taps + visits + tl.cumsum(some.to(tl.int32), 0) - 1
            tl.store(taps_of + visit, which, mask=some)
            tl.store(neighbors + visit[:, None] * TILE + lane[None, :], met, mask=some[:, None])
            visits += tl.sum(some.to(tl.int32), 0)
    tl.store(counts + tile, visits)


@triton.jit
def parts_of_tiles(plan, tiles, offsets, TILE: tl.constexpr):
    """-> neighbors, rows, offsets, counts: where they begin; see `plans.py`."""
    tiles = tiles.to(tl.int64)
    rows = plan + tiles * offsets * TILE
    visited = rows + tiles * TILE
    return plan, rows, visited, visited + tiles * offsets


@triton.jit
def _or(a, b):
    return a | b


@_gpu.kernel
def _count_kernel(table, found, outputs, count, blocks, BLOCK: tl.constexpr):
    tap, block = (tl.program_id(0) // blocks).to(tl.int64), tl.program_id(0) % blocks
    row = block * BLOCK + tl.arange(0, BLOCK)
    met = tl.load(table + tap * outputs + row, mask=row < outputs, other=-1)
    tl.store(found + tl.program_id(0), tl.sum(((met >= 0) & (met < count)).to(tl.int32), 0))


@_gpu.kernel
def _pack_kernel(table, found, plan, outputs, count, blocks, summed, taps, BLOCK: tl.constexpr):
    tap, block = (tl.program_id(0) // blocks).to(tl.int64), tl.program_id(0) % blocks
    before, everything = before_block(found + tap * blocks, blocks, summed, block)
    row = block * BLOCK + tl.arange(0, BLOCK)
    met = tl.load(table + tap * outputs + row, mask=row < outputs, other=-1)
    has = (met >= 0) & (met < count)
    place = plan + 2 * tap * outputs + before + tl.cumsum(has.to(tl.int32), 0) - 1
    tl.store(place, row, mask=has)
    tl.store(place + outputs, met, mask=has)
    if block == 0:
        tl.store(plan + 2 * taps.to(tl.int64) * outputs + tap, everything)
