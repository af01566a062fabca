"""gather_points on GPU: a tile of places and channels per program, read from rows of channels.

Planes [B, C, N] of many channels are turned into rows first: rows are read in whole lines, wherever they lie, and a
tile is turned round on its way to the output. The backward adds tiles to rows by atomics, in float32 or float64; in
deterministic mode the places are sorted by point, and a program adds up those of one point in order.
"""

import torch
import triton.language as tl

from triops import _gpu
from triops._clouds import check_indices_on_request
from triops._dtypes import compute_dtype
from triops._gpu import cdiv, next_power_of_2
from triops._gpu.rows import address, places_by_point, points_and_channels, tile_of_program

FEW_CHANNELS = 8  # up to which planes are read as they lie
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
    in_rows = channels_last or channels > FEW_CHANNELS
    source = features.contiguous() if channels_last or not in_rows else features.mT.contiguous()
    block = min(next_power_of_2(channels), MOST_CHANNELS)
    blocks = cdiv(places, TILE // block)
    _gather_kernel[(blocks * batch, cdiv(channels, block))](
        source, indices.contiguous(), out, blocks, count, places, channels, IN_ROWS=in_rows, OUT_ROWS=channels_last,
        BLOCK=TILE // block, CHANNELS=block, num_warps=WARPS,
    )  # fmt: skip
    return out


def gather_points_backward(grad_output, indices, count, channels_last):
    batch, places = indices.shape
    _, channels = points_and_channels(grad_output, channels_last)
    check_indices_on_request("gather_points_backward", indices, count)
    real = compute_dtype(grad_output.dtype)
    sums = torch.zeros((batch, count, channels), dtype=real, device=grad_output.device)
    if sums.numel() and places:
        grad, indices = grad_output.contiguous(), indices.contiguous()
        block = min(next_power_of_2(channels), MOST_CHANNELS)
        if torch.are_deterministic_algorithms_enabled():
            order, start = places_by_point(indices, count)
            _add_in_order_kernel[(batch * count, cdiv(channels, block))](
                grad, order, start, sums, places, channels, ROWS=channels_last, CHANNELS=block, num_warps=1
            )
        else:
            blocks = cdiv(places, TILE // block)
            _add_kernel[(blocks * batch, cdiv(channels, block))](
                grad, indices, sums, blocks, count, places, channels, ROWS=channels_last, BLOCK=TILE // block,
                CHANNELS=block, num_warps=WARPS,
            )  # fmt: skip
    sums = sums.to(grad_output.dtype)
    return sums if channels_last else sums.mT.contiguous()


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
    grad,
    indices,
    sums,
    blocks,
    count,
    places,
    channels,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    batch, m, c, here, there = tile_of_program(blocks, places, channels, BLOCK, CHANNELS)
    i = tl.load(indices + batch * places + m, mask=here, other=-1)
    used = here & (i >= 0) & (i < count)
    at = address(batch, m[:, None], c[None, :], places, channels, ROWS)
    value = tl.load(grad + at, mask=used[:, None] & there[None, :], other=0.0).to(sums.dtype.element_ty)
    to = address(batch, i[:, None], c[None, :], count, channels, True)
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
