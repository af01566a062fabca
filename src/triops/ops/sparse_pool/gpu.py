"""Sparse pooling on GPU: a program takes a tile of rows and channels through all offsets. No atomics anywhere."""

import torch
import triton
import triton.language as tl

from triops import _check, _gpu
from triops._gpu.arithmetic import divide
from triops.ops.rulebook.tables import refuse_rows_outside


def sparse_max_pool(features, gather, scatter):
    out = torch.empty((gather.shape[1], features.shape[1]), dtype=features.dtype, device=features.device)
    argmax = torch.empty(out.shape, dtype=torch.int32, device=features.device)
    _launch("sparse_max_pool", "gather", _max_kernel, gather, features, out, argmax)
    return out, argmax


def sparse_max_pool_backward(grad_output, argmax, scatter):
    grad = torch.empty((scatter.shape[1], grad_output.shape[1]), dtype=grad_output.dtype, device=grad_output.device)
    _launch("sparse_max_pool_backward", "scatter", _max_backward_kernel, scatter, grad_output, grad, argmax)
    return grad


def sparse_max_pool_from_zero(features, gather, scatter):
    return sparse_max_pool(features, gather, scatter)[0].clamp_(min=0)


def sparse_max_pool_from_zero_backward(grad_output, features, output, scatter):
    grad = torch.empty((scatter.shape[1], grad_output.shape[1]), dtype=grad_output.dtype, device=grad_output.device)
    _launch(
        "sparse_max_pool_from_zero_backward", "scatter", _equals_backward_kernel, scatter, grad_output, grad, features,
        output,
    )  # fmt: skip
    return grad


def sparse_avg_pool(features, gather, scatter):
    out = torch.empty((gather.shape[1], features.shape[1]), dtype=features.dtype, device=features.device)
    count = torch.empty(gather.shape[1], dtype=torch.int32, device=features.device)
    if features.shape[1] == 0:
        count.copy_(((gather >= 0) & (gather < features.shape[0])).sum(0))
    _launch("sparse_avg_pool", "gather", _avg_kernel, gather, features, out, count)
    return out, count


def sparse_avg_pool_backward(grad_output, count, scatter):
    grad = torch.empty((scatter.shape[1], grad_output.shape[1]), dtype=grad_output.dtype, device=grad_output.device)
    _launch("sparse_avg_pool_backward", "scatter", _avg_backward_kernel, scatter, grad_output, grad, count)
    return grad


def sparse_avg_pool_times_count(features, gather, scatter):
    return sparse_avg_pool(features, gather, scatter)


