"""Shifts of groups of channels along time, as TIN has them."""

from __future__ import annotations

import torch
from torch import Tensor


def temporal_shift(input: Tensor, shift: Tensor) -> Tensor:
    """input [N, T, C, S] -> the same with frame t of channel group g at t + shift[n, g]; shift: [N, G].

    Frames that are shifted out are gone, and zeros come in.
    """
    frames, channels = input.shape[1:3]
    per_channel = shift.long().repeat_interleave(channels // shift.shape[1], 1)[:, None, :, None]
    source = torch.arange(frames, device=input.device)[:, None, None] - per_channel  # [N, T, C, 1]
    inside = (source >= 0) & (source < frames)
    moved = input.gather(1, torch.where(inside, source, 0).expand_as(input))
    return torch.where(inside, moved, 0)
