"""Sparse and transposed neighbours on GPU: a bitmap of the output sites, ranked.

Four kernels. `_mark_kernel` sets the bit of every output and counts the newly set ones by chunk;
`_scan_kernel` turns words into (outputs before, bits) pairs and writes the sites; `_rank_kernel` gives every
input row and offset its output row. A second bitmap finds input sites that come twice, and only then
does the hash of ../submanifold sort out which row is the lowest. Where the output grid is too large for
a bitmap, the candidates' flat indices are sorted, and ranks come from a binary search.
"""

import math

import torch
import triton
import triton.language as tl

from triops import _gpu
from triops.ops.get_indice_pairs.submanifold.gpu import GRAIN, SiteHash, is_lowest, load_site

MAX_BITMAP = 1 << 28  # places; 32 MiB of bits, and twice that of ranks
MARK_BLOCK = _gpu.block(128, interpreted=1024)
SCAN_WORDS = 16
MAX_CHUNKS = 2048
UNROLL = 8  # taps along x that one program takes one by one
NO_SITE = tl.constexpr(2**62)


class Convolution:
    """The geometry of a call, filled up to four axes in front, as the kernels take it."""

    def __init__(self, batch_size, shape, kernel_size, stride, padding, dilation, out_shape, transpose):
        front = [1] * (4 - len(shape))
        self.batch_size = batch_size
        self.shape, self.out_shape = [*front, *shape], [*front, *out_shape]
        kernel, stride, dilation = [*front, *kernel_size], [*front, *stride], [*front, *dilation]
        padding = [0] * len(front) + list(padding)
        common = [math.gcd(s, d) for s, d in zip(stride, dilation, strict=True)]
        step = [1 if transpose else s // c for s, c in zip(stride, common, strict=True)]
        # The most offsets that one coordinate can meet, and what leads from a coordinate to the first of them.
        most = [-(-k // s) for k, s in zip(kernel, step, strict=True)]
        inverse = [pow(d // c, -1, s) if s > 1 else 0 for d, c, s in zip(dilation, common, step, strict=True)]
        self.volume, self.most = math.prod(kernel), most
        self.places = batch_size * math.prod(out_shape)
        self.input_places = batch_size * math.prod(shape)
        reach = [(i * s if transpose else i) + p + k * d
                 for i, s, p, k, d in zip(self.shape, stride, padding, kernel, dilation, strict=True)]  # fmt: skip
        wide = max(*reach, self.places, self.input_places) >= 2**31 or max(stride) >= 2**15
        self.constants = {
            "D": len(shape), "KERNEL": tuple(kernel), "STRIDE": tuple(stride), "PADDING": tuple(padding),
            "DILATION": tuple(dilation), "COMMON": tuple(common), "STEP": tuple(step), "INVERSE": tuple(inverse),
            "MOST": tuple(most), "TRANSPOSE": transpose, "WIDE": wide,
        }  # fmt: skip


def sparse_table(indices, convolution):
    """-> sites [most, 1 + D], total int32 [1], outputs int32 [K, L], counts int32 [K, blocks].

    The first total[0] rows of `sites` are the output sites, and everything is still on its way: no waiting here.
    """
    if convolution.places <= MAX_BITMAP:
        sites, total, ranks, found, repeats = _rank_by_bitmap(indices, convolution)
        steps = 0
    else:
        sites, total, ranks, found, repeats = _rank_by_sort(indices, convolution)
        steps = ranks.shape[0].bit_length()
    count = indices.shape[0]
    blocks = triton.cdiv(count, GRAIN)
    outputs = torch.empty((convolution.volume, count), dtype=torch.int32, device=indices.device)
    counts = torch.empty((convolution.volume, blocks), dtype=torch.int32, device=indices.device)
    taps = convolution.constants["KERNEL"][3]
    taps = taps if taps <= UNROLL else 1
    _rank_kernel[(blocks, convolution.volume // taps)](
        indices, ranks, found.rows, found.home, repeats, outputs, counts, count, convolution.batch_size,
        *convolution.shape, *convolution.out_shape, blocks, ranks.shape[0],
        TAPS=taps, STEPS=steps, BLOCK=GRAIN, num_warps=4, **convolution.constants,
    )  # fmt: skip
    return sites, total, outputs, counts


def invert_table(outputs, length):
    """outputs int32 [K, L] -> inputs int32 [K, length]: inputs[k, outputs[k, i]] = i, else -1."""
    inputs = torch.full((outputs.shape[0], length), -1, dtype=torch.int32, device=outputs.device)
    if inputs.numel() and outputs.numel():
        _invert_kernel[(triton.cdiv(outputs.shape[1], 1024), outputs.shape[0])](
            outputs, inputs, outputs.shape[1], length, BLOCK=1024, num_warps=4
        )
    return inputs


def _rank_by_bitmap(indices, convolution):
    device, count, places = indices.device, indices.shape[0], convolution.places
    words = triton.cdiv(places, 32)
    chunk = max(SCAN_WORDS, triton.next_power_of_2(triton.cdiv(words, MAX_CHUNKS)))
    chunks = triton.cdiv(words, chunk)
    dense_input = convolution.input_places <= MAX_BITMAP
    seen_words = triton.cdiv(convolution.input_places, 32) if dense_input else 0
    found = SiteHash(
        indices, convolution.batch_size, convolution.shape[-convolution.constants["D"] :], 0, 1,
        spare=words + chunks + seen_words + 1,
    )  # fmt: skip
    bitmap, totals = found.spare, found.spare[words:]
    repeats, seen = found.spare[words + chunks :], found.spare[words + chunks + 1 :]
    most = convolution.most
    taps = most[3] if most[3] <= UNROLL else 1
    rows = math.prod(most) // taps
    tile = min(4, triton.next_power_of_2(rows))
    _mark_kernel[(triton.cdiv(count, MARK_BLOCK), triton.cdiv(rows, tile))](
        indices, bitmap, totals, seen, repeats, count, convolution.batch_size, *convolution.shape,
        *convolution.out_shape, ROWS=rows, TILE=tile, TAPS=taps, CHUNK=chunk, SEEN=dense_input, BLOCK=MARK_BLOCK,
        num_warps=4, **convolution.constants,
    )  # fmt: skip
    if dense_input:
        found.insert(guard=repeats)
    else:
        found.insert()
        repeats = found.repeats
    limit = min(places, math.prod(most) * count)
    sites = torch.empty((limit, indices.shape[1]), dtype=indices.dtype, device=device)
    ranks = torch.empty(words, dtype=torch.int64, device=device)
    total = torch.empty(1, dtype=torch.int32, device=device)
    _scan_kernel[(chunks,)](
        bitmap, totals, ranks, sites, total, words, chunks, *convolution.out_shape,
        D=convolution.constants["D"], CHUNKS=triton.next_power_of_2(chunks), CHUNK=chunk, WORDS=min(chunk, 64),
        num_warps=4,
    )  # fmt: skip
    return sites, total, ranks, found, repeats


def _rank_by_sort(indices, convolution):
    device, count, most = indices.device, indices.shape[0], convolution.most
    candidates = math.prod(most)
    found = SiteHash(indices, convolution.batch_size, convolution.shape[-convolution.constants["D"] :], 0, 1)
    found.insert()
    keys = torch.empty(candidates * count, dtype=torch.int64, device=device)
    _candidates_kernel[(triton.cdiv(count, 1024), candidates)](
        indices, keys, count, convolution.batch_size, *convolution.shape, *convolution.out_shape,
        BLOCK=1024, num_warps=4, **convolution.constants,
    )  # fmt: skip
    keys = keys.sort().values
    first = torch.ones_like(keys, dtype=torch.bool)
    first[1:] = keys[1:] != keys[:-1]
    first &= keys != NO_SITE.value
    before = first.cumsum(0)
    distinct = torch.full((len(keys) + 1,), NO_SITE.value, dtype=torch.int64, device=device)
    # What is not the first of its kind goes to one place behind the others, which is then cut off.
    distinct.scatter_(0, torch.where(first, before - 1, len(keys)), keys)
    distinct = distinct[:-1]
    columns, rest = [], distinct
    for size in reversed(convolution.out_shape[-convolution.constants["D"] :]):
        columns.append(rest % size)
        rest = rest.div(size, rounding_mode="floor")
    sites = torch.stack([rest, *reversed(columns)], 1).to(indices.dtype)
    return sites, before[-1:].int(), distinct, found, found.repeats


@triton.jit
def _popcount(x):
    x = x.to(tl.uint32)
    x = x - ((x >> 1) & 0x55555555)
    x = (x & 0x33333333) + ((x >> 2) & 0x33333333)
    x = (x + (x >> 4)) & 0x0F0F0F0F
    return ((x * 0x01010101) >> 24).to(tl.int32)


@triton.jit
def _nth_tap(
    v, j, size, KERNEL: tl.constexpr, STRIDE: tl.constexpr, PADDING: tl.constexpr, DILATION: tl.constexpr,
    COMMON: tl.constexpr, STEP: tl.constexpr, INVERSE: tl.constexpr, TRANSPOSE: tl.constexpr,
):  # fmt: skip
    """The j-th offset that leads from coordinate v to an output place. -> the place, whether there is one"""
    if TRANSPOSE:
        place = v * STRIDE - PADDING + j * DILATION
        valid = j < KERNEL
    else:
        scaled = v + PADDING
        first = (scaled // COMMON % STEP) * INVERSE % STEP
        k = first + j * STEP
        left = scaled - k * DILATION
        place = left // STRIDE
        valid = (k < KERNEL) & (left >= 0) & (place * STRIDE == left)
    return place, valid & (place >= 0) & (place < size)


@triton.jit
def _place_under(
    v, k, size, STRIDE: tl.constexpr, PADDING: tl.constexpr, DILATION: tl.constexpr, TRANSPOSE: tl.constexpr
):
    """The output place that coordinate v meets under offset k. -> the place, whether there is one"""
    if TRANSPOSE:
        place = v * STRIDE - PADDING + k * DILATION
        valid = place >= 0
    else:
        left = v + PADDING - k * DILATION
        place = left // STRIDE
        valid = (left >= 0) & (place * STRIDE == left)
    return place, valid & (place < size)


@triton.jit
def _leading_place(
    b, t, z, y, r, OT, OZ, OY,
    KERNEL: tl.constexpr, STRIDE: tl.constexpr, PADDING: tl.constexpr, DILATION: tl.constexpr, COMMON: tl.constexpr,
    STEP: tl.constexpr, INVERSE: tl.constexpr, MOST: tl.constexpr, TRANSPOSE: tl.constexpr,
):  # fmt: skip
    """Output row (all axes but x) under the r-th combination of taps. -> the row, whether there is one"""
    py, vy = _nth_tap(
        y, r % MOST[2], OY, KERNEL[2], STRIDE[2], PADDING[2], DILATION[2], COMMON[2], STEP[2], INVERSE[2], TRANSPOSE
    )
    pz, vz = _nth_tap(
        z, r // MOST[2] % MOST[1], OZ,
        KERNEL[1], STRIDE[1], PADDING[1], DILATION[1], COMMON[1], STEP[1], INVERSE[1], TRANSPOSE,
    )  # fmt: skip
    pt, vt = _nth_tap(
        t, r // (MOST[2] * MOST[1]), OT,
        KERNEL[0], STRIDE[0], PADDING[0], DILATION[0], COMMON[0], STEP[0], INVERSE[0], TRANSPOSE,
    )  # fmt: skip
    return ((b * OT + pt) * OZ + pz) * OY + py, vy & vz & vt


@triton.jit
def _mark_kernel(
    indices, bitmap, totals, seen, repeats, count, batch, T, Z, Y, X, OT, OZ, OY, OX,
    ROWS: tl.constexpr, TILE: tl.constexpr, TAPS: tl.constexpr, CHUNK: tl.constexpr, SEEN: tl.constexpr,
    BLOCK: tl.constexpr, D: tl.constexpr, KERNEL: tl.constexpr, STRIDE: tl.constexpr, PADDING: tl.constexpr,
    DILATION: tl.constexpr, COMMON: tl.constexpr, STEP: tl.constexpr, INVERSE: tl.constexpr, MOST: tl.constexpr,
    TRANSPOSE: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Set the bits of the outputs of BLOCK sites under TILE combinations of taps; count those newly set by chunk."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside, b, t, z, y, x = load_site(indices, i, i < count, batch, T, Z, Y, X, D)
    if WIDE:
        b, t, z, y, x = b.to(tl.int64), t.to(tl.int64), z.to(tl.int64), y.to(tl.int64), x.to(tl.int64)
    if SEEN:  # noqa: SIM102, a constant and a tensor do not mix
        if tl.program_id(1) == 0:
            place = (((b * T + t) * Z + z) * Y + y) * X + x
            bit = tl.full((BLOCK,), 1, tl.int32) << (place & 31).to(tl.int32)
            before = tl.atomic_or(seen + (place >> 5), bit, mask=inside, sem="relaxed")
            again = tl.sum((inside & ((before & bit) != 0)).to(tl.int32), 0)
            if again > 0:
                tl.atomic_add(repeats, again, sem="relaxed")

    q = tl.program_id(1) * TILE + tl.arange(0, TILE)[:, None]
    MX: tl.constexpr = MOST[3] // TAPS if TAPS > 1 else MOST[3]  # 1, or every tap along x has a row of its own
    row, valid = _leading_place(
        b[None, :], t[None, :], z[None, :], y[None, :], q // MX, OT, OZ, OY,
        KERNEL, STRIDE, PADDING, DILATION, COMMON, STEP, INVERSE, MOST, TRANSPOSE,
    )  # fmt: skip
    valid = valid & inside[None, :] & (q < ROWS)
    place, there = _nth_tap(
        x[None, :], q % MX, OX,
        KERNEL[3], STRIDE[3], PADDING[3], DILATION[3], COMMON[3], STEP[3], INVERSE[3], TRANSPOSE,
    )  # fmt: skip
    first = row * OX + place
    home = first >> 5
    one = tl.full((TILE, BLOCK), 1, tl.uint32)
    bits = tl.where(valid & there, one << (first & 31).to(tl.uint32), 0)
    # The taps along x mostly fall into one word: one atomic for those, one more for each of the others.
    for c in tl.static_range(1, TAPS):
        place, there = _nth_tap(
            x[None, :], c, OX,
            KERNEL[3], STRIDE[3], PADDING[3], DILATION[3], COMMON[3], STEP[3], INVERSE[3], TRANSPOSE,
        )  # fmt: skip
        flat = row * OX + place
        bit = tl.where(valid & there, one << (flat & 31).to(tl.uint32), 0)
        near = (flat >> 5) == home
        bits = bits | tl.where(near, bit, 0)
        far = (near == 0) & (bit != 0)
        before = tl.atomic_or(bitmap + (flat >> 5), bit.to(tl.int32, bitcast=True), mask=far, sem="relaxed")
        fresh = far & ((before.to(tl.uint32, bitcast=True) & bit) == 0)
        tl.atomic_add(totals + (flat >> 5) // CHUNK, 1, mask=fresh, sem="relaxed")
    before = tl.atomic_or(bitmap + home, bits.to(tl.int32, bitcast=True), mask=bits != 0, sem="relaxed")
    fresh = _popcount(tl.where(bits != 0, bits ^ (bits & before.to(tl.uint32, bitcast=True)), 0))
    tl.atomic_add(totals + home // CHUNK, fresh, mask=fresh > 0, sem="relaxed")


@triton.jit
def _scan_kernel(
    bitmap, totals, ranks, sites, total, words, chunks, OT, OZ, OY, OX,
    D: tl.constexpr, CHUNKS: tl.constexpr, CHUNK: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    """ranks[w] = outputs before word w << 32 | its bits; and the sites of one chunk's outputs."""
    p = tl.program_id(0)
    e = tl.arange(0, CHUNKS)
    sums = tl.load(totals + e, mask=e < chunks, other=0)
    before = tl.sum(tl.where(e < p, sums, 0), 0)
    if p == 0:
        tl.store(total, tl.sum(sums, 0))
    for start in range(0, CHUNK, WORDS):
        w = p * CHUNK + start + tl.arange(0, WORDS)
        bits = tl.load(bitmap + w, mask=w < words, other=0).to(tl.uint32, bitcast=True)
        n = _popcount(bits)
        base = before + tl.cumsum(n, 0) - n
        before += tl.sum(n, 0)
        tl.store(ranks + w, (base.to(tl.int64) << 32) | bits.to(tl.int64), mask=w < words)
        if tl.max(n, 0) > 0:
            e32 = tl.arange(0, 32)[None, :]
            hit = ((bits[:, None] >> e32.to(tl.uint32)) & 1) != 0
            below = (tl.full((1, 32), 1, tl.uint32) << e32.to(tl.uint32)) - 1
            at = sites + (base[:, None] + _popcount(bits[:, None] & below)).to(tl.int64) * (1 + D)
            flat = w[:, None] * 32 + e32
            rest = flat // OX
            tl.store(at + D, flat - rest * OX, mask=hit)
            if D >= 2:
                tl.store(at + (D - 1), rest % OY, mask=hit)
                rest = rest // OY
            if D >= 3:
                tl.store(at + (D - 2), rest % OZ, mask=hit)
                rest = rest // OZ
            if D >= 4:
                tl.store(at + 1, rest % OT, mask=hit)
                rest = rest // OT
            tl.store(at, rest, mask=hit)


@triton.jit
def _rank_kernel(
    indices, ranks, lowest_rows, home, repeats, outputs, counts, count, batch, T, Z, Y, X, OT, OZ, OY, OX, blocks,
    length,
    TAPS: tl.constexpr, STEPS: tl.constexpr, BLOCK: tl.constexpr, D: tl.constexpr, KERNEL: tl.constexpr,
    STRIDE: tl.constexpr, PADDING: tl.constexpr, DILATION: tl.constexpr, COMMON: tl.constexpr, STEP: tl.constexpr,
    INVERSE: tl.constexpr, MOST: tl.constexpr, TRANSPOSE: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """outputs[k, i] for BLOCK sites and one row of TAPS offsets. STEPS > 0: ranks are sorted sites to search in."""
    p = tl.program_id(0)
    r = tl.program_id(1)
    i = p * BLOCK + tl.arange(0, BLOCK)
    valid = i < count
    inside, b, t, z, y, x = load_site(indices, i, valid, batch, T, Z, Y, X, D)
    if tl.load(repeats) > 0:
        inside = inside & is_lowest(lowest_rows, home, repeats, i, valid & inside)
    if WIDE:
        b, t, z, y, x = b.to(tl.int64), t.to(tl.int64), z.to(tl.int64), y.to(tl.int64), x.to(tl.int64)
    KX: tl.constexpr = KERNEL[3] // TAPS
    q = r // KX
    py, vy = _place_under(y, q % KERNEL[2], OY, STRIDE[2], PADDING[2], DILATION[2], TRANSPOSE)
    pz, vz = _place_under(z, q // KERNEL[2] % KERNEL[1], OZ, STRIDE[1], PADDING[1], DILATION[1], TRANSPOSE)
    pt, vt = _place_under(t, q // (KERNEL[2] * KERNEL[1]), OT, STRIDE[0], PADDING[0], DILATION[0], TRANSPOSE)
    row = ((b * OT + pt) * OZ + pz) * OY + py
    inside = inside & vy & vz & vt
    for c in tl.static_range(TAPS):
        place, there = _place_under(x, r % KX + c, OX, STRIDE[3], PADDING[3], DILATION[3], TRANSPOSE)
        there = there & inside
        flat = row * OX + place
        if STEPS > 0:
            low = tl.zeros((BLOCK,), tl.int64)
            high = low + length
            for _ in range(STEPS):
                middle = (low + high) >> 1
                less = tl.load(ranks + middle, mask=there & (middle < high), other=NO_SITE) < flat
                low = tl.where(less & (low < high), middle + 1, low)
                high = tl.where(less, high, middle)
            rank = low.to(tl.int32)
        else:
            entry = tl.load(ranks + (flat >> 5), mask=there, other=0)
            below = (tl.full((BLOCK,), 1, tl.int64) << (flat & 31).to(tl.int64)) - 1
            rank = (entry >> 32).to(tl.int32) + _popcount((entry & below).to(tl.int32))
        k = (r * TAPS + c).to(tl.int64)
        tl.store(outputs + k * count + i, tl.where(there, rank, -1), mask=valid)
        tl.store(counts + k * blocks + p, tl.sum(there.to(tl.int32), 0))


@triton.jit
def _candidates_kernel(
    indices, keys, count, batch, T, Z, Y, X, OT, OZ, OY, OX,
    BLOCK: tl.constexpr, D: tl.constexpr, KERNEL: tl.constexpr, STRIDE: tl.constexpr, PADDING: tl.constexpr,
    DILATION: tl.constexpr, COMMON: tl.constexpr, STEP: tl.constexpr, INVERSE: tl.constexpr, MOST: tl.constexpr,
    TRANSPOSE: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Flat indices of all outputs that a site may meet, NO_SITE where there is none."""
    q = tl.program_id(1)
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside, b, t, z, y, x = load_site(indices, i, i < count, batch, T, Z, Y, X, D)
    b, t, z, y, x = b.to(tl.int64), t.to(tl.int64), z.to(tl.int64), y.to(tl.int64), x.to(tl.int64)
    row, valid = _leading_place(
        b, t, z, y, q // MOST[3], OT, OZ, OY,
        KERNEL, STRIDE, PADDING, DILATION, COMMON, STEP, INVERSE, MOST, TRANSPOSE,
    )  # fmt: skip
    place, there = _nth_tap(
        x, q % MOST[3], OX,
        KERNEL[3], STRIDE[3], PADDING[3], DILATION[3], COMMON[3], STEP[3], INVERSE[3], TRANSPOSE,
    )  # fmt: skip
    flat = tl.where(inside & valid & there, row * OX + place, NO_SITE)
    tl.store(keys + q.to(tl.int64) * count + i, flat, mask=i < count)


@triton.jit
def _invert_kernel(outputs, inputs, count, length, BLOCK: tl.constexpr):
    k = tl.program_id(1).to(tl.int64)
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    o = tl.load(outputs + k * count + i, mask=i < count, other=-1)
    tl.store(inputs + k * length + o, i, mask=o >= 0)
