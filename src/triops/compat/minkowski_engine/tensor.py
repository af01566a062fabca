"""What sparse tensors and tensor fields share: `MinkowskiEngine.MinkowskiTensor`."""

from __future__ import annotations

import operator
from collections.abc import Callable
from enum import Enum
from numbers import Number
from typing import Any

import torch
from torch import Tensor as TorchTensor

from triops.compat.minkowski_engine.keys import CoordinateMapKey
from triops.compat.minkowski_engine.manager import CoordinateManager

COORDINATE_MANAGER_DIFFERENT_ERROR = (
    "SparseTensors must share a coordinate manager for this operation: pass coordinate_manager, or call "
    "set_sparse_tensor_operation_mode(SparseTensorOperationMode.SHARE_COORDINATE_MANAGER)."
)
COORDINATE_KEY_DIFFERENT_ERROR = "SparseTensors must have the same coordinate_map_key."


class SparseTensorOperationMode(Enum):
    """Whether a tensor made of coordinates gets a manager of its own, or the one of the process."""

    SEPARATE_COORDINATE_MANAGER = 0
    SHARE_COORDINATE_MANAGER = 1


class SparseTensorQuantizationMode(Enum):
    """What the features of coordinates that are the same become. RANDOM_SUBSAMPLE takes the first of them."""

    RANDOM_SUBSAMPLE = 0
    UNWEIGHTED_AVERAGE = 1
    UNWEIGHTED_SUM = 2
    NO_QUANTIZATION = 3
    MAX_POOL = 4
    SPLAT_LINEAR_INTERPOLATION = 5


class _Process:
    """What programs set for all tensors."""

    mode = SparseTensorOperationMode.SEPARATE_COORDINATE_MANAGER
    manager: CoordinateManager | None = None


def set_sparse_tensor_operation_mode(operation_mode: SparseTensorOperationMode) -> None:
    if not isinstance(operation_mode, SparseTensorOperationMode):
        raise TypeError(f"MinkowskiEngine: expected a SparseTensorOperationMode, got {operation_mode!r}")
    _Process.mode = operation_mode


def sparse_tensor_operation_mode() -> SparseTensorOperationMode:
    return _Process.mode


def global_coordinate_manager() -> CoordinateManager | None:
    return _Process.manager


def set_global_coordinate_manager(coordinate_manager: CoordinateManager | None) -> None:
    _Process.manager = coordinate_manager


def clear_global_coordinate_manager() -> None:
    """Where managers are shared, call it after every step: the maps of the process stay until then."""
    _Process.manager = None


def manager_for(coordinates: TorchTensor, minkowski_algorithm: Any) -> CoordinateManager:
    """The manager of a tensor that is given none."""
    shared = _Process.mode is SparseTensorOperationMode.SHARE_COORDINATE_MANAGER
    if shared and _Process.manager is not None:
        return _Process.manager
    made = CoordinateManager(D=coordinates.shape[1] - 1, minkowski_algorithm=minkowski_algorithm)
    if shared:
        _Process.manager = made
    return made


