"""points_in_boxes on CPU: a bird's-eye grid over the boxes, so that a point is tested only against those of its cell.

Points are processed in tiles that stay in the L1 cache: split into x, y, z, look up the cells (vectorised), keep the
points whose cell holds any box, test those one by one.
"""

import numpy as np
import torch

from triops._cpu.jit import jit
from triops._cpu.memory import as_numpy, zeros
from triops._cpu.threads import run
from triops._dtypes import compute_dtype
from triops._geometry.box.cpu import bounds, frames, inside

COARSE, FINE = 6, 7  # the grid has 2**6 or 2**7 cells per side, or fewer where many boxes overlap
MANY_BOXES = 100  # from this number on the fine grid, which takes 7 us longer to build
ENTRIES_PER_INPUT, MIN_ENTRIES = 4, 1 << 14  # of all cells' lists, before the grid is made coarser
MAX_ENTRIES = 1 << 31  # they are counted in uint32
TILE = 256
BRUTE_FORCE_PAIRS = 20_000  # up to here the grid costs more than it saves
BRUTE_FORCE_POINTS = 64  # likewise, whatever the number of boxes
GRAIN = 16_384  # points worth a thread


def points_in_boxes(points, boxes, z_origin, margin):
    out = torch.empty(points.shape[:2], dtype=torch.int32)
    _answer(points, boxes, z_origin, margin, out.numpy(), every=False)
    return out


def points_in_boxes_all(points, boxes, z_origin, margin):
    # Few points of a scene lie in a box: clear everything in one sweep and write the hits.
    out = zeros(*points.shape[:2], boxes.shape[1], dtype=torch.bool)
    _answer(points, boxes, z_origin, margin, out.numpy(), every=True)
    return out


def _answer(points, boxes, z_origin, margin, out, every):
    """Fill `out`: int32 [B, M] with the first box, or where `every`, bool [B, M, T] with the hits."""
    real = compute_dtype(points.dtype)
    points_np, boxes_np = as_numpy(points.to(real)), as_numpy(boxes.to(real))
    bottom, count = z_origin == "bottom", points.shape[1]
    if count * boxes.shape[1] <= BRUTE_FORCE_PAIRS or count <= BRUTE_FORCE_POINTS:
        (_brute_force_all if every else _brute_force)(points_np, boxes_np, bottom, margin, out)
        return
    for b in range(points.shape[0]):
        grid = _build_grid(boxes_np[b], bottom, margin, count)
        run(_search_all if every else _search, count, GRAIN, points_np[b].reshape(-1), *grid, out[b])


@jit
def _brute_force(points, boxes, bottom, margin, out):
    for b in range(points.shape[0]):
        frame = frames(boxes[b], bottom, margin)
        for i in range(points.shape[1]):
            x, y, z = points[b, i, 0], points[b, i, 1], points[b, i, 2]
            found = -1
            for t in range(frame.shape[0]):
                if inside(x, y, z, frame[t]):
                    found = t
                    break
            out[b, i] = found


@jit
def _brute_force_all(points, boxes, bottom, margin, out):
    for b in range(points.shape[0]):
        frame = frames(boxes[b], bottom, margin)
        for i in range(points.shape[1]):
            for t in range(frame.shape[0]):
                out[b, i, t] = inside(points[b, i, 0], points[b, i, 1], points[b, i, 2], frame[t])


@jit
def _cell(value, low, scale, zero, last):
    """Monotone map of a coordinate to a cell, the same for boxes and points, so that no box is missed."""
    position = (value - low) * scale
    position = position if position > zero else zero  # also for NaN
    return np.int32(position if position < last else last)


