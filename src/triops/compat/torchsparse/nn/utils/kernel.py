"""The offsets of a kernel, in the order of its weights."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from triops.compat.torchsparse import _sites
from triops.compat.torchsparse.utils.utils import make_ntuple

__all__ = ["get_kernel_offsets"]


def get_kernel_offsets(size: Any, stride: Any = 1, dilation: Any = 1, device: Any = "cpu") -> Tensor:
    """int32 [K, 3]. z goes fastest where K is even; where it is odd x does, as in MinkowskiEngine.

    >>> get_kernel_offsets((3, 1, 1)).tolist(), get_kernel_offsets((1, 2, 2), stride=2).tolist()
    ([[-1, 0, 0], [0, 0, 0], [1, 0, 0]], [[0, 0, 0], [0, 0, 2], [0, 2, 0], [0, 2, 2]])
    """
    kernel = make_ntuple(size, ndim=3)
    step = tuple(s * d for s, d in zip(make_ntuple(stride, ndim=3), make_ntuple(dilation, ndim=3), strict=True))
    device = torch.device(device)
    if math.prod(kernel) % 2 == 0:
        return _sites.kernel_offsets(kernel, _sites.centered(kernel, step), step, device)
    kernel, step = kernel[::-1], step[::-1]
    return _sites.kernel_offsets(kernel, _sites.centered(kernel, step), step, device).flip(1)
