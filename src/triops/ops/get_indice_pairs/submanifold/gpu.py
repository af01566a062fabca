"""Submanifold neighbours on GPU: a hash of x-words.

A word stands for 32 places along the last axis and says by one bit each which of them are active; the
outer `halo` places on either side repeat those of the words beside it. So one look-up answers all taps of a
kernel row: 9 look-ups a site instead of 27. Where the reach along x is too wide for that, a word holds no
halo and every tap is looked up by itself. `rows[slot * 32 + bit]` is the row of a place; it needs no clearing.
"""

import math

import torch
import triton
import triton.language as tl

from triops import _gpu

WORD = 32
MAX_HALO = 8  # at most half of a word's places are repeated ones
INSERT_BLOCK = _gpu.block(64, interpreted=1024)
LOOKUP_BLOCK = _gpu.block(32, interpreted=512)  # below 1,024: three sums share one integer
LOOKUP_ROWS = 8
GRAIN = 1024  # sites that share a counter, see ../gpu.py
INTERPRETED = tl.constexpr(_gpu.INTERPRETED)


class SiteHash:
    """The hash of one call: buffers, and the constants that its kernels share. `spare` int32 come zeroed along."""

    def __init__(self, indices, batch_size, shape, halo, word, spare=0):
        self.indices, self.count, self.batch_size = indices, indices.shape[0], batch_size
        self.shape = [1] * (4 - len(shape)) + list(shape)
        payload = word - 2 * halo
        self.words = -(-self.shape[3] // payload)
        wide = batch_size * math.prod(self.shape[:3]) * self.words + 1 >= 2**31
        # A site claims its word and at most one beside it; one slot more, and every search ends.
        bits = max((2 if halo else 1) * self.count, 1).bit_length()
        if halo == 0:
            bits += 1
        capacity = 1 << bits
        masks = capacity // 2 if wide else 0
        zeros = torch.zeros(capacity + masks + 1 + (spare + 1) // 2, dtype=torch.int64, device=indices.device)
        self.table = zeros[:capacity]
        self.masks = zeros[capacity : capacity + masks].view(torch.int32) if wide else self.table
        rest = zeros[capacity + masks :].view(torch.int32)
        self.repeats, self.spare = rest, rest[2:]
        self.rows = torch.empty(capacity * word, dtype=torch.int32, device=indices.device)
        home = torch.int32 if capacity * word < 2**31 else torch.int64
        self.home = torch.empty(self.count, dtype=home, device=indices.device)
        self.constants = {
            "D": len(shape), "HALO": halo, "PAYLOAD": payload, "WORD": word, "BITS": bits, "WIDE": wide,
        }  # fmt: skip

    def insert(self, copy=None, guard=None):
        """Fill it. `copy` takes the sites as they are; with `guard` nothing happens while guard[0] is 0."""
        grid = (triton.cdiv(self.count, INSERT_BLOCK),)
        _insert_kernel[grid](
            self.indices, self.indices if copy is None else copy, self.table, self.masks, self.rows, self.home,
            self.repeats, self.repeats if guard is None else guard, self.count, self.batch_size, *self.shape,
            self.words,
            COPY=copy is not None, GUARDED=guard is not None, ROLES=2 if self.constants["HALO"] else 1,
            BLOCK=INSERT_BLOCK, num_warps=2, **self.constants,
        )  # fmt: skip
        _settle_kernel[(triton.cdiv(self.count, 1024),)](
            self.indices, self.table, self.masks, self.rows, self.home, self.repeats, self.count, self.batch_size,
            *self.shape, self.words, BLOCK=1024, num_warps=4, **self.constants,
        )  # fmt: skip
        return self


def submanifold_table(indices, batch_size, shape, kernel_size, dilation, copy=None, counts=None):
    """-> neighbors int32 [K, L], and with `counts` how many of each GRAIN sites have one: int32 [K, blocks]."""
    volume, count = math.prod(kernel_size), indices.shape[0]
    halo = kernel_size[-1] // 2 * dilation[-1]
    by_word = 0 < halo <= MAX_HALO
    blocks = triton.cdiv(count, GRAIN)
    found = SiteHash(indices, batch_size, shape, halo if by_word else 0, WORD, volume * blocks if counts else 0)
    found.insert(copy)
    neighbors = torch.empty((volume, count), dtype=torch.int32, device=indices.device)
    taps = kernel_size[-1] if by_word else 1
    offset_rows = volume // taps
    tile = min(LOOKUP_ROWS, triton.next_power_of_2(max(offset_rows - 1, 1)))
    front = (1,) * (4 - len(shape))
    grid = (triton.cdiv(count, LOOKUP_BLOCK), max(triton.cdiv(offset_rows - 1, tile), 1))
    _lookup_kernel[grid](
        indices, found.table, found.masks, found.rows, found.home, found.repeats, neighbors, found.spare,
        count, batch_size, *found.shape, found.words, blocks,
        KERNEL=(*front, *kernel_size), DILATION=(*front, *dilation), TAPS=taps, OFFSET_ROWS=offset_rows, TILE=tile,
        COUNT=bool(counts), BLOCK=LOOKUP_BLOCK, GRAIN=GRAIN, num_warps=4, **found.constants,
    )  # fmt: skip
    return neighbors, found.spare


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


@triton.jit
def _insert_kernel(
    indices, copy, table, masks, rows, home, repeats, guard, count, batch, T, Z, Y, X, words,
    COPY: tl.constexpr, GUARDED: tl.constexpr, ROLES: tl.constexpr, BLOCK: tl.constexpr, D: tl.constexpr,
    HALO: tl.constexpr, PAYLOAD: tl.constexpr, WORD: tl.constexpr, BITS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    wanted = True
    if GUARDED:
        wanted = tl.load(guard) > 0
    if wanted:
        i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        valid = i < count
        inside, b, t, z, y, x = load_site(indices, i, valid, batch, T, Z, Y, X, D)
        if COPY:
            for c in tl.static_range(1 + D):
                value = tl.load(indices + i.to(tl.int64) * (1 + D) + c, mask=valid)
                tl.store(copy + i.to(tl.int64) * (1 + D) + c, value, mask=valid)
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
            old = _claim(table + slot, entry, pending)
            same = (old if WIDE else old >> 32) == key64
            shared = shared | (pending & same)
            pending = pending & (old != 0) & (same == 0)
            slot = tl.where(pending, (slot + step) & ((1 << BITS) - 1), slot)
        at = slot.to(home.dtype.element_ty) * WORD + bit
        tl.store(rows + at, i[None, :] + tl.zeros_like(slot), mask=claimed)
        tl.store(home + i[None, :] + tl.zeros_like(slot), tl.where(claimed, at, -1), mask=valid[None, :] & (role == 0))
        if WIDE:
            before = tl.atomic_or(masks + slot, one.to(tl.int32), mask=claimed, sem="relaxed").to(tl.int64)
            shared = claimed
        else:
            before = tl.atomic_or(table + slot, one, mask=shared, sem="relaxed")
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


@triton.jit
def _settle_kernel(
    indices, table, masks, rows, home, repeats, count, batch, T, Z, Y, X, words,
    BLOCK: tl.constexpr, D: tl.constexpr, HALO: tl.constexpr, PAYLOAD: tl.constexpr, WORD: tl.constexpr,
    BITS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Where several rows share a site, whichever came last stands in `rows`: put the lowest there."""
    if tl.load(repeats) > 0:
        i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        valid = i < count
        at = tl.load(home + i, mask=valid, other=-1)
        _, b, t, z, y, x = load_site(indices, i, valid & (at >= 0), batch, T, Z, Y, X, D)
        tl.atomic_min(rows + at, i, mask=at >= 0, sem="relaxed")
        if HALO > 0:
            word = x // PAYLOAD
            place = x - word * PAYLOAD
            key = _key(b, t, z, y, T, Z, Y, words, word, WIDE)
            there, key, bit = _beside(key, place, word, words, HALO, PAYLOAD)
            there = there & (at >= 0)
            slot, _ = _find(table, masks, key[None, :], there[None, :], BITS, WIDE)
            beside = slot.to(home.dtype.element_ty) * WORD + bit[None, :]
            tl.atomic_min(rows + beside, i[None, :], mask=there[None, :], sem="relaxed")


@triton.jit
def is_lowest(rows, home, repeats, i, valid):
    """Whether a row stands for its site: False outside the grid, and for all but the lowest of several rows."""
    at = tl.load(home + i, mask=valid, other=-1)
    several = tl.load(repeats) > 0
    return (at >= 0) & (tl.load(rows + at, mask=(at >= 0) & several, other=0) == tl.where(several, i, 0))


@triton.jit
def _lookup_kernel(
    indices, table, masks, rows, home, repeats, neighbors, counts,
    count, batch, T, Z, Y, X, words, blocks,
    KERNEL: tl.constexpr, DILATION: tl.constexpr, TAPS: tl.constexpr, OFFSET_ROWS: tl.constexpr, TILE: tl.constexpr,
    COUNT: tl.constexpr, BLOCK: tl.constexpr, GRAIN: tl.constexpr, D: tl.constexpr, HALO: tl.constexpr,
    PAYLOAD: tl.constexpr, WORD: tl.constexpr, BITS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """TILE rows of offsets for BLOCK sites, the row of the centre left out: it is the site's own word."""
    KT: tl.constexpr = KERNEL[0]
    KZ: tl.constexpr = KERNEL[1]
    KY: tl.constexpr = KERNEL[2]
    KX: tl.constexpr = KERNEL[3] // TAPS  # 1, or every tap has a row of its own
    DX: tl.constexpr = DILATION[3]
    CENTRE: tl.constexpr = OFFSET_ROWS // 2
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    valid = i < count
    at = tl.load(home + i, mask=valid, other=-1)
    _, b, t, z, y, x = load_site(indices, i, valid, batch, T, Z, Y, X, D)
    active = is_lowest(rows, home, repeats, i, valid)
    block = tl.program_id(0) * BLOCK // GRAIN

    q = tl.program_id(1) * TILE + tl.arange(0, TILE)
    r = tl.where(q >= CENTRE, q + 1, q)
    real = (q < OFFSET_ROWS - 1)[:, None] & valid[None, :]
    xx = x[None, :] + ((r % KX - KX // 2) * DX)[:, None]
    yy = y[None, :] + ((r // KX % KY - KY // 2) * DILATION[2])[:, None]
    zz = z[None, :] + ((r // (KX * KY) % KZ - KZ // 2) * DILATION[1])[:, None]
    tt = t[None, :] + ((r // (KX * KY * KZ) - KT // 2) * DILATION[0])[:, None]
    within = (xx >= 0) & (xx < X) & (yy >= 0) & (yy < Y) & (zz >= 0) & (zz < Z) & (tt >= 0) & (tt < T)
    wanted = real & active[None, :] & within
    word = xx // PAYLOAD
    key = _key(b[None, :], tt, zz, yy, T, Z, Y, words, word, WIDE)
    slot, bits = _find(table, masks, key, wanted, BITS, WIDE)
    bit = xx - word * PAYLOAD + HALO
    place = slot.to(home.dtype.element_ty) * WORD + bit
    out = neighbors + (r.to(tl.int64) * TAPS * count)[:, None] + i[None, :]
    packed = tl.zeros((TILE, BLOCK), tl.int32)
    for c in tl.static_range(TAPS):
        shift = (c - TAPS // 2) * DX
        hit = wanted & (((bits >> (bit + shift).to(tl.uint32)) & 1) != 0)
        row = tl.load(rows + place + shift, mask=hit, other=-1)
        tl.store(out, row, mask=real)
        out += count
        if COUNT:
            packed += hit.to(tl.int32) << (10 * (c % 3))  # three sums of at most 1,023 in one
            if c % 3 == 2 or c == TAPS - 1:
                sums = tl.sum(packed, 1)
                packed = tl.zeros((TILE, BLOCK), tl.int32)
                for e in tl.static_range(c % 3 + 1):
                    of = counts + (r * TAPS + (c - c % 3 + e)).to(tl.int64) * blocks + block
                    tl.atomic_add(of, (sums >> (10 * e)) & 1023, mask=q < OFFSET_ROWS - 1, sem="relaxed")

    if tl.program_id(1) == 0:
        own = at // WORD
        own_bit = (at - own * WORD).to(tl.int32)
        if WIDE:
            own_bits = tl.load(masks + own, mask=active, other=0).to(tl.uint32, bitcast=True)
        else:
            own_bits = tl.load(table + own, mask=active, other=0).to(tl.int32).to(tl.uint32, bitcast=True)
        for c in tl.static_range(TAPS):
            own_shift = (c - TAPS // 2) * DX
            if c == TAPS // 2:
                own_hit = active
                own_row = tl.where(active, i, -1)
            else:
                own_hit = active & (((own_bits >> (own_bit + own_shift).to(tl.uint32)) & 1) != 0)
                own_row = tl.load(rows + at + own_shift, mask=own_hit, other=-1)
            own_k = tl.full((), CENTRE * TAPS + c, tl.int64)
            tl.store(neighbors + own_k * count + i, own_row, mask=valid)
            if COUNT:
                tl.atomic_add(counts + own_k * blocks + block, tl.sum(own_hit.to(tl.int32), 0), sem="relaxed")
