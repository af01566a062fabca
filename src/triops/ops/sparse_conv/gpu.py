"""Sparse convolution on GPU: a masked implicit GEMM over tiles of output rows (see tiling), without scatter.

A program takes a tile of rows and a block of output channels through the offsets that the tile has, heaviest tiles
first. float32 runs on tensor cores without losing its precision, as six products of bfloat16 parts, unless torch
allows TF32.
"""

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from triops import _gpu
from triops._activations import ACTIVATIONS, activate
from triops._dtypes import compute_dtype
from triops._gpu.activations import activate as activate_rows
from triops._gpu.arithmetic import from_bits
from triops._gpu.products import hopper, parts_of, product, round_to_tf32, split_product
from triops._gpu.products import precision as precision_of
from triops.ops.rulebook.plans import TILE
from triops.ops.rulebook.plans_gpu import make_tiles, pack, parts_of_tiles
from triops.ops.sparse_conv import preferred_tile

MOST_SUMMED_INSIDE = tl.constexpr(128)  # channels whose products may add up inside a tensor core
CHUNK = 1024  # pairs that one program of the weight gradient adds up, twice as many where the sums are wide
PARTS_BYTES = 64 << 20  # of partial weight gradients in deterministic mode


class Config(NamedTuple):
    """How the convolution is cut: blocks of output and of summed channels, warps, pipeline stages.

    registers: how many a thread may have, 0 where the compiler decides.
    """

    out: int
    inner: int
    warps: int
    stages: int
    registers: int = 0


class WeightConfig(NamedTuple):
    """Of the weight gradient: blocks of output and input channels, pairs taken at once, warps, pipeline stages."""

    out: int
    inner: int
    rows: int
    warps: int
    stages: int


def sparse_conv(
    features, weight, bias, gather, scatter, mirrored, flip, tile, tiles, transposed_tiles, pairs, transposed_pairs
):
    weight = weight.flatten(1, -2)
    return _convolve("sparse_conv", features, weight, bias, None, gather, flip, tile, tiles, "none", 0.0)


def sparse_conv_fused(features, weight, bias, residual, gather, tile, tiles, pairs, activation, alpha):
    return _convolve(
        "sparse_conv_fused", features, weight, bias, residual, gather, False, tile, tiles, activation, alpha
    )


def _convolve(operator, features, weight, bias, residual, gather, flip, tile, tiles, activation, alpha):
    rows, channels_in = features.shape
    channels_out, offsets, outputs = weight.shape[0], gather.shape[0], gather.shape[1]
    out = torch.empty((outputs, channels_out), dtype=features.dtype, device=features.device)
    if outputs == 0 or channels_out == 0:
        return out
    if rows == 0 or channels_in == 0 or offsets == 0:
        sums = out.zero_() if bias is None else out.copy_(bias.expand_as(out))
        return activate(sums if residual is None else sums + residual, activation, alpha)
    if tiles is None:
        tile = preferred_tile(features.dtype, channels_in, channels_out)
        tiles = make_tiles(operator, "gather", gather, rows, tile)
    precision = precision_of(features.dtype)
    config = _forward_config(features.dtype, precision, channels_in, channels_out, tile)
    if precision in ("split", "tf32"):
        weight, flip = _prepare(weight, flip, precision), False
    elif tile > TILE and weight.stride(0) != 1:
        # the large tiles of half types want the output channels contiguous: 111 us instead of 130, for a copy of 4
        moved = weight.permute(1, 2, 0).to(features.dtype, memory_format=torch.contiguous_format)
        weight = moved.contiguous().permute(2, 0, 1)
    elif weight.dtype != features.dtype:
        weight = weight.to(features.dtype)
    stride = weight.stride()[-3:]
    count = _gpu.cdiv(outputs, tile)
    across = _gpu.cdiv(channels_out, config.out)
    _conv_kernel[(count * across,)](
        features.contiguous(), weight, out if bias is None else bias.contiguous(),
        out if residual is None else residual.contiguous(), out, tiles.contiguous(),
        count, rows, outputs, offsets, stride[0], stride[1], stride[2], weight.numel() // 3,
        _gpu.bits_of(alpha),
        IN=channels_in, OUT=channels_out, TILE=tile, BLOCK_OUT=config.out, BLOCK_IN=config.inner, FLIP=flip,
        BIAS=bias is not None, RESIDUAL=residual is not None,
        ACTIVATION=ACTIVATIONS.index(activation), PRECISION=precision, LONG=max(features.numel(), out.numel()) >= 2**31,
        STAGES=config.stages, num_warps=config.warps, **({"maxnreg": config.registers} if config.registers else {}),
    )  # fmt: skip
    return out


