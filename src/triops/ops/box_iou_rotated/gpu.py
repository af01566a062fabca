"""box_iou_rotated on GPU: two launches, one for the frames of all rectangles and one for tiles of pairs.

Rectangles far apart share nothing, and a tile in which no pair is near is only filled with 0.
"""

import torch
import triton.language as tl

from triops import _gpu
from triops._geometry.rotated.gpu import load_reach, load_shape, make_frames, near, overlap
from triops._geometry.rotated.reference import MODES
from triops._gpu.arithmetic import from_bits

# A pair needs many registers, so a thread has few of them.
ROWS = _gpu.block(8, interpreted=64)
COLUMNS = _gpu.block(64, interpreted=512)
ALIGNED_BLOCK = _gpu.block(128, interpreted=4096)


def box_iou_rotated(bboxes1, bboxes2, mode, aligned, clockwise, margin):
    rows, columns = bboxes1.shape[0], bboxes2.shape[0]
    shape = (rows,) if aligned else (rows, columns)
    out = torch.empty(shape, dtype=bboxes1.dtype, device=bboxes1.device)
    if out.numel() == 0:
        return out
    frames = make_frames(bboxes1, bboxes2, clockwise, margin)
    if aligned:
        _aligned_kernel[(_gpu.cdiv(rows, ALIGNED_BLOCK),)](
            frames, out, rows, _gpu.bits_of(margin),
            MODE=MODES.index(mode), POLYGON=margin > 0, BLOCK=ALIGNED_BLOCK, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
        return out
    tiles = _gpu.cdiv(columns, COLUMNS)
    _pairs_kernel[(_gpu.cdiv(rows, ROWS) * tiles,)](
        frames, out, rows, columns, tiles, _gpu.bits_of(margin),
        MODE=MODES.index(mode), POLYGON=margin > 0, ROWS=ROWS, COLUMNS=COLUMNS, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    return out


@_gpu.kernel
def _pairs_kernel(
    frames, out, rows, columns, tiles, margin_bits: tl.int64,
    MODE: tl.constexpr, POLYGON: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    REAL: tl.constexpr = frames.dtype.element_ty
    margin = from_bits(margin_bits, REAL)
    total = rows + columns
    i = (tl.program_id(0) // tiles * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    j = (tl.program_id(0) % tiles * COLUMNS + tl.arange(0, COLUMNS)).to(tl.int64)[None, :]
    a_x, a_y, a_reach_x, a_reach_y = load_reach(frames, i, i < rows, total)
    b_x, b_y, b_reach_x, b_reach_y = load_reach(frames, rows + j, j < columns, total)
    close = near(a_x, a_y, a_reach_x, a_reach_y, b_x, b_y, b_reach_x, b_reach_y)
    value = tl.zeros((ROWS, COLUMNS), REAL)
    if tl.max(close.to(tl.int32)) > 0:
        a_half_x, a_half_y, a_cos, a_sin, a_area = load_shape(frames, i, i < rows, total)
        b_half_x, b_half_y, b_cos, b_sin, b_area = load_shape(frames, rows + j, j < columns, total)
        found = overlap(
            a_x - b_x, a_y - b_y, a_half_x, a_half_y, a_cos, a_sin, a_area, b_half_x, b_half_y, b_cos, b_sin, b_area,
            margin, MODE, POLYGON,
        )  # fmt: skip
        value = tl.where(close, found, 0.0)
    tl.store(out + i * columns + j, value, (i < rows) & (j < columns))


@_gpu.kernel
def _aligned_kernel(
    frames, out, count, margin_bits: tl.int64, MODE: tl.constexpr, POLYGON: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    REAL: tl.constexpr = frames.dtype.element_ty
    margin = from_bits(margin_bits, REAL)
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask, total = i < count, count + count
    a_x, a_y, a_reach_x, a_reach_y = load_reach(frames, i, mask, total)
    b_x, b_y, b_reach_x, b_reach_y = load_reach(frames, count + i, mask, total)
    close = near(a_x, a_y, a_reach_x, a_reach_y, b_x, b_y, b_reach_x, b_reach_y)
    a_half_x, a_half_y, a_cos, a_sin, a_area = load_shape(frames, i, mask, total)
    b_half_x, b_half_y, b_cos, b_sin, b_area = load_shape(frames, count + i, mask, total)
    found = overlap(
        a_x - b_x, a_y - b_y, a_half_x, a_half_y, a_cos, a_sin, a_area, b_half_x, b_half_y, b_cos, b_sin, b_area,
        margin, MODE, POLYGON,
    )  # fmt: skip
    tl.store(out + i, tl.where(close, found, 0.0), mask)
