"""What is one for each element of the batch, back at its sites: `MinkowskiEngine.MinkowskiBroadcast`."""

from __future__ import annotations

import torch
from torch import Tensor

from triops.compat.minkowski_engine.common import MinkowskiModuleBase
from triops.compat.minkowski_engine.keys import BroadcastMode, CoordinateMapKey
from triops.compat.minkowski_engine.manager import CoordinateManager
from triops.compat.minkowski_engine.sparse_tensor import SparseTensor


def spread(features: Tensor, key: CoordinateMapKey, manager: CoordinateManager) -> Tensor:
    """[B, C] of the map of the origins -> [N, C] of a map."""
    return features.index_select(0, manager.batches(key)[0])


class MinkowskiBroadcastFunction:
    @staticmethod
    def apply(
        input_features: Tensor, input_features_global: Tensor, operation_type: BroadcastMode,
        in_coords_key: CoordinateMapKey, glob_coords_key: CoordinateMapKey, coords_manager: CoordinateManager,
    ) -> Tensor:  # fmt: skip
        found = spread(input_features_global, in_coords_key, coords_manager)
        if operation_type == BroadcastMode.ELEMENTWISE_ADDITON:
            return input_features + found
        return input_features * found


class MinkowskiBroadcastBase(MinkowskiModuleBase):
    def __init__(self, operation_type: BroadcastMode) -> None:
        super().__init__()
        self.operation_type = operation_type
        self.broadcast = MinkowskiBroadcastFunction()

    def forward(self, input: SparseTensor, input_glob: SparseTensor) -> SparseTensor:
        out = self.broadcast.apply(
            input.F, input_glob.F, self.operation_type, input.coordinate_map_key, input_glob.coordinate_map_key,
            input.coordinate_manager,
        )  # fmt: skip
        return input._like(out)

    def __repr__(self) -> str:
        return type(self).__name__


class MinkowskiBroadcastAddition(MinkowskiBroadcastBase):
    def __init__(self) -> None:
        super().__init__(BroadcastMode.ELEMENTWISE_ADDITON)


class MinkowskiBroadcastMultiplication(MinkowskiBroadcastBase):
    def __init__(self) -> None:
        super().__init__(BroadcastMode.ELEMENTWISE_MULTIPLICATION)


class MinkowskiBroadcast(MinkowskiModuleBase):
    """The features of the batch's elements at the sites of the first input."""

    def forward(self, input: SparseTensor, input_glob: SparseTensor) -> SparseTensor:
        return input._like(spread(input_glob.F, input.coordinate_map_key, input.coordinate_manager))

    def __repr__(self) -> str:
        return type(self).__name__


class MinkowskiBroadcastConcatenation(MinkowskiBroadcast):
    """The same behind the features of the first input."""

    def forward(self, input: SparseTensor, input_glob: SparseTensor) -> SparseTensor:
        found = spread(input_glob.F, input.coordinate_map_key, input.coordinate_manager)
        return input._like(torch.cat([input.F, found], 1))


__all__ = [
    "MinkowskiBroadcast", "MinkowskiBroadcastAddition", "MinkowskiBroadcastBase", "MinkowskiBroadcastConcatenation",
    "MinkowskiBroadcastFunction", "MinkowskiBroadcastMultiplication",
]  # fmt: skip
