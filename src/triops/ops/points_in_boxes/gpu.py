"""points_in_boxes on GPU: a bird's-eye grid of box bitmasks, then each point walks the set bits of its cell.

Two launches; few points and boxes take one that tests all pairs. `_build_grid_kernel` writes the boxes' frames and, for
each cell, one bit per box that may reach into it, with a head word that tells which 32-box words are not zero.
`_search_kernel` looks up the cell of each point and tests its boxes in ascending order, all of them or until one holds
the point.
"""

import torch
import triton
import triton.language as tl

from triops import _gpu
from triops._dtypes import compute_dtype
from triops._geometry.box.gpu import inside, load_frame, make_frame, store_frame
from triops._gpu.arithmetic import as_mask, from_bits

GRID = 64  # cells per side
CELLS = _gpu.block(64, interpreted=GRID * GRID)  # cells per program of the build kernel
BLOCK = _gpu.block(64, interpreted=1024)  # points per program of the search kernel
FEW_PAIRS = _gpu.block(2**20, interpreted=4096)  # of a point and a box: up to these, all are tested in one launch
PAIR_BOXES = 32  # that a program takes at a time there
MAX_BOXES = 1024  # what a head word of 32 bits can describe; more boxes take another round
WORKSPACE = 256 * 2**20  # bytes that the grids may take; more batch elements than fit take another round


def points_in_boxes(points, boxes, z_origin, margin):
    out = torch.empty(points.shape[:2], dtype=torch.int32, device=points.device)
    if boxes.shape[1] == 0:
        return out.fill_(-1)
    _search(points, boxes, z_origin, margin, out, every=False)
    return out


def points_in_boxes_all(points, boxes, z_origin, margin):
    out = torch.empty((*points.shape[:2], boxes.shape[1]), dtype=torch.bool, device=points.device)
    _search(points, boxes, z_origin, margin, out, every=True)
    return out


def _search(points, boxes, z_origin, margin, out, every):
    if out.numel() == 0:
        return
    given = points.contiguous(), boxes.contiguous(), z_origin, margin, out, every
    _gpu.compile_once(
        ("points_in_boxes", points.dtype, z_origin, every), lambda: (_search_all_pairs(*given), _search_grid(*given))
    )
    if points.shape[0] * points.shape[1] * boxes.shape[1] <= FEW_PAIRS:
        _search_all_pairs(*given)
    else:
        if every:
            out.zero_()  # few points of a scene lie in a box: clear everything in one sweep and write the hits
        _search_grid(*given)


