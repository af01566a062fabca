"""`MinkowskiEngine.TensorField`: features at points that may lie anywhere."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor as TorchTensor

from triops.compat.minkowski_engine import sites
from triops.compat.minkowski_engine.common import StrideType, convert_to_int_list
from triops.compat.minkowski_engine.kernels import RegionType, kernel_offsets
from triops.compat.minkowski_engine.keys import CoordinateMapKey
from triops.compat.minkowski_engine.manager import CoordinateManager
from triops.compat.minkowski_engine.rows import reduced
from triops.compat.minkowski_engine.sparse_tensor import Mode, SparseTensor, quantized
from triops.compat.minkowski_engine.tensor import Tensor, checked, manager_for


def create_splat_coordinates(coordinates: TorchTensor) -> TorchTensor:
    """int32 [N * 2**D, 1 + D]: the corners of the cell of each point."""
    corner = kernel_offsets([2] * (coordinates.shape[1] - 1), RegionType.HYPER_CUBE).to(coordinates.device)
    cells = coordinates.floor().int()[:, None].repeat(1, corner.shape[0], 1)
    cells[..., 1:] += corner
    return cells.flatten(0, 1)


class TensorField(Tensor):
    """Features [N, C] at points [N, 1 + D], the batch in front; `sparse()` makes a `SparseTensor` of them.

    Arguments are those of `SparseTensor`, with `coordinate_field_map_key` for the key.

    >>> import torch
    >>> import triops.compat.minkowski_engine as ME
    >>> points = torch.tensor([[0, 0.1], [0, 0.6], [0, 2.5]])
    >>> field = ME.TensorField(torch.tensor([[1.0], [3.0], [5.0]]), points)
    >>> x = field.sparse()
    >>> x.C.tolist(), x.F.tolist(), x.slice(field).F.tolist()
    ([[0, 0], [0, 2]], [[2.0], [5.0]], [[2.0], [2.0], [5.0]])
    """

    def __init__(
        self, features: TorchTensor, coordinates: TorchTensor | None = None, tensor_stride: StrideType = 1,
        coordinate_field_map_key: CoordinateMapKey | None = None, coordinate_manager: CoordinateManager | None = None,
        quantization_mode: Mode = Mode.UNWEIGHTED_AVERAGE, allocator_type: Any = None, minkowski_algorithm: Any = None,
        requires_grad: bool | None = None, device: Any = None,
    ) -> None:  # fmt: skip
        features, coordinates = checked(
            "TensorField", features, coordinates, coordinate_field_map_key, coordinate_manager, device
        )
        self.quantization_mode = quantization_mode
        if coordinates is not None:
            coordinate_manager = coordinate_manager or manager_for(coordinates, minkowski_algorithm)
            stride = convert_to_int_list(tensor_stride, coordinates.shape[1] - 1)
            coordinate_field_map_key = coordinate_manager.insert_field(coordinates, stride)
        assert coordinate_manager is not None
        assert coordinate_field_map_key is not None
        if requires_grad is not None:
            features.requires_grad_(requires_grad)
        self._F, self._C, self._D = features, coordinates, coordinate_manager.D
        self.coordinate_field_map_key, self._manager = coordinate_field_map_key, coordinate_manager
        self._batch_rows = None
        self._inverse_mapping: dict[CoordinateMapKey, TorchTensor] = {}
        self._splat: dict[CoordinateMapKey, tuple[TorchTensor, TorchTensor]] = {}

    def _key(self) -> CoordinateMapKey:
        return self.coordinate_field_map_key

    def _get_coordinates(self) -> TorchTensor:
        return self._manager.get_coordinate_field(self.coordinate_field_map_key)

    def _rows_of_elements(self) -> list[TorchTensor]:
        return self._manager.origin_field_map(self.coordinate_field_map_key)[1]

    def _like(self, features: TorchTensor, key: CoordinateMapKey | None = None) -> TensorField:
        return type(self)(
            features, coordinate_field_map_key=key or self.coordinate_field_map_key, coordinate_manager=self._manager,
            quantization_mode=self.quantization_mode,
        )  # fmt: skip

    def sparse(
        self, tensor_stride: Any = 1, coordinate_map_key: CoordinateMapKey | None = None,
        quantization_mode: Mode | None = None,
    ) -> SparseTensor:  # fmt: skip
        """The features of the cells of this stride that points lie in, or at the sites of a map that is there."""
        mode = quantization_mode or self.quantization_mode
        if mode is Mode.SPLAT_LINEAR_INTERPOLATION:
            raise ValueError("TensorField.sparse: SPLAT_LINEAR_INTERPOLATION is what splat() does")
        if coordinate_map_key is None:
            key, (rows, inverse) = self._manager.field_to_sparse_insert_and_map(
                self.coordinate_field_map_key, convert_to_int_list(tensor_stride, self._D)
            )
            if rows.shape[0] == self._F.shape[0]:
                features = self._F[rows]
            else:
                features = quantized(self._F, rows, inverse, rows.shape[0], mode)
            self._inverse_mapping[key] = inverse
        else:
            key = coordinate_map_key
            found, points = self._manager.field_to_sparse_map(self.coordinate_field_map_key, key)
            count = self._manager.size(key)
            if mode is Mode.RANDOM_SUBSAMPLE:
                first = sites.distinct(torch.nn.functional.pad(found[:, None].int(), (1, 0)))[0]
                features = self._F.new_zeros((count, self._F.shape[1]))
                features = features.index_copy(0, found[first], self._F[points[first]])
            else:
                features = quantized(self._F[points], points, found, count, mode)
            inverse = torch.full((self._F.shape[0],), -1, dtype=torch.int64, device=found.device)
            self._inverse_mapping[key] = inverse.index_copy(0, points, found)
        return SparseTensor(features, coordinate_map_key=key, coordinate_manager=self._manager)

    def splat(self) -> SparseTensor:
        """The features spread over the corners of each point's cell, by the weights of linear interpolation; back
        again by `y.interpolate(field)`."""
        points = self.C.to(self._F.dtype)
        key, _ = self._manager.insert_and_map(create_splat_coordinates(points))
        table, weights = self._manager.corners(key, points)
        self._splat[key] = table, weights
        spread = (self._F[None] * weights[..., None]).flatten(0, 1)
        features = reduced(spread, table.flatten().long(), self._manager.size(key), "sum")
        return SparseTensor(features, coordinate_map_key=key, coordinate_manager=self._manager)

    def inverse_mapping(self, sparse_tensor_map_key: CoordinateMapKey) -> TorchTensor:
        """int64 [N]: the row of a sparse map that each point lies in."""
        manager, field, key = self._manager, self.coordinate_field_map_key, sparse_tensor_map_key
        if key not in self._inverse_mapping:
            if manager.exists_field_to_sparse(field, key):
                self._inverse_mapping[key] = manager.get_field_to_sparse_map(field, key)[1]
            else:
                rows, _ = manager.field_to_sparse_map(field, key)
                if rows.shape[0] < self._F.shape[0]:
                    raise ValueError(f"TensorField: there are points that lie in no site of {key}")
                self._inverse_mapping[key] = rows
        return self._inverse_mapping[key]


__all__ = ["TensorField", "create_splat_coordinates"]
