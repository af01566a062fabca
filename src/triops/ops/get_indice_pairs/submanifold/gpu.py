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

WORD = 32
MAX_HALO = 8  # at most half of a word's places are repeated ones
# One warp a program everywhere: a block waits for its longest chain of probes.
INSERT_BLOCK, INSERT_WARPS = _gpu.block(32, interpreted=1024), 1
LOOKUP_BLOCK, LOOKUP_WARPS = _gpu.block(64, interpreted=512), 1  # below 1,024: three sums share an integer
LOOKUP_ROWS = _gpu.block(1, interpreted=8)
GRAIN = 1024  # sites that share a counter, see ../gpu.py
INTERPRETED = tl.constexpr(_gpu.INTERPRETED)


class SiteHash:
    """The hash of one call: its two buffers, and the constants that the kernels share.

    `zeros` int64 holds the table and, behind it as int32: masks (only if WIDE), the number of repeated sites, one
    free number, and `spare` more; `parts` below finds them. `scratch` int32 holds rows, then each site's slot.
    """

    def __init__(self, indices, batch_size, shape, halo, word, spare=0):
        self.indices, self.count, self.batch_size, self.shape = indices, indices.shape[0], batch_size, shape
        payload = word - 2 * halo
        self.words = -(-shape[3] // payload)
        wide = batch_size * shape[0] * shape[1] * shape[2] * self.words >= 2**31 - 1
        # A site claims its word and at most one beside it; one slot more, and every search ends.
        bits = self.count.bit_length() + 1
        self.start = (2 + wide) << bits  # of what follows table and masks, in int32
        self.zeros = torch.zeros((self.start >> 1) + 1 + ((spare + 1) >> 1), dtype=torch.int64, device=indices.device)
        self.zeros32 = self.zeros.view(torch.int32)
        self.scratch = torch.empty((word << bits) + self.count, dtype=torch.int32, device=indices.device)
        self.constants = {
            "D": indices.shape[1] - 1, "HALO": halo, "PAYLOAD": payload, "WORD": word, "BITS": bits, "WIDE": wide,
        }  # fmt: skip

    def insert(self, copy=None):
        """Fill it; `copy` takes the sites as they are."""
        _insert_kernel[(cdiv(self.count, INSERT_BLOCK),)](
            self.indices, self.indices if copy is None else copy, self.zeros, self.zeros32, self.scratch,
            self.count, self.batch_size, *self.shape, self.words,
            COPY=copy is not None, ROLES=2 if self.constants["HALO"] else 1,
            COLUMNS=next_power_of_2(1 + self.constants["D"]), BLOCK=INSERT_BLOCK, num_warps=INSERT_WARPS,
            **self.constants,
        )  # fmt: skip
        _settle_kernel[(cdiv(self.count, 1024),)](
            self.indices, self.zeros, self.zeros32, self.scratch, self.count, self.batch_size, *self.shape, self.words,
            BLOCK=1024, num_warps=4, **self.constants,
        )  # fmt: skip


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
        indices, found.zeros, found.zeros32, found.scratch, neighbors, count, batch_size, *shape, found.words, blocks,
        COUNT=counts, BLOCK=LOOKUP_BLOCK, GRAIN=GRAIN, num_warps=LOOKUP_WARPS, **constants, **found.constants,
    )  # fmt: skip
    return neighbors, found


@triton.jit
def parts(zeros32, scratch, BITS: tl.constexpr, WORD: tl.constexpr, WIDE: tl.constexpr):
    """-> masks, repeats, rows, home: where they begin in the buffers of a SiteHash."""
    CAPACITY: tl.constexpr = 1 << BITS
    SLOTS: tl.constexpr = WORD << BITS
    masks = zeros32 + 2 * CAPACITY
    repeats = masks
    if WIDE:
        repeats = masks + CAPACITY
    return masks, repeats, scratch, scratch + SLOTS


@triton.jit
def load_site(indices, i, valid, batch, T, Z, Y, X, D: tl.constexpr):
    """-> inside, b, t, z, y, x of rows i; axes that do not exist read 0."""
    at = indices + i.to(tl.int64) * (1 + D)
    b = tl.load(at, mask=valid, other=-1)
    x = tl.load(at + D, mask=valid, other=0)
    y = tl.zeros_like(x)
    z = tl.zeros_like(x)
    t = tl.zeros_like(x)
    if D >= 2:
        y = tl.load(at + (D - 1), mask=valid, other=0)
    if D >= 3:
        z = tl.load(at + (D - 2), mask=valid, other=0)
    if D >= 4:
        t = tl.load(at + 1, mask=valid, other=0)
    inside = (b >= 0) & (b < batch) & (x >= 0) & (x < X) & (y >= 0) & (y < Y) & (z >= 0) & (z < Z) & (t >= 0) & (t < T)
    return inside, b.to(tl.int32), t.to(tl.int32), z.to(tl.int32), y.to(tl.int32), x.to(tl.int32)


@triton.jit
def _key(b, t, z, y, T, Z, Y, words, word, WIDE: tl.constexpr):
    """Which word of the grid; 0 is no word."""
    if WIDE:
        b = b.to(tl.int64)
    return (((b * T + t) * Z + z) * Y + y) * words + word + 1


