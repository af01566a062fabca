"""The sites of several tensors: `MinkowskiEngine.MinkowskiUnion`."""

from __future__ import annotations

from torch import Tensor

from triops.compat.minkowski_engine.common import MinkowskiModuleBase
from triops.compat.minkowski_engine.keys import CoordinateMapKey
from triops.compat.minkowski_engine.manager import CoordinateManager
from triops.compat.minkowski_engine.sparse_tensor import SparseTensor


class MinkowskiUnionFunction:
    @staticmethod
    def apply(
        in_coords_keys: list[CoordinateMapKey], out_coords_key: CoordinateMapKey,
        coordinate_manager: CoordinateManager, *in_feats: Tensor,
    ) -> Tensor:  # fmt: skip
        maps = coordinate_manager.union_map(in_coords_keys, out_coords_key)
        out = in_feats[0].new_zeros((coordinate_manager.size(out_coords_key), in_feats[0].shape[1]))
        for features, (_, rows) in zip(in_feats, maps, strict=True):
            out = out.index_add(0, rows, features)
        return out


class MinkowskiUnion(MinkowskiModuleBase):
    """At the sites of any of the tensors, the sum of the features of those that have it."""

    def __init__(self) -> None:
        super().__init__()
        self.union = MinkowskiUnionFunction()

    def forward(self, *inputs: SparseTensor) -> SparseTensor:
        if len(inputs) < 2 or not all(isinstance(x, SparseTensor) for x in inputs):
            raise TypeError(f"MinkowskiUnion: expected two SparseTensors or more, got {[type(x) for x in inputs]}")
        for x in inputs[1:]:
            inputs[0]._same_manager(x)
        key = CoordinateMapKey(inputs[0].D + 1)
        keys = [x.coordinate_map_key for x in inputs]
        out = self.union.apply(keys, key, inputs[0].coordinate_manager, *[x.F for x in inputs])
        return inputs[0]._like(out, key)

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


__all__ = ["MinkowskiUnion", "MinkowskiUnionFunction"]
