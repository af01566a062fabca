"""Names of `spconv.utils`: the voxel generators of spconv 1 and 2, and overlaps of rotated boxes by their corners."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch

import triops
from triops.spconv import voxels
from triops.spconv.cppconstants import CPU_ONLY_BUILD
from triops.spconv.cumm import tensorview as tv

Array = np.ndarray[Any, Any]
Numbers = Sequence[float] | Array


class _Point2Voxel:
    """The voxels of a cloud of points, in and out as `cumm.tensorview` tensors; see `triops.voxelize`."""

    DIMENSIONS = 0
    DEVICE = "cpu"

    def __init__(
        self, vsize_xyz: Numbers, coors_range_xyz: Numbers, num_point_features: int, max_num_voxels: int,
        max_num_points_per_voxel: int,
    ) -> None:  # fmt: skip
        if len(vsize_xyz) != self.DIMENSIONS:
            raise ValueError(
                f"{type(self).__name__}: vsize_xyz must be {self.DIMENSIONS} numbers, got {len(vsize_xyz)}"
            )
        self._grid = voxels.Grid(type(self).__name__, vsize_xyz, coors_range_xyz)
        self._limits = num_point_features, max_num_voxels, max_num_points_per_voxel
        self._keep(voxels.nothing(self._grid, *self._limits, self.DEVICE))

    @property
    def grid_size(self) -> list[int]:
        """Cells along each axis, the last coordinate first."""
        return self._grid.size_zyx

    @property
    def vsize(self) -> list[float]:
        return self._grid.voxel_zyx

    @property
    def coors_range(self) -> list[float]:
        return self._grid.range_zyx

    @property
    def max_num_voxels(self) -> int:
        return self._limits[1]

    @classmethod
    def calc_meta_data(
        cls, vsize_xyz: Numbers, coors_range_xyz: Numbers
    ) -> tuple[list[float], list[int], list[int], list[float]]:
        """Voxel size, cells, strides of cells in memory and range along each axis, the last coordinate first."""
        return voxels.Grid(cls.__name__, vsize_xyz, coors_range_xyz).meta_data()

    def point_to_voxel(self, points: Any, clear_voxels: bool = True) -> tuple[tv.Tensor, tv.Tensor, tv.Tensor]:
        """Voxels [V, P, C], indices int32 [V, D] (the last coordinate first) and points per voxel int32 [V]."""
        return self._generate(points, empty_mean=False)

    def point_to_voxel_empty_mean(
        self, points: Any, clear_voxels: bool = True
    ) -> tuple[tv.Tensor, tv.Tensor, tv.Tensor]:
        """As `point_to_voxel`, with the mean of a voxel's points in its free places."""
        return self._generate(points, empty_mean=True)

    def _generate(self, points: Any, empty_mean: bool) -> tuple[tv.Tensor, tv.Tensor, tv.Tensor]:
        rows = getattr(points, "torch_tensor", None)
        if rows is None:  # an array, or a tensor of the real cumm
            rows = torch.as_tensor(points.numpy() if hasattr(points, "numpy") else points)
        return self._keep(voxels.generate(self._grid, rows.to(self.DEVICE), *self._limits, empty_mean=empty_mean))

    def _keep(self, made: voxels.Voxels) -> tuple[tv.Tensor, tv.Tensor, tv.Tensor]:
        self.voxels, self.indices, self.num_per_voxel = (tv.Tensor(part) for part in made[:3])
        return self.voxels, self.indices, self.num_per_voxel


class Point2VoxelCPU1d(_Point2Voxel):
    """Voxels of points on a line."""

    DIMENSIONS = 1


class Point2VoxelCPU2d(_Point2Voxel):
    """Voxels of points in the plane."""

    DIMENSIONS = 2


class Point2VoxelCPU3d(_Point2Voxel):
    """Voxels of points in space.

    >>> import numpy as np
    >>> import triops.spconv.cumm.tensorview as tv
    >>> generator = Point2VoxelCPU3d([1, 1, 1], [0, 0, 0, 4, 4, 4], 3, max_num_voxels=9, max_num_points_per_voxel=2)
    >>> voxels, indices, counts = generator.point_to_voxel(tv.from_numpy(np.array([[2.5, 0.5, 0.0]], np.float32)))
    >>> indices.numpy(), counts.numpy()
    (array([[0, 0, 2]], dtype=int32), array([1], dtype=int32))
    """

    DIMENSIONS = 3


class Point2VoxelCPU4d(_Point2Voxel):
    """Voxels of points in four dimensions."""

    DIMENSIONS = 4


