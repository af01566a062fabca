"""Sparse convolution on CPU: block by block of output rows, offset by offset, sums stay in cache.

A plan lists the pairs of a table block by block, and inside a block offset by offset. Every output is summed up in the
order of the offsets, by one thread: the same bits on every run and with any number of threads, and nothing to lock.
"""

from typing import NamedTuple

import numpy as np
import torch

from triops._cpu.half import as_bits, narrow, widen
from triops._cpu.intrinsics import prefetch
from triops._cpu.jit import jit
from triops._cpu.memory import as_numpy, in_huge_pages, zeros
from triops._cpu.threads import run
from triops._dtypes import compute_dtype
from triops.ops.rulebook.tables import refuse_rows_outside
from triops.ops.sparse_conv.plans import cached
from triops.ops.sparse_conv.row_products import LANES, TOGETHER, add_outer_products, add_products

BLOCK = 512  # output rows whose sums stay in cache
PRODUCTS = 2_000_000  # of two numbers, worth a thread
BLOCKS = 16  # of a table, worth a thread
ROWS = 16_384  # to widen, worth a thread
AHEAD = 8  # pairs from the request for a row to its use
PARTS = 8  # of a weight gradient: the most threads that can share it


def sparse_conv(features, weight, bias, gather, scatter, mirrored, flip):
    wide, channels = compute_dtype(features.dtype), weight.shape[0]
    out = torch.empty(gather.shape[1], channels, dtype=features.dtype)
    in_huge_pages(out)
    plan = _plan("sparse_conv", gather, features.shape[0])
    matrices = _by_lanes(weight.detach().flip(1) if flip else weight.detach(), wide)
    bias = torch.zeros(channels, dtype=wide) if bias is None else bias.to(wide)
    run(
        _forward, plan.blocks, _grain(plan, plan.blocks, channels * features.shape[1]),
        plan.starts, plan.inputs, plan.outputs, _rows(features, wide), matrices, as_numpy(bias), as_bits(out),
    )  # fmt: skip
    return out


def sparse_conv_backward_weight(features, grad_output, gather, scatter, mirrored, flip):
    wide, taps, channels = compute_dtype(features.dtype), gather.shape[0], features.shape[1]
    plan = _plan("sparse_conv_backward_weight", gather, features.shape[0])
    rows = _rows(features, wide, _padded(channels))
    # As many parts whatever the number of threads, so that the sum does not hang on it.
    parts = zeros(min(PARTS, plan.blocks), taps, grad_output.shape[1], rows.shape[1], dtype=wide)
    run(
        _backward_weight, len(parts), _grain(plan, len(parts), grad_output.shape[1] * channels),
        plan.starts, plan.inputs, plan.outputs, rows, _rows(grad_output, wide), parts.numpy(),
    )  # fmt: skip
    grad = parts.numpy().sum(0)
    return torch.from_numpy((grad[::-1] if flip else grad)[..., :channels].swapaxes(0, 1).copy()).to(features.dtype)


def _grain(plan, pieces, products):
    """How many of so many pieces of the work are worth a thread, with so many products for each pair."""
    return max(1, PRODUCTS * pieces // max(1, len(plan.inputs) * products))


def _by_lanes(weight, wide):
    """weight [Cout, K, Cin] -> [K, groups of LANES outputs, Cin, LANES], filled up with zeros"""
    channels, taps, inputs = weight.shape
    padded = torch.zeros(_padded(channels), taps, inputs, dtype=wide)
    padded[:channels] = weight
    return padded.unflatten(0, (-1, LANES)).permute(2, 0, 3, 1).contiguous().numpy()


def _padded(channels):
    return -(-channels // LANES) * LANES


def _rows(features, wide, width=0):
    """Rows of dtype `wide`, filled up with zeros to `width`; as they lie where they are so."""
    width = max(width, features.shape[1])
    if features.dtype == wide and features.shape[1] == width:
        return as_numpy(features)
    rows = torch.empty(features.shape[0], width, dtype=wide)
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
def _forward(begin, end, starts, inputs, outputs, source, matrices, bias, target):
    """The outputs of blocks [begin, end)."""
    taps, groups = matrices.shape[:2]
    sums = np.zeros((BLOCK, groups * LANES), matrices.dtype)
    for block in range(begin, end):
        origin = block * BLOCK
        count = min(BLOCK, target.shape[0] - origin)
        for o in range(count):
            for c in range(len(bias)):
                sums[o, c] = bias[c]
        for k in range(taps):
            start, stop = starts[block * taps + k], starts[block * taps + k + 1]
            for group in range(groups):
                _add_segment(start, stop, inputs, outputs, origin, source, matrices, k, group, sums)
        for o in range(count):
            for c in range(len(bias)):
                target[origin + o, c] = narrow(sums[o, c], target)


@jit
def _add_segment(start, stop, inputs, outputs, origin, source, matrices, k, group, sums):
    """The pairs [start, stop), all of one offset, so that their outputs differ."""
    flat, last = source.reshape(-1), len(inputs) - 1
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
def _backward_weight(begin, end, starts, inputs, outputs, rows, given, parts):
    """Parts [begin, end) of the gradient, each the sum over its share of the blocks."""
    taps, lines = parts.shape[1], parts.shape[2]
    blocks = (len(starts) - 1) // taps
    for part in range(begin, end):
        for block in range(part, blocks, parts.shape[0]):
            for k in range(taps):
                start, stop = starts[block * taps + k], starts[block * taps + k + 1]
                if start == stop:
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


class Plan(NamedTuple):
    """The P pairs of a table by S = blocks * K segments, one for each block and offset."""

    blocks: int
    starts: np.ndarray  # int64 [S + 1]: the pairs of a segment
    inputs: np.ndarray  # int32 [P]: input row of a pair
    outputs: np.ndarray  # int32 [P]: output row of a pair


def _plan(operator, table, count):
    return cached(table, ("cpu", count), lambda: _make_plan(operator, table, count))


def _make_plan(operator, table, count):
    taps, outputs = table.shape
    blocks = -(-outputs // BLOCK)
    entries = as_numpy(table)
    counts = np.empty((blocks, taps), np.int64)
    outside = np.zeros(1, np.int64)
    run(_count, blocks, BLOCKS, count, entries, counts, outside)
    if outside[0]:
        refuse_rows_outside(operator, "gather", table, count)
    starts = np.zeros(blocks * taps + 1, np.int64)
    np.cumsum(counts.reshape(-1), out=starts[1:])
    plan = Plan(blocks, starts, *(np.empty(starts[-1], np.int32) for _ in range(2)))
    run(_fill, blocks, BLOCKS, entries, *plan[1:])
    return plan


@jit
def _count(begin, end, count, table, counts, outside):
    for b in range(begin, end):
        last = min((b + 1) * BLOCK, table.shape[1])
        for k in range(table.shape[0]):
            found = 0
            bad = 0
            for o in range(b * BLOCK, last):
                row = table[k, o]
                found += row >= 0
                bad += (row < -1) | (row >= count)
            counts[b, k] = found
            if bad:
                outside[0] = 1


@jit
def _fill(begin, end, table, starts, inputs, outputs):
    for b in range(begin, end):
        last = min((b + 1) * BLOCK, table.shape[1])
        for k in range(table.shape[0]):
            p = starts[b * table.shape[0] + k]
            for o in range(b * BLOCK, last):
                if table[k, o] >= 0:
                    inputs[p] = table[k, o]
                    outputs[p] = o
                    p += 1
