"""box_iou_rotated on CPU: for each row the columns that are near, gathered and computed in vector code; 0 elsewhere."""

import numpy as np
import torch

from triops._cpu.half import as_bits, narrow
from triops._cpu.jit import jit
from triops._cpu.memory import in_huge_pages
from triops._cpu.threads import run
from triops._geometry.rotated.arguments import rectangles
from triops._geometry.rotated.cpu import TILE, find_near, make_frames, overlaps, pack, polygon_overlaps
from triops._geometry.rotated.reference import MODES

GRAIN = 20_000  # pairs worth a thread


def box_iou_rotated(bboxes1, bboxes2, mode, aligned, clockwise, margin):
    shape = (bboxes1.shape[0],) if aligned else (bboxes1.shape[0], bboxes2.shape[0])
    out = torch.empty(shape, dtype=bboxes1.dtype)
    if out.numel() == 0:
        return out
    in_huge_pages(out)
    first, second = (make_frames(rectangles(boxes), clockwise, margin) for boxes in (bboxes1, bboxes2))
    options = MODES.index(mode), margin, as_bits(out)
    if aligned:
        run(_aligned, shape[0], GRAIN // 100, first, second, *options)
    else:
        run(_rows, shape[0], max(1, GRAIN // shape[1]), first, second, *options)
    return out


@jit
def _rows(begin, end, first, second, mode, margin, out):
    flags = np.empty(TILE, np.uint8)
    words = flags.view(np.uint64)
    found = np.empty(TILE + 1, np.uint64)
    packed = np.empty((9, TILE), first.dtype)
    values = np.empty(TILE, first.dtype)
    columns = second.shape[1]
    for start in range(0, columns, TILE):
        stop = min(start + TILE, columns)
        for i in range(begin, end):
            row = out[i, start:stop]
            row[:] = 0
            find_near(first, i, second, start, stop, flags)
            count = pack(flags, words, stop - start, second, start, found, packed)
            if margin == 0:
                overlaps(first, i, packed, count, mode, values)
            else:
                polygon_overlaps(first, i, packed, count, mode, margin, values)
            for k in range(count):
                row[found[k]] = narrow(values[k], row)


@jit
def _aligned(begin, end, first, second, mode, margin, out):
    flags = np.empty(1, np.uint8)
    values = np.empty(1, first.dtype)
    for i in range(begin, end):
        find_near(first, i, second, i, i + 1, flags)
        other = second[:, i : i + 1]
        values[0] = 0
        if flags[0]:
            if margin == 0:
                overlaps(first, i, other, 1, mode, values)
            else:
                polygon_overlaps(first, i, other, 1, mode, margin, values)
        out[i] = narrow(values[0], out)
