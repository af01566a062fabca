"""roiaware_pool3d on GPU.

Forward, three launches. `_test_kernel` writes the empty result, which is most of the bytes, and meanwhile
tests each RoI against chunks of the points and stores the indices of those it holds. `_list_kernel` appends them,
in ascending order, to the lists of their cells: one program per RoI, a block of points at a time, whose ranks
within a cell come from comparing the block with itself. `_pool_kernel` pools the cells that hold a point.

Backward, one launch: atomic additions. For the same bits on every run the additions are done in integers,
whose sum does not depend on their order: see `_add`.
"""

import torch
import triton
import triton.language as tl

from triops import _check, _gpu
from triops._dtypes import compute_dtype
from triops._geometry.box.gpu import cell, inside, make_frame
from triops._gpu.arithmetic import divide
from triops.ops.roiaware_pool3d.reference import check_indices

WORKSPACE = 32 * 2**20  # int32 elements, one per RoI and point: many RoIs on many points are processed in rounds
CHUNKS = 64  # at most so many chunks of points, each of at least POINTS
POINTS = 1024
CHUNK_GROUP = 16  # chunks searched per step
FILL = _gpu.block(2048, interpreted=2**18)  # elements of the empty result written at a time
FILL_PROGRAMS = _gpu.block(4096, interpreted=1)
LISTED = 256  # points of a RoI per step, compared with LIST_TILE of them at a time
LIST_TILE = _gpu.block(32, interpreted=256)
POOLED, POOL_PROGRAMS = 16, 8  # cells per step, programs per RoI

FLOAT, PEAK, FIXED = 0, 1, 2  # what `_add` does


