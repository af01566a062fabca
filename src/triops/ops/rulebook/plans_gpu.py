"""The plans of a table on GPU: tiles of rows for a convolution, packed pairs for its weight gradient.

Rows are sorted by which offsets they have, so that the rows of a tile have the same ones and a visit (a tile under one
offset) wastes few rows: see `reference.row_tiles`. Three launches: the code of every row, a stable pass of a radix sort
by its high bits, and the tiles, which are sorted by all bits within their chunk. Nothing here waits for the GPU.
"""

import torch
import triton
import triton.language as tl

from triops import _check, _gpu
from triops._gpu.arithmetic import ascending
from triops._gpu.scan import before_block, running_sums
from triops.ops.rulebook.plans import MASK_BITS, offset_order, pairs_size, tiles_size
from triops.ops.rulebook.reference import CHUNK, CODES, DIGITS, ODDS
from triops.ops.rulebook.tables import refuse_rows_outside

P, MOST_CODE = tl.constexpr(ODDS), tl.constexpr(CODES - 1)
DIGITS, DIGIT_SIZE = tl.constexpr(DIGITS), tl.constexpr(CODES // DIGITS)
BLOCK = 1024  # rows that share a histogram
CODE_WARPS, SORT_WARPS = 16, 16
BLOCKS_PER_STEP = 32  # histograms that a program loads together
MOST_BLOCKS = 256  # whose histograms every program adds up by itself
OFFSETS_PER_STEP = 32
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
    blocks, tiles, device = _gpu.cdiv(columns, BLOCK), _gpu.cdiv(columns, tile), table.device
    masked = offsets <= MASK_BITS  # else a tile looks every offset up
    masks = torch.empty(columns, dtype=torch.int32, device=device)
    entries = torch.empty((2, columns), dtype=torch.int64, device=device)  # before and after the sort
    found = torch.empty((blocks, DIGITS.value), dtype=torch.int32, device=device)
    _code_kernel[(blocks,)](
        table, masks, entries, found, columns, rows,
        MASKED=masked, ORDER=offset_order(offsets), BLOCK=BLOCK, num_warps=CODE_WARPS, enable_fp_fusion=False,
    )  # fmt: skip
    summed = blocks > MOST_BLOCKS
    if summed:
        found = found.cumsum(0, dtype=torch.int32)
    _sort_kernel[(blocks,)](
        entries, found, columns, blocks, int(summed), BLOCK=BLOCK, STEP=BLOCKS_PER_STEP, num_warps=SORT_WARPS
    )
    _tile_kernel[(tiles,)](
        table, masks, entries, plan, tiles, columns, rows, offsets,
        MASKED=masked, AT_ONCE=min(_gpu.next_power_of_2(offsets), OFFSETS_PER_STEP),
        TOGETHER=max(LOOKUPS // tile, 1), TILE=tile, CHUNK=CHUNK, num_warps=1,
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


@_gpu.kernel
def _code_kernel(
    table, masks, entries, found, columns, count,
    MASKED: tl.constexpr, ORDER: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A row's mask of offsets, its entry of the sort (code << 32 | row), and how many of a block have a high digit."""
    block = tl.program_id(0)
    row = block * BLOCK + tl.arange(0, BLOCK)
    exists = row < columns
    mask = tl.zeros([BLOCK], tl.int32)
    before = tl.zeros([BLOCK], tl.float32)
    share = before + 1
    parity = mask
    for i in tl.static_range(len(ORDER)):
        entry = tl.load(table + tl.full((), ORDER[i], tl.int64) * columns + row, mask=exists, other=-1)
        has = ((entry >= 0) & (entry < count)).to(tl.int32)
        if MASKED:
            mask |= has << ORDER[i]
        first = tl.where(parity == 1, P, 1 - P)
        parity ^= has
        before += tl.where(parity == 1, share * first, 0.0)
        share *= tl.where(has == 1, P, 1 - P)
    # Rows behind the last have the highest code: they stay behind all others.
    code = tl.where(exists, tl.minimum(before * (MOST_CODE + 1), MOST_CODE).to(tl.int32), MOST_CODE)
    tl.store(masks + row, mask, mask=exists)
    tl.store(entries + row, (code.to(tl.int64) << 32) | row, mask=exists)
    digit = tl.arange(0, DIGITS)
    tl.store(found + block * DIGITS + digit, tl.histogram(code // DIGIT_SIZE, DIGITS))


@_gpu.kernel
def _sort_kernel(entries, found, columns, blocks, summed, BLOCK: tl.constexpr, STEP: tl.constexpr):
    """A stable sort by the high digit of the code.

    entries int64 [2, columns], before and after. found int32 [blocks, DIGITS]: how many rows of each block have each
    digit, or their running sums.
    """
    block = tl.program_id(0)
    lane = tl.arange(0, BLOCK)
    place = block * BLOCK + lane
    digit = _digit_of(tl.load(entries + place, mask=place < columns, other=-1))
    have = tl.histogram(digit, DIGITS)
    # Sorted by digit, and by place where digits are the same: then an entry's neighbors in the block go beside it.
    key = ascending(digit * BLOCK + lane)
    place = block * BLOCK + key % BLOCK
    exists = place < columns
    entry = tl.load(entries + place, mask=exists, other=-1)
    start = _digit_starts(found, block, blocks, summed, STEP)
    to = tl.gather(start - (tl.cumsum(have, 0) - have), key // BLOCK, 0) + lane
    tl.store(entries + tl.cast(columns, tl.int64) + to, entry, mask=exists)


@triton.jit
def _code_of(entry):
    return (entry >> 32).to(tl.int32) & MOST_CODE


@triton.jit
def _digit_of(entry):
    return _code_of(entry) // DIGIT_SIZE


@triton.jit
def _digit_starts(found, block, blocks, summed, STEP: tl.constexpr):
    """int32 [DIGITS]: where the rows of a block with each digit begin."""
    digit = tl.arange(0, DIGITS)
    if summed != 0:
        before = tl.load(found + (block - 1) * DIGITS + digit, mask=digit + block * DIGITS >= DIGITS, other=0)
        everything = tl.load(found + (blocks - 1) * DIGITS + digit)
    else:
        # Many loads under way at once, and one sum over the blocks at the end: a program waits for little else.
        some = tl.zeros([STEP, DIGITS], tl.int32)
        some_before = some
        for first in range(0, blocks, STEP):
            other = first + tl.arange(0, STEP)[:, None]
            counts = tl.load(found + other * DIGITS + digit[None, :], mask=other < blocks, other=0)
            some += counts
            some_before += tl.where(other < block, counts, 0)
        before, everything = tl.sum(some_before, 0), tl.sum(some, 0)
    return tl.cumsum(everything, 0) - everything + before


@_gpu.kernel
def _tile_kernel(
    table, masks, entries, plan, tiles, outputs, count, taps,
    MASKED: tl.constexpr, AT_ONCE: tl.constexpr, TOGETHER: tl.constexpr, TILE: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """A tile's rows and visits. The masks of its rows tell which offsets any of them has: only those are looked up."""
    neighbors, rows, taps_of, counts = parts_of_tiles(plan, tiles, taps, TILE)
    tile = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, TILE)
    place = tile * TILE + lane
    exists = place < outputs
    row = _rows_of(entries + tl.cast(outputs, tl.int64), tile * TILE, outputs, TILE, CHUNK)
    tl.store(rows + place, row)
    union = tl.reduce(tl.load(masks + row, mask=exists, other=0), 0, _or)
    visits = tl.zeros([], tl.int32)
    for first in range(0, taps, AT_ONCE):
        tap = first + tl.arange(0, AT_ONCE)
        listed = tap < taps
        if MASKED:
            listed = listed & ((union >> tap) & 1 == 1)
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
def _rows_of(entries, first, outputs, TILE: tl.constexpr, CHUNK: tl.constexpr):
    """int32 [TILE]: the rows of the tile that begins at place `first`, -1 behind the last.

    Every tile sorts the whole chunk that it lies in, which is quicker than a launch that does it once for all.
    """
    lane = tl.arange(0, CHUNK)
    chunk = first // CHUNK * CHUNK
    entry = tl.load(entries + chunk + lane, mask=chunk + lane < outputs, other=-1)
    key = ascending(_code_of(entry) * CHUNK + lane)
    tile = tl.arange(0, CHUNK // TILE)[:, None] == (first - chunk) // TILE
    place = chunk + tl.sum(tl.where(tile, tl.reshape(key % CHUNK, [CHUNK // TILE, TILE]), 0), 0)
    return tl.load(entries + place, mask=place < outputs, other=-1).to(tl.int32)


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
