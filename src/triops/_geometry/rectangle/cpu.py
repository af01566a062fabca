"""Overlap of axis-aligned rectangles for Numba kernels, on boxes split into arrays of x1, y1, x2, y2."""

import numpy as np

from triops._cpu.half import widen
from triops._cpu.intrinsics import maximum, minimum
from triops._cpu.jit import jit

# Rows of the tiles that `split` fills.
X1, Y1, X2, Y2, WIDTH, HEIGHT, AREA = range(7)


@jit
def _bounded(side):
    return side if abs(side) < np.inf else type(side)(0)


@jit
def load_box(boxes, i, offset):
    """x1, y1, x2, y2, width, height, area. A box that is not finite becomes one that overlaps no other.

    A side too long for a float counts as 0: its box has no gradient, and 0 times infinity would be NaN.
    """
    x1, y1, x2, y2 = widen(boxes[i, 0]), widen(boxes[i, 1]), widen(boxes[i, 2]), widen(boxes[i, 3])
    zero = type(offset)(0)
    infinity = type(offset)(np.inf)
    finite = (x1 - x1) + (y1 - y1) + (x2 - x2) + (y2 - y2) == zero
    x1, x2 = (x1 if finite else infinity), (x2 if finite else -infinity)
    y1, y2 = (y1 if finite else zero), (y2 if finite else zero)
    width, height = x2 - x1 + offset, y2 - y1 + offset
    area = width * height if finite else zero
    return x1, y1, x2, y2, _bounded(width), _bounded(height), area


@jit
def split(boxes, begin, end, offset, tile):
    """boxes [begin, end) -> tile [7, .]: one row per field."""
    for j in range(np.uint64(end - begin)):
        x1, y1, x2, y2, width, height, area = load_box(boxes, np.uint64(begin) + j, offset)
        tile[X1, j], tile[Y1, j], tile[X2, j], tile[Y2, j] = x1, y1, x2, y2
        tile[WIDTH, j], tile[HEIGHT, j], tile[AREA, j] = width, height, area


@jit
def split_rows(boxes, rows, offset, tile):
    """boxes [rows] -> tile [7, .]: one row per field."""
    for j in range(len(rows)):
        x1, y1, x2, y2, width, height, area = load_box(boxes, np.uint64(rows[j]), offset)
        tile[X1, j], tile[Y1, j], tile[X2, j], tile[Y2, j] = x1, y1, x2, y2
        tile[WIDTH, j], tile[HEIGHT, j], tile[AREA, j] = width, height, area


@jit
def overlap(x1, y1, x2, y2, area, other_x1, other_y1, other_x2, other_y2, other_area, iof, offset):
    zero = type(offset)(0)
    width = minimum(x2, other_x2) - maximum(x1, other_x1) + offset
    height = minimum(y2, other_y2) - maximum(y1, other_y1) + offset
    inter = maximum(width, zero) * maximum(height, zero)
    base = area if iof else area + other_area - inter
    base = offset if base < offset else base  # a NaN stays, and the ratio becomes 0
    return maximum(inter / base, zero)
