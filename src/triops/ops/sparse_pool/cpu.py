"""Sparse pooling on CPU: tiles of output rows, offset by offset, so that the table is read along its rows."""

import numpy as np
import torch

from triops._cpu.half import as_bits, narrow, widen
from triops._cpu.jit import jit
from triops._cpu.memory import as_numpy
from triops._cpu.threads import run
from triops.ops.rulebook.tables import refuse_rows_outside

TILE = 64  # output rows whose results stay in cache while all offsets pass


def sparse_max_pool(features, gather, scatter):
    out = torch.empty(gather.shape[1], features.shape[1], dtype=features.dtype)
    argmax = torch.empty(out.shape, dtype=torch.int32)
    _run("sparse_max_pool", "gather", gather, features, _max, as_bits(features), as_bits(out), argmax.numpy())
    return out, argmax


def sparse_max_pool_backward(grad_output, argmax, scatter):
    grad = torch.empty(scatter.shape[1], grad_output.shape[1], dtype=grad_output.dtype)
    name = "sparse_max_pool_backward"
    _run(name, "scatter", scatter, grad_output, _max_backward, as_bits(grad_output), as_numpy(argmax), as_bits(grad))
    return grad


def sparse_max_pool_from_zero(features, gather, scatter):
    return sparse_max_pool(features, gather, scatter)[0].clamp_(min=0)


def sparse_max_pool_from_zero_backward(grad_output, features, output, scatter):
    grad = torch.empty(scatter.shape[1], grad_output.shape[1], dtype=grad_output.dtype)
    _run(
        "sparse_max_pool_from_zero_backward", "scatter", scatter, grad_output, _equals_backward, as_bits(grad_output),
        as_bits(features), as_bits(output), as_bits(grad),
    )  # fmt: skip
    return grad


def sparse_avg_pool(features, gather, scatter):
    out = torch.empty(gather.shape[1], features.shape[1], dtype=features.dtype)
    count = torch.empty(gather.shape[1], dtype=torch.int32)
    _run("sparse_avg_pool", "gather", gather, features, _avg, as_bits(features), as_bits(out), count.numpy())
    return out, count


def sparse_avg_pool_backward(grad_output, count, scatter):
    grad = torch.empty(scatter.shape[1], grad_output.shape[1], dtype=grad_output.dtype)
    name = "sparse_avg_pool_backward"
    _run(name, "scatter", scatter, grad_output, _avg_backward, as_bits(grad_output), as_numpy(count), as_bits(grad))
    return grad


def sparse_avg_pool_times_count(features, gather, scatter):
    return sparse_avg_pool(features, gather, scatter)


def _run(operator, name, table, source, kernel, *arrays):
    outside = np.zeros(1, np.int64)
    grain = max(1, 100_000 // max(TILE * table.shape[0] * max(source.shape[1], 8), 1))
    tiles = -(-table.shape[1] // TILE)
    wide = np.zeros(0, np.float64 if source.dtype == torch.float64 else np.float32)  # says what to sum in
    run(kernel, tiles, grain, as_numpy(table), outside, wide, *arrays)
    if outside[0]:
        refuse_rows_outside(operator, name, table, source.shape[0])


@jit
def _max(begin, end, table, outside, wide, source, target, argmax):
    channels = source.shape[1]
    for tile in range(begin, end):
        last = min((tile + 1) * TILE, table.shape[1])
        for o in range(tile * TILE, last):
            for c in range(channels):
                target[o, c] = 0
                argmax[o, c] = -1
        for k in range(table.shape[0]):
            for o in range(tile * TILE, last):
                row = table[k, o]
                if row < -1 or row >= source.shape[0]:
                    outside[0] = 1
                elif row >= 0:
                    for c in range(channels):
                        value, best = widen(source[row, c]), widen(target[o, c])
                        wins = (argmax[o, c] < 0) | (value > best) | ((value != value) & (best == best))
                        target[o, c] = source[row, c] if wins else target[o, c]
                        argmax[o, c] = k if wins else argmax[o, c]


@jit
def _max_backward(begin, end, table, outside, wide, source, argmax, target):
    channels = source.shape[1]
    total = np.empty((TILE, channels), wide.dtype)
    for tile in range(begin, end):
        first, last = tile * TILE, min((tile + 1) * TILE, table.shape[1])
        total[:] = 0
        for k in range(table.shape[0]):
            for i in range(first, last):
                row = table[k, i]
                if row < -1 or row >= source.shape[0]:
                    outside[0] = 1
                elif row >= 0:
                    for c in range(channels):
                        if argmax[row, c] == k:
                            total[i - first, c] += widen(source[row, c])
        for i in range(first, last):
            for c in range(channels):
                target[i, c] = narrow(total[i - first, c], target)


@jit
def _equals_backward(begin, end, table, outside, wide, source, features, output, target):
    channels = source.shape[1]
    total = np.empty((TILE, channels), wide.dtype)
    for tile in range(begin, end):
        first, last = tile * TILE, min((tile + 1) * TILE, table.shape[1])
        total[:] = 0
        for k in range(table.shape[0]):
            for i in range(first, last):
                row = table[k, i]
                if row < -1 or row >= source.shape[0]:
                    outside[0] = 1
                elif row >= 0:
                    for c in range(channels):
                        if widen(output[row, c]) == widen(features[i, c]):
                            total[i - first, c] += widen(source[row, c])
        for i in range(first, last):
            for c in range(channels):
                target[i, c] = narrow(total[i - first, c], target)


@jit
def _avg(begin, end, table, outside, wide, source, target, count):
    channels = source.shape[1]
    total = np.empty((TILE, channels), wide.dtype)
    for tile in range(begin, end):
        first, last = tile * TILE, min((tile + 1) * TILE, table.shape[1])
        total[:] = 0
        count[first:last] = 0
        for k in range(table.shape[0]):
            for o in range(first, last):
                row = table[k, o]
                if row < -1 or row >= source.shape[0]:
                    outside[0] = 1
                elif row >= 0:
                    count[o] += 1
                    for c in range(channels):
                        total[o - first, c] += widen(source[row, c])
        for o in range(first, last):
            divisor = wide.dtype.type(max(count[o], 1))
            for c in range(channels):
                target[o, c] = narrow(total[o - first, c] / divisor, target)


@jit
def _avg_backward(begin, end, table, outside, wide, source, count, target):
    channels = source.shape[1]
    total = np.empty((TILE, channels), wide.dtype)
    for tile in range(begin, end):
        first, last = tile * TILE, min((tile + 1) * TILE, table.shape[1])
        total[:] = 0
        for k in range(table.shape[0]):
            for i in range(first, last):
                row = table[k, i]
                if row < -1 or row >= source.shape[0]:
                    outside[0] = 1
                elif row >= 0:
                    divisor = wide.dtype.type(max(count[row], 1))
                    for c in range(channels):
                        total[i - first, c] += widen(source[row, c]) / divisor
        for i in range(first, last):
            for c in range(channels):
                target[i, c] = narrow(total[i - first, c], target)
