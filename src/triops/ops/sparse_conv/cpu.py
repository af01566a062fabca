"""Sparse convolution on CPU: block by block of output rows, offset by offset, sums stay in cache.

A plan of pairs lists the pairs of each offset by ascending output row: those of a block of rows are a run that a binary
search finds. The forward first copies the runs of a block end to end, and checks them on the way, so that the products
run through one list that lies in cache and know which row comes next; a weight gradient, which needs no pairs that fill
up, checks the runs and reads them where they are. Every output is summed in the order of the offsets, by one
thread: the same bits on every run and with any number of threads, and nothing to lock.
"""

import math

import numpy as np
import torch

from triops._activations import ACTIVATIONS
from triops._cpu.half import as_bits, narrow, widen
from triops._cpu.intrinsics import prefetch
from triops._cpu.jit import jit
from triops._cpu.memory import as_numpy, in_huge_pages, zeros
from triops._cpu.row_products import add_outer_products, add_products, by_lanes
from triops._cpu.threads import run
from triops._cpu.vectors import LANES, copy_vector
from triops._dtypes import compute_dtype
from triops.ops.rulebook.cpu import pack
from triops.ops.rulebook.plans import Pairs

SUMS = 32_768  # numbers in a block of output rows, which stay in cache
BLOCK = 512  # output rows of a weight gradient whose pairs are found at a time, at least
TOGETHER = 6  # pairs of one offset that share each vector of the weight
LINES = 4  # output channels of a weight gradient that share each vector of a row
PRODUCTS = 2_000_000  # of two numbers, worth a thread
ROWS = 16_384  # to widen, worth a thread
AHEAD = 18  # pairs from the request for a row to its use
PARTS = 8  # of a weight gradient: the most threads that can share it


def sparse_conv(
    features, weight, bias, gather, scatter, mirrored, flip, tile, tiles, transposed_tiles, pairs, transposed_pairs
):
    weight = weight.detach().flatten(1, -2).to(features.dtype)
    return _convolve("sparse_conv", features, weight, bias, None, gather, flip, pairs, "none", 0.0)


def sparse_conv_fused(features, weight, bias, residual, gather, tile, tiles, pairs, activation, alpha):
    return _convolve("sparse_conv_fused", features, weight, bias, residual, gather, False, pairs, activation, alpha)


