"""Rows of two tensors that belong together: `MinkowskiEngine.utils.coords`."""

from __future__ import annotations

from torch import Tensor

from triops.compat.minkowski_engine.sparse_tensor import SparseTensor


def get_coords_map(x: SparseTensor, y: SparseTensor) -> tuple[Tensor, Tensor]:
    """Rows of x, and of each the row of y, of a larger stride, that it lies in."""
    x._same_manager(y)
    return x.coordinate_manager.stride_map(x.coordinate_map_key, y.coordinate_map_key)


__all__ = ["get_coords_map"]
