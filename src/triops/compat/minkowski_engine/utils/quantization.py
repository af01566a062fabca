"""Points as distinct cells: `MinkowskiEngine.utils.quantization`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from triops.compat.minkowski_engine import sites
from triops.compat.minkowski_engine.manager import CoordinateManager

Array = Any  # a NumPy array or a tensor, and the same comes back


def fnv_hash_vec(arr: np.ndarray) -> np.ndarray:
    """uint64 [N]: the FNV-1 hash of each row of [N, D], every entry taken for one octet."""
    hashed = np.full(arr.shape[0], 14695981039346656037, dtype=np.uint64)
    for column in arr.astype(np.int64).astype(np.uint64).T:
        hashed = (hashed * np.uint64(1099511628211)) ^ column
    return hashed


def ravel_hash_vec(arr: np.ndarray) -> np.ndarray:
    """uint64 [N]: the number of each row of [N, D] in the box around all of them, the last axis the fastest."""
    low = arr - arr.min(0)
    low = low.astype(np.uint64)
    size = low.max(0) + np.uint64(1)
    keys = np.zeros(arr.shape[0], dtype=np.uint64)
    for axis in range(arr.shape[1] - 1):
        keys = (keys + low[:, axis]) * size[axis + 1]
    keys += low[:, -1]
    return keys


def quantize(coords: Array) -> tuple[Array, Array]:
    """The first row of each site, and which of them each row is."""
    return quantize_np(coords) if isinstance(coords, np.ndarray) else quantize_th(coords)


def quantize_th(coords: Tensor) -> tuple[Tensor, Tensor]:
    return sites.distinct(torch.nn.functional.pad(coords.int(), (1, 0)))  # no column is a batch here


def quantize_np(coords: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    rows, inverse = quantize_th(torch.from_numpy(np.ascontiguousarray(coords)))
    return rows.int().numpy(), inverse.int().numpy()


def quantize_label(coords: Array, labels: Array, ignore_label: int) -> tuple[Array, Array, Array]:
    """`quantize`, and the label of each site; `ignore_label` where its rows do not agree."""
    both = quantize_label_np if isinstance(coords, np.ndarray) else quantize_label_th
    return both(coords, labels, ignore_label)


def quantize_label_th(coords: Tensor, labels: Tensor, invalid_label: int) -> tuple[Tensor, Tensor, Tensor]:
    rows, inverse = quantize_th(coords)
    found = labels.long()[rows]
    differ = labels.long() != found[inverse]
    found = found.index_fill(0, inverse[differ], invalid_label)
    return rows, inverse, found


def quantize_label_np(
    coords: np.ndarray, labels: np.ndarray, invalid_label: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    found = quantize_label_th(
        torch.from_numpy(np.ascontiguousarray(coords)), torch.from_numpy(np.ascontiguousarray(labels)), invalid_label
    )
    rows, inverse, kept = (t.int().numpy() for t in found)
    return rows, inverse, kept


def sparse_quantize(
    coordinates: Array, features: Array | None = None, labels: Array | None = None, ignore_label: int = -100,
    return_index: bool = False, return_inverse: bool = False, return_maps_only: bool = False,
    quantization_size: Any = None, device: Any = "cpu",
) -> Any:  # fmt: skip
    """The distinct cells that points [N, D] lie in, in the order of their first points, and more that is asked for.

    Args:
        coordinates: array or tensor.
        features: [N, C]; those of the first point of each cell are returned.
        labels: [N]; those of each cell are returned, `ignore_label` where its points do not agree.
        return_index: the first point of each cell, too.
        return_inverse: the cell of each point, too; goes with `return_index`.
        return_maps_only: nothing but these.
        quantization_size: the size of a cell, one for all axes or one for each.
        device: where cells without labels are worked out; they come back as tensors, even of an array.

    >>> import numpy as np
    >>> from triops.compat.minkowski_engine.utils import sparse_quantize
    >>> points, labels = np.array([[0.1], [0.2], [-0.1]]), np.array([3, 4, 5], dtype=np.int32)
    >>> [found.tolist() for found in sparse_quantize(points, labels=labels, return_index=True)]
    [[[0], [-1]], [-100, 5], [0, 2]]
    """
    is_array = isinstance(coordinates, np.ndarray)
    if not is_array and not isinstance(coordinates, Tensor):
        raise TypeError(f"sparse_quantize: coordinates must be an array or a tensor, got {type(coordinates).__name__}")
    if coordinates.ndim != 2:
        raise ValueError(f"sparse_quantize: coordinates must have shape [N, D], got {list(coordinates.shape)}")
    if return_inverse and not return_index:
        raise ValueError("sparse_quantize: return_inverse goes with return_index")
    for name, value in (("features", features), ("labels", labels)):
        if value is not None and len(value) != len(coordinates):
            raise ValueError(f"sparse_quantize: {name} must have {len(coordinates)} rows, got {len(value)}")
    cells = _cells(coordinates, quantization_size)
    if labels is not None:
        rows, inverse, kept = quantize_label(cells, labels, ignore_label)
    else:
        cells = (torch.from_numpy(cells) if is_array else cells).to(device)
        rows, inverse = quantize_th(cells)
    if return_maps_only and labels is None:
        return (rows, inverse) if return_inverse else rows
    found = [cells[rows]]
    if features is not None:
        found.append(features[rows.cpu() if isinstance(rows, Tensor) and is_array else rows])
    found += [] if labels is None else [kept]
    found += [rows] if return_index else []
    found += [inverse] if return_inverse else []
    return found[0] if len(found) == 1 else tuple(found)


def unique_coordinate_map(coordinates: Tensor, tensor_stride: Any = 1) -> tuple[Tensor, Tensor]:
    """The first row of each site of int32 [N, 1 + D], and which of them each row is."""
    return CoordinateManager(D=coordinates.shape[1] - 1).insert_and_map(coordinates, tensor_stride)[1]


def _cells(coordinates: Array, size: Any) -> Array:
    """int32, rounded down."""
    if isinstance(size, (Sequence, np.ndarray, Tensor)):
        if len(size) != coordinates.shape[1]:
            raise ValueError(f"sparse_quantize: quantization_size must have {coordinates.shape[1]} entries, got {size}")
        each = [float(s) for s in size]
        size = np.array(each) if isinstance(coordinates, np.ndarray) else torch.tensor(each, device=coordinates.device)
    scaled = coordinates if size is None else coordinates / size
    if isinstance(scaled, np.ndarray):
        return np.floor(scaled).astype(np.int32)
    return scaled.floor().int() if scaled.is_floating_point() else scaled.int()


__all__ = [
    "fnv_hash_vec", "quantize", "quantize_label", "quantize_label_np", "quantize_label_th", "quantize_np",
    "quantize_th", "ravel_hash_vec", "sparse_quantize", "unique_coordinate_map",
]  # fmt: skip
