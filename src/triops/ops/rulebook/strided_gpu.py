"""Sparse and transposed neighbours on GPU: a bitmap of the output sites, ranked.

Three kernels. `_mark_kernel` sets the bit of every output and counts the newly set ones by chunk;
`_scan_kernel` turns words into (outputs before, bits) pairs and writes the sites; `_rank_kernel` gives every
input row and offset its output row. Of input rows at one site the lowest is found beside it: all of them
write to one place of `owners`, whichever stands there is compared, and only a repeated site costs an atomic.
Where the input grid is large, the site hash takes the place of `owners`; where the output grid
is, the candidates' flat indices are sorted instead of marked, and ranks come from a binary search.
"""

import math
from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from triops import _gpu
from triops._gpu import cdiv, next_power_of_2
from triops._gpu.arithmetic import popcount
from triops._gpu.pinned import pinned_counter
from triops._gpu.site_hash import SiteHash, load_site, parts
from triops.ops.rulebook.geometry import output_shape
from triops.ops.rulebook.submanifold_gpu import GRAIN

MAX_BITMAP = 1 << 28  # output places; 32 MiB of bits, and twice that of ranks
MAX_UNCOUNTED = 256 * 2**20  # bytes of output sites, at worst, up to which nobody waits for their number
MAX_OWNERS = 1 << 23  # input places; 32 MiB, of which only the lines that hold sites are touched
MARK_BLOCK, MARK_WARPS, MARK_TILE = _gpu.block(64, interpreted=1024), 1, _gpu.block(1, interpreted=4)
RANK_WARPS = 4
SCAN_WORDS = 16, 64  # of the bitmap, that a program of the scan takes at a time: in a small grid, in a large one
MAX_CHUNKS = 2048
UNROLL = 8  # taps along x that one program takes one by one
NO_SITE = tl.constexpr(2**62)


