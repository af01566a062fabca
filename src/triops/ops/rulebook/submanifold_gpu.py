"""Submanifold neighbours on GPU: a hash of x-words.

A word stands for 32 places along the last axis and says by one bit each which of them are active; the
outer `halo` places on either side repeat those of the words beside it. So one look-up answers all taps of a
kernel row: 9 look-ups a site instead of 27. Where the reach along x is too wide for that, a word holds no
halo and every tap is looked up by itself. `rows[slot * 32 + bit]` is the row of a place; it needs no clearing.
"""

import math
from functools import cache

import torch
import triton
import triton.language as tl

from triops import _gpu
from triops._gpu import cdiv, next_power_of_2
from triops._gpu.arithmetic import as_mask
from triops._gpu.site_hash import SiteHash, find, load_site, parts, word_key

WORD = 32
MAX_HALO = 8  # at most half of a word's places are repeated ones
# One warp a program everywhere: a block waits for its longest chain of probes.
LOOKUP_BLOCK, LOOKUP_WARPS = _gpu.block(64, interpreted=512), 1  # below 1,024: three sums share an integer
LOOKUP_ROWS = _gpu.block(1, interpreted=8)
GRAIN = 1024  # sites that share a counter, see gpu.py


@cache
def _plan(shape, kernel_size, dilation):
    """What the parameters settle, on four axes: shape, halo, groups of offset rows, the lookup's constants."""
    halo = kernel_size[-1] // 2 * dilation[-1]
    halo = halo if halo <= MAX_HALO else 0
    taps = kernel_size[-1] if halo else 1
    offset_rows = math.prod(kernel_size) // taps
    tile = min(LOOKUP_ROWS, next_power_of_2(max(offset_rows - 1, 1)))
    front = (1,) * (4 - len(shape))
    constants = {
        "KERNEL": (*front, *kernel_size), "DILATION": (*front, *dilation), "TAPS": taps, "OFFSET_ROWS": offset_rows,
        "TILE": tile,
    }  # fmt: skip
    return (*front, *shape), halo, max(cdiv(offset_rows - 1, tile), 1), constants


def submanifold_table(indices, batch_size, shape, kernel_size, dilation, copy=None, counts=False):
    """-> neighbors int32 [K, L], and the hash: with `counts`, how many of each GRAIN sites have one: int32 [K, blocks]
    from zeros32[start + 2]."""
    volume, count = math.prod(kernel_size), indices.shape[0]
    shape, halo, groups, constants = _plan(tuple(shape), tuple(kernel_size), tuple(dilation))
    blocks = cdiv(count, GRAIN)
    found = SiteHash(indices, batch_size, shape, halo, WORD, volume * blocks if counts else 0)
    found.insert(copy)
    neighbors = torch.empty((volume, count), dtype=torch.int32, device=indices.device)
    _lookup_kernel[(cdiv(count, LOOKUP_BLOCK), groups)](
        indices, found.zeros, found.zeros32, found.scratch, neighbors, found.bits, count, batch_size, *shape,
        found.words, blocks,
        COUNT=counts, BLOCK=LOOKUP_BLOCK, GRAIN=GRAIN, num_warps=LOOKUP_WARPS, **constants, **found.constants,
    )  # fmt: skip
    return neighbors, found


