"""Sparse and transposed neighbors on GPU: a bitmap of the output sites, ranked.

`_mark_kernel` sets the bit of every output and counts the newly set ones by chunk; `_scan_kernel` turns words into
(outputs before, bits) pairs, the ranks, and lists the sites; `_rank_kernel` gives every input row and offset its output
row, and with it every output row its input rows. Of input rows at one site the lowest counts, see `_owners`.
Where the output grid is too large for a bitmap, the candidates' flat indices are sorted instead of marked, and ranks
come from a binary search.
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
from triops._gpu.memory import store_run
from triops._gpu.pinned import pinned_counter
from triops._gpu.site_hash import SiteHash, load_site
from triops.ops.rulebook.bitmap_gpu import rank_of
from triops.ops.rulebook.geometry import MAX_BITMAP, output_shape

MAX_UNCOUNTED = 256 * 2**20  # bytes of output sites, at worst, up to which nobody waits for their number
MAX_OWNERS = 1 << 23  # input places; 32 MiB, of which only the lines that hold sites are touched
MOST_ROWS = 2**31 - 1
GRAIN = 1024  # sites that share a counter of pairs
FILL = 4096  # elements that a program of the scan fills
MARK_BLOCK, MARK_WARPS, MARK_TILE = _gpu.block(64, interpreted=1024), 1, _gpu.block(1, interpreted=4)
INVERT_BLOCK = _gpu.block(256, interpreted=GRAIN)
SCAN_WORDS = 16, 64  # of the bitmap, that a program of the scan takes at a time: in a small grid, in a large one
MAX_CHUNKS = 2048
UNROLL = 8  # taps along x that one program takes together
NO_SITE = tl.constexpr(2**62)
SETTLE_BLOCK = tl.constexpr(1024)


class Convolution:
    """What the parameters of a call settle, filled up to four axes in front, as the kernels take it.

    `axes` has for every axis: kernel, stride, padding, dilation, out_padding, gcd of stride and dilation, and of the
    offsets that one coordinate can meet their step, what leads to the first of them, and the most there can be.
    """

    def __init__(self, batch_size, shape, kernel_size, stride, padding, dilation, out_padding, transpose):
        out_shape = output_shape(shape, kernel_size, stride, padding, dilation, out_padding, False, transpose)
        missing = 4 - len(shape)
        self.batch_size, self.dimensions = batch_size, len(shape)
        self.shape, self.out_shape = (1,) * missing + tuple(shape), (1,) * missing + tuple(out_shape)
        given = zip(kernel_size, stride, padding, dilation, out_padding, strict=True)
        axes = tuple(_axis(*axis, transpose) for axis in [(1, 1, 0, 1, 0)] * missing + list(given))
        kernel, most = [axis[0] for axis in axes], [axis[8] for axis in axes]
        self.volume, self.candidates = math.prod(kernel), math.prod(most)
        self.places = batch_size * math.prod(out_shape)
        self.input_places = batch_size * math.prod(shape)
        reach = [(i * axis[1] if transpose else i) + axis[2] + axis[0] * axis[3]
                 for i, axis in zip(self.shape, axes, strict=True)]  # fmt: skip
        long = max(*reach, self.places, self.input_places) >= 2**31 or max(axis[1] for axis in axes) >= 2**15
        self.by_bitmap, self.dense_owners = self.places <= MAX_BITMAP, self.input_places <= MAX_OWNERS
        self.words = cdiv(self.places, 32)
        chunk = max(SCAN_WORDS[0], next_power_of_2(cdiv(self.words, MAX_CHUNKS)))
        self.chunks, self.chunk_bits = cdiv(self.words, chunk), chunk.bit_length() - 1
        self.large = chunk >= SCAN_WORDS[1]
        grid = batch_size, *self.shape
        geometry = {"D": len(shape), "AXES": axes, "TRANSPOSE": transpose, "LONG": long}
        self.taps = kernel[3] if kernel[3] <= UNROLL else 1
        mark_taps = most[3] if most[3] <= UNROLL else 1
        mark_rows = self.candidates // mark_taps
        tile = min(MARK_TILE, next_power_of_2(mark_rows))
        self.mark_groups = cdiv(mark_rows, tile)
        self.mark = _mark_kernel.bind(
            *grid, ROWS=mark_rows, TILE=tile, TAPS=mark_taps, BLOCK=MARK_BLOCK, num_warps=MARK_WARPS, **geometry
        )
        self.scans = [
            _scan_kernel.bind(*self.out_shape, D=len(shape), CHUNKS=MAX_CHUNKS, WORDS=words, FILL=FILL, num_warps=4)
            for words in SCAN_WORDS
        ]
        self.rank, self.rank_and_invert, self.invert = (
            _rank_kernel.bind(
                *grid, KEPT=kept, INVERT=invert, BLOCK=block, SEARCHED=not self.by_bitmap, TAPS=self.taps,
                num_warps=warps, **geometry,
            )
            for kept, invert, block, warps in (
                (True, False, GRAIN, 4), (True, True, INVERT_BLOCK, 4), (False, True, INVERT_BLOCK, 4)
            )
        )  # fmt: skip
        self.candidate_keys = _candidates_kernel.bind(*grid, BLOCK=1024, num_warps=4, **geometry)


def _axis(kernel, stride, padding, dilation, out_padding, transpose):
    common = math.gcd(stride, dilation)
    step = 1 if transpose else stride // common
    first = pow(dilation // common, -1, step) if step > 1 else 0
    return kernel, stride, padding, dilation, out_padding, common, step, first, -(-kernel // step)


plan = lru_cache(maxsize=1024)(Convolution)


class Owners(NamedTuple):
    """Which input row stands for the site of row i: `rows[i]`, or `rows[rows[slots_at + i]]` where slots_at is not -1.

    Then `repeats[repeats_at]` says how many rows stand for no site of their own, which is mostly 0.
    """

    rows: torch.Tensor
    slots_at: int
    repeats: torch.Tensor
    repeats_at: int


class OutputSites:
    """The output sites of one call, in a bitmap that is marked when this is made. Nothing waits but `count`.

    owners: int32 [L], the row that stands for each input row's site, where the caller knows it (-1: none does).
    scratch: int32 of any size, used if it is large enough, for a caller that writes something else there later.
    """

    def __init__(self, indices, convolution, owners=None, scratch=None):
        self.indices, self.convolution = indices, convolution
        count, words, places = indices.shape[0], convolution.words, convolution.input_places
        # The ranks, whose low halves are the bitmap; then as int32 the outputs of each chunk and the repeated sites.
        self.zeros = torch.zeros(words + convolution.chunks // 2 + 1, dtype=torch.int64, device=indices.device)
        self.zeros32 = self.zeros.view(torch.int32)
        dense = owners is None and convolution.dense_owners
        if dense:
            # A larger batch needs the hash: its kernels are compiled now.
            key = "strided hash", indices.dtype, convolution.dimensions
            _gpu.compile_once(key, lambda: _owners(indices, convolution, None))
            if scratch is None or scratch.numel() < places + count:
                scratch = torch.empty(places + count, dtype=torch.int32, device=indices.device)
            self.owners = Owners(scratch, places, self.zeros32, 2 * words + convolution.chunks)
        else:
            self.owners = _owners(indices, convolution, owners)
        self.settled = cdiv(count, SETTLE_BLOCK.value) if dense else 0
        convolution.mark(
            (cdiv(count, MARK_BLOCK), convolution.mark_groups), indices, self.zeros32, self.owners.rows, words,
            convolution.chunk_bits, places if dense else -1, count,
        )  # fmt: skip

    @property
    def index(self):
        """int64 [words]: the ranks, once `list_sites` has been called."""
        return self.zeros[: self.convolution.words]

    @property
    def most(self):
        return min(self.convolution.places, self.convolution.candidates * self.indices.shape[0])

    def new_sites(self, rows):
        return torch.empty((rows, self.indices.shape[1]), dtype=self.indices.dtype, device=self.indices.device)

    def count(self):
        """The number of outputs: waits for the GPU."""
        counter = pinned_counter(self.indices.device)
        self.list_sites(self.new_sites(0), counter.expect(), None)
        return counter.wait()

    def list_sites(self, sites, total, inputs):
        """Fill `sites` [rows, 1 + D] with the output sites, `total` int32 [1] with their number, `inputs`, if any, with
        -1; then also the rest of `sites`."""
        convolution, (rows, columns) = self.convolution, sites.shape
        entries, cleared = (0, 0) if inputs is None else (inputs.numel(), cdiv(rows * columns, FILL))
        arguments = (
            (convolution.chunks + self.settled + cleared + cdiv(entries, FILL),),
            self.zeros32, self.owners.rows, sites, total, total if inputs is None else inputs, self.owners.slots_at,
            convolution.words, convolution.chunk_bits, self.settled, cleared, rows, entries, self.indices.shape[0],
        )  # fmt: skip
        key = "scan", self.indices.dtype, convolution.dimensions
        _gpu.compile_once(key, lambda: [scan(*arguments) for scan in convolution.scans])
        convolution.scans[convolution.large](*arguments)

    def list_most_sites(self, total):
        """-> sites: their first rows are the output sites, in a buffer made for the worst case, which is not waited
        for unless it would take gigabytes: of candidates most are the same few outputs."""
        size = self.most * self.indices.shape[1] * self.indices.element_size()
        sites = self.new_sites(self.count() if size > MAX_UNCOUNTED else self.most)
        self.list_sites(sites, total, None)
        return sites

    @property
    def ranks(self):
        return self.zeros, self.convolution.words


class SortedSites:
    """The same for an output grid that no bitmap can hold: its outputs are sorted."""

    index = None

    def __init__(self, indices, convolution, owners=None, scratch=None):
        self.indices, self.convolution = indices, convolution
        device, count, candidates = indices.device, indices.shape[0], convolution.candidates
        self.owners = _owners(indices, convolution, owners)
        keys = torch.empty(candidates * count, dtype=torch.int64, device=device)
        convolution.candidate_keys((cdiv(count, 1024), candidates), indices, keys, count)
        keys = keys.sort().values
        first = torch.ones_like(keys, dtype=torch.bool)
        first[1:] = keys[1:] != keys[:-1]
        first &= keys != NO_SITE.value
        before = first.cumsum(0)
        distinct = torch.full((len(keys) + 1,), NO_SITE.value, dtype=torch.int64, device=device)
        # What is not the first of its kind goes to one place behind the others, which is then cut off.
        distinct.scatter_(0, torch.where(first, before - 1, len(keys)), keys)
        self.distinct, self.total = distinct[:-1], before[-1:]

    def count(self):
        return int(self.total)

    def list_sites(self, sites, total, inputs):
        columns, rest = [], self.distinct[: sites.shape[0]]
        active = rest != NO_SITE.value
        for size in reversed(self.convolution.out_shape[-self.convolution.dimensions :]):
            columns.append(rest % size)
            rest = rest.div(size, rounding_mode="floor")
        listed = torch.where(active[:, None], torch.stack([rest, *reversed(columns)], 1), -1)
        sites.fill_(-1)
        sites[: listed.shape[0]] = listed.to(sites.dtype)
        total.copy_(self.total, non_blocking=True)
        if inputs is not None:
            inputs.fill_(-1)

    def list_most_sites(self, total):
        sites = self.indices.new_empty((len(self.distinct), self.indices.shape[1]))
        self.list_sites(sites, total, None)
        return sites

    @property
    def ranks(self):
        return self.distinct, len(self.distinct)


def output_sites(indices, convolution, owners=None, scratch=None):
    return (OutputSites if convolution.by_bitmap else SortedSites)(indices, convolution, owners, scratch)


def neighbor_tables(found, rows, total, both):
    """-> sites [rows, 1 + D], inputs int32 [K, rows], outputs int32 [K, L], or [K, 0] without `both`; -1 behind the
    outputs there are, and for those that there is no room for. `total` int32 [1] takes the true number."""
    sites = found.indices.new_empty((rows, found.indices.shape[1]))
    inputs = torch.empty((found.convolution.volume, rows), dtype=torch.int32, device=sites.device)
    found.list_sites(sites, total, inputs)
    convolution = found.convolution
    kernel = convolution.rank_and_invert if both else convolution.invert
    return sites, inputs, _rank(kernel, INVERT_BLOCK, found, *found.ranks, inputs, rows, both)


def output_table(found):
    """-> outputs int32 [K, L], and how many of every GRAIN entries there are: int32 [K, blocks]."""
    shape = found.convolution.volume, cdiv(found.indices.shape[0], GRAIN)
    counts = torch.empty(shape, dtype=torch.int32, device=found.indices.device)
    return _rank(found.convolution.rank, GRAIN, found, *found.ranks, counts, MOST_ROWS, True), counts


def _owners(indices, convolution, owners):
    """Of a caller who knows them; else a hash tells. In a small grid, see `OutputSites`, all rows of a site write to
    one place, whichever stands there is compared, and only a repeated site costs an atomic."""
    if owners is not None:
        owners = owners.contiguous()
        return Owners(owners, -1, owners, 0)
    found = SiteHash(indices, convolution.batch_size, convolution.shape, 0, 1)
    found.insert()
    return Owners(found.scratch, 1 << found.bits, found.zeros32, found.start)


def _rank(kernel, block, found, ranks, length, second, rows, kept):
    owners, convolution = found.owners, found.convolution
    count = found.indices.shape[0]
    outputs = torch.empty((convolution.volume, count if kept else 0), dtype=torch.int32, device=ranks.device)
    kernel(
        (cdiv(count, block), convolution.volume // convolution.taps),
        found.indices, ranks, owners.rows, owners.repeats, outputs, second, owners.slots_at, owners.repeats_at, count,
        length, rows,
    )  # fmt: skip
    return outputs


@triton.jit
def _out_size(size, AXES: tl.constexpr, A: tl.constexpr, TRANSPOSE: tl.constexpr):
    """Of the output grid along one axis; see `geometry.output_shape`."""
    size = tl.cast(size, tl.int64)
    if TRANSPOSE:
        size = (size - 1) * AXES[A][1] + (AXES[A][3] * (AXES[A][0] - 1) + AXES[A][4] + 1 - 2 * AXES[A][2])
    else:
        size = (size + (2 * AXES[A][2] - AXES[A][3] * (AXES[A][0] - 1) - 1)) // AXES[A][1] + 1
    return size.to(tl.int32)


@triton.jit
def _nth_place(v, j, size, AXES: tl.constexpr, A: tl.constexpr, TRANSPOSE: tl.constexpr):
    """The j-th output place that coordinate v meets under any offset. -> the place, whether there is one"""
    KERNEL: tl.constexpr = AXES[A][0]
    STEP: tl.constexpr = AXES[A][6]
    k = j
    if not TRANSPOSE:
        k = ((v + AXES[A][2]) // AXES[A][5] % STEP) * AXES[A][7] % STEP + j * STEP
    place, valid = _place_under(v, k, size, AXES, A, TRANSPOSE)
    return place, valid & (k < KERNEL)


@triton.jit
def _place_under(v, k, size, AXES: tl.constexpr, A: tl.constexpr, TRANSPOSE: tl.constexpr):
    """The output place that coordinate v meets under offset k. -> the place, whether there is one"""
    STRIDE: tl.constexpr = AXES[A][1]
    PADDING: tl.constexpr = AXES[A][2]
    DILATION: tl.constexpr = AXES[A][3]
    if TRANSPOSE:
        place = v * STRIDE - PADDING + k * DILATION
        valid = place >= 0
    else:
        left = v + PADDING - k * DILATION
        place = left // STRIDE
        valid = (left >= 0) & (place * STRIDE == left)
    return place, valid & (place < _out_size(size, AXES, A, TRANSPOSE))


@triton.jit
def _flat_row(b, t, z, y, T, Z, Y, AXES: tl.constexpr, TRANSPOSE: tl.constexpr):
    """Which row (all axes but x) of the output grid."""
    row = b * _out_size(T, AXES, 0, TRANSPOSE) + t
    row = row * _out_size(Z, AXES, 1, TRANSPOSE) + z
    return row * _out_size(Y, AXES, 2, TRANSPOSE) + y


@triton.jit
def _nth_row(b, t, z, y, r, T, Z, Y, AXES: tl.constexpr, TRANSPOSE: tl.constexpr):
    """The r-th output row (all axes but x) that sites meet under any offset. -> the row, whether there is one"""
    MZ: tl.constexpr = AXES[1][8]
    MY: tl.constexpr = AXES[2][8]
    py, vy = _nth_place(y, r % MY, Y, AXES, 2, TRANSPOSE)
    pz, vz = _nth_place(z, r // MY % MZ, Z, AXES, 1, TRANSPOSE)
    pt, vt = _nth_place(t, r // (MY * MZ), T, AXES, 0, TRANSPOSE)
    return _flat_row(b, pt, pz, py, T, Z, Y, AXES, TRANSPOSE), vy & vz & vt


@triton.jit
def _load_inputs(indices, i, valid, batch, T, Z, Y, X, D: tl.constexpr, LONG: tl.constexpr):
    """-> inside, b, t, z, y, x of rows i, as int64 where the arithmetic needs it."""
    inside, b, t, z, y, x = load_site(indices, i, valid, batch, T, Z, Y, X, D)
    if LONG:
        b, t, z, y, x = b.to(tl.int64), t.to(tl.int64), z.to(tl.int64), y.to(tl.int64), x.to(tl.int64)
    return inside, b, t, z, y, x


@_gpu.kernel(unaligned=("owners",))
def _mark_kernel(
    indices, zeros32, owners, words, chunk_bits, slots_at, count, batch, T, Z, Y, X,
    ROWS: tl.constexpr, TILE: tl.constexpr, TAPS: tl.constexpr, BLOCK: tl.constexpr,
    D: tl.constexpr, AXES: tl.constexpr, TRANSPOSE: tl.constexpr, LONG: tl.constexpr,
):  # fmt: skip
    """Set the bits of the outputs of BLOCK sites in TILE output rows each; count those newly set by chunk.

    Most outputs are met by several sites, so a look comes before the atomic; an old view only costs one too many.
    """
    totals = zeros32 + 2 * tl.cast(words, tl.int64)
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside, b, t, z, y, x = _load_inputs(indices, i, i < count, batch, T, Z, Y, X, D, LONG)
    q = tl.program_id(1) * TILE + tl.arange(0, TILE)[:, None]
    MX: tl.constexpr = AXES[3][8] // TAPS  # 1, or every tap along x has a row of its own
    row, valid = _nth_row(b[None, :], t[None, :], z[None, :], y[None, :], q // MX, T, Z, Y, AXES, TRANSPOSE)
    valid = valid & inside[None, :] & (q < ROWS)
    row = row * _out_size(X, AXES, 3, TRANSPOSE)
    nearest, bits = _bit_of(x[None, :], row, valid, q % MX, X, AXES, 3, TRANSPOSE)
    home = nearest >> 5
    # The taps along x mostly fall into one word: one atomic for those, one more for each of the others.
    for c in tl.static_range(1, TAPS):
        flat, bit = _bit_of(x[None, :], row, valid, c, X, AXES, 3, TRANSPOSE)
        bits = bits | tl.where((flat >> 5) == home, bit, 0)
    standing = tl.load(zeros32 + 2 * home, mask=bits != 0, other=0).to(tl.uint32, bitcast=True)
    if (slots_at >= 0) & (tl.program_id(1) == 0):
        own = (((b * T + t) * Z + z) * Y + y) * X + x
        tl.store(owners + own, i, mask=inside)
        tl.store(owners + slots_at + i, tl.where(inside, own, -1).to(tl.int32), mask=i < count)
    missing = (bits & standing) != bits
    before = tl.atomic_or(zeros32 + 2 * home, bits.to(tl.int32, bitcast=True), mask=missing, sem="relaxed")
    for c in tl.static_range(1, TAPS):
        flat, bit = _bit_of(x[None, :], row, valid, c, X, AXES, 3, TRANSPOSE)
        word = flat >> 5
        far = (word != home) & (bit != 0)
        stood = tl.atomic_or(zeros32 + 2 * word, bit.to(tl.int32, bitcast=True), mask=far, sem="relaxed")
        fresh_far = far & ((stood.to(tl.uint32, bitcast=True) & bit) == 0)
        tl.atomic_add(totals + (word >> chunk_bits), 1, mask=fresh_far, sem="relaxed")
    fresh = popcount(tl.where(missing, bits ^ (bits & before.to(tl.uint32, bitcast=True)), 0))
    tl.atomic_add(totals + (home >> chunk_bits), fresh, mask=fresh > 0, sem="relaxed")


@triton.jit
def _bit_of(x, row, valid, j, X, AXES: tl.constexpr, A: tl.constexpr, TRANSPOSE: tl.constexpr):
    """The j-th output along x that sites meet in a row. -> its flat index, its bit in its word or 0"""
    place, there = _nth_place(x, j, X, AXES, A, TRANSPOSE)
    flat = row + place
    one = tl.full(flat.shape, 1, tl.uint32)
    return flat, tl.where(valid & there, one << (flat & 31).to(tl.uint32), 0)


@_gpu.kernel(unaligned=("owners",))
def _scan_kernel(
    zeros32, owners, sites, total, inputs, slots_at, words, chunk_bits, settled, cleared, rows, entries: tl.int64,
    count, OT, OZ, OY, OX, D: tl.constexpr, CHUNKS: tl.constexpr, WORDS: tl.constexpr, FILL: tl.constexpr,
):  # fmt: skip
    """The programs share four tasks: ranks and sites of a chunk; which of several rows at a site is the lowest; -1 for
    the rows of `sites` behind the last output; -1 for `inputs`."""
    p = tl.program_id(0)
    chunks = (words + (1 << chunk_bits) - 1) >> chunk_bits
    totals = zeros32 + 2 * tl.cast(words, tl.int64)
    if p < chunks:
        before, everything = _outputs_before(totals, p, chunks, CHUNKS)
        if p == 0:
            tl.store(total, everything)
        _scan_chunk(p, before, zeros32, sites, words, chunk_bits, rows, OT, OZ, OY, OX, D, WORDS)
    elif p < chunks + settled:
        i = (p - chunks) * SETTLE_BLOCK + tl.arange(0, SETTLE_BLOCK)
        slot = tl.load(owners + slots_at + i, mask=i < count, other=-1)
        active = slot >= 0
        owner = tl.load(owners + slot, mask=active, other=0)
        tl.atomic_min(owners + slot, i, mask=active & (owner > i), sem="relaxed")
        repeated = tl.sum((active & (owner != i)).to(tl.int32), 0)
        if repeated > 0:
            tl.atomic_add(totals + chunks, repeated, sem="relaxed")
    elif p < chunks + settled + cleared:
        _, everything = _outputs_before(totals, p, chunks, CHUNKS)
        e = (p - chunks - settled).to(tl.int64) * FILL + tl.arange(0, FILL)
        row = e // (1 + D)
        tl.store(sites + e, tl.full((FILL,), -1, sites.dtype.element_ty), mask=(row >= everything) & (row < rows))
    else:
        e = (p - chunks - settled - cleared).to(tl.int64) * FILL + tl.arange(0, FILL)
        whole = (p - chunks - settled - cleared + 1).to(tl.int64) * FILL <= entries
        store_run(inputs + e, tl.full((FILL,), -1, tl.int32), e < entries, whole)


@triton.jit
def _outputs_before(totals, p, chunks, CHUNKS: tl.constexpr):
    """-> how many outputs the chunks before chunk p have, and all of them"""
    e = tl.arange(0, CHUNKS)
    sums = tl.load(totals + e, mask=e < chunks, other=0)
    return tl.sum(tl.where(e < p, sums, 0), 0), tl.sum(sums, 0)


@triton.jit
def _scan_chunk(
    p, before, zeros32, sites, words, chunk_bits, rows, OT, OZ, OY, OX, D: tl.constexpr, WORDS: tl.constexpr
):
    """ranks[w] = outputs before word w << 32 | its bits; the sites of one chunk."""
    for first in range(p << chunk_bits, (p + 1) << chunk_bits, WORDS):
        w = first + tl.arange(0, WORDS)
        bits = tl.load(zeros32 + 2 * w, mask=w < words, other=0).to(tl.uint32, bitcast=True)
        n = popcount(bits)
        base = before + tl.cumsum(n, 0) - n
        before += tl.sum(n, 0)
        tl.store(zeros32 + 2 * w + 1, base, mask=w < words)
        if (tl.max(n, 0) > 0) & (rows > 0):
            e32 = tl.arange(0, 32)[None, :]
            below = (tl.full((1, 32), 1, tl.uint32) << e32.to(tl.uint32)) - 1
            row = base[:, None] + popcount(bits[:, None] & below)
            hit = (((bits[:, None] >> e32.to(tl.uint32)) & 1) != 0) & (row < rows)
            at = sites + row.to(tl.int64) * (1 + D)
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


@_gpu.kernel(unaligned=("owners", "repeats"))
def _rank_kernel(
    indices, ranks, owners, repeats, outputs, second, slots_at, repeats_at, count, length, rows, batch, T, Z, Y, X,
    KEPT: tl.constexpr, INVERT: tl.constexpr, BLOCK: tl.constexpr, SEARCHED: tl.constexpr, TAPS: tl.constexpr,
    D: tl.constexpr, AXES: tl.constexpr, TRANSPOSE: tl.constexpr, LONG: tl.constexpr,
):  # fmt: skip
    """outputs[k, i] for BLOCK sites and one row of TAPS offsets, stored if KEPT. SEARCHED: ranks are sorted sites.

    second: with INVERT inputs int32 [K, rows], which takes i at [k, outputs[k, i]]; else counts int32 [K, blocks],
    which takes how many of every BLOCK sites have an output.
    """
    r = tl.program_id(1)
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    valid = i < count
    inside, b, t, z, y, x = _load_inputs(indices, i, valid, batch, T, Z, Y, X, D, LONG)
    if slots_at < 0:
        inside = inside & (tl.load(owners + i, mask=inside, other=-1) == i)
    elif tl.load(repeats + repeats_at) > 0:
        slot = tl.load(owners + slots_at + i, mask=inside, other=0)
        inside = inside & (tl.load(owners + slot, mask=inside, other=-1) == i)
    KZ: tl.constexpr = AXES[1][0]
    KY: tl.constexpr = AXES[2][0]
    KX: tl.constexpr = AXES[3][0] // TAPS  # 1, or every tap along x has a row of its own
    q = r // KX
    py, vy = _place_under(y, q % KY, Y, AXES, 2, TRANSPOSE)
    pz, vz = _place_under(z, q // KY % KZ, Z, AXES, 1, TRANSPOSE)
    pt, vt = _place_under(t, q // (KY * KZ), T, AXES, 0, TRANSPOSE)
    row = _flat_row(b, pt, pz, py, T, Z, Y, AXES, TRANSPOSE) * _out_size(X, AXES, 3, TRANSPOSE)
    inside = inside & vy & vz & vt
    # Three taps at a time: all loads before the stores, which would wait for them one by one.
    for c in tl.static_range(0, TAPS, 3):
        first = r % KX + c
        hit0, rank0 = _rank_under(ranks, length, rows, row, x, first, inside, X, SEARCHED, AXES, TRANSPOSE)
        more = inside & (c + 1 < TAPS)
        hit1, rank1 = _rank_under(ranks, length, rows, row, x, first + 1, more, X, SEARCHED, AXES, TRANSPOSE)
        more = inside & (c + 2 < TAPS)
        hit2, rank2 = _rank_under(ranks, length, rows, row, x, first + 2, more, X, SEARCHED, AXES, TRANSPOSE)
        k = (r * TAPS + c).to(tl.int64)
        _store_ranks(outputs, second, k, i, valid, hit0, rank0, count, rows, KEPT, INVERT)
        if c + 1 < TAPS:
            _store_ranks(outputs, second, k + 1, i, valid, hit1, rank1, count, rows, KEPT, INVERT)
        if c + 2 < TAPS:
            _store_ranks(outputs, second, k + 2, i, valid, hit2, rank2, count, rows, KEPT, INVERT)


@triton.jit
def _rank_under(
    ranks, length, rows, row, x, k, inside, X, SEARCHED: tl.constexpr, AXES: tl.constexpr, TRANSPOSE: tl.constexpr
):
    """The output row that a site meets under tap k along x. -> whether there is one below `rows`, the row or -1"""
    place, there = _place_under(x, k, X, AXES, 3, TRANSPOSE)
    there = there & inside
    if SEARCHED:
        rank = _search(ranks, length, row + place, there)
    else:
        _, rank = rank_of(ranks, row + place, there)
    there = there & (rank < rows)
    return there, tl.where(there, rank, -1)


@triton.jit
def _store_ranks(
    outputs, second, k, i, valid, hit, rank, count, rows, KEPT: tl.constexpr, INVERT: tl.constexpr
):  # fmt: skip
    if KEPT:
        tl.store(outputs + k * count + i, rank, mask=valid)
    if INVERT:
        tl.store(second + k * rows + rank, i, mask=hit)
    else:
        tl.store(second + k * tl.num_programs(0) + tl.program_id(0), tl.sum(hit.to(tl.int32), 0))


@triton.jit
def _search(keys, length, wanted, mask):
    """The place of each wanted key, which is there, among ascending keys."""
    low = tl.zeros(wanted.shape, tl.int64)
    high = low + length
    left = tl.cast(length, tl.int64)  # as many steps as it has bits
    while left > 0:
        left = left >> 1
        middle = (low + high) >> 1
        less = tl.load(keys + middle, mask=mask & (middle < high), other=NO_SITE) < wanted
        low = tl.where(less & (low < high), middle + 1, low)
        high = tl.where(less, high, middle)
    return low.to(tl.int32)


@_gpu.kernel
def _candidates_kernel(
    indices, keys, count, batch, T, Z, Y, X,
    BLOCK: tl.constexpr, D: tl.constexpr, AXES: tl.constexpr, TRANSPOSE: tl.constexpr, LONG: tl.constexpr,
):  # fmt: skip
    """Flat indices of all outputs that a site may meet, NO_SITE where there is none."""
    q = tl.program_id(1)
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside, b, t, z, y, x = _load_inputs(indices, i, i < count, batch, T, Z, Y, X, D, True)
    MX: tl.constexpr = AXES[3][8]
    row, valid = _nth_row(b, t, z, y, q // MX, T, Z, Y, AXES, TRANSPOSE)
    place, there = _nth_place(x, q % MX, X, AXES, 3, TRANSPOSE)
    flat = tl.where(inside & valid & there, row * _out_size(X, AXES, 3, TRANSPOSE) + place, NO_SITE)
    tl.store(keys + q.to(tl.int64) * count + i, flat, mask=i < count)
