"""Tiles of features of points, which lie in rows [B, N, C] or in planes [B, C, N].

A tile is [places, channels], so that lanes lie along rows; where planes are read and written, [channels, places].
"""

import torch
import triton
import triton.language as tl

from triops import _gpu
from triops._gpu.maps import in_format

MOST_CHANNELS = 64  # of a tile
MOST_OF_PLANES = 16
TILE = _gpu.block(4096, interpreted=16384)
TILE_OF_PLANES = _gpu.block(1024, interpreted=16384)  # few values are read so: small tiles make more programs of them


def points_and_channels(features, in_rows):
    """Sizes of features [B, N, C], or of [B, C, N]."""
    return features.shape[1:] if in_rows else (features.shape[2], features.shape[1])


def shares_of_programs(batch, places, channels, planes):
    """-> grid, blocks of places per batch element, constants and options of a kernel. planes: on either side."""
    width = min(_gpu.next_power_of_2(channels), MOST_OF_PLANES if planes else MOST_CHANNELS)
    block = (TILE_OF_PLANES if planes else TILE) // width
    blocks = _gpu.cdiv(places, block)
    constants = {"PLANES": planes, "BLOCK": block, "CHANNELS": width, "num_warps": 4}
    return (blocks * batch, _gpu.cdiv(channels, width)), blocks, constants


def widths_of_tiles(channels, most):
    """Two widths that cover rows of channels with few lanes idle: 80 channels are 64 and 16.

    -> the first, the second or 0 for none, and the programs that cover all channels: one, up to `most` of them.
    """
    first = 1 << (max(channels, 1).bit_length() - 1)
    if first > most:
        return most, 0, _gpu.cdiv(channels, most)
    return first, 0 if channels <= first else _gpu.next_power_of_2(channels - first), 1


def rows_of(planes):
    """The memory of planes [B, C, N] as rows."""
    rows = planes.mT
    return rows if rows.is_contiguous() else in_format(planes.contiguous()[..., None], channels_last=True)


def planes_of(rows, dtype):
    """Rows [B, N, C] as planes [B, C, N] of a dtype."""
    planes = rows.mT
    target = torch.empty(planes.shape, dtype=dtype, device=rows.device)
    return in_format(planes[..., None], channels_last=False, target=target)


def places_by_point(indices, count):
    """Flat places [B * M] of indices [B, M], sorted by point, stable; where each of B * count points begins among them.

    Places with indices out of range come last.
    """
    batch = len(indices)
    valid = (indices >= 0) & (indices < count)
    points = torch.arange(batch, device=indices.device)[:, None] * count + indices.long()
    points, order = torch.where(valid, points, batch * count).view(-1).sort(stable=True)
    return order, torch.searchsorted(points, torch.arange(batch * count + 1, device=indices.device))


@triton.jit
def tile_of_program(blocks, places, channels, BLOCK: tl.constexpr, CHANNELS: tl.constexpr):
    """-> batch element, places, channels of this program of `blocks` per batch element, and which of them there are"""
    batch = tl.program_id(0) // blocks
    m = (tl.program_id(0) - batch * blocks) * BLOCK + tl.arange(0, BLOCK)
    c = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    return batch.to(tl.int64), m, c, m < places, c < channels


@triton.jit
def over_places(x, PLANES: tl.constexpr):
    """A block of places as one side of a tile."""
    if PLANES:
        return x[None, :]
    else:
        return x[:, None]


@triton.jit
def over_channels(x, PLANES: tl.constexpr):
    """A block of channels as the other side."""
    if PLANES:
        return x[:, None]
    else:
        return x[None, :]


@triton.jit
def address(batch, i, c, count, channels, ROWS: tl.constexpr):
    """Of point i and channel c in [B, count, channels], or in [B, channels, count]."""
    if ROWS:  # noqa: SIM108 - a branch of the kernel
        found = (batch * count + i.to(tl.int64)) * channels + c
    else:
        found = (batch * channels + c.to(tl.int64)) * count + i
    return found
