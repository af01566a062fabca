"""box_iou_rotated on GPU: tiles of pairs. Rectangles far apart share nothing.

Many pairs take two launches, one for the frames of all rectangles and one for the tiles; a tile in which no pair is
near is only filled with 0. Where pairs are few, or a rectangle has but one, frames are made where they are used.
The polygon of a margin sorts its points in registers, so a thread has one pair there, and it takes thousands of
instructions, so a warp decides by itself whether any of its pairs is near.
"""

import torch
import triton
import triton.language as tl

from triops import _gpu
from triops._geometry.rotated.gpu import load_reach, load_rectangle, load_shape, make_frames, near, overlap
from triops._geometry.rotated.reference import MODES
from triops._gpu.arithmetic import from_bits

# A pair needs many registers, so a thread has few of them. Rows, columns and warps of a tile, by whether there is a
# margin.
TILES = {
    False: (_gpu.block(8, interpreted=64), _gpu.block(64, interpreted=512), 4),
    True: (_gpu.block(1, interpreted=64), _gpu.block(32, interpreted=512), 1),
}
ALIGNED_BLOCK = _gpu.block(128, interpreted=4096)
FEW_PAIRS = _gpu.block(2**18, interpreted=1000)  # up to these, one launch is over sooner than two


def box_iou_rotated(bboxes1, bboxes2, mode, aligned, clockwise, margin):
    rows, columns = bboxes1.shape[0], bboxes2.shape[0]
    shape = (rows,) if aligned else (rows, columns)
    out = torch.empty(shape, dtype=bboxes1.dtype, device=bboxes1.device)
    if out.numel() == 0:
        return out
    bboxes1, bboxes2 = bboxes1.contiguous(), bboxes2.contiguous()
    rules = {"MODE": MODES.index(mode), "POLYGON": margin > 0}
    fields = bboxes1.shape[1]
    if aligned:
        _aligned_kernel[(_gpu.cdiv(rows, ALIGNED_BLOCK),)](
            bboxes1, bboxes2, out, rows, _gpu.bits_of(margin),
            **rules, CLOCKWISE=clockwise, FIELDS=fields, BLOCK=ALIGNED_BLOCK, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
        return out
    tile_rows, tile_columns, warps = TILES[margin > 0]
    tiles = _gpu.cdiv(columns, tile_columns)
    options = {"ROWS": tile_rows, "COLUMNS": tile_columns, "num_warps": warps, "enable_fp_fusion": False}
    grid = (_gpu.cdiv(rows, tile_rows) * tiles,)
    sizes = rows, columns, tiles, _gpu.bits_of(margin)

    def launch(few):
        if few:
            _few_pairs_kernel[grid](
                bboxes1, bboxes2, out, *sizes, **rules, CLOCKWISE=clockwise, FIELDS=fields, **options
            )
        else:
            frames = make_frames(bboxes1, bboxes2, clockwise, margin)
            _pairs_kernel[grid](frames, out, *sizes, **rules, **options)

    key = "box_iou_rotated", bboxes1.dtype, fields, mode, clockwise, margin > 0
    _gpu.compile_once(key, lambda: (launch(True), launch(False)))
    launch(rows * columns <= FEW_PAIRS)
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
def _few_pairs_kernel(
    bboxes1, bboxes2, out, rows, columns, tiles, margin_bits: tl.int64,
    MODE: tl.constexpr, POLYGON: tl.constexpr, CLOCKWISE: tl.constexpr, FIELDS: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    REAL: tl.constexpr = tl.float64 if out.dtype.element_ty == tl.float64 else tl.float32
    i = (tl.program_id(0) // tiles * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    j = (tl.program_id(0) % tiles * COLUMNS + tl.arange(0, COLUMNS)).to(tl.int64)[None, :]
    value = _of_rectangles(
        bboxes1,
        i,
        i < rows,
        bboxes2,
        j,
        j < columns,
        from_bits(margin_bits, REAL),
        MODE,
        POLYGON,
        CLOCKWISE,
        FIELDS,
        REAL,
    )
    tl.store(out + i * columns + j, value, (i < rows) & (j < columns))


@_gpu.kernel
def _aligned_kernel(
    bboxes1, bboxes2, out, count, margin_bits: tl.int64,
    MODE: tl.constexpr, POLYGON: tl.constexpr, CLOCKWISE: tl.constexpr, FIELDS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    REAL: tl.constexpr = tl.float64 if out.dtype.element_ty == tl.float64 else tl.float32
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    value = _of_rectangles(
        bboxes1,
        i,
        i < count,
        bboxes2,
        i,
        i < count,
        from_bits(margin_bits, REAL),
        MODE,
        POLYGON,
        CLOCKWISE,
        FIELDS,
        REAL,
    )
    tl.store(out + i, value, i < count)


@triton.jit
def _of_rectangles(
    bboxes1, i, in_first, bboxes2, j, in_second, margin,
    MODE: tl.constexpr, POLYGON: tl.constexpr, CLOCKWISE: tl.constexpr, FIELDS: tl.constexpr, REAL: tl.constexpr,
):  # fmt: skip
    """Overlaps of rectangles `i` of the first with rectangles `j` of the second, whose shapes broadcast."""
    a_x, a_y, a_half_x, a_half_y, a_cos, a_sin, a_reach_x, a_reach_y, a_area = load_rectangle(
        bboxes1, i, in_first, margin, CLOCKWISE, FIELDS, REAL
    )
    b_x, b_y, b_half_x, b_half_y, b_cos, b_sin, b_reach_x, b_reach_y, b_area = load_rectangle(
        bboxes2, j, in_second, margin, CLOCKWISE, FIELDS, REAL
    )
    close = near(a_x, a_y, a_reach_x, a_reach_y, b_x, b_y, b_reach_x, b_reach_y)
    value = tl.zeros(close.shape, REAL)
    if tl.max(tl.ravel(close).to(tl.int32), 0) > 0:
        found = overlap(
            a_x - b_x, a_y - b_y, a_half_x, a_half_y, a_cos, a_sin, a_area, b_half_x, b_half_y, b_cos, b_sin, b_area,
            margin, MODE, POLYGON,
        )  # fmt: skip
        value = tl.where(close, found, 0.0)
    return value
