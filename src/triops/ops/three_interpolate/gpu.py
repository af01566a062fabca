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
from triops._gpu.rows import (
    MOST_CHANNELS,
    address,
    over_channels,
    over_places,
    places_by_point,
    planes_of,
    points_and_channels,
    rows_of,
    shares_of_programs,
    tile_of_program,
)

FEW_CHANNELS = 8  # up to which planes are read as they lie
FEW_VALUES = _gpu.block(2**19, interpreted=2**10)  # written, likewise: a transposition is a launch more


def three_interpolate(features, indices, weights, channels_last):
    batch, places, neighbors = indices.shape
    count, channels = points_and_channels(features, channels_last)
    check_indices_on_request("three_interpolate", indices, count)
    shape = (batch, places, channels) if channels_last else (batch, channels, places)
    out = torch.empty(shape, dtype=features.dtype, device=features.device)
    if out.numel() == 0:
        return out
    indices, weights = indices.contiguous(), weights.contiguous()

    def launch(in_rows):
        source = rows_of(features) if in_rows and not channels_last else features.contiguous()
        grid, blocks, options = shares_of_programs(batch, places, channels, planes=not in_rows)
        _interpolate_kernel[grid](
            source, indices, weights, out, blocks, count, places, neighbors, channels, OUT_ROWS=channels_last,
            REAL=_real(features), **options,
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
    if sums.numel() and indices.numel():

        def add(in_rows):
            grid, blocks, options = shares_of_programs(batch, places, channels, planes=not in_rows)
            _add_kernel[grid](
                grad, indices, weights, sums, blocks, count, places, neighbors, channels, ROWS=channels_last, **options
            )

        if in_order:
            block = min(next_power_of_2(channels), MOST_CHANNELS)
            order, start = places_by_point(indices.view(batch, -1), count)
            _add_in_order_kernel[(batch * count, cdiv(channels, block))](
                grad, weights, order, start, sums, places, neighbors, channels, ROWS=channels_last, CHANNELS=block,
                num_warps=1,
            )  # fmt: skip
        else:
            if not channels_last and channels > FEW_CHANNELS:
                key = "three_interpolate_backward", grad.dtype, indices.dtype, weights.dtype, channels
                as_rows = sums.view(batch, count, channels)  # of which only dtypes matter here
                _gpu.compile_once(key, lambda: (add(True), add(False), planes_of(as_rows, features.dtype)))
            add(sums_in_rows)
    grad_weights = torch.zeros(weights.shape if of_weights else 0, dtype=weights.dtype, device=weights.device)
    if grad_weights.numel() and channels and count:
        rows = features.contiguous() if channels_last else rows_of(features)
        (programs, _), blocks, options = shares_of_programs(batch, places, channels, planes=False)
        _multiply_kernel[(programs, neighbors)](
            rows, grad, indices, grad_weights, blocks, count, places, neighbors, channels, ROWS=channels_last,
            REAL=_real(features), **options,
        )  # fmt: skip
    if sums_in_rows and not channels_last:
        return planes_of(sums, features.dtype), grad_weights
    return sums.to(features.dtype), grad_weights


def _real(features):
    return tl.float64 if features.dtype == torch.float64 else tl.float32


@_gpu.kernel(specialize=["channels"])
def _interpolate_kernel(
    source, indices, weights, out, blocks, count, places, neighbors, channels, OUT_ROWS: tl.constexpr,
    REAL: tl.constexpr, PLANES: tl.constexpr, BLOCK: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """PLANES: the source lies in planes, and so does the output."""
    batch, n, c, here, there = tile_of_program(blocks, places, channels, BLOCK, CHANNELS)
    c, there = over_channels(c, PLANES), over_channels(there, PLANES)
    total = tl.zeros([CHANNELS, BLOCK] if PLANES else [BLOCK, CHANNELS], REAL)
    for k in range(neighbors):
        at = (batch * places + n) * neighbors + k
        i = tl.load(indices + at, mask=here, other=-1)
        weight = tl.load(weights + at, mask=here, other=0.0).to(REAL)
        used = over_places(here & (i >= 0) & (i < count), PLANES)
        found = address(batch, over_places(i, PLANES), c, count, channels, not PLANES)
        value = tl.load(source + found, mask=used & there, other=0.0).to(REAL)
        total += tl.where(used, over_places(weight, PLANES) * value, 0.0)
    to = address(batch, over_places(n, PLANES), c, places, channels, OUT_ROWS)
    tl.store(out + to, total.to(out.dtype.element_ty), mask=over_places(here, PLANES) & there)


@_gpu.kernel(specialize=["channels"])
def _add_kernel(
    grad, indices, weights, sums, blocks, count, places, neighbors, channels, ROWS: tl.constexpr,
    PLANES: tl.constexpr, BLOCK: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """PLANES: the sums lie in planes, and so does what is added."""
    batch, n, c, here, there = tile_of_program(blocks, places, channels, BLOCK, CHANNELS)
    c, there = over_channels(c, PLANES), over_channels(there, PLANES)
    own = address(batch, over_places(n, PLANES), c, places, channels, ROWS)
    value = tl.load(grad + own, mask=over_places(here, PLANES) & there, other=0.0).to(sums.dtype.element_ty)
    for k in range(neighbors):
        at = (batch * places + n) * neighbors + k
        i = tl.load(indices + at, mask=here, other=-1)
        weight = tl.load(weights + at, mask=here, other=0.0).to(sums.dtype.element_ty)
        used = over_places(here & (i >= 0) & (i < count), PLANES) & there
        to = address(batch, over_places(i, PLANES), c, count, channels, not PLANES)
        tl.atomic_add(sums + to, over_places(weight, PLANES) * value, mask=used, sem="relaxed")


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
    REAL: tl.constexpr, PLANES: tl.constexpr, BLOCK: tl.constexpr, CHANNELS: tl.constexpr,
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
