"""nms of few boxes in one launch of one program: it sorts, suppresses and lists what stays.

A box's place in the order is the number of boxes before it, counted by comparing it with all: quicker than a sort at
these sizes, and stable for every dtype. The boxes are then settled 64 at a time, and only those that stay are compared
with the ones behind.
"""

import torch
import triton
import triton.language as tl

from triops import _gpu
from triops._gpu.arithmetic import from_bits
from triops.ops.nms.boxes_gpu import (
    free_of_block,
    iou,
    load_box,
    load_fields,
    lowest_bit,
    places_of,
    settle,
    store_fields,
)

MOST = 128  # boxes: beyond, chunks are over sooner where most boxes stay
KEPT = tl.constexpr(4)  # boxes that stay, with which the others are compared at a time: their loads go out together
COMPARED = tl.constexpr(8)  # scores at a time, whose loads go out together


def launch_single(boxes, scores, labels, iou_threshold, offset, real, counter):
    """-> int64 [N] that begins with the kept boxes; how many is in `counter` once the kernel is through."""
    count = len(scores)
    out = torch.empty(count, dtype=torch.int64, device=boxes.device)
    scratch = torch.empty((7 if labels is None else 8, MOST), dtype=torch.int64, device=boxes.device)
    _single_kernel[(1,)](
        boxes, scores, out if labels is None else labels, out, scratch, counter, count, _gpu.bits_of(iou_threshold),
        GROUPED=labels is not None, OFFSET=offset, REAL=real, LANES=MOST, num_warps=8, enable_fp_fusion=False,
    )  # fmt: skip
    return out


@triton.jit
def _sort_key(score):
    """An integer that orders as scores do: 0 and -0 equal, NaN above all."""
    if score.dtype == tl.float64:
        bits = tl.where(score == 0, 0.0, score).to(tl.int64, bitcast=True)
        key = bits ^ ((bits >> 63) & 0x7FFFFFFFFFFFFFFF)
        key = tl.where(score == score, key, 0x7FFFFFFFFFFFFFFF)
    else:
        wide = score.to(tl.float32)
        bits = tl.where(wide == 0, 0.0, wide).to(tl.int32, bitcast=True)
        key = bits ^ ((bits >> 31) & 0x7FFFFFFF)
        key = tl.where(wide == wide, key, 0x7FFFFFFF)
    return key


@triton.jit
def _droppers(fields, groups, i, threshold, GROUPED: tl.constexpr, OFFSET: tl.constexpr, STEP: tl.constexpr):
    """int64 [64]: for each box `i` a bit per box before it, of these 64, that would drop it."""
    a_x1, a_y1, a_x2, a_y2, a_area = load_fields(fields, i[None, :], STEP)
    b_x1, b_y1, b_x2, b_y2, b_area = load_fields(fields, i[:, None], STEP)
    drops = iou(a_x1, a_y1, a_x2, a_y2, a_area, b_x1, b_y1, b_x2, b_y2, b_area, OFFSET) > threshold
    if GROUPED:
        drops &= tl.load(groups + i[None, :]) == tl.load(groups + i[:, None])
    bit = tl.full((64,), 1, tl.int64) << tl.arange(0, 64).to(tl.int64)
    return tl.sum(tl.where(drops & (i[None, :] < i[:, None]), bit[None, :], 0), 1)


@_gpu.kernel
def _single_kernel(
    boxes, scores, labels, out, scratch, counter, count, threshold_bits: tl.int64,
    GROUPED: tl.constexpr, OFFSET: tl.constexpr, REAL: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    DOUBLE: tl.constexpr = scores.dtype.element_ty == tl.float64
    KEY: tl.constexpr = tl.int64 if DOUBLE else tl.int32
    LOWEST: tl.constexpr = -(2**63) if DOUBLE else -(2**31)
    lane = tl.arange(0, LANES)
    inside = lane < count
    order = scratch
    keys = (scratch + LANES).to(tl.pointer_type(KEY))
    fields = (scratch + 2 * LANES).to(tl.pointer_type(REAL))
    groups = scratch + 7 * LANES
    threshold = from_bits(threshold_bits, REAL)

    key = _sort_key(tl.load(scores + lane, inside, 0.0))
    tl.store(keys + lane, tl.where(inside, key, LOWEST))  # what is not there comes before nothing
    tl.debug_barrier()
    place = tl.zeros((LANES,), tl.int32)
    for first in range(0, count, COMPARED):
        for step in tl.static_range(COMPARED):
            j = first + step
            other = tl.load(keys + j)
            place += ((other > key) | ((other == key) & (j < lane))).to(tl.int32)
    tl.store(order + place, lane.to(tl.int64), inside)
    tl.debug_barrier()
    source = tl.load(order + lane, inside, 0)
    x1, y1, x2, y2, area = load_box(boxes, source, inside, OFFSET, REAL)
    store_fields(fields, lane, LANES, x1, y1, x2, y2, area, lane < LANES)  # blocks of 64 are read whole
    if GROUPED:
        group = tl.load(labels + source, inside, 0).to(tl.int64)
        tl.store(groups + lane, group)
    tl.debug_barrier()

    gone = tl.where(inside, 0, 1)
    found = count * 0
    for block in range(0, (count + 63) // 64):
        i = block * 64 + tl.arange(0, 64)
        index = tl.load(order + i, i < count, 0)
        free = free_of_block(gone, lane, block)
        stays = settle(_droppers(fields, groups, i, threshold, GROUPED, OFFSET, LANES), free)
        places, staying = places_of(stays, found)
        tl.store(out + places, index, staying)
        found += tl.sum(staying.to(tl.int32), 0)
        left = stays
        while left != 0:
            for _ in tl.static_range(KEPT):
                # Where none is left, the lowest bit lies below 0, and box 0 is compared for nothing.
                one = tl.maximum(block * 64 + lowest_bit(left), 0)
                kept_x1, kept_y1, kept_x2, kept_y2, kept_area = load_fields(fields, one, LANES)
                ratio = iou(kept_x1, kept_y1, kept_x2, kept_y2, kept_area, x1, y1, x2, y2, area, OFFSET)
                hit = tl.where(left != 0, (ratio > threshold).to(tl.int32), 0)
                if GROUPED:
                    hit = tl.where(tl.load(groups + one) == group, hit, 0)
                gone |= hit
                left &= left - 1
    tl.store(counter, found)
