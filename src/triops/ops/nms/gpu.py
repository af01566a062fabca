"""nms, nms_rotated, nms_quadri and soft_nms on GPU.

Few upright boxes take one launch (`single_gpu`). Else boxes go through in order of the scores, a chunk at a time, in
three kernels. The first writes for each box of the chunk a bit per box of the chunk before it that would drop it. The
second, one program, walks through 64 boxes at a time: it settles which of these stay, and marks what they drop further
on in the chunk. The third drops what the chunk's kept boxes drop behind it. So a pair of boxes of two chunks is only
looked at if the first is kept, and the bits take 2 MiB however many boxes there are. Nothing goes through the host but
the final count.

Few pairs overlap. So a thread first goes through 64 boxes with a test that lets through a few too many, and then
computes the overlaps of those alone.
"""

import torch
import triton
import triton.language as tl

from triops import _gpu
from triops._dtypes import compute_dtype
from triops._geometry.polygon.gpu import make_polygons
from triops._geometry.rotated.gpu import load_reach, load_shape, make_frames, near, overlap
from triops._gpu.arithmetic import from_bits
from triops._gpu.pinned import pinned_counter
from triops.ops.nms.boxes_gpu import (
    comparisons,
    first_bits,
    free_of_block,
    iou,
    load_box,
    load_fields,
    lowest_bit,
    places_of,
    settle,
    shared_area,
    store_fields,
)
from triops.ops.nms.quadri_gpu import launch_quadri_drops
from triops.ops.nms.reference import by_score
from triops.ops.nms.single_gpu import MOST as MOST_IN_ONE_LAUNCH
from triops.ops.nms.single_gpu import launch_single
from triops.ops.nms.soft_gpu import soft_nms

__all__ = ["nms", "nms_quadri", "nms_rotated", "soft_nms"]

INTERPRETED = tl.constexpr(_gpu.INTERPRETED)
CHUNK = _gpu.block(4096, interpreted=512)
BOX_LANES = _gpu.block(256, interpreted=512)  # boxes per program against 64 others; a chunk holds a multiple
ROTATED_LANES = _gpu.block(32, interpreted=512)  # one per thread: a polygon takes all registers that a thread has
GATHER_BLOCK = _gpu.block(256, interpreted=4096)
UNROLL = tl.constexpr(4)  # boxes at a time, whose loads go out together

_REAL = {torch.float32: tl.float32, torch.float64: tl.float64}


