"""The points of each box, out of rows of any number of columns, and checks of what a file holds; Numba kernels.

`points_in_boxes` takes x, y, z alone and answers for every point. A data set has rows of four or five columns, of which
few lie in a box: here the rows are read in place and only those that a box holds are written.
"""

import pickle
from typing import Any

import numpy as np

from triops._cpu.jit import inline, jit
from triops._geometry.box.cpu import inside
from triops._geometry.box_grid.cpu import cell_of, fill_grid, keep_occupied, new_grid

TILE = 1024  # points whose cells stay in the L1 cache, and that are passed over together where no box is near


def rows_of_boxes(points: Any, boxes: Any, bottom: bool) -> tuple[Any, Any, bool]:
    """The rows in each box, box by box and in their order, less the first three fields of the box.

    points: float32 [N, C], contiguous; boxes: float32 [T, 7], contiguous; bottom: whether cz is a box's bottom.
    -> rows float32 [K, C], where those of each box end int64 [T], whether x, y, z of all points are certainly finite
    A row in several boxes is there for each.
    """
    flat = points.reshape(-1).view()
    flat.flags.writeable = False  # what was read from a file is: one kernel for both
    features, ends = points.shape[1], np.empty(len(boxes), np.int64)
    room = len(points) // 4 + TILE  # few points are in a box
    while True:  # once, unless that was too little
        found = np.empty((room, features), np.float32)
        count, finite = _copy_rows(flat, boxes, bottom, found, ends)
        if count <= room:
            return found[:count], ends, finite
        room = count


@jit
def all_finite(flat):
    """Whether no number of a float32 array is infinite or NaN."""
    bits, largest = flat.view(np.int32), np.int32(0)
    for i in range(bits.shape[0]):
        largest = max(largest, bits[i] & np.int32(0x7FFFFFFF))
    return largest < np.int32(0x7F800000)


# What follows an instruction of a pickle, where it is not a number of bytes.
LINE, LINES, COUNT = -1, -2, -2  # a line; two lines; COUNT - n: a little-endian count of n bytes, then so many bytes
NOTHING_ELSE = 1 << 40  # there is no such instruction, and reading ends
PUT, LONG_BINPUT, STOP = pickle.PUT[0], pickle.LONG_BINPUT[0], pickle.STOP[0]
FRAME = pickle.FRAME[0]


@jit
def first_far_put(data, arguments, limit):
    """Where the first instruction of a pickle stands that puts something at `limit` of its memo or beyond, or -1.

    One that goes on behind the end of its frame counts too: Python's reader drops what the frame has of it, and would
    read other instructions from there on than stand here one after the other.

    data: uint8 [N]; arguments: int64 [256], what follows each instruction.
    """
    size, at, start, frame = data.shape[0], 0, 0, 0
    while at < size:
        if start < frame < at:
            return start
        start, code = at, data[at]
        at += 1
        if code == STOP:
            return -1
        follows = arguments[code]
        if follows >= 0:
            at += follows
            if code == LONG_BINPUT and at <= size and _little_endian(data, start + 1, 4) >= limit:
                return start
            if code == FRAME and at <= size:
                count = _little_endian(data, start + 1, 8)
                if count < 0 or count > size - at:
                    return -1
                if at < frame < at + count:
                    return start
                frame = max(frame, at + count)
        elif follows >= LINES:
            for _ in range(-follows):
                while at < size and data[at] != 0x0A:
                    at += 1
                at += 1
            if code == PUT and not _decimal_below(data, start + 1, min(at - 1, size), limit):
                return start
        else:
            width = COUNT - follows
            count = _little_endian(data, at, width) if width <= size - at else NOTHING_ELSE
            at += width
            if count < 0 or count > size - at:  # of eight bytes, it may be negative here
                return -1
            at += count
    return -1


@jit
def _little_endian(data, start, width):
    value = np.int64(0)
    for i in range(width):
        value |= np.int64(data[start + i]) << (8 * i)
    return value


@jit
def _decimal_below(data, start, end, limit):
    """Whether the text is a number below `limit`, in digits alone."""
    value = np.int64(0)
    for i in range(start, end):
        digit = np.int64(data[i]) - 0x30
        if digit < 0 or digit > 9 or value >= limit:
            return False
        value = 10 * value + digit
    return value < limit


