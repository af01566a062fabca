"""convex_iou on GPU: a launch for the hulls of each argument, and one for tiles of pairs.

A tile in which no two bounding boxes overlap is only filled with 0. Corners are read from the cache, side by side.
"""

import torch
import triton.language as tl

from triops import _gpu
from triops._geometry.polygon.gpu import load_bounds, make_polygons, overlap, shared_bounds

ROWS = _gpu.block(4, interpreted=64)
COLUMNS = _gpu.block(32, interpreted=256)
ALIGNED_BLOCK = _gpu.block(128, interpreted=2048)


def convex_iou(pointsets, polygons, mode, aligned):
    rows, columns = len(pointsets), len(polygons)
    shape = (rows,) if aligned else (rows, columns)
    out = torch.empty(shape, dtype=pointsets.dtype, device=pointsets.device)
    if out.numel() == 0:
        return out
    first, second = make_polygons(pointsets), make_polygons(polygons)
    tiles = 1 if aligned else _gpu.cdiv(columns, COLUMNS)
    height, width = (ALIGNED_BLOCK, 1) if aligned else (ROWS, COLUMNS)
    _overlaps_kernel[(_gpu.cdiv(rows, height) * tiles,)](
        first, second, out, rows, columns, tiles,
        P_CORNERS=pointsets.shape[1] // 2, Q_CORNERS=polygons.shape[1] // 2, OVER_UNION=mode == "iou", ALIGNED=aligned,
        ROWS=height, COLUMNS=width, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    return out


@_gpu.kernel
def _overlaps_kernel(
    first, second, out, rows, columns, tiles, P_CORNERS: tl.constexpr, Q_CORNERS: tl.constexpr,
    OVER_UNION: tl.constexpr, ALIGNED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    i = (tl.program_id(0) // tiles * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    if ALIGNED:
        j, at = i, out + i
        inside = i < rows
        j_mask = inside
    else:
        j = (tl.program_id(0) % tiles * COLUMNS + tl.arange(0, COLUMNS)).to(tl.int64)[None, :]
        at = out + i * columns + j
        j_mask = j < columns
        inside = (i < rows) & j_mask
    p_bounds = load_bounds(first, i, i < rows, rows)
    q_bounds = load_bounds(second, j, j_mask, columns)
    low_x, low_y, high_x, high_y = shared_bounds(p_bounds, q_bounds)
    value = tl.zeros((ROWS, COLUMNS), first.dtype.element_ty)
    if tl.max(((low_x < high_x) & (low_y < high_y)).to(tl.int32)) > 0:
        value = overlap(
            first, i, i < rows, rows, p_bounds, second, j, j_mask, columns, q_bounds, P_CORNERS, Q_CORNERS, OVER_UNION
        )
    tl.store(at, value.to(out.dtype.element_ty), inside)
