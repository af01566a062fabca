"""Inputs of roipoint_pool3d."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from triops import scenes
from triops._geometry.box.reference import ZOrigin
from triops._sample import BadCall, Sample, Sized, Standard, Work, bytes_of, compiled_mmcv
from triops.ops.points_in_boxes import points_in_boxes_all
from triops.ops.roipoint_pool3d import roipoint_pool3d

_NAME = "roipoint_pool3d"
_Make = Callable[[torch.dtype], tuple[Any, ...]]
_ONE = (torch.float32,)


def _random(
    batch: int, length: int, boxes: int, count: int, channels: int, z_origin: str = "bottom", margin: float = 0.0
) -> _Make:
    """Boxes of all sizes over a small cloud, the last of them far away."""

    def make(dtype: torch.dtype) -> tuple[Any, ...]:
        draw = torch.Generator().manual_seed(0)
        points = torch.rand(batch, length, 3, generator=draw) * 8 - 4
        features = torch.randn(batch, length, channels, generator=draw)
        box = torch.rand(batch, boxes, 7, generator=draw) * 6 - torch.tensor([3.0, 3, 3, -0.2, -0.2, -0.2, 0])
        box[:, -1:, :2] += 100
        return points.to(dtype), features.to(dtype), box.to(dtype), count, z_origin, margin

    return make


def _scene(batch: int, length: int, boxes: int, count: int, channels: int) -> _Make:
    """Proposals around the objects of a sweep, as the second stage of PointRCNN has them."""

    def make(dtype: torch.dtype) -> tuple[Any, ...]:
        draw = torch.Generator().manual_seed(0)
        found = [scenes.lidar_scene(length, seed=b) for b in range(batch)]
        points = torch.stack([scene.points[:length, :3] for scene in found])
        box = torch.stack([scene.boxes[torch.arange(boxes) % len(scene.boxes), :7] for scene in found])
        box = box + torch.randn(box.shape, generator=draw) * torch.tensor([0.3, 0.3, 0.2, 0.1, 0.1, 0.1, 0.2])
        features = torch.randn(batch, length, channels, generator=draw)
        return points.to(dtype), features.to(dtype), box.to(dtype), count, "center", 0.0

    return make


def _mixed(dtype: torch.dtype) -> tuple[Any, ...]:
    """float32 points and boxes of half features; boxes and points that are not finite."""
    points, features, boxes, *rest = _random(2, 90, 5, 8, 6)(torch.float32)
    points[:, ::7, 0], boxes[:, 1, 6] = torch.nan, torch.inf
    return points, features.to(dtype), boxes, *rest


SAMPLES = [
    Sample(_NAME, "1 x 16384, 32 boxes, 128 samples", _scene(1, 16_384, 32, 128, 13), "network", _ONE, demo=True),
    Sample(_NAME, "4 x 16384, 128 boxes, 512 samples, 131 channels", _scene(4, 16_384, 128, 512, 131), "network",
           (torch.float32, torch.float16), gpu_only=True),
    Sample(_NAME, "2 x 60 points, 5 boxes", _random(2, 60, 5, 12, 4)),
    Sample(_NAME, "half features of float32 points", _mixed, dtypes=(torch.float16, torch.bfloat16, torch.float32)),
    Sample(_NAME, "center, margin, no channels", _random(1, 70, 4, 9, 0, "center", 0.01), "boundary", _ONE),
    Sample(_NAME, "2100 points, 1 sample, 70 channels", _random(1, 2100, 3, 1, 70), "boundary", _ONE),
    Sample(_NAME, "1 point", _random(1, 1, 3, 4, 2), "boundary", _ONE),
    Sample(_NAME, "no points", _random(2, 0, 3, 4, 2), "boundary", _ONE),
    Sample(_NAME, "no boxes", _random(2, 9, 0, 4, 2), "boundary", _ONE),
]  # fmt: skip

SIZED = [Sized(_NAME, "points and boxes", lambda draw: _random(draw(3), draw(3000), draw(40), draw(90), 5))]

STANDARD = {_NAME: Standard(floats="exact", why_slower="every box tests every point first")}


def _bad_calls() -> list[BadCall]:
    points, features, boxes = torch.zeros(2, 5, 3), torch.zeros(2, 5, 4), torch.zeros(2, 3, 7)

    def bad(what: str, error: type[Exception], match: str, *args: Any, **kwargs: Any) -> BadCall:
        return BadCall(f"{_NAME}: {what}", lambda: roipoint_pool3d(*args, **kwargs), error, match)

    return [
        bad("points of rank 2", ValueError, r"points must have shape \[B, N, 3\]", points[0], features, boxes),
        bad("unequal features", ValueError, "N = 5 as in points", points, features[:, :4], boxes),
        bad("another batch", ValueError, "B = 2 as in points", points, features, boxes[:1]),
        bad("boxes of 8 fields", ValueError, r"boxes must have shape \[B, M, 7\]", points, features,
            torch.zeros(2, 3, 8)),
        bad("integers", TypeError, "features must be float32", points, features.long(), boxes),
        bad("another dtype", TypeError, "boxes float64", points, features, boxes.double()),
        bad("another device", ValueError, "boxes on meta", points, features, boxes.to("meta")),
        bad("a list", TypeError, "boxes must be a Tensor, got list", points, features, [1]),
        bad("no samples", ValueError, "count must be at least 1, got 0", points, features, boxes, 0),
        bad("too many samples", ValueError, "count must be at most", points, features, boxes, 2**40),
        bad("unknown origin", ValueError, "z_origin must be", points, features, boxes, z_origin="top"),
        bad("margin NaN", ValueError, "margin must be finite", points, features, boxes, margin=float("nan")),
    ]  # fmt: skip


BAD_CALLS = _bad_calls()


def work(operator: str, args: tuple[Any, ...]) -> Work:
    points, features, boxes, count, *_ = args
    samples = boxes.shape[0] * boxes.shape[1] * count
    written = samples * (4 + (3 + features.shape[2]) * features.element_size())
    return Work(bytes_of((points, features, boxes)) + written, 10 * points.shape[1] * boxes.shape[0] * boxes.shape[1])


def baselines(operator: str) -> dict[str, Callable[..., Any]]:
    found: dict[str, Callable[..., Any]] = {"torch": _vectorised}
    _ext = compiled_mmcv()
    if _ext is None or not torch.cuda.is_available():  # mmcv has no CPU kernel
        return found

    def mmcv(
        points: Tensor, features: Tensor, boxes: Tensor, count: int, z_origin: str, margin: float
    ) -> tuple[Tensor, Tensor]:
        pooled = features.new_zeros((*boxes.shape[:2], count, 3 + features.shape[2]))
        empty = torch.zeros(boxes.shape[:2], dtype=torch.int32, device=boxes.device)
        _ext.roipoint_pool3d_forward(points, boxes, features, pooled, empty)
        return pooled, empty

    return {**found, "mmcv": mmcv}


def _vectorised(
    points: Tensor, features: Tensor, boxes: Tensor, count: int, z_origin: ZOrigin, margin: float
) -> tuple[Tensor, Tensor]:
    """The indices of points inside by a sort, then a gather."""
    held = points_in_boxes_all(points, boxes, z_origin=z_origin, margin=margin).mT
    number = held.sum(2, keepdim=True)
    slot = torch.arange(count, device=points.device) % number.clamp(min=1)
    order = held.int().argsort(dim=2, descending=True, stable=True)
    indices = torch.where(number > 0, order.gather(2, slot), -1)
    rows = torch.cat([points.to(features.dtype), features], 2)
    picked = [cloud[index.clamp(min=0)] * (index >= 0)[..., None] for cloud, index in zip(rows, indices, strict=True)]
    return torch.stack(picked), indices.int()
