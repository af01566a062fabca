"""Between rows and grids on GPU: a program takes a tile of sites through all channels, so that every output is written
once, zeros included, in whole lines of memory.

Rows claim their sites by an atomic minimum of unsigned numbers, of which -1 is the largest.
"""

import torch
import triton.language as tl

from triops import _gpu
from triops.ops.sparse_dense import as_three, dense_shape

CLAIM_BLOCK = _gpu.block(256, interpreted=4096)
SITES = _gpu.block(64, interpreted=1024)  # sites per program
CHANNELS = 64  # at a time, at most
BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def site_rows(indices, batch_size, spatial_shape):
    rows = torch.full((batch_size, *spatial_shape), -1, dtype=torch.int32, device=indices.device)
    count = indices.shape[0]
    if count > 0 and rows.numel() > 0:
        sizes = [batch_size, *spatial_shape]
        _claim_kernel[(_gpu.cdiv(count, CLAIM_BLOCK),)](
            indices.contiguous(), rows, count, *sizes, *[1] * (5 - len(sizes)),
            AXES=len(sizes), BLOCK=CLAIM_BLOCK, num_warps=4,
        )  # fmt: skip
    return rows


def sparse_to_dense(features, rows, channels_first):
    out = torch.empty(dense_shape(rows, features.shape[1], channels_first), dtype=features.dtype, device=rows.device)
    _copy(features.contiguous(), rows, out, channels_first, to_dense=True)
    return out


def sparse_from_dense(dense, rows, count, channels_first):
    channels = dense.shape[1 if channels_first else -1]
    out = torch.zeros((count, channels), dtype=dense.dtype, device=dense.device)
    _copy(out, rows, dense.contiguous(), channels_first, to_dense=False)
    return out


def _copy(features, rows, dense, channels_first, to_dense):
    if dense.numel() == 0:
        return
    batch, sites, channels = as_three(dense, rows, channels_first)
    bits = BITS[features.element_size()]
    _copy_kernel[(batch * _gpu.cdiv(sites, SITES),)](
        features.view(bits), rows.contiguous(), dense.view(bits), features.shape[0], sites, channels,
        FIRST=channels_first, TO_DENSE=to_dense, SITES=SITES, CHANNELS=min(_gpu.next_power_of_2(channels), CHANNELS),
        num_warps=4,
    )  # fmt: skip


@_gpu.kernel
def _claim_kernel(
    indices, rows, count, size_0, size_1, size_2, size_3, size_4, AXES: tl.constexpr, BLOCK: tl.constexpr
):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = i < count
    sizes = (size_0, size_1, size_2, size_3, size_4)
    flat = tl.zeros((BLOCK,), tl.int64)
    first = i.to(tl.int64) * AXES
    exists = i < count
    for axis in tl.static_range(AXES):
        place = tl.load(indices + first + axis, exists, -1).to(tl.int64)
        inside &= (place >= 0) & (place < sizes[axis])
        flat = flat * sizes[axis] + place
    tl.atomic_min(rows.to(tl.pointer_type(tl.uint32)) + flat, i.to(tl.uint32), inside, sem="relaxed")


@_gpu.kernel(specialize=("channels",))
def _copy_kernel(
    features, rows, dense, count, sites, channels,
    FIRST: tl.constexpr, TO_DENSE: tl.constexpr, SITES: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    tiles = (sites + SITES - 1) // SITES
    batch = (tl.program_id(0) // tiles).to(tl.int64)
    site = (tl.program_id(0) % tiles).to(tl.int64) * SITES + tl.arange(0, SITES)
    exists = site < sites
    row = tl.load(rows + batch * sites + site, exists, -1)
    named = (row >= 0) & (row < count)
    row = row.to(tl.int64)
    for begin in range(0, channels, CHANNELS):
        channel = begin + tl.arange(0, CHANNELS)
        known = channel < channels
        at_row = features + row[:, None] * channels + channel[None, :]
        mask = named[:, None] & known[None, :]
        if FIRST:
            # tiles lie with the channels along rows, and with the sites along them in the grid: transposed on the way
            at_site = dense + (batch * channels + channel[:, None]) * sites + site[None, :]
            if TO_DENSE:
                value = tl.load(at_row, mask, 0)
                tl.store(at_site, tl.trans(value), known[:, None] & exists[None, :])
            else:
                value = tl.load(at_site, known[:, None] & named[None, :], 0)
                tl.store(at_row, tl.trans(value), mask)
        else:
            at_site = dense + (batch * sites + site[:, None]) * channels + channel[None, :]
            if TO_DENSE:
                value = tl.load(at_row, mask, 0)
                tl.store(at_site, value, exists[:, None] & known[None, :])
            else:
                tl.store(at_row, tl.load(at_site, mask, 0), mask)
