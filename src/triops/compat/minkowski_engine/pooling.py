"""Poolings over kernels and over whole clouds: `MinkowskiEngine.MinkowskiPooling`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import triops
from triops.compat.minkowski_engine.common import MinkowskiModuleBase
from triops.compat.minkowski_engine.kernels import KernelGenerator
from triops.compat.minkowski_engine.keys import CoordinateMapKey, PoolingMode
from triops.compat.minkowski_engine.manager import CoordinateManager
from triops.compat.minkowski_engine.rows import by_batch, gathered_sum, reduced
from triops.compat.minkowski_engine.sparse_tensor import SparseTensor, map_key_of
from triops.compat.minkowski_engine.tensor_field import TensorField


def pooled(
    features: Tensor, mode: PoolingMode, generator: KernelGenerator, in_key: CoordinateMapKey,
    out_key: CoordinateMapKey, manager: CoordinateManager, is_transpose: bool = False,
) -> Tensor:  # fmt: skip
    """Features [N, C] of one map -> [A, C] of another. A kernel as large as its stride takes whole cells.

    A mean is over the sites that are there. Transposed, it is the sum of the sites that a site lies in the kernel of.
    """
    if not out_key.is_key_set():
        if is_transpose:
            made = manager.expand(in_key, generator, True)
        else:
            made = manager.stride(in_key, generator.kernel_stride)
        out_key.set_key(made.map_key)
    book = manager.rulebook(
        in_key, out_key, generator.kernel_size, generator.kernel_stride, generator.kernel_dilation,
        generator.region_type, is_transpose, True,
    )  # fmt: skip
    if is_transpose or mode == PoolingMode.LOCAL_SUM_POOLING:
        return gathered_sum(features, book.tables.gather)
    if mode == PoolingMode.LOCAL_MAX_POOLING:
        return triops.sparse_max_pool(features, book)
    return triops.sparse_avg_pool(features, book)


class MinkowskiLocalPoolingFunction:
    is_transpose = False

    @classmethod
    def apply(
        cls, input_features: Tensor, pooling_mode: PoolingMode, kernel_generator: KernelGenerator,
        in_coordinate_map_key: CoordinateMapKey, out_coordinate_map_key: CoordinateMapKey | None = None,
        coordinate_manager: CoordinateManager | None = None,
    ) -> Tensor:  # fmt: skip
        if coordinate_manager is None:
            raise TypeError(f"{cls.__name__}: coordinate_manager must be given")
        out_key = out_coordinate_map_key or CoordinateMapKey(in_coordinate_map_key.get_coordinate_size())
        return pooled(
            input_features, pooling_mode, kernel_generator, in_coordinate_map_key, out_key, coordinate_manager,
            cls.is_transpose,
        )  # fmt: skip


class MinkowskiLocalPoolingTransposeFunction(MinkowskiLocalPoolingFunction):
    is_transpose = True


class MinkowskiPoolingBase(MinkowskiModuleBase):
    def __init__(
        self, kernel_size: Any, stride: Any = 1, dilation: Any = 1, kernel_generator: KernelGenerator | None = None,
        is_transpose: bool = False, pooling_mode: PoolingMode = PoolingMode.LOCAL_AVG_POOLING,
        dimension: int | None = -1,
    ) -> None:  # fmt: skip
        super().__init__()
        if dimension is None or dimension <= 0:
            raise ValueError(f"{type(self).__name__}: dimension must be positive, got {dimension}")
        self.is_transpose = is_transpose
        self.kernel_generator = kernel_generator or KernelGenerator(kernel_size, stride, dilation, dimension=dimension)
        self.pooling_mode = pooling_mode
        self.dimension = dimension
        self.pooling = MinkowskiLocalPoolingTransposeFunction() if is_transpose else MinkowskiLocalPoolingFunction()

    def forward(self, input: SparseTensor, coordinates: Any = None) -> SparseTensor:
        """coordinates: where results are wanted: a CoordinateMapKey, a SparseTensor, or int32 [A, 1 + D]."""
        if not isinstance(input, SparseTensor):
            raise TypeError(f"{type(self).__name__}: input must be a SparseTensor, got {type(input).__name__}")
        if self.dimension != input.D:
            raise ValueError(f"{type(self).__name__}: input must have {self.dimension} axes, got {input.D}")
        steps = zip(input.tensor_stride, self.kernel_generator.kernel_stride, strict=True)
        stride = [max(t // s, 1) if self.is_transpose else t * s for t, s in steps]
        out_key = map_key_of(input, coordinates, stride)
        out = pooled(
            input.F, self.pooling_mode, self.kernel_generator, input.coordinate_map_key, out_key,
            input.coordinate_manager, self.is_transpose,
        )  # fmt: skip
        return input._like(out, out_key)

    def __repr__(self) -> str:
        generator = self.kernel_generator
        return (
            f"{type(self).__name__}(kernel_size={generator.kernel_size}, stride={generator.kernel_stride}, "
            f"dilation={generator.kernel_dilation})"
        )


class _MinkowskiPooling(MinkowskiPoolingBase):
    MODE: PoolingMode

    def __init__(
        self, kernel_size: Any = -1, stride: Any = 1, dilation: Any = 1,
        kernel_generator: KernelGenerator | None = None, dimension: int | None = None,
    ) -> None:  # fmt: skip
        super().__init__(kernel_size, stride, dilation, kernel_generator, False, self.MODE, dimension)


class MinkowskiAvgPooling(_MinkowskiPooling):
    """The mean of the sites in the kernel that are there.

    >>> import torch
    >>> import triops.compat.minkowski_engine as ME
    >>> coordinates = torch.tensor([[0, -1], [0, 0], [0, 1]], dtype=torch.int32)
    >>> x = ME.SparseTensor(torch.tensor([[1.0], [2.0], [4.0]]), coordinates)
    >>> y = ME.MinkowskiAvgPooling(kernel_size=2, stride=2, dimension=1)(x)
    >>> y.C.tolist(), y.F.tolist()
    ([[0, -2], [0, 0]], [[1.0], [3.0]])
    """

    MODE = PoolingMode.LOCAL_AVG_POOLING


class MinkowskiSumPooling(_MinkowskiPooling):
    MODE = PoolingMode.LOCAL_SUM_POOLING


class MinkowskiMaxPooling(_MinkowskiPooling):
    """The highest of the sites in the kernel that are there; of equal ones that of the first offset has the
    gradient."""

    MODE = PoolingMode.LOCAL_MAX_POOLING


class MinkowskiPoolingTranspose(MinkowskiPoolingBase):
    """Features of a coarse map handed to the sites of a finer one, summed where several meet."""

    def __init__(
        self, kernel_size: Any, stride: Any, dilation: Any = 1, kernel_generator: KernelGenerator | None = None,
        expand_coordinates: bool = False, dimension: int | None = None,
    ) -> None:  # fmt: skip
        if kernel_generator is None and dimension is not None:
            kernel_generator = KernelGenerator(
                kernel_size, stride, dilation, expand_coordinates=expand_coordinates, dimension=dimension
            )
        super().__init__(kernel_size, stride, dilation, kernel_generator, True, dimension=dimension)


def globally_pooled(features: Tensor, mode: PoolingMode, numbers: tuple[Tensor, Tensor | None, list[int]]) -> Tensor:
    """[N, C] -> [B, C], element by element of the batch; 0 for one that has no site. `numbers`: of
    `CoordinateManager.batches`."""
    name = mode.name
    rows = []
    for part in by_batch(features, numbers[1], numbers[2]):
        if part.shape[0] == 0 or "SUM" in name:
            rows.append(part.sum(0))
        else:
            rows.append(part.max(0).values if "MAX" in name else part.mean(0))
    return torch.stack(rows) if rows else features.new_zeros((0, features.shape[1]))


class MinkowskiGlobalPoolingFunction:
    @staticmethod
    def apply(
        input_features: Tensor, pooling_mode: PoolingMode, in_coordinate_map_key: CoordinateMapKey,
        out_coordinate_map_key: CoordinateMapKey | None = None, coordinate_manager: CoordinateManager | None = None,
    ) -> Tensor:  # fmt: skip
        if coordinate_manager is None:
            raise TypeError("MinkowskiGlobalPoolingFunction: coordinate_manager must be given")
        found = coordinate_manager.maps.get(in_coordinate_map_key.map_key)
        of_field = found is None or found.shape[0] != input_features.shape[0]
        if out_coordinate_map_key is not None and not out_coordinate_map_key.is_key_set():
            out_coordinate_map_key.set_key(coordinate_manager.origin().map_key)
        return globally_pooled(
            input_features, pooling_mode, coordinate_manager.batches(in_coordinate_map_key, of_field)
        )


class MinkowskiGlobalPooling(MinkowskiModuleBase):
    """One row for each element of the batch, at the map of the origins; also of a TensorField."""

    def __init__(self, mode: PoolingMode = PoolingMode.GLOBAL_AVG_POOLING_PYTORCH_INDEX) -> None:
        super().__init__()
        if not isinstance(mode, PoolingMode):
            raise TypeError(f"{type(self).__name__}: mode must be a PoolingMode, got {mode!r}")
        self.pooling_mode = mode
        self.pooling = MinkowskiGlobalPoolingFunction()

    def forward(self, input: SparseTensor | TensorField, coordinates: Any = None) -> SparseTensor:
        manager = input.coordinate_manager
        numbers = manager.batches(input._key(), isinstance(input, TensorField))
        out = globally_pooled(input.F, self.pooling_mode, numbers)
        return SparseTensor(out, coordinate_map_key=manager.origin(), coordinate_manager=manager)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(mode={self.pooling_mode!s})"


class MinkowskiGlobalSumPooling(MinkowskiGlobalPooling):
    def __init__(self, mode: PoolingMode = PoolingMode.GLOBAL_SUM_POOLING_PYTORCH_INDEX) -> None:
        super().__init__(mode)


class MinkowskiGlobalAvgPooling(MinkowskiGlobalPooling):
    def __init__(self, mode: PoolingMode = PoolingMode.GLOBAL_AVG_POOLING_PYTORCH_INDEX) -> None:
        super().__init__(mode)


class MinkowskiGlobalMaxPooling(MinkowskiGlobalPooling):
    def __init__(self, mode: PoolingMode = PoolingMode.GLOBAL_MAX_POOLING_PYTORCH_INDEX) -> None:
        super().__init__(mode)


class MinkowskiDirectMaxPoolingFunction:
    """The highest of the rows `in_map` that go to each row of `out_map`; 0 where none does."""

    @staticmethod
    def apply(in_map: Tensor, out_map: Tensor, in_feat: Tensor, out_nrows: int, is_sorted: bool = False) -> Tensor:
        return reduced(triops.gather_points(in_feat, in_map), out_map, out_nrows, "max")


__all__ = [
    "MinkowskiAvgPooling", "MinkowskiDirectMaxPoolingFunction", "MinkowskiGlobalAvgPooling",
    "MinkowskiGlobalMaxPooling", "MinkowskiGlobalPooling", "MinkowskiGlobalPoolingFunction",
    "MinkowskiGlobalSumPooling", "MinkowskiLocalPoolingFunction", "MinkowskiLocalPoolingTransposeFunction",
    "MinkowskiMaxPooling", "MinkowskiPoolingBase", "MinkowskiPoolingTranspose", "MinkowskiSumPooling",
]  # fmt: skip
