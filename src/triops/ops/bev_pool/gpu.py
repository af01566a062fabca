"""bev_pool on GPU: blocks of equally many sorted points, whatever the cells; no float is added by an atomic.

A block sums the runs of equal cells in it. A run that lies within one block is a finished cell. Other sums, those of
the first and the last run of a block at most, go to a scratch of two rows per block, and `_join_kernel` adds up the
parts of a cell in their order. So a cell of thousands of points costs no more than many small ones, and the bits are
the same on every run. The backward needs no order: a pixel looks up the cell of each of its depths.

Rows are read in two tiles, whose widths are the highest power of two in the number of channels and one that covers the
rest: 80 channels are 64 and 16, with no lane idle.
"""

import torch
import triton
import triton.language as tl

from triops import _check, _gpu
from triops._gpu.rows import widths_of_tiles
from triops.ops.bev_pool.reference import check_index

POINTS = 128  # per block
STEP = 16  # points at a time
PIXELS = 8  # per program of the backward
ROWS = _gpu.block(32, interpreted=512)  # per program where rows are only moved
MAX_WIDTH = 256


def bev_pool_index(cells, num_cells):
    key = torch.where((cells >= 0) & (cells < num_cells), cells, num_cells).int()
    ascending, order = key.sort(stable=True)
    bounds = torch.arange(num_cells + 1, dtype=torch.int32, device=cells.device)
    return order.int(), torch.searchsorted(ascending, bounds, out_int32=True)


def bev_pool_forward(features, depth, cells, order, starts):
    if _check.strict():
        check_index(order, starts)
    points, channels, num_cells = order.shape[0], features.shape[1], starts.shape[0] - 1
    out = torch.zeros((num_cells, channels), dtype=features.dtype, device=features.device)
    if points == 0 or out.numel() == 0:
        return out
    features, order, starts, cells = (t.contiguous() for t in (features, order, starts, cells))
    weights, depths, pixels = _weights(features, depth)
    blocks = _gpu.cdiv(points, POINTS)
    real = torch.float64 if features.dtype == torch.float64 else torch.float32
    parts = torch.empty((blocks, 2, channels), dtype=real, device=features.device)
    first, second, channel_programs = widths_of_tiles(channels, MAX_WIDTH)
    _pool_kernel[(blocks, channel_programs)](
        features, weights, cells, order, starts, parts, out, points, num_cells, channels, depths, pixels,
        WEIGHTED=depth is not None, POINTS=POINTS, STEP=STEP, FIRST=first, SECOND=second, num_warps=2,
    )  # fmt: skip
    _join_kernel[(blocks, channel_programs)](
        cells, order, starts, parts, out, points, num_cells, channels,
        POINTS=POINTS, FIRST=first, SECOND=second, num_warps=1,
    )  # fmt: skip
    return out


def bev_pool_backward(grad, features, depth, cells):
    (rows, channels), num_cells = features.shape, grad.shape[0]
    grad_features = torch.empty(features.shape, dtype=features.dtype, device=features.device)
    grad_depth = torch.empty((0,) if depth is None else depth.shape, dtype=features.dtype, device=features.device)
    grad, features, cells = grad.contiguous(), features.contiguous(), cells.contiguous()
    if depth is None:
        if grad_features.numel():
            width = min(_gpu.next_power_of_2(channels), MAX_WIDTH)
            channel_programs = _gpu.cdiv(channels, width)
            _gather_kernel[(_gpu.cdiv(rows, ROWS) * channel_programs,)](
                grad, cells, grad_features, rows, num_cells, channels, channel_programs,
                ROWS=ROWS, WIDTH=width, num_warps=4,
            )  # fmt: skip
        return grad_features, grad_depth
    if depth.numel() == 0:  # no points
        return grad_features.zero_(), grad_depth
    weights, depths, pixels = _weights(features, depth)
    first, second, channel_programs = widths_of_tiles(channels, MAX_WIDTH)
    if channel_programs > 1:
        # The products of a point are summed over all its channels, which one program must see.
        first, second, channel_programs = _gpu.next_power_of_2(channels), 0, 1
    _gradients_kernel[(_gpu.cdiv(rows, PIXELS),)](
        grad, features, weights, cells, grad_features, grad_depth, rows, num_cells, channels, depths, pixels,
        PIXELS=PIXELS, FIRST=first, SECOND=second, num_warps=2 if channels <= MAX_WIDTH else 8,
    )  # fmt: skip
    return grad_features, grad_depth


