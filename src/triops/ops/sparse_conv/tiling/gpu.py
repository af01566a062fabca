"""How the GPU kernels cut a table into tiles of output rows, and which offsets each tile has to visit.

Rows are sorted by which offsets they have, so that the rows of a tile have the same ones and a visit (a tile under
an offset) wastes few rows. The sort key is the Gray code rank of a row's mask of offsets, the rarest offset on top:
neighbours in that order differ in one offset. Nothing here waits for the GPU.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from triops import _check, _gpu
from triops.ops.sparse_conv.plans import cached
from triops.ops.sparse_conv.reference import refuse_rows_outside

TILE = 256 if _gpu.INTERPRETED else 64  # rows, where a kernel does not ask for another number
SAMPLE = 1024  # rows that tell how rare an offset is
KEY_BITS = 31
TAPS_AT_ONCE = 32
MOST_BLOCKS = 4096  # whose counts one program adds up


class Tiles(NamedTuple):
    """T tiles of R rows, K offsets. The tiles with the most visits come last."""

    rows: torch.Tensor  # int32 [T * R]: the output rows of a tile, -1 behind the last
    counts: torch.Tensor  # int32 [T]: how many visits
    taps: torch.Tensor  # int32 [T, K]: the offset of each visit
    neighbors: torch.Tensor  # int32 [T, K, R]: the input rows of each visit, or -1


class Pairs(NamedTuple):
    """The pairs offset by offset, packed, in the order of the output rows: as the weight gradient takes them."""

    counts: torch.Tensor  # int32 [K]
    inputs: torch.Tensor  # int32 [K, A]: the first counts[k] are set
    outputs: torch.Tensor  # int32 [K, A]


def tiles_of(operator, table, count, rows=TILE):
    """The tiles of a table int32 [K, A] whose entries are rows of `count`; any other entry meets nothing."""
    if _check.strict():
        refuse_rows_outside(operator, "gather", table, count)
    return cached(table, ("tiles", count, rows), lambda: make_tiles(table.contiguous(), count, rows))


def pairs_of(operator, table, count):
    if _check.strict():
        refuse_rows_outside(operator, "gather", table, count)
    return cached(table, ("pairs", count), lambda: _make_pairs(table.contiguous(), count))


def make_tiles(table, count, tile=TILE):
    taps, outputs = table.shape
    device = table.device
    tiles = triton.cdiv(outputs, tile)
    padded = triton.next_power_of_2(taps)
    seen = torch.empty(taps, dtype=torch.int32, device=device)
    keys = torch.empty(outputs, dtype=torch.int32, device=device)
    rows = torch.empty(tiles * tile, dtype=torch.int32, device=device)
    counts = torch.empty(tiles, dtype=torch.int32, device=device)
    visited = torch.empty(tiles, taps, dtype=torch.int32, device=device)
    neighbors = torch.empty(tiles, taps, tile, dtype=torch.int32, device=device)
    if outputs:
        step = max(outputs // SAMPLE, 1)
        _seen_kernel[(taps,)](table, seen, outputs, count, step, SAMPLE=SAMPLE, num_warps=4)
        block = _gpu.block(128, interpreted=2048)
        _key_kernel[(triton.cdiv(outputs, block),)](
            table, seen, keys, outputs, count, taps, PADDED=padded, AT_ONCE=min(padded, TAPS_AT_ONCE), BITS=KEY_BITS,
            BLOCK=block, num_warps=4,
        )  # fmt: skip
        keys, order = keys.sort(stable=True)
        _tile_kernel[(tiles,)](
            table, seen, keys, order, rows, counts, visited, neighbors, outputs, count, taps,
            PADDED=padded, AT_ONCE=min(padded, TAPS_AT_ONCE), BITS=KEY_BITS, TILE=tile, num_warps=4,
        )  # fmt: skip
    return Tiles(rows, counts, visited, neighbors)


def _make_pairs(table, count):
    taps, outputs = table.shape
    block = _gpu.block(1024, interpreted=4096)
    while triton.cdiv(outputs, block) > MOST_BLOCKS:
        block *= 2
    blocks = triton.cdiv(outputs, block)
    found = torch.empty(taps, blocks, dtype=torch.int32, device=table.device)
    counts = torch.empty(taps, dtype=torch.int32, device=table.device)
    inputs, rows = torch.empty_like(table), torch.empty_like(table)
    if taps and outputs:
        grid = (taps * blocks,)
        _count_kernel[grid](table, found, outputs, count, blocks, BLOCK=block, num_warps=4)
        _pack_kernel[grid](
            table, found, counts, inputs, rows, outputs, count, blocks, BLOCK=block,
            BLOCKS=triton.next_power_of_2(blocks), num_warps=4,
        )  # fmt: skip
    return Pairs(counts, inputs, rows)


@_gpu.kernel(varying=("outputs", "count", "step"))
def _seen_kernel(table, seen, outputs, count, step, SAMPLE: tl.constexpr):
    tap = tl.program_id(0).to(tl.int64)
    row = tl.arange(0, SAMPLE).to(tl.int64) * step
    met = tl.load(table + tap * outputs + row, mask=row < outputs, other=-1)
    tl.store(seen + tap, tl.sum(((met >= 0) & (met < count)).to(tl.int32), 0))


@triton.jit
def _bit_of(seen, tap, taps, PADDED: tl.constexpr, BITS: tl.constexpr):
    """Which bit of a mask stands for an offset: the most common has bit 0; of more than BITS the rarest have one."""
    every = tl.arange(0, PADDED)[None, :]
    frequency = tl.load(seen + every, mask=every < taps, other=-1)
    own = tl.load(seen + tap, mask=tap < taps, other=-1)[:, None]
    more_common = (frequency > own) | ((frequency == own) & (every < tap[:, None]))
    return tl.sum(more_common.to(tl.int32), 1) - tl.maximum(taps - BITS, 0)


@_gpu.kernel(varying=("outputs", "count"))
def _key_kernel(
    table, seen, keys, outputs, count, taps,
    PADDED: tl.constexpr, AT_ONCE: tl.constexpr, BITS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = tl.zeros([BLOCK], tl.int32)
    for first in range(0, taps, AT_ONCE):
        tap = first + tl.arange(0, AT_ONCE)
        bit = _bit_of(seen, tap, taps, PADDED, BITS)
        met = tl.load(
            table + tap[:, None].to(tl.int64) * outputs + row[None, :],
            mask=(tap < taps)[:, None] & (row < outputs)[None, :], other=-1,
        )  # fmt: skip
        has = (met >= 0) & (met < count) & (bit >= 0)[:, None]
        mask += tl.sum(has.to(tl.int32) << tl.maximum(bit, 0)[:, None], 0)
    for i in tl.static_range(5):  # the rank of a Gray code: every bit is the parity of those above it
        mask ^= mask >> (1 << i)
    tl.store(keys + row, mask, mask=row < outputs)


@_gpu.kernel(varying=("outputs", "count"))
def _tile_kernel(
    table, seen, keys, order, rows, counts, taps_of, neighbors, outputs, count, taps,
    PADDED: tl.constexpr, AT_ONCE: tl.constexpr, BITS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """A tile's visits. A sorted key tells which offsets its row has: only those are looked up."""
    tile = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, TILE)
    place = tile * TILE + lane
    row = tl.load(order + place, mask=place < outputs, other=-1)
    key = tl.load(keys + place, mask=place < outputs, other=0)
    mask = key ^ (key >> 1)  # the Gray code of that rank
    tl.store(rows + place, row.to(tl.int32))
    visits = tl.zeros([], tl.int32)
    for first in range(0, taps, AT_ONCE):
        tap = first + tl.arange(0, AT_ONCE)
        bit = _bit_of(seen, tap, taps, PADDED, BITS)[:, None]
        listed = ((mask[None, :] >> tl.maximum(bit, 0)) & 1) | (bit < 0).to(tl.int32)
        met = tl.load(
            table + tap[:, None].to(tl.int64) * outputs + row[None, :],
            mask=(tap < taps)[:, None] & (row >= 0)[None, :] & (listed > 0), other=-1,
        )  # fmt: skip
        met = tl.where((met >= 0) & (met < count), met, -1)
        some = tl.max(met, 1) >= 0
        number = visits + tl.cumsum(some.to(tl.int32), 0) - 1
        visit = tile * taps + number
        tl.store(taps_of + visit, tap, mask=some)
        tl.store(neighbors + visit[:, None] * TILE + lane[None, :], met, mask=some[:, None])
        visits += tl.sum(some.to(tl.int32), 0)
    tl.store(counts + tile, visits)


