"""chamfer_distance on GPU: points of each set sorted into chunks with boxes, searched for the nearest of the other's.

Backward: each point adds to itself and to its nearest by atomics. In deterministic mode a program looks through the
whole other set for the points that are nearest to its own.
"""

import torch
import triton.language as tl

from triops import _check, _gpu
from triops._dtypes import compute_dtype
from triops._gpu import cdiv, neighbors
from triops.ops.chamfer_distance.reference import check_indices, in_space

BLOCK = _gpu.block(256, interpreted=1024)
OWN, OTHERS = _gpu.block(64, interpreted=256), _gpu.block(64, interpreted=256)


def chamfer_distance(xyz1, xyz2):
    one, two = (neighbors.Clouds.of(in_space(t), None) for t in (xyz1, xyz2))
    found = [
        torch.empty(t.shape[:2], dtype=dtype, device=t.device)
        for dtype in (compute_dtype(xyz1.dtype), torch.int32) for t in (xyz1, xyz2)
    ]  # fmt: skip
    neighbors.search(neighbors.NEAREST, two, one, 1, found[2], found[0])
    neighbors.search(neighbors.NEAREST, one, two, 1, found[3], found[1])
    return tuple(found)


def chamfer_distance_backward(xyz1, xyz2, idx1, idx2, grad_dist1, grad_dist2):
    if _check.strict():
        check_indices(idx1, xyz2.shape[1])
        check_indices(idx2, xyz1.shape[1])
    exact = torch.are_deterministic_algorithms_enabled()
    real = compute_dtype(xyz1.dtype)
    one = xyz1.contiguous(), idx1.contiguous(), grad_dist1.contiguous()
    two = xyz2.contiguous(), idx2.contiguous(), grad_dist2.contiguous()
    make = torch.empty_like if exact else torch.zeros_like
    sums = [make(points, dtype=real) for points in (one[0], two[0])]
    for own, other, own_sums, other_sums in ((one, two, *sums), (two, one, *reversed(sums))):
        batch, count, axes = own[0].shape
        if own[0].numel() == 0:
            continue
        if exact:
            grid = cdiv(count, OWN), batch, axes
            _gather_kernel[grid](
                *own, *other, own_sums, count, other[0].shape[1], AXES=axes, OWN=OWN, OTHERS=OTHERS, num_warps=4
            )
        else:
            grid = cdiv(count, BLOCK), batch, axes
            _scatter_kernel[grid](
                *own, other[0], own_sums, other_sums, count, other[0].shape[1], AXES=axes, BLOCK=BLOCK, num_warps=4
            )
    return sums[0].to(xyz1.dtype), sums[1].to(xyz2.dtype)


@_gpu.kernel
def _scatter_kernel(
    points, index, grad, others, sums, other_sums, count, total, AXES: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    REAL: tl.constexpr = sums.dtype.element_ty
    b, axis = tl.program_id(1).to(tl.int64), tl.program_id(2)
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = b * count + i
    j = tl.load(index + row, mask=i < count, other=-1)
    there = (j >= 0) & (j < total)
    at, other_at = row * AXES + axis, (b * total + j) * AXES + axis
    x = tl.load(points + at, mask=there, other=0.0).to(REAL)
    nearest = tl.load(others + other_at, mask=there, other=0.0).to(REAL)
    pull = 2 * tl.load(grad + row, mask=there, other=0.0) * (x - nearest)
    tl.atomic_add(sums + at, pull, mask=there, sem="relaxed")
    tl.atomic_add(other_sums + other_at, -pull, mask=there, sem="relaxed")


@_gpu.kernel
def _gather_kernel(
    points, index, grad, others, other_index, other_grad, sums, count, total,
    AXES: tl.constexpr, OWN: tl.constexpr, OTHERS: tl.constexpr,
):  # fmt: skip
    REAL: tl.constexpr = sums.dtype.element_ty
    b, axis = tl.program_id(1).to(tl.int64), tl.program_id(2)
    i = tl.program_id(0) * OWN + tl.arange(0, OWN)
    row = b * count + i
    x = tl.load(points + row * AXES + axis, mask=i < count, other=0.0).to(REAL)
    j = tl.load(index + row, mask=i < count, other=-1)
    there = (j >= 0) & (j < total)
    nearest = tl.load(others + (b * total + j) * AXES + axis, mask=there, other=0.0).to(REAL)
    total_pull = tl.where(there, 2 * tl.load(grad + row, mask=there, other=0.0) * (x - nearest), 0.0)
    for begin in range(0, total, OTHERS):
        other = begin + tl.arange(0, OTHERS)
        other_row = b * total + other
        wanted = tl.load(other_index + other_row, mask=other < total, other=-1)
        weight = 2 * tl.load(other_grad + other_row, mask=other < total, other=0.0)
        place = tl.load(others + other_row * AXES + axis, mask=other < total, other=0.0).to(REAL)
        pull = weight[None, :] * (place[None, :] - x[:, None])
        total_pull -= tl.sum(tl.where(wanted[None, :] == i[:, None], pull, 0.0), 1)
    tl.store(sums + row * AXES + axis, total_pull, mask=i < count)
