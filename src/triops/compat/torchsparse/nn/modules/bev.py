"""From voxels to the plane seen from above.

`dim` is 0, 1 or 2: which of x, y, z is the height. The first of the remaining two is the first axis of the plane.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from triops.compat.torchsparse import _generation
from triops.compat.torchsparse.tensor import SparseTensor
from triops.compat.torchsparse.utils.tensor_cache import cache_of_new_tensor

__all__ = ["ToBEVConvolution", "ToBEVHeightCompression", "ToBEVReduction", "ToDenseBEVConvolution"]


def _cells(input: SparseTensor, offset: Tensor | None = None) -> Tensor:
    """int64 [N, 3]: x, y and z in strides of the tensor."""
    place: Tensor = input.coords[:, input.axes].long()
    if offset is not None:
        place = place - offset[0, :3].to(place)
    if input.generation == _generation.NEW:
        return place
    return torch.div(place, torch.tensor(input.stride, device=place.device), rounding_mode="floor")


def _sum_at(feats: Tensor, index: Tensor, sizes: Sequence[int]) -> Tensor:
    """[*sizes, C]: the sum of the rows at each index [N, len(sizes)]; places outside are left out."""
    flat, inside = index[:, 0], (index[:, 0] >= 0) & (index[:, 0] < sizes[0])
    for axis, size in enumerate(sizes[1:], 1):
        flat = flat * size + index[:, axis]
        inside &= (index[:, axis] >= 0) & (index[:, axis] < size)
    total = math.prod(sizes)
    made = feats.new_zeros((total + 1, feats.shape[1])).index_add(0, torch.where(inside, flat, total), feats)
    return made[:total].view(*sizes, feats.shape[1])


def _batch_size(input: SparseTensor) -> int:
    return int(input.batch.max()) + 1


def _sparse_sum(input: SparseTensor, feats: Tensor, coords: Tensor, stride: tuple[int, ...]) -> SparseTensor:
    """The sum of the rows of each site, in ascending order of its columns."""
    sites, row = torch.unique(coords, dim=0, return_inverse=True)
    total = feats.new_zeros((sites.shape[0], feats.shape[1])).index_add(0, row, feats)
    made = input.like(total, sites, stride)
    made._caches = cache_of_new_tensor()
    return made


def _flat(input: SparseTensor, dim: int) -> Tensor:
    """The coordinates with 0 for the height."""
    coords: Tensor = input.coords.clone()
    coords[:, input.axes][:, dim] = 0
    return coords


class ToBEVReduction(nn.Module):
    """The mean over the height, as a sparse tensor."""

    def __init__(self, dim: int = 1) -> None:
        super().__init__()
        self.dim = dim

    def extra_repr(self) -> str:
        return f"dim = {self.dim}"

    def forward(self, input: SparseTensor) -> SparseTensor:
        counted = torch.cat([torch.ones_like(input.feats[:, :1]), input.feats], 1)
        made = _sparse_sum(input, counted, _flat(input, self.dim), input.stride)
        made.feats = made.feats[:, 1:] / made.feats[:, :1]
        return made


class _ByHeight(nn.Module):
    """A matrix for each height."""

    def __init__(self, in_channels: int, out_channels: int, n_kernels: int, dim: int, bias: bool) -> None:
        super().__init__()
        self.in_channels = in_channels
        self.out_channels = out_channels
        self.n_kernels = n_kernels
        self.dim = dim
        self.kernel = nn.Parameter(torch.zeros(n_kernels, in_channels, out_channels))
        self.bias: Any = nn.Parameter(torch.zeros(1, out_channels)) if bias else 0
        self.reset_parameters()

    def reset_parameters(self) -> None:
        bound = 1 / math.sqrt(self.in_channels)
        nn.init.uniform_(self.kernel, -bound, bound)

    def extra_repr(self) -> str:
        return f"in_channels={self.in_channels}, out_channels={self.out_channels}, n_kernels={self.n_kernels}"

    def product(self, feats: Tensor, height: Tensor) -> Tensor:
        """[N, Cout]: each row by the matrix of its height."""
        if feats.shape[0] and not bool(((height >= 0) & (height < self.n_kernels)).all()):
            low, high = int(height.min()), int(height.max())
            raise IndexError(f"{type(self).__name__}: heights must be in 0..{self.n_kernels - 1}, got {low}..{high}")
        made: Tensor = feats.new_zeros((feats.shape[0], self.out_channels))
        for number in range(self.n_kernels):  # no [N, Cin, Cout] in memory
            rows = (height == number).nonzero()[:, 0]
            made = made.index_add(0, rows, feats[rows] @ self.kernel[number])
        made = made + self.bias
        return made


class ToDenseBEVConvolution(_ByHeight):
    """[B, Cout, *plane]: the rows of all heights, each by the matrix of its height, added up.

    Args:
        shape: the extents of x, y, z.
        offset: the x, y, z that the plane begins at.
        dim: which of x, y, z is the height.
    """

    def __init__(
        self, in_channels: int, out_channels: int, shape: Any, offset: Sequence[int] = (0, 0, 0), dim: int = 1,
        bias: bool = False,
    ) -> None:  # fmt: skip
        sizes = torch.as_tensor(shape).int()
        super().__init__(in_channels, out_channels, int(sizes[dim]), dim, bias)
        self.register_buffer("offset", torch.tensor([[*offset, 0]], dtype=torch.int32))
        self.register_buffer("shape", sizes)
        self.bev_dims = [axis for axis in range(3) if axis != dim]
        self.bev_shape = sizes[self.bev_dims]

    def forward(self, input: SparseTensor) -> Tensor:
        feats = self.product(input.feats, _cells(input)[:, self.dim])
        plane = _cells(input, self.offset)[:, self.bev_dims]  # type: ignore[arg-type]
        index = torch.cat([input.batch[:, None].long(), plane], 1)
        return _sum_at(feats, index, [_batch_size(input), *self.bev_shape.tolist()]).permute(0, 3, 1, 2).contiguous()


class ToBEVConvolution(_ByHeight):
    """The same as a sparse tensor, whose sites may be `stride` times as far apart."""

    def __init__(
        self, in_channels: int, out_channels: int, n_kernels: int, stride: int = 1, dim: int = 1, bias: bool = False
    ) -> None:
        super().__init__(in_channels, out_channels, n_kernels, dim, bias)
        self.stride = stride

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, stride={self.stride}"

    def forward(self, input: SparseTensor) -> SparseTensor:
        feats = self.product(input.feats, _cells(input)[:, self.dim])
        coords = _flat(input, self.dim)
        coarse = tuple(s * self.stride for s in input.stride)
        if self.stride > 1:
            new = input.generation == _generation.NEW
            cell = torch.tensor([self.stride] * 3 if new else coarse, dtype=coords.dtype, device=coords.device)
            places = torch.div(coords[:, input.axes], cell, rounding_mode="floor")
            coords[:, input.axes] = places if new else places * cell
        return _sparse_sum(input, feats, coords, coarse)


class ToBEVHeightCompression(nn.Module):
    """[B, heights * C, *plane]: the channels of all heights, one height after the other.

    Args:
        channels: C.
        shape: the extents of x, y, z.
        offset: the x, y, z that the grid begins at.
        dim: which of x, y, z is the height. Sites above the last one count to it, below the first to that.
    """

    def __init__(self, channels: int, shape: Any, offset: Sequence[int] = (0, 0, 0), dim: int = 1) -> None:
        super().__init__()
        self.channels = channels
        sizes = torch.as_tensor(shape).int()
        self.register_buffer("offset", torch.tensor([[*offset, 0]], dtype=torch.int32))
        self.register_buffer("shape", sizes)
        self.dim = dim
        self.bev_dims = [axis for axis in range(3) if axis != dim]
        self.bev_shape = sizes[self.bev_dims]
        self.heights = int(sizes[dim])

    def extra_repr(self) -> str:
        return f"channels={self.channels}"

    def forward(self, input: SparseTensor) -> Tensor:
        cells = _cells(input, self.offset)  # type: ignore[arg-type]
        height = cells[:, self.dim].clamp(0, self.heights - 1)
        index = torch.cat([input.batch[:, None].long(), cells[:, self.bev_dims], height[:, None]], 1)
        made = _sum_at(input.feats, index, [_batch_size(input), *self.bev_shape.tolist(), self.heights])
        return made.flatten(3).permute(0, 3, 1, 2).contiguous()
