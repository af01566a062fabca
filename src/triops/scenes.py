"""Synthetic LiDAR scenes: beams by azimuth over ground, walls and boxes, so that data-dependent code
behaves as on a real sweep (rings on the ground, shadows behind cars, points on the near faces only). And feature maps
with boxes on them."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

SEED_POINTS, SEED_BOXES = 272_414, 66  # the network scale of the design documents
SENSOR_HEIGHT = 1.8

# length, width, height and share of cars, pedestrians, trucks
_SIZES = np.array([[4.6, 1.95, 1.7], [0.8, 0.8, 1.75], [9.0, 2.6, 3.2]])
_SHARES = [0.7, 0.2, 0.1]


@dataclass(frozen=True)
class Scene:
    """points [M, 3] float32 in firing order (azimuth, then beam); boxes [T, 7] float32, centre z."""

    points: Tensor
    boxes: Tensor


def lidar_scene(points: int = SEED_POINTS, boxes: int = SEED_BOXES, *, seed: int = 0, beams: int = 64) -> Scene:
    """One sweep of a spinning LiDAR, seeded, in well under a second.

    >>> scene = lidar_scene(1000, 5)
    >>> scene.points.shape, scene.boxes.shape
    (torch.Size([1000, 3]), torch.Size([5, 7]))
    """
    objects = random_boxes(boxes, seed=seed)
    return Scene(lidar_sweep(objects, points, seed=seed, beams=beams), objects)


def lidar_sweep(
    boxes: Tensor, points: int = SEED_POINTS, *, seed: int = 0, beams: int = 64, nearest_wall: float = 12.0
) -> Tensor:
    """What a spinning LiDAR sees of boxes [T, 7] on the ground between walls: float32 [points, 3] in firing order.

    >>> lidar_sweep(random_boxes(5), 1000).shape
    torch.Size([1000, 3])
    """
    random = np.random.default_rng(seed)
    azimuths = max(-(-points // beams), 1)
    azimuth = np.linspace(-np.pi, np.pi, azimuths, endpoint=False)[:, None]
    elevation = np.deg2rad(np.linspace(-24.8, 4.0, beams))[None] + random.normal(0, 2e-4, (azimuths, beams))
    cos_e, sin_e = np.cos(elevation), np.sin(elevation)

    distance = np.full((azimuths, beams), 100.0)
    down = sin_e < -1e-4
    distance[down] = np.minimum(distance[down], -SENSOR_HEIGHT / sin_e[down])
    wall = random.uniform(nearest_wall, 95, 180)[((azimuth + np.pi) / (2 * np.pi) * 180).astype(int) % 180]
    to_wall = wall / cos_e
    distance = np.where(to_wall * sin_e < 6.0, np.minimum(distance, to_wall), distance)
    for box in boxes.numpy().astype(np.float64):
        _hit_box(box, azimuth, cos_e, sin_e, distance)

    distance += random.normal(0, 0.02, distance.shape)
    xyz = np.stack([distance * cos_e * np.cos(azimuth), distance * cos_e * np.sin(azimuth), distance * sin_e], -1)
    return torch.from_numpy(np.ascontiguousarray(xyz.reshape(-1, 3)[:points].astype(np.float32)))


def random_boxes(count: int, *, seed: int = 0, radius: float = 70.0) -> Tensor:
    """Cars, pedestrians and trucks standing on the ground around the sensor: float32 [count, 7], centre z."""
    random = np.random.default_rng(seed)
    size = _SIZES[random.choice(3, size=count, p=_SHARES)] * random.uniform(0.85, 1.15, (count, 3))
    distance = np.sqrt(random.uniform(12.0**2, radius**2, count))
    angle = random.uniform(-np.pi, np.pi, count)
    z = -SENSOR_HEIGHT + size[:, 2] / 2 + random.normal(0, 0.05, count)
    heading = random.uniform(-np.pi, np.pi, count)
    columns = [distance * np.cos(angle), distance * np.sin(angle), z, *size.T, heading]
    return torch.from_numpy(np.stack(columns, 1).astype(np.float32))


def uniform_points(count: int, *, seed: int = 0, extent: float = 75.0) -> Tensor:
    """float32 [count, 3], uniform in a flat block: the case that no ordering helps."""
    low, high = np.array([-extent, -extent, -3.0]), np.array([extent, extent, 3.0])
    return torch.from_numpy(np.random.default_rng(seed).uniform(low, high, (count, 3)).astype(np.float32))


def lidar_sites(
    count: int, spatial_shape: tuple[int, int, int], batch: int = 1, *, seed: int = 0, reach: float = 0.5,
    roughness: float = 0.012,
) -> Tensor:  # fmt: skip
    """Distinct occupied voxels of `batch` sweeps: int32 [count, 4] of (b, z, y, x), by batch and azimuth.

    A rough ground disc that thins out with distance, and walls on it. `reach` is the radius of the disc and
    `roughness` the ground's spread in z, both as a share of the grid: a smaller reach packs the sites closer.

    >>> lidar_sites(1000, (41, 1440, 1440), batch=2).shape
    torch.Size([1000, 4])
    """
    random = np.random.default_rng(seed)
    _, height, width = spatial_shape
    samples = []
    for b in range(batch):
        wanted = count // batch + (b < count % batch)
        walls = 60
        wall_centre = 0.5 + random.uniform(-0.8, 0.8, (walls, 2)) * reach
        wall_angle = random.uniform(0, np.pi, walls)
        wall_length = random.uniform(0.3, 1, walls) * 0.12 * reach
        wall_height = random.uniform(0.3, 1, walls) * 0.3
        keys = np.empty(0, np.int64)
        first = np.empty(0, np.int64)
        while len(first) < wanted:
            n = wanted
            distance, azimuth = reach * random.random(n), random.uniform(-np.pi, np.pi, n)
            x, y = 0.5 + distance * np.cos(azimuth), 0.5 + distance * np.sin(azimuth)
            z = 0.2 + 0.03 * np.sin(9 * x) * np.cos(7 * y) + random.normal(0, roughness, n)
            wall, along = random.integers(0, walls, n), random.uniform(-1, 1, n)
            on_wall = random.random(n) < 0.6
            x = np.where(on_wall, wall_centre[wall, 0] + along * wall_length[wall] * np.cos(wall_angle[wall]), x)
            y = np.where(on_wall, wall_centre[wall, 1] + along * wall_length[wall] * np.sin(wall_angle[wall]), y)
            z = np.where(on_wall, 0.2 + random.random(n) * wall_height[wall], z)
            position = np.stack([z, y, x], 1)
            position = position[((position >= 0) & (position < 1)).all(1)]
            cell = (position * spatial_shape).astype(np.int64)
            keys = np.concatenate([keys, (cell[:, 0] * height + cell[:, 1]) * width + cell[:, 2]])
            first = np.unique(keys, return_index=True)[1]
        keys = keys[np.sort(first)[:wanted]]
        azimuth = np.arctan2(keys // width % height - height / 2, keys % width - width / 2)
        keys = keys[np.argsort(azimuth, kind="stable")]
        columns = [np.full(wanted, b), keys // (height * width), keys // width % height, keys % width]
        samples.append(np.stack(columns, 1))
    return torch.from_numpy(np.concatenate(samples).astype(np.int32))


_INF, _NAN = math.inf, math.nan
STRANGE_BOXES: list[list[float]] = [  # (x1, y1, x2, y2) of which a map of a few pixels sees all, a part or nothing
    [0.0, 0, 4, 4], [-9, -9, 20, 20], [-40, -40, -20, -20], [4, 4, 4, 4], [6, 5, 2, 1], [-1, -1, 0, 0], [-2, 1, 9, 3],
    [_NAN, 0, 4, 4], [0, -_INF, 4, _INF], [-3e38, 0, 3e38, 5], [-1e30, -1e30, 1e30, 1e30], [-1e5, -3e4, 1e5, 2e6],
    [0, 0, 1e9, 1e9], [5.5, 3.5, 9, 8],
]  # fmt: skip


def feature_map(
    shape: tuple[int, int, int, int], dtype: torch.dtype, *, channels_last: bool = False, seed: int = 0
) -> Tensor:
    """Normally distributed features [N, C, H, W]."""
    input = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
    return input.contiguous(memory_format=torch.channels_last) if channels_last else input


def boxes_on_maps(
    shape: tuple[int, int, int, int], count: int, *, scale: float = 1.0, seed: int = 0,
    boxes: list[list[float]] | None = None,
) -> Tensor:  # fmt: skip
    """Boxes of any size over and around maps of such a shape, or those that are given, shared out among the images:
    float32 [count, 5] of (image, x1, y1, x2, y2) in units of which a pixel is `1 / scale`.

    >>> boxes_on_maps((2, 1, 8, 8), 3).shape
    torch.Size([3, 5])
    """
    g = torch.Generator().manual_seed(seed + 1)
    size = torch.tensor([shape[3], shape[2]], dtype=torch.float32) / scale
    centre = torch.rand(count, 2, generator=g) * 1.1 * size
    half = torch.rand(count, 2, generator=g) ** 3 * size / 2
    corners = torch.cat([centre - half, centre + half], 1) if boxes is None else torch.tensor(boxes)
    image = torch.arange(len(corners)) % max(shape[0], 1)
    return torch.cat([image[:, None].float(), corners], 1)


def rotated_boxes_on_maps(
    shape: tuple[int, int, int, int], count: int, *, scale: float = 1.0, seed: int = 0,
    boxes: list[list[float]] | None = None,
) -> Tensor:  # fmt: skip
    """As `boxes_on_maps`: float32 [count, 6] of (image, centre x, centre y, width, height, angle)."""
    straight = boxes_on_maps(shape, count, scale=scale, seed=seed)
    low, high = straight[:, 1:3], straight[:, 3:]
    angle = torch.randn(count, 1, generator=torch.Generator().manual_seed(seed))
    made = torch.cat([(low + high) / 2, high - low, angle], 1) if boxes is None else torch.tensor(boxes)
    image = torch.arange(len(made)) % max(shape[0], 1)
    return torch.cat([image[:, None].float(), made], 1)


def _hit_box(box: np.ndarray, azimuth: np.ndarray, cos_e: np.ndarray, sin_e: np.ndarray, distance: np.ndarray) -> None:
    """Shorten `distance` [azimuths, beams] of the rays that meet the box. Only columns that can meet it are touched."""
    cx, cy, cz, dx, dy, dz, heading = box
    reach = np.hypot(dx, dy) / 2
    centre, spread = np.arctan2(cy, cx), np.arcsin(min(1.0, reach / max(np.hypot(cx, cy), 1e-9)))
    off = np.abs((azimuth[:, 0] - centre + np.pi) % (2 * np.pi) - np.pi)
    columns = np.nonzero(off <= spread)[0]
    if len(columns) == 0:
        return
    cos_e, sin_e, angle = cos_e[columns], sin_e[columns], azimuth[columns] - heading
    cos_h, sin_h = np.cos(heading), np.sin(heading)
    origin = (-cx * cos_h - cy * sin_h, cx * sin_h - cy * cos_h, -cz)
    direction = (cos_e * np.cos(angle), cos_e * np.sin(angle), sin_e)
    near, far = np.zeros(cos_e.shape), np.full(cos_e.shape, 1e9)
    for start, along, half in zip(origin, direction, (dx / 2, dy / 2, dz / 2), strict=True):
        with np.errstate(divide="ignore", invalid="ignore"):
            a, b = (-half - start) / along, (half - start) / along
        near, far = np.maximum(near, np.minimum(a, b)), np.minimum(far, np.maximum(a, b))
    hit = (near < far) & (near < distance[columns])
    # a little behind the face: the return of a rough surface, and inside the box
    distance[columns] = np.where(hit, near + 0.02, distance[columns])
