"""Tiles of features of points, which lie in rows [B, N, C] or in planes [B, C, N]."""

import torch
import triton
import triton.language as tl


def points_and_channels(features, in_rows):
    """Sizes of features [B, N, C], or of [B, C, N]."""
    return features.shape[1:] if in_rows else (features.shape[2], features.shape[1])


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
def address(batch, i, c, count, channels, ROWS: tl.constexpr):
    """Of point i and channel c in [B, count, channels], or in [B, channels, count]."""
    if ROWS:  # noqa: SIM108 - a branch of the kernel
        found = (batch * count + i.to(tl.int64)) * channels + c
    else:
        found = (batch * channels + c.to(tl.int64)) * count + i
    return found
