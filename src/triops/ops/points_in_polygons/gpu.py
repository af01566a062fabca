"""points_in_polygons on GPU: a program has a block of polygons and a few points, and writes whole lines."""

import torch
import triton.language as tl

from triops import _gpu
from triops._gpu import cdiv
from triops._gpu.arithmetic import divide, finite

POINTS, POLYGONS, WARPS = _gpu.block(16, interpreted=64), _gpu.block(128, interpreted=64), 4


def points_in_polygons(points, polygons):
    out = torch.empty((points.shape[0], polygons.shape[0]), dtype=torch.bool, device=points.device)
    if out.numel():
        _inside_kernel[(cdiv(len(points), POINTS), cdiv(len(polygons), POLYGONS))](
            points.contiguous(), polygons.contiguous(), out.view(torch.int8), len(points), len(polygons),
            REAL=tl.float64 if points.dtype == torch.float64 else tl.float32, POINTS=POINTS, POLYGONS=POLYGONS,
            num_warps=WARPS, enable_fp_fusion=False,
        )  # fmt: skip
    return out


@_gpu.kernel
def _inside_kernel(
    points, polygons, out, count, total, REAL: tl.constexpr, POINTS: tl.constexpr, POLYGONS: tl.constexpr
):
    n = (tl.program_id(0) * POINTS + tl.arange(0, POINTS))[:, None]
    m = (tl.program_id(1) * POLYGONS + tl.arange(0, POLYGONS))[None, :]
    px = tl.load(points + n.to(tl.int64) * 2, mask=n < count, other=0.0).to(REAL)
    py = tl.load(points + n.to(tl.int64) * 2 + 1, mask=n < count, other=0.0).to(REAL)
    corner = polygons + m.to(tl.int64) * 8
    tx = tl.load(corner + 6, mask=m < total, other=0.0).to(REAL)
    ty = tl.load(corner + 7, mask=m < total, other=0.0).to(REAL)
    valid = finite(px) & finite(py) & finite(tx) & finite(ty)
    crossings = tl.zeros((POINTS, POLYGONS), tl.int32)
    done = crossings != 0  # on a corner or an edge: later edges do not count
    for i in tl.static_range(4):
        sx = tl.load(corner + 2 * i, mask=m < total, other=0.0).to(REAL)
        sy = tl.load(corner + 2 * i + 1, mask=m < total, other=0.0).to(REAL)
        valid = valid & finite(sx) & finite(sy)
        crosses = ((sy < py) & (ty >= py)) | ((sy >= py) & (ty < py))
        rise = tl.where(sy == ty, 1.0, ty - sy) + tl.zeros((POINTS, POLYGONS), REAL)  # level edges are not crossed
        at = sx + divide((py - sy) * (tx - sx), rise)
        vertex = ((sx == px) & (sy == py)) | ((tx == px) & (ty == py))
        done = done | vertex | (crosses & (at == px))
        crossings += (crosses & (at > px) & (done == 0)).to(tl.int32)
        tx, ty = sx, sy
    inside = valid & ((crossings & 1) == 1)
    tl.store(out + n.to(tl.int64) * total + m, inside.to(tl.int8), mask=(n < count) & (m < total))