@triton.jit
def _probe(key, BITS: tl.constexpr, WIDE: tl.constexpr):
    """First slot, and an odd step: a block waits for its longest chain, and linear probing doubles that."""
    h = key.to(tl.uint32)
    if WIDE:
        h = h * 0x9E3779B1 + (key >> 32).to(tl.uint32)
    # Murmur's finaliser: a plain multiplication clusters badly on the lattice that keys form.
    h = (h ^ (h >> 16)) * 0x85EBCA6B
    h = (h ^ (h >> 13)) * 0xC2B2AE35
    h = h ^ (h >> 16)
    return (h >> (32 - BITS)).to(tl.int32), ((h & 1023) | 1).to(tl.int32)


@triton.jit
def _claim(at, entry, pending):
    """Compare-and-swap with 0 where pending. -> what stood there, 0 for the others"""
    if INTERPRETED or not tl.target_info.is_cuda():
        # It takes no mask: a finished lane compares with a value that is never stored.
        return tl.atomic_cas(at, tl.where(pending, 0, -1).to(tl.int64), entry, sem="relaxed")
    else:
        return tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.s32 p, $4, 0; mov.b64 $0, 0;"
            " @p atom.relaxed.gpu.global.cas.b64 $0, [$1], $2, $3; }",
            "=l,l,l,l,r",
            [at.to(tl.uint64, bitcast=True), tl.zeros_like(entry), entry, pending.to(tl.int32)],
            dtype=tl.int64,
            is_pure=False,
            pack=1,
        )


@triton.jit
def _beside(key, place, word, words, HALO: tl.constexpr, PAYLOAD: tl.constexpr):
    """The word beside that repeats a place. -> whether there is one, its key, the bit there"""
    left = place < HALO
    there = (left & (word > 0)) | ((place >= PAYLOAD - HALO) & (word < words - 1))
    key = tl.where(left, key - 1, key + 1)
    return there, key, tl.where(left, place + (PAYLOAD + HALO), place - (PAYLOAD - HALO))


