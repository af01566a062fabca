"""voxelize on GPU, without a serial kernel and without a sort.

`_cells_kernel` finds the cells, and in a small grid the first point of each; in a large grid a hash of the cells does.
The first point of a cell begins a voxel, and a running count over the points (`_count_kernel`, `_number_kernel`)
numbers the voxels in order. `_list_kernel` inserts every point into its voxel's ascending list: an atomic minimum
leaves the lower index in an entry and moves the higher one on to the next, so that a list ends up with the lowest
indices in order whatever the order of the insertions.
`_gather_kernel` writes the rows.
"""

import torch
import triton
import triton.language as tl

from triops import _gpu
from triops._gpu.arithmetic import divide, from_bits
from triops._gpu.memory import load_run, store_run
from triops._gpu.scan import before_block, running_sums
from triops._gpu.site_hash import SiteHash
from triops.ops.voxelize.geometry import grid_size

BLOCK = 1024
MAX_DENSE = 1 << 22  # cells, for which first points take 16 MiB; larger grids are hashed
LIST_BLOCK, LIST_WARPS = _gpu.block(64, interpreted=1024), 2  # small, since a block waits for its longest insertion
GATHER_BLOCK = _gpu.block(1024, interpreted=1 << 16)
NO_POINT = 2**31 - 1
EMPTY = tl.constexpr(0xFFFFFFFF)  # -1 as an unsigned number: above every index


