"""roiaware_pool3d on CPU.

Forward: each RoI tests the points in tiles (vectorised), and the few it holds are appended, in ascending order,
to the lists of their cells and pooled at once: no sort, no workspace.
Backward: a walk over the cells that adds rows to the gradient; with several threads each adds to a
copy of its own, and the copies are summed in a fixed order, so that two runs give the same bits.
"""

import numpy as np
import torch

from triops._cpu.half import as_bits, narrow, widen
from triops._cpu.intrinsics import prefetch
from triops._cpu.jit import jit
from triops._cpu.memory import as_numpy, minus_ones, zeros
from triops._cpu.threads import run
from triops._dtypes import compute_dtype
from triops._geometry.box.cpu import cell, frames, inside
from triops.ops.roiaware_pool3d.reference import check_indices

TILE = 512
PAIRS = 200_000  # point-RoI tests worth a thread
CELLS = 8_192  # cells worth a thread of the backward
COPIES = 64 * 2**20  # bytes that the threads' copies of the gradient may take
AHEAD = 256  # elements to prefetch: the hardware's own prefetching stops at page borders


def roiaware_pool3d_forward(
    rois, points, features, out_x, out_y, out_z, max_points_per_voxel, mode, z_origin, margin
):  # fmt: skip
    real = compute_dtype(points.dtype)
    count, total, channels = rois.shape[0], out_x * out_y * out_z, features.shape[1]
    rois_np, points_np = as_numpy(rois, real), np.ascontiguousarray(as_numpy(points, real).T)
    # Zeroed by the system page by page when first touched, which most of the lists never are.
    lists = np.zeros((count, total, max_points_per_voxel), np.int32)
    pooled, argmax = zeros(count, total, channels, dtype=features.dtype), minus_ones(count, total, channels)
    kernel = _average if mode == "avg" else _maximum
    grain = max(1, PAIRS // max(points.shape[0], 1))
    run(
        kernel, count, grain, rois_np, points_np, as_bits(features), z_origin == "bottom", margin,
        out_x, out_y, out_z, lists, as_bits(pooled), argmax.numpy(),
    )  # fmt: skip
    shape = (count, out_x, out_y, out_z)
    return (
        pooled.view(*shape, channels),
        argmax.view(*shape, channels),
        torch.from_numpy(lists).view(*shape, max_points_per_voxel),
    )


def roiaware_pool3d_backward(point_indices, argmax, grad_out, num_points, mode):
    cells, channels, slots = grad_out.shape[:4].numel(), grad_out.shape[4], point_indices.shape[4]
    grad_in = zeros(num_points, channels, dtype=compute_dtype(grad_out.dtype))
    grad = as_bits(grad_out).reshape(cells, channels)
    if mode == "max":
        kernel, index = _scatter_max, as_numpy(argmax).reshape(cells, channels)
    else:
        kernel, index = _scatter_avg, as_numpy(point_indices).reshape(cells, slots)
    size = grad_in.numel() * grad_in.element_size()
    parts = max(1, min(torch.get_num_threads(), cells // CELLS, COPIES // max(size, 1)))
    copies = grad_in.numpy()[None] if parts == 1 else np.zeros((parts, num_points, channels), grad_in.numpy().dtype)
    bad = np.zeros(parts, np.bool_)
    run(kernel, parts, 1, index, grad, copies, bad)
    if bad.any():
        check_indices(point_indices, argmax, num_points, mode)
    if parts > 1:
        run(_sum_copies, grad_in.numel(), 100_000, copies.reshape(parts, -1), grad_in.numpy().reshape(-1))
    return grad_in.to(grad_out.dtype)


@jit
def _held(x, y, z, frame, flag, kept, start):
    """Indices of a tile's points that lie in the box, ascending, without a branch."""
    for i in range(np.uint32(len(x))):
        flag[i] = inside(x[i], y[i], z[i], frame)
    n = np.uint32(0)
    for i in range(np.uint32(len(x))):
        kept[n] = np.uint32(start) + i
        n += flag[i]
    return n


@jit
def _row(array):
    """A frame as scalars: its values stay in registers through a loop that writes elsewhere."""
    return array[0], array[1], array[2], array[3], array[4], array[5], array[6], array[7]


@jit
def _append(point, points, roi, frame, bottom, out_x, out_y, out_z, lists):
    """Append a point to the list of its cell. -> the cell, and how many points it held before; -1 if it was full."""
    at = cell(points[0, point], points[1, point], points[2, point], roi, frame, bottom, out_x, out_y, out_z)
    before = lists[at, 0]
    if before + 1 >= lists.shape[1]:
        return at, -1
    lists[at, 0] = before + 1
    lists[at, before + 1] = point
    return at, before


@jit
def _maximum(begin, end, rois, points, features, bottom, margin, out_x, out_y, out_z, lists, pooled, argmax):
    frame = frames(rois[begin:end], bottom, margin)
    flag, kept = np.empty(TILE, np.uint32), np.empty(TILE + 1, np.uint32)
    count = points.shape[1]
    for r in range(begin, end):
        row = _row(frame[r - begin])
        for start in range(0, count, TILE):
            stop = min(start + TILE, count)
            n = _held(points[0, start:stop], points[1, start:stop], points[2, start:stop], row, flag, kept, start)
            for k in range(n):
                point = kept[k]
                at, before = _append(point, points, rois[r], row, bottom, out_x, out_y, out_z, lists[r])
                if before < 0:
                    continue
                feature, best, winner = features[point], pooled[r, at], argmax[r, at]
                for c in range(np.uint32(len(feature))):
                    value = widen(feature[c])
                    # the first value that is not NaN or -inf wins, later ones must be larger
                    if value > -np.inf and (winner[c] < 0 or value > widen(best[c])):
                        best[c] = feature[c]
                        winner[c] = point


@jit
def _average(begin, end, rois, points, features, bottom, margin, out_x, out_y, out_z, lists, pooled, argmax):
    frame = frames(rois[begin:end], bottom, margin)
    flag, kept = np.empty(TILE, np.uint32), np.empty(TILE + 1, np.uint32)
    count, channels = points.shape[1], features.shape[1]
    filled = np.empty(min(count, lists.shape[1]), np.int64)
    total = np.empty(channels, type(widen(features.dtype.type(0))))
    for r in range(begin, end):
        row = _row(frame[r - begin])
        cells = 0
        for start in range(0, count, TILE):
            stop = min(start + TILE, count)
            n = _held(points[0, start:stop], points[1, start:stop], points[2, start:stop], row, flag, kept, start)
            for k in range(n):
                at, before = _append(kept[k], points, rois[r], row, bottom, out_x, out_y, out_z, lists[r])
                if before == 0:
                    filled[cells] = at
                    cells += 1
        for k in range(cells):
            at = filled[k]
            listed, mean = lists[r, at], pooled[r, at]
            total[:] = 0
            for slot in range(1, listed[0] + 1):
                feature = features[listed[slot]]
                for c in range(np.uint32(channels)):
                    total[c] += widen(feature[c])
            for c in range(np.uint32(channels)):
                mean[c] = narrow(total[c] / total.dtype.type(listed[0]), mean)


@jit
def _share(cells, part, parts):
    return cells * part // parts, cells * (part + 1) // parts


@jit
def _scatter_max(begin, end, argmax, grad, copies, bad):
    """Add the cells' gradients to their winners. An index that is out of range is skipped and reported in `bad`."""
    cells, channels = argmax.shape[0], np.uint64(argmax.shape[1])
    points = np.uint32(copies.shape[1])
    flat_argmax, flat_grad = argmax.reshape(-1), grad.reshape(-1)
    for part in range(begin, end):
        flat_target = copies[part].reshape(-1)
        first, last = _share(cells, part, copies.shape[0])
        worst = np.uint32(0)
        for v in range(np.uint64(first), np.uint64(last)):
            row = v * channels
            prefetch(flat_argmax, row + np.uint64(AHEAD))
            prefetch(flat_grad, row + np.uint64(AHEAD))
            highest = np.uint32(0)  # of index + 1, so that -1 (none) is 0 and any other negative index is too large
            for c in range(channels):
                highest = max(highest, np.uint32(flat_argmax[row + c] + np.int32(1)))
            if highest == 0:
                continue
            worst = max(worst, highest)
            for c in range(channels):
                point = np.uint32(flat_argmax[row + c])
                if point < points:
                    flat_target[np.uint64(point) * channels + c] += widen(flat_grad[row + c])
        bad[part] = worst > points


@jit
def _scatter_avg(begin, end, lists, grad, copies, bad):
    """Add the cells' gradients to their points. Stops at an index that is out of range, and reports it in `bad`."""
    cells, slots = lists.shape
    channels = grad.shape[1]
    points = np.uint32(copies.shape[1])
    flat_lists = lists.reshape(-1)
    share = np.empty(channels, copies.dtype)
    for part in range(begin, end):
        grad_in = copies[part]
        first, last = _share(cells, part, copies.shape[0])
        for v in range(first, last):
            prefetch(flat_lists, np.uint64(v + 16) * np.uint64(slots))
            n = lists[v, 0]
            if n == 0:
                continue
            if n < 0 or n >= slots:
                bad[part] = True
                return
            listed, row = lists[v], grad[v]
            count = copies.dtype.type(n)
            highest = np.uint32(0)
            for k in range(np.uint32(1), np.uint32(n + 1)):
                highest = max(highest, np.uint32(listed[k]))
            if highest >= points:
                bad[part] = True
                return
            for c in range(np.uint32(channels)):
                share[c] = widen(row[c]) / count
            if channels % 16 == 0:
                _add_rows_of_16(grad_in, listed, np.uint32(n), share)
            else:
                for k in range(np.uint32(1), np.uint32(n + 1)):
                    target = grad_in[np.uint32(listed[k])]
                    for c in range(np.uint32(channels)):
                        target[c] += share[c]


@jit
def _add_rows_of_16(grad_in, listed, n, share):
    """A constant trip count, so that LLVM unrolls it into full vectors and keeps the shares in registers."""
    for first in range(np.uint32(0), np.uint32(len(share)), np.uint32(16)):
        part = share[first : first + np.uint32(16)]
        for k in range(np.uint32(1), n + np.uint32(1)):
            target = grad_in[np.uint32(listed[k]), first : first + np.uint32(16)]
            for c in range(np.uint32(16)):
                target[c] += part[c]


@jit
def _sum_copies(begin, end, copies, out):
    for i in range(begin, end):
        total = copies[0, i]
        for part in range(1, copies.shape[0]):
            total += copies[part, i]
        out[i] = total
