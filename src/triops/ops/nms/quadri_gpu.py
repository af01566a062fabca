"""nms_quadri on GPU: which quadrilaterals of a chunk drop which."""

import triton.language as tl

from triops import _gpu
from triops._geometry.polygon.gpu import load_bounds, overlap, shared_bounds
from triops._gpu.arithmetic import from_bits
from triops.ops.nms.boxes_gpu import comparisons

OTHERS = _gpu.block(1, interpreted=64)  # boxes at a time against those of the lanes


def launch_quadri_drops(
    grid, polygons, groups, mask, others, state, dropped, start, stop, count, iou_threshold, grouped, behind, lanes,
    chunk,
):  # fmt: skip
    _quadri_drops_kernel[grid](
        polygons, groups, mask, others, state, dropped, start, stop, count, _gpu.bits_of(iou_threshold),
        GROUPED=grouped, BEHIND=behind, OTHERS=OTHERS, LANES=lanes, CHUNK=chunk, num_warps=1, enable_fp_fusion=False,
    )  # fmt: skip


@_gpu.kernel
def _quadri_drops_kernel(
    polygons, groups, mask, others, state, dropped, start, stop, count, threshold_bits: tl.int64,
    GROUPED: tl.constexpr, BEHIND: tl.constexpr, OTHERS: tl.constexpr, LANES: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """As `_drops_kernel`. The 64 before are taken OTHERS at a time; most lie far from every lane's."""
    REAL: tl.constexpr = polygons.dtype.element_ty
    number, lane, first, existing, before, going = comparisons(state, dropped, start, stop, count, BEHIND, LANES, CHUNK)
    if going > 0:
        threshold = from_bits(threshold_bits, REAL)
        inside = lane < count
        last = tl.minimum(existing, 64)
        bounds = load_bounds(polygons, lane[None, :], inside[None, :], count)
        found = tl.zeros((LANES,), tl.int64)
        for begin in range(0, last, OTHERS):
            k = begin + tl.arange(0, OTHERS)[:, None]
            other = first + tl.minimum(k, last - 1)
            if BEHIND:
                other = tl.load(others + other)
            there = other < count
            other_bounds = load_bounds(polygons, other, there, count)
            low_x, low_y, high_x, high_y = shared_bounds(other_bounds, bounds)
            near = (low_x < high_x) & (low_y < high_y) & (k < before[None, :]) & (k < last)
            if GROUPED:
                near &= tl.load(groups + other) == tl.load(groups + lane, inside, 0)[None, :]
            if tl.max(near.to(tl.int32)) > 0:
                ratio = overlap(
                    polygons, other, there, count, other_bounds,
                    polygons, lane[None, :], inside[None, :], count, bounds, 4, 4, True,
                )  # fmt: skip
                bit = tl.full((OTHERS, LANES), 1, tl.int64) << k.to(tl.int64)
                found |= tl.sum(tl.where(near & (ratio > threshold), bit, 0), 0)
        if BEHIND:
            tl.store(dropped + lane, tl.full((LANES,), 1, tl.int8), found != 0)
        else:
            tl.store(mask + tl.cast(number, tl.int64) * CHUNK + (lane - start), found, lane < stop)
