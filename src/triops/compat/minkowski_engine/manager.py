"""Coordinate maps, and the rulebooks between them: `MinkowskiEngine.MinkowskiCoordinateManager`."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from triops.compat.minkowski_engine import sites
from triops.compat.minkowski_engine.common import convert_to_int_list
from triops.compat.minkowski_engine.kernels import KernelGenerator, kernel_offsets
from triops.compat.minkowski_engine.keys import (
    CoordinateMapKey,
    CoordinateMapType,
    GPUMemoryAllocatorType,
    MapKey,
    MinkowskiAlgorithm,
    RegionType,
)
from triops.ops.rulebook import Rulebook

Maps = tuple[Tensor, Tensor]


class CoordinateManager:
    """The coordinate maps of tensors that belong together, by tensor stride and string id, and what was worked out
    between them. Everything lives here and goes with it.

    The rows of a new map are in the order in which their sites come first: those of a strided map in the order of the
    rows they are made of, those of a union in the order of its tensors. Maps live where the first coordinates did.

    Attributes:
        maps: int32 [N, 1 + D] by tensor stride and string id.
        fields: float32 [N, 1 + D] by the same, of tensor fields.
        kernel_maps: rulebooks by input map, output map, kernel size, stride, dilation, shape, transposed, pooling.
    """

    def __init__(
        self, D: int = 0, num_threads: int = -1, coordinate_map_type: CoordinateMapType | None = None,
        allocator_type: GPUMemoryAllocatorType | None = None, minkowski_algorithm: MinkowskiAlgorithm | None = None,
    ) -> None:  # fmt: skip
        if D < 1:
            raise ValueError(f"CoordinateManager: D must be positive, got {D}")
        self.D = D
        self.minkowski_algorithm = MinkowskiAlgorithm.DEFAULT if minkowski_algorithm is None else minkowski_algorithm
        self.maps: dict[MapKey, Tensor] = {}
        self.fields: dict[MapKey, Tensor] = {}
        self.kernel_maps: dict[tuple[Any, ...], Rulebook] = {}
        self._field_maps: dict[tuple[MapKey, MapKey], Maps] = {}
        self._batches: dict[tuple[MapKey, bool], tuple[Tensor, Tensor | None, list[int]]] = {}

    @property
    def _manager(self) -> CoordinateManager:
        """Programs reach for the compiled manager behind this one; there is none."""
        return self

    # Maps

    def insert_and_map(
        self, coordinates: Tensor, tensor_stride: Any = 1, string_id: str = ""
    ) -> tuple[CoordinateMapKey, Maps]:
        """A new map of the distinct coordinates -> its key, the rows that were taken, and which one each row is.

        >>> import torch
        >>> from triops.compat.minkowski_engine import CoordinateManager
        >>> manager = CoordinateManager(D=1)
        >>> coordinates = torch.tensor([[0, 0], [0, 0], [0, 1], [0, 2]], dtype=torch.int32)
        >>> key, (unique_map, inverse_map) = manager.insert_and_map(coordinates)
        >>> unique_map.tolist(), inverse_map.tolist()
        ([0, 2, 3], [0, 0, 1, 2])
        """
        self._check_coordinates("insert_and_map", coordinates)
        if coordinates.dtype != torch.int32:
            raise TypeError(f"CoordinateManager: coordinates must be int32, got {coordinates.dtype}")
        if bool((coordinates[:, 0] < 0).any()):
            raise ValueError("CoordinateManager: the first column of coordinates is the batch and must not be negative")
        rows, inverse = sites.distinct(coordinates)
        key = self._new_key(convert_to_int_list(tensor_stride, self.D), string_id)
        self.maps[key] = coordinates[rows]
        return as_key(key), (rows, inverse)

    def insert_field(self, coordinates: Tensor, tensor_stride: Any, string_id: str = "") -> CoordinateMapKey:
        """Keep the coordinates of a tensor field, which may be anywhere and the same."""
        self._check_coordinates("insert_field", coordinates)
        key = self._new_key(convert_to_int_list(tensor_stride, self.D), string_id, self.fields)
        self.fields[key] = coordinates.detach().float()
        return as_key(key)

    def field_to_sparse_insert_and_map(
        self, field_map_key: CoordinateMapKey, sparse_tensor_stride: Any, sparse_tensor_string_id: str = ""
    ) -> tuple[CoordinateMapKey, Maps]:
        """The map of the cells that a field lies in, of the size of the tensor stride."""
        stride = convert_to_int_list(sparse_tensor_stride, self.D)
        cells = self._cells(self._field(field_map_key), stride)
        key, found = self.insert_and_map(cells, stride, sparse_tensor_string_id)
        self._field_maps[field_map_key.map_key, key.map_key] = found
        return key, found

    def field_to_sparse_map(self, field_map_key: CoordinateMapKey, sparse_map_key: CoordinateMapKey) -> Maps:
        """Of the points of a field whose cell is in a map: the row there, and the row of the point."""
        cells = self._cells(self._field(field_map_key), sparse_map_key.get_tensor_stride())
        rows = self._rows_in(sparse_map_key, cells)
        points = (rows >= 0).nonzero()[:, 0]
        return rows[points], points

    def exists_field_to_sparse(self, field_map_key: CoordinateMapKey, sparse_map_key: CoordinateMapKey) -> bool:
        return (field_map_key.map_key, sparse_map_key.map_key) in self._field_maps

    def field_to_sparse_keys(self, field_map_key: CoordinateMapKey) -> list[CoordinateMapKey]:
        return [as_key(made) for field, made in self._field_maps if field == field_map_key.map_key]

    def get_field_to_sparse_map(self, field_map_key: CoordinateMapKey, sparse_map_key: CoordinateMapKey) -> Maps:
        """What `field_to_sparse_insert_and_map` found."""
        return self._field_maps[field_map_key.map_key, sparse_map_key.map_key]

    def stride(self, coordinate_map_key: CoordinateMapKey, stride: Any, string_id: str = "") -> CoordinateMapKey:
        """The map of the sites rounded down to `stride` times the tensor stride; the one of that name, if there is."""
        coordinates = self._sites(coordinate_map_key)
        tensor_stride, own_id = coordinate_map_key.map_key
        steps = [s * t for s, t in zip(convert_to_int_list(stride, self.D), tensor_stride, strict=True)]
        key = tuple(steps), string_id or own_id
        if key not in self.maps:
            cells = sites.strided(coordinates, steps)
            self.maps[key] = cells[sites.distinct(cells)[0]]
        return as_key(key)

    def expand(self, in_key: CoordinateMapKey, generator: KernelGenerator, is_transpose: bool) -> CoordinateMapKey:
        """The map of the sites that a kernel makes, centred on those of a map."""
        coordinates, tensor_stride = self._sites(in_key), in_key.get_tensor_stride()
        stride = generator.kernel_stride
        if is_transpose:
            if any(t % s for t, s in zip(tensor_stride, stride, strict=True)):
                raise ValueError(
                    f"MinkowskiEngine: a tensor stride of {tensor_stride} is not divisible by a stride of {stride}"
                )
            steps = [t // s for t, s in zip(tensor_stride, stride, strict=True)]
        else:
            steps = [t * s for t, s in zip(tensor_stride, stride, strict=True)]
        key: MapKey = tuple(steps), ""
        if key in self.maps:
            if is_transpose and not generator.expand_coordinates:
                return as_key(key)
            key = self.get_random_string_id(steps, "")
        step = steps if is_transpose else tensor_stride
        offsets = self._offsets(generator, step, coordinates)
        self.maps[key] = sites.reached(coordinates, offsets, None if is_transpose else steps)
        return as_key(key)

    def prune(self, in_key: CoordinateMapKey, keep: Tensor) -> CoordinateMapKey:
        """The map of the rows that `keep` keeps."""
        key = self._new_key(in_key.map_key[0], "pruned")
        self.maps[key] = self._sites(in_key)[keep]
        return as_key(key)

    def union_map(self, in_keys: Sequence[CoordinateMapKey], out_key: CoordinateMapKey) -> list[Tensor]:
        """Set `out_key` to the union of maps -> for each int64 [2, N]: its rows, and what they are in the union."""
        if len(in_keys) < 2:
            raise ValueError(f"CoordinateManager: union_map takes two maps or more, got {len(in_keys)}")
        if out_key.is_key_set():
            raise ValueError("CoordinateManager: out_key of union_map must not be set yet")
        parts = [self._sites(key) for key in in_keys]
        every = torch.cat(parts)
        rows, numbers = sites.distinct(every)
        strides = zip(*(key.map_key[0] for key in in_keys), strict=True)
        key = self.get_random_string_id([min(stride) for stride in strides], "merge")
        self.maps[key] = every[rows]
        out_key.set_key(key)
        own = (torch.arange(part.shape[0], device=part.device) for part in parts)
        found = torch.split(numbers, [part.shape[0] for part in parts])
        return [torch.stack(pair) for pair in zip(own, found, strict=True)]

    def size(self, coordinate_map_key: CoordinateMapKey) -> int:
        return self._sites(coordinate_map_key).shape[0]

    def get_coordinates(self, coords_key_or_tensor_strides: Any) -> Tensor:
        """int32 [N, 1 + D], of the map of a key, or of the first map of a tensor stride. A copy."""
        return self._sites(self._get_coordinate_map_key(coords_key_or_tensor_strides)).clone()

    def get_coordinate_field(self, coords_key_or_tensor_strides: Any) -> Tensor:
        return self._field(self._get_coordinate_map_key(coords_key_or_tensor_strides)).clone()

    def get_coordinate_map_keys(self, tensor_stride: Sequence[int]) -> list[CoordinateMapKey]:
        return [as_key(key) for key in self.maps if list(key[0]) == list(tensor_stride)]

    def get_unique_coordinate_map_key(self, tensor_stride: Any) -> MapKey:
        return self.get_random_string_id(convert_to_int_list(tensor_stride, self.D), "")

    def get_random_string_id(self, tensor_stride: Sequence[int], string_id: str) -> MapKey:
        """A name that no map has: numbered, not random, so that two runs make the same."""
        return self._fresh(tuple(tensor_stride), string_id, self.maps)

    # Batches

    def origin(self) -> CoordinateMapKey:
        """The map of the origins: one site for each element of the batch, ascending."""
        key: MapKey = (0,) * self.D, ""
        if key not in self.maps:
            known = [*self.maps.values(), *(self._cells(field) for field in self.fields.values())]
            if not known:
                raise ValueError("CoordinateManager: there is no coordinate map")
            batches = torch.cat([coordinates[:, 0].unique() for coordinates in known]).unique()
            self.maps[key] = torch.nn.functional.pad(batches[:, None], (0, self.D))
        return as_key(key)

    origin_field = origin

    def origin_map_size(self) -> int:
        return self.size(self.origin())

    number_of_unique_batch_indices = origin_map_size

    def origin_map(self, key: CoordinateMapKey) -> tuple[Tensor, list[Tensor]]:
        """The elements of the batch, int64 ascending, and the rows of every element from 0 to the highest."""
        return self._rows_of_elements(key, False)

    def origin_field_map(self, key: CoordinateMapKey) -> tuple[Tensor, list[Tensor]]:
        return self._rows_of_elements(key, True)

    def batches(self, key: CoordinateMapKey, of_field: bool = False) -> tuple[Tensor, Tensor | None, list[int]]:
        """int64 [N], the row of the origin map that each row belongs to; the rows, element by element, or None where
        that is their order; and how many each element has."""
        known = key.map_key, of_field
        if known not in self._batches:
            coordinates = self._field(key) if of_field else self._sites(key)
            elements = self._sites(self.origin())[:, 0].contiguous()
            batch = coordinates[:, 0].round().to(elements.dtype).contiguous()
            numbers = torch.searchsorted(elements, batch)
            inside = numbers.clamp(max=max(elements.shape[0] - 1, 0))
            if numbers.numel() and not bool((elements[inside] == batch).all()):
                raise ValueError("CoordinateManager: a map has elements of the batch that the map of origins lacks")
            ascends = bool((numbers[1:] >= numbers[:-1]).all())
            order = None if ascends else numbers.argsort(stable=True)
            counts = torch.bincount(numbers, minlength=elements.shape[0]).tolist()
            self._batches[known] = numbers, order, counts
        return self._batches[known]

    # What lies between maps

    def rulebook(
        self, in_key: CoordinateMapKey, out_key: CoordinateMapKey, kernel_size: Sequence[int], stride: Sequence[int],
        dilation: Sequence[int], region_type: int, is_transpose: bool = False, is_pool: bool = False,
    ) -> Rulebook:  # fmt: skip
        """Which row of the input map meets which row of the output map under which offset; made once."""
        kernel = kernel_size, stride, dilation, region_type
        name = _name(in_key, out_key, *kernel, is_transpose, is_pool)
        swapped = _name(out_key, in_key, *kernel, False, is_pool)
        if name in self.kernel_maps:
            return self.kernel_maps[name]
        if is_transpose and swapped in self.kernel_maps:
            book = self.kernel_maps[swapped].inverse()
        else:
            whole = is_pool and tuple(kernel_size) == tuple(stride)  # every site of a cell
            steps = (out_key if is_transpose else in_key).map_key[0]
            if whole:
                offsets = kernel_offsets(kernel_size, RegionType.HYPER_CUBE, first_at_zero=True)
                offsets = offsets * offsets.new_tensor(steps)
            else:
                offsets = kernel_offsets(kernel_size, region_type)
                offsets = offsets * offsets.new_tensor([s * d for s, d in zip(steps, dilation, strict=True)])
            inputs, outputs = self._sites(in_key), self._sites(out_key)
            mirrored = (
                in_key == out_key and not whole and region_type == RegionType.HYPER_CUBE
                and all(size % 2 for size in kernel_size)
            )  # fmt: skip
            offsets = offsets.to(inputs.device)
            book = sites.rulebook(inputs, outputs, -offsets if is_transpose else offsets, mirrored)
        self.kernel_maps[name] = book
        return book

    def convolution_rulebook(
        self, in_key: CoordinateMapKey, out_key: CoordinateMapKey, generator: KernelGenerator, is_transpose: bool
    ) -> Rulebook:
        """`rulebook` of a convolution, with what its kernels need beside the tables."""
        kernel = generator.kernel_size, generator.kernel_stride, generator.kernel_dilation, generator.region_type
        book = self.rulebook(in_key, out_key, *kernel, is_transpose)
        prepared = book.prepared(backward=torch.is_grad_enabled())
        if prepared is not book:
            self.kernel_maps[_name(in_key, out_key, *kernel, is_transpose, False)] = prepared
        return prepared

    def kernel_map(
        self, in_key: Any, out_key: Any, stride: Any = 1, kernel_size: Any = 3, dilation: Any = 1,
        region_type: int = RegionType.HYPER_CUBE, region_offset: Tensor | None = None, is_transpose: bool = False,
        is_pool: bool = False,
    ) -> dict[int, Tensor]:  # fmt: skip
        """int32 [2, P] by offset: the rows of the input map and those of the output map that they meet, ascending.

        An offset without any is left out. Where a pool takes whole cells there is one entry, 0.
        """
        in_key, out_key = self._get_coordinate_map_key(in_key), self._get_coordinate_map_key(out_key)
        size, step, gap = (convert_to_int_list(value, self.D) for value in (kernel_size, stride, dilation))
        if all(s == 1 for s in size):
            region_type = RegionType.HYPER_CUBE
        gather = self.rulebook(in_key, out_key, size, step, gap, region_type, is_transpose, is_pool).gather
        found = (gather >= 0).nonzero()
        pairs = torch.stack([gather[found[:, 0], found[:, 1]], found[:, 1].int()])
        if is_pool and size == step:
            return {0: pairs} if pairs.shape[1] else {}
        counts = (gather >= 0).sum(1).tolist()
        return {k: part for k, part in enumerate(torch.split(pairs, counts, 1)) if part.shape[1]}

    def get_kernel_map(self, *args: Any, **kwargs: Any) -> dict[int, Tensor]:
        warnings.warn("`get_kernel_map` is deprecated: `kernel_map` is its name", DeprecationWarning, stacklevel=2)
        return self.kernel_map(*args, **kwargs)

    def stride_map(self, in_key: CoordinateMapKey, stride_key: CoordinateMapKey) -> Maps:
        """Rows of a map, and of each the row of the site of a strided map that it lies in."""
        cells = sites.strided(self._sites(in_key), stride_key.map_key[0])
        rows = self._rows_in(stride_key, cells)
        inside = (rows >= 0).nonzero()[:, 0]
        return inside, rows[inside]

    def interpolation_map_weight(self, key: CoordinateMapKey, samples: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Row of the map, row of the sample and weight of every corner of a sample's cell that is in the map."""
        table, weights = self.corners(key, samples)
        found = (table >= 0).nonzero()
        return table[found[:, 0], found[:, 1]], found[:, 1].int(), weights[found[:, 0], found[:, 1]]

    def corners(self, key: CoordinateMapKey, samples: Tensor) -> tuple[Tensor, Tensor]:
        """int32 [2**D, M], the row of each corner of the cell that each sample lies in, or -1, and the weights of
        linear interpolation, of the dtype of the samples. The last axis is the fastest."""
        self._check_coordinates("interpolation", samples)
        coordinates = self._sites(key)
        if samples.device != coordinates.device:
            raise ValueError(f"MinkowskiEngine: the map is on {coordinates.device}, the points are on {samples.device}")
        with torch.no_grad():
            stride = coordinates.new_tensor(key.map_key[0])
            cells = self._cells(samples, key.map_key[0])
            corner = kernel_offsets([2] * self.D, RegionType.HYPER_CUBE).flip(1).to(stride.device)
            table = sites.neighbors(coordinates, cells, corner * stride)
            places = cells[None, :, 1:] + (corner * stride)[:, None]  # [2**D, M, D]
            distance = (samples[None, :, 1:] - places).abs() / stride
            return table, (1 - distance).prod(-1)

    def _rows_in(self, key: CoordinateMapKey, cells: Tensor) -> Tensor:
        """int64: the row of each cell in a map, or -1."""
        return sites.neighbors(self._sites(key), cells, cells.new_zeros((1, self.D)))[0].long()

    def _rows_of_elements(self, key: CoordinateMapKey, of_field: bool) -> tuple[Tensor, list[Tensor]]:
        numbers, order, counts = self.batches(key, of_field)
        if order is None:
            order = torch.arange(numbers.shape[0], device=numbers.device)
        elements = self._sites(self.origin())[:, 0].long()
        rows = [order[:0]] * (int(elements.max()) + 1 if elements.numel() else 0)
        for element, part in zip(elements.tolist(), torch.split(order, counts), strict=True):
            rows[element] = part
        return elements, rows

    # Helpers

    def _get_coordinate_map_key(self, key_or_tensor_strides: Any) -> CoordinateMapKey:
        if isinstance(key_or_tensor_strides, CoordinateMapKey):
            return key_or_tensor_strides
        stride = convert_to_int_list(key_or_tensor_strides, self.D)
        keys = self.get_coordinate_map_keys(stride)
        if not keys:
            raise ValueError(f"CoordinateManager: there is no coordinate map of tensor stride {stride}")
        return keys[0]

    def _offsets(self, generator: KernelGenerator, steps: Sequence[int], like: Tensor) -> Tensor:
        offsets = kernel_offsets(generator.kernel_size, generator.region_type)
        scale = [s * d for s, d in zip(steps, generator.kernel_dilation, strict=True)]
        return (offsets * offsets.new_tensor(scale)).to(like.device)

    def _sites(self, key: CoordinateMapKey) -> Tensor:
        if key.map_key not in self.maps:
            raise ValueError(f"CoordinateManager: there is no coordinate map of {key}")
        return self.maps[key.map_key]

    def _field(self, key: CoordinateMapKey) -> Tensor:
        if key.map_key not in self.fields:
            raise ValueError(f"CoordinateManager: there is no coordinate field of {key}")
        return self.fields[key.map_key]

    @staticmethod
    def _cells(points: Tensor, tensor_stride: Sequence[int] | None = None) -> Tensor:
        """int32: the batch rounded to the nearest, positions rounded down to multiples of the tensor stride."""
        where = points[:, 1:].floor()
        if tensor_stride is not None:
            stride = points.new_tensor(list(tensor_stride))
            where = (points[:, 1:] / stride).floor() * stride
        return torch.cat([points[:, :1].round(), where], 1).int()

    def _new_key(self, tensor_stride: Sequence[int], string_id: str, among: Any = None) -> MapKey:
        among = self.maps if among is None else among
        key = tuple(tensor_stride), string_id
        return self._fresh(*key, among) if key in among else key

    @staticmethod
    def _fresh(tensor_stride: tuple[int, ...], string_id: str, among: Any) -> MapKey:
        number = len(among)
        while (tensor_stride, f"{string_id}-{number}".lstrip("-")) in among:
            number += 1
        return tensor_stride, f"{string_id}-{number}".lstrip("-")

    def _check_coordinates(self, name: str, coordinates: Tensor) -> None:
        if not isinstance(coordinates, Tensor):
            raise TypeError(f"CoordinateManager.{name}: coordinates must be a Tensor, got {type(coordinates).__name__}")
        if coordinates.dim() != 2 or coordinates.shape[1] != self.D + 1:
            raise ValueError(
                f"CoordinateManager.{name}: coordinates must have shape [N, {self.D + 1}], batch and position, got "
                f"{list(coordinates.shape)}"
            )

    def __repr__(self) -> str:
        lines = [f"\t{as_key(key)}\t{coordinates.shape[0]} sites" for key, coordinates in self.maps.items()]
        lines += [f"\tfield {as_key(key)}\t{points.shape[0]} points" for key, points in self.fields.items()]
        return "\n".join([f"{type(self).__name__}(D={self.D},", *lines, f"\tkernel maps: {len(self.kernel_maps)})\n"])


