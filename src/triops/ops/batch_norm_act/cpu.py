"""batch_norm_act on CPU: partial results of fixed blocks of rows, joined in NumPy, and one pass over the rows.

The blocks do not depend on the number of threads, so every run gives the same bits.
"""

import math

import numpy as np
import torch

from triops._activations import ACTIVATIONS
from triops._cpu.half import as_bits, narrow, widen
from triops._cpu.jit import jit
from triops._cpu.memory import as_numpy, in_huge_pages
from triops._cpu.threads import run
from triops._dtypes import compute_dtype

PART = 512  # rows of a partial moment
SUMMED = 128  # rows of a partial sum of gradients: of equal ones nothing but rounding is left


def batch_norm_act(
    features, weight, bias, running_mean, running_var, active, training, share, eps, activation, alpha
):  # fmt: skip
    rows, channels = features.shape
    real = as_numpy(torch.empty(0, dtype=compute_dtype(features.dtype))).dtype
    counted = _rows_that_count(active, rows)
    running = np.empty((2 if training else 0, channels), real)
    if training:
        mean, squares = _moments(as_bits(features), counted, real)
        variance, unbiased = squares / max(counted, 1), squares / max(counted - 1, 1)
        running[:] = mean, unbiased
        if running_mean is not None and running_var is not None:
            before = np.stack([_wide(running_mean), _wide(running_var)])
            with np.errstate(invalid="ignore"):  # infinite features make NaN, as anywhere
                running[:] = before + (running - before) * (share if counted else 0.0)
    else:
        mean, variance = _wide(running_mean), _wide(running_var)
    statistics = np.stack([mean, 1 / np.sqrt(variance + eps)]).astype(real)
    out = torch.empty(rows, channels, dtype=features.dtype)
    in_huge_pages(out)
    grain = _grain(channels)
    run(_apply, rows, grain, as_bits(features), *_affine(weight, bias, statistics), statistics, counted,
        ACTIVATIONS.index(activation), _constants(alpha, real), as_bits(out))  # fmt: skip
    return out, torch.from_numpy(statistics), torch.from_numpy(running)


