"""nms, nms_rotated and soft_nms on GPU.

Suppression in two kernels. The first writes for each box, in order of the scores, one bit a box behind it that it
would drop. The second, one program, walks through 64 boxes at a time: among these it repeats "a box stays if none that
stays drops it" until nothing changes, which takes as many rounds as the longest chain and leaves the only answer; then
it joins the bits of those that stay into what is dropped further on. Nothing goes through the host but the final count.
"""

import torch
import triton
import triton.language as tl

from triops import _gpu
from triops._dtypes import compute_dtype
from triops._geometry.rotated.gpu import load_reach, load_shape, make_frames, near, overlap
from triops._gpu.arithmetic import divide, from_bits
from triops.ops.nms.reference import EXP_TERMS as _EXP_TERMS
from triops.ops.nms.reference import METHODS, by_score

MASK_BYTES = 256 * 2**20  # more boxes than this has room for go through in several parts
BOX_ROWS = 64  # boxes a program of the mask kernels, against 64 others
ROTATED_ROWS = _gpu.block(8, interpreted=64)
SOFT_BLOCK = _gpu.block(1024, interpreted=4096)
EXP_TERMS = tl.constexpr(_EXP_TERMS)


def nms(boxes, scores, iou_threshold, offset):
    order = by_score(scores)
    boxes = boxes.contiguous()
    count = len(order)

    def fill(mask, start, stop, words):
        _box_mask_kernel[(_gpu.cdiv(stop - start, BOX_ROWS) * words,)](
            boxes, order, mask, start, stop, count, words, _gpu.bits_of(iou_threshold),
            OFFSET=offset, ROWS=BOX_ROWS, REAL=_REAL[compute_dtype(boxes.dtype)], num_warps=8, enable_fp_fusion=False,
        )  # fmt: skip

    return _kept(order, fill)


