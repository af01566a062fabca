"""Sparse convolution on GPU: a masked implicit GEMM over tiles of output rows (see tiling), without scatter.

A program takes a tile of rows and a block of output channels through the offsets that the tile has, heaviest tiles
first. float32 runs on tensor cores without losing its precision, as three products of TF32 parts, unless torch
allows plain TF32.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from triops import _gpu
from triops.ops.sparse_conv.tiling.gpu import TILE, tiles_of, visits_of

INTERPRETED = tl.constexpr(_gpu.INTERPRETED)  # the interpreter's products of half types are not what a GPU's are

CHUNK = 64  # visits that one program of the weight gradient adds up
PARTS_BYTES = 64 << 20  # of partial weight gradients in deterministic mode


class Config(NamedTuple):
    """How one kernel is cut: a block of output channels, a block of summed channels, warps, pipeline stages."""

    out: int
    inner: int
    warps: int
    stages: int


def sparse_conv(features, weight, bias, gather, scatter, mirrored, flip):
    rows, channels_in = features.shape
    channels_out, taps, outputs = weight.shape[0], gather.shape[0], gather.shape[1]
    out = torch.empty((outputs, channels_out), dtype=features.dtype, device=features.device)
    if outputs == 0 or channels_out == 0:
        return out
    if rows == 0 or channels_in == 0 or taps == 0:
        return out.zero_() if bias is None else out.copy_(bias.expand_as(out))
    tiles = tiles_of("sparse_conv", gather, rows)
    precision = _precision(features.dtype)
    if precision == "split":
        weight = _split(weight)
    elif features.dtype == torch.float32 and weight.stride(2) != 1:
        weight = weight.contiguous()  # TF32 products want the summed channels contiguous
    config = _forward_config(features.dtype, precision, channels_in, channels_out)
    stride = weight.stride()[-3:]
    count = tiles.counts.shape[0]
    across = triton.cdiv(channels_out, config.out)
    _conv_kernel[(count * across,)](
        features.contiguous(), weight, out if bias is None else bias.contiguous(), out,
        tiles.rows, tiles.counts, tiles.taps, tiles.neighbors,
        count, taps, stride[0], stride[1], stride[2], weight.numel() // 2,
        IN=channels_in, OUT=channels_out, TILE=TILE, BLOCK_OUT=config.out, BLOCK_IN=config.inner, FLIP=flip,
        BIAS=bias is not None, PRECISION=precision, LONG=max(features.numel(), out.numel()) >= 2**31,
        STAGES=config.stages, num_warps=config.warps,
    )  # fmt: skip
    return out


def sparse_conv_backward_weight(features, grad_output, gather, scatter, mirrored, flip):
    rows, channels_in = features.shape
    outputs, channels_out, taps = grad_output.shape[0], grad_output.shape[1], gather.shape[0]
    shape = (channels_out, taps, channels_in)
    if rows == 0 or outputs == 0 or min(shape) == 0:
        return torch.zeros(shape, dtype=features.dtype, device=features.device)
    tiles = tiles_of("sparse_conv_backward_weight", gather, rows)
    visits = visits_of("sparse_conv_backward_weight", gather, rows)
    wide = torch.float64 if features.dtype == torch.float64 else torch.float32
    precision = _precision(features.dtype)
    config = _weight_config(features.dtype, precision, channels_in, channels_out)
    count = tiles.counts.shape[0]
    chunk, parts = CHUNK, None
    ordered = torch.are_deterministic_algorithms_enabled()
    if ordered:
        # every program keeps its own sum; fewer and longer ones where the sums would take too much memory
        most = max(PARTS_BYTES // (4 * channels_in * channels_out), taps)
        chunk = max(chunk, triton.cdiv(count, most // taps))
        parts = torch.empty(
            triton.cdiv(count, chunk) * taps, channels_out, channels_in, dtype=wide, device=features.device
        )
    make = torch.empty if ordered else torch.zeros
    grad = make(shape, dtype=wide, device=features.device)
    chunks = triton.cdiv(count, chunk) * taps
    across_in, across_out = triton.cdiv(channels_in, config.inner), triton.cdiv(channels_out, config.out)
    padded = triton.next_power_of_2(taps)
    _weight_kernel[(chunks * across_in * across_out,)](
        features.contiguous(), grad_output.contiguous(), grad if parts is None else parts,
        tiles.rows, tiles.neighbors, visits.counts, visits.tiles, visits.numbers, count, taps, chunk,
        IN=channels_in, OUT=channels_out, TILE=TILE, BLOCK_OUT=config.out, BLOCK_IN=config.inner, PADDED=padded,
        FLIP=flip, PRECISION=precision, LONG=max(features.numel(), grad_output.numel()) >= 2**31,
        ORDERED=ordered, STAGES=config.stages, num_warps=config.warps,
    )  # fmt: skip
    if parts is not None:
        block = 1024
        _reduce_kernel[(taps * triton.cdiv(channels_in * channels_out, block),)](
            parts, grad, visits.counts, taps, chunk,
            IN=channels_in, OUT=channels_out, PADDED=padded, FLIP=flip, BLOCK=block, num_warps=4,
        )  # fmt: skip
    return grad.to(features.dtype)


def _precision(dtype):
    """Of the products: "native" for half types, "tf32", "split" (float32 by three TF32 products), "ieee"."""
    if dtype in (torch.float16, torch.bfloat16):
        return "native"
    if dtype == torch.float64 or torch.version.hip or _gpu.INTERPRETED:  # AMD multiplies float32 as it is
        return "ieee"
    return "tf32" if _tf32_allowed() else "split"


def _tf32_allowed():
    try:
        return torch.backends.cuda.matmul.allow_tf32
    except RuntimeError:  # the user has set torch's newer switch, which the older one then refuses to reflect
        return torch.backends.cuda.matmul.fp32_precision == "tf32"


def _forward_config(dtype, precision, channels_in, channels_out):
    out = min(max(triton.next_power_of_2(channels_out), 16), 128)
    inner = min(max(triton.next_power_of_2(channels_in), 16), 64 if precision == "native" else 32)
    if dtype == torch.float64:
        return Config(min(out, 32), 16, 4, 1)
    return Config(out, inner, 4, 3)


def _weight_config(dtype, precision, channels_in, channels_out):
    most = 256 if _gpu.INTERPRETED else 128 if precision == "native" else 64
    out, inner = (min(max(triton.next_power_of_2(c), 16), most) for c in (channels_out, channels_in))
    if dtype == torch.float64:
        return Config(min(out, 32), min(inner, 32), 4, 1)
    return Config(out, inner, 8 if out * inner >= 128 * 128 else 4, 3)  # 128 x 128 sums take 8 warps' registers


def _split(weight):
    """[Cout, K, Cin] -> [2, Cout, K, Cin]: the leading bits that TF32 holds, and what is left."""
    parts = torch.empty((2, *weight.shape), dtype=torch.float32, device=weight.device)
    _, taps, channels_in = weight.shape
    block = 1024
    _split_kernel[(triton.cdiv(weight.numel(), block),)](
        weight, parts, weight.numel(), taps, channels_in, *weight.stride(), BLOCK=block, num_warps=4
    )
    return parts


@_gpu.kernel
def _split_kernel(weight, parts, size, taps, channels_in, stride_out, stride_tap, stride_in, BLOCK: tl.constexpr):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    exists = place < size
    tap = place // channels_in
    at = (tap // taps).to(tl.int64) * stride_out + (tap % taps) * stride_tap + (place % channels_in) * stride_in
    value = tl.load(weight + at, mask=exists)
    leading = _leading_bits(value)
    tl.store(parts + place, leading, mask=exists)
    tl.store(parts + size + place, value - leading, mask=exists)


@triton.jit
def _leading_bits(value):
    """A float32 without the 13 bits that TF32 has no room for."""
    return (value.to(tl.int32, bitcast=True) & -8192).to(tl.float32, bitcast=True)


@triton.jit
def _product(a, b, total, PRECISION: tl.constexpr):
    """total + a @ b"""
    if INTERPRETED and PRECISION == "native":
        return tl.dot(a.to(tl.float32), b.to(tl.float32), total, input_precision="ieee")
    elif PRECISION == "native":
        return tl.dot(a, b, total)
    else:
        return tl.dot(a, b, total, input_precision=PRECISION, out_dtype=total.dtype)


@triton.jit
def _split_product(a_leading, a_rest, b_leading, b_rest):
    """a @ b of float32 parts. Infinite values have no rest: what they leave behind is dropped before it counts."""
    small = tl.dot(a_rest, b_leading, input_precision="tf32")
    small = tl.dot(a_leading, b_rest, small, input_precision="tf32")
    small = tl.where(small == small, small, 0.0)
    return tl.dot(a_leading, b_leading, small, input_precision="tf32")


@_gpu.kernel
def _conv_kernel(
    features, weight, bias, out, rows, counts, taps_of, neighbors, tiles, taps,
    stride_out, stride_tap, stride_in, rest,
    IN: tl.constexpr, OUT: tl.constexpr, TILE: tl.constexpr, BLOCK_OUT: tl.constexpr, BLOCK_IN: tl.constexpr,
    FLIP: tl.constexpr, BIAS: tl.constexpr, PRECISION: tl.constexpr, LONG: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    ACROSS: tl.constexpr = (OUT + BLOCK_OUT - 1) // BLOCK_OUT
    STEPS: tl.constexpr = (IN + BLOCK_IN - 1) // BLOCK_IN
    tile = (tiles - 1 - tl.program_id(0) // ACROSS).to(tl.int64)
    channel = (tl.program_id(0) % ACROSS) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    lane, inner = tl.arange(0, TILE), tl.arange(0, BLOCK_IN)
    taps_of += tile * taps
    neighbors += tile * taps * TILE
    total = tl.zeros([TILE, BLOCK_OUT], tl.float64 if features.dtype.element_ty == tl.float64 else tl.float32)
    for step in tl.range(0, tl.load(counts + tile) * STEPS, num_stages=STAGES):
        visit = step // STEPS
        summed = (step % STEPS) * BLOCK_IN + inner
        tap = tl.load(taps_of + visit)
        if FLIP:
            tap = taps - 1 - tap
        row = tl.load(neighbors + visit * TILE + lane)
        met = (row >= 0)[:, None]
        if IN % BLOCK_IN != 0:
            met = met & (summed < IN)[None, :]
        if LONG:
            row = row.to(tl.int64)
        a = tl.load(features + row[:, None] * IN + summed[None, :], mask=met, other=0.0)
        at = weight + tap * stride_tap + channel[None, :] * stride_out + summed[:, None] * stride_in
        if IN % BLOCK_IN != 0 or OUT % BLOCK_OUT != 0:
            exists = (summed < IN)[:, None] & (channel < OUT)[None, :]
            b = tl.load(at, mask=exists, other=0.0)
        else:
            b = tl.load(at)
        if PRECISION == "split":
            if IN % BLOCK_IN != 0 or OUT % BLOCK_OUT != 0:
                b_rest = tl.load(at + rest, mask=exists, other=0.0)
            else:
                b_rest = tl.load(at + rest)
            a_leading = _leading_bits(a)
            # added outside: the accumulator inside a tensor core truncates, and many offsets would show it
            total += _split_product(a_leading, a - a_leading, b, b_rest)
        else:
            total = _product(a, b, total, PRECISION)
    if BIAS:
        total += tl.load(bias + channel, mask=channel < OUT, other=0.0).to(total.dtype)[None, :]
    row = tl.load(rows + tile * TILE + lane)
    exists = (row >= 0)[:, None]
    if OUT % BLOCK_OUT != 0:
        exists = exists & (channel < OUT)[None, :]
    if LONG:
        row = row.to(tl.int64)
    tl.store(out + row[:, None] * OUT + channel[None, :], total.to(out.dtype.element_ty), mask=exists)


@_gpu.kernel
def _weight_kernel(
    features, grad_output, grad, rows, neighbors, counts, tiles_by_tap, numbers, tiles, taps, chunk,
    IN: tl.constexpr, OUT: tl.constexpr, TILE: tl.constexpr, BLOCK_OUT: tl.constexpr, BLOCK_IN: tl.constexpr,
    PADDED: tl.constexpr, FLIP: tl.constexpr, PRECISION: tl.constexpr, LONG: tl.constexpr, ORDERED: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    ACROSS_IN: tl.constexpr = (IN + BLOCK_IN - 1) // BLOCK_IN
    ACROSS: tl.constexpr = ACROSS_IN * ((OUT + BLOCK_OUT - 1) // BLOCK_OUT)
    number = tl.program_id(0) // ACROSS
    every = tl.arange(0, PADDED)
    chunks = tl.cdiv(tl.load(counts + every, mask=every < taps, other=0), chunk)
    behind = tl.cumsum(chunks, 0)  # the first chunk that belongs to a later offset
    if number < tl.sum(chunks, 0):
        tap = tl.sum((behind <= number).to(tl.int32), 0)
        first = (number - tl.sum(tl.where(every < tap, chunks, 0), 0)) * chunk
        last = tl.minimum(first + chunk, tl.load(counts + tap))
        block = tl.program_id(0) % ACROSS
        channel_in = (block % ACROSS_IN) * BLOCK_IN + tl.arange(0, BLOCK_IN)
        channel_out = (block // ACROSS_IN) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
        lane = tl.arange(0, TILE)
        tiles_by_tap += tap.to(tl.int64) * tiles
        numbers += tap.to(tl.int64) * tiles
        total = tl.zeros([BLOCK_OUT, BLOCK_IN], grad.dtype.element_ty)
        for visit in tl.range(first, last, num_stages=STAGES):
            tile = tl.load(tiles_by_tap + visit).to(tl.int64)
            source = tl.load(neighbors + (tile * taps + tl.load(numbers + visit)) * TILE + lane)
            target = tl.load(rows + tile * TILE + lane)
            met = source >= 0
            if LONG:
                source = source.to(tl.int64)
                target = target.to(tl.int64)
            taken, given = met[:, None], met[None, :]
            if IN % BLOCK_IN != 0:
                taken = taken & (channel_in < IN)[None, :]
            if OUT % BLOCK_OUT != 0:
                given = given & (channel_out < OUT)[:, None]
            a = tl.load(grad_output + target[None, :] * OUT + channel_out[:, None], mask=given, other=0.0)
            b = tl.load(features + source[:, None] * IN + channel_in[None, :], mask=taken, other=0.0)
            if PRECISION == "split":
                a_leading, b_leading = _leading_bits(a), _leading_bits(b)
                total += _split_product(a_leading, a - a_leading, b_leading, b - b_leading)
            else:
                total = _product(a, b, total, PRECISION)
        exists = (channel_out < OUT)[:, None] & (channel_in < IN)[None, :]
        if ORDERED:
            place = (number.to(tl.int64) * OUT + channel_out[:, None]) * IN + channel_in[None, :]
            tl.store(grad + place, total, mask=exists)
        else:
            if FLIP:
                tap = taps - 1 - tap
            place = (channel_out[:, None].to(tl.int64) * taps + tap) * IN + channel_in[None, :]
            tl.atomic_add(grad + place, total, mask=exists, sem="relaxed")


@_gpu.kernel
def _reduce_kernel(
    parts, grad, counts, taps, chunk,
    IN: tl.constexpr, OUT: tl.constexpr, PADDED: tl.constexpr, FLIP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The sum of an offset's parts, one after the other."""
    ACROSS: tl.constexpr = (IN * OUT + BLOCK - 1) // BLOCK
    tap = tl.program_id(0) // ACROSS
    place = (tl.program_id(0) % ACROSS) * BLOCK + tl.arange(0, BLOCK)
    every = tl.arange(0, PADDED)
    chunks = tl.cdiv(tl.load(counts + every, mask=every < taps, other=0), chunk)
    first = tl.sum(tl.where(every < tap, chunks, 0), 0)
    last = tl.sum(tl.where(every <= tap, chunks, 0), 0)
    total = tl.zeros([BLOCK], grad.dtype.element_ty)
    for part in range(first, last):
        total += tl.load(parts + tl.cast(part, tl.int64) * (IN * OUT) + place, mask=place < IN * OUT, other=0.0)
    if FLIP:
        tap = taps - 1 - tap
    at = ((place // IN).to(tl.int64) * taps + tap) * IN + place % IN
    tl.store(grad + at, total, mask=place < IN * OUT)
