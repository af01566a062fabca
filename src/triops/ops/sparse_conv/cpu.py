"""Sparse convolution on CPU: gather the rows of a block, multiply offset by offset, sum up output by output.

A plan lists the pairs of a table block by block, a block being a range of output rows whose gathered features and
products stay in cache, and inside a block offset by offset. For each output row it knows where its products will
lie, so that the last step writes every output once, in the order of the offsets: the same bits on every run and
with any number of threads, and nothing to clear or to lock.
"""

from typing import NamedTuple

import numpy as np
import torch

from triops._half import as_bits, narrow, widen
from triops._launch import as_numpy, jit, run
from triops.ops.sparse_conv.plans import cached
from triops.ops.sparse_conv.reference import compute_dtype, refuse_rows_outside

BLOCK_BYTES = 4 << 20  # of gathered rows and products: what a block may keep in cache
PAIRS_PER_ROW = 4  # as LiDAR has them; only a guess to size the blocks by


def sparse_conv(features, weight, bias, gather, scatter, mirrored, flip):
    (outputs, taps), channels_in, channels_out = (gather.shape[1], gather.shape[0]), features.shape[1], weight.shape[0]
    out = torch.empty(outputs, channels_out, dtype=features.dtype)
    wide = compute_dtype(features.dtype)
    plan = _plan("sparse_conv", gather, features.shape[0], _block_rows(channels_in + channels_out))
    source, target = as_bits(features), as_bits(out)
    rows = features.detach().contiguous()
    taken_as_it_lies = rows.dtype == wide
    weights = weight.detach().to(wide).permute(1, 2, 0).unbind(0)  # [Cin, Cout] each
    gathered = torch.empty(plan.largest, channels_in, dtype=wide)
    products = torch.empty(plan.largest, channels_out, dtype=wide)
    gathered_array, products_array = gathered.numpy(), products.numpy()
    bias_array = as_numpy(torch.zeros(channels_out, dtype=wide) if bias is None else bias.to(wide))

    for block in range(plan.blocks):
        segments = plan.bounds[block * taps : (block + 1) * taps + 1]
        first = segments[0]
        run(
            _gather, taps, _few(taps, segments[-1] - first, channels_in), block * taps, plan.starts, plan.inputs,
            plan.consecutive, taken_as_it_lies, source, gathered_array,
        )  # fmt: skip
        for k in range(taps):
            begin, end = segments[k], segments[k + 1]
            if begin < end:
                if taken_as_it_lies and plan.consecutive[block * taps + k]:
                    row = plan.inputs[begin]
                    block_rows = rows[row : row + end - begin]
                else:
                    block_rows = gathered[begin - first : end - first]
                tap = weights[taps - 1 - k if flip else k]
                torch.mm(block_rows, tap, out=products[begin - first : end - first])
        begin, end = block * plan.block, min((block + 1) * plan.block, outputs)
        run(
            _sum, end - begin, max(1, 100_000 // max(channels_out, 1)), begin, first, plan.row_starts, plan.places,
            products_array, bias_array, target,
        )  # fmt: skip
    return out


def sparse_conv_backward_weight(features, grad_output, gather, scatter, mirrored, flip):
    taps, channels_in, channels_out = gather.shape[0], features.shape[1], grad_output.shape[1]
    wide = compute_dtype(features.dtype)
    plan = _plan("sparse_conv_backward_weight", gather, features.shape[0], _block_rows(channels_in + channels_out))
    grad = torch.zeros(channels_out, taps, channels_in, dtype=wide)
    source, given = as_bits(features), as_bits(grad_output)
    rows, grad_rows = features.detach().contiguous(), grad_output.detach().contiguous()
    taken_as_it_lies = rows.dtype == wide
    gathered = torch.empty(plan.largest, channels_in, dtype=wide)
    gathered_grad = torch.empty(plan.largest, channels_out, dtype=wide)
    gathered_array, gathered_grad_array = gathered.numpy(), gathered_grad.numpy()
    for block in range(plan.blocks):
        segments = plan.bounds[block * taps : (block + 1) * taps + 1]
        first = segments[0]
        pairs = segments[-1] - first
        run(
            _gather, taps, _few(taps, pairs, channels_in), block * taps, plan.starts, plan.inputs, plan.consecutive,
            taken_as_it_lies, source, gathered_array,
        )  # fmt: skip
        run(
            _gather, taps, _few(taps, pairs, channels_out), block * taps, plan.starts, plan.outputs, plan.whole,
            taken_as_it_lies, given, gathered_grad_array,
        )  # fmt: skip
        for k in range(taps):
            begin, end = segments[k], segments[k + 1]
            if begin < end:
                here = slice(begin - first, end - first)
                left, right = gathered_grad[here], gathered[here]
                if taken_as_it_lies and plan.whole[block * taps + k]:
                    row = plan.outputs[begin]
                    left = grad_rows[row : row + end - begin]
                if taken_as_it_lies and plan.consecutive[block * taps + k]:
                    row = plan.inputs[begin]
                    right = rows[row : row + end - begin]
                grad[:, taps - 1 - k if flip else k].addmm_(left.t(), right)
    return grad.to(features.dtype)


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


def _few(taps, pairs, channels):
    """The fewest offsets worth a thread of their own, when the pairs of a block spread evenly over them."""
    return max(1, taps * 100_000 // max(pairs * channels, 1))


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
def _gather(begin, end, segment, starts, rows, skippable, skip, source, gathered):
    """Rows of the pairs of offsets [begin, end), widened; a segment that multiplies as it lies needs none."""
    base = starts[segment]
    for k in range(segment + begin, segment + end):
        if not (skip and skippable[k]):
            for p in range(starts[k], starts[k + 1]):
                row = rows[p]
                for c in range(source.shape[1]):
                    gathered[p - base, c] = widen(source[row, c])


@jit
def _sum(begin, end, origin, base, row_starts, places, products, bias, target):
    channels = target.shape[1]
    total = np.empty(channels, products.dtype)
    for o in range(origin + begin, origin + end):
        for c in range(channels):
            total[c] = bias[c]
        for j in range(row_starts[o], row_starts[o + 1]):
            place = places[j]
            for c in range(channels):
                total[c] += products[place, c]
        for c in range(channels):
            target[o, c] = narrow(total[c], target)