def nms_rotated(boxes, scores, labels, iou_threshold, clockwise, margin):
    order = by_score(scores)
    count = len(order)
    if count == 0:
        return order
    frames = make_frames(boxes, boxes[:0], clockwise, margin, order)
    groups = order if labels is None else labels[order]

    def fill(mask, start, stop, words):
        _rotated_mask_kernel[(_gpu.cdiv(stop - start, ROTATED_ROWS) * words,)](
            frames, groups, mask, start, stop, count, words, _gpu.bits_of(iou_threshold), _gpu.bits_of(margin),
            GROUPED=labels is not None, POLYGON=margin > 0, ROWS=ROTATED_ROWS, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip

    return _kept(order, fill)


def soft_nms(boxes, scores, iou_threshold, sigma, min_score, method, offset):
    count = len(scores)
    real = compute_dtype(boxes.dtype)
    chosen = torch.empty(count, dtype=torch.int64, device=boxes.device)
    lowered = torch.empty(count, dtype=real, device=boxes.device)
    total = torch.zeros(1, dtype=torch.int64, device=boxes.device)
    if count > 0:
        _soften_kernel[(1,)](
            boxes.contiguous(), scores.to(real, copy=True), chosen, lowered, total, count,
            _gpu.bits_of(iou_threshold), _gpu.bits_of(-sigma), _gpu.bits_of(min_score),
            METHOD=METHODS.index(method), OFFSET=offset, BLOCK=SOFT_BLOCK, num_warps=8, enable_fp_fusion=False,
        )  # fmt: skip
    kept = int(total)
    return chosen[:kept].clone(), lowered[:kept].to(scores.dtype, copy=True)


_REAL = {torch.float32: tl.float32, torch.float64: tl.float64}


def _kept(order, fill):
    """The entries of `order` that no kept one before them drops. `fill` writes the bits of a range of rows."""
    count = len(order)
    words = _gpu.cdiv(count, 64)
    keep = torch.empty(count, dtype=torch.bool, device=order.device)
    if count == 0:
        return order
    part = min(count, max(64, MASK_BYTES // (8 * words) // 64 * 64))
    mask = torch.empty((part, words), dtype=torch.int64, device=order.device)
    dropped = torch.zeros(words, dtype=torch.int64, device=order.device)
    for start in range(0, count, part):
        stop = min(start + part, count)
        fill(mask, start, stop, words)
        _keep_kernel[(1,)](mask, dropped, keep, start, stop, words, WORDS=64, num_warps=8)
    return order[keep]


@triton.jit
def _either(a, b):
    return a | b


@triton.jit
def _store_bits(mask, i, j, drops, start, stop, count, word, words):
    """Bit j % 64 of word j // 64 of row i: box i, which comes before j, would drop it."""
    drops &= (j > i) & (j < count)
    bits = tl.sum(drops.to(tl.int64) << (j % 64), 1)[:, None]
    tl.store(mask + (i - start) * words + word, bits, i < stop)


@triton.jit
def _load_box(boxes, i, mask, OFFSET: tl.constexpr, REAL: tl.constexpr):
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
def _iou(x1, y1, x2, y2, area, other_x1, other_y1, other_x2, other_y2, other_area, OFFSET: tl.constexpr):
    """As `bbox_overlaps`, with the division by the rules of IEEE."""
    width = tl.where(x2 < other_x2, x2, other_x2) - tl.where(x1 > other_x1, x1, other_x1) + OFFSET
    height = tl.where(y2 < other_y2, y2, other_y2) - tl.where(y1 > other_y1, y1, other_y1) + OFFSET
    inter = tl.where(width > 0, width, 0.0) * tl.where(height > 0, height, 0.0)
    base = area + other_area - inter
    ratio = divide(inter, tl.where(base < OFFSET, OFFSET * 1.0, base))
    return tl.where(ratio > 0, ratio, 0.0)


@_gpu.kernel
def _box_mask_kernel(
    boxes, order, mask, start, stop, count, words, threshold_bits: tl.int64,
    OFFSET: tl.constexpr, ROWS: tl.constexpr, REAL: tl.constexpr,
):  # fmt: skip
    word = (tl.program_id(0) % words).to(tl.int64)
    first = start + (tl.program_id(0) // words).to(tl.int64) * ROWS
    if word * 64 + 63 > first:
        i = (first + tl.arange(0, ROWS))[:, None]
        j = (word * 64 + tl.arange(0, 64))[None, :]
        rows, columns = tl.load(order + i, i < stop, 0), tl.load(order + j, j < count, 0)
        x1, y1, x2, y2, area = _load_box(boxes, rows, i < stop, OFFSET, REAL)
        other_x1, other_y1, other_x2, other_y2, other_area = _load_box(boxes, columns, j < count, OFFSET, REAL)
        iou = _iou(x1, y1, x2, y2, area, other_x1, other_y1, other_x2, other_y2, other_area, OFFSET)
        _store_bits(mask, i, j, iou > from_bits(threshold_bits, REAL), start, stop, count, word, words)


@_gpu.kernel
def _rotated_mask_kernel(
    frames, groups, mask, start, stop, count, words, threshold_bits: tl.int64, margin_bits: tl.int64,
    GROUPED: tl.constexpr, POLYGON: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    REAL: tl.constexpr = frames.dtype.element_ty
    word = (tl.program_id(0) % words).to(tl.int64)
    first = start + (tl.program_id(0) // words).to(tl.int64) * ROWS
    if word * 64 + 63 > first:
        i = (first + tl.arange(0, ROWS))[:, None]
        j = (word * 64 + tl.arange(0, 64))[None, :]
        a_x, a_y, a_reach_x, a_reach_y = load_reach(frames, i, i < stop, count)
        b_x, b_y, b_reach_x, b_reach_y = load_reach(frames, j, j < count, count)
        close = near(a_x, a_y, a_reach_x, a_reach_y, b_x, b_y, b_reach_x, b_reach_y)
        threshold = from_bits(threshold_bits, REAL)
        drops = tl.zeros((ROWS, 64), tl.int1)
        if tl.max(close.to(tl.int32)) > 0:
            a_half_x, a_half_y, a_cos, a_sin, a_area = load_shape(frames, i, i < stop, count)
            b_half_x, b_half_y, b_cos, b_sin, b_area = load_shape(frames, j, j < count, count)
            found = overlap(
                a_x - b_x, a_y - b_y, a_half_x, a_half_y, a_cos, a_sin, a_area,
                b_half_x, b_half_y, b_cos, b_sin, b_area, from_bits(margin_bits, REAL), 0, POLYGON,
            )  # fmt: skip
            drops = close & (found > threshold)
        if GROUPED:
            drops &= tl.load(groups + i, i < stop, 0) == tl.load(groups + j, j < count, 0)
        _store_bits(mask, i, j, drops, start, stop, count, word, words)


@_gpu.kernel
def _keep_kernel(mask, dropped, keep, start, stop, words, WORDS: tl.constexpr):
    bit = tl.arange(0, 64).to(tl.int64)
    for block in range(start // 64, (stop + 63) // 64):
        row = block * 64 + bit
        bits = mask + (row - start) * words
        inner = tl.load(bits + block, row < stop, 0)
        free = (((tl.load(dropped + block) >> bit) & 1) == 0) & (row < stop)
        stays = free
        changed = 1
        while changed > 0:
            hit = tl.reduce(tl.where(stays, inner, 0), 0, _either)
            now = free & (((hit >> bit) & 1) == 0)
            changed = tl.max((now != stays).to(tl.int32), 0)
            stays = now
        tl.store(keep + row, stays, row < stop)
        for first in range(block + 1, words, WORDS):
            word = first + tl.arange(0, WORDS)
            behind = tl.load(bits[:, None] + word[None, :], stays[:, None] & (word < words)[None, :], 0)
            before = tl.load(dropped + word, word < words, 0)
            tl.store(dropped + word, before | tl.reduce(behind, 0, _either), word < words)
        tl.debug_barrier()  # the next block reads what other threads have written here


@triton.jit
def _exp(x):
    """e to the power of a float64 block that is not above 0."""
    x = tl.where(x > -700.0, x, -700.0)
    n = tl.floor(x * 1.4426950408889634 + 0.5)
    r = (x - n * 0.6931471803691238) - n * 1.9082149292705877e-10
    result = r * 0.0 + EXP_TERMS[0]
    for k in tl.static_range(1, 14):
        result = result * r + EXP_TERMS[k]
    return result * ((n.to(tl.int64) + 1023) << 52).to(tl.float64, bitcast=True)


@_gpu.kernel
def _soften_kernel(
    boxes, scores, chosen, lowered, total, count,
    threshold_bits: tl.int64, sigma_bits: tl.int64, least_bits: tl.int64,
    METHOD: tl.constexpr, OFFSET: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program. A round lowers the scores for the box chosen last and finds the next; NaN marks what is out."""
    REAL: tl.constexpr = scores.dtype.element_ty
    threshold, least = from_bits(threshold_bits, REAL), from_bits(least_bits, REAL)
    negative_sigma = from_bits(sigma_bits, tl.float64)
    lowest = tl.full((), float("-inf"), REAL)
    last = tl.full((), -1, tl.int64)
    found = tl.full((), 0, tl.int64)
    going = 1
    while going > 0:
        x1, y1, x2, y2, area = _load_box(boxes, tl.maximum(last, 0), last >= 0, OFFSET, REAL)
        best, best_index = lowest, tl.full((), -1, tl.int64)
        for begin in range(0, count, BLOCK):
            i = begin + tl.arange(0, BLOCK).to(tl.int64)
            score = tl.load(scores + i, i < count, float("nan"))
            if last >= 0:
                other_x1, other_y1, other_x2, other_y2, other_area = _load_box(boxes, i, i < count, OFFSET, REAL)
                iou = _iou(x1, y1, x2, y2, area, other_x1, other_y1, other_x2, other_y2, other_area, OFFSET)
                if METHOD == 2:
                    wide = iou.to(tl.float64)
                    weight = _exp((wide * wide) / negative_sigma).to(REAL)
                elif METHOD == 1:
                    weight = tl.where(iou >= threshold, 1.0 - iou, 1.0)
                else:
                    weight = tl.where(iou >= threshold, 0.0, 1.0).to(REAL)
                score = score * weight
                score = tl.where((score >= least) & (i != last), score, float("nan"))
                tl.store(scores + i, score, i < count)
            waiting = tl.where(score > lowest, score, lowest)  # also for NaN
            value, place = tl.max(waiting, 0, return_indices=True, return_indices_tie_break_left=True)
            better = value > best
            best_index = tl.where(better, begin + place.to(tl.int64), best_index)
            best = tl.where(better, value, best)
        last = best_index
        going = (last >= 0).to(tl.int32)
        tl.store(chosen + found, last, last >= 0)
        tl.store(lowered + found, best, last >= 0)
        found += going
    tl.store(total, found)