def roiaware_pool3d_forward(
    rois, points, features, out_x, out_y, out_z, max_points_per_voxel, mode, z_origin, margin
):  # fmt: skip
    rois, points, features = rois.contiguous(), points.contiguous(), features.contiguous()
    count, total, channels = rois.shape[0], points.shape[0], features.shape[1]
    shape = (count, out_x, out_y, out_z)
    pooled = torch.empty((*shape, channels), dtype=features.dtype, device=rois.device)
    argmax = torch.empty((*shape, channels), dtype=torch.int32, device=rois.device)
    lists = torch.empty((*shape, max_points_per_voxel), dtype=torch.int32, device=rois.device)
    if count == 0:
        return pooled, argmax, lists
    chunk = max(POINTS, _gpu.next_power_of_2(_gpu.cdiv(total, CHUNKS)))
    chunks = _gpu.cdiv(total, chunk)
    row = total + chunks + 1  # of the workspace: see `_row`
    round_size = max(1, min(count, WORKSPACE // row))
    workspace = torch.empty((round_size * row,), dtype=torch.int32, device=rois.device)
    cells = out_x * out_y * out_z
    bottom, margin_bits = z_origin == "bottom", _gpu.bits_of(margin)
    for first in range(0, count, round_size):
        now = min(round_size, count - first)
        _test_kernel[(max(now * chunks, FILL_PROGRAMS),)](
            rois, points, workspace, lists, pooled, argmax,
            first, now, total, chunk, cells, max_points_per_voxel, channels, margin_bits,
            BOTTOM=bottom, BLOCK=POINTS, FILL=FILL, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
        if total == 0:
            continue
        _list_kernel[(now,)](
            rois, points, workspace, lists, first, total, chunk, out_x, out_y, out_z, max_points_per_voxel, margin_bits,
            BOTTOM=bottom, CHUNKS=CHUNKS, GROUP=CHUNK_GROUP, BLOCK=LISTED, TILE=LIST_TILE,
            num_warps=LISTED // 32, enable_fp_fusion=False,
        )  # fmt: skip
        if channels > 0:
            _pool_kernel[(now * POOL_PROGRAMS,)](
                features, workspace, lists, pooled, argmax, first, total, chunk, cells, max_points_per_voxel, channels,
                AVERAGE=mode == "avg", PARTS=POOL_PROGRAMS, CELLS=POOLED,
                CHANNELS=min(_gpu.next_power_of_2(channels), 128), num_warps=4, enable_fp_fusion=False,
            )  # fmt: skip
    return pooled, argmax, lists


def roiaware_pool3d_backward(point_indices, argmax, grad_out, num_points, mode):
    if _check.strict():
        check_indices(point_indices, argmax, num_points, mode)
    grad_out = grad_out.contiguous()
    device, channels, slots = grad_out.device, grad_out.shape[-1], point_indices.shape[-1]
    real = compute_dtype(grad_out.dtype)
    cells = grad_out.numel() // channels if channels else 0
    if cells == 0 or num_points == 0:
        return torch.zeros((num_points, channels), dtype=grad_out.dtype, device=device)
    if mode == "max":
        kernel, index, terms = _scatter_max, argmax.contiguous(), cells
    else:
        kernel, index, terms = _scatter_avg, point_indices.contiguous(), cells * (slots - 1)

    if not torch.are_deterministic_algorithms_enabled():
        grad_in = torch.zeros((num_points, channels), dtype=real, device=device)
        kernel(index, grad_out, grad_in, grad_in, cells, slots, num_points, channels, 0, FLOAT, 1)
        return grad_in if real == grad_out.dtype else grad_in.to(grad_out.dtype)

    limbs = 2 if real == torch.float64 else 1
    bits = 62 - int(terms).bit_length()
    peak = torch.zeros((num_points, channels), dtype=torch.int64, device=device)
    sums = torch.zeros((num_points, channels, limbs), dtype=torch.int64, device=device)
    for step in (PEAK, FIXED):
        kernel(index, grad_out, sums, peak, cells, slots, num_points, channels, bits, step, limbs)
    grad_in = torch.empty((num_points, channels), dtype=grad_out.dtype, device=device)
    _finish_kernel[(_gpu.cdiv(grad_in.numel(), 1024),)](
        sums, peak, grad_in, grad_in.numel(), bits, LIMBS=limbs, BLOCK=1024, num_warps=4, enable_fp_fusion=False
    )
    return grad_in


def _scatter_max(argmax, grad, target, peak, cells, slots, points, channels, bits, step, limbs):
    channel_block = min(_gpu.next_power_of_2(channels), 128)
    cell_block = _gpu.block(512, interpreted=4096) // channel_block
    channel_blocks = _gpu.cdiv(channels, channel_block)
    _scatter_max_kernel[(_gpu.cdiv(cells, cell_block) * channel_blocks,)](
        argmax, grad, target, peak, cells, points, channels, channel_blocks, bits,
        STEP=step, LIMBS=limbs, CELLS=cell_block, CHANNELS=channel_block,
        num_warps=2, enable_fp_fusion=False,
    )  # fmt: skip


def _scatter_avg(lists, grad, target, peak, cells, slots, points, channels, bits, step, limbs):
    cell_block, channel_block = _gpu.block(16, interpreted=1024), min(_gpu.next_power_of_2(channels), 16)
    _scatter_avg_kernel[(_gpu.cdiv(cells, cell_block),)](
        lists, grad, target, peak, cells, slots, points, channels, bits,
        STEP=step, LIMBS=limbs, CELLS=cell_block, HEAD=2, SLOTS=32, CHANNELS=channel_block,
        num_warps=1, enable_fp_fusion=False,
    )  # fmt: skip


@triton.jit
def _row(workspace, r, point_count, chunks):
    """A RoI's row of the workspace: the points it holds, how many of each chunk, how many cells they fill."""
    return workspace + r.to(tl.int64) * (point_count + chunks + 1)


@triton.jit
def _fill(target, base, size, value, BLOCK: tl.constexpr):
    """This program's share of filling target[base : base + size]."""
    share = tl.cdiv(tl.cdiv(size, tl.num_programs(0)), BLOCK) * BLOCK
    start = tl.program_id(0).to(tl.int64) * share
    for offset in range(0, share, BLOCK):
        at = start + offset + tl.arange(0, BLOCK)
        tl.store(target + base + at, tl.full((BLOCK,), value, target.dtype.element_ty), at < size)


@_gpu.kernel(specialize=("cells", "slots", "channels"))
def _test_kernel(
    rois, points, workspace, lists, pooled, argmax,
    first_roi, roi_count, point_count, chunk, cells, slots, channels, margin_bits: tl.int64,
    BOTTOM: tl.constexpr, BLOCK: tl.constexpr, FILL: tl.constexpr,
):  # fmt: skip
    REAL: tl.constexpr = tl.float64 if points.dtype.element_ty == tl.float64 else tl.float32
    # These stores complete while the points are tested.
    first_cell = first_roi.to(tl.int64) * cells
    cell_count = roi_count.to(tl.int64) * cells
    _fill(lists, first_cell * slots, cell_count * slots, 0, FILL)
    _fill(pooled, first_cell * channels, cell_count * channels, 0, FILL)
    _fill(argmax, first_cell * channels, cell_count * channels, -1, FILL)
    chunks = tl.cdiv(point_count, chunk)
    program = tl.program_id(0)
    if program < roi_count * chunks:
        r = program // chunks
        part = program % chunks
        cx, cy, cz, half_x, half_y, half_z, cos, sin = make_frame(rois, first_roi + r, True, margin_bits, BOTTOM, REAL)
        row = _row(workspace, r, point_count, chunks)
        held = 0
        for offset in range(0, chunk, BLOCK):
            i = part * chunk + offset + tl.arange(0, BLOCK)
            point = points + i.to(tl.int64) * 3
            x = tl.load(point, i < point_count, float("nan")).to(REAL)
            y = tl.load(point + 1, i < point_count, 0.0).to(REAL)
            z = tl.load(point + 2, i < point_count, 0.0).to(REAL)
            hit = inside(x, y, z, cx, cy, cz, half_x, half_y, half_z, cos, sin)
            one = hit.to(tl.int32)
            tl.store(row + part * chunk + held + tl.cumsum(one, 0) - one, i, hit)
            held += tl.sum(one, 0)
        tl.store(row + point_count + part, held)


@_gpu.kernel
def _list_kernel(
    rois, points, workspace, lists, first_roi, point_count, chunk, out_x, out_y, out_z, slots,
    margin_bits: tl.int64, BOTTOM: tl.constexpr, CHUNKS: tl.constexpr, GROUP: tl.constexpr,
    BLOCK: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    REAL: tl.constexpr = tl.float64 if points.dtype.element_ty == tl.float64 else tl.float32
    r = tl.program_id(0)
    roi = first_roi + r
    chunks = tl.cdiv(point_count, chunk)
    row = _row(workspace, r, point_count, chunks)
    grid_x, grid_y, grid_z = out_x.to(tl.int64), out_y.to(tl.int64), out_z.to(tl.int64)
    roi_lists = lists + roi.to(tl.int64) * (grid_x * grid_y * grid_z * slots)
    cx, cy, _, _, _, _, cos, sin = make_frame(rois, roi, True, margin_bits, BOTTOM, REAL)
    part = tl.arange(0, CHUNKS)
    count = tl.sum(tl.load(row + point_count + part, part < chunks, 0), 0)
    filled = 0
    for first in range(0, count, BLOCK):
        j = first + tl.arange(0, BLOCK)
        mask = j < count
        # Point j is the one at j - start_of_part in chunk `of_part`.
        of_part = tl.full((BLOCK,), -1, tl.int32)
        start_of_part = tl.zeros((BLOCK,), tl.int32)
        before_group = 0
        for first_part in range(0, chunks, GROUP):
            group = first_part + tl.arange(0, GROUP)
            held = tl.load(row + point_count + group, group < chunks, 0)
            start = tl.where(group < chunks, before_group + tl.cumsum(held, 0) - held, 2147483647)
            reached = start[:, None] <= j[None]  # [GROUP, BLOCK]
            of_part += tl.sum(reached.to(tl.int32), 0)
            start_of_part = tl.maximum(start_of_part, tl.max(tl.where(reached, start[:, None], 0), 0))
            before_group += tl.sum(held, 0)
        i = tl.load(row + of_part * chunk + (j - start_of_part), mask, 0)
        point = points + i.to(tl.int64) * 3
        x = tl.load(point, mask, 0.0).to(REAL)
        y = tl.load(point + 1, mask, 0.0).to(REAL)
        z = tl.load(point + 2, mask, 0.0).to(REAL)
        at = cell(x, y, z, rois, roi, cx, cy, cos, sin, grid_x, grid_y, grid_z, BOTTOM, REAL).to(tl.int32)
        # The row up to j is free for scratch: its points have been read, since the k-th point is at k or later.
        tl.debug_barrier()
        tl.store(row + j, at, mask)
        tl.debug_barrier()
        rank = tl.zeros((BLOCK,), tl.int32)
        size = tl.zeros((BLOCK,), tl.int32)
        for other in range(first, tl.minimum(first + BLOCK, count), TILE):
            k = other + tl.arange(0, TILE)
            same = tl.load(row + k, k < count, -1)[:, None] == at[None]  # [TILE, BLOCK]: summed within a thread
            rank += tl.sum((same & (k[:, None] < j[None])).to(tl.int32), 0)
            size += tl.sum(same.to(tl.int32), 0)
        entry = roi_lists + at.to(tl.int64) * slots
        before = tl.load(entry, mask, 0)
        slot = 1 + before + rank
        tl.store(entry + slot, i, mask & (slot < slots))
        tl.debug_barrier()  # every thread has read the counts that are written now
        is_first = mask & (rank == 0)
        tl.store(entry, tl.minimum(before + size, slots - 1), is_first)
        new = (is_first & (before == 0) & (slots > 1)).to(tl.int32)
        tl.store(row + filled + tl.cumsum(new, 0) - new, at, new > 0)
        filled += tl.sum(new, 0)
        tl.debug_barrier()  # the next block reads the counts
    tl.store(row + point_count + chunks, filled)


@_gpu.kernel(specialize=("channels",))
def _pool_kernel(
    features, workspace, lists, pooled, argmax, first_roi, point_count, chunk, cells, slots, channels,
    AVERAGE: tl.constexpr, PARTS: tl.constexpr, CELLS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    REAL: tl.constexpr = tl.float64 if features.dtype.element_ty == tl.float64 else tl.float32
    r = tl.program_id(0) // PARTS
    chunks = tl.cdiv(point_count, chunk)
    row = _row(workspace, r, point_count, chunks)
    filled = tl.load(row + point_count + chunks)
    for first in range((tl.program_id(0) % PARTS) * CELLS, filled, PARTS * CELLS):
        j = first + tl.arange(0, CELLS)
        at = tl.load(row + j, j < filled, 0)
        v = (first_roi + r).to(tl.int64) * cells + at
        entry = lists + v * slots
        count = tl.load(entry, j < filled, 0)
        longest = tl.max(count, 0)
        for first_channel in range(0, channels, CHANNELS):
            c = first_channel + tl.arange(0, CHANNELS)
            out = v[:, None] * channels + c[None]
            mask = (j < filled)[:, None] & (c < channels)[None]
            value = tl.zeros((CELLS, CHANNELS), REAL)
            winner = tl.full((CELLS, CHANNELS), -1, tl.int32)
            if not AVERAGE:
                value += float("-inf")
            for slot in range(1, longest + 1):
                listed = slot <= count
                i = tl.load(entry + slot, listed, 0)
                at_feature = features + i.to(tl.int64)[:, None] * channels + c[None]
                if AVERAGE:
                    value += tl.load(at_feature, listed[:, None] & mask, 0.0).to(REAL)
                else:
                    feature = tl.load(at_feature, listed[:, None] & mask, float("-inf")).to(REAL)
                    better = feature > value
                    value = tl.where(better, feature, value)
                    winner = tl.where(better, i[:, None], winner)
            if AVERAGE:
                value = divide(value, tl.maximum(count, 1).to(REAL)[:, None])
                tl.store(pooled + out, value.to(pooled.dtype.element_ty), mask)
            else:
                tl.store(pooled + out, value.to(pooled.dtype.element_ty), mask & (winner >= 0))
                tl.store(argmax + out, winner, mask)


@triton.jit
def _power_of_2(exponent):
    return ((exponent.to(tl.int64) + 1023) << 52).to(tl.float64, bitcast=True)


@triton.jit
def _shift(peak, bits):
    """The power of two by which values up to `peak` (float64 bits) become integers of `bits` bits."""
    return tl.minimum(bits - 1 - ((peak >> 52) - 1023), 900)


@triton.jit
def _add(target, peak, at, value, mask, bits, STEP: tl.constexpr, LIMBS: tl.constexpr):
    """Add values to the targets `at`; several programs may add to one target at once.

    FLOAT: in floats; the last bits of a sum depend on the order of its terms.
    PEAK:  adds nothing, only records the largest magnitude that each target gets, as the bits of a float64.
    FIXED: in integers scaled by that peak: the same sum in any order, and more bits than a float32 has (with a
           second limb: than a float64). Where the peak is not finite, count infinities: +inf below bit 31,
           -inf above it, NaN as both.
    """
    if STEP == 0:
        tl.atomic_add(target + at, value, mask, sem="relaxed")
    else:
        value = value.to(tl.float64)
        if STEP == 1:
            tl.atomic_max(peak + at, tl.abs(value).to(tl.int64, bitcast=True), mask, sem="relaxed")
        else:
            top = tl.load(peak + at, mask, 0)
            finite = top < 0x7FF0000000000000
            scaled = tl.where(finite, value, 0.0) * _power_of_2(_shift(top, bits))
            whole = scaled.to(tl.int64)
            is_nan = value != value
            infinite = (is_nan | (value == float("inf"))).to(tl.int64)
            infinite += (is_nan | (value == float("-inf"))).to(tl.int64) << 31
            tl.atomic_add(target + at * LIMBS, tl.where(finite, whole, infinite), mask, sem="relaxed")
            if LIMBS == 2:
                rest = (scaled - whole.to(tl.float64)) * _power_of_2(bits)
                tl.atomic_add(target + at * LIMBS + 1, rest.to(tl.int64), mask, sem="relaxed")


@_gpu.kernel
def _finish_kernel(sums, peak, grad_in, size, bits, LIMBS: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    top = tl.load(peak + at, at < size, 0)
    whole = tl.load(sums + at * LIMBS, at < size, 0)
    shift = _shift(top, bits)
    value = whole.to(tl.float64) * _power_of_2(-shift)
    if LIMBS == 2:
        value += tl.load(sums + at * LIMBS + 1, at < size, 0).to(tl.float64) * _power_of_2(-shift - bits)
    else:
        value = value.to(tl.float32)
    plus = (whole & 0x7FFFFFFF) != 0
    minus = (whole >> 31) != 0
    infinite = tl.where(plus & minus, float("nan"), tl.where(plus, float("inf"), float("-inf")))
    value = tl.where(top < 0x7FF0000000000000, value, infinite.to(value.dtype))
    tl.store(grad_in + at, value.to(grad_in.dtype.element_ty), at < size)


@_gpu.kernel(specialize=("channels",))
def _scatter_max_kernel(
    argmax, grad, target, peak, cells, points, channels, channel_blocks, bits,
    STEP: tl.constexpr, LIMBS: tl.constexpr, CELLS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    REAL: tl.constexpr = tl.float64 if grad.dtype.element_ty == tl.float64 else tl.float32
    v = (tl.program_id(0) // channel_blocks).to(tl.int64) * CELLS + tl.arange(0, CELLS)
    c = (tl.program_id(0) % channel_blocks) * CHANNELS + tl.arange(0, CHANNELS)
    mask = (v < cells)[:, None] & (c < channels)[None]
    at = v[:, None] * channels + c[None]
    winner = tl.load(argmax + at, mask, -1)
    valid = (winner >= 0) & (winner < points)
    if tl.max(tl.max(valid.to(tl.int32), 1), 0) > 0:  # most blocks of cells are empty
        value = tl.load(grad + at, valid, 0.0).to(REAL)
        _add(target, peak, winner.to(tl.int64) * channels + c[None], value, valid, bits, STEP, LIMBS)


@_gpu.kernel(specialize=("channels",))
def _scatter_avg_kernel(
    lists, grad, target, peak, cells, slots, points, channels, bits,
    STEP: tl.constexpr, LIMBS: tl.constexpr,
    CELLS: tl.constexpr, HEAD: tl.constexpr, SLOTS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    REAL: tl.constexpr = tl.float64 if grad.dtype.element_ty == tl.float64 else tl.float32
    first = tl.program_id(0).to(tl.int64) * CELLS
    lane = tl.arange(0, CELLS)
    v = first + lane
    counts = tl.load(lists + v * slots, v < cells, 0)
    counts = tl.where((counts > 0) & (counts < slots), counts, 0)
    # Most cells are empty or hold a point or two: the head of all lists at once.
    if tl.max(counts, 0) > 0:
        slot = tl.arange(0, HEAD)
        i = tl.load(lists + v[:, None] * slots + 1 + slot[None], slot[None] < counts[:, None], -1)
        listed = ((i >= 0) & (i < points))[:, :, None]  # [CELLS, HEAD, 1]
        for first_channel in range(0, channels, CHANNELS):
            c = first_channel + tl.arange(0, CHANNELS)
            filled = (counts > 0)[:, None] & (c < channels)[None]
            value = tl.load(grad + v[:, None] * channels + c[None], filled, 0.0).to(REAL)
            share = divide(value, tl.maximum(counts, 1).to(REAL)[:, None])
            shares = tl.broadcast_to(share[:, None, :], (CELLS, HEAD, CHANNELS))
            at = i.to(tl.int64)[:, :, None] * channels + c[None, None]
            _add(target, peak, at, shares, listed & (c < channels)[None, None], bits, STEP, LIMBS)
    # The rest of longer lists, one cell after the other.
    counts = tl.where(counts > HEAD, counts, 0)
    next_lane = tl.min(tl.where(counts > 0, lane, CELLS), 0)
    while next_lane < CELLS:
        count = tl.sum(tl.where(lane == next_lane, counts, 0), 0)
        row = first + next_lane
        for first_channel in range(0, channels, CHANNELS):
            c = first_channel + tl.arange(0, CHANNELS)
            value = tl.load(grad + row * channels + c, c < channels, 0.0).to(REAL)
            share = divide(value, count.to(REAL))
            for first_slot in range(HEAD, count, SLOTS):
                slot = first_slot + tl.arange(0, SLOTS)
                i = tl.load(lists + row * slots + 1 + slot, slot < count, -1)
                valid = ((i >= 0) & (i < points))[:, None] & (c < channels)[None]
                shares = tl.broadcast_to(share[None], (SLOTS, CHANNELS))
                _add(target, peak, i.to(tl.int64)[:, None] * channels + c[None], shares, valid, bits, STEP, LIMBS)
        counts = tl.where(lane == next_lane, 0, counts)
        next_lane = tl.min(tl.where(counts > 0, lane, CELLS), 0)
