"""Inputs of points_in_boxes and points_in_boxes_all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from triops import scenes
from triops._sample import BadCall, Sample, Sized, Standard, Work, compiled_mmcv
from triops.ops.points_in_boxes import points_in_boxes, points_in_boxes_all

_NAMES = ("points_in_boxes", "points_in_boxes_all")


def _network(count: int, boxes: int, order: str = "lidar") -> Callable[[torch.dtype], tuple[Any, ...]]:
    def make(dtype: torch.dtype) -> tuple[Any, ...]:
        scene = scenes.lidar_scene(count, boxes)
        points = scene.points
        if order == "shuffled":
            points = points[torch.randperm(count, generator=torch.Generator().manual_seed(0))]
        elif order == "uniform":
            points = scenes.uniform_points(count)
        return points[None].to(dtype), scene.boxes[None].to(dtype), "center", 0.0

    return make


def _batch(batch: int, count: int, boxes: int, order: str) -> Callable[[torch.dtype], tuple[Any, ...]]:
    def make(dtype: torch.dtype) -> tuple[Any, ...]:
        singles = [scenes.lidar_scene(count, boxes, seed=b) for b in range(batch)]
        points = [s.points if order == "lidar" else scenes.uniform_points(count, seed=b) for b, s in enumerate(singles)]
        return torch.stack(points).to(dtype), torch.stack([s.boxes for s in singles]).to(dtype), "center", 0.0

    return make


def _random(
    batch: int, count: int, boxes: int, z_origin: str = "center", margin: float = 0.0, seed: int = 0
) -> Callable[[torch.dtype], tuple[Any, ...]]:
    """Many overlapping boxes of every heading among the points, so that most points are in several."""

    def make(dtype: torch.dtype) -> tuple[Any, ...]:
        g = torch.Generator().manual_seed(seed)
        points = torch.rand(batch, count, 3, generator=g) * 20 - 10
        centre = torch.rand(batch, boxes, 3, generator=g) * 20 - 10
        size = torch.rand(batch, boxes, 3, generator=g) * 6
        heading = torch.rand(batch, boxes, 1, generator=g) * 14 - 7
        return points.to(dtype), torch.cat([centre, size, heading], -1).to(dtype), z_origin, margin

    return make


def _on_faces(dtype: torch.dtype) -> tuple[Any, ...]:
    """Points exactly on faces, edges and corners of boxes at multiples of a quarter turn."""
    headings = torch.arange(-4, 5) * (torch.pi / 2)
    boxes = torch.tensor([1.0, -2.0, 0.5, 4.0, 2.0, 3.0, 0.0]).repeat(len(headings), 1)
    boxes[:, 6] = headings
    steps = torch.tensor([-2.0, -1.5, -1.0, 0.0, 1.0, 1.5, 2.0])
    points = torch.cartesian_prod(steps, steps, steps) + boxes[0, :3]
    return points.expand(len(headings), -1, -1).to(dtype), boxes[:, None].to(dtype), "center", 0.0


def _not_finite(dtype: torch.dtype) -> tuple[Any, ...]:
    """Every field of a point and of a box is NaN or infinite once."""
    inf, nan = float("inf"), float("nan")
    points = torch.zeros(1, 10, 3)
    boxes = torch.tensor([0.0, 0, 0, 2, 2, 2, 0.3]).repeat(1, 22, 1)
    for i, value in enumerate((inf, -inf, nan)):
        for axis in range(3):
            points[0, i * 3 + axis, axis] = value
        for field in range(7):
            boxes[0, i * 7 + field, field] = value
    return points.to(dtype), boxes.to(dtype), "center", 0.0


def _extreme(dtype: torch.dtype) -> tuple[Any, ...]:
    """Degenerate, negative, huge and far boxes beside an ordinary one."""
    big = 3e38 if dtype in (torch.float32, torch.float64, torch.bfloat16) else 6e4
    boxes = torch.tensor(
        [
            [0.0, 0, 0, 0, 0, 0, 0],
            [0.0, 0, 0, -1, 2, 2, 0],
            [0.0, 0, 0, 2, 2, 0, 0.5],
            [big, big, 0, big, 1, 1, 1],
            [-big, -big, 0, 1, big, 1, 1],
            [0.0, 0, 0, big, big, big, 0.7],
            [1.0, 1, 1, 2, 2, 2, 3.0],
        ]
    )
    points = torch.tensor([[0.0, 0, 0], [1.0, 1, 1], [big, big, 0], [-big, -big, 0], [1e4, -1e4, 5.0]])
    return points[None].to(dtype), boxes[None].to(dtype), "center", 0.0


SAMPLES = [
    Sample("points_in_boxes", "66 boxes, 272414 points, LiDAR order", _network(272_414, 66), "network", demo=True),
    Sample("points_in_boxes", "66 boxes, 272414 points, shuffled", _network(272_414, 66, "shuffled"), "network"),
    Sample("points_in_boxes", "66 boxes, 272414 points, uniform", _network(272_414, 66, "uniform"), "network"),
    Sample("points_in_boxes", "66 boxes, 273651 points", _network(273_651, 66), "network"),
    Sample("points_in_boxes", "74 boxes, 273887 points", _network(273_887, 74), "network"),
    Sample("points_in_boxes", "75 boxes, 274207 points", _network(274_207, 75), "network"),
    Sample("points_in_boxes", "75 boxes, 273697 points", _network(273_697, 75), "network"),
    Sample("points_in_boxes", "4 x 200 boxes, 200000 points, LiDAR order", _batch(4, 200_000, 200, "lidar"), "network"),
    Sample("points_in_boxes", "4 x 200 boxes, 200000 points, uniform", _batch(4, 200_000, 200, "uniform"), "network"),
    Sample("points_in_boxes_all", "66 boxes, 272414 points, LiDAR order", _network(272_414, 66), "network", demo=True),
]
for _name in _NAMES:
    SAMPLES += [
        Sample(_name, "1 x 3 boxes, 4 points", _random(1, 4, 3)),
        Sample(_name, "2 x 33 boxes, 777 points", _random(2, 777, 33, seed=1)),
        Sample(_name, "bottom z, margin 1e-5", _random(1, 500, 64, "bottom", 1e-5, seed=2)),
        Sample(_name, "negative margin", _random(1, 300, 40, "center", -0.1, seed=3)),
        Sample(_name, "1100 boxes", _random(1, 200, 1100, seed=4)),
        Sample(_name, "no boxes", _random(2, 5, 0), "boundary"),
        Sample(_name, "no points", _random(2, 0, 5), "boundary"),
        Sample(_name, "no batch", _random(0, 5, 5), "boundary"),
        Sample(_name, "1 box, 1 point", _random(1, 1, 1, seed=5), "boundary"),
        *(Sample(_name, f"{n} boxes, {m} points", _random(1, m, n, seed=n), "boundary")
          for n, m in ((31, 255), (32, 256), (33, 257), (1, 1025), (65, 63))),
        Sample(_name, "points on faces", _on_faces, "boundary"),
        Sample(_name, "not finite", _not_finite, "boundary"),
        Sample(_name, "degenerate and huge boxes", _extreme, "boundary"),
    ]  # fmt: skip


SIZED = [
    Sized(operator, "batches", lambda draw: _random(draw(4), draw(4000), draw(1500)))
    for operator in ("points_in_boxes", "points_in_boxes_all")
]


def _bad_calls(function: Callable[..., Tensor]) -> list[BadCall]:
    name = function.__name__
    points, boxes = torch.zeros(2, 5, 3), torch.zeros(2, 4, 7)

    def bad(what: str, error: type[Exception], match: str, *args: Any, **options: Any) -> BadCall:
        return BadCall(f"{name}: {what}", lambda: function(*args, **options), error, match)

    return [
        bad("points of rank 2", ValueError, r"points must have shape \[B, M, 3\], got \[5, 3\]", points[0], boxes),
        bad("points with 4 columns", ValueError, r"got \[2, 5, 4\]", torch.zeros(2, 5, 4), boxes),
        bad("boxes of rank 2", ValueError, r"boxes must have shape .*got \[4, 7\]", points, boxes[0]),
        bad("boxes with 8 columns", ValueError, r"got \[2, 4, 8\]", points, torch.zeros(2, 4, 8)),
        bad("unequal batches", ValueError, r"B = 2 as in points, got \[1, 4, 7\]", points, boxes[:1]),
        bad("integer points", TypeError, "points must be float32.*got int64", points.long(), boxes.long()),
        bad("unequal dtypes", TypeError, "points float32, boxes float64", points, boxes.double()),
        bad("more points than int32 counts in blocks", ValueError, r"2\*\*30 .*got 1073741825 points and 4 boxes",
            points[:, :1].expand(2, 2**30 + 1, 3), boxes),
        bad("more boxes than int32 counts in blocks", ValueError, r"2\*\*30 .*got 5 points and 2147483648 boxes",
            points, boxes[:, :1].expand(2, 2**31, 7)),
        bad("unequal devices", ValueError, "boxes on meta", points, boxes.to("meta")),
        bad("a list", TypeError, "points must be a Tensor, got list", points.tolist(), boxes),
        bad("None", TypeError, "boxes must be a Tensor, got NoneType", points, None),
        bad("unknown z_origin", ValueError, "z_origin must be 'center' or 'bottom', got 'top'", points, boxes,
            z_origin="top"),
        bad("z_origin of another type", TypeError, "z_origin must be a string, got int", points, boxes, z_origin=0),
        bad("margin NaN", ValueError, "margin must be finite, got nan", points, boxes, margin=float("nan")),
        bad("margin of another type", TypeError, "margin must be a number, got str", points, boxes, margin="0"),
    ]  # fmt: skip


BAD_CALLS = [*_bad_calls(points_in_boxes), *_bad_calls(points_in_boxes_all)]

STANDARD = {
    name: Standard(why_slower="each point waits for its cell of the box grid and for the boxes of that cell")
    for name in _NAMES
}


def work(operator: str, args: tuple[Any, ...]) -> Work:
    points, boxes = args[0], args[1]
    batch, count, total = points.shape[0], points.shape[1], boxes.shape[1]
    read = (points.numel() + boxes.numel()) * points.element_size()
    if operator == "points_in_boxes_all":
        return Work(read + batch * count * total, 14 * batch * count * total)
    # A point must be read, placed and at best tested once; the boxes' frames are next to nothing.
    return Work(read + 4 * batch * count, 20 * batch * count)


def baselines(operator: str) -> dict[str, Callable[..., Any]]:
    every = operator == "points_in_boxes_all"
    found: dict[str, Callable[..., Any]] = {"torch": _vectorised_all if every else _vectorised}
    _ext = compiled_mmcv()
    if _ext is None:
        return found

    def mmcv(points: Tensor, boxes: Tensor, z_origin: str, margin: float) -> Tensor:
        """Its CPU operator always tests every box; its z is the bottom face; it has no margin."""
        if z_origin == "center":
            boxes = torch.cat([boxes[..., :2], boxes[..., 2:3] - boxes[..., 5:6] / 2, boxes[..., 3:]], -1)
        shape = (points.shape[0], points.shape[1], boxes.shape[1]) if every else points.shape[:2]
        out = points.new_full(shape, 0 if every else -1, dtype=torch.int32)
        if points.is_cuda:
            (_ext.points_in_boxes_all_forward if every else _ext.points_in_boxes_part_forward)(boxes, points, out)
            return out
        by_box = points.new_zeros((boxes.shape[1], points.shape[1]), dtype=torch.int32)
        for b in range(points.shape[0]):
            _ext.points_in_boxes_cpu_forward(boxes[b].contiguous(), points[b].contiguous(), by_box)
        return by_box

    return {**found, "mmcv": mmcv}


def _vectorised_all(points: Tensor, boxes: Tensor, z_origin: str, margin: float) -> Tensor:
    """The plain formulation in torch."""
    shift = points[:, :, None] - boxes[:, None, :, :3]
    if z_origin == "bottom":
        shift[..., 2] -= boxes[:, None, :, 5] / 2
    cos, sin = boxes[:, None, :, 6].cos(), boxes[:, None, :, 6].sin()
    x = shift[..., 0] * cos + shift[..., 1] * sin
    y = shift[..., 1] * cos - shift[..., 0] * sin
    half = boxes[:, None, :, 3:6] / 2
    return (
        (shift[..., 2].abs() <= half[..., 2])
        & (x.abs() < half[..., 0] + margin)
        & (y.abs() < half[..., 1] + margin)
    )  # fmt: skip


def _vectorised(points: Tensor, boxes: Tensor, z_origin: str, margin: float) -> Tensor:
    held, index = _vectorised_all(points, boxes, z_origin, margin).max(-1)
    return torch.where(held, index, -1).int()
