"""Clouds as one batch: `MinkowskiEngine.utils.collation`."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

DTYPES = (torch.int32, torch.float32)


def batched_coordinates(coords: Sequence[Any], dtype: torch.dtype = torch.int32, device: Any = None) -> Tensor:
    """Arrays or tensors [N_i, D] as one tensor [N, 1 + D], the number of the cloud in front; rounded down for int32.

    >>> import numpy as np
    >>> from triops.compat.minkowski_engine.utils import batched_coordinates
    >>> batched_coordinates([np.array([[0.5, -0.5]]), np.array([[2, 3]])]).tolist()
    [[0, 0, -1], [1, 2, 3]]
    """
    clouds = _clouds("batched_coordinates", coords, dtype)
    parts = []
    for number, cloud in enumerate(clouds):
        if dtype == torch.int32 and cloud.is_floating_point():
            cloud = cloud.floor()
        parts.append(torch.nn.functional.pad(cloud.to(dtype), (1, 0), value=number))
    return torch.cat(parts).to("cpu" if device is None else device)


def sparse_collate(
    coords: Sequence[Any], feats: Sequence[Any], labels: Sequence[Any] | None = None, dtype: torch.dtype = torch.int32,
    device: Any = None,
) -> tuple[Any, ...]:  # fmt: skip
    """Coordinates, features and, where there are any, labels of clouds, each as one tensor.

    Labels that are not arrays stay a list.
    """
    clouds = _clouds("sparse_collate", coords, dtype)
    if device is None:
        device = clouds[0].device
    rows = [_tensor("sparse_collate", "feats", part) for part in feats]
    counts = [len(cloud) for cloud in clouds], [len(part) for part in rows]
    if sum(counts[0]) != sum(counts[1]):
        raise ValueError(f"sparse_collate: clouds have {counts[0]} points, and {counts[1]} rows of features")
    found: list[Any] = [batched_coordinates(clouds, dtype, device), torch.cat(rows)]
    if labels is not None:
        each: list[Any] = [torch.from_numpy(label) if isinstance(label, np.ndarray) else label for label in labels]
        found.append(torch.cat(each) if isinstance(each[0], Tensor) else each)
    return tuple(found)


def batch_sparse_collate(data: Sequence[Any], dtype: torch.dtype = torch.int32, device: Any = None) -> tuple[Any, ...]:
    """`sparse_collate` of a list of (coordinates, features) or (coordinates, features, labels), for a DataLoader."""
    parts = list(zip(*data, strict=True))
    return sparse_collate(parts[0], parts[1], parts[2] if len(parts) > 2 else None, dtype, device)


class SparseCollation:
    """`sparse_collate` of a list of (coordinates, features, labels), of as many as have `limit_numpoints` points."""

    def __init__(self, limit_numpoints: int = -1, dtype: torch.dtype = torch.int32, device: Any = None) -> None:
        self.limit_numpoints = limit_numpoints
        self.dtype = dtype
        self.device = device

    def __call__(self, list_data: Sequence[Any]) -> tuple[Any, ...]:
        taken: list[Any] = []
        points = 0
        for item in list_data:
            points += len(item[0])
            if 0 < self.limit_numpoints < points:
                logging.getLogger("triops").warning(
                    "SparseCollation: %d of %d clouds, as more have above %d points",
                    len(taken), len(list_data), self.limit_numpoints,
                )  # fmt: skip
                break
            taken.append(item)
        return batch_sparse_collate(taken, self.dtype, self.device)


def _clouds(name: str, coords: Sequence[Any], dtype: torch.dtype) -> list[Tensor]:
    if not isinstance(coords, Sequence) or not coords:
        raise TypeError(f"{name}: coords must be a sequence of arrays or tensors, got {type(coords).__name__}")
    if dtype not in DTYPES:
        raise TypeError(f"{name}: dtype must be int32 or float32, got {dtype}")
    clouds = [_tensor(name, "coords", cloud) for cloud in coords]
    shapes = [list(cloud.shape) for cloud in clouds]
    if any(len(shape) != 2 or shape[1] != shapes[0][-1] for shape in shapes):
        raise ValueError(f"{name}: coords must have shapes [N, D] of one D, got {shapes}")
    return clouds


def _tensor(name: str, what: str, value: Any) -> Tensor:
    if isinstance(value, np.ndarray):
        return torch.from_numpy(value)
    if not isinstance(value, Tensor):
        raise TypeError(f"{name}: {what} must be arrays or tensors, got {type(value).__name__}")
    return value


__all__ = ["SparseCollation", "batch_sparse_collate", "batched_coordinates", "sparse_collate"]
