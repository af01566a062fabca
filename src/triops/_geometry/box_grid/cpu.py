"""A bird's-eye grid over boxes for Numba kernels: a point is tested only against the boxes of its cell.

Points are processed in tiles that stay in the L1 cache: `find_cells` (vectorised), `keep_occupied`, then the test.
"""

import numpy as np

from triops._cpu.jit import inline, jit
from triops._geometry.box.cpu import bounds, frames

COARSE, FINE = 6, 7  # the grid has 2**6 or 2**7 cells per side, or fewer where many boxes overlap
MANY_BOXES = 100  # from this number on the fine grid, which takes 7 us longer to build
ENTRIES_PER_INPUT, MIN_ENTRIES = 4, 1 << 14  # of all cells' lists, before the grid is made coarser
MAX_ENTRIES = 1 << 31  # they are counted in uint32
TILE = 256


@jit
def _cell(value, low, scale, zero, last):
    """Monotone map of a coordinate to a cell, the same for boxes and points, so that no box is missed."""
    position = (value - low) * scale
    position = position if position > zero else zero  # also for NaN
    return np.int32(position if position < last else last)


def build_grid(boxes, bottom, margin, points):
    """The grid of one batch element, for the given number of points.

    -> frames [T, 8], extent [6], scale [2], bits of a cell's number per axis, and the boxes of each cell c:
    box[first[c]:first[c + 1]], ascending; occupied[c] says whether there are any.
    """
    frame, extent, scale, bits, first, box, occupied = new_grid.py_func(boxes, points)
    bits = fill_grid(boxes, bottom, margin, bits, frame, extent, scale, first, box, occupied)
    return frame, extent, scale, bits, first, box, occupied


@jit
def new_grid(boxes, points):
    """What `build_grid` returns, before it is filled."""
    count, real = len(boxes), boxes.dtype
    bits = FINE if count >= MANY_BOXES else COARSE
    cells = 1 << (2 * bits)
    entries = min(ENTRIES_PER_INPUT * (points + count) + MIN_ENTRIES, cells * count, MAX_ENTRIES)
    # One extra cell stays empty: points outside the extent are mapped to it.
    first, box = np.empty(cells + 2, np.uint32), np.empty(entries, np.uint32)
    occupied = np.empty(cells + 1, np.uint8)  # bytes, so that the table fits the L1 cache
    frame, extent, scale = np.empty((count, 8), real), np.empty(6, real), np.empty(2, real)
    return frame, extent, scale, bits, first, box, occupied


@jit
def fill_grid(boxes, bottom, margin, bits, frame, extent, scale, first, box, occupied):
    """Fill what `build_grid` returns. -> bits, fewer than given where the lists would not fit in `box`

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


@inline
def cell_of(x, y, z, x0, x1, y0, y1, z0, z1, scale_x, scale_y, bits):
    """The cell of a point, or the one behind the last where it is outside the extent.

    For vectorised loops: the extent and the scale are numbers, since arrays would be read again for every point.
    """
    real = type(x0)
    zero, last, outside, bits = real(0), real((1 << bits) - 1), np.int32(1 << (2 * bits)), np.int32(bits)
    u = _cell(x, x0, scale_x, zero, last)
    v = _cell(y, y0, scale_y, zero, last)
    within = (x >= x0) & (x <= x1) & (y >= y0) & (y <= y1) & (z >= z0) & (z <= z1)
    return np.int32(u << bits) + v if within else outside


@jit
def find_cells(x, y, z, extent, scale, bits, cell):
    x0, x1, y0, y1, z0, z1 = extent[0], extent[1], extent[2], extent[3], extent[4], extent[5]
    scale_x, scale_y = scale[0], scale[1]
    for i in range(TILE):
        cell[i] = cell_of(x[i], y[i], z[i], x0, x1, y0, y1, z0, z1, scale_x, scale_y, bits)


@jit
def keep_occupied(cell, occupied, count, kept):
    """Indices of the tile's points that lie in an occupied cell, without a branch."""
    n = np.uint32(0)
    for i in range(np.uint32(count)):
        kept[n] = i
        n += np.uint32(occupied[np.uint32(cell[i])])
    return n
