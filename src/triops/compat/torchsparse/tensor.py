"""`torchsparse.SparseTensor` and `PointTensor`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from triops.compat.torchsparse import _generation
from triops.compat.torchsparse.utils.tensor_cache import cache_of_new_tensor
from triops.compat.torchsparse.utils.to_dense import to_dense
from triops.compat.torchsparse.utils.utils import make_ntuple

__all__ = ["SparseTensor"]

_allow_negative_coordinates = False


def get_allow_negative_coordinates() -> bool:
    return _allow_negative_coordinates


def set_allow_negative_coordinates(allow_negative_coordinates: bool) -> None:
    """Whether strided convolutions of 2.1 make sites with negative coordinates. Those of 1.4 always do."""
    global _allow_negative_coordinates
    _allow_negative_coordinates = allow_negative_coordinates


class SparseTensor:
    """Features of sites.

    Args:
        feats: [N, C]. Arrays of NumPy are kept as they are, for `sparse_collate`.
        coords: integers [N, 4]: x, y, z, batch in torchsparse 1.4; batch, x, y, z in 2.1. Without a batch ([N, 3]) for
            `sparse_collate`. See `triops.compat.torchsparse.use` for how the two are told apart.
        stride: that of the sites, for each axis.
        spatial_range: batch size and extents, of 2.1.
    """

    def __init__(
        self, feats: Any, coords: Any, stride: int | Sequence[int] = 1, spatial_range: Sequence[int] | None = None
    ) -> None:
        self.feats = feats
        self.coords = coords
        self.stride = make_ntuple(stride, ndim=3)
        self.spatial_range = None if spatial_range is None else make_ntuple(spatial_range, ndim=len(spatial_range))
        given = spatial_range is not None and _generation.chosen() is None
        self.generation = _generation.NEW if given else _generation.of_caller()
        self._caches = cache_of_new_tensor()

    def like(
        self, feats: Tensor, coords: Tensor | None = None, stride: tuple[int, ...] | None = None,
        spatial_range: tuple[int, ...] | None = None,
    ) -> SparseTensor:  # fmt: skip
        """A tensor of the same generation that shares the caches: with other features, or at other sites."""
        made = SparseTensor.__new__(SparseTensor)
        made.feats = feats
        made.coords = self.coords if coords is None else coords
        made.stride = self.stride if stride is None else stride
        made.spatial_range = self.spatial_range if coords is None else spatial_range
        made.generation, made._caches = self.generation, self._caches
        return made

    @property
    def F(self) -> Any:
        return self.feats

    @F.setter
    def F(self, feats: Any) -> None:
        self.feats = feats

    @property
    def C(self) -> Any:
        return self.coords

    @C.setter
    def C(self, coords: Any) -> None:
        self.coords = coords

    @property
    def s(self) -> tuple[int, ...]:
        return self.stride

    @s.setter
    def s(self, stride: int | Sequence[int]) -> None:
        self.stride = make_ntuple(stride, ndim=3)

    @property
    def cmaps(self) -> dict[Any, Any]:
        """The sites at each stride, as 1.4 calls them."""
        return self._caches.cmaps

    @cmaps.setter
    def cmaps(self, cmaps: dict[Any, Any]) -> None:
        self._caches = self._caches.changed(cmaps=cmaps)

    @property
    def kmaps(self) -> dict[Any, Any]:
        """The neighbor tables of convolutions, as 1.4 calls them."""
        return self._caches.kmaps

    @kmaps.setter
    def kmaps(self, kmaps: dict[Any, Any]) -> None:
        self._caches = self._caches.changed(kmaps=kmaps)

    @property
    def batch(self) -> Any:
        """The batch column of the coordinates."""
        return self.coords[:, 0 if self.generation == _generation.NEW else -1]

    @property
    def axes(self) -> slice:
        """Which columns of the coordinates are x, y and z."""
        return slice(1, None) if self.generation == _generation.NEW else slice(0, -1)

    def cpu(self) -> SparseTensor:
        return self._moved(lambda x: x.cpu())

    def cuda(self) -> SparseTensor:
        return self._moved(lambda x: x.cuda())

    def detach(self) -> SparseTensor:
        return self._moved(lambda x: x.detach())

    def half(self) -> SparseTensor:
        self.feats = self.feats.half()
        return self

    def to(self, device: Any, non_blocking: bool = True) -> SparseTensor:
        return self._moved(lambda x: x.to(device, non_blocking=non_blocking))

    def _moved(self, move: Any) -> SparseTensor:
        device = self.coords.device
        self.coords, self.feats = move(self.coords), move(self.feats)
        if self.coords.device != device:  # where tables and sites of the other are of no use
            self._caches = self._caches.changed(cmaps={}, kmaps={}, hashmaps={})
        return self

    def dense(self) -> Tensor:
        """[B, X, Y, Z, C], zeros where there is no site. Differentiable."""
        if self.spatial_range is None:
            raise ValueError("SparseTensor.dense: the tensor must have a spatial_range, got None")
        return to_dense(self.feats, self.coords, self.spatial_range)

    def __add__(self, other: SparseTensor) -> SparseTensor:
        return self.like(self.feats + other.feats)

    def __repr__(self) -> str:
        shape = list(self.feats.shape)
        return f"SparseTensor(feats={shape}, stride={self.stride}, of torchsparse {self.generation})"


class PointTensor:
    """Features [N, C] of points at coordinates [N, 4] that need not be integers: of torchsparse 1.4 and SPVCNN."""

    def __init__(
        self, feats: Tensor, coords: Tensor, idx_query: dict[Any, Any] | None = None,
        weights: dict[Any, Any] | None = None,
    ) -> None:  # fmt: skip
        self.F = feats
        self.C = coords
        self.idx_query = {} if idx_query is None else idx_query
        self.weights = {} if weights is None else weights
        self.additional_features: dict[str, Any] = {"idx_query": {}, "counts": {}}

    def cuda(self) -> PointTensor:
        self.F, self.C = self.F.cuda(), self.C.cuda()
        return self

    def detach(self) -> PointTensor:
        self.F, self.C = self.F.detach(), self.C.detach()
        return self

    def to(self, device: torch.device | str, non_blocking: bool = True) -> PointTensor:
        self.F = self.F.to(device, non_blocking=non_blocking)
        self.C = self.C.to(device, non_blocking=non_blocking)
        return self

    def __add__(self, other: PointTensor) -> PointTensor:
        made = PointTensor(self.F + other.F, self.C, self.idx_query, self.weights)
        made.additional_features = self.additional_features
        return made
