"""batch_norm_act on GPU: partial results of fixed blocks of rows, one program that joins them, and one pass over rows,
which is all where statistics are known.

A block's mean and its squared deviations from it are merged with those before (Chan's formula), so that a large mean
takes no digits from the variance, and every run gives the same bits.
"""

import torch
import triton
import triton.language as tl

from triops import _gpu
from triops._activations import ACTIVATIONS
from triops._dtypes import compute_dtype
from triops._gpu.activations import activate, slope
from triops._gpu.arithmetic import from_bits

MOST_PARTS = 256  # enough to fill a GPU
PART_ROWS = _gpu.block(64, interpreted=1024)  # rows at a time
MOST_CHANNELS = 64  # per program
JOINED = _gpu.block(32, interpreted=MOST_PARTS)  # parts at a time


def batch_norm_act(
    features, weight, bias, running_mean, running_var, active, training, share, eps, activation, alpha
):  # fmt: skip
    rows, channels = features.shape
    real = compute_dtype(features.dtype)
    features = features.contiguous()
    out = torch.empty_like(features)
    statistics = torch.empty((2, channels), dtype=real, device=features.device)
    running = torch.empty((2 if training else 0, channels), dtype=real, device=features.device)
    if channels == 0:
        return out, statistics, running
    block, across = _across(channels)
    parts, part, length = statistics, 0, 0
    if training:
        part, length = _parts(rows)
        parts = torch.empty((max(part, 1), 2, channels), dtype=real, device=features.device)
        if part > 0:
            _moments_kernel[(part * across,)](
                features, _or(active, parts), parts, rows, length, channels,
                COUNTED=active is not None, ROWS=PART_ROWS, CHANNELS=block, num_warps=4,
            )  # fmt: skip
        _join_moments_kernel[(across,)](
            parts, _or(active, parts), _or(running_mean, parts), _or(running_var, parts), statistics, running, rows,
            part, length, channels, _gpu.bits_of(share), _gpu.bits_of(eps),
            COUNTED=active is not None, KNOWN=running_mean is not None, JOINED=JOINED, CHANNELS=block, num_warps=4,
        )  # fmt: skip
    if rows > 0 or not training:
        _apply_kernel[(max(_gpu.cdiv(rows, PART_ROWS), 1) * across,)](
            features, _or(weight, parts), _or(bias, parts), _or(running_mean, parts), _or(running_var, parts),
            statistics, _or(active, parts), out, rows, channels, _gpu.bits_of(alpha), _gpu.bits_of(eps),
            KNOWN=not training, WEIGHT=weight is not None, BIAS=bias is not None, COUNTED=active is not None,
            ACTIVATION=ACTIVATIONS.index(activation), ROWS=PART_ROWS, CHANNELS=block, num_warps=4,
        )  # fmt: skip
    return out, statistics, running


def batch_norm_act_backward(grad, features, weight, bias, statistics, active, training, activation, alpha):
    rows, channels = features.shape
    features, grad = features.contiguous(), grad.contiguous()
    result = torch.empty_like(features)
    grad_weight, grad_bias = (torch.empty(channels, dtype=statistics.dtype, device=grad.device) for _ in range(2))
    if channels == 0:
        return result, grad_weight, grad_bias
    block, across = _across(channels)
    part, length = _parts(rows)
    parts = torch.empty((max(part, 1), 2, channels), dtype=statistics.dtype, device=grad.device)
    options = {
        "WEIGHT": weight is not None, "BIAS": bias is not None, "COUNTED": active is not None,
        "ACTIVATION": ACTIVATIONS.index(activation), "ROWS": PART_ROWS, "CHANNELS": block, "num_warps": 4,
    }  # fmt: skip
    tensors = grad, features, _or(weight, parts), _or(bias, parts), statistics.contiguous(), _or(active, parts)
    if part > 0:
        _sums_kernel[(part * across,)](*tensors, parts, rows, length, channels, _gpu.bits_of(alpha), **options)
    _join_sums_kernel[(across,)](
        parts, grad_weight, grad_bias, part, channels, JOINED=JOINED, CHANNELS=block, num_warps=4
    )
    if rows > 0:
        _gradient_kernel[(_gpu.cdiv(rows, PART_ROWS) * across,)](
            *tensors, grad_weight, grad_bias, result, rows, channels, _gpu.bits_of(alpha), TRAINING=training, **options
        )
    return result, grad_weight, grad_bias


