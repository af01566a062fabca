"""What the compiled module of MinkowskiEngine names: its enumerations, and the key of a coordinate map."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import Any

MapKey = tuple[tuple[int, ...], str]  # tensor stride and string id: what a manager keeps a map by


class _Enum(IntEnum):
    """Printed as the compiled module prints them, by every Python."""

    def __str__(self) -> str:
        return f"{type(self).__name__}.{self.name}"


class GPUMemoryAllocatorType(_Enum):
    PYTORCH = 0
    CUDA = 1


class CUDAKernelMapMode(_Enum):
    MEMORY_EFFICIENT = 0
    SPEED_OPTIMIZED = 1


class MinkowskiAlgorithm(_Enum):
    DEFAULT = 0
    MEMORY_EFFICIENT = 1
    SPEED_OPTIMIZED = 2


class CoordinateMapType(_Enum):
    CPU = 0
    CUDA = 1


class RegionType(_Enum):
    """Shapes of kernels. Members are integers: programs count them from 0."""

    HYPER_CUBE = 0
    HYPER_CROSS = 1
    CUSTOM = 2


class PoolingMode(_Enum):
    LOCAL_SUM_POOLING = 0
    LOCAL_AVG_POOLING = 1
    LOCAL_MAX_POOLING = 2
    GLOBAL_SUM_POOLING_DEFAULT = 3
    GLOBAL_AVG_POOLING_DEFAULT = 4
    GLOBAL_MAX_POOLING_DEFAULT = 5
    GLOBAL_SUM_POOLING_KERNEL = 6
    GLOBAL_AVG_POOLING_KERNEL = 7
    GLOBAL_MAX_POOLING_KERNEL = 8
    GLOBAL_SUM_POOLING_PYTORCH_INDEX = 9
    GLOBAL_AVG_POOLING_PYTORCH_INDEX = 10
    GLOBAL_MAX_POOLING_PYTORCH_INDEX = 11


class BroadcastMode(_Enum):
    ELEMENTWISE_ADDITON = 0  # spelled so
    ELEMENTWISE_MULTIPLICATION = 1


class ConvolutionMode(_Enum):
    """Ways to multiply matrices on a GPU; taken, without effect."""

    DEFAULT = 0
    DIRECT_GEMM = 1
    COPY_GEMM = 2


class CoordinateMapKey:
    """The name of a coordinate map in its manager: a tensor stride per axis, and a string.

    `CoordinateMapKey(D + 1)` is not set yet: the function that it is given to sets it to the map that it makes.

    >>> from triops.compat.minkowski_engine import CoordinateMapKey
    >>> key = CoordinateMapKey([2, 2], "pruned")
    >>> key, key.get_tensor_stride(), CoordinateMapKey(3).is_key_set()
    (coordinate map key:[2, 2]:pruned, [2, 2], False)
    """

    def __init__(self, tensor_stride: int | Sequence[int], string_id: str = "") -> None:
        self._key: MapKey | None = None
        if isinstance(tensor_stride, Sequence):
            self._size = len(tensor_stride) + 1
            self.set_key(tensor_stride, string_id)
        else:
            self._size = int(tensor_stride)

    def is_key_set(self) -> bool:
        return self._key is not None

    def get_coordinate_size(self) -> int:
        return self._size

    def set_key(self, tensor_stride: Any, string_id: str | None = None) -> None:
        if string_id is None:  # (tensor stride, string id) as one
            tensor_stride, string_id = tensor_stride
        stride = tuple(int(s) for s in tensor_stride)
        if len(stride) != self._size - 1:
            raise ValueError(f"CoordinateMapKey: tensor_stride must have {self._size - 1} entries, got {list(stride)}")
        self._key = stride, str(string_id)

    @property
    def map_key(self) -> MapKey:
        if self._key is None:
            raise ValueError("CoordinateMapKey: the key is not set: no coordinate map was made under it yet")
        return self._key

    def get_key(self) -> tuple[list[int], str]:
        stride, string_id = self.map_key
        return list(stride), string_id

    def get_tensor_stride(self) -> list[int]:
        return list(self.map_key[0])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CoordinateMapKey) and self._key is not None and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    def __repr__(self) -> str:
        stride, string_id = self._key or ((), "")
        return f"coordinate map key:{list(stride)}" + (f":{string_id}" if string_id else "")