def _weights(features, depth):
    return (features, 0, 1) if depth is None else (depth.contiguous(), depth.shape[1], depth.shape[2])


@triton.jit
def _store_row(base, row, channel, channels, value):
    tl.store(base + row * channels + channel, value.to(base.dtype.element_ty), mask=channel < channels)


@triton.jit
def _cell_at(cells, order, j, points, num_cells):
    """The cell of the j-th point of the order, and whether it has one; 0 if not."""
    point = tl.load(order + j)
    known = (point >= 0) & (point < points)
    cell = tl.load(cells + tl.where(known, point, 0))
    known = known & (cell >= 0) & (cell < num_cells)
    return tl.where(known, cell, 0).to(tl.int32), known


@_gpu.kernel(specialize=("channels",))
def _pool_kernel(
    features, weights, cells, order, starts, parts, out, points, num_cells, channels, depths, pixels,
    WEIGHTED: tl.constexpr, POINTS: tl.constexpr, STEP: tl.constexpr, FIRST: tl.constexpr, SECOND: tl.constexpr,
):  # fmt: skip
    REAL: tl.constexpr = tl.float64 if features.dtype.element_ty == tl.float64 else tl.float32
    block = tl.program_id(0)
    channel = tl.program_id(1) * FIRST + tl.arange(0, FIRST)
    rest = FIRST + tl.arange(0, SECOND if SECOND else 1)
    begin = block * POINTS
    end = tl.minimum(begin + POINTS, tl.minimum(points, tl.load(starts + num_cells)))  # points of no cell come last
    j = begin
    while j < end:
        cell, known = _cell_at(cells, order, j, points, num_cells)
        run_begin = tl.load(starts + cell)
        run_end = tl.load(starts + cell + 1)
        # An index that was not made from these cells may hold anything: then advance by one point and store nothing.
        known = known & (run_begin <= j) & (run_end > j)
        stop = tl.where(known, tl.minimum(run_end, end), j + 1)
        total = tl.zeros([STEP, FIRST], REAL)
        total_rest = tl.zeros([STEP, SECOND if SECOND else 1], REAL)
        for k in range(j, stop, STEP):
            i = k + tl.arange(0, STEP)
            point = tl.load(order + i, mask=i < stop, other=-1)
            exists = (point >= 0) & (point < points)
            row = point.to(tl.int64)
            if WEIGHTED:
                image = point // (depths * pixels)
                row = image.to(tl.int64) * pixels + point % pixels
            at = features + row[:, None] * channels
            value = tl.load(at + channel[None, :], mask=exists[:, None] & (channel < channels)[None, :], other=0.0).to(
                REAL
            )
            if WEIGHTED:
                weight = tl.load(weights + point, mask=exists, other=0.0).to(REAL)[:, None]
                value = value * weight
            total += value
            if SECOND:
                value = tl.load(at + rest[None, :], mask=exists[:, None] & (rest < channels)[None, :], other=0.0).to(
                    REAL
                )
                if WEIGHTED:
                    value = value * weight
                total_rest += value
        if known:
            if (run_begin >= begin) & (run_end <= end):
                _store_row(out, cell.to(tl.int64), channel, channels, tl.sum(total, 0))
                if SECOND:
                    _store_row(out, cell.to(tl.int64), rest, channels, tl.sum(total_rest, 0))
            else:
                slot = block.to(tl.int64) * 2 + (run_begin >= begin).to(tl.int64)
                _store_row(parts, slot, channel, channels, tl.sum(total, 0))
                if SECOND:
                    _store_row(parts, slot, rest, channels, tl.sum(total_rest, 0))
        j = stop


@triton.jit
def _add_parts(parts, out, cell, block, last, channel, channels):
    """Add the part of a cell at the end of its first block, then those at the beginning of the following blocks."""
    inside = channel < channels
    total = tl.load(parts + (block.to(tl.int64) * 2 + 1) * channels + channel, mask=inside, other=0.0)
    for b in range(block + 1, last + 1):
        total += tl.load(parts + tl.cast(b, tl.int64) * 2 * channels + channel, mask=inside, other=0.0)
    _store_row(out, cell.to(tl.int64), channel, channels, total)


