"""voxelize on CPU: cells of all points, then one pass of hashing in the order of the points, then the rows.

The first and the last pass run on several threads. The hash pass is serial, since it numbers voxels in the order of
their first points, and short: one look-up per point in a table of a few bytes per point, whatever the size of the grid.
"""

import numpy as np
import torch

from triops._cpu.half import as_bits
from triops._cpu.jit import jit
from triops._cpu.memory import as_numpy, zeros
from triops._cpu.threads import run
from triops._dtypes import compute_dtype
from triops.ops.voxelize.geometry import grid_size

POINTS = 20_000  # points worth a thread
FRESH_PAGES = 32 * 2**20  # bytes from which on the C library maps new pages for every result
GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # 2**64 over the golden ratio: spreads neighboring cells


def dynamic_voxelize(points, voxel_size, point_range):
    coords = torch.empty((points.shape[0], 3), dtype=torch.int32)
    run(_coords, points.shape[0], POINTS, *_parameters(points, voxel_size, point_range), coords.numpy())
    return coords


def voxelize_padded(points, voxel_size, point_range, max_points, max_voxels):
    total, channels = points.shape
    rows = min(max_voxels, total)
    xyz, low, size, grid = _parameters(points, voxel_size, point_range)
    keys = np.empty(total, np.int64)
    run(_keys, total, POINTS, xyz, low, size, grid, keys)

    bits = total.bit_length() + 1  # at most half full
    coords, num_points = zeros(rows, 3, dtype=torch.int32), zeros(rows, dtype=torch.int32)
    slots = torch.empty(total, dtype=torch.int32)
    count = _assign(
        keys, grid, zeros(1 << bits, dtype=torch.int32).numpy(), np.uint64(64 - bits), np.empty(rows, np.int64),
        max_points, coords.numpy(), num_points.numpy(), slots.numpy(),
    )  # fmt: skip

    source = as_bits(points)
    if rows * max_points * channels * points.element_size() < FRESH_PAGES:
        voxels = zeros(rows, max_points, channels, dtype=points.dtype)
    else:  # zeroed by the system when first touched, which rows after the last voxel never are
        voxels = torch.from_numpy(np.zeros((rows, max_points, channels), source.dtype)).view(points.dtype)
    run(_place, total, POINTS, source, slots.numpy(), as_bits(voxels).reshape(rows * max_points, channels))
    return voxels, coords, num_points, slots, torch.tensor(count, dtype=torch.int32)


def _parameters(points, voxel_size, point_range):
    """-> points, lower corner, voxel size and grid, in the dtype that cells are computed in."""
    xyz = as_numpy(points, compute_dtype(points.dtype))
    return xyz, *(
        np.array(values, xyz.dtype) for values in (point_range[:3], voxel_size, grid_size(voxel_size, point_range))
    )


@jit
def _cell(points, i, low, size, grid):
    """-> whether the point is inside, x, y, z. Divisions: products with 1 / size would round differently."""
    x = np.floor((points[i, 0] - low[0]) / size[0])
    y = np.floor((points[i, 1] - low[1]) / size[1])
    z = np.floor((points[i, 2] - low[2]) / size[2])
    behind = (points[i, 0] >= low[0]) & (points[i, 1] >= low[1]) & (points[i, 2] >= low[2])
    inside = behind & (x < grid[0]) & (y < grid[1]) & (z < grid[2])
    return inside, x, y, z


@jit
def _coords(begin, end, points, low, size, grid, coords):
    for i in range(begin, end):
        inside, x, y, z = _cell(points, i, low, size, grid)
        coords[i, 0] = np.int32(z) if inside else -1
        coords[i, 1] = np.int32(y) if inside else -1
        coords[i, 2] = np.int32(x) if inside else -1


@jit
def _keys(begin, end, points, low, size, grid, keys):
    width, height = np.int64(grid[0]), np.int64(grid[1])
    for i in range(begin, end):
        inside, x, y, z = _cell(points, i, low, size, grid)
        keys[i] = (np.int64(z) * height + np.int64(y)) * width + np.int64(x) if inside else -1


@jit
def _assign(keys, grid, table, shift, voxel_keys, max_points, coords, num_points, slots):
    """Number the voxels by their first points, and give each point its slot. -> the number of voxels

    table: 1 + voxel at the hash of its cell or after it; 0 where free.
    """
    width, height = np.int64(grid[0]), np.int64(grid[1])
    rows, last, count = len(voxel_keys), np.uint64(len(table) - 1), 0
    for i in range(len(keys)):
        key = keys[i]
        slots[i] = -1
        if key < 0:
            continue
        at = (np.uint64(key) * GOLDEN) >> shift
        voxel = table[at] - 1
        while voxel >= 0 and voxel_keys[voxel] != key:
            at = (at + np.uint64(1)) & last
            voxel = table[at] - 1
        if voxel < 0:
            if count == rows:
                continue
            voxel = count
            count += 1
            table[at] = count
            voxel_keys[voxel] = key
            line = key // width
            coords[voxel, 0] = line // height
            coords[voxel, 1] = line % height
            coords[voxel, 2] = key - line * width
        place = num_points[voxel]
        if place < max_points:
            num_points[voxel] = place + 1
            slots[i] = voxel * max_points + place
    return count


@jit
def _place(begin, end, points, slots, voxels):
    for i in range(begin, end):
        if slots[i] >= 0:
            to = np.uint64(slots[i])
            for c in range(np.uint64(points.shape[1])):
                voxels[to, c] = points[i, c]