def _build_grid(boxes, bottom, margin, points):
    """The grid of one batch element, for the given number of points.

    -> frames [T, 8], extent [6], scale [2], bits of a cell's number per axis, and the boxes of each cell c:
    box[first[c]:first[c + 1]], ascending; occupied[c] says whether there are any.
    """
    count, real = len(boxes), boxes.dtype
    bits = FINE if count >= MANY_BOXES else COARSE
    cells = 1 << (2 * bits)
    entries = min(ENTRIES_PER_INPUT * (points + count) + MIN_ENTRIES, cells * count, MAX_ENTRIES)
    # One extra cell stays empty: points outside the extent are mapped to it.
    first, box = np.empty(cells + 2, np.uint32), np.empty(entries, np.uint32)
    occupied = np.empty(cells + 1, np.uint8)  # bytes, so that the table fits the L1 cache
    frame, extent, scale = np.empty((count, 8), real), np.empty(6, real), np.empty(2, real)
    bits = _fill_grid(boxes, bottom, margin, bits, frame, extent, scale, first, box, occupied)
    return frame, extent, scale, bits, first, box, occupied


@jit
def _fill_grid(boxes, bottom, margin, bits, frame, extent, scale, first, box, occupied):
    """Fill what `_build_grid` returns. -> bits, fewer than given where the lists would not fit in `box`

    Boxes on top of each other would put most of them into every cell: the grid is halved until the lists are in
    proportion to the input. At worst one cell remains, and every point is tested against every box.
    """
    frame[:] = frames(boxes, bottom, margin)
    low_high = _bounds_of_all(frame, extent)
    _set_scale(extent, bits, scale)
    span = _spans(low_high, extent, scale, bits)
    while bits > 0 and _entries(span) > box.shape[0]:
        bits -= 1
        span >>= 1
        scale *= frame.dtype.type(0.5)
    _list_boxes(span, bits, first, box)
    for c in range((1 << (2 * bits)) + 1):
        occupied[c] = first[c + 1] > first[c]
    return bits


@jit
def _bounds_of_all(frame, extent):
    """-> low and high x, y, z of every box [T, 6]; those of all boxes together go to `extent`."""
    real = frame.dtype.type
    low_high = np.empty((frame.shape[0], 6), frame.dtype)
    extent[0::2], extent[1::2] = np.inf, -np.inf
    for t in range(frame.shape[0]):
        for side, value in enumerate(bounds(frame[t])):
            low_high[t, side] = value
            extent[side] = min(extent[side], real(value)) if side % 2 == 0 else max(extent[side], real(value))
    return low_high


@jit
def _set_scale(extent, bits, scale):
    """Cells per unit of length along x and y."""
    real = extent.dtype.type
    scale[0] = real(1 << bits) / max(extent[1] - extent[0], real(1e-6))
    scale[1] = real(1 << bits) / max(extent[3] - extent[2], real(1e-6))


@jit
def _spans(low_high, extent, scale, bits):
    """Cells that each box may reach into: first and last along x, first and last along y, both inclusive."""
    real = extent.dtype.type
    zero, last = real(0), real((1 << bits) - 1)
    span = np.empty((low_high.shape[0], 4), np.int32)
    for t in range(low_high.shape[0]):
        if low_high[t, 0] <= low_high[t, 1]:
            for side in range(4):
                axis = side // 2
                span[t, side] = _cell(low_high[t, side], extent[2 * axis], scale[axis], zero, last)
        else:  # holds nothing
            span[t, 0], span[t, 1], span[t, 2], span[t, 3] = 0, -1, 0, -1
    return span


@jit
def _entries(span):
    """Length of all cells' lists together."""
    total = np.int64(0)
    for t in range(span.shape[0]):
        total += np.int64(span[t, 1] - span[t, 0] + 1) * np.int64(span[t, 3] - span[t, 2] + 1)
    return total


@jit
def _list_boxes(span, bits, first, box):
    """Cell u, v is number (u << bits) + v. `first` may be longer than the grid needs."""
    last = (1 << (2 * bits)) + 1
    first[: last + 1] = 0
    for t in range(span.shape[0]):
        for u in range(span[t, 0], span[t, 1] + 1):
            for v in range(span[t, 2], span[t, 3] + 1):
                first[(u << bits) + v + 1] += 1
    for c in range(last):
        first[c + 1] += first[c]
    cursor = first[:last].copy()
    for t in range(span.shape[0]):
        for u in range(span[t, 0], span[t, 1] + 1):
            for v in range(span[t, 2], span[t, 3] + 1):
                cell = (u << bits) + v
                box[cursor[cell]] = t
                cursor[cell] += 1


