"""Sparse convolution on CPU: block by block of output rows, offset by offset, sums stay in cache.

A plan of pairs lists the pairs of each offset by ascending output row: those of a block of rows are a run that a binary
search finds. Every output is summed in the order of the offsets, by one thread: the same bits on every run and
with any number of threads, and nothing to lock.
"""

import math

import numpy as np
import torch

from triops._activations import ACTIVATIONS
from triops._cpu.half import as_bits, narrow, widen
from triops._cpu.intrinsics import prefetch
from triops._cpu.jit import jit
from triops._cpu.memory import as_numpy, in_huge_pages, zeros
from triops._cpu.row_products import TOGETHER, add_outer_products, add_products
from triops._cpu.threads import run
from triops._cpu.vectors import LANES
from triops._dtypes import compute_dtype
from triops.ops.rulebook.cpu import pack
from triops.ops.rulebook.plans import Pairs

BLOCK = 512  # output rows whose sums stay in cache
PRODUCTS = 2_000_000  # of two numbers, worth a thread
ROWS = 16_384  # to widen, worth a thread
AHEAD = 8  # pairs from the request for a row to its use
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
    matrices = _by_lanes(weight.detach().flip(1) if flip else weight.detach(), real)
    bias = torch.zeros(channels, dtype=real) if bias is None else bias.to(real)
    blocks, foreign = -(-gather.shape[1] // BLOCK), np.zeros(1, np.uint8)
    residual = out[:0] if residual is None else residual
    run(
        _forward, blocks, _grain(counts, blocks, channels * features.shape[1]),
        packed, counts, _rows(features, real), matrices, as_numpy(bias), as_bits(residual),
        ACTIVATIONS.index(activation), matrices.dtype.type(alpha), as_bits(out), foreign,
    )  # fmt: skip
    _refuse_foreign(operator, foreign)
    return out


def sparse_conv_backward_weight(features, grad_output, gather, scatter, mirrored, flip, pairs, wide):
    real, offsets, channels = compute_dtype(features.dtype), gather.shape[0], features.shape[1]
    packed, counts = _pairs("sparse_conv_backward_weight", gather, features.shape[0], pairs)
    rows = _rows(features, real, _padded(channels))
    # As many parts whatever the number of threads, so that the sum does not depend on it.
    blocks, foreign = -(-gather.shape[1] // BLOCK), np.zeros(1, np.uint8)
    parts = zeros(min(PARTS, blocks), offsets, grad_output.shape[1], rows.shape[1], dtype=real)
    run(
        _backward_weight, len(parts), _grain(counts, len(parts), grad_output.shape[1] * channels),
        blocks, packed, counts, rows, _rows(grad_output, real), parts.numpy(), foreign,
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


def _by_lanes(weight, real):
    """weight [Cout, K, Cin] -> [K, groups of LANES outputs, Cin, LANES], filled up with zeros"""
    channels, taps, inputs = weight.shape
    padded = torch.zeros(_padded(channels), taps, inputs, dtype=real)
    padded[:channels] = weight
    return padded.unflatten(0, (-1, LANES)).permute(2, 0, 3, 1).contiguous().numpy()


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
def _forward(begin, end, packed, counts, source, matrices, bias, residual, activation, alpha, target, foreign):
    """The outputs of blocks [begin, end)."""
    offsets, groups = matrices.shape[:2]
    sums = np.zeros((BLOCK, groups * LANES), matrices.dtype)
    cursors = np.empty(offsets, np.intp)  # the first pair of each offset that is not done
    for k in range(offsets):
        cursors[k] = _first_not_below(packed[k, 0], 0, counts[k], begin * BLOCK)
    for block in range(begin, end):
        origin = block * BLOCK
        count = min(BLOCK, target.shape[0] - origin)
        for o in range(count):
            for c in range(len(bias)):
                sums[o, c] = bias[c]
        for k in range(offsets):
            start = cursors[k]
            outputs, inputs = packed[k, 0], packed[k, 1]
            stop = _first_not_below(outputs, start, min(start + count, np.intp(counts[k])), origin + count)
            cursors[k] = stop
            if not _fits(outputs, inputs, start, stop, origin, count, source.shape[0]):
                foreign[0] = 1
                continue
            for group in range(groups):
                _add_segment(start, stop, inputs, outputs, origin, source, matrices, k, group, sums)
        if len(residual) > 0:
            for o in range(count):
                for c in range(len(bias)):
                    sums[o, c] += widen(residual[origin + o, c])
        if activation > 0:
            _activate(sums, count, len(bias), activation, alpha)
        for o in range(count):
            for c in range(len(bias)):
                target[origin + o, c] = narrow(sums[o, c], target)


@jit
def _activate(sums, count, channels, activation, alpha):
    """In place, in the order of ACTIVATIONS."""
    zero, one, half = sums.dtype.type(0), sums.dtype.type(1), sums.dtype.type(0.5)
    root_half = sums.dtype.type(0.7071067811865476)
    for o in range(count):
        for c in range(channels):
            value = sums[o, c]
            if activation == 1:
                sums[o, c] = zero if value < zero else value  # NaN stays
            elif activation == 2:
                sums[o, c] = one / (one + np.exp(-value))
            elif activation == 3:
                sums[o, c] = value * alpha if value < zero else value
            elif activation == 4:
                sums[o, c] = value * half * (one + math.erf(value * root_half))
            else:
                sums[o, c] = value / (one + np.exp(-value))


@jit
def _first_not_below(ascending, low, high, value):
    """The first place in [low, high) that is not below `value`, or high."""
    low, high = np.intp(max(low, 0)), np.intp(min(max(high, low), len(ascending)))
    while low < high:
        middle = (low + high) >> 1
        if ascending[middle] < value:
            low = middle + 1
        else:
            high = middle
    return low


@jit
def _fits(outputs, inputs, start, stop, origin, count, rows):
    """Whether pairs [start, stop) lie within the block and the inputs: whoever made the plan, memory stays sound."""
    bad = False
    for j in range(np.uint64(start), np.uint64(stop)):
        bad |= (outputs[j] < origin) | (outputs[j] >= origin + count) | (inputs[j] < 0) | (inputs[j] >= rows)
    return not bad


@jit
def _add_segment(start, stop, inputs, outputs, origin, source, matrices, k, group, sums):
    """The pairs [start, stop), all of one offset, so that their outputs differ."""
    flat, last = source.reshape(-1), stop - 1
    for j in range(start, stop, TOGETHER):
        if j + TOGETHER <= stop:
            if group == 0:
                for ahead in range(j + AHEAD, j + AHEAD + TOGETHER):
                    prefetch(flat, np.uint64(inputs[min(ahead, last)]) * np.uint64(source.shape[1]))
            rows = np.intp(inputs[j]), np.intp(inputs[j + 1]), np.intp(inputs[j + 2]), np.intp(inputs[j + 3])
            places = (
                np.intp(outputs[j]) - origin, np.intp(outputs[j + 1]) - origin,
                np.intp(outputs[j + 2]) - origin, np.intp(outputs[j + 3]) - origin,
            )  # fmt: skip
            add_products(sums, places, source, rows, matrices, k, group)
        else:
            for i in range(j, stop):
                add_products(sums, (np.intp(outputs[i]) - origin,), source, (np.intp(inputs[i]),), matrices, k, group)


@jit
def _backward_weight(begin, end, blocks, packed, counts, rows, given, parts, foreign):
    """Parts [begin, end) of the gradient, each the sum over its share of the blocks."""
    offsets, lines = parts.shape[1], parts.shape[2]
    for part in range(begin, end):
        for block in range(part, blocks, parts.shape[0]):
            origin = block * BLOCK
            count = min(BLOCK, given.shape[0] - origin)
            for k in range(offsets):
                outputs, inputs = packed[k, 0], packed[k, 1]
                start = _first_not_below(outputs, 0, counts[k], origin)
                stop = _first_not_below(outputs, start, min(start + count, np.intp(counts[k])), origin + count)
                if start >= stop:
                    continue
                if not _fits(outputs, inputs, start, stop, origin, count, rows.shape[0]):
                    foreign[0] = 1
                    continue
                sums = parts[part, k]
                for lane in range(0, rows.shape[1], LANES):
                    for line in range(0, lines, TOGETHER):
                        if line + TOGETHER <= lines:
                            together = (line, line + 1, line + 2, line + 3)
                            add_outer_products(sums, together, lane, given, outputs, rows, inputs, start, stop)
                        else:
                            for one in range(line, lines):
                                add_outer_products(sums, (one,), lane, given, outputs, rows, inputs, start, stop)
