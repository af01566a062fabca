"""The convolution as a module."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from triops.compat.torchsparse import _generation
from triops.compat.torchsparse._arguments import named_arguments
from triops.compat.torchsparse.nn import functional
from triops.compat.torchsparse.tensor import SparseTensor
from triops.compat.torchsparse.utils.utils import make_ntuple

__all__ = ["Conv3d"]

_ORDER = {
    _generation.OLD: ("dilation", "bias", "transposed"),
    _generation.NEW: ("padding", "dilation", "bias", "transposed", "generative", "config"),
}
_ALL = set(_ORDER[_generation.NEW])


class Conv3d(nn.Module):
    """A convolution of sparse tensors: see `conv3d`.

    After `stride` come `dilation`, `bias`, `transposed` in torchsparse 1.4, and `padding`, `dilation`, `bias`,
    `transposed`, `generative`, `config` in 2.1. Two or more of them without names tell by the second, which is a bool
    in 1.4 alone; of a single one see `triops.compat.torchsparse.use`.
    """

    def __init__(
        self, in_channels: int, out_channels: int, kernel_size: Any = 3, stride: Any = 1, *args: Any, **kwargs: Any
    ) -> None:
        super().__init__()
        generation = _generation.of_caller()
        if len(args) > 1:
            generation = _generation.OLD if isinstance(args[1], bool) else _generation.NEW
        more = named_arguments("Conv3d", _ORDER[generation], args, kwargs)
        if not more.keys() <= _ALL:
            raise TypeError(f"Conv3d: unexpected arguments {', '.join(sorted(more.keys() - _ALL))}")
        self.in_channels = in_channels
        self.out_channels = out_channels
        self.kernel_size = make_ntuple(kernel_size, ndim=3)
        self.stride = make_ntuple(stride, ndim=3)
        self.dilation = more.get("dilation", 1)
        axes = zip(make_ntuple(more.get("padding", 0), ndim=3), self.kernel_size, self.stride, strict=True)
        self.padding = tuple(k // 2 if k % 2 == 1 and s == 1 else p for p, k, s in axes)
        self.transposed = more.get("transposed", False)
        self.generative = more.get("generative", False)
        if self.generative and not self.transposed:
            raise ValueError("Conv3d: a generative convolution must be transposed, got transposed=False")
        self._config = more.get("config")
        self.kernel_volume = math.prod(self.kernel_size)
        if self.kernel_volume > 1 or max(self.stride) > 1:
            self.kernel = nn.Parameter(torch.zeros(self.kernel_volume, in_channels, out_channels))
        else:
            self.kernel = nn.Parameter(torch.zeros(in_channels, out_channels))
        if more.get("bias", False):
            self.bias = nn.Parameter(torch.empty(out_channels))
        else:
            self.register_parameter("bias", None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        fan = (self.out_channels if self.transposed else self.in_channels) * self.kernel_volume
        bound = 1 / math.sqrt(fan)
        nn.init.uniform_(self.kernel, -bound, bound)
        if self.bias is not None:
            nn.init.uniform_(self.bias, -bound, bound)

    def extra_repr(self) -> str:
        said = f"{self.in_channels}, {self.out_channels}, kernel_size={self.kernel_size}"
        said += f", stride={self.stride}" if self.stride != (1, 1, 1) else ""
        said += f", dilation={self.dilation}" if self.dilation != 1 else ""
        said += ", bias=False" if self.bias is None else ""
        said += ", transposed=True" if self.transposed else ""
        return said + (", generative=True" if self.generative else "")

    def forward(self, input: SparseTensor) -> SparseTensor:
        return functional.conv3d(
            input, self.kernel, kernel_size=self.kernel_size, bias=self.bias, stride=self.stride, padding=self.padding,
            dilation=self.dilation, transposed=self.transposed, generative=self.generative, config=self._config,
            training=self.training,
        )  # fmt: skip
