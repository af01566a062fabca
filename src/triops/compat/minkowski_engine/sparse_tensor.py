"""`MinkowskiEngine.SparseTensor`: features at distinct integer sites."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor as TorchTensor

from triops.compat.minkowski_engine.common import StrideType, convert_to_int_list
from triops.compat.minkowski_engine.interpolation import interpolated
from triops.compat.minkowski_engine.keys import CoordinateMapKey
from triops.compat.minkowski_engine.manager import CoordinateManager
from triops.compat.minkowski_engine.rows import gathered_sum, reduced
from triops.compat.minkowski_engine.tensor import SparseTensorQuantizationMode, Tensor, checked, manager_for

if TYPE_CHECKING:
    from triops.compat.minkowski_engine.tensor_field import TensorField

Mode = SparseTensorQuantizationMode
REDUCTIONS = {Mode.UNWEIGHTED_AVERAGE: "mean", Mode.UNWEIGHTED_SUM: "sum", Mode.MAX_POOL: "max"}
SLICED = (Mode.RANDOM_SUBSAMPLE, Mode.UNWEIGHTED_AVERAGE)


def quantized(features: TorchTensor, rows: TorchTensor, inverse: TorchTensor, count: int, mode: Mode) -> TorchTensor:
    """The features of distinct sites, [count, C], of those of all rows: `rows` are the first of each site."""
    if mode is Mode.RANDOM_SUBSAMPLE:
        return features.index_select(0, rows)
    if mode in REDUCTIONS:
        return reduced(features, inverse, count, REDUCTIONS[mode])  # type: ignore[arg-type]
    raise ValueError(f"MinkowskiEngine: coordinates come twice, and {mode} does not say what becomes of them")


class SparseTensor(Tensor):
    """Features [N, C] at distinct sites.

    Args:
        features: float tensor [N, C].
        coordinates: int32 [N, 1 + D], the batch in front, multiples of `tensor_stride`; they may be negative. Others
            are rounded down, with a warning. Of coordinates that come twice the first row stands for the site.
        tensor_stride: the distance of neighbors.
        coordinate_map_key, coordinate_manager: in place of coordinates, the map that the rows belong to.
        quantization_mode: what the features of coordinates that come twice become.
        allocator_type: without effect.
        requires_grad, device: of the features.

    Attributes:
        unique_index: int64, the rows that were taken, where it was made of coordinates.
        inverse_mapping: int64 [N], which row of this tensor each row of the coordinates became.

    >>> import torch
    >>> import triops.compat.minkowski_engine as ME
    >>> coordinates = torch.tensor([[0, 0, 0], [0, 0, 1]], dtype=torch.int32)
    >>> x = ME.SparseTensor(torch.tensor([[1.0], [2.0]]), coordinates)
    >>> x.dense()[0].tolist()
    [[[[1.0, 2.0]]]]
    """

    unique_index: TorchTensor
    inverse_mapping: TorchTensor

    def __init__(
        self, features: TorchTensor, coordinates: TorchTensor | None = None, tensor_stride: StrideType = 1,
        coordinate_map_key: CoordinateMapKey | None = None, coordinate_manager: CoordinateManager | None = None,
        quantization_mode: Mode = Mode.RANDOM_SUBSAMPLE, allocator_type: Any = None, minkowski_algorithm: Any = None,
        requires_grad: bool | None = None, device: Any = None,
    ) -> None:  # fmt: skip
        features, coordinates = checked(
            "SparseTensor", features, coordinates, coordinate_map_key, coordinate_manager, device
        )
        self.quantization_mode = quantization_mode
        if coordinates is not None:
            coordinate_manager = coordinate_manager or manager_for(coordinates, minkowski_algorithm)
            if coordinates.dtype != torch.int32:
                if coordinates.is_floating_point():
                    warnings.warn("SparseTensor: coordinates are rounded down to int32", stacklevel=2)
                    coordinates = coordinates.floor()
                coordinates = coordinates.int()
            stride = convert_to_int_list(tensor_stride, coordinates.shape[1] - 1)
            coordinate_map_key, found = coordinate_manager.insert_and_map(coordinates, stride)
            self.unique_index, self.inverse_mapping = found
            if self.unique_index.shape[0] < features.shape[0]:
                features = quantized(features, *found, self.unique_index.shape[0], quantization_mode)
        assert coordinate_manager is not None
        assert coordinate_map_key is not None
        if features.shape[0] != coordinate_manager.size(coordinate_map_key):
            raise ValueError(
                f"SparseTensor: features must have one row for each of {coordinate_manager.size(coordinate_map_key)} "
                f"sites of {coordinate_map_key}, got {features.shape[0]}"
            )
        if requires_grad is not None:
            features.requires_grad_(requires_grad)
        self._F, self._C, self._D = features, None, coordinate_manager.D
        self.coordinate_map_key, self._manager = coordinate_map_key, coordinate_manager
        self._batch_rows = None

    def _key(self) -> CoordinateMapKey:
        return self.coordinate_map_key

    def _get_coordinates(self) -> TorchTensor:
        return self._manager.get_coordinates(self.coordinate_map_key)

    def _rows_of_elements(self) -> list[TorchTensor]:
        return self._manager.origin_map(self.coordinate_map_key)[1]

    def _like(self, features: TorchTensor, key: CoordinateMapKey | None = None) -> SparseTensor:
        return type(self)(features, coordinate_map_key=key or self.coordinate_map_key, coordinate_manager=self._manager)

    def _of_other_places(self, other: SparseTensor, binary_fn: Callable[[Any, Any], Any]) -> SparseTensor:
        """At the union of both: this tensor's features where only it is, `binary_fn(0, features)` where only the other
        is, as MinkowskiEngine has it."""
        key = CoordinateMapKey(self._D + 1)
        mine, theirs = self._manager.union_map([self.coordinate_map_key, other.coordinate_map_key], key)
        out = self._F.new_zeros((self._manager.size(key), self._F.shape[1])).index_copy(0, mine[1], self._F)
        met = binary_fn(out.index_select(0, theirs[1]), other._F)
        return self._like(out.index_copy(0, theirs[1], met), key)

    def dense(
        self, shape: torch.Size | None = None, min_coordinate: TorchTensor | None = None, contract_stride: bool = True
    ) -> tuple[TorchTensor, TorchTensor, TorchTensor]:
        """The features as [B, C, *grid], 0 where there is no site; the lowest coordinate, and the tensor stride.

        Args:
            shape: of the result; its second entry is of no account. By default up to the highest coordinate.
            min_coordinate: int [D], what becomes 0; by default the origin, below which no site may lie.
            contract_stride: divide positions by the tensor stride.
        """
        if shape is not None and len(shape) != self._D + 2:
            raise ValueError(f"SparseTensor.dense: shape must have {self._D + 2} entries, got {list(shape)}")
        size = None if shape is None else [int(shape[0]), self._F.shape[1], *(int(s) for s in shape[2:])]
        stride = torch.tensor(self.tensor_stride, dtype=torch.int32)
        if len(self) == 0:
            if size is None:
                raise ValueError("SparseTensor.dense: shape must be given for a tensor without sites")
            return self._F.new_zeros(size), torch.zeros(self._D, dtype=torch.int32, device=self.device), stride
        coordinates = self.C
        step = stride.to(self.device)
        lowest = coordinates[:, 1:].amin(0, keepdim=True)
        if min_coordinate is None or isinstance(min_coordinate, int):
            if bool((lowest < 0).any()):
                raise ValueError(
                    f"SparseTensor.dense: coordinates go down to {lowest[0].tolist()}: min_coordinate must be given"
                )
            places = coordinates[:, 1:]
        else:
            lowest = min_coordinate.to(self.device).view(1, -1)
            places = coordinates[:, 1:] - lowest
        if bool((lowest % step).any()):
            raise ValueError(
                f"SparseTensor.dense: min_coordinate must be a multiple of the tensor stride {self.tensor_stride}, "
                f"got {lowest[0].tolist()}"
            )
        if contract_stride:
            places = torch.div(places, step, rounding_mode="floor")
        places = places.long()
        batch = coordinates[:, 0].long()
        if size is None:
            size = [int(batch.max()) + 1, self._F.shape[1], *(places.amax(0) + 1).tolist()]
        outside = (places < 0) | (places >= places.new_tensor(size[2:]))
        if bool(outside.any()) or int(batch.max()) >= size[0]:
            raise ValueError(f"SparseTensor.dense: there are sites outside of a grid of {size}")
        grid = self._F.new_zeros([size[0], *size[2:], size[1]])
        grid = grid.index_put((batch, *places.unbind(1)), self._F)
        return grid.movedim(-1, 1), lowest, stride

    def sparse(
        self, min_coords: TorchTensor | None = None, max_coords: TorchTensor | None = None, contract_coords: bool = True
    ) -> tuple[TorchTensor, TorchTensor, TorchTensor]:
        """As torch's sparse tensor [B, *grid, C], with the lowest coordinate and the tensor stride.

        Args:
            min_coords: int [D], what becomes 0; by default the lowest of the sites.
            max_coords: int [D], the last place of the grid; by default the highest of the sites.
            contract_coords: divide positions, and the lowest, by the tensor stride.
        """
        stride = torch.tensor(self.tensor_stride, dtype=torch.int32)
        step = stride.to(self.device)
        places = self.C[:, 1:]
        low = places.amin(0, keepdim=True) if min_coords is None else min_coords.to(self.device).view(1, -1)
        high = places.amax(0, keepdim=True) if max_coords is None else max_coords.to(self.device).view(1, -1)
        for name, value in (("min_coords", low), ("max_coords", high)):
            if bool((value % step).any()):
                raise ValueError(f"SparseTensor.sparse: {name} must be a multiple of {self.tensor_stride}")
        places, extent = places - low, high - low
        if contract_coords:
            places, extent, low = (torch.div(t, step, rounding_mode="floor") for t in (places, extent, low))
        where = torch.cat([self.C[:, :1], places], 1).long().t()
        size = [int(self.C[:, 0].max()) + 1, *(extent[0] + 1).tolist(), self._F.shape[1]]
        return torch.sparse_coo_tensor(where, self._F, size, check_invariants=False), low, stride

    def interpolate(self, X: TensorField) -> TensorField:
        """The features at the points of a field: by the weights of `X.splat()` where this map was made so."""
        known = X._splat.get(self.coordinate_map_key)
        if known is None:
            return X._like(self.features_at_coordinates(X.C))
        return X._like(gathered_sum(self._F, known[0], known[1][..., None]))

    def slice(self, X: SparseTensor | TensorField) -> TensorField:
        """The features of the site that each point lies in: points of a field, or the coordinates that a sparse tensor
        was made of."""
        features, coordinates = self._sliced("slice", X)
        return self._field(X, features, coordinates)

    def cat_slice(self, X: SparseTensor | TensorField) -> TensorField:
        """`slice`, with the features of X behind them."""
        features, coordinates = self._sliced("cat_slice", X)
        other = X.F if coordinates is None else X.F[X.inverse_mapping]  # type: ignore[index]
        return self._field(X, torch.cat([features, other], 1), coordinates)

    def _sliced(self, name: str, X: Any) -> tuple[TorchTensor, TorchTensor | None]:
        from triops.compat.minkowski_engine.tensor_field import TensorField

        if not isinstance(X, (SparseTensor, TensorField)):
            raise TypeError(f"SparseTensor.{name}: expected a TensorField or a SparseTensor, got {type(X).__name__}")
        if X.quantization_mode not in SLICED:
            raise ValueError(
                f"SparseTensor.{name}: the quantization mode must be RANDOM_SUBSAMPLE or UNWEIGHTED_AVERAGE, got "
                f"{X.quantization_mode}"
            )
        if isinstance(X, TensorField):
            return self._F.index_select(0, X.inverse_mapping(self.coordinate_map_key)), None
        self._is_same_key(X)
        return self._F.index_select(0, X.inverse_mapping), self.C.index_select(0, X.inverse_mapping)

    def _field(self, X: Any, features: TorchTensor, coordinates: TorchTensor | None) -> TensorField:
        from triops.compat.minkowski_engine.tensor_field import TensorField

        if coordinates is None:
            return X._like(features)  # type: ignore[no-any-return]
        return TensorField(
            features, coordinates, coordinate_manager=self._manager, quantization_mode=self.quantization_mode
        )

    def features_at_coordinates(self, query_coordinates: TorchTensor) -> TorchTensor:
        """Features at points, float [M, 1 + D], by linear interpolation."""
        return interpolated(self._F, query_coordinates, self.coordinate_map_key, self._manager)


def map_key_of(
    input: SparseTensor, coordinates: Any, tensor_stride: Any = 1, expand_coordinates: bool = False
) -> CoordinateMapKey:
    """The key of the map that a layer's results are asked for at; one that is not set where they are not asked for."""
    if coordinates is None or expand_coordinates:
        return CoordinateMapKey(input.D + 1)
    if isinstance(coordinates, CoordinateMapKey):
        return coordinates
    if isinstance(coordinates, SparseTensor):
        return coordinates.coordinate_map_key
    if not isinstance(coordinates, TorchTensor):
        raise TypeError(
            "MinkowskiEngine: coordinates must be a Tensor, a CoordinateMapKey or a SparseTensor, got "
            f"{type(coordinates).__name__}"
        )
    return input.coordinate_manager.insert_and_map(coordinates, tensor_stride)[0]


_get_coordinate_map_key = map_key_of  # as programs import it