def batch_norm_act_backward(grad, features, weight, bias, statistics, active, training, activation, alpha):
    rows, channels = features.shape
    counted = _rows_that_count(active, rows)
    known = as_numpy(statistics)
    values, grads = as_bits(features), as_bits(grad)
    scale, shift = _affine(weight, bias, known)
    kind, constants = ACTIVATIONS.index(activation), _constants(alpha, known.dtype)
    parts = np.zeros((-(-counted // SUMMED), 2, channels), known.dtype)
    run(_sums, len(parts), PART // SUMMED, grads, values, scale, shift, known, counted, kind, constants, parts)
    sums = parts.sum(0, dtype=np.float64)
    spread = (sums / max(counted, 1) if training else np.zeros_like(sums)).astype(known.dtype)
    result = torch.empty(rows, channels, dtype=features.dtype)
    run(_gradient, rows, _grain(channels), grads, values, scale, shift, known, spread, counted, kind, constants,
        as_bits(result))  # fmt: skip
    of_weight, of_bias = (torch.from_numpy(s) for s in sums.astype(known.dtype))
    return result, of_weight, of_bias.clone()


def _rows_that_count(active, rows):
    return rows if active is None else min(max(int(active), 0), rows)


def _wide(tensor):
    return as_numpy(tensor.detach().double())


def _affine(weight, bias, statistics):
    """Weight and bias in the dtype of the statistics, 1 and 0 where there is none."""
    channels, real = statistics.shape[1], statistics.dtype
    scale = np.ones(channels, real) if weight is None else _wide(weight).astype(real)
    return scale, np.zeros(channels, real) if bias is None else _wide(bias).astype(real)


def _constants(alpha, real):
    """What kernels multiply by, in the dtype to compute in: a Python number would turn float32 into float64."""
    return np.array([0, 1, 0.5, math.sqrt(0.5), 1 / math.sqrt(2 * math.pi), alpha], real)


def _grain(channels):
    return max(1, 50_000 // max(channels, 1))


def _moments(values, counted, real):
    """Mean and sum of squared deviations in float64, of float32 parts."""
    channels = values.shape[1]
    parts = np.zeros((-(-counted // PART), 3, channels), real)
    sizes = np.minimum(counted - np.arange(len(parts)) * PART, PART)
    run(_part_moments, len(parts), 1, values, counted, sizes.astype(real), parts)
    sizes = sizes.astype(np.float64)[:, None]
    rest = parts[:, 2].astype(np.float64) / sizes
    means = parts[:, 0].astype(np.float64) + rest
    mean = (means * sizes).sum(0) / max(counted, 1)
    return mean, (parts[:, 1] + ((means - mean) ** 2 - rest**2) * sizes).sum(0)


@jit
def _part_moments(begin, end, values, counted, sizes, parts):
    for part in range(begin, end):
        first, last = part * PART, min((part + 1) * PART, counted)
        mean, squares, rest = parts[part, 0], parts[part, 1], parts[part, 2]
        size = sizes[part]
        for row in range(first, last):
            for c in range(values.shape[1]):
                mean[c] += widen(values[row, c])
        for c in range(values.shape[1]):
            mean[c] = mean[c] / size
        for row in range(first, last):
            for c in range(values.shape[1]):
                off = widen(values[row, c]) - mean[c]
                squares[c] += off * off
                rest[c] += off  # what rounding has left of a large mean


@jit
def _apply(begin, end, values, scale, shift, statistics, counted, kind, constants, out):
    channels = values.shape[1]
    low, zero = _low(kind, constants), constants[0]
    for row in range(begin, min(end, counted)):
        if kind == 1:
            for c in range(channels):
                z = (widen(values[row, c]) - statistics[0, c]) * statistics[1, c] * scale[c] + shift[c]
                out[row, c] = narrow(zero if z < zero else z, out)
        elif kind == 0 or kind == 3:
            for c in range(channels):
                z = (widen(values[row, c]) - statistics[0, c]) * statistics[1, c] * scale[c] + shift[c]
                out[row, c] = narrow(z * low if z < zero else z, out)
        else:
            for c in range(channels):
                z = (widen(values[row, c]) - statistics[0, c]) * statistics[1, c] * scale[c] + shift[c]
                out[row, c] = narrow(_curve(z, kind, constants), out)
    for row in range(max(begin, counted), end):
        for c in range(channels):
            out[row, c] = 0


@jit
def _sums(begin, end, grads, values, scale, shift, statistics, counted, kind, constants, parts):
    channels = values.shape[1]
    low, zero, one = _low(kind, constants), constants[0], constants[1]
    straight = kind == 0 or kind == 1 or kind == 3
    for part in range(begin, end):
        of_weight, of_bias = parts[part, 0], parts[part, 1]
        for row in range(part * SUMMED, min((part + 1) * SUMMED, counted)):
            if straight:
                for c in range(channels):
                    normal = (widen(values[row, c]) - statistics[0, c]) * statistics[1, c]
                    slope = low if normal * scale[c] + shift[c] <= zero else one
                    outer = widen(grads[row, c]) * slope
                    of_weight[c] += outer * normal
                    of_bias[c] += outer
            else:
                for c in range(channels):
                    normal = (widen(values[row, c]) - statistics[0, c]) * statistics[1, c]
                    outer = widen(grads[row, c]) * _slope(normal * scale[c] + shift[c], kind, constants)
                    of_weight[c] += outer * normal
                    of_bias[c] += outer


@jit
def _gradient(begin, end, grads, values, scale, shift, statistics, spread, counted, kind, constants, result):
    channels = values.shape[1]
    low, zero, one = _low(kind, constants), constants[0], constants[1]
    straight = kind == 0 or kind == 1 or kind == 3
    for row in range(begin, min(end, counted)):
        if straight:
            for c in range(channels):
                normal = (widen(values[row, c]) - statistics[0, c]) * statistics[1, c]
                slope = low if normal * scale[c] + shift[c] <= zero else one
                inner = widen(grads[row, c]) * slope - (spread[1, c] + normal * spread[0, c])
                result[row, c] = narrow(inner * (statistics[1, c] * scale[c]), result)
        else:
            for c in range(channels):
                normal = (widen(values[row, c]) - statistics[0, c]) * statistics[1, c]
                outer = widen(grads[row, c]) * _slope(normal * scale[c] + shift[c], kind, constants)
                inner = outer - (spread[1, c] + normal * spread[0, c])
                result[row, c] = narrow(inner * (statistics[1, c] * scale[c]), result)
    for row in range(max(begin, counted), end):
        for c in range(channels):
            result[row, c] = 0


@jit
def _low(kind, constants):
    """The slope below 0 of an activation that is straight on both sides."""
    return constants[1] if kind == 0 else constants[5] if kind == 3 else constants[0]


@jit
def _curve(z, kind, constants):
    """Sigmoid, GELU and SiLU, in the order of ACTIVATIONS."""
    one, half, root = constants[1], constants[2], constants[3]
    if kind == 4:
        return z * half * (one + math.erf(z * root))
    s = one / (one + math.exp(-z))
    return s if kind == 2 else z * s


@jit
def _slope(z, kind, constants):
    """The derivatives of the same."""
    one, half, root, peak = constants[1], constants[2], constants[3], constants[4]
    if kind == 4:
        return half * (one + math.erf(z * root)) + z * math.exp(-half * z * z) * peak
    s = one / (one + math.exp(-z))
    return s * (one - s) if kind == 2 else s * (one + z * (one - s))