def _convolve(operator, features, weight, bias, residual, gather, flip, pairs, activation, alpha):
    real, channels = compute_dtype(features.dtype), weight.shape[0]
    out = torch.empty(gather.shape[1], channels, dtype=features.dtype)
    in_huge_pages(out)
    packed, counts = _pairs(operator, gather, features.shape[0], pairs)
    weight = weight if weight.dtype is real else weight.to(real)
    matrices = weight.detach().numpy().swapaxes(0, 1)  # [K, Cout, Cin], as they lie: `by_lanes` copies them
    matrices = by_lanes(matrices[::-1] if flip else matrices)
    start = np.zeros(_padded(channels), matrices.dtype)
    if bias is not None:
        start[:channels] = as_numpy(bias, real)
    block = max(SUMS // max(len(start), 1), 64)
    blocks, foreign = -(-gather.shape[1] // block), np.zeros(1, np.uint8)
    residual = out[:0] if residual is None else residual
    run(
        _forward, blocks, _grain(counts, blocks, channels * features.shape[1]),
        block, packed, counts, _rows(features, real), matrices, start, as_bits(residual),
        ACTIVATIONS.index(activation), matrices.dtype.type(alpha), as_bits(out), foreign,
    )  # fmt: skip
    _refuse_foreign(operator, foreign)
    return out


def sparse_conv_backward_weight(features, grad_output, gather, scatter, mirrored, flip, pairs, wide):
    real, offsets, channels = compute_dtype(features.dtype), gather.shape[0], features.shape[1]
    packed, counts = _pairs("sparse_conv_backward_weight", gather, features.shape[0], pairs)
    rows = _rows(features, real, _padded(channels))
    # As many parts whatever the number of threads, so that the sum does not depend on it.
    block = max(SUMS // max(rows.shape[1], 1), BLOCK)
    blocks, foreign = -(-gather.shape[1] // block), np.zeros(1, np.uint8)
    parts = zeros(min(PARTS, blocks), offsets, grad_output.shape[1], rows.shape[1], dtype=real)
    run(
        _backward_weight, len(parts), _grain(counts, len(parts), grad_output.shape[1] * channels),
        blocks, block, packed, counts, rows, _rows(grad_output, real), parts.numpy(), foreign,
    )  # fmt: skip
    _refuse_foreign("sparse_conv_backward_weight", foreign)
    grad = parts.numpy().sum(0)
    found = torch.from_numpy((grad[::-1] if flip else grad)[..., :channels].swapaxes(0, 1).copy())
    return found if wide else found.to(features.dtype)


def _pairs(operator, gather, rows, plan):
    """-> int32 [K, 2, A], int32 [K]: the plan that came along, or one made for this call."""
    if plan is None:
        plan = pack(operator, "gather", gather, rows)
    packed, counts = Pairs.of(plan.contiguous(), *gather.shape)
    return packed.numpy(), counts.numpy()


def _refuse_foreign(operator, foreign):
    if foreign[0]:
        raise IndexError(f"{operator}: pairs holds rows that do not exist: it is not the plan of this table")


def _grain(counts, pieces, products):
    """How many of so many pieces of the work are worth a thread, with so many products per pair."""
    return max(1, PRODUCTS * pieces // max(1, int(counts.sum(dtype=np.int64)) * products))


def _padded(channels):
    return -(-channels // LANES) * LANES


def _rows(features, real, width=0):
    """Rows of dtype `real`, filled up with zeros to `width`; as they lie where they are so."""
    width = max(width, features.shape[1])
    if features.dtype == real and features.shape[1] == width:
        return as_numpy(features)
    rows = torch.empty(features.shape[0], width, dtype=real)
    in_huge_pages(rows)
    run(_widen, len(rows), ROWS, as_bits(features), rows.numpy())
    return rows.numpy()


@jit
def _widen(begin, end, source, rows):
    for i in range(begin, end):
        for c in range(source.shape[1]):
            rows[i, c] = widen(source[i, c])
        rows[i, source.shape[1] :] = 0


@jit
def _forward(begin, end, size, packed, counts, source, matrices, bias, residual, activation, alpha, target, foreign):
    """The outputs of blocks [begin, end) of `size` rows."""
    offsets, groups = matrices.shape[:2]
    sums = np.zeros((size + 1, groups * LANES), matrices.dtype)  # the last row is for pairs that fill up
    rows, places, ends, cursors = _room(offsets, size)
    for block in range(begin, end):
        origin = block * size
        count = min(size, target.shape[0] - origin)
        flat = sums.reshape(-1)
        for o in range(count):
            for lane in range(0, groups * LANES, LANES):
                copy_vector(flat, o * groups * LANES + lane, bias, lane)
        if _read(packed, counts, origin, count, source.shape[0], size, TOGETHER, cursors, rows, places, ends):
            start = 0
            for k in range(offsets):
                for group in range(groups):
                    _add_segment(start, ends[k], rows, places, source, matrices, k, group, sums)
                start = ends[k]
        else:
            foreign[0] = 1
        _finish(sums, residual, activation, alpha, origin, count, target)


@jit
def _room(offsets, size):
    """For the pairs of a block of rows: input rows and places of the sums, the end of each offset, and how far the plan
    is read."""
    most = offsets * (size + TOGETHER)
    rows, places = np.zeros(most + AHEAD + TOGETHER, np.int32), np.empty(most, np.int32)
    return rows, places, np.empty(offsets, np.intp), np.full(offsets, -1, np.intp)


@jit
def _read(packed, counts, origin, count, limit, filler, multiple, cursors, rows, places, ends):
    """Copy the pairs of outputs [origin, origin + count) offset by offset into `rows` and `places`, outputs less
    `origin`; each offset is filled up to a multiple of pairs with row 0 and the place `filler`.

    -> whether all lie within the block and the inputs: whoever made the plan, memory stays sound.
    """
    n, good = 0, True
    for k in range(len(ends)):
        start, stop = _find_run(packed, counts, k, origin, count, cursors[k])
        cursors[k] = stop
        good &= _copy(packed[k, 0], packed[k, 1], start, stop, origin, count, limit, places, rows, n)
        n += stop - start
        while n % multiple:
            places[n], rows[n] = filler, 0
            n += 1
        ends[k] = n
    return good


@jit
def _find_run(packed, counts, k, origin, count, cursor):
    """The pairs [start, stop) of offset k with outputs [origin, origin + count). The next block's are requested.

    cursor: where the run of the block before ended, or -1 for the first block.
    """
    outputs, total = packed[k, 0], min(np.intp(counts[k]), packed.shape[2])
    start = cursor
    if start < 0 or (start < total and outputs[start] < origin):  # the first block, or not the one behind the last
        start = _first_not_below(outputs, max(start, 0), total, origin)
    stop = _first_not_below(outputs, start, min(start + count, total), origin + count)
    plan, columns = packed.reshape(-1), np.uint64(packed.shape[2])
    ahead = np.uint64(2 * k) * columns + np.uint64(stop)
    for line in range(ahead, ahead + np.uint64(stop - start + 16), np.uint64(16)):
        prefetch(plan, line)
        prefetch(plan, line + columns)
    return start, stop


@jit
def _copy(outputs, inputs, start, stop, origin, count, limit, places, rows, n):
    """Copy pairs [start, stop) to places and rows [n, ...), outputs less `origin`. -> as `_check_run`"""
    bad, shift = False, np.uint64(n) - np.uint64(start)
    low, high, limit = np.int32(origin), np.int32(origin + count), np.int32(limit)
    for j in range(np.uint64(start), np.uint64(stop)):
        bad |= (outputs[j] < low) | (outputs[j] >= high) | (inputs[j] < 0) | (inputs[j] >= limit)
        places[j + shift] = outputs[j] - low
        rows[j + shift] = inputs[j]
    return not bad


@jit
def _check_run(packed, k, start, stop, origin, count, limit):
    """Whether the pairs [start, stop) of offset k lie within outputs [origin, origin + count) and `limit` inputs."""
    outputs, inputs, bad = packed[k, 0], packed[k, 1], False
    low, high, limit = np.int32(origin), np.int32(origin + count), np.int32(limit)
    for j in range(np.uint64(start), np.uint64(stop)):
        bad |= (outputs[j] < low) | (outputs[j] >= high) | (inputs[j] < 0) | (inputs[j] >= limit)
    return not bad


@jit
def _add_segment(start, stop, rows, places, source, matrices, k, group, sums):
    """The pairs [start, stop), all of one offset, so that their outputs differ."""
    flat = source.reshape(-1)
    for j in range(start, stop, TOGETHER):
        if group == 0:
            for ahead in range(j + AHEAD, j + AHEAD + TOGETHER):
                prefetch(flat, np.uint64(rows[ahead]) * np.uint64(source.shape[1]))
        outputs = (
            np.intp(places[j]), np.intp(places[j + 1]), np.intp(places[j + 2]),
            np.intp(places[j + 3]), np.intp(places[j + 4]), np.intp(places[j + 5]),
        )  # fmt: skip
        inputs = (
            np.intp(rows[j]), np.intp(rows[j + 1]), np.intp(rows[j + 2]),
            np.intp(rows[j + 3]), np.intp(rows[j + 4]), np.intp(rows[j + 5]),
        )  # fmt: skip
        add_products(sums, outputs, source, inputs, matrices, k, group)


@jit
def _finish(sums, residual, activation, alpha, origin, count, target):
    """The outputs of a block: its sums, the residual added and activated."""
    lines, channels, padded = count, target.shape[1], sums.shape[1]
    if channels == padded:  # rows lie end to end: one long line, for loops of vectors
        lines, channels, padded = 1, count * channels, count * padded
    values, added, outputs = sums.reshape(-1), residual.reshape(-1), target.reshape(-1)
    first = origin * target.shape[1]
    zero = sums.dtype.type(0)
    for line in range(lines):
        at, to = np.uint64(line * padded), np.uint64(first + line * channels)
        if len(added) > 0:
            for c in range(np.uint64(channels)):
                values[at + c] += widen(added[to + c])
        if activation == 1:
            for c in range(np.uint64(channels)):
                value = values[at + c]
                outputs[to + c] = narrow(zero if value < zero else value, outputs)  # NaN stays
        else:
            if activation > 1:
                _activate(values[at : at + np.uint64(channels)], activation, alpha)
            for c in range(np.uint64(channels)):
                outputs[to + c] = narrow(values[at + c], outputs)


@jit
def _activate(values, activation, alpha):
    """In place, in the order of ACTIVATIONS; those before are `_finish`'s."""
    zero, one, half = values.dtype.type(0), values.dtype.type(1), values.dtype.type(0.5)
    root_half = values.dtype.type(0.7071067811865476)
    for c in range(len(values)):
        value = values[c]
        if activation == 2:
            values[c] = one / (one + np.exp(-value))
        elif activation == 3:
            values[c] = value * alpha if value < zero else value
        elif activation == 4:
            values[c] = value * half * (one + math.erf(value * root_half))
        else:
            values[c] = value / (one + np.exp(-value))


@jit
def _first_not_below(ascending, low, high, value):
    """The first place in [low, high) that is not below `value`, or high. Without a branch on what lies there."""
    at = np.uint64(max(low, 0))
    left = np.uint64(max(min(high, len(ascending)) - np.intp(at), 0))
    while left > np.uint64(0):
        half = (left + np.uint64(1)) >> np.uint64(1)
        at += half * np.uint64(ascending[at + half - np.uint64(1)] < value)
        left -= half
    return np.intp(at)


@jit
def _backward_weight(begin, end, blocks, size, packed, counts, rows, given, parts, foreign):
    """Parts [begin, end) of the gradient, each the sum over its share of the blocks of `size` output rows."""
    offsets, lines = parts.shape[1], parts.shape[2]
    cursors, starts = np.full(offsets, -1, np.intp), np.empty(offsets, np.intp)
    flat, width = rows.reshape(-1), np.uint64(rows.shape[1])
    for part in range(begin, end):
        for block in range(part * blocks // parts.shape[0], (part + 1) * blocks // parts.shape[0]):
            origin = block * size
            count, good = min(size, given.shape[0] - origin), True
            for k in range(offsets):
                starts[k], cursors[k] = _find_run(packed, counts, k, origin, count, cursors[k])
                good &= _check_run(packed, k, starts[k], cursors[k], origin, count, rows.shape[0])
            if not good:
                foreign[0] = 1
                continue
            for k in range(offsets):
                outputs, inputs, start, stop = packed[k, 0], packed[k, 1], starts[k], cursors[k]
                if k + 1 < offsets:
                    for j in range(starts[k + 1], min(starts[k + 1] + 64, cursors[k + 1])):
                        prefetch(flat, np.uint64(packed[k + 1, 1, j]) * width)
                sums = parts[part, k]
                for lane in range(0, rows.shape[1], LANES):
                    for line in range(0, lines, LINES):
                        if line + LINES <= lines:
                            together = (line, line + 1, line + 2, line + 3)
                            add_outer_products(sums, together, lane, given, outputs, rows, inputs, start, stop)
                        else:
                            for one in range(line, lines):
                                add_outer_products(sums, (one,), lane, given, outputs, rows, inputs, start, stop)
