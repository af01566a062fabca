"""Names of `spconv.pytorch.cppcore`: from torch to cumm's tensors, and the current stream."""

from __future__ import annotations

import torch

from triops.spconv.cumm import tensorview as tv


def torch_tensor_to_tv(ten: torch.Tensor) -> tv.Tensor:
    """A tensor of `cumm.tensorview` that shares its memory."""
    return tv.Tensor(ten.detach())


def get_current_stream() -> int:
    """The address of the current CUDA stream; 0 where there is no GPU."""
    return int(torch.cuda.current_stream().cuda_stream) if torch.cuda.is_available() else 0


def get_arch() -> tuple[int, int]:
    """The compute capability of the current GPU; (0, 0) where there is none."""
    return torch.cuda.get_device_capability() if torch.cuda.is_available() else (0, 0)


__all__ = ["get_arch", "get_current_stream", "torch_tensor_to_tv"]