@inline
def _look(tile, features, count, extent):
    """-> not 0 if a point lies in the extent of all boxes; not 0 if a coordinate may be infinite or NaN

    The sum of three numbers of which one is infinite or NaN is so too, and less itself it is not 0. Huge numbers may
    add up to infinity as well.
    """
    x0, x1, y0, y1, z0, z1 = extent[0], extent[1], extent[2], extent[3], extent[4], extent[5]
    near, not_finite = np.int32(0), np.int32(0)
    for i in range(np.uint32(count)):  # unsigned, so that LLVM shuffles vectors where `features` is a constant
        j = np.uint32(features) * i
        x, y, z = tile[j], tile[j + np.uint32(1)], tile[j + np.uint32(2)]
        near |= np.int32((x >= x0) & (x <= x1) & (y >= y0) & (y <= y1) & (z >= z0) & (z <= z1))
        total = x + y + z
        not_finite |= np.int32((total - total) != 0)
    return near, not_finite


@inline
def _find_cells(tile, features, count, extent, scale, bits, cell):
    """Cells of a tile's points."""
    x0, x1, y0, y1, z0, z1 = extent[0], extent[1], extent[2], extent[3], extent[4], extent[5]
    scale_x, scale_y = scale[0], scale[1]
    for i in range(np.uint32(count)):
        j = np.uint32(features) * i
        x, y, z = tile[j], tile[j + np.uint32(1)], tile[j + np.uint32(2)]
        cell[i] = cell_of(x, y, z, x0, x1, y0, y1, z0, z1, scale_x, scale_y, bits)


@jit
def _find_pairs(flat, features, frame, extent, scale, bits, first, box_of_cell, occupied, row, box, counts):
    """Pairs of a row and a box that holds it, by row; boxes' counts.

    A sweep goes around, and most boxes are on one side of it: most tiles need no cells.
    -> number of pairs, which may be more than there is room for; whether all points are certainly finite
    """
    cell, kept = np.empty(TILE, np.int32), np.empty(TILE + 1, np.uint32)
    rows, room, found, not_finite = flat.shape[0] // features, row.shape[0], 0, np.int32(0)
    counts[:] = 0
    for start in range(0, rows, TILE):
        count = min(TILE, rows - start)
        tile = flat[features * start : features * (start + count)]
        near, strange = _look(tile, 4, count, extent) if features == 4 else _look(tile, features, count, extent)
        not_finite |= strange
        if near == 0:
            continue
        if features == 4:
            _find_cells(tile, 4, count, extent, scale, bits, cell)
        else:
            _find_cells(tile, features, count, extent, scale, bits, cell)
        for k in range(np.uint32(keep_occupied(cell, occupied, count, kept))):
            i = np.int64(kept[k])
            x, y, z = tile[features * i], tile[features * i + 1], tile[features * i + 2]
            c = np.uint32(cell[i])
            for j in range(first[c], first[c + np.uint32(1)]):
                t = box_of_cell[j]
                if inside(x, y, z, frame[t]):
                    if found < room:
                        row[found] = start + i
                        box[found] = t
                    counts[t] += 1
                    found += 1
    return found, not_finite == 0


@jit
def _copy_rows(flat, boxes, bottom, found, ends):
    """Fill `found`, box by box, and `ends`. One call for all: Python's way into a kernel takes longer than its steps.

    -> number of rows, and nothing is filled where it is more than there is room for; whether all points are certainly
    finite
    """
    room, features = found.shape
    row, box = np.empty(room, np.int32), np.empty(room, np.int32)
    frame, extent, scale, bits, first, cell_boxes, occupied = new_grid(boxes, flat.shape[0] // features)
    bits = fill_grid(boxes, bottom, 0.0, bits, frame, extent, scale, first, cell_boxes, occupied)
    pairs, finite = _find_pairs(flat, features, frame, extent, scale, bits, first, cell_boxes, occupied, row, box, ends)
    if pairs > room:
        return pairs, finite
    begin = 0
    for t in range(ends.shape[0]):
        count = ends[t]
        ends[t] = begin  # the cursor, which arrives at the end
        begin += count
    for k in range(pairs):
        t = box[k]
        to, source = ends[t], features * row[k]
        ends[t] += 1
        for c in range(3):
            found[to, c] = flat[source + c] - boxes[t, c]
        for c in range(3, features):
            found[to, c] = flat[source + c]
    return pairs, finite