@_gpu.kernel(varying=("outputs", "count", "blocks"))
def _count_kernel(table, found, outputs, count, blocks, BLOCK: tl.constexpr):
    tap, block = (tl.program_id(0) // blocks).to(tl.int64), tl.program_id(0) % blocks
    row = block * BLOCK + tl.arange(0, BLOCK)
    met = tl.load(table + tap * outputs + row, mask=row < outputs, other=-1)
    tl.store(found + tl.program_id(0), tl.sum(((met >= 0) & (met < count)).to(tl.int32), 0))


@_gpu.kernel(varying=("outputs", "count", "blocks"))
def _pack_kernel(table, found, counts, inputs, rows, outputs, count, blocks, BLOCK: tl.constexpr, BLOCKS: tl.constexpr):
    tap, block = (tl.program_id(0) // blocks).to(tl.int64), tl.program_id(0) % blocks
    every = tl.arange(0, BLOCKS)
    number = tl.load(found + tap * blocks + every, mask=every < blocks, other=0)
    before = tl.sum(tl.where(every < block, number, 0), 0)
    row = block * BLOCK + tl.arange(0, BLOCK)
    met = tl.load(table + tap * outputs + row, mask=row < outputs, other=-1)
    has = (met >= 0) & (met < count)
    place = tap * outputs + before + tl.cumsum(has.to(tl.int32), 0) - 1
    tl.store(inputs + place, met, mask=has)
    tl.store(rows + place, row, mask=has)
    if block == 0:
        tl.store(counts + tap, tl.sum(number, 0))
