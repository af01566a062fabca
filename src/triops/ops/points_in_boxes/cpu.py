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
from triops._geometry.box.cpu import frames, inside
from triops._geometry.box_grid.cpu import TILE, build_grid, find_cells, keep_occupied

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
    points_np, boxes_np = as_numpy(points, real), as_numpy(boxes, real)
    bottom, count = z_origin == "bottom", points.shape[1]
    if count * boxes.shape[1] <= BRUTE_FORCE_PAIRS or count <= BRUTE_FORCE_POINTS:
        (_brute_force_all if every else _brute_force)(points_np, boxes_np, bottom, margin, out)
        return
    for b in range(points.shape[0]):
        grid = build_grid(boxes_np[b], bottom, margin, count)
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
def _split(flat, count, x, y, z):
    """x, y, z of consecutive points. Unsigned indices let LLVM use full-width shuffles (4x the signed loop)."""
    for i in range(np.uint32(count)):
        j = np.uint32(3) * i
        x[i] = flat[j]
        y[i] = flat[j + np.uint32(1)]
        z[i] = flat[j + np.uint32(2)]


@jit
def _place(flat, start, count, extent, scale, bits, occupied, xyz, cell, kept):
    """Load a tile of points and find which of them lie in an occupied cell; returns how many."""
    x, y, z = xyz[0], xyz[1], xyz[2]
    _split(flat[3 * start : 3 * (start + count)], count, x, y, z)
    find_cells(x, y, z, extent, scale, bits, cell)
    return keep_occupied(cell, occupied, count, kept)


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