@_gpu.kernel(varying=("count",))
def _insert_kernel(
    indices, copy, zeros, zeros32, scratch, count, batch, T, Z, Y, X, words,
    COPY: tl.constexpr, ROLES: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr,
    D: tl.constexpr, HALO: tl.constexpr, PAYLOAD: tl.constexpr, WORD: tl.constexpr, BITS: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    masks, repeats, rows, home = parts(zeros32, scratch, BITS, WORD, WIDE)
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    valid = i < count
    inside, b, t, z, y, x = load_site(indices, i, valid, batch, T, Z, Y, X, D)
    if COPY:
        e = tl.arange(0, BLOCK * COLUMNS)
        at = tl.program_id(0).to(tl.int64) * (BLOCK * (1 + D)) + e
        mine = (e < BLOCK * (1 + D)) & (at < tl.full((), 1 + D, tl.int64) * count)
        tl.store(copy + at, tl.load(indices + at, mask=mine), mask=mine)
    word = x // PAYLOAD
    place = x - word * PAYLOAD
    own_key = _key(b, t, z, y, T, Z, Y, words, word, WIDE)
    # Role 0 claims the word of the site, role 1 the one beside that repeats it, both at once.
    role = tl.arange(0, ROLES)[:, None]
    there, beside_key, beside_bit = _beside(own_key, place, word, words, HALO, PAYLOAD)
    key = tl.where(role == 0, own_key[None, :], beside_key[None, :])
    bit = tl.where(role == 0, (place + HALO)[None, :], beside_bit[None, :])
    claimed = inside[None, :] & ((role == 0) | there[None, :])
    key64 = key.to(tl.int64)
    one = tl.full(key.shape, 1, tl.int64) << (bit & 31).to(tl.int64)
    entry = key64
    if not WIDE:
        entry = (key64 << 32) | one
    slot, step = _probe(key, BITS, WIDE)
    pending = claimed
    shared = claimed & (key < 0)  # the word was there already
    while tl.max(tl.max(pending.to(tl.int32), 1), 0) > 0:
        old = _claim(zeros + slot, entry, pending)
        same = (old if WIDE else old >> 32) == key64
        shared = shared | (pending & same)
        pending = pending & (old != 0) & (same == 0)
        slot = tl.where(pending, (slot + step) & ((1 << BITS) - 1), slot)
    row = i[None, :] + tl.zeros_like(slot)
    tl.store(rows + (slot.to(tl.int64) * WORD + bit), row, mask=claimed)
    tl.store(home + row, tl.where(claimed, slot, -1), mask=valid[None, :] & (role == 0))
    if WIDE:
        before = tl.atomic_or(masks + slot, one.to(tl.int32), mask=claimed, sem="relaxed").to(tl.int64)
        shared = claimed
    else:
        before = tl.atomic_or(zeros + slot, one, mask=shared, sem="relaxed")
    again = shared & ((before & one) != 0) & (role == 0)
    repeated = tl.sum(tl.sum(again.to(tl.int32), 1), 0)
    if repeated > 0:
        tl.atomic_add(repeats, repeated, sem="relaxed")


@triton.jit
def _find(table, masks, key, wanted, BITS: tl.constexpr, WIDE: tl.constexpr):
    """-> slot, and the bits of the word; 0 where it is not there"""
    slot, step = _probe(key, BITS, WIDE)
    key64 = key.to(tl.int64)
    value = tl.load(table + slot, mask=wanted, other=0)
    pending = (value != 0) & ((value if WIDE else value >> 32) != key64)
    while tl.max(tl.max(pending.to(tl.int32), 1), 0) > 0:
        slot = tl.where(pending, (slot + step) & ((1 << BITS) - 1), slot)
        value = tl.where(pending, tl.load(table + slot, mask=pending, other=0), value)
        pending = (value != 0) & ((value if WIDE else value >> 32) != key64)
    bits = tl.load(masks + slot, mask=value != 0, other=0) if WIDE else value.to(tl.int32)
    return slot, bits.to(tl.uint32, bitcast=True)


@_gpu.kernel(varying=("count",))
def _settle_kernel(
    indices, zeros, zeros32, scratch, count, batch, T, Z, Y, X, words,
    BLOCK: tl.constexpr, D: tl.constexpr, HALO: tl.constexpr, PAYLOAD: tl.constexpr, WORD: tl.constexpr,
    BITS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Where several rows share a site, whichever came last stands in `rows`: put the lowest there."""
    masks, repeats, rows, home = parts(zeros32, scratch, BITS, WORD, WIDE)
    if tl.load(repeats) > 0:
        i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        valid = i < count
        slot = tl.load(home + i, mask=valid, other=-1)
        active = slot >= 0
        _, b, t, z, y, x = load_site(indices, i, active, batch, T, Z, Y, X, D)
        word = x // PAYLOAD
        place = x - word * PAYLOAD
        tl.atomic_min(rows + (slot.to(tl.int64) * WORD + place + HALO), i, mask=active, sem="relaxed")
        if HALO > 0:
            key = _key(b, t, z, y, T, Z, Y, words, word, WIDE)
            there, key, bit = _beside(key, place, word, words, HALO, PAYLOAD)
            there = (there & active)[None, :]
            beside, _ = _find(zeros, masks, key[None, :], there, BITS, WIDE)
            tl.atomic_min(rows + (beside.to(tl.int64) * WORD + bit[None, :]), i[None, :], mask=there, sem="relaxed")


@_gpu.kernel(varying=("count", "blocks"))
def _lookup_kernel(
    indices, zeros, zeros32, scratch, neighbors, count, batch, T, Z, Y, X, words, blocks,
    COUNT: tl.constexpr, BLOCK: tl.constexpr, GRAIN: tl.constexpr, KERNEL: tl.constexpr, DILATION: tl.constexpr,
    TAPS: tl.constexpr, OFFSET_ROWS: tl.constexpr, TILE: tl.constexpr, D: tl.constexpr, HALO: tl.constexpr,
    PAYLOAD: tl.constexpr, WORD: tl.constexpr, BITS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """TILE rows of offsets for BLOCK sites; the centre row, which is the site's own word, goes with the first."""
    KT: tl.constexpr = KERNEL[0]
    KZ: tl.constexpr = KERNEL[1]
    KY: tl.constexpr = KERNEL[2]
    KX: tl.constexpr = KERNEL[3] // TAPS  # 1, or every tap has a row of its own
    DX: tl.constexpr = DILATION[3]
    CENTRE: tl.constexpr = OFFSET_ROWS // 2
    masks, repeats, rows, home = parts(zeros32, scratch, BITS, WORD, WIDE)
    counts = repeats + 2
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    valid = i < count
    own = tl.load(home + i, mask=valid, other=-1)
    several = tl.load(repeats) > 0
    _, b, t, z, y, x = load_site(indices, i, valid, batch, T, Z, Y, X, D)
    own_bit = x % PAYLOAD + HALO
    own_place = own.to(tl.int64) * WORD + own_bit
    active = own >= 0
    first = valid & (tl.program_id(1) == 0)
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
    key = _key(b[None, :], tt, zz, yy, T, Z, Y, words, word, WIDE)
    slot, bits = _find(zeros, masks, key, wanted, BITS, WIDE)
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
        hit0, row0 = _tap(rows, wanted, bits, bit, place, (c - TAPS // 2) * DX)
        hit1, row1 = _tap(rows, wanted & (c + 1 < TAPS), bits, bit, place, (c + 1 - TAPS // 2) * DX)
        hit2, row2 = _tap(rows, wanted & (c + 2 < TAPS), bits, bit, place, (c + 2 - TAPS // 2) * DX)
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
def _tap(rows, wanted, bits, bit, place, shift):
    """The row `shift` places beside. -> whether there is one, the row or -1"""
    hit = wanted & (((bits >> ((bit + shift) & 31).to(tl.uint32)) & 1) != 0)
    return hit, tl.load(rows + place + shift, mask=hit, other=-1)
