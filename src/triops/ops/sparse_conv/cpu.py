"""Sparse convolution on CPU: gather the rows of a block, multiply offset by offset, sum up output by output.

A plan lists the pairs of a table block by block, a block being a range of output rows whose gathered features and
products stay in cache, and inside a block offset by offset. For each output row it knows where its products will
lie, so that the last step writes every output once, in the order of the offsets: the same bits on every run and
with any number of threads, and nothing to clear or to lock.
"""

from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import torch

from triops._half import as_bits, narrow, widen
from triops._launch import as_numpy, jit, run, zeros
from triops.ops.sparse_conv.plans import cached
from triops.ops.sparse_conv.reference import compute_dtype, refuse_rows_outside

BLOCK_BYTES = 4 << 20  # of gathered rows and products: what a block may keep in cache
PARTS = 8  # of a weight gradient: the most threads that can share it
PAIRS_PER_ROW = 4  # as LiDAR has them; only a guess to size the blocks by


def sparse_conv(features, weight, bias, gather, scatter, mirrored, flip):
    wide = compute_dtype(features.dtype)
    out = torch.empty(gather.shape[1], weight.shape[0], dtype=features.dtype)
    plan = _plan("sparse_conv", gather, features.shape[0], _block_rows(features.shape[1] + weight.shape[0]))
    rows = features.detach().contiguous()
    weights = weight.detach().to(wide).permute(1, 2, 0).unbind(0)  # [Cin, Cout] each
    bias = torch.zeros(weight.shape[0], dtype=wide) if bias is None else bias.to(wide)
    threads = torch.get_num_threads()
    run(_forward, plan.blocks, 1, threads, plan, rows, weights[::-1] if flip else weights, as_numpy(bias), as_bits(out))
    return out


def _forward(begin, end, threads, plan, rows, weights, bias, target):
    """The outputs of blocks [begin, end)."""
    wide, taps = compute_dtype(rows.dtype), len(weights)
    gathered = torch.empty(plan.largest, rows.shape[1], dtype=wide)
    products = torch.empty(plan.largest, target.shape[1], dtype=wide)
    source, gathered_array, products_array = as_bits(rows), gathered.numpy(), products.numpy()
    as_it_lies = rows.dtype == wide
    with _one_thread(threads):
        for block in range(begin, end):
            bounds = plan.bounds[block * taps : (block + 1) * taps + 1]
            first = bounds[0]
            for k in range(taps):
                start, stop = bounds[k], bounds[k + 1]
                if start < stop:
                    here = slice(start - first, stop - first)
                    if as_it_lies and plan.consecutive[block * taps + k]:
                        row = plan.inputs[start]
                        taken = rows[row : row + stop - start]
                    else:
                        _gather(start, stop, first, plan.inputs, source, gathered_array)
                        taken = gathered[here]
                    torch.mm(taken, weights[k], out=products[here])
            origin, last = block * plan.block, min((block + 1) * plan.block, target.shape[0])
            _sum(origin, last, first, plan.row_starts, plan.places, products_array, bias, target)


def sparse_conv_backward_weight(features, grad_output, gather, scatter, mirrored, flip):
    wide, taps = compute_dtype(features.dtype), gather.shape[0]
    channels = features.shape[1] + grad_output.shape[1]
    plan = _plan("sparse_conv_backward_weight", gather, features.shape[0], _block_rows(channels))
    given, rows = grad_output.detach().contiguous(), features.detach().contiguous()
    # As many parts whatever the number of threads, so that the sum does not hang on it.
    parts = zeros(min(PARTS, plan.blocks), given.shape[1], taps, rows.shape[1], dtype=wide)
    run(_backward_weight, len(parts), 1, torch.get_num_threads(), plan, rows, given, parts, flip)
    return torch.from_numpy(parts.numpy().sum(0)).to(features.dtype)


def _backward_weight(begin, end, threads, plan, rows, given, parts, flip):
    """Parts [begin, end) of the gradient, each the sum over its share of the blocks."""
    taps, wide = parts.shape[2], parts.dtype
    left = torch.empty(plan.block, given.shape[1], dtype=wide)
    right = torch.empty(plan.block, rows.shape[1], dtype=wide)
    given_array, rows_array, left_array, right_array = as_bits(given), as_bits(rows), left.numpy(), right.numpy()
    as_it_lies = rows.dtype == wide
    with _one_thread(threads):
        for part in range(begin, end):
            grads = parts[part].unbind(1)
            for block in range(part, plan.blocks, len(parts)):
                for k in range(taps):
                    segment = block * taps + k
                    start, stop = plan.bounds[segment], plan.bounds[segment + 1]
                    if start == stop:
                        continue
                    if as_it_lies and plan.whole[segment]:
                        row = plan.outputs[start]
                        outer = given[row : row + stop - start]
                    else:
                        _gather(start, stop, start, plan.outputs, given_array, left_array)
                        outer = left[: stop - start]
                    if as_it_lies and plan.consecutive[segment]:
                        row = plan.inputs[start]
                        inner = rows[row : row + stop - start]
                    else:
                        _gather(start, stop, start, plan.inputs, rows_array, right_array)
                        inner = right[: stop - start]
                    grads[taps - 1 - k if flip else k].addmm_(outer.t(), inner)