def dynamic_voxelize(points, voxel_size, point_range):
    points = points.contiguous()
    coords = torch.empty((points.shape[0], 3), dtype=torch.int32, device=points.device)
    if points.shape[0]:
        _coords_kernel[(_gpu.cdiv(points.shape[0], BLOCK),)](
            points, coords, points.shape[0], points.shape[1], *_parameters(voxel_size, point_range),
            BLOCK=BLOCK, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    return coords


def voxelize_padded(points, voxel_size, point_range, max_points, max_voxels):
    points, device = points.contiguous(), points.device
    total, channels = points.shape
    rows = min(max_voxels, total)
    voxels = torch.empty((rows, max_points, channels), dtype=points.dtype, device=device)
    coords = torch.empty((rows, 3), dtype=torch.int32, device=device)
    num_points = torch.empty(rows, dtype=torch.int32, device=device)
    slots = torch.empty(total, dtype=torch.int32, device=device)
    if total == 0:
        return voxels, coords, num_points, slots, torch.zeros((), dtype=torch.int32, device=device)
    count = torch.empty((), dtype=torch.int32, device=device)
    parameters = _parameters(voxel_size, point_range)
    cell_index, first, offset16 = _first_points(points, slots, parameters)

    blocks = _gpu.cdiv(total, BLOCK)
    new_voxels = torch.empty(blocks, dtype=torch.int32, device=device)
    _count_kernel[(blocks,)](cell_index, first, offset16, new_voxels, total, BLOCK=BLOCK, num_warps=4)
    new_voxels, _, summed = running_sums(new_voxels, 0, 1, blocks)
    _number_kernel[(blocks,)](
        points, cell_index, first, offset16, new_voxels, coords, count, total, channels, blocks, summed, rows,
        *parameters, BLOCK=BLOCK, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip

    lists = torch.full((rows * max_points,), -1, dtype=torch.int32, device=device)
    _list_kernel[(_gpu.cdiv(total, LIST_BLOCK),)](
        cell_index, first, offset16, lists.view(torch.uint32), total, rows, max_points,
        STEPS=max_points.bit_length(), BLOCK=LIST_BLOCK, num_warps=LIST_WARPS,
    )  # fmt: skip
    _gather_kernel[(_gpu.cdiv(voxels.numel(), GATHER_BLOCK),)](
        points, lists, voxels, coords, num_points, slots, rows, channels, max_points,
        BLOCK=GATHER_BLOCK, num_warps=4,
    )  # fmt: skip
    return voxels, coords, num_points, slots, count


def _parameters(voxel_size, point_range):
    """Kernel arguments: bits of the lower corner and of the sizes, and the grid."""
    return (
        *map(_gpu.bits_of, point_range[:3]),
        *map(_gpu.bits_of, voxel_size),
        *grid_size(voxel_size, point_range),
    )


def _first_points(points, slots, parameters):
    """-> cell_index, first, offset16: first[cell_index[16 * offset16 + i]] is the lowest point in the cell of point i.

    cell_index is -1 outside the range. By an offset in units of 16 the compiler sees aligned loads. Fills slots with
    -1.
    """
    total, channels = points.shape
    width, height, depth = parameters[6:]
    dense = width * height * depth <= MAX_DENSE
    if dense:
        cell_index = torch.empty(total, dtype=torch.int32, device=points.device)
        first = torch.full((width * height * depth,), NO_POINT, dtype=torch.int32, device=points.device)
    else:
        cell_index = torch.empty((total, 4), dtype=torch.int32, device=points.device)  # the cells, as sites of the hash
        first = cell_index
    _cells_kernel[(_gpu.cdiv(total, BLOCK),)](
        points, cell_index, first, slots, total, channels, *parameters,
        DENSE=dense, BLOCK=BLOCK, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    if dense:
        return cell_index, first, 0
    table = SiteHash(cell_index, 1, (1, depth, height, width), 0, 1)
    table.insert()
    return table.scratch, table.scratch, 1 << table.bits >> 4


@triton.jit
def _real(bits, points):
    """A float64 by its bits, in the dtype that cells are computed in."""
    return from_bits(bits, tl.float64 if points.dtype.element_ty == tl.float64 else tl.float32)


@triton.jit
def _position(points, at, mask, low, size):
    """-> the cell along one axis, and whether the point is not below the range. The quotient cannot tell the latter: a
    GPU flushes the smallest numbers to 0."""
    value = tl.load(points + at, mask=mask, other=float("nan")).to(low.dtype)
    return tl.floor(divide(value - low, size)), value >= low


@triton.jit
def _cell(
    points, i, mask, channels, low_x, low_y, low_z, size_x, size_y, size_z, width, height, depth
):  # fmt: skip
    """-> inside, x, y, z of points i."""
    at = i.to(tl.int64) * channels
    x, above_x = _position(points, at, mask, _real(low_x, points), _real(size_x, points))
    y, above_y = _position(points, at + 1, mask, _real(low_y, points), _real(size_y, points))
    z, above_z = _position(points, at + 2, mask, _real(low_z, points), _real(size_z, points))
    # The sizes of a grid are exact in float32, and NaN is in no cell.
    inside = above_x & above_y & above_z & (x < width) & (y < height) & (z < depth)
    zero = tl.zeros_like(x)
    return (
        inside,
        tl.where(inside, x, zero).to(tl.int32),
        tl.where(inside, y, zero).to(tl.int32),
        tl.where(inside, z, zero).to(tl.int32),
    )


@_gpu.kernel
def _coords_kernel(
    points, coords, total, channels,
    low_x: tl.int64, low_y: tl.int64, low_z: tl.int64, size_x: tl.int64, size_y: tl.int64, size_z: tl.int64,
    width, height, depth, BLOCK: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside, x, y, z = _cell(
        points, i, i < total, channels, low_x, low_y, low_z, size_x, size_y, size_z, width, height, depth
    )
    _store_cell(coords, i, i < total, tl.where(inside, x, -1), tl.where(inside, y, -1), tl.where(inside, z, -1))


@triton.jit
def _store_cell(coords, row, mask, x, y, z):
    at = coords + row.to(tl.int64) * 3
    tl.store(at, z, mask=mask)
    tl.store(at + 1, y, mask=mask)
    tl.store(at + 2, x, mask=mask)


@_gpu.kernel
def _cells_kernel(
    points, cell_index, first, slots, total, channels,
    low_x: tl.int64, low_y: tl.int64, low_z: tl.int64, size_x: tl.int64, size_y: tl.int64, size_z: tl.int64,
    width, height, depth, DENSE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    valid, whole = i < total, (tl.program_id(0) + 1) * BLOCK <= total
    inside, x, y, z = _cell(
        points, i, valid, channels, low_x, low_y, low_z, size_x, size_y, size_z, width, height, depth
    )
    store_run(slots + i, tl.full((BLOCK,), -1, tl.int32), valid, whole)
    if DENSE:
        cell = (z * height + y) * width + x
        store_run(cell_index + i, tl.where(inside, cell, -1), valid, whole)
        # A read first saves most of the atomics, since the lowest point of a cell mostly comes first; a stale value
        # costs one atomic too many.
        lowest = tl.load(first + cell, mask=inside, other=0)
        tl.atomic_min(first + cell, i, mask=inside & (i < lowest), sem="relaxed")
    else:
        at = cell_index + i.to(tl.int64) * 4
        tl.store(at, tl.where(inside, 0, -1), mask=valid)
        tl.store(at + 1, z, mask=valid)
        tl.store(at + 2, y, mask=valid)
        tl.store(at + 3, x, mask=valid)


@triton.jit
def _begins(cell_index, first, offset16, i, total, BLOCK: tl.constexpr):
    """-> the cell's index in `first`, and whether point i is its cell's first."""
    valid = i < total
    place = load_run(cell_index + offset16 * 16 + i, valid, (tl.program_id(0) + 1) * BLOCK <= total, -1)
    return place, valid & (tl.load(first + place, mask=place >= 0, other=-1) == i)


@_gpu.kernel
def _count_kernel(cell_index, first, offset16, new_voxels, total, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    _, begins = _begins(cell_index, first, offset16, i, total, BLOCK)
    tl.store(new_voxels + tl.program_id(0), tl.sum(begins.to(tl.int32), 0))


@_gpu.kernel
def _number_kernel(
    points, cell_index, first, offset16, new_voxels, coords, count, total, channels, blocks, summed, rows,
    low_x: tl.int64, low_y: tl.int64, low_z: tl.int64, size_x: tl.int64, size_y: tl.int64, size_z: tl.int64,
    width, height, depth, BLOCK: tl.constexpr,
):  # fmt: skip
    """`first` now gets the voxel of each cell, as ~voxel: negative, so that it is not mistaken for a point."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    place, begins = _begins(cell_index, first, offset16, i, total, BLOCK)
    before, everything = before_block(new_voxels, blocks, summed, tl.program_id(0))
    voxel = before + tl.cumsum(begins.to(tl.int32), 0) - 1
    tl.store(first + place, ~voxel, mask=begins)
    _, x, y, z = _cell(points, i, begins, channels, low_x, low_y, low_z, size_x, size_y, size_z, width, height, depth)
    _store_cell(coords, voxel, begins & (voxel < rows), x, y, z)
    if tl.program_id(0) == 0:
        tl.store(count, tl.minimum(everything, rows))


@_gpu.kernel
def _list_kernel(cell_index, first, offset16, lists, total, rows, max_points, STEPS: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    place = tl.load(cell_index + offset16 * 16 + i, mask=i < total, other=-1)
    voxel = ~tl.load(first + place, mask=place >= 0, other=0)
    pending = (place >= 0) & (voxel < rows)
    at = lists + tl.where(pending, voxel, 0).to(tl.int64) * max_points
    mine = i.to(tl.uint32)
    # A list is ascending at any time, and its entries only decrease. So an entry that was read as below a point
    # still is, however stale the read, with all entries before it: the binary search may rely on it.
    low = tl.zeros_like(i)
    high = low + max_points
    for _ in tl.static_range(STEPS):
        middle = (low + high) // 2
        searched = pending & (low < high)
        below = searched & (tl.load(at + middle, mask=searched, other=0) < mine)
        low = tl.where(below, middle + 1, low)
        high = tl.where(below, high, middle)
    pending = pending & (low < max_points)
    while tl.max(pending.to(tl.int32), 0) > 0:
        previous = tl.atomic_min(at + low, mine, mask=pending, sem="relaxed")
        mine = tl.where(pending & (previous > mine), previous, mine)
        low += 1
        pending = pending & (low < max_points) & (mine != EMPTY)


@_gpu.kernel
def _gather_kernel(points, lists, voxels, coords, num_points, slots, rows, channels, max_points, BLOCK: tl.constexpr):
    """Write the rows, 0 after the end of a list. A list's last entry gives its length; an empty one has no voxel."""
    begin = tl.program_id(0).to(tl.int64) * BLOCK
    e = tl.arange(0, BLOCK)
    left = rows.to(tl.int64) * max_points * channels - begin
    valid = e < tl.minimum(left, BLOCK).to(tl.int32)
    # 64-bit divisions once per program, 32-bit ones per element
    first_slot = begin // channels
    first_voxel = first_slot // max_points
    channel = (begin - first_slot * channels).to(tl.int32) + e
    down = channel // channels
    channel -= down * channels
    place = (first_slot - first_voxel * max_points).to(tl.int32) + down
    across = place // max_points
    place -= across * max_points
    slot = first_slot + down
    voxel = first_voxel + across

    point = tl.load(lists + slot, mask=valid, other=-1)
    value = tl.load(points + point.to(tl.int64) * channels + channel, mask=point >= 0, other=0.0)
    store_run(voxels + begin + e, value, valid, left >= BLOCK)

    first_channel = valid & (channel == 0)
    tl.store(slots + point, slot.to(tl.int32), mask=first_channel & (point >= 0))
    following = tl.load(lists + slot + 1, mask=first_channel & (place + 1 < max_points), other=-1)
    tl.store(num_points + voxel, place + 1, mask=first_channel & (point >= 0) & (following < 0))
    empty = first_channel & (place == 0) & (point < 0)
    tl.store(num_points + voxel, 0, mask=empty)
    zero = tl.zeros_like(place)
    _store_cell(coords, voxel, empty, zero, zero, zero)
