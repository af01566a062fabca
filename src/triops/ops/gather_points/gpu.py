"""gather_points on GPU: a tile of places and channels per program.

Planes [B, C, N] of many channels are transposed into rows first where there is much to read: rows are read in whole
lines, wherever they lie, and a tile is transposed on its way to the output. The backward adds tiles by atomics, in
float32 or float64, to rows or planes by the same rule; in deterministic mode the places are sorted by point, and a
program adds up those of one point in order.
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
FEW_VALUES = _gpu.block(2**21, interpreted=2**10)  # read or added, likewise: a transposition is a launch more


def gather_points(features, indices, channels_last):
    batch, places = indices.shape
    count, channels = points_and_channels(features, channels_last)
    check_indices_on_request("gather_points", indices, count)
    shape = (batch, places, channels) if channels_last else (batch, channels, places)
    out = torch.empty(shape, dtype=features.dtype, device=features.device)
    if out.numel() == 0:
        return out
    if count == 0:
        return out.zero_()
    indices = indices.contiguous()

    def launch(in_rows):
        source = rows_of(features) if in_rows and not channels_last else features.contiguous()
        grid, blocks, options = shares_of_programs(batch, places, channels, planes=not in_rows)
        _gather_kernel[grid](source, indices, out, blocks, count, places, channels, OUT_ROWS=channels_last, **options)

    if not channels_last and channels > FEW_CHANNELS:
        key = "gather_points", features.dtype, indices.dtype, channels
        _gpu.compile_once(key, lambda: (launch(True), launch(False)))
    launch(channels_last or (channels > FEW_CHANNELS and out.numel() > FEW_VALUES))
    return out


def gather_points_backward(grad_output, indices, count, channels_last):
    batch, places = indices.shape
    _, channels = points_and_channels(grad_output, channels_last)
    check_indices_on_request("gather_points_backward", indices, count)
    in_order = torch.are_deterministic_algorithms_enabled()
    sums_in_rows = channels_last or in_order or (channels > FEW_CHANNELS and grad_output.numel() > FEW_VALUES)
    shape = (batch, count, channels) if sums_in_rows else (batch, channels, count)
    sums = torch.zeros(shape, dtype=compute_dtype(grad_output.dtype), device=grad_output.device)
    if sums.numel() and places:
        grad, indices = grad_output.contiguous(), indices.contiguous()

        def add(in_rows):
            grid, blocks, options = shares_of_programs(batch, places, channels, planes=not in_rows)
            _add_kernel[grid](grad, indices, sums, blocks, count, places, channels, ROWS=channels_last, **options)

        if in_order:
            block = min(next_power_of_2(channels), MOST_CHANNELS)
            order, start = places_by_point(indices, count)
            _add_in_order_kernel[(batch * count, cdiv(channels, block))](
                grad, order, start, sums, places, channels, ROWS=channels_last, CHANNELS=block, num_warps=1
            )
        else:
            if not channels_last and channels > FEW_CHANNELS:
                key = "gather_points_backward", grad.dtype, indices.dtype, channels
                as_rows = sums.view(batch, count, channels)  # of which only dtypes matter here
                _gpu.compile_once(key, lambda: (add(True), add(False), planes_of(as_rows, grad.dtype)))
            add(sums_in_rows)
    if sums_in_rows and not channels_last:
        return planes_of(sums, grad_output.dtype)
    return sums.to(grad_output.dtype)


@_gpu.kernel(specialize=["channels"])
def _gather_kernel(
    source, indices, out, blocks, count, places, channels, OUT_ROWS: tl.constexpr, PLANES: tl.constexpr,
    BLOCK: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """PLANES: the source lies in planes, and so does the output."""
    batch, m, c, here, there = tile_of_program(blocks, places, channels, BLOCK, CHANNELS)
    i = tl.load(indices + batch * places + m, mask=here, other=-1)
    used = over_places(here & (i >= 0) & (i < count), PLANES)
    here, there, c = over_places(here, PLANES), over_channels(there, PLANES), over_channels(c, PLANES)
    at = address(batch, over_places(i, PLANES), c, count, channels, not PLANES)
    value = tl.load(source + at, mask=used & there, other=0.0)
    to = address(batch, over_places(m, PLANES), c, places, channels, OUT_ROWS)
    tl.store(out + to, value, mask=here & there)


@_gpu.kernel(specialize=["channels"])
def _add_kernel(
    grad, indices, sums, blocks, count, places, channels, ROWS: tl.constexpr, PLANES: tl.constexpr,
    BLOCK: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """PLANES: the sums lie in planes, and so does what is added."""
    batch, m, c, here, there = tile_of_program(blocks, places, channels, BLOCK, CHANNELS)
    i = tl.load(indices + batch * places + m, mask=here, other=-1)
    c = over_channels(c, PLANES)
    used = over_places(here & (i >= 0) & (i < count), PLANES) & over_channels(there, PLANES)
    at = address(batch, over_places(m, PLANES), c, places, channels, ROWS)
    value = tl.load(grad + at, mask=used, other=0.0).to(sums.dtype.element_ty)
    to = address(batch, over_places(i, PLANES), c, count, channels, not PLANES)
    tl.atomic_add(sums + to, value, mask=used, sem="relaxed")


@_gpu.kernel(specialize=["channels"])
def _add_in_order_kernel(
    grad, order, start, sums, places, channels, ROWS: tl.constexpr, CHANNELS: tl.constexpr
):  # fmt: skip
    point = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    total = tl.zeros([CHANNELS], sums.dtype.element_ty)
    for k in range(tl.load(start + point), tl.load(start + point + 1)):
        place = tl.load(order + k)
        batch = place // places
        at = address(batch, place - batch * places, c, places, channels, ROWS)
        total += tl.load(grad + at, mask=c < channels, other=0.0).to(sums.dtype.element_ty)
    tl.store(sums + point * channels + c, total, mask=c < channels)
