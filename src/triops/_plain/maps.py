"""Rearrangements of feature maps and filters: point-wise spatial attention, masked convolution, rotated filters."""

from __future__ import annotations

import torch
from torch import Tensor


def psa_mask(
    input: Tensor, collect: bool, mask_height: int, mask_width: int, half_height: int, half_width: int
) -> Tensor:
    """Masks [N, MH * MW, H, W], each centred on its own pixel -> attention [N, H * W, H, W] between all pixels.

    collect: entry (q, p) is what the mask of pixel p says of pixel q. Otherwise it is what that of q says of p.
    Pixels that a mask does not reach get 0.
    """
    n, _, h, w = input.shape
    row = _offsets(h, half_height, input.device)[:, None, :, None]  # [H, 1, H, 1]
    column = _offsets(w, half_width, input.device)[None, :, None, :]  # [1, W, 1, W]
    reached = (row >= 0) & (row < mask_height) & (column >= 0) & (column < mask_width)
    entry = torch.where(reached, row * mask_width + column, 0).view(1, h * w, h, w)
    values = input.gather(1, entry.expand(n, -1, -1, -1))
    attention = torch.where(reached.view(1, h * w, h, w), values, 0)
    return attention if collect else attention.view(n, h * w, h * w).transpose(1, 2).reshape(n, h * w, h, w)


def _offsets(size: int, half: int, device: torch.device) -> Tensor:
    """[q, p] -> which entry of the mask of pixel p stands for pixel q, along one axis."""
    pixels = torch.arange(size, device=device)
    return pixels[:, None] - pixels + half


def masked_columns(
    image: Tensor, rows: Tensor, columns: Tensor, kernel_h: int, kernel_w: int, pad_h: int, pad_w: int
) -> Tensor:
    """The windows [C * KH * KW, M] of an image [C, H, W] at M output pixels of a convolution, 0 where it is padded."""
    c, h, w = image.shape
    y = (rows[:, None] - pad_h + torch.arange(kernel_h, device=image.device)).t()[:, None]  # [KH, 1, M]
    x = (columns[:, None] - pad_w + torch.arange(kernel_w, device=image.device)).t()[None]  # [1, KW, M]
    inside = (y >= 0) & (y < h) & (x >= 0) & (x < w)
    values = image.flatten(1)[:, torch.where(inside, y * w + x, 0)]
    return torch.where(inside, values, 0).reshape(c * kernel_h * kernel_w, len(rows))


def active_rotated_filter(input: Tensor, indices: Tensor) -> Tensor:
    """Filters [O, I, A, H, W] for A orientations, turned R times -> [O * R, I * A, H, W].

    indices [A, H, W, R]: where each entry goes under each rotation, counted from 1.
    """
    o, i, a, h, w = input.shape
    rotations, entries = indices.shape[-1], a * h * w
    place = indices.reshape(entries, rotations).t().long() - 1
    place = torch.where((place >= 0) & (place < entries), place, entries)  # a column that is cut off below
    source = input.reshape(o, 1, i, entries).expand(o, rotations, i, entries)
    turned = input.new_zeros(o, rotations, i, entries + 1)
    turned = turned.scatter(3, place[None, :, None].expand_as(source), source)
    return turned[..., :entries].reshape(o * rotations, i * a, h, w)