def _launch(operator, name, kernel, table, source, target, *beside):
    if _check.strict():
        refuse_rows_outside(operator, name, table, source.shape[0])
    rows, channels = target.shape
    if rows == 0 or channels == 0:
        return
    width = min(_gpu.next_power_of_2(channels), 64)
    height = _gpu.block(max(1024 // width, 16), interpreted=256)
    tiles = _gpu.cdiv(rows, height)
    kernel[(tiles * _gpu.cdiv(channels, width),)](
        table.contiguous(), source.contiguous(), target, *(tensor.contiguous() for tensor in beside), source.shape[0],
        rows, channels, table.shape[0], HEIGHT=height, WIDTH=width, num_warps=4,
    )  # fmt: skip


@triton.jit
def _tile(rows, channels, HEIGHT: tl.constexpr, WIDTH: tl.constexpr):
    """Row and channel numbers of this program's tile, and which of them exist."""
    across = tl.cdiv(channels, WIDTH)
    row = (tl.program_id(0) // across).to(tl.int64) * HEIGHT + tl.arange(0, HEIGHT)
    channel = (tl.program_id(0) % across) * WIDTH + tl.arange(0, WIDTH)
    return row, row < rows, channel, (row < rows)[:, None] & (channel < channels)[None, :]


@triton.jit
def _neighbor(line, exists, count):
    """The input row that each output row meets under one offset; -1 for none, or for one that is not there."""
    neighbor = tl.load(line, mask=exists, other=-1)
    return tl.where(neighbor < count, neighbor, -1)


@_gpu.kernel(specialize=("channels",))
def _max_kernel(table, source, target, argmax, count, rows, channels, taps, HEIGHT: tl.constexpr, WIDTH: tl.constexpr):
    row, exists, channel, inside = _tile(rows, channels, HEIGHT, WIDTH)
    best = tl.zeros([HEIGHT, WIDTH], tl.float64 if source.dtype.element_ty == tl.float64 else tl.float32)
    at = tl.full([HEIGHT, WIDTH], -1, tl.int32)
    line = table + row
    for k in range(taps):
        neighbor = _neighbor(line, exists, count)
        line += rows
        valid = inside & (neighbor >= 0)[:, None]
        value = tl.load(source + neighbor.to(tl.int64)[:, None] * channels + channel[None, :], mask=valid, other=0.0)
        value = value.to(best.dtype)
        wins = valid & ((at < 0) | (value > best) | ((value != value) & (best == best)))
        best = tl.where(wins, value, best)
        at = tl.where(wins, k, at)
    place = row[:, None] * channels + channel[None, :]
    tl.store(target + place, best.to(target.dtype.element_ty), mask=inside)
    tl.store(argmax + place, at, mask=inside)


@_gpu.kernel(specialize=("channels",))
def _max_backward_kernel(
    table, source, target, argmax, count, rows, channels, taps, HEIGHT: tl.constexpr, WIDTH: tl.constexpr
):
    row, exists, channel, inside = _tile(rows, channels, HEIGHT, WIDTH)
    total = tl.zeros([HEIGHT, WIDTH], tl.float64 if source.dtype.element_ty == tl.float64 else tl.float32)
    line = table + row
    for k in range(taps):
        neighbor = _neighbor(line, exists, count)
        line += rows
        valid = inside & (neighbor >= 0)[:, None]
        place = neighbor.to(tl.int64)[:, None] * channels + channel[None, :]
        valid = valid & (tl.load(argmax + place, mask=valid, other=-1) == k)
        total += tl.load(source + place, mask=valid, other=0.0).to(total.dtype)
    tl.store(target + row[:, None] * channels + channel[None, :], total.to(target.dtype.element_ty), mask=inside)


@_gpu.kernel(specialize=("channels",))
def _equals_backward_kernel(
    table, source, target, features, output, count, rows, channels, taps, HEIGHT: tl.constexpr, WIDTH: tl.constexpr
):
    row, exists, channel, inside = _tile(rows, channels, HEIGHT, WIDTH)
    total = tl.zeros([HEIGHT, WIDTH], tl.float64 if source.dtype.element_ty == tl.float64 else tl.float32)
    own = row[:, None] * channels + channel[None, :]
    feature = tl.load(features + own, mask=inside, other=0.0).to(total.dtype)
    line = table + row
    for _ in range(taps):
        neighbor = _neighbor(line, exists, count)
        line += rows
        valid = inside & (neighbor >= 0)[:, None]
        place = neighbor.to(tl.int64)[:, None] * channels + channel[None, :]
        wins = valid & (tl.load(output + place, mask=valid, other=0.0).to(total.dtype) == feature)
        total += tl.load(source + place, mask=wins, other=0.0).to(total.dtype)
    tl.store(target + own, total.to(target.dtype.element_ty), mask=inside)


@_gpu.kernel(specialize=("channels",))
def _avg_kernel(table, source, target, number, count, rows, channels, taps, HEIGHT: tl.constexpr, WIDTH: tl.constexpr):
    row, exists, channel, inside = _tile(rows, channels, HEIGHT, WIDTH)
    total = tl.zeros([HEIGHT, WIDTH], tl.float64 if source.dtype.element_ty == tl.float64 else tl.float32)
    found = tl.zeros([HEIGHT], tl.int32)
    line = table + row
    for _ in range(taps):
        neighbor = _neighbor(line, exists, count)
        line += rows
        found += (neighbor >= 0).to(tl.int32)
        valid = inside & (neighbor >= 0)[:, None]
        value = tl.load(source + neighbor.to(tl.int64)[:, None] * channels + channel[None, :], mask=valid, other=0.0)
        total += value.to(total.dtype)
    mean = divide(total, tl.broadcast_to(tl.maximum(found, 1).to(total.dtype)[:, None], [HEIGHT, WIDTH]))
    tl.store(target + row[:, None] * channels + channel[None, :], mean.to(target.dtype.element_ty), mask=inside)
    tl.store(number + row, found, mask=exists)  # every program of a row writes the same


@_gpu.kernel(specialize=("channels",))
def _avg_backward_kernel(
    table, source, target, number, count, rows, channels, taps, HEIGHT: tl.constexpr, WIDTH: tl.constexpr
):
    row, exists, channel, inside = _tile(rows, channels, HEIGHT, WIDTH)
    total = tl.zeros([HEIGHT, WIDTH], tl.float64 if source.dtype.element_ty == tl.float64 else tl.float32)
    line = table + row
    for _ in range(taps):
        neighbor = _neighbor(line, exists, count)
        line += rows
        divisor = tl.maximum(tl.load(number + neighbor, mask=neighbor >= 0, other=1), 1)
        valid = inside & (neighbor >= 0)[:, None]
        value = tl.load(source + neighbor.to(tl.int64)[:, None] * channels + channel[None, :], mask=valid, other=0.0)
        # Terms may cancel, so each is rounded as in the reference, and added in its order.
        total += divide(value.to(total.dtype), tl.broadcast_to(divisor.to(total.dtype)[:, None], [HEIGHT, WIDTH]))
    tl.store(target + row[:, None] * channels + channel[None, :], total.to(target.dtype.element_ty), mask=inside)
