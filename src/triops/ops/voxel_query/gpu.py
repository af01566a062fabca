"""voxel_query on GPU: a program reads blocks of the windows of a few centers, and a scan finds each point its place."""

import torch
import triton.language as tl

from triops import _check, _gpu
from triops._gpu import bits_of, cdiv
from triops._gpu.arithmetic import from_bits
from triops.ops.voxel_query.reference import check_values

CENTERS, WINDOW, WARPS = _gpu.block(4, interpreted=64), _gpu.block(32, interpreted=256), 1


def voxel_query(points, centers, coords, voxel_rows, radius, k, max_range):
    if _check.strict():
        check_values(points, coords, voxel_rows)
    out = torch.empty((centers.shape[0], k), dtype=torch.int32, device=centers.device)
    if out.numel():
        _query_kernel[(cdiv(len(centers), CENTERS),)](
            points.contiguous(), centers.contiguous(), coords.contiguous(), voxel_rows.contiguous(), out,
            len(points), len(centers), *voxel_rows.shape, k, *max_range, bits_of(radius),
            CENTERS=CENTERS, WINDOW=WINDOW, REAL=tl.float64 if points.dtype == torch.float64 else tl.float32,
            num_warps=WARPS, enable_fp_fusion=False,
        )  # fmt: skip
    return out


@_gpu.kernel
def _query_kernel(
    points, centers, coords, voxel_rows, out, count, total, B, Z, Y, X, k, range_z, range_y, range_x, radius_bits,
    CENTERS: tl.constexpr, WINDOW: tl.constexpr, REAL: tl.constexpr,
):  # fmt: skip
    q = (tl.program_id(0) * CENTERS + tl.arange(0, CENTERS))[:, None]
    valid = q < total
    far = from_bits(radius_bits, REAL)
    far = far * far
    at = q.to(tl.int64) * 3
    cx = tl.load(centers + at, mask=valid, other=0.0).to(REAL)
    cy = tl.load(centers + at + 1, mask=valid, other=0.0).to(REAL)
    cz = tl.load(centers + at + 2, mask=valid, other=0.0).to(REAL)
    at = q.to(tl.int64) * 4
    batch = tl.load(coords + at, mask=valid, other=-1).to(tl.int64)
    z0 = tl.load(coords + at + 1, mask=valid, other=0).to(tl.int64) - range_z
    y0 = tl.load(coords + at + 2, mask=valid, other=0).to(tl.int64) - range_y
    x0 = tl.load(coords + at + 3, mask=valid, other=0).to(tl.int64) - range_x
    valid = valid & (batch >= 0) & (batch < B)
    width, height = 2 * range_x + 1, 2 * range_y + 1
    window = width * height * (2 * range_z + 1)

    found = tl.zeros((CENTERS, 1), tl.int32)
    first = tl.full((CENTERS, 1), -1, tl.int32)
    out_at = out + q.to(tl.int64) * k
    begin = tl.cast(0, tl.int32)
    open = tl.max(tl.max(valid.to(tl.int32), 1), 0) > 0
    while open:
        w = (begin + tl.arange(0, WINDOW))[None, :]
        line = w // width
        x, y, z = x0 + (w - line * width), y0 + line % height, z0 + line // height
        inside = valid & (w < window) & (x >= 0) & (x < X) & (y >= 0) & (y < Y) & (z >= 0) & (z < Z)
        row = tl.load(voxel_rows + ((batch * Z + z) * Y + y) * X + x, mask=inside, other=-1).to(tl.int64)
        inside = inside & (row >= 0) & (row < count)
        dx = tl.load(points + row * 3, mask=inside, other=float("nan")).to(REAL) - cx
        dy = tl.load(points + row * 3 + 1, mask=inside, other=float("nan")).to(REAL) - cy
        dz = tl.load(points + row * 3 + 2, mask=inside, other=float("nan")).to(REAL) - cz
        near = (dx * dx + dy * dy) + dz * dz <= far
        place = found + tl.cumsum(near.to(tl.int32), 1) - 1
        tl.store(out_at + place, row.to(tl.int32), mask=near & (place < k))
        leads = near & (place == 0)
        first = tl.where(found > 0, first, tl.max(tl.where(leads, row.to(tl.int32), -1), 1, keep_dims=True))
        found += tl.sum(near.to(tl.int32), 1, keep_dims=True)
        begin += WINDOW
        waiting = tl.max(tl.max((valid & (found < k)).to(tl.int32), 1), 0) > 0
        open = waiting & (begin < window)
    for begin in range(0, k, WINDOW):
        slot = begin + tl.arange(0, WINDOW)[None, :]
        tl.store(out_at + slot, first + tl.zeros_like(slot), mask=(q < total) & (slot >= found) & (slot < k))