@_gpu.kernel
def _lookup_kernel(
    indices, zeros, zeros32, scratch, neighbors, bits, count, batch, T, Z, Y, X, words, blocks,
    COUNT: tl.constexpr, BLOCK: tl.constexpr, GRAIN: tl.constexpr, KERNEL: tl.constexpr, DILATION: tl.constexpr,
    TAPS: tl.constexpr, OFFSET_ROWS: tl.constexpr, TILE: tl.constexpr, D: tl.constexpr, HALO: tl.constexpr,
    PAYLOAD: tl.constexpr, WORD: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """TILE rows of offsets for BLOCK sites; the centre row, which is the site's own word, goes with the first."""
    KT: tl.constexpr = KERNEL[0]
    KZ: tl.constexpr = KERNEL[1]
    KY: tl.constexpr = KERNEL[2]
    KX: tl.constexpr = KERNEL[3] // TAPS  # 1, or every tap has a row of its own
    DX: tl.constexpr = DILATION[3]
    CENTRE: tl.constexpr = OFFSET_ROWS // 2
    masks, repeats, rows, home = parts(zeros32, scratch, bits, WORD, WIDE)
    counts = repeats + 2
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    valid = i < count
    own = tl.load(home + i, mask=valid, other=-1)
    several = as_mask(tl.load(repeats) > 0, valid)
    _, b, t, z, y, x = load_site(indices, i, valid, batch, T, Z, Y, X, D)
    own_bit = x % PAYLOAD + HALO
    own_place = own.to(tl.int64) * WORD + own_bit
    active = own >= 0
    first = valid & as_mask(tl.program_id(1) == 0, valid)
    if WIDE:
        own_bits = tl.load(masks + own, mask=active & first, other=0).to(tl.uint32, bitcast=True)
    else:
        own_bits = tl.load(zeros + own, mask=active & first, other=0).to(tl.int32).to(tl.uint32, bitcast=True)
    lowest = tl.load(rows + own_place, mask=active & several, other=-1)

    q = tl.program_id(1) * TILE + tl.arange(0, TILE)
    r = tl.where(q >= CENTRE, q + 1, q)
    wanted = (q < OFFSET_ROWS - 1)[:, None] & active[None, :]
    xx = tl.broadcast_to(x[None, :], (TILE, BLOCK))
    yy, zz, tt = xx * 0 + y[None, :], xx * 0 + z[None, :], xx * 0 + t[None, :]
    # An axis without taps costs nothing; along x, places beyond the border are no word's.
    if KX > 1:
        xx += ((r % KX - KX // 2) * DX)[:, None]
        wanted = wanted & (xx >= 0) & (xx < X)
    if KY > 1:
        yy += ((r // KX % KY - KY // 2) * DILATION[2])[:, None]
        wanted = wanted & (yy >= 0) & (yy < Y)
    if KZ > 1:
        zz += ((r // (KX * KY) % KZ - KZ // 2) * DILATION[1])[:, None]
        wanted = wanted & (zz >= 0) & (zz < Z)
    if KT > 1:
        tt += ((r // (KX * KY * KZ) - KT // 2) * DILATION[0])[:, None]
        wanted = wanted & (tt >= 0) & (tt < T)
    word = xx // PAYLOAD
    key = word_key(b[None, :], tt, zz, yy, T, Z, Y, words, word, WIDE)
    slot, present = find(zeros, masks, key, wanted, bits, WIDE)
    bit = xx - word * PAYLOAD + HALO
    place = slot.to(tl.int64) * WORD + bit

    active = active & ((several == 0) | (lowest == i))
    wanted = wanted & active[None, :]
    block = tl.program_id(0) * BLOCK // GRAIN
    real = (q < OFFSET_ROWS - 1)[:, None] & valid[None, :]
    out = neighbors + (r.to(tl.int64) * TAPS * count)[:, None] + i[None, :]
    own_out = neighbors + tl.full((), CENTRE * TAPS, tl.int64) * count + i
    # Three taps at a time: all loads before the stores, which would wait for them one by one.
    for c in tl.static_range(0, TAPS, 3):
        hit0, row0 = _tap(rows, wanted, present, bit, place, (c - TAPS // 2) * DX)
        hit1, row1 = _tap(rows, wanted & (c + 1 < TAPS), present, bit, place, (c + 1 - TAPS // 2) * DX)
        hit2, row2 = _tap(rows, wanted & (c + 2 < TAPS), present, bit, place, (c + 2 - TAPS // 2) * DX)
        mine = active & first
        own0, own_row0 = _tap(rows, mine, own_bits, own_bit, own_place, (c - TAPS // 2) * DX)
        own1, own_row1 = _tap(rows, mine & (c + 1 < TAPS), own_bits, own_bit, own_place, (c + 1 - TAPS // 2) * DX)
        own2, own_row2 = _tap(rows, mine & (c + 2 < TAPS), own_bits, own_bit, own_place, (c + 2 - TAPS // 2) * DX)
        tl.store(out, row0, mask=real)
        tl.store(own_out, own_row0, mask=first)
        if c + 1 < TAPS:
            tl.store(out + count, row1, mask=real)
            tl.store(own_out + count, own_row1, mask=first)
        if c + 2 < TAPS:
            out += count
            own_out += count
            tl.store(out + count, row2, mask=real)
            tl.store(own_out + count, own_row2, mask=first)
            out += count
            out += count
            own_out += count
            own_out += count
        if COUNT:
            sums = tl.sum(hit0.to(tl.int32) | (hit1.to(tl.int32) << 10) | (hit2.to(tl.int32) << 20), 1)
            own_sums = tl.sum(own0.to(tl.int32) | (own1.to(tl.int32) << 10) | (own2.to(tl.int32) << 20), 0)
            for e in tl.static_range(3):
                if c + e < TAPS:
                    to = counts + (r * TAPS + (c + e)).to(tl.int64) * blocks + block
                    tl.atomic_add(to, (sums >> (10 * e)) & 1023, mask=q < OFFSET_ROWS - 1, sem="relaxed")
                    own_to = counts + tl.full((), CENTRE * TAPS + c + e, tl.int64) * blocks + block
                    tl.atomic_add(own_to, (own_sums >> (10 * e)) & 1023, mask=tl.program_id(1) == 0, sem="relaxed")


@triton.jit
def _tap(rows, wanted, present, bit, place, shift):
    """The row `shift` places beside. -> whether there is one, the row or -1"""
    hit = wanted & (((present >> ((bit + shift) & 31).to(tl.uint32)) & 1) != 0)
    return hit, tl.load(rows + place + shift, mask=hit, other=-1)
