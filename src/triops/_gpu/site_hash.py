"""A hash of grid sites on GPU, by words of places along the last axis.

A word stands for up to 32 places along x and says by one bit each which of them are active. With a halo, the outer
`halo` places on either side repeat those of the words beside it, so that one look-up answers a site and its neighbors
along x. `rows[slot * word + bit]` is the row of a place; it needs no clearing.
"""

import torch
import triton
import triton.language as tl

from triops import _gpu
from triops._gpu import cdiv, next_power_of_2

# One warp per program: a block waits for its longest chain of probes.
INSERT_BLOCK, INSERT_WARPS = _gpu.block(32, interpreted=1024), 1
INTERPRETED = tl.constexpr(_gpu.INTERPRETED)


class SiteHash:
    """The hash of one call: its two buffers, and what the kernels share of its layout.

    `zeros` int64 holds the table and, behind it as int32: masks (only if keys need int64), the number of repeated
    sites, one free number, and `spare` more; `parts` below finds them. `scratch` int32 holds rows, then each site's
    slot. `layout` is what the kernels are compiled for: dimensions, halo, places per word, whether keys need int64.
    """

    def __init__(self, indices, batch_size, shape, halo, word, spare=0):
        self.indices, self.count, self.batch_size, self.shape = indices, indices.shape[0], batch_size, shape
        payload = word - 2 * halo
        self.words = -(-shape[3] // payload)
        long = batch_size * shape[0] * shape[1] * shape[2] * self.words >= 2**31 - 1
        # A site claims its word and at most one beside it; one slot more, and every search ends. `_capacity` needs 4.
        bits = self.bits = max(self.count.bit_length() + 1, 4)
        self.start = (2 + long) << bits  # of what follows table and masks, in int32
        self.zeros = torch.zeros((self.start >> 1) + 1 + ((spare + 1) >> 1), dtype=torch.int64, device=indices.device)
        self.zeros32 = self.zeros.view(torch.int32)
        self.scratch = torch.empty((word << bits) + self.count, dtype=torch.int32, device=indices.device)
        self.layout = indices.shape[1] - 1, halo, word, long

    def insert(self, copy=None):
        """Fill it; `copy` takes the sites as they are."""
        _insert_kernel[(cdiv(self.count, INSERT_BLOCK),)](
            self.indices, self.indices if copy is None else copy, self.zeros, self.zeros32, self.scratch,
            self.bits, self.count, self.batch_size, *self.shape, self.words,
            COPY=copy is not None, ROLES=2 if self.layout[1] else 1, COLUMNS=next_power_of_2(self.indices.shape[1]),
            BLOCK=INSERT_BLOCK, LAYOUT=self.layout, num_warps=INSERT_WARPS,
        )  # fmt: skip
        _settle_kernel[(cdiv(self.count, 1024),)](
            self.indices, self.zeros, self.zeros32, self.scratch, self.bits, self.count, self.batch_size, *self.shape,
            self.words, BLOCK=1024, LAYOUT=self.layout, num_warps=4,
        )  # fmt: skip


@triton.jit
def _capacity(bits):
    """Slots, 2 ** bits, in a form that shows the compiler a multiple of 16: what lies behind them is then aligned."""
    return (tl.full((), 1, tl.int32) << (bits - 4)) * 16


@triton.jit
def parts(zeros32, scratch, bits, LAYOUT: tl.constexpr):
    """-> masks, repeats, rows, home: where they begin in the buffers of a SiteHash."""
    capacity = _capacity(bits).to(tl.int64)
    masks = zeros32 + 2 * capacity
    repeats = masks
    if LAYOUT[3]:
        repeats = masks + capacity
    return masks, repeats, scratch, scratch + LAYOUT[2] * capacity


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
def word_key(b, t, z, y, T, Z, Y, words, word, LONG: tl.constexpr):
    """Which word of the grid; 0 is no word."""
    if LONG:
        b = b.to(tl.int64)
    return (((b * T + t) * Z + z) * Y + y) * words + word + 1


@triton.jit
def probe(key, bits, LONG: tl.constexpr):
    """First slot, and an odd step: a block waits for its longest chain, and linear probing doubles that."""
    h = key.to(tl.uint32)
    if LONG:
        h = h * 0x9E3779B1 + (key >> 32).to(tl.uint32)
    # Murmur's finaliser: a plain multiplication clusters badly on the lattice that keys form.
    h = (h ^ (h >> 16)) * 0x85EBCA6B
    h = (h ^ (h >> 13)) * 0xC2B2AE35
    h = h ^ (h >> 16)
    return (h >> (32 - bits).to(tl.uint32)).to(tl.int32), ((h & 1023) | 1).to(tl.int32)


if hasattr(tl, "target_info"):

    @triton.jit
    def _is_cuda():
        return tl.target_info.is_cuda()

else:  # Triton 3.4 does not say, and the code for any target serves

    @triton.jit
    def _is_cuda():
        return False


@triton.jit
def claim(at, entry, pending):
    """Compare-and-swap with 0 where pending. -> what stood there, 0 for the others"""
    if INTERPRETED or not _is_cuda():
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


@_gpu.kernel
def _insert_kernel(
    indices, copy, zeros, zeros32, scratch, bits, count, batch, T, Z, Y, X, words,
    COPY: tl.constexpr, ROLES: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr, LAYOUT: tl.constexpr,
):  # fmt: skip
    D: tl.constexpr = LAYOUT[0]
    HALO: tl.constexpr = LAYOUT[1]
    PAYLOAD: tl.constexpr = LAYOUT[2] - 2 * LAYOUT[1]
    LONG: tl.constexpr = LAYOUT[3]
    masks, repeats, rows, home = parts(zeros32, scratch, bits, LAYOUT)
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
    own_key = word_key(b, t, z, y, T, Z, Y, words, word, LONG)
    # Role 0 claims the word of the site, role 1 the one beside that repeats it, both at once.
    role = tl.arange(0, ROLES)[:, None]
    there, beside_key, beside_bit = _beside(own_key, place, word, words, HALO, PAYLOAD)
    key = tl.where(role == 0, own_key[None, :], beside_key[None, :])
    bit = tl.where(role == 0, (place + HALO)[None, :], beside_bit[None, :])
    claimed = inside[None, :] & ((role == 0) | there[None, :])
    key64 = key.to(tl.int64)
    one = tl.full(key.shape, 1, tl.int64) << (bit & 31).to(tl.int64)
    entry = key64
    if not LONG:
        entry = (key64 << 32) | one
    slot, step = probe(key, bits, LONG)
    pending = claimed
    shared = claimed & (key < 0)  # the word was there already
    while tl.max(tl.max(pending.to(tl.int32), 1), 0) > 0:
        old = claim(zeros + slot, entry, pending)
        same = (old if LONG else old >> 32) == key64
        shared = shared | (pending & same)
        pending = pending & (old != 0) & (same == 0)
        slot = tl.where(pending, (slot + step) & (_capacity(bits) - 1), slot)
    row = i[None, :] + tl.zeros_like(slot)
    tl.store(rows + (slot.to(tl.int64) * LAYOUT[2] + bit), row, mask=claimed)
    tl.store(home + row, tl.where(claimed, slot, -1), mask=valid[None, :] & (role == 0))
    if LONG:
        before = tl.atomic_or(masks + slot, one.to(tl.int32), mask=claimed, sem="relaxed").to(tl.int64)
        shared = claimed
    else:
        before = tl.atomic_or(zeros + slot, one, mask=shared, sem="relaxed")
    again = shared & ((before & one) != 0) & (role == 0)
    repeated = tl.sum(tl.sum(again.to(tl.int32), 1), 0)
    if repeated > 0:
        tl.atomic_add(repeats, repeated, sem="relaxed")


@triton.jit
def find(table, masks, slot, step, key, wanted, bits, LONG: tl.constexpr):
    """Probe from a slot on. -> slot, and the bits of the word; 0 where it is not there"""
    key64 = key.to(tl.int64)
    value = tl.load(table + slot, mask=wanted, other=0)
    pending = (value != 0) & ((value if LONG else value >> 32) != key64)
    while tl.max(tl.max(pending.to(tl.int32), 1), 0) > 0:
        slot = tl.where(pending, (slot + step) & (_capacity(bits) - 1), slot)
        value = tl.where(pending, tl.load(table + slot, mask=pending, other=0), value)
        pending = (value != 0) & ((value if LONG else value >> 32) != key64)
    present = tl.load(masks + slot, mask=value != 0, other=0) if LONG else value.to(tl.int32)
    return slot, present.to(tl.uint32, bitcast=True)


@_gpu.kernel
def _settle_kernel(
    indices, zeros, zeros32, scratch, bits, count, batch, T, Z, Y, X, words, BLOCK: tl.constexpr, LAYOUT: tl.constexpr
):
    """Where several rows share a site, whichever came last stands in `rows`: put the lowest there."""
    HALO: tl.constexpr = LAYOUT[1]
    PAYLOAD: tl.constexpr = LAYOUT[2] - 2 * LAYOUT[1]
    masks, repeats, rows, home = parts(zeros32, scratch, bits, LAYOUT)
    if tl.load(repeats) > 0:
        i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        valid = i < count
        slot = tl.load(home + i, mask=valid, other=-1)
        active = slot >= 0
        _, b, t, z, y, x = load_site(indices, i, active, batch, T, Z, Y, X, LAYOUT[0])
        word = x // PAYLOAD
        place = x - word * PAYLOAD
        tl.atomic_min(rows + (slot.to(tl.int64) * LAYOUT[2] + place + HALO), i, mask=active, sem="relaxed")
        if HALO > 0:
            key = word_key(b, t, z, y, T, Z, Y, words, word, LAYOUT[3])
            there, key, bit = _beside(key, place, word, words, HALO, PAYLOAD)
            there, key = (there & active)[None, :], key[None, :]
            beside, step = probe(key, bits, LAYOUT[3])
            beside, _ = find(zeros, masks, beside, step, key, there, bits, LAYOUT[3])
            at = rows + (beside.to(tl.int64) * LAYOUT[2] + bit[None, :])
            tl.atomic_min(at, i[None, :], mask=there, sem="relaxed")