def nms(boxes, scores, labels, iou_threshold, offset):
    count = len(scores)
    if count == 0:
        return torch.empty(0, dtype=torch.int64, device=boxes.device)
    boxes, scores = boxes.contiguous(), scores.contiguous()
    labels = labels if labels is None else labels.contiguous()
    real = compute_dtype(boxes.dtype)
    counter = pinned_counter(boxes.device)

    def single():
        return launch_single(boxes, scores, labels, iou_threshold, offset, _REAL[real], counter.expect())

    def in_chunks(compile_all=False):
        order = by_score(scores)
        groups = order if labels is None else labels[order]
        fields = torch.empty((5, count), dtype=real, device=boxes.device)
        _gather_kernel[(_gpu.cdiv(count, GATHER_BLOCK),)](
            boxes, order, fields, count,
            OFFSET=offset, BLOCK=GATHER_BLOCK, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip

        def drops(grid, mask, others, state, dropped, start, stop, behind):
            _drops_kernel[grid](
                fields, groups, mask, others, state, dropped, start, stop, count, _gpu.bits_of(iou_threshold), 0,
                ROTATED=False, GROUPED=labels is not None, POLYGON=False, OFFSET=offset, BEHIND=behind,
                LANES=BOX_LANES, CHUNK=CHUNK, num_warps=2, enable_fp_fusion=False,
            )  # fmt: skip

        return _launch_chunks(order, drops, BOX_LANES, counter.expect(), compile_all)

    key = "nms", boxes.dtype, scores.dtype, None if labels is None else labels.dtype, offset
    _gpu.compile_once(key, lambda: (single(), in_chunks(compile_all=True)))
    out = single() if count <= MOST_IN_ONE_LAUNCH else in_chunks()
    return out[: counter.wait()]


def nms_rotated(boxes, scores, labels, iou_threshold, clockwise, margin):
    count = len(scores)
    if count == 0:
        return torch.empty(0, dtype=torch.int64, device=boxes.device)
    counter = pinned_counter(boxes.device)
    order = by_score(scores)
    frames = make_frames(boxes, boxes[:0], clockwise, margin, order)
    groups = order if labels is None else labels[order]

    def drops(grid, mask, others, state, dropped, start, stop, behind):
        _drops_kernel[grid](
            frames, groups, mask, others, state, dropped, start, stop, count,
            _gpu.bits_of(iou_threshold), _gpu.bits_of(margin),
            ROTATED=True, GROUPED=labels is not None, POLYGON=margin > 0, OFFSET=0, BEHIND=behind, LANES=ROTATED_LANES,
            CHUNK=CHUNK, num_warps=1, enable_fp_fusion=False,
        )  # fmt: skip

    def launch(compile_all=False):
        return _launch_chunks(order, drops, ROTATED_LANES, counter.expect(), compile_all)

    key = "nms_rotated", frames.dtype, groups.dtype, labels is None, margin > 0
    _gpu.compile_once(key, lambda: launch(compile_all=True))
    out = launch()
    return out[: counter.wait()]


def nms_quadri(boxes, scores, labels, iou_threshold):
    count = len(scores)
    if count == 0:
        return torch.empty(0, dtype=torch.int64, device=boxes.device)
    counter = pinned_counter(boxes.device)
    order = by_score(scores)
    polygons = make_polygons(boxes[order])
    groups = order if labels is None else labels[order]

    def drops(grid, mask, others, state, dropped, start, stop, behind):
        launch_quadri_drops(
            grid, polygons, groups, mask, others, state, dropped, start, stop, count, iou_threshold,
            labels is not None, behind, ROTATED_LANES, CHUNK,
        )  # fmt: skip

    def launch(compile_all=False):
        return _launch_chunks(order, drops, ROTATED_LANES, counter.expect(), compile_all)

    key = "nms_quadri", polygons.dtype, groups.dtype, labels is None
    _gpu.compile_once(key, lambda: launch(compile_all=True))
    out = launch()
    return out[: counter.wait()]


def _launch_chunks(order, drops, lanes, counter, compile_all):
    """-> int64 [N] that begins with the kept entries of `order`; how many is in `counter` once the kernels are through.

    drops: launches `_drops_kernel` with the boxes at hand. compile_all: launch also what so few boxes do not need.
    """
    count, device = len(order), order.device
    out = torch.empty(count, dtype=torch.int64, device=device)
    kept = torch.empty(count, dtype=torch.int32, device=device)  # places in `order` of those in `out`
    state = torch.empty(2, dtype=torch.int32, device=device)  # how many were kept before the last chunk, and with it
    mask = torch.empty((min(_gpu.cdiv(count, 64), CHUNK // 64), CHUNK), dtype=torch.int64, device=device)
    dropped = torch.zeros(count, dtype=torch.int8, device=device) if count > CHUNK else mask.view(torch.int8)
    for start in range(0, count, CHUNK):
        stop = min(start + CHUNK, count)
        blocks = _gpu.cdiv(stop - start, 64)
        drops((blocks * (CHUNK // lanes),), mask, kept, state, dropped, start, stop, False)
        _keep_kernel[(1,)](
            mask, dropped, order, out, kept, state, counter, start, stop, count, CHUNK=CHUNK, num_warps=8
        )
        if stop < count or compile_all:
            tiles = max(_gpu.cdiv(count - stop, lanes), 1)
            drops((blocks * tiles,), mask, kept, state, dropped, start, stop, True)
    return out


@_gpu.kernel
def _gather_kernel(boxes, order, fields, count, OFFSET: tl.constexpr, BLOCK: tl.constexpr):
    """Boxes in order of the scores, one array per field."""
    REAL: tl.constexpr = fields.dtype.element_ty
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = i < count
    x1, y1, x2, y2, area = load_box(boxes, tl.load(order + i, inside, 0), inside, OFFSET, REAL)
    store_fields(fields, i, tl.cast(count, tl.int64), x1, y1, x2, y2, area, inside)


@_gpu.kernel
def _drops_kernel(
    fields, groups, mask, others, state, dropped, start, stop, count, threshold_bits: tl.int64, margin_bits: tl.int64,
    ROTATED: tl.constexpr, GROUPED: tl.constexpr, POLYGON: tl.constexpr, OFFSET: tl.constexpr, BEHIND: tl.constexpr,
    LANES: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """LANES boxes against 64 that come before. Boxes lie in order of the scores; `start` to `stop` is the chunk.

    BEHIND: the ones before are kept boxes of the chunk, the lanes boxes behind it, of which those dropped are marked.
    Else both are of the chunk, and each lane's bits are stored.
    """
    REAL: tl.constexpr = fields.dtype.element_ty
    number, lane, first, existing, before, going = comparisons(state, dropped, start, stop, count, BEHIND, LANES, CHUNK)
    if going > 0:
        threshold = from_bits(threshold_bits, REAL)
        inside = lane < count
        last = tl.minimum(existing, 64) - 1
        step = tl.cast(count, tl.int64)
        if ROTATED:
            x1, y1, x2, y2 = load_reach(fields, lane, inside, count)  # centre and reach
            half_x, half_y, cos, sin, area = load_shape(fields, lane, inside, count)
        else:
            x1, y1, x2, y2, area = load_fields(fields, tl.minimum(lane, count - 1), step)
        word = _candidates(
            fields, others, first, last, step, x1, y1, x2, y2, area, threshold, ROTATED, OFFSET, BEHIND
        )  # fmt: skip
        word &= first_bits(tl.minimum(before, last + 1))
        found = tl.zeros((LANES,), tl.int64)
        while tl.max((word != 0).to(tl.int32), 0) > 0:
            other = first + tl.maximum(lowest_bit(word), 0)
            if BEHIND:
                other = tl.load(others + other)
            if ROTATED:
                a_x, a_y, _, _ = load_reach(fields, other, inside, count)
                a_half_x, a_half_y, a_cos, a_sin, a_area = load_shape(fields, other, inside, count)
                ratio = overlap(
                    a_x - x1, a_y - y1, a_half_x, a_half_y, a_cos, a_sin, a_area, half_x, half_y, cos, sin, area,
                    from_bits(margin_bits, REAL), 0, POLYGON,
                )  # fmt: skip
            else:
                a_x1, a_y1, a_x2, a_y2, a_area = load_fields(fields, other, step)
                ratio = iou(a_x1, a_y1, a_x2, a_y2, a_area, x1, y1, x2, y2, area, OFFSET)
            hit = (ratio > threshold) & (word != 0)
            if GROUPED:
                hit &= tl.load(groups + other) == tl.load(groups + lane, inside, 0)
            found |= tl.where(hit, word & (0 - word), 0)
            word &= word - 1
            if BEHIND:
                word = tl.where(hit, 0, word)  # once is enough
        if BEHIND:
            tl.store(dropped + lane, tl.full((LANES,), 1, tl.int8), found != 0)
        else:
            tl.store(mask + tl.cast(number, tl.int64) * CHUNK + (lane - start), found, lane < stop)


@triton.jit
def _candidates(
    fields, others, first, last, step, x1, y1, x2, y2, area, threshold,
    ROTATED: tl.constexpr, OFFSET: tl.constexpr, LISTED: tl.constexpr,
):  # fmt: skip
    """A bit per box from `first` on (per entry of `others`, if LISTED) that may drop a lane's; beyond `last` anything.

    x1 to y2 of rotated boxes are their centre and reach.
    """
    if INTERPRETED:  # which pays by the operation and not by the element: all at once
        k = tl.arange(0, 64)[:, None]
        other = first + tl.minimum(k, last)
        if LISTED:
            other = tl.load(others + other)
        maybe = _may_drop(
            fields + other, step, x1[None, :], y1[None, :], x2[None, :], y2[None, :], area[None, :], threshold,
            ROTATED, OFFSET,
        )  # fmt: skip
        word = tl.sum(tl.where(maybe, tl.full((64, 1), 1, tl.int64) << k.to(tl.int64), 0), 0)
    else:
        low, high = tl.zeros(x1.shape, tl.int32), tl.zeros(x1.shape, tl.int32)
        for begin in range(0, 32, UNROLL):
            for offset in tl.static_range(UNROLL):
                k = begin + offset
                other, behind = first + tl.minimum(k, last), first + tl.minimum(k + 32, last)
                if LISTED:
                    other, behind = tl.load(others + other), tl.load(others + behind)
                maybe = _may_drop(fields + other, step, x1, y1, x2, y2, area, threshold, ROTATED, OFFSET)
                low |= tl.where(maybe, tl.full((), 1, tl.int32) << k, 0)
                maybe = _may_drop(fields + behind, step, x1, y1, x2, y2, area, threshold, ROTATED, OFFSET)
                high |= tl.where(maybe, tl.full((), 1, tl.int32) << k, 0)
        word = (high.to(tl.int64) << 32) | (low.to(tl.int64) & 0xFFFFFFFF)
    return word


@triton.jit
def _may_drop(other, step, x1, y1, x2, y2, area, threshold, ROTATED: tl.constexpr, OFFSET: tl.constexpr):
    """Whether the box at `other` may overlap a lane's by more than the threshold.

    A quotient that rounds to more than the threshold is above it, so inter > threshold * base. Rounding keeps order:
    inter >= the rounded product.
    """
    if ROTATED:
        return near(
            tl.load(other), tl.load(other + step), tl.load(other + 6 * step), tl.load(other + 7 * step), x1, y1, x2, y2
        )
    else:
        a_x1, a_y1, a_x2, a_y2, a_area = load_fields(other, 0, step)
        inter, base = shared_area(a_x1, a_y1, a_x2, a_y2, a_area, x1, y1, x2, y2, area, OFFSET)
        return (inter > 0) & (inter >= threshold * base)


@_gpu.kernel
def _keep_kernel(mask, dropped, order, out, kept, state, counter, start, stop, total, CHUNK: tl.constexpr):
    """One program. What a block of 64 needs is loaded while the block before it is settled."""
    lane = tl.arange(0, CHUNK)
    bit = tl.arange(0, 64)
    count = stop - start
    blocks = (count + 63) // 64
    inside = lane < count
    gone = tl.load(dropped + start + lane, inside & (lane * 0 + start > 0), 0)
    gone = tl.where(inside, gone.to(tl.int32), 1)
    found = tl.load(state + 1, start > 0, 0)
    tl.store(state, found)
    droppers = tl.load(mask + bit, bit < count, 0)
    behind = tl.load(mask + lane, inside, 0)
    index = tl.load(order + start + bit, bit < count, 0)
    for block in range(0, blocks):
        following = tl.minimum(block + 1, blocks - 1)
        row = mask + tl.cast(following, tl.int64) * CHUNK
        next_droppers = tl.load(row + following * 64 + bit, following * 64 + bit < count, 0)
        next_behind = tl.load(row + lane, inside & (lane >= following * 64 + 64), 0)
        next_index = tl.load(order + start + following * 64 + bit, following * 64 + bit < count, 0)
        stays = settle(droppers, free_of_block(gone, lane, block))
        gone |= ((behind & stays) != 0).to(tl.int32)
        places, staying = places_of(stays, found)
        tl.store(out + places, index, staying)
        tl.store(kept + places, start + block * 64 + bit, staying)
        found += tl.sum(staying.to(tl.int32), 0)
        droppers, behind, index = next_droppers, next_behind, next_index
    tl.store(state + 1, found)
    tl.store(counter, found, stop == total)