class Convolution:
    """What the parameters of a call settle, filled up to four axes in front, as the kernels take it."""

    def __init__(self, batch_size, shape, kernel_size, stride, padding, dilation, out_padding, transpose):
        out_shape = output_shape(shape, kernel_size, stride, padding, dilation, out_padding, False, transpose)
        front = (1,) * (4 - len(shape))
        self.batch_size, self.dimensions = batch_size, len(shape)
        self.shape, self.out_shape = (*front, *shape), (*front, *out_shape)
        kernel, stride, dilation = (*front, *kernel_size), (*front, *stride), (*front, *dilation)
        padding = (*(0 for _ in front), *padding)
        common = tuple(math.gcd(s, d) for s, d in zip(stride, dilation, strict=True))
        step = tuple(1 if transpose else s // c for s, c in zip(stride, common, strict=True))
        # The most offsets that one coordinate can meet, and what leads from a coordinate to the first of them.
        most = tuple(-(-k // s) for k, s in zip(kernel, step, strict=True))
        inverse = tuple(pow(d // c, -1, s) if s > 1 else 0 for d, c, s in zip(dilation, common, step, strict=True))
        self.volume, self.candidates = math.prod(kernel), math.prod(most)
        self.places = batch_size * math.prod(out_shape)
        self.input_places = batch_size * math.prod(shape)
        reach = [(i * s if transpose else i) + p + k * d
                 for i, s, p, k, d in zip(self.shape, stride, padding, kernel, dilation, strict=True)]  # fmt: skip
        wide = max(*reach, self.places, self.input_places) >= 2**31 or max(stride) >= 2**15
        self.taps = kernel[3] if kernel[3] <= UNROLL else 1
        self.by_bitmap, self.dense_owners = self.places <= MAX_BITMAP, self.input_places <= MAX_OWNERS
        self.words = cdiv(self.places, 32)
        chunk = max(SCAN_WORDS[0], next_power_of_2(cdiv(self.words, MAX_CHUNKS)))
        self.chunks, self.chunk_bits = cdiv(self.words, chunk), chunk.bit_length() - 1
        self.ranks_at = (2 + self.words + self.chunks + 1) & ~1  # even: ranks are int64
        self.numbers = numbers = batch_size, *self.shape, *self.out_shape
        self.constants = {
            "D": len(shape), "KERNEL": kernel, "STRIDE": stride, "PADDING": padding, "DILATION": dilation,
            "COMMON": common, "STEP": step, "INVERSE": inverse, "MOST": most, "TRANSPOSE": transpose, "WIDE": wide,
        }  # fmt: skip
        mark_taps = most[3] if most[3] <= UNROLL else 1
        mark_rows = self.candidates // mark_taps
        tile = min(MARK_TILE, next_power_of_2(mark_rows))
        self.mark_groups = cdiv(mark_rows, tile)
        self.mark = _mark_kernel.bind(
            *numbers, ROWS=mark_rows, TILE=tile, TAPS=mark_taps, BLOCK=MARK_BLOCK, num_warps=MARK_WARPS,
            **self.constants,
        )  # fmt: skip
        self.scans = [
            _scan_kernel.bind(*numbers, D=len(shape), CHUNKS=MAX_CHUNKS, WORDS=words, BLOCK=1024, num_warps=4)
            for words in SCAN_WORDS
        ]
        self.large = chunk >= SCAN_WORDS[1]
        self.rank = _rank_kernel.bind(
            *numbers, SEARCHED=not self.by_bitmap, TAPS=self.taps, BLOCK=GRAIN, num_warps=RANK_WARPS, **self.constants
        )


plan = lru_cache(maxsize=1024)(Convolution)


class Ranked(NamedTuple):
    """What the rank kernel reads, and where it puts its counts."""

    sites: torch.Tensor  # [most, 1 + D]
    zeros32: torch.Tensor  # from `start`: repeated sites, one unused, the bitmap, outputs by chunk, ranks, counts
    start: int
    ranks: torch.Tensor  # int64 from `ranks_at`: (outputs before a word << 32 | its bits), or the sorted outputs
    ranks_at: int
    counts_at: int
    owners: torch.Tensor
    bits: int  # 0 where `owners` holds a row for every input place, else of the hash whose scratch it is


def sparse_table(indices, convolution, scratch=None, total=None):
    """-> sites [most, 1 + D], their number (a PinnedCounter; None where `total`, int32 [1] on the device, takes it),
    outputs int32 [K, L], a buffer and where in it counts int32 [K, blocks] begin.

    The first rows of `sites` are the output sites, and everything is still on its way: no waiting here.
    scratch: int32 of any size, used if it is large enough, for a caller that writes something else there later.
    """
    count = indices.shape[0]
    blocks = cdiv(count, GRAIN)
    counter = pinned_counter(indices.device) if total is None else None
    rank = _rank_by_bitmap if convolution.by_bitmap else _rank_by_sort
    found = rank(
        indices, convolution, total if counter is None else counter.expect(), convolution.volume * blocks, scratch
    )
    outputs = torch.empty((convolution.volume, count), dtype=torch.int32, device=indices.device)
    length = found.ranks.shape[0]
    convolution.rank(
        (blocks, convolution.volume // convolution.taps),
        indices, found.ranks, found.zeros32, found.owners, outputs, found.start, found.ranks_at, found.counts_at,
        found.bits, count, blocks, length,
    )  # fmt: skip
    return found.sites, counter, outputs, found.zeros32, found.counts_at


def invert_table(outputs, length):
    """outputs int32 [K, L] -> inputs int32 [K, length]: inputs[k, outputs[k, i]] = i, else -1."""
    inputs = torch.full((outputs.shape[0], length), -1, dtype=torch.int32, device=outputs.device)
    if inputs.numel() and outputs.numel():
        _invert_kernel[(cdiv(outputs.shape[1], 1024), outputs.shape[0])](
            outputs, inputs, outputs.shape[1], length, BLOCK=1024, num_warps=4
        )
    return inputs


def _rank_by_bitmap(indices, convolution, total, counts, scratch):
    """The number of outputs goes to `total`; `counts` integers are kept free for the rank kernel."""
    device, count, words, dense = indices.device, indices.shape[0], convolution.words, convolution.dense_owners
    used = convolution.ranks_at + 2 * words
    if dense:
        # A larger batch needs the hash: its kernels are compiled now.
        _gpu.compile_once(
            ("strided hash", indices.dtype, convolution.dimensions), lambda: _hash_sites(indices, convolution, 0)
        )
        zeros32 = torch.zeros(used + counts, dtype=torch.int32, device=device)
        owners = scratch
        if owners is None or owners.numel() < convolution.input_places:
            owners = torch.empty(convolution.input_places, dtype=torch.int32, device=device)
        start = bits = 0
    else:
        zeros32, start, owners, bits = _hash_sites(indices, convolution, used + counts)
    grid = cdiv(count, MARK_BLOCK), convolution.mark_groups
    convolution.mark(grid, indices, zeros32, owners, start, words, convolution.chunk_bits, int(dense), count)
    limit = min(convolution.places, convolution.candidates * count)
    if limit * indices.shape[1] * indices.element_size() > MAX_UNCOUNTED:
        # Of candidates most are the same few outputs: worth waiting for their number rather than taking gigabytes.
        totals = start + 2 + words
        limit = int(zeros32[totals : totals + convolution.chunks].sum())
    sites = torch.empty((limit, indices.shape[1]), dtype=indices.dtype, device=device)
    arguments = (
        (convolution.chunks + (cdiv(count, 1024) if dense else 0),),
        indices, zeros32, owners, sites, total, start, start + convolution.ranks_at, words, convolution.chunks,
        convolution.chunk_bits, count,
    )  # fmt: skip
    key = "scan", indices.dtype, convolution.dimensions
    _gpu.compile_once(key, lambda: [scan(*arguments) for scan in convolution.scans])
    convolution.scans[convolution.large](*arguments)
    return Ranked(sites, zeros32, start, zeros32, start + convolution.ranks_at, start + used, owners, bits)


def _hash_sites(indices, convolution, spare):
    found = SiteHash(indices, convolution.batch_size, convolution.shape, 0, 1, spare)
    found.insert()
    return found.zeros32, found.start, found.scratch, found.bits


def _rank_by_sort(indices, convolution, total, counts, _scratch):
    """The same for an output grid that no bitmap can hold."""
    device, count, candidates = indices.device, indices.shape[0], convolution.candidates
    zeros32, start, owners, bits = _hash_sites(indices, convolution, counts)
    keys = torch.empty(candidates * count, dtype=torch.int64, device=device)
    _candidates_kernel[(cdiv(count, 1024), candidates)](
        indices, keys, count, *convolution.numbers, BLOCK=1024, num_warps=4, **convolution.constants
    )
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
    for size in reversed(convolution.out_shape[-convolution.dimensions :]):
        columns.append(rest % size)
        rest = rest.div(size, rounding_mode="floor")
    sites = torch.stack([rest, *reversed(columns)], 1).to(indices.dtype)
    total.copy_(before[-1:], non_blocking=True)
    return Ranked(sites, zeros32, start, distinct, 0, start + 2, owners, bits)


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


@_gpu.kernel
def _mark_kernel(
    indices, zeros32, owners, start, words, chunk_bits, dense, count, batch, T, Z, Y, X, OT, OZ, OY, OX,
    ROWS: tl.constexpr, TILE: tl.constexpr, TAPS: tl.constexpr, BLOCK: tl.constexpr,
    D: tl.constexpr, KERNEL: tl.constexpr, STRIDE: tl.constexpr, PADDING: tl.constexpr,
    DILATION: tl.constexpr, COMMON: tl.constexpr, STEP: tl.constexpr, INVERSE: tl.constexpr, MOST: tl.constexpr,
    TRANSPOSE: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Set the bits of the outputs of BLOCK sites under TILE combinations of taps; count those newly set by chunk.

    Most outputs are met by several sites, so a look comes before the atomic; an old view only costs one too many.
    """
    bitmap = zeros32 + start + 2
    totals = bitmap + words
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside, b, t, z, y, x = load_site(indices, i, i < count, batch, T, Z, Y, X, D)
    if WIDE:
        b, t, z, y, x = b.to(tl.int64), t.to(tl.int64), z.to(tl.int64), y.to(tl.int64), x.to(tl.int64)
    q = tl.program_id(1) * TILE + tl.arange(0, TILE)[:, None]
    MX: tl.constexpr = MOST[3] // TAPS  # 1, or every tap along x has a row of its own
    row, valid = _leading_place(
        b[None, :], t[None, :], z[None, :], y[None, :], q // MX, OT, OZ, OY,
        KERNEL, STRIDE, PADDING, DILATION, COMMON, STEP, INVERSE, MOST, TRANSPOSE,
    )  # fmt: skip
    valid = valid & inside[None, :] & (q < ROWS)
    place, there = _nth_tap(
        x[None, :], q % MX, OX,
        KERNEL[3], STRIDE[3], PADDING[3], DILATION[3], COMMON[3], STEP[3], INVERSE[3], TRANSPOSE,
    )  # fmt: skip
    nearest = row * OX + place
    home = nearest >> 5
    one = tl.full((TILE, BLOCK), 1, tl.uint32)
    bits = tl.where(valid & there, one << (nearest & 31).to(tl.uint32), 0)
    # The taps along x mostly fall into one word: one atomic for those, one more for each of the others.
    for c in tl.static_range(1, TAPS):
        flat, bit = _further_bit(
            x, row, valid, c, OX,
            KERNEL[3], STRIDE[3], PADDING[3], DILATION[3], COMMON[3], STEP[3], INVERSE[3], TRANSPOSE,
        )  # fmt: skip
        bits = bits | tl.where((flat >> 5) == home, bit, 0)
    standing = tl.load(bitmap + home, mask=bits != 0, other=0).to(tl.uint32, bitcast=True)
    if (dense != 0) & (tl.program_id(1) == 0):
        own = (((b * T + t) * Z + z) * Y + y) * X + x
        tl.store(owners + own, i, mask=inside)
    missing = (bits & standing) != bits
    before = tl.atomic_or(bitmap + home, bits.to(tl.int32, bitcast=True), mask=missing, sem="relaxed")
    for c in tl.static_range(1, TAPS):
        flat, bit = _further_bit(
            x, row, valid, c, OX,
            KERNEL[3], STRIDE[3], PADDING[3], DILATION[3], COMMON[3], STEP[3], INVERSE[3], TRANSPOSE,
        )  # fmt: skip
        far = ((flat >> 5) != home) & (bit != 0)
        stood = tl.atomic_or(bitmap + (flat >> 5), bit.to(tl.int32, bitcast=True), mask=far, sem="relaxed")
        fresh_far = far & ((stood.to(tl.uint32, bitcast=True) & bit) == 0)
        tl.atomic_add(totals + (flat >> 5 >> chunk_bits), 1, mask=fresh_far, sem="relaxed")
    fresh = popcount(tl.where(missing, bits ^ (bits & before.to(tl.uint32, bitcast=True)), 0))
    tl.atomic_add(totals + (home >> chunk_bits), fresh, mask=fresh > 0, sem="relaxed")


@triton.jit
def _further_bit(
    x, row, valid, c, OX, KERNEL: tl.constexpr, STRIDE: tl.constexpr, PADDING: tl.constexpr, DILATION: tl.constexpr,
    COMMON: tl.constexpr, STEP: tl.constexpr, INVERSE: tl.constexpr, TRANSPOSE: tl.constexpr,
):  # fmt: skip
    """The output under the c-th tap along x. -> its flat index, its bit in its word or 0"""
    place, there = _nth_tap(
        x[None, :], c, OX, KERNEL, STRIDE, PADDING, DILATION, COMMON, STEP, INVERSE, TRANSPOSE
    )  # fmt: skip
    flat = row * OX + place
    one = tl.full(flat.shape, 1, tl.uint32)
    return flat, tl.where(valid & there, one << (flat & 31).to(tl.uint32), 0)


@_gpu.kernel
def _scan_kernel(
    indices, zeros32, owners, sites, total, start, ranks_at, words, chunks, chunk_bits, count,
    batch, T, Z, Y, X, OT, OZ, OY, OX,
    D: tl.constexpr, CHUNKS: tl.constexpr, WORDS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program a chunk of the bitmap; those behind them settle which of several rows at a site is the lowest."""
    p = tl.program_id(0)
    if p < chunks:
        ranks = (zeros32 + ranks_at).to(tl.pointer_type(tl.int64), bitcast=True)
        _scan_chunk(
            p, zeros32 + start + 2, ranks, sites, total, words, chunks, chunk_bits, OT, OZ, OY, OX, D, CHUNKS, WORDS
        )
    else:
        i = (p - chunks) * BLOCK + tl.arange(0, BLOCK)
        inside, b, t, z, y, x = load_site(indices, i, i < count, batch, T, Z, Y, X, D)
        own = (((b * T + t) * Z + z) * Y + y) * X + x
        owner = tl.load(owners + own, mask=inside, other=0)
        tl.atomic_min(owners + own, i, mask=inside & (owner > i), sem="relaxed")
        repeated = tl.sum((inside & (owner != i)).to(tl.int32), 0)
        if repeated > 0:
            tl.atomic_add(zeros32 + start, repeated, sem="relaxed")


@triton.jit
def _scan_chunk(
    p, bitmap, ranks, sites, total, words, chunks, chunk_bits, OT, OZ, OY, OX,
    D: tl.constexpr, CHUNKS: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    """ranks[w] = outputs before word w << 32 | its bits; the sites of one chunk; their total number."""
    e = tl.arange(0, CHUNKS)
    sums = tl.load(bitmap + words + e, mask=e < chunks, other=0)
    before = tl.sum(tl.where(e < p, sums, 0), 0)
    if p == 0:
        tl.store(total, tl.sum(sums, 0))
    for first in range(p << chunk_bits, (p + 1) << chunk_bits, WORDS):
        w = first + tl.arange(0, WORDS)
        bits = tl.load(bitmap + w, mask=w < words, other=0).to(tl.uint32, bitcast=True)
        n = popcount(bits)
        base = before + tl.cumsum(n, 0) - n
        before += tl.sum(n, 0)
        tl.store(ranks + w, (base.to(tl.int64) << 32) | bits.to(tl.int64), mask=w < words)
        if tl.max(n, 0) > 0:
            e32 = tl.arange(0, 32)[None, :]
            hit = ((bits[:, None] >> e32.to(tl.uint32)) & 1) != 0
            below = (tl.full((1, 32), 1, tl.uint32) << e32.to(tl.uint32)) - 1
            at = sites + (base[:, None] + popcount(bits[:, None] & below)).to(tl.int64) * (1 + D)
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


@_gpu.kernel
def _rank_kernel(
    indices, ranks, zeros32, owners, outputs, start, ranks_at, counts_at, bits, count, blocks, length,
    batch, T, Z, Y, X, OT, OZ, OY, OX,
    SEARCHED: tl.constexpr, TAPS: tl.constexpr, BLOCK: tl.constexpr, D: tl.constexpr,
    KERNEL: tl.constexpr, STRIDE: tl.constexpr, PADDING: tl.constexpr, DILATION: tl.constexpr, COMMON: tl.constexpr,
    STEP: tl.constexpr, INVERSE: tl.constexpr, MOST: tl.constexpr, TRANSPOSE: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """outputs[k, i] for BLOCK sites and one row of TAPS offsets. SEARCHED: ranks are sorted sites."""
    p = tl.program_id(0)
    r = tl.program_id(1)
    ranks = (ranks + ranks_at).to(tl.pointer_type(tl.int64), bitcast=True)
    counts = zeros32 + counts_at
    i = p * BLOCK + tl.arange(0, BLOCK)
    valid = i < count
    inside, b, t, z, y, x = load_site(indices, i, valid, batch, T, Z, Y, X, D)
    if tl.load(zeros32 + start) > 0:
        own = (((b * T + t) * Z + z) * Y + y) * X + x
        if bits > 0:  # of a hash
            _, _, _, slots = parts(zeros32, owners, bits, 1, False)
            own = tl.load(slots + i, mask=inside, other=0)
        inside = inside & (tl.load(owners + own, mask=inside, other=-1) == i)
    if WIDE:
        b, t, z, y, x = b.to(tl.int64), t.to(tl.int64), z.to(tl.int64), y.to(tl.int64), x.to(tl.int64)
    KX: tl.constexpr = KERNEL[3] // TAPS
    q = r // KX
    py, vy = _place_under(y, q % KERNEL[2], OY, STRIDE[2], PADDING[2], DILATION[2], TRANSPOSE)
    pz, vz = _place_under(z, q // KERNEL[2] % KERNEL[1], OZ, STRIDE[1], PADDING[1], DILATION[1], TRANSPOSE)
    pt, vt = _place_under(t, q // (KERNEL[2] * KERNEL[1]), OT, STRIDE[0], PADDING[0], DILATION[0], TRANSPOSE)
    row = (((b * OT + pt) * OZ + pz) * OY + py) * OX
    inside = inside & vy & vz & vt
    # Three taps at a time: all loads before the stores, which would wait for them one by one.
    for c in tl.static_range(0, TAPS, 3):
        hit0, rank0 = _rank_under(ranks, length, row, x, r % KX + c, inside, OX, STRIDE[3], PADDING[3], DILATION[3],
                                  TRANSPOSE, SEARCHED)  # fmt: skip
        more = inside & (c + 1 < TAPS)
        hit1, rank1 = _rank_under(ranks, length, row, x, r % KX + c + 1, more, OX, STRIDE[3], PADDING[3], DILATION[3],
                                  TRANSPOSE, SEARCHED)  # fmt: skip
        more = inside & (c + 2 < TAPS)
        hit2, rank2 = _rank_under(ranks, length, row, x, r % KX + c + 2, more, OX, STRIDE[3], PADDING[3], DILATION[3],
                                  TRANSPOSE, SEARCHED)  # fmt: skip
        k = (r * TAPS + c).to(tl.int64)
        out = outputs + k * count + i
        sums = tl.sum(hit0.to(tl.int64) | (hit1.to(tl.int64) << 20) | (hit2.to(tl.int64) << 40), 0)
        tl.store(out, rank0, mask=valid)
        tl.store(counts + k * blocks + p, (sums & 0xFFFFF).to(tl.int32))
        if c + 1 < TAPS:
            out += count
            tl.store(out, rank1, mask=valid)
            tl.store(counts + (k + 1) * blocks + p, ((sums >> 20) & 0xFFFFF).to(tl.int32))
        if c + 2 < TAPS:
            out += count
            tl.store(out, rank2, mask=valid)
            tl.store(counts + (k + 2) * blocks + p, (sums >> 40).to(tl.int32))


@triton.jit
def _rank_under(
    ranks, length, row, x, k, inside, OX, STRIDE: tl.constexpr, PADDING: tl.constexpr, DILATION: tl.constexpr,
    TRANSPOSE: tl.constexpr, SEARCHED: tl.constexpr,
):  # fmt: skip
    """The output row that a site meets under tap k along x. -> whether there is one, the row or -1"""
    place, there = _place_under(x, k, OX, STRIDE, PADDING, DILATION, TRANSPOSE)
    there = there & inside
    flat = row + place
    if SEARCHED:
        low = tl.zeros(flat.shape, tl.int64)
        high = low + length
        left = tl.cast(length, tl.int64)  # as many steps as it has bits
        while left > 0:
            left = left >> 1
            middle = (low + high) >> 1
            less = tl.load(ranks + middle, mask=there & (middle < high), other=NO_SITE) < flat
            low = tl.where(less & (low < high), middle + 1, low)
            high = tl.where(less, high, middle)
        rank = low.to(tl.int32)
    else:
        entry = tl.load(ranks + (flat >> 5), mask=there, other=0)
        below = (tl.full(flat.shape, 1, tl.int64) << (flat & 31).to(tl.int64)) - 1
        rank = (entry >> 32).to(tl.int32) + popcount((entry & below).to(tl.int32))
    return there, tl.where(there, rank, -1)


@_gpu.kernel
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


@_gpu.kernel
def _invert_kernel(outputs, inputs, count, length, BLOCK: tl.constexpr):
    k = tl.program_id(1).to(tl.int64)
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    o = tl.load(outputs + k * count + i, mask=i < count, other=-1)
    tl.store(inputs + k * length + o, i, mask=o >= 0)
