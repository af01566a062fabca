"""Submanifold neighbors on GPU: every site looks for its neighbors, by a ranked bitmap of the sites or by a hash.

A strided convolution leaves its outputs in ascending order together with a ranked bitmap of them, which answers any
look-up: the rank of a place is its row. Sites in any order go into a hash of words along x (see `_gpu.site_hash`); the
outer places of a word repeat those of the words beside it, so that one look-up answers all taps of a kernel row: 9
look-ups per site instead of 27. Where the reach along x is too far for that, every tap is looked up by itself.
"""

import math
from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from triops import _gpu
from triops._gpu import cdiv, next_power_of_2
from triops._gpu.launch import HIGHEST_INT32
from triops._gpu.site_hash import SiteHash, find, load_site, parts, probe, word_key
from triops.ops.rulebook.bitmap_gpu import rank_of
from triops.ops.rulebook.strided_gpu import GRAIN

MAX_TAPS = 8  # along x, that one program takes together
# Places per word of the hash. Small words take half the memory and, on an H200, 6 % more time; 8 places 18 % more.
SMALL_WORD, LARGE_WORD = 16, 32
# One warp per program: a block waits for its longest chain of probes.
LOOKUP_BLOCK, LOOKUP_WARPS = _gpu.block(64, interpreted=512), 1  # below 1,024: three sums share an integer
RANK_BLOCK, RANK_WARPS = _gpu.block(256, interpreted=512), 4
HIGHEST = tl.constexpr(HIGHEST_INT32)
ROWS_PER_PROGRAM = _gpu.block(1, interpreted=8)  # of offsets


class Neighborhood(NamedTuple):
    """What the parameters settle, on four axes."""

    shape: tuple[int, ...]
    reach: int  # of the kernel along x
    volume: int
    axes: tuple[tuple[int, int], ...]  # kernel and dilation of every axis

    def offset_rows(self, taps):
        """-> how many rows of `taps` offsets there are, the launch's groups of them, and the kernels' constants."""
        rows = self.volume // taps
        tile = min(ROWS_PER_PROGRAM, next_power_of_2(rows))
        constants = {"ROWS": rows, "TILE": tile, "TAPS": taps, "AXES": self.axes}
        return cdiv(rows, tile), constants


