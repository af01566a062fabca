"""bbox_overlaps on CPU: tiles of rows x columns, the columns split into arrays of x1, y1, x2, y2.

So the inner loop is one row box against a run of column boxes, which LLVM vectorises.
Half types are converted to float32 when a tile is split and rounded as they are stored.
"""

import numpy as np
import torch

from triops._cpu.half import as_bits, narrow, widen
from triops._cpu.intrinsics import maximum, minimum
from triops._cpu.jit import jit
from triops._cpu.memory import as_numpy, in_huge_pages, zeros
from triops._cpu.threads import run
from triops._geometry.rectangle.cpu import AREA, HEIGHT, WIDTH, X1, X2, Y1, Y2, load_box, overlap, split
from triops.ops.bbox_overlaps import batches, output_shape

ROWS = 128
COLUMNS = 1024  # a tile's split columns stay in the L1 cache
PARTS = 8  # partial sums of the gradient of bboxes2: as many threads can share the rows
GRAIN = 500_000  # pairs worth a thread
BACKWARD_GRAIN = 50_000

# The offset as an array of one element, whose dtype is the one to compute in: float32, or float64 for float64.
_OFFSETS = [[np.array([offset], real) for offset in (0, 1)] for real in (np.float32, np.float64)]


def bbox_overlaps(bboxes1, bboxes2, mode, aligned, offset):
    # Allocated first, so that a result too large for the machine fails at once.
    out = torch.empty(output_shape(bboxes1, bboxes2, aligned), dtype=bboxes1.dtype)
    if out.numel() == 0:
        return out
    options = mode == "iof", _OFFSETS[bboxes1.dtype == torch.float64][offset]
    in_huge_pages(out)
    if aligned:
        boxes1, boxes2 = _rows(bboxes1, out.shape), _rows(bboxes2, out.shape)
        run(_aligned, out.numel(), GRAIN, boxes1, boxes2, *options, as_bits(out).reshape(-1))
        return out
    *lead, rows, columns = out.shape
    boxes1, boxes2 = _batches(bboxes1, lead), _batches(bboxes2, lead)
    out_rows = as_bits(out).reshape(-1, rows, columns)
    tiles = out_rows.shape[0] * -(-rows // ROWS) * -(-columns // COLUMNS)
    grain = max(1, GRAIN // (min(rows, ROWS) * min(columns, COLUMNS)))
    run(_tiles, tiles, grain, boxes1, boxes2, *options, out_rows)
    return out


def bbox_overlaps_backward(grad, bboxes1, bboxes2, mode, aligned, offset):
    if grad.numel() == 0:
        return torch.zeros_like(bboxes1), torch.zeros_like(bboxes2)
    options = mode == "iof", _OFFSETS[bboxes1.dtype == torch.float64][offset]
    real = torch.float64 if bboxes1.dtype == torch.float64 else torch.float32
    grad_bits = as_bits(grad)
    if aligned:
        boxes1, boxes2 = _rows(bboxes1, grad.shape), _rows(bboxes2, grad.shape)
        grad1, grad2 = torch.empty(2, *grad.shape, 4, dtype=real)
        flat1, flat2 = as_numpy(grad1).reshape(-1, 4), as_numpy(grad2).reshape(-1, 4)
        run(
            _aligned_backward,
            grad.numel(),
            BACKWARD_GRAIN,
            grad_bits.reshape(-1),
            boxes1,
            boxes2,
            *options,
            flat1,
            flat2,
        )
    else:
        lead, (rows, columns) = grad.shape[:-2], grad.shape[-2:]
        boxes1, boxes2 = _batches(bboxes1, lead), _batches(bboxes2, lead)
        parts = min(PARTS, -(-rows // 16))
        grad1 = zeros(lead.numel(), rows, 4, dtype=real)
        partial2 = torch.empty(lead.numel(), parts, columns, 4, dtype=real)
        grain = max(1, BACKWARD_GRAIN // (-(-rows // parts) * columns))
        grad_bits = grad_bits.reshape(-1, rows, columns)
        sums = as_numpy(grad1), as_numpy(partial2)
        run(_tiles_backward, lead.numel() * parts, grain, grad_bits, boxes1, boxes2, *options, *sums)
        grad2 = torch.from_numpy(partial2.numpy().sum(1))  # as torch would, on one thread
        grad1, grad2 = grad1.view(*lead, rows, 4), grad2.view(*lead, columns, 4)
    return tuple(
        g.sum_to_size(b.shape).to(b.dtype).contiguous() for g, b in ((grad1, bboxes1), (grad2, bboxes2))
    )  # fmt: skip


def _batches(bboxes, lead):
    """[B, rows, 4], or [1, rows, 4] where all batches share one set."""
    return as_bits(bboxes)[None] if bboxes.dim() == 2 else as_bits(batches(bboxes, lead))


def _rows(bboxes, shape):
    return as_bits(bboxes.expand(*shape, 4)).reshape(-1, 4)


@jit
def _row(x1, y1, x2, y2, area, tile, count, iof, offset, out):
    a, b, c, d, e = tile[X1], tile[Y1], tile[X2], tile[Y2], tile[AREA]
    for j in range(np.uint32(count)):
        out[j] = narrow(overlap(x1, y1, x2, y2, area, a[j], b[j], c[j], d[j], e[j], iof, offset), out)


@jit
def _tiles(begin, end, boxes1, boxes2, iof, offsets, out):
    """Tiles `begin` to `end` of out [B, M, N], batch by batch, row by row."""
    offset = offsets[0]
    rows, columns = out.shape[1], out.shape[2]
    row_tiles, column_tiles = -(-rows // ROWS), -(-columns // COLUMNS)
    tile = np.empty((7, COLUMNS), offsets.dtype)
    for number in range(begin, end):
        batch, number = number // (row_tiles * column_tiles), number % (row_tiles * column_tiles)
        row, column = number // column_tiles * ROWS, number % column_tiles * COLUMNS
        last_row, last_column = min(row + ROWS, rows), min(column + COLUMNS, columns)
        first = boxes1[batch if boxes1.shape[0] > 1 else 0]
        split(boxes2[batch if boxes2.shape[0] > 1 else 0], column, last_column, offset, tile)
        for i in range(row, last_row):
            x1, y1, x2, y2, _, _, area = load_box(first, i, offset)
            count = last_column - column
            _row(x1, y1, x2, y2, area, tile, count, iof, offset, out[batch, i, column:last_column])


@jit
def _aligned(begin, end, boxes1, boxes2, iof, offsets, out):
    offset = offsets[0]
    for i in range(np.uint64(begin), np.uint64(end)):
        a, b, c, d, _, _, e = load_box(boxes1, i, offset)
        f, g, h, k, _, _, m = load_box(boxes2, i, offset)
        out[i] = narrow(overlap(a, b, c, d, e, f, g, h, k, m, iof, offset), out)


@jit
def _share(low, high, one):
    """How far `low` is the lesser of the two: 1 where it is, 1/2 where they are equal, else 0."""
    half = one / (one + one)
    return one if low < high else (half if low == high else one - one)


@jit
def _slopes(grad, x1, y1, x2, y2, area, other_x1, other_y1, other_x2, other_y2, other_area, iof, offset):
    """Derivatives by the width and the height of the intersection, and by the areas; 0 where nothing overlaps."""
    zero = type(offset)(0)
    width = minimum(x2, other_x2) - maximum(x1, other_x1) + offset
    height = minimum(y2, other_y2) - maximum(y1, other_y1) + offset
    inter = width * height
    base = area if iof else area + other_area - inter
    denominator = offset if base < offset else base
    overlapping = (width >= zero) & (height >= zero) & (denominator > zero) & (denominator < np.inf)
    by_inter = grad / denominator
    by_area = -(inter / denominator * by_inter) if overlapping & (base >= offset) else zero
    by_inter = by_inter if iof else by_inter - by_area
    return by_inter * height if overlapping else zero, by_inter * width if overlapping else zero, by_area


@jit
def _row_backward(grad, x1, y1, x2, y2, width, height, area, tile, count, iof, offset, own, others):
    """Add a row's pairs to `others` [4, columns], the gradient of the columns; `own` gets the gradient of the row."""
    a, b, c, d = tile[X1], tile[Y1], tile[X2], tile[Y2]
    other_width, other_height, other_area = tile[WIDTH], tile[HEIGHT], tile[AREA]
    own_x1, own_y1, own_x2, own_y2 = own[0], own[1], own[2], own[3]
    other_x1, other_y1, other_x2, other_y2 = others[0], others[1], others[2], others[3]
    zero, one = type(offset)(0), type(offset)(1)
    for j in range(np.uint32(count)):
        by_width, by_height, by_area = _slopes(
            widen(grad[j]), x1, y1, x2, y2, area, a[j], b[j], c[j], d[j], other_area[j], iof, offset
        )
        by_other_area = zero if iof else by_area
        share = _share(a[j], x1, one)
        own_x1[j] = -(by_width * share) - by_area * height
        other_x1[j] -= by_width * (one - share) + by_other_area * other_height[j]
        share = _share(b[j], y1, one)
        own_y1[j] = -(by_height * share) - by_area * width
        other_y1[j] -= by_height * (one - share) + by_other_area * other_width[j]
        share = _share(x2, c[j], one)
        own_x2[j] = by_width * share + by_area * height
        other_x2[j] += by_width * (one - share) + by_other_area * other_height[j]
        share = _share(y2, d[j], one)
        own_y2[j] = by_height * share + by_area * width
        other_y2[j] += by_height * (one - share) + by_other_area * other_width[j]


@jit
def _fold(values, count):
    """The sum, by halves: vector code without reordering, and the error of a pairwise sum."""
    while count > 1:
        half = (count + 1) // 2
        for j in range(np.uint32(count - half)):
            values[j] += values[np.uint32(half) + j]
        count = half
    return values[0]


@jit
def _tiles_backward(begin, end, grad, boxes1, boxes2, iof, offsets, grad1, partial2):
    """Parts `begin` to `end`; a part is a share of the rows of one batch, with sums of its own for the columns."""
    offset = offsets[0]
    rows, columns, parts = grad.shape[1], grad.shape[2], partial2.shape[1]
    tile = np.empty((7, COLUMNS), offsets.dtype)
    own, others = np.empty((4, COLUMNS), offsets.dtype), np.empty((4, COLUMNS), offsets.dtype)
    for number in range(begin, end):
        batch, part = number // parts, number % parts
        first = boxes1[batch if boxes1.shape[0] > 1 else 0]
        second = boxes2[batch if boxes2.shape[0] > 1 else 0]
        for column in range(0, columns, COLUMNS):
            last_column = min(column + COLUMNS, columns)
            count = last_column - column
            split(second, column, last_column, offset, tile)
            others[:] = 0
            for i in range(rows * part // parts, rows * (part + 1) // parts):
                x1, y1, x2, y2, width, height, area = load_box(first, i, offset)
                slopes = grad[batch, i, column:last_column]
                _row_backward(slopes, x1, y1, x2, y2, width, height, area, tile, count, iof, offset, own, others)
                for k in range(4):
                    grad1[batch, i, k] += _fold(own[k], count)
            for j in range(count):
                for k in range(4):
                    partial2[batch, part, column + j, k] = others[k, j]


@jit
def _aligned_backward(begin, end, grad, boxes1, boxes2, iof, offsets, grad1, grad2):
    offset = offsets[0]
    tile = np.empty((7, 1), offsets.dtype)
    own, others = np.empty((4, 1), offsets.dtype), np.empty((4, 1), offsets.dtype)
    for i in range(begin, end):
        x1, y1, x2, y2, width, height, area = load_box(boxes1, i, offset)
        split(boxes2, i, i + 1, offset, tile)
        others[:] = 0
        _row_backward(grad[i : i + 1], x1, y1, x2, y2, width, height, area, tile, 1, iof, offset, own, others)
        for k in range(4):
            grad1[i, k] = own[k, 0]
            grad2[i, k] = others[k, 0]