@contextmanager
def _one_thread(threads):
    """Products on this thread alone: the blocks are what is shared out. A product that wakes a team of threads
    takes longer than it saves, and its bits would hang on their number. torch's setting is one of each thread;
    `threads` is the caller's, for new threads start from the last one set."""
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


class Plan(NamedTuple):
    """The pairs of a table; S = blocks * K segments, one for each block and offset, P pairs, A output rows."""

    block: int  # output rows in a block
    blocks: int
    largest: int  # pairs of the fullest block
    bounds: list  # starts, as Python integers
    starts: np.ndarray  # int64 [S + 1]: the pairs of a segment
    inputs: np.ndarray  # int32 [P]: input row of a pair
    outputs: np.ndarray  # int32 [P]: output row of a pair
    consecutive: np.ndarray  # bool [S]: the input rows of the segment follow one another
    whole: np.ndarray  # bool [S]: the output rows do
    row_starts: np.ndarray  # int64 [A + 1]
    places: np.ndarray  # int32 [P]: pairs by output row, counted from the first pair of the block


def _plan(operator, table, count, block):
    return cached(table, ("cpu", count, block), lambda: _make_plan(operator, table, count, block))


def _make_plan(operator, table, count, block):
    taps, outputs = table.shape
    blocks = -(-outputs // block)
    entries = as_numpy(table)
    counts = np.empty((blocks, taps), np.int64)
    outside = np.zeros(1, np.int64)
    run(_count, blocks, 8, block, count, entries, counts, outside)
    if outside[0]:
        refuse_rows_outside(operator, "gather", table, count)
    starts = np.zeros(blocks * taps + 1, np.int64)
    np.cumsum(counts.reshape(-1), out=starts[1:])
    pairs = int(starts[-1])
    inputs, places, out_rows = (np.empty(pairs, np.int32) for _ in range(3))
    row_starts = np.zeros(outputs + 1, np.int64)
    consecutive, whole = (np.zeros(blocks * taps, np.bool_) for _ in range(2))
    run(_fill, blocks, 8, block, entries, starts, inputs, out_rows, consecutive, whole, row_starts, places)
    largest = int(counts.sum(1).max(initial=0))
    return Plan(
        block, blocks, largest, starts.tolist(), starts, inputs, out_rows, consecutive, whole, row_starts, places
    )


def _block_rows(channels):
    """A power of two: layers of like width then share a plan."""
    rows = BLOCK_BYTES // (4 * PAIRS_PER_ROW * max(channels, 1))
    return 1 << max(rows, 256).bit_length() - 1


@jit
def _count(begin, end, block, count, table, counts, outside):
    for b in range(begin, end):
        last = min((b + 1) * block, table.shape[1])
        for k in range(table.shape[0]):
            found = 0
            bad = 0
            for o in range(b * block, last):
                row = table[k, o]
                found += row >= 0
                bad += (row < -1) | (row >= count)
            counts[b, k] = found
            if bad:
                outside[0] = 1


@jit
def _fill(begin, end, block, table, starts, inputs, outputs, consecutive, whole, row_starts, places):
    taps = table.shape[0]
    for b in range(begin, end):
        origin = b * block
        last = min(origin + block, table.shape[1])
        base = starts[b * taps]
        sizes = np.zeros(last - origin, np.int32)
        for k in range(taps):
            p = starts[b * taps + k]
            for o in range(origin, last):
                row = table[k, o]
                if row >= 0:
                    inputs[p] = row
                    outputs[p] = o
                    sizes[o - origin] += 1
                    p += 1
            first, n = starts[b * taps + k], p - starts[b * taps + k]
            if n:
                whole[b * taps + k] = outputs[p - 1] - outputs[first] == n - 1
                steady = inputs[p - 1] - inputs[first] == n - 1
                for j in range(first + 1, p):
                    steady &= inputs[j] == inputs[j - 1] + 1
                consecutive[b * taps + k] = steady
        at = base
        cursor = np.empty(last - origin, np.int64)
        for o in range(origin, last):
            cursor[o - origin] = at
            at += sizes[o - origin]
            row_starts[o + 1] = at
        for k in range(taps):
            for p in range(starts[b * taps + k], starts[b * taps + k + 1]):
                o = outputs[p] - origin
                places[cursor[o]] = p - base
                cursor[o] += 1


@jit
def _gather(start, stop, base, rows, source, gathered):
    """The rows of pairs [start, stop), widened, at their place behind the pair `base`."""
    for p in range(start, stop):
        row = rows[p]
        for c in range(source.shape[1]):
            gathered[p - base, c] = widen(source[row, c])


@jit
def _sum(begin, end, base, row_starts, places, products, bias, target):
    channels = target.shape[1]
    total = np.empty(channels, products.dtype)
    for o in range(begin, end):
        for c in range(channels):
            total[c] = bias[c]
        for j in range(row_starts[o], row_starts[o + 1]):
            place = places[j]
            for c in range(channels):
                total[c] += products[place, c]
        for c in range(channels):
            target[o, c] = narrow(total[c], target)
