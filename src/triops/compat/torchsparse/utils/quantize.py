"""Which points are the first of their voxel."""

from __future__ import annotations

from typing import Any

import numpy as np

__all__ = ["sparse_quantize"]


def sparse_quantize(
    coords: Any, voxel_size: float | tuple[float, ...] = 1, *, return_index: bool = False, return_inverse: bool = False
) -> Any:
    """The voxels [V, 3] (int32) of points [N, 3], each once, in ascending order; with `return_index` the first point of
    each, with `return_inverse` the voxel of each point.

    >>> import numpy as np
    >>> sparse_quantize(np.array([[1.5, 0, 0], [0.2, 0, 0], [0.9, 0, 0]]), 1.0, return_index=True)
    [array([[0, 0, 0],
           [1, 0, 0]], dtype=int32), array([1, 0])]
    """
    sizes = (voxel_size,) * 3 if isinstance(voxel_size, (float, int)) else voxel_size
    if not isinstance(sizes, tuple) or len(sizes) != 3:
        raise ValueError(f"sparse_quantize: voxel_size must be a number or a tuple of 3, got {voxel_size!r}")
    voxels = np.floor(coords / np.array(sizes)).astype(np.int32)
    low, high = voxels.min(0).astype(np.int64), voxels.max(0).astype(np.int64)
    keys = np.zeros(len(voxels), np.uint64)  # wraps, as theirs, where the box of all voxels has more than 2**64 places
    for axis in range(3):
        keys = keys * np.uint64(high[axis] - low[axis] + 1) + (voxels[:, axis] - low[axis]).astype(np.uint64)
    _, index, inverse = np.unique(keys, return_index=True, return_inverse=True)
    outputs = [voxels[index]] + [index] * return_index + [inverse] * return_inverse
    return outputs[0] if len(outputs) == 1 else outputs