def _or(tensor, other):
    """Kernels take a tensor in every place; what is None is not read."""
    return other if tensor is None else tensor.contiguous()


def _across(channels):
    """Channels per program, and how many programs share a row."""
    block = min(_gpu.next_power_of_2(channels), MOST_CHANNELS)
    return block, _gpu.cdiv(channels, block)


def _parts(rows):
    """How many parts the rows are cut into, and how many rows each has."""
    length = _gpu.cdiv(_gpu.cdiv(rows, PART_ROWS), MOST_PARTS) * PART_ROWS
    return (_gpu.cdiv(rows, length), length) if rows else (0, 0)


@triton.jit
def _rows_that_count(active, rows, COUNTED: tl.constexpr):
    return tl.minimum(tl.maximum(tl.load(active), 0), rows) if COUNTED else rows


@triton.jit
def _place(length, channels, ROWS: tl.constexpr, CHANNELS: tl.constexpr):
    """-> the part and its first row, the channels and which exist"""
    across = (channels + CHANNELS - 1) // CHANNELS
    part = tl.program_id(0) // across
    channel = (tl.program_id(0) % across) * CHANNELS + tl.arange(0, CHANNELS)
    return part, part * length, channel, channel < channels


@_gpu.kernel(specialize=("channels",))
def _moments_kernel(
    features, active, parts, rows, length, channels,
    COUNTED: tl.constexpr, ROWS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    REAL: tl.constexpr = parts.dtype.element_ty
    part, first, channel, exists = _place(length, channels, ROWS, CHANNELS)
    last = tl.minimum(first + length, _rows_that_count(active, rows, COUNTED))
    mean = tl.zeros((CHANNELS,), REAL)
    squares = tl.zeros((CHANNELS,), REAL)
    for begin in range(first, last, ROWS):
        row = begin + tl.arange(0, ROWS)
        mask = (row < last)[:, None] & exists[None, :]
        value = tl.load(features + row.to(tl.int64)[:, None] * channels + channel[None, :], mask, 0.0).to(REAL)
        before = (begin - first).to(REAL)
        count = tl.minimum(last - begin, ROWS).to(REAL)
        block_mean = tl.sum(value, 0) / count
        off = tl.where(mask, value - block_mean[None, :], 0.0)
        rest = tl.sum(off, 0) / count  # what rounding has left of a large mean
        apart = (block_mean + rest) - mean
        mean += apart * (count / (before + count))
        squares += (tl.sum(off * off, 0) - rest * rest * count) + apart * apart * (before * count / (before + count))
    at = parts + part.to(tl.int64) * 2 * channels + channel
    tl.store(at, mean, exists)
    tl.store(at + channels, squares, exists)


@_gpu.kernel(specialize=("channels",))
def _join_moments_kernel(
    parts, active, running_mean, running_var, statistics, running, rows, count, length, channels,
    share_bits: tl.int64, eps_bits: tl.int64,
    COUNTED: tl.constexpr, KNOWN: tl.constexpr, JOINED: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    REAL: tl.constexpr = statistics.dtype.element_ty
    channel = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    exists = channel < channels
    counted = _rows_that_count(active, rows, COUNTED)
    total = tl.maximum(counted, 1).to(REAL)
    mean = tl.zeros((CHANNELS,), REAL)
    for begin in range(0, count, JOINED):
        part = begin + tl.arange(0, JOINED)
        size = tl.minimum(tl.maximum(counted - part * length, 0), length).to(REAL)
        at = parts + part.to(tl.int64)[:, None] * 2 * channels + channel[None, :]
        mask = (part < count)[:, None] & exists[None, :]
        mean += tl.sum(tl.load(at, mask, 0.0) * (size / total)[:, None], 0)
    squares = tl.zeros((CHANNELS,), REAL)
    for begin in range(0, count, JOINED):
        part = begin + tl.arange(0, JOINED)
        size = tl.minimum(tl.maximum(counted - part * length, 0), length).to(REAL)
        at = parts + part.to(tl.int64)[:, None] * 2 * channels + channel[None, :]
        mask = (part < count)[:, None] & exists[None, :]
        apart = tl.where(mask, tl.load(at, mask, 0.0) - mean[None, :], 0.0)
        squares += tl.sum(tl.load(at + channels, mask, 0.0) + apart * apart * size[:, None], 0)
    variance = squares / total
    unbiased = squares / tl.maximum(counted - 1, 1).to(REAL)
    new_mean, new_var = mean, unbiased
    if KNOWN:
        before_mean = tl.load(running_mean + channel, exists, 0.0).to(REAL)
        before_var = tl.load(running_var + channel, exists, 0.0).to(REAL)
        share = from_bits(share_bits, REAL) * tl.minimum(counted, 1).to(REAL)
        new_mean = before_mean + (mean - before_mean) * share
        new_var = before_var + (unbiased - before_var) * share
    tl.store(running + channel, new_mean, exists)
    tl.store(running + channels + channel, new_var, exists)
    tl.store(statistics + channel, mean, exists)
    tl.store(statistics + channels + channel, 1.0 / tl.sqrt(variance + from_bits(eps_bits, REAL)), exists)


@triton.jit
def _normal(features, weight, bias, mean, inverse, at, mask, channel, exists, WEIGHT: tl.constexpr,
            BIAS: tl.constexpr):  # fmt: skip
    """-> normalised rows, and times the weight plus the bias; 1 / deviation times the weight [CHANNELS]"""
    REAL: tl.constexpr = mean.dtype
    normal = (tl.load(features + at, mask, 0.0).to(REAL) - mean[None, :]) * inverse[None, :]
    z = normal
    if WEIGHT:
        scale = tl.load(weight + channel, exists, 0.0).to(REAL)
        z = z * scale[None, :]
        inverse = inverse * scale
    if BIAS:
        z = z + tl.load(bias + channel, exists, 0.0).to(REAL)[None, :]
    return normal, z, inverse


@_gpu.kernel(specialize=("channels",))
def _apply_kernel(
    features, weight, bias, running_mean, running_var, statistics, active, out, rows, channels, alpha_bits: tl.int64,
    eps_bits: tl.int64,
    KNOWN: tl.constexpr, WEIGHT: tl.constexpr, BIAS: tl.constexpr, COUNTED: tl.constexpr, ACTIVATION: tl.constexpr,
    ROWS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    _, first, channel, exists = _place(ROWS, channels, ROWS, CHANNELS)
    row = first + tl.arange(0, ROWS)
    inside = (row < rows)[:, None] & exists[None, :]
    counted = (row < _rows_that_count(active, rows, COUNTED))[:, None] & exists[None, :]
    at = row.to(tl.int64)[:, None] * channels + channel[None, :]
    if KNOWN:  # the running statistics are those to use: the first program of each channel passes them on
        REAL: tl.constexpr = statistics.dtype.element_ty
        mean = tl.load(running_mean + channel, exists, 0.0).to(REAL)
        variance = tl.load(running_var + channel, exists, 0.0).to(REAL)
        inverse = 1.0 / tl.sqrt(variance + from_bits(eps_bits, REAL))
        if first == 0:
            tl.store(statistics + channel, mean, exists)
            tl.store(statistics + channels + channel, inverse, exists)
    else:
        mean = tl.load(statistics + channel, exists, 0.0)
        inverse = tl.load(statistics + channels + channel, exists, 0.0)
    _, z, _ = _normal(features, weight, bias, mean, inverse, at, counted, channel, exists, WEIGHT, BIAS)
    value = activate(z, from_bits(alpha_bits, z.dtype), ACTIVATION)
    tl.store(out + at, tl.where(counted, value, 0.0).to(out.dtype.element_ty), inside)


@triton.jit
def _outer(grad, features, weight, bias, statistics, at, mask, channel, channels, exists, alpha_bits,
           WEIGHT: tl.constexpr, BIAS: tl.constexpr, ACTIVATION: tl.constexpr):  # fmt: skip
    """-> normalised rows, the gradient behind the activation, and 1 / deviation times the weight"""
    mean = tl.load(statistics + channel, exists, 0.0)
    inverse = tl.load(statistics + channels + channel, exists, 0.0)
    normal, z, inverse = _normal(features, weight, bias, mean, inverse, at, mask, channel, exists, WEIGHT, BIAS)
    outer = tl.load(grad + at, mask, 0.0).to(z.dtype) * slope(z, from_bits(alpha_bits, z.dtype), ACTIVATION)
    return tl.where(mask, normal, 0.0), tl.where(mask, outer, 0.0), inverse


@_gpu.kernel(specialize=("channels",))
def _sums_kernel(
    grad, features, weight, bias, statistics, active, parts, rows, length, channels, alpha_bits: tl.int64,
    WEIGHT: tl.constexpr, BIAS: tl.constexpr, COUNTED: tl.constexpr, ACTIVATION: tl.constexpr, ROWS: tl.constexpr,
    CHANNELS: tl.constexpr,
):  # fmt: skip
    part, first, channel, exists = _place(length, channels, ROWS, CHANNELS)
    last = tl.minimum(first + length, _rows_that_count(active, rows, COUNTED))
    of_weight = tl.zeros((CHANNELS,), parts.dtype.element_ty)
    of_bias = tl.zeros((CHANNELS,), parts.dtype.element_ty)
    for begin in range(first, last, ROWS):
        row = begin + tl.arange(0, ROWS)
        mask = (row < last)[:, None] & exists[None, :]
        at = row.to(tl.int64)[:, None] * channels + channel[None, :]
        normal, outer, _ = _outer(
            grad, features, weight, bias, statistics, at, mask, channel, channels, exists, alpha_bits,
            WEIGHT, BIAS, ACTIVATION,
        )  # fmt: skip
        of_weight += tl.sum(outer * normal, 0)
        of_bias += tl.sum(outer, 0)
    place = parts + part.to(tl.int64) * 2 * channels + channel
    tl.store(place, of_weight, exists)
    tl.store(place + channels, of_bias, exists)


@_gpu.kernel(specialize=("channels",))
def _join_sums_kernel(
    parts, grad_weight, grad_bias, count, channels, JOINED: tl.constexpr, CHANNELS: tl.constexpr
):  # fmt: skip
    channel = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    exists = channel < channels
    of_weight = tl.zeros((CHANNELS,), parts.dtype.element_ty)
    of_bias = tl.zeros((CHANNELS,), parts.dtype.element_ty)
    for begin in range(0, count, JOINED):
        part = begin + tl.arange(0, JOINED)
        at = parts + part.to(tl.int64)[:, None] * 2 * channels + channel[None, :]
        mask = (part < count)[:, None] & exists[None, :]
        of_weight += tl.sum(tl.load(at, mask, 0.0), 0)
        of_bias += tl.sum(tl.load(at + channels, mask, 0.0), 0)
    tl.store(grad_weight + channel, of_weight, exists)
    tl.store(grad_bias + channel, of_bias, exists)


@_gpu.kernel(specialize=("channels",))
def _gradient_kernel(
    grad, features, weight, bias, statistics, active, grad_weight, grad_bias, result, rows, channels,
    alpha_bits: tl.int64,
    TRAINING: tl.constexpr, WEIGHT: tl.constexpr, BIAS: tl.constexpr, COUNTED: tl.constexpr, ACTIVATION: tl.constexpr,
    ROWS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    REAL: tl.constexpr = statistics.dtype.element_ty
    _, first, channel, exists = _place(ROWS, channels, ROWS, CHANNELS)
    row = first + tl.arange(0, ROWS)
    inside = (row < rows)[:, None] & exists[None, :]
    count = _rows_that_count(active, rows, COUNTED)
    counted = (row < count)[:, None] & exists[None, :]
    at = row.to(tl.int64)[:, None] * channels + channel[None, :]
    normal, outer, inverse = _outer(
        grad, features, weight, bias, statistics, at, counted, channel, channels, exists, alpha_bits,
        WEIGHT, BIAS, ACTIVATION,
    )  # fmt: skip
    if TRAINING:
        total = tl.maximum(count, 1).to(REAL)
        of_weight = tl.load(grad_weight + channel, exists, 0.0) / total
        of_bias = tl.load(grad_bias + channel, exists, 0.0) / total
        outer = outer - (of_bias[None, :] + normal * of_weight[None, :])
    value = tl.where(counted, outer * inverse[None, :], 0.0)
    tl.store(result + at, value.to(result.dtype.element_ty), inside)