class CoordsManager:
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise DeprecationWarning("`CoordsManager` is of MinkowskiEngine 0.4: `CoordinateManager` is its name")


def _name(
    in_key: CoordinateMapKey, out_key: CoordinateMapKey, kernel_size: Sequence[int], stride: Sequence[int],
    dilation: Sequence[int], region_type: int, is_transpose: bool, is_pool: bool,
) -> tuple[Any, ...]:  # fmt: skip
    """What a rulebook is kept by."""
    sizes = tuple(kernel_size), tuple(stride), tuple(dilation)
    return in_key.map_key, out_key.map_key, sizes, int(region_type), is_transpose, is_pool


def as_key(key: MapKey) -> CoordinateMapKey:
    return CoordinateMapKey(key[0], key[1])


def set_coordinate_map_type(coordinate_map_type: CoordinateMapType) -> None:
    """Taken, without effect: maps live where their coordinates do."""


def set_gpu_allocator(backend: GPUMemoryAllocatorType) -> None:
    """Taken, without effect: all memory is torch's."""


set_memory_manager_backend = set_gpu_allocator

__all__ = [
    "CoordinateManager", "CoordinateMapKey", "CoordinateMapType", "CoordsManager", "GPUMemoryAllocatorType",
    "MinkowskiAlgorithm", "RegionType", "set_coordinate_map_type", "set_gpu_allocator", "set_memory_manager_backend",
]  # fmt: skip
