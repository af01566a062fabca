"""What the kernels of nms share: upright boxes, their overlap, words of 64 bits, and which boxes a program compares."""

import triton
import triton.language as tl

from triops._gpu.arithmetic import divide, popcount


@triton.jit
def load_box(boxes, i, mask, OFFSET: tl.constexpr, REAL: tl.constexpr):
    """x1, y1, x2, y2, area. A box that is not finite becomes one that meets no other."""
    field = boxes + i * 4
    x1 = tl.load(field, mask, 0.0).to(REAL)
    y1 = tl.load(field + 1, mask, 0.0).to(REAL)
    x2 = tl.load(field + 2, mask, 0.0).to(REAL)
    y2 = tl.load(field + 3, mask, 0.0).to(REAL)
    finite = ((x1 - x1) + (y1 - y1)) + ((x2 - x2) + (y2 - y2)) == 0
    area = (x2 - x1 + OFFSET) * (y2 - y1 + OFFSET)
    x1 = tl.where(finite, x1, float("inf"))
    x2 = tl.where(finite, x2, float("-inf"))
    return x1, tl.where(finite, y1, 0.0), x2, tl.where(finite, y2, 0.0), tl.where(finite, area, 0.0)


@triton.jit
def store_fields(fields, i, step, x1, y1, x2, y2, area, mask):
    """One array per field, `step` elements apart."""
    at = fields + i
    tl.store(at, x1, mask)
    tl.store(at + step, y1, mask)
    tl.store(at + 2 * step, x2, mask)
    tl.store(at + 3 * step, y2, mask)
    tl.store(at + 4 * step, area, mask)


@triton.jit
def load_fields(fields, i, step):
    at = fields + i
    return (
        tl.load(at), tl.load(at + step), tl.load(at + 2 * step), tl.load(at + 3 * step), tl.load(at + 4 * step)
    )  # fmt: skip


@triton.jit
def shared_area(x1, y1, x2, y2, area, other_x1, other_y1, other_x2, other_y2, other_area, OFFSET: tl.constexpr):
    """-> of the intersection, not above 0 where there is none; and of the union where there is one"""
    width = tl.minimum(x2, other_x2) - tl.maximum(x1, other_x1)
    height = tl.minimum(y2, other_y2) - tl.maximum(y1, other_y1)
    if OFFSET:
        width += OFFSET
        height += OFFSET
    inter = tl.maximum(width, 0.0) * height
    base = area + other_area - inter  # without an offset never below 0: no area is below that of the intersection
    if OFFSET:
        base = tl.where(base < OFFSET, OFFSET * 1.0, base)  # keeps NaN, which tl.maximum would drop
    return inter, base


@triton.jit
def iou(x1, y1, x2, y2, area, other_x1, other_y1, other_x2, other_y2, other_area, OFFSET: tl.constexpr):
    """As `bbox_overlaps`, with the division by the rules of IEEE."""
    inter, base = shared_area(x1, y1, x2, y2, area, other_x1, other_y1, other_x2, other_y2, other_area, OFFSET)
    ratio = divide(inter, base)
    return tl.where((inter > 0) & (ratio > 0), ratio, 0.0)  # boxes of negative size have quotients of two negatives


@triton.jit
def lowest_bit(word):
    """The place of the lowest bit that is set in a 64-bit word; of a word of 0, a number below 0."""
    power = (word & (0 - word)).to(tl.float32).to(tl.int32, bitcast=True)
    return ((power >> 23) & 255) - 127


@triton.jit
def first_bits(n):
    """A 64-bit word whose lowest n bits are set: none below 0, all from 64 on."""
    some = (tl.full(n.shape, 1, tl.int64) << tl.minimum(tl.maximum(n, 0), 63).to(tl.int64)) - 1
    return tl.where(n >= 64, tl.full(n.shape, -1, tl.int64), some)


@triton.jit
def count_bits(word):
    return popcount(word & 0xFFFFFFFF) + popcount((word >> 32) & 0xFFFFFFFF)


@triton.jit
def settle(droppers, free):
    """Which of 64 boxes in a row stay: those `free` that none which stays drops, as a word.

    droppers: int64 [64], for each box a bit per box before it that drops it. "A box stays if none that stays drops
    it" is repeated until nothing changes, which takes as many rounds as the longest chain and leaves the only answer.
    """
    bit = tl.full((64,), 1, tl.int64) << tl.arange(0, 64).to(tl.int64)
    stays = free
    changed = free != 0
    while changed:
        hit = tl.sum(tl.where((droppers & stays) != 0, bit, 0), 0)
        now = free & ~hit
        changed = now != stays
        stays = now
    return stays


@triton.jit
def free_of_block(gone, lane, block):
    """The boxes of block `block` (64 to a block) that are not `gone` yet, as a word."""
    bit = tl.full(lane.shape, 1, tl.int64) << (lane % 64).to(tl.int64)
    return tl.sum(tl.where((lane // 64 == block) & (gone == 0), bit, 0), 0)


@triton.jit
def places_of(stays, found):
    """Where the staying ones of a block go, in a list that holds `found`. -> places [64], which stay [64]"""
    bit = tl.arange(0, 64)
    before = count_bits(stays & first_bits(bit))
    return found + before, ((stays >> bit.to(tl.int64)) & 1) != 0


@triton.jit
def comparisons(state, dropped, start, stop, count, BEHIND: tl.constexpr, LANES: tl.constexpr, CHUNK: tl.constexpr):
    """LANES boxes against 64 that come before. Boxes lie in order of the scores; `start` to `stop` is the chunk.

    BEHIND: the ones before are kept boxes of the chunk, the lanes boxes behind it. Else both are of the chunk.
    -> number of the block of 64, the lanes' boxes, the first one before, how many there are from it on, how many of
    them come before each lane's (not above 0: none), and above 0 if there is anything to do
    """
    if BEHIND:
        tiles = tl.maximum((count - stop + LANES - 1) // LANES, 1)
        number = tl.program_id(0) // tiles
        lane = stop + (tl.program_id(0) % tiles) * LANES + tl.arange(0, LANES)
        first = tl.load(state) + number * 64
        existing = tl.load(state + 1) - first
        waiting = (tl.load(dropped + lane, lane < count, 1) == 0) & (lane * 0 + existing > 0)
        going = tl.max(waiting.to(tl.int32), 0)
        before = tl.where(waiting, existing, 0)
    else:
        TILES: tl.constexpr = CHUNK // LANES
        number = tl.program_id(0) // TILES
        lane = start + (tl.program_id(0) % TILES) * LANES + tl.arange(0, LANES)
        first = start + number * 64
        existing = stop - first
        before = tl.where(lane < stop, lane - first, -1)
        going = tl.max(before, 0) + 1  # box `first` itself has a word too
    return number, lane, first, existing, before, going
