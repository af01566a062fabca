"""batch_norm_act on GPU: partial results of fixed blocks of rows, and one pass over rows, which is all where statistics
are known. Every program of that pass joins the partial results by itself: there are few programs, and the host time of
a launch more is what a training step waits for.

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
from triops._gpu.arithmetic import divide, from_bits

MOST_PARTS = 256  # enough to fill a GPU
PART_ROWS = _gpu.block(64, interpreted=1024)  # rows at a time, of what is summed up
ELEMENTS, APPLY_WARPS = _gpu.block(4096, interpreted=65536), 8  # at a time, of what is not
MOST_CHANNELS = 64  # per program
JOINED = 8192  # elements of parts at a time


def batch_norm_act(
    features, weight, bias, running_mean, running_var, active, training, share, eps, activation, alpha
):  # fmt: skip
    rows, channels = features.shape
    real, device = compute_dtype(features.dtype), features.device
    features = features.contiguous()
    out = torch.empty_like(features)
    statistics = torch.empty((2, channels), dtype=real, device=device)
    running = torch.empty((2 if training else 0, channels), dtype=real, device=device)
    if channels == 0:
        return out, statistics, running
    block, across = _across(channels)
    at_once = ELEMENTS // block
    part, length = _parts(rows) if training else (_gpu.cdiv(rows, at_once), at_once)
    programs = max(part, 1) * across  # the first of each channel pass the statistics on, whether there are rows or not
    parts = torch.empty((max(part, 1), 2, channels), dtype=real, device=device) if training else statistics
    counted, active = active is not None, _or(active, parts)
    if training and part > 0:
        _moments_kernel[(programs,)](
            features, active, parts, rows, length, channels,
            COUNTED=counted, ROWS=PART_ROWS, CHANNELS=block, num_warps=4,
        )  # fmt: skip
    _apply_kernel[(programs,)](
        features, _or(weight, parts), _or(bias, parts), _or(running_mean, parts), _or(running_var, parts), parts,
        statistics, running if training else statistics, active, out, rows, part, length, channels,
        _gpu.bits_of(alpha), _gpu.bits_of(eps), _gpu.bits_of(share),
        TRAINING=training, RUNNING=running_mean is not None, WEIGHT=weight is not None, BIAS=bias is not None,
        COUNTED=counted, ACTIVATION=ACTIVATIONS.index(activation), ROWS=at_once, JOINED=_joined(block), CHANNELS=block,
        num_warps=APPLY_WARPS,
    )  # fmt: skip
    return out, statistics, running


def batch_norm_act_backward(grad, features, weight, bias, statistics, active, training, activation, alpha):
    rows, channels = features.shape
    features, grad = features.contiguous(), grad.contiguous()
    result = torch.empty_like(features)
    grad_weight = torch.empty(channels, dtype=statistics.dtype, device=grad.device)
    grad_bias = torch.empty_like(grad_weight)
    if channels > 0:
        block, across = _across(channels)
        part, length = _parts(rows)
        parts = torch.empty((max(part, 1), 2, channels), dtype=statistics.dtype, device=grad.device)
        options = {
            "WEIGHT": weight is not None, "BIAS": bias is not None, "COUNTED": active is not None,
            "ACTIVATION": ACTIVATIONS.index(activation), "CHANNELS": block,
        }  # fmt: skip
        tensors = grad, features, _or(weight, parts), _or(bias, parts), statistics.contiguous(), _or(active, parts)
        numbers = rows, part, length, channels, _gpu.bits_of(alpha)
        if part > 0:
            _sums_kernel[(part * across,)](*tensors, parts, *numbers, **options, ROWS=PART_ROWS, num_warps=4)
        _gradient_kernel[(max(part, 1) * across,)](
            *tensors, parts, grad_weight, grad_bias, result, *numbers,
            **options, TRAINING=training, ROWS=ELEMENTS // block, JOINED=_joined(block), num_warps=APPLY_WARPS,
        )  # fmt: skip
    return result, grad_weight, grad_bias


def _or(tensor, other):
    """Kernels take a tensor in every place; what is None is not read."""
    return other if tensor is None else tensor.contiguous()


def _across(channels):
    """Channels per program, and how many programs share a row."""
    block = min(_gpu.next_power_of_2(channels), MOST_CHANNELS)
    return block, _gpu.cdiv(channels, block)


def _joined(block):
    """Parts that a program joins at a time: few steps, each of which waits for its loads."""
    return min(MOST_PARTS, JOINED // block)


def _parts(rows):
    """How many parts the rows are cut into, and how many rows each has."""
    length = _gpu.cdiv(_gpu.cdiv(rows, PART_ROWS), MOST_PARTS) * PART_ROWS
    return (_gpu.cdiv(rows, length), length) if rows else (0, 0)


@triton.jit
def _rows_that_count(active, rows, COUNTED: tl.constexpr):
    return tl.minimum(tl.maximum(tl.load(active), 0), rows) if COUNTED else rows


@triton.jit
def _place(length, channels, CHANNELS: tl.constexpr):
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
    part, first, channel, exists = _place(length, channels, CHANNELS)
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
        mean += apart * divide(count, before + count)  # exactly 1 for the first rows, or a large mean loses digits
        squares += (tl.sum(off * off, 0) - rest * rest * count) + apart * apart * (before * count / (before + count))
    at = parts + part.to(tl.int64) * 2 * channels + channel
    tl.store(at, mean, exists)
    tl.store(at + channels, squares, exists)


@triton.jit
def _joined_moments(parts, counted, count, length, channels, channel, exists, JOINED: tl.constexpr):
    """-> mean, and squared deviations from it, of all rows that count"""
    REAL: tl.constexpr = parts.dtype.element_ty
    total = tl.maximum(counted, 1).to(REAL)
    zero = tl.zeros((JOINED,), REAL)
    mean = tl.zeros(channel.shape, REAL)
    for begin in range(0, count, JOINED):
        part = begin + tl.arange(0, JOINED)
        size = tl.minimum(tl.maximum(counted - part * length, 0), length).to(REAL)
        at = parts + part.to(tl.int64)[:, None] * 2 * channels + channel[None, :]
        mask = (part < count)[:, None] & exists[None, :]
        mean += tl.sum(tl.load(at, mask, 0.0) * divide(size, zero + total)[:, None], 0)
    squares = tl.zeros(channel.shape, REAL)
    for begin in range(0, count, JOINED):
        part = begin + tl.arange(0, JOINED)
        size = tl.minimum(tl.maximum(counted - part * length, 0), length).to(REAL)
        at = parts + part.to(tl.int64)[:, None] * 2 * channels + channel[None, :]
        mask = (part < count)[:, None] & exists[None, :]
        apart = tl.where(mask, tl.load(at, mask, 0.0) - mean[None, :], 0.0)
        squares += tl.sum(tl.load(at + channels, mask, 0.0) + apart * apart * size[:, None], 0)
    return mean, squares


@triton.jit
def _pass_on(running_mean, running_var, running, mean, squares, counted, share_bits, channels, channel, exists,
             RUNNING: tl.constexpr):  # fmt: skip
    """The new running values."""
    REAL: tl.constexpr = running.dtype.element_ty
    unbiased = squares / tl.maximum(counted - 1, 1).to(REAL)
    new_mean, new_var = mean, unbiased
    if RUNNING:
        before_mean = tl.load(running_mean + channel, exists, 0.0).to(REAL)
        before_var = tl.load(running_var + channel, exists, 0.0).to(REAL)
        share = from_bits(share_bits, REAL) * tl.minimum(counted, 1).to(REAL)
        new_mean = before_mean + (mean - before_mean) * share
        new_var = before_var + (unbiased - before_var) * share
    tl.store(running + channel, new_mean, exists)
    tl.store(running + channels + channel, new_var, exists)


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
    features, weight, bias, running_mean, running_var, parts, statistics, running, active, out, rows, count, length,
    channels, alpha_bits: tl.int64, eps_bits: tl.int64, share_bits: tl.int64,
    TRAINING: tl.constexpr, RUNNING: tl.constexpr, WEIGHT: tl.constexpr, BIAS: tl.constexpr, COUNTED: tl.constexpr,
    ACTIVATION: tl.constexpr, ROWS: tl.constexpr, JOINED: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    REAL: tl.constexpr = statistics.dtype.element_ty
    part, first, channel, exists = _place(length, channels, CHANNELS)
    counted = _rows_that_count(active, rows, COUNTED)
    if TRAINING:
        mean, squares = _joined_moments(parts, counted, count, length, channels, channel, exists, JOINED)
        variance = squares / tl.maximum(counted, 1).to(REAL)
    else:
        mean = tl.load(running_mean + channel, exists, 0.0).to(REAL)
        variance = tl.load(running_var + channel, exists, 0.0).to(REAL)
    inverse = 1.0 / tl.sqrt(variance + from_bits(eps_bits, REAL))
    if part == 0:
        tl.store(statistics + channel, mean, exists)
        tl.store(statistics + channels + channel, inverse, exists)
        if TRAINING:
            _pass_on(running_mean, running_var, running, mean, squares, counted, share_bits, channels, channel, exists,
                     RUNNING)  # fmt: skip
    for begin in range(first, tl.minimum(first + length, rows), ROWS):
        row = begin + tl.arange(0, ROWS)
        inside = (row < tl.minimum(first + length, rows))[:, None] & exists[None, :]
        counts = (row < counted)[:, None] & inside
        at = row.to(tl.int64)[:, None] * channels + channel[None, :]
        _, z, _ = _normal(features, weight, bias, mean, inverse, at, counts, channel, exists, WEIGHT, BIAS)
        value = activate(z, from_bits(alpha_bits, z.dtype), ACTIVATION)
        tl.store(out + at, tl.where(counts, value, 0.0).to(out.dtype.element_ty), inside)


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
    grad, features, weight, bias, statistics, active, parts, rows, count, length, channels, alpha_bits: tl.int64,
    WEIGHT: tl.constexpr, BIAS: tl.constexpr, COUNTED: tl.constexpr, ACTIVATION: tl.constexpr, CHANNELS: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    part, first, channel, exists = _place(length, channels, CHANNELS)
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


@triton.jit
def _joined_sums(parts, count, channels, channel, exists, JOINED: tl.constexpr):
    """-> gradients of weight and bias"""
    of_weight = tl.zeros(channel.shape, parts.dtype.element_ty)
    of_bias = tl.zeros(channel.shape, parts.dtype.element_ty)
    for begin in range(0, count, JOINED):
        part = begin + tl.arange(0, JOINED)
        at = parts + part.to(tl.int64)[:, None] * 2 * channels + channel[None, :]
        mask = (part < count)[:, None] & exists[None, :]
        of_weight += tl.sum(tl.load(at, mask, 0.0), 0)
        of_bias += tl.sum(tl.load(at + channels, mask, 0.0), 0)
    return of_weight, of_bias


@_gpu.kernel(specialize=("channels",))
def _gradient_kernel(
    grad, features, weight, bias, statistics, active, parts, grad_weight, grad_bias, result, rows, count, length,
    channels, alpha_bits: tl.int64,
    WEIGHT: tl.constexpr, BIAS: tl.constexpr, COUNTED: tl.constexpr, ACTIVATION: tl.constexpr, CHANNELS: tl.constexpr,
    TRAINING: tl.constexpr, ROWS: tl.constexpr, JOINED: tl.constexpr,
):  # fmt: skip
    REAL: tl.constexpr = statistics.dtype.element_ty
    part, first, channel, exists = _place(length, channels, CHANNELS)
    counted = _rows_that_count(active, rows, COUNTED)
    of_weight, of_bias = _joined_sums(parts, count, channels, channel, exists, JOINED)
    if part == 0:
        tl.store(grad_weight + channel, of_weight, exists)
        tl.store(grad_bias + channel, of_bias, exists)
    total = tl.maximum(counted, 1).to(REAL)
    total = tl.zeros(of_bias.shape, REAL) + total
    of_weight, of_bias = divide(of_weight, total), divide(of_bias, total)
    for begin in range(first, tl.minimum(first + length, rows), ROWS):
        row = begin + tl.arange(0, ROWS)
        inside = (row < tl.minimum(first + length, rows))[:, None] & exists[None, :]
        counts = (row < counted)[:, None] & inside
        at = row.to(tl.int64)[:, None] * channels + channel[None, :]
        normal, outer, inverse = _outer(
            grad, features, weight, bias, statistics, at, counts, channel, channels, exists, alpha_bits,
            WEIGHT, BIAS, ACTIVATION,
        )  # fmt: skip
        if TRAINING:
            outer = outer - (of_bias[None, :] + normal * of_weight[None, :])
        value = tl.where(counts, outer * inverse[None, :], 0.0)
        tl.store(result + at, value.to(result.dtype.element_ty), inside)
