"""soft_nms on GPU: one program that chooses a box, lowers the scores of the others, and finds the next."""

import torch
import triton
import triton.language as tl

from triops import _gpu
from triops._dtypes import compute_dtype
from triops._gpu.arithmetic import from_bits
from triops.ops.nms.boxes_gpu import iou, load_box
from triops.ops.nms.reference import EXP_TERMS as _EXP_TERMS
from triops.ops.nms.reference import METHODS

SOFT_BLOCK = _gpu.block(1024, interpreted=4096)
EXP_TERMS = tl.constexpr(_EXP_TERMS)


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
        x1, y1, x2, y2, area = load_box(boxes, tl.maximum(last, 0), last >= 0, OFFSET, REAL)
        best, best_index = lowest, tl.full((), -1, tl.int64)
        for begin in range(0, count, BLOCK):
            i = begin + tl.arange(0, BLOCK).to(tl.int64)
            score = tl.load(scores + i, i < count, float("nan"))
            if last >= 0:
                other_x1, other_y1, other_x2, other_y2, other_area = load_box(boxes, i, i < count, OFFSET, REAL)
                ratio = iou(x1, y1, x2, y2, area, other_x1, other_y1, other_x2, other_y2, other_area, OFFSET)
                if METHOD == 2:
                    wide = ratio.to(tl.float64)
                    weight = _exp((wide * wide) / negative_sigma).to(REAL)
                elif METHOD == 1:
                    weight = tl.where(ratio >= threshold, 1.0 - ratio, 1.0)
                else:
                    weight = tl.where(ratio >= threshold, 0.0, 1.0).to(REAL)
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