def sparse_conv_backward_weight(features, grad_output, gather, scatter, mirrored, flip, pairs, wide):
    rows, channels_in = features.shape
    outputs, channels_out, taps = grad_output.shape[0], grad_output.shape[1], gather.shape[0]
    shape = (channels_out, taps, channels_in)
    real = compute_dtype(features.dtype)
    if rows == 0 or outputs == 0 or min(shape) == 0:
        return torch.zeros(shape, dtype=real if wide else features.dtype, device=features.device)
    if pairs is None:
        pairs = pack("sparse_conv_backward_weight", "gather", gather, rows)
    # Summed over rows, float32 operands lie the wrong way round for TF32 tensor cores: plain products are faster.
    precision = "native" if real != features.dtype else "ieee"
    config = _weight_config(features.dtype, channels_in, channels_out)
    chunk = _gpu.block(CHUNK if max(channels_in, channels_out) <= 64 else 2 * CHUNK, interpreted=4 * CHUNK)
    ordered = torch.are_deterministic_algorithms_enabled()
    if ordered:
        # every program keeps its own sum; fewer and longer ones where the sums would take too much memory
        most = max(PARTS_BYTES // (4 * channels_in * channels_out * taps), 1)
        chunk = max(chunk, _gpu.next_power_of_2(_gpu.cdiv(outputs, most)))
    chunks = _gpu.cdiv(outputs, chunk) * taps
    grad = (torch.empty if ordered else torch.zeros)(shape, dtype=real, device=features.device)
    parts = torch.empty((chunks, channels_out, channels_in), dtype=real, device=features.device) if ordered else grad
    across = _gpu.cdiv(channels_in, config.inner) * _gpu.cdiv(channels_out, config.out)
    padded = _gpu.next_power_of_2(taps)
    _weight_kernel[(chunks * across,)](
        features.contiguous(), grad_output.contiguous(), parts, pairs.contiguous(), rows, outputs, taps, chunk,
        IN=channels_in, OUT=channels_out, BLOCK_OUT=config.out, BLOCK_IN=config.inner, BLOCK=config.rows,
        PADDED=padded, FLIP=flip, PRECISION=precision, LONG=max(features.numel(), grad_output.numel()) >= 2**31,
        ORDERED=ordered, STAGES=config.stages, num_warps=config.warps,
    )  # fmt: skip
    if ordered:
        block = 1024
        _reduce_kernel[(taps * _gpu.cdiv(channels_in * channels_out, block),)](
            parts, grad, pairs, outputs, taps, chunk,
            IN=channels_in, OUT=channels_out, PADDED=padded, FLIP=flip, BLOCK=block, num_warps=4,
        )  # fmt: skip
    return grad if wide else grad.to(features.dtype)


@cache
def _forward_config(dtype, precision, channels_in, channels_out, tile):
    out = min(max(_gpu.next_power_of_2(channels_out), 16), 128)
    inner = min(max(_gpu.next_power_of_2(channels_in), 16), 64)
    if dtype == torch.float64:
        return Config(min(out, 32), 16, 4, 1)
    if precision == "split":
        if channels_in == channels_out == 64 and tile == TILE and hopper():
            # 156 us on an H200; without the limit on registers, in a trial, 194; in two steps 162
            return Config(out, inner, 4, 2, registers=152)
        return Config(out, inner if channels_in > 64 else min(inner, 32), 4, 2)
    if precision == "tf32":
        return Config(out, min(inner, 32), 4, 3)
    return Config(out, inner, 4, 3)


@cache
def _weight_config(dtype, channels_in, channels_out):
    most = 256 if _gpu.INTERPRETED else 128
    out, inner = (min(max(_gpu.next_power_of_2(c), 16), most) for c in (channels_out, channels_in))
    if dtype == torch.float64:
        return WeightConfig(min(out, 32), min(inner, 32), 16, 4, 1)
    if dtype == torch.float32:
        return WeightConfig(out, min(inner, 64), 32, 4, 2)
    return WeightConfig(out, inner, 64 if out * inner > 64 * 64 else 32, 4, 4)


def _prepare(weight, flip, precision):
    """A float32 weight [Cout, K, Cin] in the parts whose products are summed. `flip` reverses the offsets on the way.

    -> "split": bfloat16 [3, Cout, K, Cin], whose sum over the first axis is the weight. "tf32": float32 [Cout, K, Cin],
    rounded to TF32, with the summed channels contiguous as these products want them.
    """
    split = precision == "split"
    shape, dtype = ((3, *weight.shape), torch.bfloat16) if split else (weight.shape, torch.float32)
    parts = torch.empty(shape, dtype=dtype, device=weight.device)
    _, taps, channels_in = weight.shape
    block = 1024
    _prepare_kernel[(_gpu.cdiv(weight.numel(), block),)](
        weight, parts, weight.numel(), taps, channels_in, *weight.stride(),
        FLIP=flip, SPLIT=split, BLOCK=block, num_warps=4,
    )  # fmt: skip
    return parts


@_gpu.kernel(specialize=("size", "channels_in", "stride_out", "stride_tap", "stride_in"))
def _prepare_kernel(
    weight, parts, size, taps, channels_in, stride_out, stride_tap, stride_in,
    FLIP: tl.constexpr, SPLIT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    exists = place < size
    row = place // channels_in
    tap = row % taps
    if FLIP:
        tap = taps - 1 - tap
    at = (row // taps).to(tl.int64) * stride_out + tap * stride_tap + (place % channels_in) * stride_in
    value = tl.load(weight + at, mask=exists)
    if SPLIT:
        high, middle, low = parts_of(value)
        tl.store(parts + place, high, mask=exists)
        tl.store(parts + size + place, middle, mask=exists)
        tl.store(parts + 2 * size + place, low, mask=exists)
    else:
        tl.store(parts + place, round_to_tf32(value), mask=exists)


@triton.jit
def _load(at, exists, ALL: tl.constexpr):
    if ALL:  # a mask would cost wide loads
        return tl.load(at)
    else:
        return tl.load(at, mask=exists, other=0.0)


@triton.jit
def _visit(
    features, weight, taps_of, neighbors, rows, taps, step, channel, stride_out, stride_tap, stride_in, part, total,
    IN: tl.constexpr, OUT: tl.constexpr, TILE: tl.constexpr, BLOCK_IN: tl.constexpr, FULL_OUT: tl.constexpr,
    FLIP: tl.constexpr, PRECISION: tl.constexpr, LONG: tl.constexpr, REPAIR: tl.constexpr,
):  # fmt: skip
    """total + one tile's rows under one offset @ weight, over one block of summed channels."""
    STEPS: tl.constexpr = (IN + BLOCK_IN - 1) // BLOCK_IN
    visit = step // STEPS
    summed = (step % STEPS) * BLOCK_IN + tl.arange(0, BLOCK_IN)
    tap = tl.minimum(tl.maximum(tl.load(taps_of + visit), 0), taps - 1)  # whoever made the plan, memory stays sound
    if FLIP:
        tap = taps - 1 - tap
    row = tl.load(neighbors + visit * TILE + tl.arange(0, TILE))
    row = tl.minimum(row, rows - 1)
    valid = (row >= 0)[:, None]
    mask = valid
    if IN % BLOCK_IN != 0:
        mask = valid & (summed < IN)[None, :]
    if LONG:
        row = row.to(tl.int64)
    a = tl.load(features + row[:, None] * IN + summed[None, :], mask=mask, other=0.0)
    at = weight + tap * stride_tap + channel[None, :] * stride_out + summed[:, None] * stride_in
    exists = (summed < IN)[:, None] & (channel < OUT)[None, :]
    ALL: tl.constexpr = FULL_OUT and IN % BLOCK_IN == 0
    b = _load(at, exists, ALL)
    if PRECISION == "tf32":
        a = round_to_tf32(a)  # the weight was rounded beforehand: it goes to the tensor cores without registers
    if PRECISION == "split":
        b_middle, b_low = _load(at + part, exists, ALL), _load(at + 2 * part, exists, ALL)
        found = split_product(a, b, b_middle, b_low, tl.zeros_like(total), REPAIR)
        total += tl.where(valid, found, 0.0) if REPAIR else found
    elif REPAIR or IN > MOST_SUMMED_INSIDE:
        # The accumulator of a tensor core truncates, and many channels and offsets would show it. Without the choice
        # between the product and 0 the compiler would add inside after all.
        total += tl.where(valid, product(a, b, tl.zeros_like(total), PRECISION), 0.0)
    else:
        total = product(a, b, total, PRECISION)
    return total


@_gpu.kernel(specialize=("stride_out", "stride_tap", "stride_in", "part"))
def _conv_kernel(
    features, weight, bias, residual, out, plan, tiles, rows, outputs, taps, stride_out, stride_tap, stride_in, part,
    alpha_bits,
    IN: tl.constexpr, OUT: tl.constexpr, TILE: tl.constexpr, BLOCK_OUT: tl.constexpr, BLOCK_IN: tl.constexpr,
    FLIP: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr, ACTIVATION: tl.constexpr, PRECISION: tl.constexpr,
    LONG: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    ACROSS: tl.constexpr = (OUT + BLOCK_OUT - 1) // BLOCK_OUT
    STEPS: tl.constexpr = (IN + BLOCK_IN - 1) // BLOCK_IN
    FULL_OUT: tl.constexpr = OUT % BLOCK_OUT == 0
    tile = (tiles - 1 - tl.program_id(0) // ACROSS).to(tl.int64)
    channel = (tl.program_id(0) % ACROSS) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    neighbors, order, taps_of, counts = parts_of_tiles(plan, tiles, taps, TILE)
    taps_of += tile * taps
    neighbors += tile * taps * TILE
    steps = tl.minimum(tl.load(counts + tile), taps) * STEPS
    total = tl.zeros([TILE, BLOCK_OUT], tl.float64 if features.dtype.element_ty == tl.float64 else tl.float32)
    for step in tl.range(0, steps, num_stages=STAGES):
        total = _visit(
            features, weight, taps_of, neighbors, rows, taps, step, channel, stride_out, stride_tap, stride_in, part,
            total, IN, OUT, TILE, BLOCK_IN, FULL_OUT, FLIP, PRECISION, LONG, False,
        )  # fmt: skip
    if PRECISION == "split" or PRECISION == "ieee":
        # Splitting makes NaN of infinite features, and an infinite weight of rows that lack its offset (0 * inf):
        # a tile that holds any is summed up anew, with more care. Else the loop takes no step. Half types and TF32
        # know only the second case, and the registers for it would cost them a third of their speed.
        spoilt = tl.max((total != total).to(tl.int32))
        total = tl.where(spoilt > 0, 0.0, total).to(total.dtype)
        for step in tl.range(0, steps * spoilt, num_stages=1):
            total = _visit(
                features, weight, taps_of, neighbors, rows, taps, step, channel, stride_out, stride_tap, stride_in,
                part, total, IN, OUT, TILE, BLOCK_IN, FULL_OUT, FLIP, PRECISION, LONG, True,
            )  # fmt: skip
    if BIAS:
        total += tl.load(bias + channel, mask=channel < OUT, other=0.0).to(total.dtype)[None, :]
    lane = tl.arange(0, TILE)
    row = tl.load(order + tile * TILE + lane)
    exists = ((row >= 0) & (row < outputs))[:, None]
    if not FULL_OUT:
        exists = exists & (channel < OUT)[None, :]
    if LONG:
        row = row.to(tl.int64)
    place = row[:, None] * OUT + channel[None, :]
    if RESIDUAL:
        total += tl.load(residual + place, mask=exists, other=0.0).to(total.dtype)
    total = activate_rows(total, from_bits(alpha_bits, total.dtype), ACTIVATION)
    tl.store(out + place, total.to(out.dtype.element_ty), mask=exists)


@_gpu.kernel
def _weight_kernel(
    features, grad_output, grad, plan, rows, outputs, taps, chunk,
    IN: tl.constexpr, OUT: tl.constexpr, BLOCK_OUT: tl.constexpr, BLOCK_IN: tl.constexpr, BLOCK: tl.constexpr,
    PADDED: tl.constexpr, FLIP: tl.constexpr, PRECISION: tl.constexpr, LONG: tl.constexpr, ORDERED: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    ACROSS_IN: tl.constexpr = (IN + BLOCK_IN - 1) // BLOCK_IN
    ACROSS: tl.constexpr = ACROSS_IN * ((OUT + BLOCK_OUT - 1) // BLOCK_OUT)
    number = tl.program_id(0) // ACROSS
    every = tl.arange(0, PADDED)
    counts = plan + 2 * taps.to(tl.int64) * outputs
    chunks = tl.cdiv(tl.minimum(tl.load(counts + every, mask=every < taps, other=0), outputs), chunk)
    behind = tl.cumsum(chunks, 0)  # the first chunk that belongs to a later offset
    if number < tl.sum(chunks, 0):
        tap = tl.sum((behind <= number).to(tl.int32), 0)
        first = (number - tl.sum(tl.where(every < tap, chunks, 0), 0)) * chunk
        last = tl.minimum(first + chunk, tl.minimum(tl.load(counts + tap), outputs))
        block = tl.program_id(0) % ACROSS
        channel_in = (block % ACROSS_IN) * BLOCK_IN + tl.arange(0, BLOCK_IN)
        channel_out = (block // ACROSS_IN) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
        columns = plan + 2 * tap.to(tl.int64) * outputs
        total = tl.zeros([BLOCK_OUT, BLOCK_IN], grad.dtype.element_ty)
        for begin in tl.range(first, last, BLOCK, num_stages=STAGES):
            pair = begin + tl.arange(0, BLOCK)
            exists = pair < last
            target = tl.load(columns + pair, mask=exists, other=0)
            source = tl.load(columns + outputs + pair, mask=exists, other=0)
            # Whoever made the plan, memory stays sound: clamped, since a mask that depends on these would cost a fifth.
            target = tl.minimum(tl.maximum(target, 0), outputs - 1)
            source = tl.minimum(tl.maximum(source, 0), rows - 1)
            if LONG:
                source = source.to(tl.int64)
                target = target.to(tl.int64)
            mask_in, mask_out = exists[:, None], exists[None, :]
            if IN % BLOCK_IN != 0:
                mask_in = mask_in & (channel_in < IN)[None, :]
            if OUT % BLOCK_OUT != 0:
                mask_out = mask_out & (channel_out < OUT)[:, None]
            a = tl.load(grad_output + target[None, :] * OUT + channel_out[:, None], mask=mask_out, other=0.0)
            b = tl.load(features + source[:, None] * IN + channel_in[None, :], mask=mask_in, other=0.0)
            total = product(a, b, total, PRECISION)
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
    parts, grad, plan, outputs, taps, chunk,
    IN: tl.constexpr, OUT: tl.constexpr, PADDED: tl.constexpr, FLIP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The sum of an offset's parts, one after the other."""
    ACROSS: tl.constexpr = (IN * OUT + BLOCK - 1) // BLOCK
    tap = tl.program_id(0) // ACROSS
    place = (tl.program_id(0) % ACROSS) * BLOCK + tl.arange(0, BLOCK)
    every = tl.arange(0, PADDED)
    counts = plan + 2 * taps.to(tl.int64) * outputs
    chunks = tl.cdiv(tl.minimum(tl.load(counts + every, mask=every < taps, other=0), outputs), chunk)
    first = tl.sum(tl.where(every < tap, chunks, 0), 0)
    last = tl.sum(tl.where(every <= tap, chunks, 0), 0)
    total = tl.zeros([BLOCK], grad.dtype.element_ty)
    for part in range(first, last):
        total += tl.load(parts + tl.cast(part, tl.int64) * (IN * OUT) + place, mask=place < IN * OUT, other=0.0)
    if FLIP:
        tap = taps - 1 - tap
    at = ((place // IN).to(tl.int64) * taps + tap) * IN + place % IN
    tl.store(grad + at, total, mask=place < IN * OUT)