class _Point2VoxelGPU(_Point2Voxel):
    DEVICE = "cuda"

    def point_to_voxel_hash(
        self, points: Any, clear_voxels: bool = True, empty_mean: bool = False, stream_int: int = 0
    ) -> tuple[tv.Tensor, tv.Tensor, tv.Tensor]:
        """Voxels [V, P, C], indices int32 [V, D] (the last coordinate first) and points per voxel int32 [V].

        Voxels and points come in the order of the points, on a GPU as well.
        """
        return self._generate(points, empty_mean)


class Point2VoxelGPU1d(_Point2VoxelGPU):
    """Voxels of points on a line, on the current GPU."""

    DIMENSIONS = 1


class Point2VoxelGPU2d(_Point2VoxelGPU):
    """Voxels of points in the plane, on the current GPU."""

    DIMENSIONS = 2


class Point2VoxelGPU3d(_Point2VoxelGPU):
    """Voxels of points in space, on the current GPU."""

    DIMENSIONS = 3


class Point2VoxelGPU4d(_Point2VoxelGPU):
    """Voxels of points in four dimensions, on the current GPU."""

    DIMENSIONS = 4


class VoxelGeneratorV2:
    """The voxel generator of spconv 1.2, which answers with a dictionary of arrays."""

    def __init__(
        self, voxel_size: Numbers, point_cloud_range: Numbers, max_num_points: int, max_voxels: int = 20000,
        full_mean: bool = False, block_filtering: bool = False, block_factor: int = 8, block_size: int = 3,
        height_threshold: float = 0.1, height_high_threshold: float = 2.0,
    ) -> None:  # fmt: skip
        if block_filtering:
            raise NotImplementedError(f"{type(self).__name__}: triops does not have block_filtering")
        self._grid = voxels.Grid(type(self).__name__, voxel_size, point_cloud_range)
        self._max_num_points = max_num_points
        self._max_voxels = max_voxels
        self._full_mean = full_mean

    def _voxels(self, points: Array, max_voxels: int | None) -> dict[str, Any]:
        rows = torch.from_numpy(points)
        limits = points.shape[1], max_voxels or self._max_voxels, self._max_num_points
        found = voxels.generate(self._grid, rows, *limits, empty_mean=self._full_mean, dtype=rows.dtype)
        filled, coordinates, counts = (part.numpy() for part in found[:3])
        places = np.arange(self._max_num_points) < counts[:, None]
        return {
            "voxels": filled,
            "coordinates": coordinates,
            "num_points_per_voxel": counts,
            "voxel_point_mask": places[:, :, None].astype(points.dtype),
            "voxel_num": len(counts),
        }

    def generate(self, points: Array, max_voxels: int | None = None) -> Any:
        """`voxels` [V, P, C], `coordinates` int32 [V, 3] (z, y, x), `num_points_per_voxel` int32 [V], and a mask."""
        return self._voxels(points, max_voxels)

    def generate_multi_gpu(self, points: Array, max_voxels: int | None = None) -> Any:
        """As `generate`, with zeros behind the last voxel, up to `max_voxels` rows."""
        found = self._voxels(points, max_voxels)
        rows = max_voxels or self._max_voxels
        for key, value in found.items():
            if isinstance(value, np.ndarray):
                found[key] = np.concatenate([value, np.zeros((rows - len(value), *value.shape[1:]), value.dtype)])
        return found

    @property
    def voxel_size(self) -> Array:
        return np.array(self._grid.voxel_zyx[::-1], np.float32)

    @property
    def point_cloud_range(self) -> Array:
        low, high = np.array(self._grid.range_zyx, np.float32).reshape(2, -1)[:, ::-1]
        return np.concatenate([low, high])

    @property
    def grid_size(self) -> Array:
        return np.array(self._grid.size_zyx[::-1], np.int64)

    @property
    def max_num_points_per_voxel(self) -> int:
        return self._max_num_points


class VoxelGenerator(VoxelGeneratorV2):
    """The voxel generator of spconv 1, which answers with voxels, coordinates and numbers of points."""

    def __init__(
        self, voxel_size: Numbers, point_cloud_range: Numbers, max_num_points: int, max_voxels: int = 20000,
        full_mean: bool = True,
    ) -> None:  # fmt: skip
        super().__init__(voxel_size, point_cloud_range, max_num_points, max_voxels, full_mean)

    def generate(self, points: Array, max_voxels: int | None = None) -> Any:
        found = super().generate(points, max_voxels)
        return found["voxels"], found["coordinates"], found["num_points_per_voxel"]

    def generate_multi_gpu(self, points: Array, max_voxels: int | None = None) -> Any:
        found = super().generate_multi_gpu(points, max_voxels)
        return found["voxels"], found["coordinates"], found["num_points_per_voxel"]