def _search_all_pairs(points, boxes, z_origin, margin, out, every):
    batch, count, total = points.shape[0], points.shape[1], boxes.shape[1]
    blocks = _gpu.cdiv(count, BLOCK)
    _pairs_kernel[(batch * blocks,)](
        points, boxes, out, count, total, blocks, _gpu.bits_of(margin),
        BOTTOM=z_origin == "bottom", EVERY=every, BLOCK=BLOCK, BOXES=PAIR_BOXES, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip


def _search_grid(points, boxes, z_origin, margin, out, every):
    batch, count, total = points.shape[0], points.shape[1], boxes.shape[1]
    words = (min(total, MAX_BOXES) + 31) // 32
    real = compute_dtype(points.dtype)
    at_once = max(1, WORKSPACE // (GRID * GRID * (1 + words) * 4 + total * 8 * real.itemsize))
    if batch > at_once:
        for first in range(0, batch, at_once):
            some = slice(first, first + at_once)
            _search_grid(points[some], boxes[some], z_origin, margin, out[some], every)
        return
    # Frames of all boxes, one row per batch element for the map from points to cells, then the masks.
    mask_rows = batch * GRID * GRID * (1 + words) // (8 if real == torch.float32 else 16) + 1
    workspace = torch.empty((batch * total + batch + mask_rows, 8), dtype=real, device=points.device)
    blocks = (count + BLOCK - 1) // BLOCK
    for start in range(0, total, MAX_BOXES):
        _build_grid_kernel[(batch * (GRID * GRID // CELLS),)](
            boxes, workspace, start, min(start + MAX_BOXES, total), total, batch, words, _gpu.bits_of(margin),
            BOTTOM=z_origin == "bottom", GRID=GRID, CELLS=CELLS, BOXES=128,
            num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
        _search_kernel[(batch * blocks,)](
            points, workspace, out, start, count, total, batch, words, blocks,
            EVERY=every, GRID=GRID, BLOCK=BLOCK,
            num_warps=1, enable_fp_fusion=False,
        )  # fmt: skip


@_gpu.kernel
def _pairs_kernel(
    points, boxes, out, count, total, blocks, margin_bits: tl.int64,
    BOTTOM: tl.constexpr, EVERY: tl.constexpr, BLOCK: tl.constexpr, BOXES: tl.constexpr,
):  # fmt: skip
    REAL: tl.constexpr = tl.float64 if points.dtype.element_ty == tl.float64 else tl.float32
    b = tl.program_id(0) // blocks
    i = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
    offset = b.to(tl.int64) * count + i
    x, y, z = _load_points(points, offset, i < count, REAL)
    found = tl.zeros((BLOCK,), tl.int32) + total
    for first in range(0, total, BOXES):
        t = first + tl.arange(0, BOXES)
        cx, cy, cz, half_x, half_y, half_z, cos, sin = make_frame(
            boxes, b * total + t, t < total, margin_bits, BOTTOM, REAL
        )
        hit = inside(
            x[:, None], y[:, None], z[:, None], cx[None], cy[None], cz[None], half_x[None], half_y[None], half_z[None],
            cos[None], sin[None],
        )  # fmt: skip
        if EVERY:
            tl.store(out + offset[:, None] * total + t[None], hit, (i < count)[:, None] & (t < total)[None])
        else:
            found = tl.minimum(found, tl.min(tl.where(hit, t[None], total), 1))
    if not EVERY:
        tl.store(out + offset, tl.where(found < total, found, -1), i < count)


@triton.jit
def _load_points(points, offset, mask, REAL: tl.constexpr):
    """x, y, z; where masked off, a point that lies in no box."""
    point = points + offset * 3
    x = tl.load(point, mask, float("nan")).to(REAL)
    y = tl.load(point + 1, mask, 0.0).to(REAL)
    z = tl.load(point + 2, mask, 0.0).to(REAL)
    return x, y, z


@triton.jit
def _masks(workspace, rows):
    """Where the masks begin: behind the rows of frames."""
    return (workspace + rows.to(tl.int64) * 8).to(tl.pointer_type(tl.int32), bitcast=True)


@triton.jit
def _cell(value, low, scale, GRID: tl.constexpr):
    """Monotone map of a coordinate to a cell, the same for boxes and points, so that no box is missed."""
    position = (value - low) * scale
    position = tl.where(position > 0, position, 0.0)  # also for NaN
    return tl.where(position < GRID - 1, position, GRID - 1).to(tl.int32)


@_gpu.kernel
def _build_grid_kernel(
    boxes, frames, start, stop, total, batch, words, margin_bits: tl.int64,
    BOTTOM: tl.constexpr, GRID: tl.constexpr, CELLS: tl.constexpr, BOXES: tl.constexpr,
):  # fmt: skip
    REAL: tl.constexpr = frames.dtype.element_ty
    programs = GRID * GRID // CELLS
    b = tl.program_id(0) // programs
    part = tl.program_id(0) % programs
    margin = from_bits(margin_bits, REAL)
    huge = tl.full((), float("inf"), REAL)

    # The extent of all boxes: a circle around each is tight enough, and needs no heading.
    low_x, high_x, low_y, high_y = huge, -huge, huge, -huge
    for first in range(start, stop, BOXES):
        t = first + tl.arange(0, BOXES)
        field = boxes + (b * total + t).to(tl.int64) * 7
        cx = tl.load(field, t < stop, 0.0).to(REAL)
        cy = tl.load(field + 1, t < stop, 0.0).to(REAL)
        half_x = tl.load(field + 3, t < stop, 0.0).to(REAL) * 0.5 + margin
        half_y = tl.load(field + 4, t < stop, 0.0).to(REAL) * 0.5 + margin
        radius = half_x + half_y
        reach_x = radius * 1.001 + tl.abs(cx) * 1e-4
        reach_y = radius * 1.001 + tl.abs(cy) * 1e-4
        holds = (t < stop) & (half_x > 0) & (half_y > 0) & ((reach_x + reach_y) * 0 == 0)
        low_x = tl.minimum(low_x, tl.min(tl.where(holds, cx - reach_x, huge), 0))
        high_x = tl.maximum(high_x, tl.max(tl.where(holds, cx + reach_x, -huge), 0))
        low_y = tl.minimum(low_y, tl.min(tl.where(holds, cy - reach_y, huge), 0))
        high_y = tl.maximum(high_y, tl.max(tl.where(holds, cy + reach_y, -huge), 0))
    scale_x = GRID / tl.maximum(high_x - low_x, 1e-6)
    scale_y = GRID / tl.maximum(high_y - low_y, 1e-6)
    if part == 0:
        store_frame(frames, batch * total + b, True, low_x, high_x, low_y, high_y, scale_x, scale_y, huge, huge)

    cell = part * CELLS + tl.arange(0, CELLS)
    u, v = cell // GRID, cell % GRID
    row = _masks(frames, batch * total + batch) + (b * GRID * GRID + cell).to(tl.int64) * (1 + words)
    head = tl.zeros((CELLS,), tl.int32)
    for word in range(tl.cdiv(stop - start, 32)):
        bit = tl.arange(0, 32)
        t = start + word * 32 + bit
        cx, cy, cz, half_x, half_y, half_z, cos, sin = make_frame(
            boxes, b * total + t, t < stop, margin_bits, BOTTOM, REAL
        )
        if part == word % programs:
            store_frame(frames, b * total + t, t < stop, cx, cy, cz, half_x, half_y, half_z, cos, sin)
        # The slack is far above the few units in the last place by which the test can err.
        reach_x = (tl.abs(cos) * half_x + tl.abs(sin) * half_y) * 1.0001 + tl.abs(cx) * 1e-5
        reach_y = (tl.abs(sin) * half_x + tl.abs(cos) * half_y) * 1.0001 + tl.abs(cy) * 1e-5
        holds = (half_x > 0) & (half_y > 0) & (half_z >= 0)
        u_low = _cell(cx - reach_x, low_x, scale_x, GRID)
        u_high = tl.where(holds, _cell(cx + reach_x, low_x, scale_x, GRID), -1)
        v_low = _cell(cy - reach_y, low_y, scale_y, GRID)
        v_high = _cell(cy + reach_y, low_y, scale_y, GRID)
        reaches = (u[:, None] >= u_low[None]) & (u[:, None] <= u_high[None])  # [CELLS, 32]
        reaches &= (v[:, None] >= v_low[None]) & (v[:, None] <= v_high[None])
        bits = tl.sum(reaches.to(tl.int32) << bit[None], 1)
        tl.store(row + 1 + word, bits)
        head |= (bits != 0).to(tl.int32) << word
    tl.store(row, head)


@triton.jit
def _lowest_bit(value):
    """Index of the lowest set bit of an int32, through the exponent of its float; any number for 0."""
    lowest = (value & -value).to(tl.uint32, bitcast=True).to(tl.float32)
    return (lowest.to(tl.int32, bitcast=True) >> 23) - 127


@_gpu.kernel
def _search_kernel(
    points, frames, out, start, count, total, batch, words, blocks,
    EVERY: tl.constexpr, GRID: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    REAL: tl.constexpr = frames.dtype.element_ty
    b = tl.program_id(0) // blocks
    i = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
    offset = b.to(tl.int64) * count + i
    x, y, z = _load_points(points, offset, i < count, REAL)
    extent = frames + (batch * total + b).to(tl.int64) * 8
    low_x, high_x = tl.load(extent), tl.load(extent + 1)
    low_y, high_y = tl.load(extent + 2), tl.load(extent + 3)
    cell = _cell(x, low_x, tl.load(extent + 4), GRID) * GRID + _cell(y, low_y, tl.load(extent + 5), GRID)
    row = _masks(frames, batch * total + batch) + (b * GRID * GRID + cell).to(tl.int64) * (1 + words)
    within = (x >= low_x) & (x <= high_x) & (y >= low_y) & (y <= high_y)
    found = tl.full((BLOCK,), -1, tl.int32)
    if not EVERY:  # boxes of an earlier round come first
        found = tl.load(out + offset, (i < count) & as_mask(start > 0, i), -1)
        within &= found < 0
    head = tl.load(row, within, 0)
    word = tl.zeros((BLOCK,), tl.int32)
    bits = tl.zeros((BLOCK,), tl.int32)
    busy = tl.max((head != 0).to(tl.int32), 0)
    while busy > 0:
        fetch = (bits == 0) & (head != 0)
        word = tl.where(fetch, _lowest_bit(head), word)
        head = tl.where(fetch, head & (head - 1), head)
        bits |= tl.load(row + 1 + word, fetch, 0)
        active = bits != 0
        t = start + word * 32 + _lowest_bit(bits)
        bits &= bits - 1
        hit = inside(x, y, z, *load_frame(frames, b * total + t, active))
        if EVERY:
            tl.store(out + offset * total + t, hit, hit)
        else:
            found = tl.where(hit, t, found)
            head = tl.where(hit, 0, head)
            bits = tl.where(hit, 0, bits)
        busy = tl.max(((head | bits) != 0).to(tl.int32), 0)
    if not EVERY:
        tl.store(out + offset, found, i < count)
