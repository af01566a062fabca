"""three_interpolate on GPU: a tile of places and channels per program.

As in gather_points, planes of many channels are transposed into rows first where there is much to read. The backward
adds to rows or planes by atomics, or in deterministic mode by one program per point over the places that are sorted by
point.
"""

import torch
import triton.language as tl

from triops import _gpu
from triops._clouds import check_indices_on_request
from triops._dtypes import compute_dtype
from triops._gpu import cdiv, next_power_of_2
from triops._gpu.rows import address, places_by_point, points_and_channels, tile_of_program

FEW_CHANNELS = 8  # up to which planes are read as they lie
FEW_VALUES = _gpu.block(2**19, interpreted=2**10)  # written, likewise: a transposition is a launch more
MOST_CHANNELS = 64  # of a tile
TILE = _gpu.block(4096, interpreted=16384)
WARPS = 4


def three_interpolate(features, indices, weights, channels_last):
    batch, places, neighbors = indices.shape
    count, channels = points_and_channels(features, channels_last)
    check_indices_on_request("three_interpolate", indices, count)
    shape = (batch, places, channels) if channels_last else (batch, channels, places)
    out = torch.empty(shape, dtype=features.dtype, device=features.device)
    if out.numel() == 0:
        return out
    indices, weights = indices.contiguous(), weights.contiguous()
    block = min(next_power_of_2(channels), MOST_CHANNELS)
    blocks = cdiv(places, TILE // block)

    def launch(in_rows):
        source = features.mT if in_rows and not channels_last else features
        _interpolate_kernel[(blocks * batch, cdiv(channels, block))](
            source.contiguous(), indices, weights, out, blocks, count, places, neighbors, channels, IN_ROWS=in_rows,
            OUT_ROWS=channels_last, BLOCK=TILE // block, CHANNELS=block, REAL=_real(features), num_warps=WARPS,
        )  # fmt: skip

    if not channels_last and channels > FEW_CHANNELS:
        key = "three_interpolate", features.dtype, indices.dtype, weights.dtype, channels
        _gpu.compile_once(key, lambda: (launch(True), launch(False)))
    launch(channels_last or (channels > FEW_CHANNELS and out.numel() > FEW_VALUES))
    return out


def three_interpolate_backward(grad_output, features, indices, weights, channels_last, of_weights):
    batch, places, neighbors = indices.shape
    count, channels = points_and_channels(features, channels_last)
    check_indices_on_request("three_interpolate_backward", indices, count)
    grad, indices, weights = grad_output.contiguous(), indices.contiguous(), weights.contiguous()
    in_order = torch.are_deterministic_algorithms_enabled()
    sums_in_rows = channels_last or in_order or (channels > FEW_CHANNELS and grad.numel() > FEW_VALUES)
    shape = (batch, count, channels) if sums_in_rows else (batch, channels, count)
    sums = torch.zeros(shape, dtype=compute_dtype(features.dtype), device=features.device)
    block = min(next_power_of_2(channels), MOST_CHANNELS)
    blocks = cdiv(places, TILE // block)
    if sums.numel() and indices.numel():

        def add(in_rows):
            _add_kernel[(blocks * batch, cdiv(channels, block))](
                grad, indices, weights, sums, blocks, count, places, neighbors, channels, ROWS=channels_last,
                SUMS_IN_ROWS=in_rows, BLOCK=TILE // block, CHANNELS=block, num_warps=WARPS,
            )  # fmt: skip

        if in_order:
            order, start = places_by_point(indices.view(batch, -1), count)
            _add_in_order_kernel[(batch * count, cdiv(channels, block))](
                grad, weights, order, start, sums, places, neighbors, channels, ROWS=channels_last, CHANNELS=block,
                num_warps=1,
            )  # fmt: skip
        else:
            if not channels_last and channels > FEW_CHANNELS:
                key = "three_interpolate_backward", grad.dtype, indices.dtype, weights.dtype, channels
                _gpu.compile_once(key, lambda: (add(True), add(False)))
            add(sums_in_rows)
    grad_weights = torch.zeros(weights.shape if of_weights else 0, dtype=weights.dtype, device=weights.device)
    if grad_weights.numel() and channels and count:
        rows = features if channels_last else features.mT
        _multiply_kernel[(blocks * batch, neighbors)](
            rows.contiguous(), grad, indices, grad_weights, blocks, count, places, neighbors, channels,
            ROWS=channels_last, BLOCK=TILE // block, CHANNELS=block, REAL=_real(features), num_warps=WARPS,
        )  # fmt: skip
    sums = sums.to(features.dtype)
    return sums.mT.contiguous() if sums_in_rows and not channels_last else sums, grad_weights


def _real(features):
    return tl.float64 if features.dtype == torch.float64 else tl.float32


@_gpu.kernel(specialize=["channels"])
def _interpolate_kernel(
    source, indices, weights, out, blocks, count, places, neighbors, channels, IN_ROWS: tl.constexpr,
    OUT_ROWS: tl.constexpr, BLOCK: tl.constexpr, CHANNELS: tl.constexpr, REAL: tl.constexpr,
):  # fmt: skip
    batch, n, c, here, there = tile_of_program(blocks, places, channels, BLOCK, CHANNELS)
    total = tl.zeros([BLOCK, CHANNELS], REAL)
    for k in range(neighbors):
        at = (batch * places + n) * neighbors + k
        i = tl.load(indices + at, mask=here, other=-1)
        weight = tl.load(weights + at, mask=here, other=0.0).to(REAL)
        used = here & (i >= 0) & (i < count)
        found = address(batch, i[:, None], c[None, :], count, channels, IN_ROWS)
        value = tl.load(source + found, mask=used[:, None] & there[None, :], other=0.0).to(REAL)
        total += tl.where(used[:, None], weight[:, None] * value, 0.0)
    to = address(batch, n[:, None], c[None, :], places, channels, OUT_ROWS)
    tl.store(out + to, total.to(out.dtype.element_ty), mask=here[:, None] & there[None, :])


@_gpu.kernel(specialize=["channels"])
def _add_kernel(
    grad, indices, weights, sums, blocks, count, places, neighbors, channels, ROWS: tl.constexpr,
    SUMS_IN_ROWS: tl.constexpr, BLOCK: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    batch, n, c, here, there = tile_of_program(blocks, places, channels, BLOCK, CHANNELS)
    own = address(batch, n[:, None], c[None, :], places, channels, ROWS)
    value = tl.load(grad + own, mask=here[:, None] & there[None, :], other=0.0).to(sums.dtype.element_ty)
    for k in range(neighbors):
        at = (batch * places + n) * neighbors + k
        i = tl.load(indices + at, mask=here, other=-1)
        weight = tl.load(weights + at, mask=here, other=0.0).to(sums.dtype.element_ty)
        used = here & (i >= 0) & (i < count)
        to = address(batch, i[:, None], c[None, :], count, channels, SUMS_IN_ROWS)
        tl.atomic_add(sums + to, weight[:, None] * value, mask=used[:, None] & there[None, :], sem="relaxed")


@_gpu.kernel(specialize=["channels"])
def _add_in_order_kernel(
    grad, weights, order, start, sums, places, neighbors, channels, ROWS: tl.constexpr, CHANNELS: tl.constexpr
):
    point = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    total = tl.zeros([CHANNELS], sums.dtype.element_ty)
    for j in range(tl.load(start + point), tl.load(start + point + 1)):
        at = tl.load(order + j)
        place = at // neighbors
        batch = place // places
        own = address(batch, place - batch * places, c, places, channels, ROWS)
        value = tl.load(grad + own, mask=c < channels, other=0.0).to(sums.dtype.element_ty)
        total += tl.load(weights + at).to(sums.dtype.element_ty) * value
    tl.store(sums + point * channels + c, total, mask=c < channels)


@_gpu.kernel(specialize=["channels"])
def _multiply_kernel(
    rows, grad, indices, products, blocks, count, places, neighbors, channels, ROWS: tl.constexpr,
    BLOCK: tl.constexpr, CHANNELS: tl.constexpr, REAL: tl.constexpr,
):  # fmt: skip
    """The gradient of the weights of one neighbor of each place."""
    batch = (tl.program_id(0) // blocks).to(tl.int64)
    n = (tl.program_id(0) - tl.program_id(0) // blocks * blocks) * BLOCK + tl.arange(0, BLOCK)
    here = n < places
    at = (batch * places + n) * neighbors + tl.program_id(1)
    i = tl.load(indices + at, mask=here, other=-1)
    used = here & (i >= 0) & (i < count)
    total = tl.zeros([BLOCK], REAL)
    for first in range(0, channels, CHANNELS):
        c = first + tl.arange(0, CHANNELS)
        mask = used[:, None] & (c < channels)[None, :]
        found = address(batch, i[:, None], c[None, :], count, channels, True)
        own = address(batch, n[:, None], c[None, :], places, channels, ROWS)
        value = tl.load(rows + found, mask=mask, other=0.0).to(REAL)
        total += tl.sum(value * tl.load(grad + own, mask=mask, other=0.0).to(REAL), 1)
    tl.store(products + at, total.to(products.dtype.element_ty), mask=here)