class Tensor:
    """Features and where they are. `SparseTensor` and `TensorField` say what the coordinates mean."""

    _F: TorchTensor
    _C: TorchTensor | None
    _D: int
    _manager: CoordinateManager
    _batch_rows: list[TorchTensor] | None

    # Of the kind of tensor

    def _key(self) -> CoordinateMapKey:
        raise NotImplementedError

    def _get_coordinates(self) -> TorchTensor:
        raise NotImplementedError

    def _rows_of_elements(self) -> list[TorchTensor]:
        raise NotImplementedError

    def _like(self, features: TorchTensor, key: CoordinateMapKey | None = None) -> Any:
        """Features at the same places, or at those of another map."""
        raise NotImplementedError

    # Where it is

    @property
    def coordinate_manager(self) -> CoordinateManager:
        return self._manager

    @property
    def tensor_stride(self) -> list[int]:
        return self._key().get_tensor_stride()

    @property
    def coordinate_key(self) -> CoordinateMapKey:
        return self._key()

    @property
    def coordinates(self) -> TorchTensor:
        """[N, 1 + D], the batch in front."""
        if self._C is None:
            self._C = self._get_coordinates()
        return self._C

    @property
    def C(self) -> TorchTensor:
        return self.coordinates

    @property
    def features(self) -> TorchTensor:
        return self._F

    @property
    def F(self) -> TorchTensor:
        return self._F

    @property
    def D(self) -> int:
        return self._D

    @property
    def dimension(self) -> int:
        return self._D

    # Element by element of the batch

    @property
    def _batchwise_row_indices(self) -> list[TorchTensor]:
        if self._batch_rows is None:
            self._batch_rows = self._rows_of_elements()
        return self._batch_rows

    @property
    def _sorted_batchwise_row_indices(self) -> list[TorchTensor]:
        return self._batchwise_row_indices  # which ascend

    @property
    def decomposition_permutations(self) -> list[TorchTensor]:
        """The rows of each element, from 0 to the highest in the batch; none for those that are not there."""
        return self._batchwise_row_indices

    @property
    def decomposed_coordinates(self) -> list[TorchTensor]:
        return [self.C.index_select(0, rows)[:, 1:] for rows in self._batchwise_row_indices]

    @property
    def decomposed_features(self) -> list[TorchTensor]:
        return [self._F.index_select(0, rows) for rows in self._batchwise_row_indices]

    @property
    def decomposed_coordinates_and_features(self) -> tuple[list[TorchTensor], list[TorchTensor]]:
        return self.decomposed_coordinates, self.decomposed_features

    def coordinates_at(self, batch_index: int) -> TorchTensor:
        return self.C.index_select(0, self._batchwise_row_indices[batch_index])[:, 1:]

    def features_at(self, batch_index: int) -> TorchTensor:
        return self._F.index_select(0, self._batchwise_row_indices[batch_index])

    def coordinates_and_features_at(self, batch_index: int) -> tuple[TorchTensor, TorchTensor]:
        return self.coordinates_at(batch_index), self.features_at(batch_index)

    # As a tensor of features

    @property
    def requires_grad(self) -> bool:
        return self._F.requires_grad

    def requires_grad_(self, requires_grad: bool = True) -> None:
        self._F.requires_grad_(requires_grad)

    def float(self) -> Tensor:
        self._F = self._F.float()
        return self

    def double(self) -> Tensor:
        self._F = self._F.double()
        return self

    def detach(self) -> Tensor:
        """This tensor, its features detached: in place, as MinkowskiEngine does it."""
        self._F = self._F.detach()
        return self

    def __len__(self) -> int:
        return len(self._F)

    def size(self) -> torch.Size:
        return self._F.size()

    @property
    def shape(self) -> torch.Size:
        return self._F.shape

    @property
    def device(self) -> torch.device:
        return self._F.device

    @property
    def dtype(self) -> torch.dtype:
        return self._F.dtype

    def get_device(self) -> int:
        return self._F.get_device()

    # Arithmetic

    def _same_manager(self, other: Tensor) -> None:
        if self._manager is not other._manager:
            raise ValueError(COORDINATE_MANAGER_DIFFERENT_ERROR)

    def _is_same_key(self, other: Any) -> None:
        if not isinstance(other, type(self)):
            raise TypeError(f"MinkowskiEngine: expected a {type(self).__name__}, got {type(other).__name__}")
        self._same_manager(other)
        if self._key() != other._key():
            raise ValueError(f"{COORDINATE_KEY_DIFFERENT_ERROR} {self._key()} is not {other._key()}")

    def __iadd__(self, other: Any) -> Any:
        self._is_same_key(other)
        self._F += other.F
        return self

    def __isub__(self, other: Any) -> Any:
        self._is_same_key(other)
        self._F -= other.F
        return self

    def __imul__(self, other: Any) -> Any:
        self._is_same_key(other)
        self._F *= other.F
        return self

    def __itruediv__(self, other: Any) -> Any:
        self._is_same_key(other)
        self._F /= other.F
        return self

    def _binary_functor(self, other: Any, binary_fn: Callable[[Any, Any], Any]) -> Any:
        """Over features, of tensors at the same places or at others; see `SparseTensor._of_other_places`."""
        if isinstance(other, (TorchTensor, Number)):
            return self._like(binary_fn(self._F, other))
        if not isinstance(other, type(self)):
            raise TypeError(
                f"MinkowskiEngine: expected a {type(self).__name__} or a Tensor, got {type(other).__name__}"
            )
        self._same_manager(other)
        if self._key() == other._key():
            return self._like(binary_fn(self._F, other._F))
        return self._of_other_places(other, binary_fn)

    def _of_other_places(self, other: Any, binary_fn: Callable[[Any, Any], Any]) -> Any:
        raise ValueError(f"{COORDINATE_KEY_DIFFERENT_ERROR} {self._key()} is not {other._key()}")

    def __add__(self, other: Any) -> Any:
        return self._binary_functor(other, operator.add)

    def __sub__(self, other: Any) -> Any:
        return self._binary_functor(other, operator.sub)

    def __mul__(self, other: Any) -> Any:
        return self._binary_functor(other, operator.mul)

    def __truediv__(self, other: Any) -> Any:
        return self._binary_functor(other, operator.truediv)

    def __pow__(self, power: Any) -> Any:
        return self._like(self._F**power)

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(\n  coordinates={self.C}\n  features={self.F}\n  {self._key()}\n"
            f"  coordinate_manager={self._manager}  spatial dimension={self._D})"
        )


