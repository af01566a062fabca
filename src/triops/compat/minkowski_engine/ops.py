"""Linear layers, tensors together, dense grids: `MinkowskiEngine.MinkowskiOps`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from triops.compat.minkowski_engine.common import MinkowskiModuleBase
from triops.compat.minkowski_engine.functional import _wrap_tensor
from triops.compat.minkowski_engine.sparse_tensor import SparseTensor
from triops.compat.minkowski_engine.tensor_field import TensorField


class MinkowskiLinear(nn.Module):
    """torch's Linear, `linear`, of the features."""

    def __init__(self, in_features: int, out_features: int, bias: bool = True) -> None:
        super().__init__()
        self.linear = nn.Linear(in_features, out_features, bias=bias)

    def forward(self, input: Any) -> Any:
        return _wrap_tensor(input, self.linear(input.F))

    def __repr__(self) -> str:
        linear = self.linear
        return (
            f"{type(self).__name__}(in_features={linear.in_features}, out_features={linear.out_features}, "
            f"bias={linear.bias is not None})"
        )


def _together(name: str, tensors: tuple[Any, ...], function: Callable[[list[Tensor]], Tensor]) -> Any:
    """A function of the features of tensors at the same places, given one by one or as a list."""
    several = tensors[0] if len(tensors) == 1 else tensors
    if not isinstance(several, (list, tuple)) or len(several) < 2:
        raise ValueError(f"MinkowskiEngine.{name}: expected two tensors or more, got {tensors!r}")
    first = several[0]
    if not isinstance(first, (SparseTensor, TensorField)):
        raise TypeError(f"MinkowskiEngine.{name}: expected SparseTensors or TensorFields, got {type(first).__name__}")
    for other in several[1:]:
        first._is_same_key(other)
        if first.device != other.device:
            raise ValueError(f"MinkowskiEngine.{name}: tensors are on {first.device} and {other.device}")
    return first._like(function([x.F for x in several]))


def cat(*sparse_tensors: Any) -> Any:
    """The features of tensors at the same places side by side.

    >>> import torch
    >>> import triops.compat.minkowski_engine as ME
    >>> x = ME.SparseTensor(torch.tensor([[1.0]]), torch.tensor([[0, 7]], dtype=torch.int32))
    >>> ME.cat(x, x * 2).F
    tensor([[1., 2.]])
    """
    return _together("cat", sparse_tensors, functools.partial(torch.cat, dim=-1))


def _sum(*sparse_tensors: Any) -> Any:
    return _together("sum", sparse_tensors, _total)


def mean(*sparse_tensors: Any) -> Any:
    return _together("mean", sparse_tensors, _mean)


def var(*sparse_tensors: Any) -> Any:
    """The mean of the squares of the differences from the mean."""
    return _together("var", sparse_tensors, lambda xs: _mean([(x - _mean(xs)).square() for x in xs]))


def _total(xs: list[Tensor]) -> Tensor:
    return functools.reduce(torch.add, xs)


def _mean(xs: list[Tensor]) -> Tensor:
    return _total(xs) / len(xs)


def dense_coordinates(shape: Sequence[int]) -> Tensor:
    """int32 [B * places, 1 + D]: every place of a grid [B, C, *grid], the last axis the fastest."""
    if len(shape) < 3:
        raise ValueError(f"MinkowskiEngine.dense_coordinates: shape must be [B, C, *grid], got {list(shape)}")
    axes = [torch.arange(int(size), dtype=torch.int32) for size in (shape[0], *shape[2:])]
    return torch.stack(torch.meshgrid(*axes, indexing="ij"), -1).flatten(0, -2)


def to_sparse(x: Tensor, format: str | None = None, coordinates: Any = None, device: Any = None) -> SparseTensor:
    """The places of a grid where any channel is not 0. `format` says which axis is which: "BCXX", "BXXC"."""
    if x.dim() < 3:
        raise ValueError(f"MinkowskiEngine.to_sparse: x must have an axis besides batch and channels, got {x.dim()}")
    format = format or "BC" + "X" * (x.dim() - 2)
    if len(format) != x.dim() or format[0] != "B" or format.count("B") != 1 or format.count("C") != 1:
        raise ValueError(f"MinkowskiEngine.to_sparse: format must be a B, a C and {x.dim() - 2} X, got {format!r}")
    grid = x.movedim(format.find("C"), -1)
    places = grid.abs().sum(-1).nonzero()
    return SparseTensor(grid[tuple(places.unbind(1))], places.int(), device=x.device if device is None else device)


def to_sparse_all(dense_tensor: Tensor, coordinates: Tensor | None = None) -> SparseTensor:
    """Every place of a grid [B, C, *grid]. `coordinates`: of `dense_coordinates`, made once for many grids."""
    if coordinates is None:
        coordinates = dense_coordinates(dense_tensor.shape)
    features = dense_tensor.movedim(1, -1).flatten(0, -2)
    return SparseTensor(features, coordinates, device=dense_tensor.device)


class MinkowskiToSparseTensor(MinkowskiModuleBase):
    """A TensorField by `sparse()`; a grid by `to_sparse`, or `to_sparse_all` without `remove_zeros`.

    As in MinkowskiEngine zeros are removed only where coordinates are given, and then these are of no account.
    """

    def __init__(self, remove_zeros: bool = True, coordinates: Tensor | None = None) -> None:
        super().__init__()
        self.remove_zeros = remove_zeros
        self.coordinates = coordinates

    def forward(self, input: TensorField | Tensor) -> SparseTensor:
        if isinstance(input, TensorField):
            return input.sparse()
        if not isinstance(input, Tensor):
            raise TypeError(f"MinkowskiToSparseTensor: expected a TensorField or a Tensor, got {type(input).__name__}")
        if self.remove_zeros and self.coordinates is not None:
            return to_sparse(input)
        return to_sparse_all(input, self.coordinates)

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


class MinkowskiToDenseTensor(MinkowskiModuleBase):
    """`SparseTensor.dense(shape)`, without what else that returns."""

    def __init__(self, shape: torch.Size | None = None) -> None:
        super().__init__()
        self.shape = shape

    def forward(self, input: SparseTensor) -> Tensor:
        return input.dense(shape=self.shape)[0]

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


class MinkowskiToFeature(MinkowskiModuleBase):
    """The features."""

    def forward(self, x: SparseTensor | TensorField) -> Tensor:
        return x.F


class MinkowskiStackCat(nn.Sequential):
    """The results of all modules for the same input, side by side."""

    def forward(self, x: Any) -> Any:
        return cat([module(x) for module in self])


class MinkowskiStackSum(nn.Sequential):
    def forward(self, x: Any) -> Any:
        return _sum([module(x) for module in self])


class MinkowskiStackMean(nn.Sequential):
    def forward(self, x: Any) -> Any:
        return mean([module(x) for module in self])


class MinkowskiStackVar(nn.Sequential):
    def forward(self, x: Any) -> Any:
        return var([module(x) for module in self])


__all__ = [
    "MinkowskiLinear", "MinkowskiStackCat", "MinkowskiStackMean", "MinkowskiStackSum", "MinkowskiStackVar",
    "MinkowskiToDenseTensor", "MinkowskiToFeature", "MinkowskiToSparseTensor", "cat", "dense_coordinates", "mean",
    "to_sparse", "to_sparse_all", "var",
]  # fmt: skip
