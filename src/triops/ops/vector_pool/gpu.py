"""vector_pool_pairs on GPU: a program per center tests the points of its cloud, once to count and once to write."""

import torch
import triton
import triton.language as tl

from triops import _check, _gpu
from triops._clouds import check_ascending
from triops._dtypes import compute_dtype
from triops._gpu.arithmetic import divide, from_bits
from triops.ops.vector_pool.reference import ranges_of_centers

BLOCK, WARPS = 1024, 4


def vector_pool_pairs(points, centers, offsets, center_offsets, radius, grid, k, ball):
    if _check.strict():
        check_ascending("vector_pool", "offsets", offsets, len(points))
        check_ascending("vector_pool", "center_offsets", center_offsets, len(centers))
    number, device = centers.shape[0], points.device
    if number == 0 or points.shape[0] == 0:
        return torch.empty((0, 3), dtype=torch.int32, device=device)
    begin, end = ranges_of_centers(points.shape[0], number, offsets, center_offsets)
    points, centers = points.contiguous(), centers.contiguous()
    real = tl.float64 if compute_dtype(points.dtype) == torch.float64 else tl.float32
    counts = torch.empty(number, dtype=torch.int64, device=device)
    most = k if k > 0 else 2**31 - 1

    def launch(out, counts, write):
        _pairs_kernel[(number,)](
            points, centers, begin, end, counts, out, most, *grid, _gpu.bits_of(radius), BALL=ball, WRITE=write,
            BLOCK=BLOCK, REAL=real, num_warps=WARPS, enable_fp_fusion=False,
        )  # fmt: skip

    launch(counts, counts, False)
    after = counts.cumsum(0)
    out = torch.empty((int(after[-1]), 3), dtype=torch.int32, device=device)
    launch(out, after - counts, True)
    return out


@_gpu.kernel
def _pairs_kernel(
    points, centers, begin, end, counts, out, most, grid_x, grid_y, grid_z, radius_bits: tl.int64, BALL: tl.constexpr,
    WRITE: tl.constexpr, BLOCK: tl.constexpr, REAL: tl.constexpr,
):  # fmt: skip
    """WRITE: pairs from row counts[m] on; else how many there are, to counts[m]."""
    m = tl.program_id(0)
    center = centers + m.to(tl.int64) * 3
    cx = tl.load(center).to(REAL)
    cy = tl.load(center + 1).to(REAL)
    cz = tl.load(center + 2).to(REAL)
    reach = from_bits(radius_bits, REAL)
    first, last = tl.load(begin + m), tl.load(end + m)
    found = tl.cast(0, tl.int32)
    while (first < last) & (found < most):
        i = first + tl.arange(0, BLOCK)
        inside = i < last
        at = points + i * 3
        x = tl.load(at, mask=inside, other=float("nan")).to(REAL) - cx
        y = tl.load(at + 1, mask=inside, other=0.0).to(REAL) - cy
        z = tl.load(at + 2, mask=inside, other=0.0).to(REAL) - cz
        if BALL:
            near = (x * x + y * y) + z * z <= reach * reach
        else:
            near = (tl.abs(x) <= reach) & (tl.abs(y) <= reach) & (tl.abs(z) <= reach)
        if WRITE:
            rank = found + tl.cumsum(near.to(tl.int32), 0) - 1
            cell = _cell(x, reach, grid_x, REAL) * grid_y + _cell(y, reach, grid_y, REAL)
            cell = cell * grid_z + _cell(z, reach, grid_z, REAL)
            cell = tl.minimum(tl.maximum(cell, 0), grid_x * grid_y * grid_z - 1)
            to = out + (tl.load(counts + m) + rank) * 3
            kept = near & (rank < most)
            tl.store(to, i.to(tl.int32), mask=kept)
            tl.store(to + 1, tl.zeros([BLOCK], tl.int32) + m, mask=kept)
            tl.store(to + 2, cell, mask=kept)
        found += tl.sum(near.to(tl.int32), 0)
        first += BLOCK
    if not WRITE:
        tl.store(counts + m, tl.minimum(found, most).to(tl.int64))


@triton.jit
def _cell(local, reach, cells, REAL: tl.constexpr):
    """The cell of a coordinate along one axis."""
    position = divide(local + reach, divide(reach * 2, tl.cast(cells, REAL)))
    return tl.where(position == position, tl.floor(position), 0.0).to(tl.int32)  # NaN is no number of a cell
