"""Fewer sites: `MinkowskiEngine.MinkowskiPruning`."""

from __future__ import annotations

import torch
from torch import Tensor

from triops.compat.minkowski_engine.common import MinkowskiModuleBase
from triops.compat.minkowski_engine.keys import CoordinateMapKey
from triops.compat.minkowski_engine.manager import CoordinateManager
from triops.compat.minkowski_engine.sparse_tensor import SparseTensor


class MinkowskiPruningFunction:
    @staticmethod
    def apply(
        in_feat: Tensor, mask: Tensor, in_coords_key: CoordinateMapKey, out_coords_key: CoordinateMapKey,
        coords_manager: CoordinateManager,
    ) -> Tensor:  # fmt: skip
        if mask.dtype not in (torch.bool, torch.uint8):
            raise TypeError(f"MinkowskiPruning: mask must be bool, got {mask.dtype}")
        if mask.shape != in_feat.shape[:1]:
            raise ValueError(
                f"MinkowskiPruning: mask must have shape [{in_feat.shape[0]}], one for each site, got "
                f"{list(mask.shape)}"
            )
        keep = mask.bool().nonzero()[:, 0]
        if not out_coords_key.is_key_set():
            out_coords_key.set_key(coords_manager.prune(in_coords_key, keep).map_key)
        return in_feat.index_select(0, keep)


class MinkowskiPruning(MinkowskiModuleBase):
    """The sites where the mask is true, in their order.

    >>> import torch
    >>> import triops.compat.minkowski_engine as ME
    >>> x = ME.SparseTensor(torch.tensor([[1.0], [2.0]]), torch.tensor([[0, 4], [0, 5]], dtype=torch.int32))
    >>> y = ME.MinkowskiPruning()(x, torch.tensor([False, True]))
    >>> y.C.tolist(), y.F.tolist(), y.coordinate_map_key
    ([[0, 5]], [[2.0]], coordinate map key:[1]:pruned)
    """

    def __init__(self) -> None:
        super().__init__()
        self.pruning = MinkowskiPruningFunction()

    def forward(self, input: SparseTensor, mask: Tensor) -> SparseTensor:
        key = CoordinateMapKey(input.D + 1)
        out = self.pruning.apply(input.F, mask, input.coordinate_map_key, key, input.coordinate_manager)
        return input._like(out, key)

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


__all__ = ["MinkowskiPruning", "MinkowskiPruningFunction"]