@jit
def _split(flat, count, x, y, z):
    """x, y, z of consecutive points. Unsigned indices let LLVM use full-width shuffles (4x the signed loop)."""
    for i in range(np.uint32(count)):
        j = np.uint32(3) * i
        x[i] = flat[j]
        y[i] = flat[j + np.uint32(1)]
        z[i] = flat[j + np.uint32(2)]


@jit
def _find_cells(x, y, z, extent, scale, bits, cell):
    real = x.dtype.type
    zero, last, outside, bits = real(0), real((1 << bits) - 1), np.int32(1 << (2 * bits)), np.int32(bits)
    x0, x1, y0, y1, z0, z1 = extent[0], extent[1], extent[2], extent[3], extent[4], extent[5]
    scale_x, scale_y = scale[0], scale[1]
    for i in range(TILE):
        u = _cell(x[i], x0, scale_x, zero, last)
        v = _cell(y[i], y0, scale_y, zero, last)
        within = (x[i] >= x0) & (x[i] <= x1) & (y[i] >= y0) & (y[i] <= y1) & (z[i] >= z0) & (z[i] <= z1)
        cell[i] = np.int32(u << bits) + v if within else outside


@jit
def _keep_occupied(cell, occupied, count, kept):
    """Indices of the tile's points that lie in an occupied cell, without a branch."""
    n = np.uint32(0)
    for i in range(np.uint32(count)):
        kept[n] = i
        n += np.uint32(occupied[np.uint32(cell[i])])
    return n


@jit
def _place(flat, start, count, extent, scale, bits, occupied, xyz, cell, kept):
    """Load a tile of points and find which of them lie in an occupied cell; returns how many."""
    x, y, z = xyz[0], xyz[1], xyz[2]
    _split(flat[3 * start : 3 * (start + count)], count, x, y, z)
    _find_cells(x, y, z, extent, scale, bits, cell)
    return _keep_occupied(cell, occupied, count, kept)


@jit
def _search(begin, end, flat, frame, extent, scale, bits, first, box, occupied, out):
    xyz = np.zeros((3, TILE), flat.dtype)
    x, y, z = xyz[0], xyz[1], xyz[2]
    cell = np.empty(TILE, np.int32)
    kept = np.empty(TILE + 1, np.uint32)
    for start in range(begin, end, TILE):
        count = min(TILE, end - start)
        result = out[start : start + count]
        result[:] = -1
        # Which points lie in a box is unpredictable, so the first box of a cell, mostly its only one, is tested without
        # a branch. Points that it does not hold and that have other boxes to test stay in `kept`.
        left = np.uint32(0)
        for k in range(np.uint32(_place(flat, start, count, extent, scale, bits, occupied, xyz, cell, kept))):
            i = kept[k]
            c = np.uint32(cell[i])
            t = box[first[c]]
            hit = inside(x[i], y[i], z[i], frame[t])
            result[i] = np.int32(t) if hit else np.int32(-1)
            kept[left] = i
            left += np.uint32((first[c + np.uint32(1)] - first[c] > 1) & (not hit))
        for k in range(left):
            i = kept[k]
            c = np.uint32(cell[i])
            for j in range(first[c] + np.uint32(1), first[c + np.uint32(1)]):
                if inside(x[i], y[i], z[i], frame[box[j]]):
                    result[i] = box[j]
                    break


@jit
def _search_all(begin, end, flat, frame, extent, scale, bits, first, box, occupied, out):
    xyz = np.zeros((3, TILE), flat.dtype)
    x, y, z = xyz[0], xyz[1], xyz[2]
    cell = np.empty(TILE, np.int32)
    kept = np.empty(TILE + 1, np.uint32)
    for start in range(begin, end, TILE):
        count = min(TILE, end - start)
        for k in range(_place(flat, start, count, extent, scale, bits, occupied, xyz, cell, kept)):
            i = kept[k]
            c = np.uint32(cell[i])
            for j in range(first[c], first[c + np.uint32(1)]):
                out[start + i, box[j]] = inside(x[i], y[i], z[i], frame[box[j]])
