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
    entry = _entries(input, mask_height, mask_width, half_height, half_width)
    reached = entry < input.shape[1]
    values = input.gather(1, torch.where(reached, entry, 0).expand(len(input), -1, -1, -1))
    attention = torch.where(reached, values, 0)
    return attention if collect else _of_the_other_pixel(attention)


def psa_mask_backward(
    grad: Tensor, collect: bool, mask_height: int, mask_width: int, half_height: int, half_width: int
) -> Tensor:
    """Gradients [N, H * W, H, W] of the attention -> [N, MH * MW, H, W] of the masks.

    An entry of a mask speaks of one pixel at most, so that nothing has to be added up.
    """
    n, _, h, w = grad.shape
    entry = _entries(grad, mask_height, mask_width, half_height, half_width).expand(n, -1, -1, -1)
    of_mask = grad.new_zeros(n, mask_height * mask_width + 1, h, w)
    return of_mask.scatter_(1, entry, grad if collect else _of_the_other_pixel(grad))[:, :-1]


def _of_the_other_pixel(attention: Tensor) -> Tensor:
    """Attention [N, H * W, H, W] with the two pixels of each entry exchanged, a view."""
    n, pixels, h, w = attention.shape
    return attention.flatten(2).transpose(1, 2).view(n, pixels, h, w)


def _entries(maps: Tensor, mask_height: int, mask_width: int, half_height: int, half_width: int) -> Tensor:
    """[1, H * W, H, W], of pixels q and p -> which entry of the mask of p stands for q, or one behind the last."""
    h, w = maps.shape[2:]
    row = _offsets(h, half_height, maps.device)[:, None, :, None]  # [H, 1, H, 1]
    column = _offsets(w, half_width, maps.device)[None, :, None, :]  # [1, W, 1, W]
    reached = (row >= 0) & (row < mask_height) & (column >= 0) & (column < mask_width)
    return torch.where(reached, row * mask_width + column, mask_height * mask_width).view(1, h * w, h, w)


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
    place = _places(indices)  # the last column is cut off below
    source = input.reshape(o, 1, i, entries).expand(o, rotations, i, entries)
    turned = input.new_zeros(o, rotations, i, entries + 1)
    turned = turned.scatter(3, place[None, :, None].expand_as(source), source)
    return turned[..., :entries].reshape(o * rotations, i * a, h, w)


def active_rotated_filter_backward(grad: Tensor, indices: Tensor) -> Tensor:
    """Gradients [O * R, I * A, H, W] of the turned filters -> [O, I, A, H, W] of the filters."""
    a, h, w, rotations = indices.shape
    entries = a * h * w
    turned = grad.reshape(grad.shape[0] // rotations, rotations, grad.shape[1] // a, entries)
    place = _places(indices)[None, :, None]
    own = turned.gather(3, place.clamp(max=entries - 1).expand_as(turned))
    return torch.where(place < entries, own, 0).sum(1).view(len(own), -1, a, h, w)


def _places(indices: Tensor) -> Tensor:
    """[R, A * H * W]: where each entry goes, counted from 0; one that goes nowhere, to behind the last."""
    entries = indices.shape[:-1].numel()
    place = indices.reshape(entries, indices.shape[-1]).t().long() - 1
    return torch.where((place >= 0) & (place < entries), place, entries)