@_gpu.kernel(specialize=("channels",))
def _join_kernel(
    cells, order, starts, parts, out, points, num_cells, channels,
    POINTS: tl.constexpr, FIRST: tl.constexpr, SECOND: tl.constexpr,
):  # fmt: skip
    """The cell whose points begin in this block and continue in the next, if any: that of the last point."""
    block = tl.program_id(0)
    end = (block + 1) * POINTS
    if end < tl.minimum(points, tl.load(starts + num_cells)):
        cell, known = _cell_at(cells, order, end - 1, points, num_cells)
        run_begin = tl.load(starts + cell)
        run_end = tl.minimum(tl.load(starts + cell + 1), points)
        if known & (run_begin >= block * POINTS) & (run_begin < end) & (run_end > end):
            last = (run_end - 1) // POINTS
            channel = tl.program_id(1) * FIRST + tl.arange(0, FIRST)
            _add_parts(parts, out, cell, block, last, channel, channels)
            if SECOND:
                _add_parts(parts, out, cell, block, last, FIRST + tl.arange(0, SECOND), channels)


@_gpu.kernel(specialize=("channels",))
def _gather_kernel(
    grad, cells, grad_features, rows, num_cells, channels, channel_programs, ROWS: tl.constexpr, WIDTH: tl.constexpr
):
    row = (tl.program_id(0) // channel_programs) * ROWS + tl.arange(0, ROWS)
    channel = (tl.program_id(0) % channel_programs) * WIDTH + tl.arange(0, WIDTH)
    cell = tl.load(cells + row, mask=row < rows, other=-1)
    inside = ((cell >= 0) & (cell < num_cells))[:, None] & (channel < channels)[None, :]
    value = tl.load(grad + cell.to(tl.int64)[:, None] * channels + channel[None, :], mask=inside, other=0.0)
    exists = (row < rows)[:, None] & (channel < channels)[None, :]
    tl.store(grad_features + row.to(tl.int64)[:, None] * channels + channel[None, :], value, mask=exists)


@triton.jit
def _rows(base, at, valid, channel, channels, REAL: tl.constexpr):
    """Rows of `base` [PIXELS, WIDTH] in dtype REAL; 0 where not valid."""
    mask = valid[:, None] & (channel < channels)[None, :]
    return tl.load(base + at.to(tl.int64)[:, None] * channels + channel[None, :], mask=mask, other=0.0).to(REAL)


@_gpu.kernel(specialize=("channels",))
def _gradients_kernel(
    grad, features, weights, cells, grad_features, grad_weights, rows, num_cells, channels, depths, pixels,
    PIXELS: tl.constexpr, FIRST: tl.constexpr, SECOND: tl.constexpr,
):  # fmt: skip
    REAL: tl.constexpr = tl.float64 if features.dtype.element_ty == tl.float64 else tl.float32
    row = tl.program_id(0) * PIXELS + tl.arange(0, PIXELS)
    exists = row < rows
    channel, rest = tl.arange(0, FIRST), FIRST + tl.arange(0, SECOND if SECOND else 1)
    value = _rows(features, row, exists, channel, channels, REAL)
    total = tl.zeros([PIXELS, FIRST], REAL)
    if SECOND:
        value_rest = _rows(features, row, exists, rest, channels, REAL)
        total_rest = tl.zeros([PIXELS, SECOND], REAL)
    # the first point of each pixel; that of the next depth is `pixels` later
    point = (row // pixels).to(tl.int64) * depths * pixels + row % pixels
    for _ in range(depths):
        cell = tl.load(cells + point, mask=exists, other=-1)
        valid = (cell >= 0) & (cell < num_cells)  # a point of no cell counts for nothing, finite or not
        weight = tl.load(weights + point, mask=valid, other=0.0).to(REAL)[:, None]
        upstream = _rows(grad, cell, valid, channel, channels, REAL)
        total += weight * upstream
        product = tl.sum(value * upstream, 1)
        if SECOND:
            upstream = _rows(grad, cell, valid, rest, channels, REAL)
            total_rest += weight * upstream
            product += tl.sum(value_rest * upstream, 1)
        product = tl.where(valid, product, 0.0)
        tl.store(grad_weights + point, product.to(grad_weights.dtype.element_ty), mask=exists)
        point += pixels
    at = grad_features + row.to(tl.int64)[:, None] * channels
    element = grad_features.dtype.element_ty
    tl.store(at + channel[None, :], total.to(element), mask=exists[:, None] & (channel < channels)[None, :])
    if SECOND:
        tl.store(at + rest[None, :], total_rest.to(element), mask=exists[:, None] & (rest < channels)[None, :])