def rbbox_iou(box_corners: Array, qbox_corners: Array, standup_iou: Array, standup_thresh: float) -> Array:
    """Intersection over union of rotated rectangles by their corners [N, 4, 2] and [K, 4, 2] -> [N, K].

    Pairs whose `standup_iou` [N, K] is not above `standup_thresh` get 0.
    """
    overlaps = triops.box_iou_rotated(_rectangles(box_corners), _rectangles(qbox_corners)).numpy()
    return np.where(np.asarray(standup_iou) > standup_thresh, overlaps, 0).astype(box_corners.dtype)


def rbbox_intersection(box_corners: Array, qbox_corners: Array, standup_iou: Array, standup_thresh: float) -> Array:
    """The area that rotated rectangles share; arguments as in `rbbox_iou`."""
    shared = triops.box_iou_rotated(_rectangles(box_corners), _rectangles(qbox_corners), "area").numpy()
    return np.where(np.asarray(standup_iou) > standup_thresh, shared, 0).astype(box_corners.dtype)


def rbbox_iou_loss(box_corners: Array, qbox_corners: Array) -> Array:
    """Intersection over union row by row: [N, 4, 2] and [N, 4, 2] -> [N]."""
    overlaps = triops.box_iou_rotated(_rectangles(box_corners), _rectangles(qbox_corners), aligned=True)
    return overlaps.numpy().astype(box_corners.dtype)


def non_max_suppression_cpu(boxes: Array, order: Array, thresh: float, eps: float = 0.0) -> list[int]:
    """The upright boxes [N, 4] that stay, in `order`: one goes whose overlap with a box before it reaches `thresh`.

    `eps` is added to every width and height.
    """
    rows = torch.from_numpy(np.asarray(boxes))[:, :4].double()
    low, high = rows[:, :2], rows[:, 2:] + eps
    areas = (high - low).prod(1)

    def overlaps(first: int, others: torch.Tensor) -> torch.Tensor:
        sides = torch.minimum(high[first], high[others]) - torch.maximum(low[first], low[others])
        shared = sides.clamp(min=0).prod(1)
        return torch.where(shared > 0, shared / (areas[first] + areas[others] - shared), -1)

    return _suppress(order, thresh, overlaps)


def rotate_non_max_suppression_cpu(boxes: Array, order: Array, standup_iou: Array, thresh: float) -> list[int]:
    """The rotated rectangles, by their corners [N, 4, 2], that stay; see `non_max_suppression_cpu`."""
    rows, may_overlap = _rectangles(boxes), torch.from_numpy(np.asarray(standup_iou)) > 0

    def overlaps(first: int, others: torch.Tensor) -> torch.Tensor:
        found = triops.box_iou_rotated(rows[first : first + 1], rows[others])[0]
        return torch.where(may_overlap[first, others] & (found > 0), found, -1)

    return _suppress(order, thresh, overlaps)


def _suppress(order: Array, thresh: float, overlaps: Callable[[int, torch.Tensor], torch.Tensor]) -> list[int]:
    left, kept = torch.from_numpy(np.asarray(order).astype(np.int64)), []
    while len(left):
        first, left = int(left[0]), left[1:]
        kept.append(first)
        left = left[overlaps(first, left) < thresh]
    return kept


def _rectangles(corners: Array) -> torch.Tensor:
    """Corners [N, 4, 2] in a row around each rectangle -> centre, lengths of two sides, angle of the first: [N, 5]."""
    points = torch.from_numpy(np.ascontiguousarray(corners)).double()
    first, second = points[:, 1] - points[:, 0], points[:, 2] - points[:, 1]
    angle = torch.atan2(first[:, 1], first[:, 0])
    sides = torch.stack([first.norm(dim=1), second.norm(dim=1), angle], 1)
    return torch.cat([points.mean(1), sides], 1)


__all__ = [
    "CPU_ONLY_BUILD",
    "Point2VoxelCPU1d",
    "Point2VoxelCPU2d",
    "Point2VoxelCPU3d",
    "Point2VoxelCPU4d",
    "Point2VoxelGPU1d",
    "Point2VoxelGPU2d",
    "Point2VoxelGPU3d",
    "Point2VoxelGPU4d",
    "VoxelGenerator",
    "VoxelGeneratorV2",
    "non_max_suppression_cpu",
    "nullcontext",
    "rbbox_intersection",
    "rbbox_iou",
    "rbbox_iou_loss",
    "rotate_non_max_suppression_cpu",
]
