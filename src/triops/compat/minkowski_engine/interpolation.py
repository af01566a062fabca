"""Features between sites: `MinkowskiEngine.MinkowskiInterpolation`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from triops.compat.minkowski_engine.common import MinkowskiModuleBase
from triops.compat.minkowski_engine.keys import CoordinateMapKey
from triops.compat.minkowski_engine.manager import CoordinateManager
from triops.compat.minkowski_engine.rows import gathered_sum

if TYPE_CHECKING:
    from triops.compat.minkowski_engine.sparse_tensor import SparseTensor


def interpolated(features: Tensor, points: Tensor, key: CoordinateMapKey, manager: CoordinateManager) -> Tensor:
    """[N, C], [M, 1 + D] -> [M, C]: linear interpolation of the features of a map; a site that is not there counts
    as 0. Differentiable in the features."""
    if not points.is_floating_point():
        raise TypeError(f"MinkowskiEngine: points must be of a float type, got {points.dtype}")
    table, weights = manager.corners(key, points)
    return gathered_sum(features, table, weights[..., None].to(features.dtype))


class MinkowskiInterpolationFunction:
    @staticmethod
    def apply(
        input_features: Tensor, tfield: Tensor, in_coordinate_map_key: CoordinateMapKey,
        coordinate_manager: CoordinateManager,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
        out = interpolated(input_features, tfield, in_coordinate_map_key, coordinate_manager)
        return out, *coordinate_manager.interpolation_map_weight(in_coordinate_map_key, tfield)


class MinkowskiInterpolation(MinkowskiModuleBase):
    """Features at points [M, 1 + D], by linear interpolation."""

    def __init__(self, return_kernel_map: bool = False, return_weights: bool = False) -> None:
        super().__init__()
        self.return_kernel_map = return_kernel_map
        self.return_weights = return_weights
        self.interp = MinkowskiInterpolationFunction()

    def forward(self, input: SparseTensor, tfield: Tensor) -> Any:
        manager, key = input.coordinate_manager, input.coordinate_map_key
        found: list[Any] = [interpolated(input.F, tfield, key, manager)]
        if self.return_kernel_map or self.return_weights:
            in_map, out_map, weights = manager.interpolation_map_weight(key, tfield)
            found += [(in_map, out_map)] if self.return_kernel_map else []
            found += [weights] if self.return_weights else []
        return found[0] if len(found) == 1 else tuple(found)

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


__all__ = ["MinkowskiInterpolation", "MinkowskiInterpolationFunction"]