@cache
def _neighborhood(shape, kernel_size, dilation):
    front = (1,) * (4 - len(shape))
    axes = tuple(zip((*front, *kernel_size), (*front, *dilation), strict=True))
    return Neighborhood((*front, *shape), kernel_size[-1] // 2 * dilation[-1], math.prod(kernel_size), axes)


def submanifold_table(indices, batch_size, shape, kernel_size, dilation, copy=None, counts=False):
    """-> neighbors int32 [K, L], and the hash: with `counts`, how many of each GRAIN sites have one: int32 [K, blocks]
    from zeros32[start + 2]. `copy` takes the sites as they are."""
    hood, count = _neighborhood(tuple(shape), tuple(kernel_size), tuple(dilation)), indices.shape[0]
    word = SMALL_WORD if hood.reach * 4 <= SMALL_WORD and not counts else LARGE_WORD
    halo = hood.reach if hood.reach * 4 <= word else 0  # at most half of a word's places are repeated ones
    groups, constants = hood.offset_rows(kernel_size[-1] if halo else 1)
    blocks = cdiv(count, GRAIN)
    found = SiteHash(indices, batch_size, hood.shape, halo, word, hood.volume * blocks if counts else 0)
    found.insert(copy)
    neighbors = torch.empty((hood.volume, count), dtype=torch.int32, device=indices.device)
    _lookup_kernel[(cdiv(count, LOOKUP_BLOCK), groups)](
        indices, found.zeros, found.zeros32, found.scratch, neighbors, found.bits, count, batch_size, *hood.shape,
        found.words, blocks,
        COUNT=counts, BLOCK=LOOKUP_BLOCK, GRAIN=GRAIN, **constants, LAYOUT=found.layout, num_warps=LOOKUP_WARPS,
    )  # fmt: skip
    return neighbors, found


def ranked_table(indices, batch_size, shape, kernel_size, dilation, ranks):
    """-> neighbors int32 [K, L] of ascending sites, whose ranked bitmap is `ranks` int64 [words]."""
    hood, count = _neighborhood(tuple(shape), tuple(kernel_size), tuple(dilation)), indices.shape[0]
    together = kernel_size[-1] <= MAX_TAPS and hood.reach <= HIGHEST_INT32
    groups, constants = hood.offset_rows(kernel_size[-1] if together else 1)
    neighbors = torch.empty((hood.volume, count), dtype=torch.int32, device=indices.device)
    _ranked_kernel[(cdiv(count, RANK_BLOCK), groups)](
        indices, ranks, neighbors, count, batch_size, *hood.shape,
        D=indices.shape[1] - 1, BLOCK=RANK_BLOCK, **constants, num_warps=RANK_WARPS,
    )  # fmt: skip
    return neighbors


@triton.jit
def _shifted(v, k, size, AXES: tl.constexpr, A: tl.constexpr):
    """v [1, BLOCK] under offset k [TILE, 1] of axis A. -> the place, whether the grid has it"""
    if AXES[A][0] == 1:  # an axis without taps costs nothing
        return v + k * 0, v + k * 0 >= 0
    else:
        if (AXES[A][0] // 2) * AXES[A][1] > HIGHEST:  # offsets would come round to places of the grid
            far = v.to(tl.int64) + (k - AXES[A][0] // 2).to(tl.int64) * AXES[A][1]
            inside = (far >= 0) & (far < size)
            return tl.where(inside, far, 0).to(tl.int32), inside
        else:
            place = v + (k - AXES[A][0] // 2) * AXES[A][1]
            return place, (place >= 0) & (place < size)


@triton.jit
def _under_row(r, t, z, y, x, T, Z, Y, X, TAPS: tl.constexpr, AXES: tl.constexpr):
    """Sites [BLOCK] under rows r [TILE] of offsets. -> whether the grid has the place, its t, z, y, x [TILE, BLOCK]

    x is that of the middle tap of TAPS.
    """
    KX: tl.constexpr = AXES[3][0] // TAPS  # 1, or every tap has a row of its own
    KY: tl.constexpr = AXES[2][0]
    KZ: tl.constexpr = AXES[1][0]
    r = r[:, None]
    py, vy = _shifted(y[None, :], r // KX % KY, Y, AXES, 2)
    pz, vz = _shifted(z[None, :], r // (KX * KY) % KZ, Z, AXES, 1)
    pt, vt = _shifted(t[None, :], r // (KX * KY * KZ), T, AXES, 0)
    if KX > 1:
        px, vx = _shifted(x[None, :], r % KX, X, AXES, 3)
    else:
        px, vx = x[None, :] + r * 0, vy
    return vt & vz & vy & vx, pt, pz, py, px


@_gpu.kernel
def _lookup_kernel(
    indices, zeros, zeros32, scratch, neighbors, bits, count, batch, T, Z, Y, X, words, blocks,
    COUNT: tl.constexpr, BLOCK: tl.constexpr, GRAIN: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr,
    TAPS: tl.constexpr, AXES: tl.constexpr, LAYOUT: tl.constexpr,
):  # fmt: skip
    """TILE rows of TAPS offsets for BLOCK sites."""
    HALO: tl.constexpr = LAYOUT[1]
    PAYLOAD: tl.constexpr = LAYOUT[2] - 2 * LAYOUT[1]
    masks, repeats, rows, home = parts(zeros32, scratch, bits, LAYOUT)
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    valid = i < count
    own = tl.load(home + i, mask=valid, other=-1)
    _, b, t, z, y, x = load_site(indices, i, valid, batch, T, Z, Y, X, LAYOUT[0])
    active = own >= 0
    if tl.load(repeats) > 0:  # then only the lowest row of a site has neighbors
        lowest = tl.load(rows + own.to(tl.int64) * LAYOUT[2] + x % PAYLOAD + HALO, mask=active, other=-1)
        active = active & (lowest == i)
    r = tl.program_id(1) * TILE + tl.arange(0, TILE)
    wanted, pt, pz, py, px = _under_row(r, t, z, y, x, T, Z, Y, X, TAPS, AXES)
    wanted = wanted & (r < ROWS)[:, None] & active[None, :]
    word = px // PAYLOAD
    key = word_key(b[None, :], pt, pz, py, T, Z, Y, words, word, LAYOUT[3])
    slot, step = probe(key, bits, LAYOUT[3])
    slot = tl.where((r == ROWS // 2)[:, None] & active[None, :], own[None, :], slot)  # known, in the middle row
    slot, present = find(zeros, masks, slot, step, key, wanted, bits, LAYOUT[3])

    bit = px - word * PAYLOAD + HALO
    rows += slot.to(tl.int64) * LAYOUT[2]
    counts = repeats + 2 + tl.program_id(0) * BLOCK // GRAIN
    # Three taps at a time: all loads before the stores, which would wait for them one by one.
    for c in tl.static_range(0, TAPS, 3):
        hit0, row0 = _tap(rows, wanted, present, bit, c, TAPS, AXES)
        hit1, row1 = _tap(rows, wanted, present, bit, c + 1, TAPS, AXES)
        hit2, row2 = _tap(rows, wanted, present, bit, c + 2, TAPS, AXES)
        k = (r * TAPS + c).to(tl.int64)
        at = neighbors + (k * count)[:, None] + i[None, :]
        real = (r < ROWS)[:, None] & valid[None, :]
        tl.store(at, row0, mask=real)
        if c + 1 < TAPS:
            tl.store(at + count, row1, mask=real)
        if c + 2 < TAPS:
            tl.store(at + count + count, row2, mask=real)
        if COUNT:
            sums = tl.sum(hit0.to(tl.int32) | (hit1.to(tl.int32) << 10) | (hit2.to(tl.int32) << 20), 1)
            for e in tl.static_range(3):
                if c + e < TAPS:
                    tl.atomic_add(counts + (k + e) * blocks, (sums >> (10 * e)) & 1023, mask=r < ROWS, sem="relaxed")


@triton.jit
def _tap(rows, wanted, present, bit, c: tl.constexpr, TAPS: tl.constexpr, AXES: tl.constexpr):
    """The row under tap c along x. -> whether there is one, the row or -1"""
    if c < TAPS:  # a single tap has a dilation of any size, which no place beside it could be reached by
        bit += (c - TAPS // 2) * AXES[3][1]
    hit = wanted & (c < TAPS) & (((present >> (bit & 31).to(tl.uint32)) & 1) != 0)
    return hit, tl.load(rows + bit, mask=hit, other=-1)


@_gpu.kernel
def _ranked_kernel(
    indices, ranks, neighbors, count, batch, T, Z, Y, X, D: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
    TILE: tl.constexpr, TAPS: tl.constexpr, AXES: tl.constexpr,
):  # fmt: skip
    """TILE rows of TAPS offsets for BLOCK sites. Whatever `ranks` holds, neighbors are rows or -1."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    valid = i < count
    inside, b, t, z, y, x = load_site(indices, i, valid, batch, T, Z, Y, X, D)
    r = tl.program_id(1) * TILE + tl.arange(0, TILE)
    wanted, pt, pz, py, px = _under_row(r, t, z, y, x, T, Z, Y, X, TAPS, AXES)
    wanted = wanted & (r < ROWS)[:, None] & inside[None, :]
    line = (((b[None, :] * T + pt) * Z + pz) * Y + py) * X
    real = (r < ROWS)[:, None] & valid[None, :]
    at = neighbors + ((r * TAPS).to(tl.int64) * count)[:, None] + i[None, :]
    for c in tl.static_range(TAPS):
        x_c = px + (c - TAPS // 2) * AXES[3][1]
        asked = wanted & (x_c >= 0) & (x_c < X)
        there, row = rank_of(ranks, line + x_c, asked)
        tl.store(at, tl.where(there & asked & (row >= 0) & (row < count), row, -1), mask=real)
        at += count