def checked(
    name: str, features: Any, coordinates: Any, key: Any, manager: Any, device: Any
) -> tuple[TorchTensor, TorchTensor | None]:
    """Features and coordinates of a new tensor, on its device, once they are what they should be."""
    for what, value, kind in (
        ("features", features, TorchTensor), ("coordinates", coordinates, TorchTensor),
        ("coordinate_map_key", key, CoordinateMapKey), ("coordinate_manager", manager, CoordinateManager),
    ):  # fmt: skip
        if not isinstance(value, kind) and (value is not None or what == "features"):
            raise TypeError(f"{name}: {what} must be a {kind.__name__}, got {type(value).__name__}")
    if features.dim() != 2:
        raise ValueError(f"{name}: features must have shape [N, C], got {list(features.shape)}")
    if (coordinates is None) == (key is None or manager is None):
        raise ValueError(f"{name}: expected either coordinates, or a coordinate_map_key and its coordinate_manager")
    if coordinates is not None and key is not None:
        raise ValueError(f"{name}: expected either coordinates, or a coordinate_map_key and its coordinate_manager")
    if device is not None:
        features = features.to(device)
        coordinates = None if coordinates is None else coordinates.to(device)
    if coordinates is not None:
        if coordinates.dim() != 2 or coordinates.shape[0] != features.shape[0]:
            raise ValueError(
                f"{name}: coordinates must have shape [{features.shape[0]}, 1 + D], as there are so many rows of "
                f"features, got {list(coordinates.shape)}"
            )
        if coordinates.device != features.device:
            raise ValueError(f"{name}: coordinates are on {coordinates.device}, features are on {features.device}")
    return features, coordinates


__all__ = [
    "COORDINATE_KEY_DIFFERENT_ERROR", "COORDINATE_MANAGER_DIFFERENT_ERROR", "SparseTensorOperationMode",
    "SparseTensorQuantizationMode", "Tensor", "clear_global_coordinate_manager", "global_coordinate_manager",
    "set_global_coordinate_manager", "set_sparse_tensor_operation_mode", "sparse_tensor_operation_mode",
]  # fmt: skip
