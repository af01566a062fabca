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
from triops._gpu.rows import address, places_by_point, points_and_channels, tile_of_program

FEW_CHANNELS = 8  # up to which planes are read as they lie
FEW_VALUES = _gpu.block(2**21, interpreted=2**10)  # read or added, likewise: a transposition is a launch more
MOST_CHANNELS = 64  # of a tile
TILE = _gpu.block(4096, interpreted=16384)
WARPS = 4


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
    block = min(next_power_of_2(channels), MOST_CHANNELS)
    blocks = cdiv(places, TILE // block)

    def launch(in_rows):
        source = features.mT if in_rows and not channels_last else features
        _gather_kernel[(blocks * batch, cdiv(channels, block))](
            source.contiguous(), indices, out, blocks, count, places, channels, IN_ROWS=in_rows,
            OUT_ROWS=channels_last, BLOCK=TILE // block, CHANNELS=block, num_warps=WARPS,
        )  # fmt: skip

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
        block = min(next_power_of_2(channels), MOST_CHANNELS)
        blocks = cdiv(places, TILE // block)

        def add(in_rows):
            _add_kernel[(blocks * batch, cdiv(channels, block))](
                grad, indices, sums, blocks, count, places, channels, ROWS=channels_last, SUMS_IN_ROWS=in_rows,
                BLOCK=TILE // block, CHANNELS=block, num_warps=WARPS,
            )  # fmt: skip

        if in_order:
            order, start = places_by_point(indices, count)
            _add_in_order_kernel[(batch * count, cdiv(channels, block))](
                grad, order, start, sums, places, channels, ROWS=channels_last, CHANNELS=block, num_warps=1
            )
        else:
            if not channels_last and channels > FEW_CHANNELS:
                key = "gather_points_backward", grad.dtype, indices.dtype, channels
                _gpu.compile_once(key, lambda: (add(True), add(False)))
            add(sums_in_rows)
    sums = sums.to(grad_output.dtype)
    return sums.mT.contiguous() if sums_in_rows and not channels_last else sums


@_gpu.kernel(specialize=["channels"])
def _gather_kernel(
    source, indices, out, blocks, count, places, channels, IN_ROWS: tl.constexpr, OUT_ROWS: tl.constexpr,
    BLOCK: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    batch, m, c, here, there = tile_of_program(blocks, places, channels, BLOCK, CHANNELS)
    i = tl.load(indices + batch * places + m, mask=here, other=-1)
    used = here & (i >= 0) & (i < count)
    at = address(batch, i[:, None], c[None, :], count, channels, IN_ROWS)
    value = tl.load(source + at, mask=used[:, None] & there[None, :], other=0.0)
    to = address(batch, m[:, None], c[None, :], places, channels, OUT_ROWS)
    tl.store(out + to, value, mask=here[:, None] & there[None, :])


@_gpu.kernel(specialize=["channels"])
def _add_kernel(
    grad, indices, sums, blocks, count, places, channels, ROWS: tl.constexpr, SUMS_IN_ROWS: tl.constexpr,
    BLOCK: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    batch, m, c, here, there = tile_of_program(blocks, places, channels, BLOCK, CHANNELS)
    i = tl.load(indices + batch * places + m, mask=here, other=-1)
    used = here & (i >= 0) & (i < count)
    at = address(batch, m[:, None], c[None, :], places, channels, ROWS)
    value = tl.load(grad + at, mask=used[:, None] & there[None, :], other=0.0).to(sums.dtype.element_ty)
    to = address(batch, i[:, None], c[None, :], count, channels, SUMS_IN_ROWS)
    tl.atomic_add(sums + to, value, mask=used[:, None] & there[None, :], sem="relaxed")


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
