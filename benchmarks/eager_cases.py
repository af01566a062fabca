"""The plain calls that `eager.py` times: one input each, and how triops, mmcv and torchvision are called with it."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import triops
from triops import _sample, scenes
from triops._op import OPERATORS
from triops.ops.ball_query.samples import lidar_clouds
from triops.ops.deform_conv2d.samples import convolution
from triops.ops.ms_deform_attn.samples import attention
from triops.ops.nms.samples import predictions, upright

DEVICE = "cuda"
PEERS = ("mmcv", "torchvision")
mmcv: Any = None  # `mmcv.ops` and `torchvision.ops`, where they are; see `import_peers`
torchvision: Any = None


@dataclass(frozen=True)
class Case:
    """One input, and how each library is called with it."""

    name: str
    make: Callable[[], tuple[Any, ...]]
    calls: dict[str, Callable[..., Any]]
    wanted: tuple[int, ...] = ()  # the arguments of which gradients are wanted, if any: then it has two rows
    loss: Callable[[Tensor], Tensor] = torch.sum

    @property
    def ways(self) -> tuple[str, ...]:
        return ("fwd", "fwd+bwd") if self.wanted else ("fwd",)

    def bound(self, way: str) -> dict[str, Callable[[], Any]]:
        """A call without arguments for each library that is here."""
        torch.manual_seed(0)
        args = list(_sample.to_device(self.make(), DEVICE))
        found = {"mmcv": mmcv, "torchvision": torchvision, "triops": triops}
        calls = {name: call for name, call in self.calls.items() if found[name.split()[0]] is not None}
        if way == "fwd":
            return {name: partial(call, *args) for name, call in calls.items()}
        for number in self.wanted:
            args[number] = args[number].detach().requires_grad_()
        inputs = [args[number] for number in self.wanted]

        def differentiated(call: Callable[..., Any]) -> Any:
            result = call(*args)
            return torch.autograd.grad(self.loss(result[0] if isinstance(result, tuple) else result), inputs)

        return {name: partial(differentiated, call) for name, call in calls.items()}


@cache
def sample(operator: str, name: str, dtype: torch.dtype = torch.float32) -> tuple[Any, ...]:
    found = {s.name: s for s in _sample.module_of(OPERATORS[operator]).SAMPLES if s.operator == operator}
    args: tuple[Any, ...] = found[name].make(dtype)
    return args


@cache
def boxes3d(count: int, seed: int = 0) -> Tensor:
    return scenes.random_boxes(count, seed=seed)


def points_in_boxes() -> Iterator[Case]:
    def scene(points: int, boxes: int) -> tuple[Tensor, Tensor]:
        found = scenes.lidar_scene(points, boxes)
        return found.points[None], found.boxes[None]

    def stored(name: str) -> tuple[Any, ...]:
        return sample("points_in_boxes", name)[:2]

    inputs: dict[str, Callable[[], tuple[Any, ...]]] = {
        "20x2000": partial(scene, 2000, 20),
        "50x20000": partial(scene, 20_000, 50),
        "66b, 272414p, LiDAR": partial(stored, "66 boxes, 272414 points, LiDAR order"),
        "66b, 272414p, shuffled": partial(stored, "66 boxes, 272414 points, shuffled"),
        "66b, 272414p, uniform": partial(stored, "66 boxes, 272414 points, uniform"),
        "4 x 200b, 200000p, LiDAR": partial(stored, "4 x 200 boxes, 200000 points, LiDAR order"),
        "4 x 200b, 200000p, uniform": partial(stored, "4 x 200 boxes, 200000 points, uniform"),
    }
    for words, make in inputs.items():
        yield Case(f"points_in_boxes {words}", make, {
            "triops": lambda p, b: triops.points_in_boxes(p, b, z_origin="bottom"),
            "mmcv": lambda p, b: mmcv.points_in_boxes_part(p, b),
        })  # fmt: skip
        yield Case(f"points_in_boxes_all {words}", make, {
            "triops": lambda p, b: triops.points_in_boxes_all(p, b, z_origin="bottom"),
            "mmcv": lambda p, b: mmcv.points_in_boxes_all(p, b),
        })  # fmt: skip


def bbox_overlaps() -> Iterator[Case]:
    def boxes(*counts: int) -> tuple[Tensor, ...]:
        corners = [torch.rand(count, 2) * 1000 for count in counts]
        return tuple(torch.cat([corner, corner + torch.rand(corner.shape) * 200], 1) for corner in corners)

    for rows, columns in ((100, 100), (1000, 100), (2000, 2000), (20_000, 2000), (100_000, 200)):
        yield Case(f"bbox_overlaps {rows}x{columns}", partial(boxes, rows, columns), {
            "triops": lambda a, b: triops.bbox_overlaps(a, b),
            "mmcv": lambda a, b: mmcv.bbox_overlaps(a, b),
            "torchvision": lambda a, b: torchvision.box_iou(a, b),
        })  # fmt: skip
    yield Case("bbox_overlaps 100000 aligned", partial(boxes, 100_000, 100_000), {
        "triops": lambda a, b: triops.bbox_overlaps(a, b, aligned=True),
        "mmcv": lambda a, b: mmcv.bbox_overlaps(a, b, aligned=True),
    })  # fmt: skip


def border_align() -> Iterator[Case]:
    for shape, boxes, pool in (
        ("[1, 64, 6, 7]", 20, 1000), ("[2, 1024, 25, 38]", 950, 10), ("[2, 1024, 100, 152]", 15_200, 10),
    ):  # fmt: skip
        name = f"{shape} NCHW, {boxes} boxes, pool {pool}"
        yield Case(f"border_align {shape} {boxes}b", partial(sample, "border_align_forward", name), {
            "triops": lambda i, b, pool: triops.border_align(i, b, pool),
            "mmcv": lambda i, b, pool: mmcv.border_align(i, b, pool),
        }, (0,))  # fmt: skip


def voxelize() -> Iterator[Case]:
    def few() -> tuple[Any, ...]:
        points, *rest = sample("voxelize_padded", "PointPillars, 20000 points")
        return points[::10].contiguous(), *rest

    for words in ("2000p", "PointPillars, 20000p", "CenterPoint, 300000p"):
        make = partial(sample, "voxelize_padded", words.replace("0p", "0 points")) if "," in words else few
        yield Case(f"dynamic_voxelize {words}", make, {
            "triops": lambda p, size, bounds, *_: triops.dynamic_voxelize(p, size, bounds),
            "mmcv": lambda p, size, bounds, *_: mmcv.voxelization(p, size, bounds, -1, -1),
        })  # fmt: skip
    for words in (
        "2000p 32x16000", "PointPillars, 20000p", "SECOND, 20000p, shuffled", "CenterPoint, 300000p",
        "CenterPoint, 300000p, shuffled, 120000 voxels",
    ):  # fmt: skip
        make = partial(sample, "voxelize_padded", words.replace("0p", "0 points")) if "," in words else few
        yield Case(f"voxelize {words}", make, {
            "triops": lambda *args: triops.voxelize(*args),
            "mmcv": lambda *args: mmcv.voxelization(*args),
            "mmcv nondet.": lambda *args: mmcv.voxelization(*args, False),
        })  # fmt: skip


def dynamic_scatter() -> Iterator[Case]:
    def random(reduce: str) -> tuple[Any, ...]:
        return torch.randn(2000, 64), torch.randint(-1, 30, (2000, 3), dtype=torch.int32), reduce

    inputs: dict[str, Callable[[], tuple[Any, ...]]] = {
        "2000p 64c max": partial(random, "max"),
        "2000p 64c mean": partial(random, "mean"),
    }
    for words in (
        "pillars, 4 x 40000p, 64 channels, max", "pillars, 4 x 40000p, 4 channels, mean",
        "voxels, 300000p, 5 channels, mean", "voxels, 300000p, 32 channels, max, in",
    ):  # fmt: skip
        name = words.replace("0p", "0 points").replace(", in", ", in order")
        inputs[words] = partial(sample, "dynamic_scatter_forward", name)
    for words, make in inputs.items():
        yield Case(f"dynamic_scatter {words}", make, {
            "triops": lambda *args: triops.dynamic_scatter(*args),
            "mmcv": lambda *args: mmcv.dynamic_scatter(*args),
        }, (0,))  # fmt: skip


def rotated_overlaps() -> Iterator[Case]:
    def pairs(rows: int, columns: int) -> tuple[Tensor, Tensor]:
        return boxes3d(rows), boxes3d(columns, 1)

    def seen_from_above(rows: int, columns: int) -> tuple[Any, ...]:
        return tuple(boxes[:, [0, 1, 3, 4, 6]] for boxes in pairs(rows, columns))

    for rows, columns in ((100, 100), (1000, 1000), (2000, 2000), (10_000, 200)):
        yield Case(f"box_iou_rotated {rows}x{columns}", partial(seen_from_above, rows, columns), {
            "triops": lambda a, b: triops.box_iou_rotated(a, b),
            "mmcv": lambda a, b: mmcv.box_iou_rotated(a, b),
        })  # fmt: skip
    for count in (100, 1000):
        yield Case(f"boxes_overlap_bev {count}x{count} margin .01", partial(pairs, count, count), {
            "triops": lambda a, b: triops.boxes_overlap_bev(a, b, margin=0.01),
            "mmcv": lambda a, b: mmcv.boxes_overlap_bev(a, b),
        })  # fmt: skip
        yield Case(f"boxes_iou3d {count}x{count} margin .01", partial(pairs, count, count), {
            "triops": lambda a, b: triops.boxes_iou3d(a, b, margin=0.01),
            "mmcv": lambda a, b: mmcv.boxes_iou3d(a, b),
        })  # fmt: skip


def sigmoid_focal_loss() -> Iterator[Case]:
    def scores(rows: int, classes: int, dtype: torch.dtype) -> tuple[Any, ...]:
        return (torch.randn(rows, classes) * 2 - 2).to(dtype), torch.randint(0, classes + 1, (rows,))

    for rows, classes, dtype in (
        (1000, 80, torch.float32), (100_000, 80, torch.float32), (100_000, 80, torch.float16),
        (321_408, 3, torch.float32),
    ):  # fmt: skip
        words = f"{rows}x{classes}{' fp16' if dtype == torch.float16 else ''}"
        yield Case(f"sigmoid_focal_loss {words}", partial(scores, rows, classes, dtype), {
            "triops": lambda s, t: triops.sigmoid_focal_loss(s, t, 2.0, 0.25, None, "mean"),
            "mmcv": lambda s, t: mmcv.sigmoid_focal_loss(s, t, 2.0, 0.25, None, "mean"),
        }, (0,))  # fmt: skip


def nms() -> Iterator[Case]:
    objects = {100: 9, 1000: 40, 4096: 100, 9000: 150, 20_000: 300}

    def flat(count: int) -> tuple[Any, ...]:
        boxes, scores = predictions(count, objects[count])
        return upright(boxes), scores

    def labelled(count: int) -> tuple[Any, ...]:
        return *flat(count), torch.randint(80, (count,))

    def deep(count: int) -> tuple[Any, ...]:
        boxes, scores = predictions(count, objects[count])
        z, height = torch.zeros(count, 1), torch.full((count, 1), 1.7)
        return torch.cat([boxes[:, :2], z, boxes[:, 2:4], height, boxes[:, 4:]], 1), scores

    for count in (100, 1000, 9000, 20_000):
        yield Case(f"nms {count}", partial(flat, count), {
            "triops": lambda b, s: triops.nms(b, s, 0.5),
            "mmcv": lambda b, s: mmcv.nms(b, s, 0.5),
            "torchvision": lambda b, s: torchvision.nms(b, s, 0.5),
        })  # fmt: skip
    for count in (100, 1000, 4096, 20_000):
        yield Case(f"batched_nms {count} 80 labels", partial(labelled, count), {
            "triops": lambda b, s, labels: triops.batched_nms(b, s, labels, 0.5),
            "mmcv": lambda b, s, labels: mmcv.batched_nms(b, s, labels, {"type": "nms", "iou_threshold": 0.5}),
            "torchvision": lambda b, s, labels: torchvision.batched_nms(b, s, labels, 0.5),
        })  # fmt: skip
    for count in (100, 1000, 4096):
        yield Case(f"nms_rotated {count}", partial(predictions, count, objects[count]), {
            "triops": lambda b, s: triops.nms_rotated(b, s, 0.2),
            "mmcv": lambda b, s: mmcv.nms_rotated(b, s, 0.2),
        })  # fmt: skip
    for count in (100, 1000, 9000):
        yield Case(f"nms3d {count}", partial(deep, count), {
            "triops": lambda b, s: triops.nms3d(b, s, 0.2),
            "mmcv": lambda b, s: mmcv.nms3d(b, s, 0.2),
        })  # fmt: skip


def roi_pooling() -> Iterator[Case]:
    def maps(shape: tuple[int, int, int, int], boxes: int, dtype: torch.dtype) -> tuple[Any, ...]:
        features = torch.randn(shape, device=DEVICE).to(dtype)
        return features, scenes.boxes_on_maps(shape, boxes, scale=0.25).to(dtype)

    def squares(pooled: Tensor) -> Tensor:
        return pooled.square().sum()

    for shape, boxes in (((1, 64, 50, 76), 16), ((1, 256, 50, 76), 128), ((2, 256, 200, 304), 1024)):
        for dtype in (torch.float32, torch.float16):
            for ratio, words in ((2, "2 samples"), (0, "adaptive")):
                name = f"roi_align {boxes}b {list(shape)} {words}{' fp16' if dtype == torch.float16 else ''}"
                yield Case(name, partial(maps, shape, boxes, dtype), {
                    "triops": lambda i, b, r=ratio: triops.roi_align(i, b, 7, 0.25, r, True),
                    "mmcv": lambda i, b, r=ratio: mmcv.roi_align(i, b, 7, 0.25, r, "avg", True),
                    "torchvision": lambda i, b, r=ratio: torchvision.roi_align(i, b, 7, 0.25, r, True),
                }, (0,))  # fmt: skip
        # mmcv reads the gradient as if it were contiguous, beyond its end where it is that of a sum
        yield Case(f"roi_pool {boxes}b {list(shape)}", partial(maps, shape, boxes, torch.float32), {
            "triops": lambda i, b: triops.roi_pool(i, b, 7, 0.25),
            "mmcv": lambda i, b: mmcv.roi_pool(i, b, 7, 0.25),
            "torchvision": lambda i, b: torchvision.roi_pool(i, b, 7, 0.25),
        }, (0,), squares)  # fmt: skip


def ms_deform_attn() -> Iterator[Case]:
    maps, small = [(100, 152), (50, 76), (25, 38), (13, 19)], [(25, 38), (13, 19), (7, 10), (4, 5)]
    inputs = {
        "tiny, 20 queries": attention(1, [(6, 8), (3, 4)], 4, 8, 4, 20),
        "decoder, 2 x 300": attention(2, maps, 8, 32, 4, 300),
        "decoder, 2 x 900": attention(2, maps, 8, 32, 4, 900),
        "encoder, small map": attention(1, small, 8, 32, 4),
        "encoder, 2 x 20197": attention(2, maps, 8, 32, 4),
    }
    for words, make in inputs.items():
        yield Case(f"ms_deform_attn {words}", partial(make, torch.float32), {
            "triops": lambda *args: triops.ms_deform_attn(*args),
            "mmcv": lambda *args: mmcv.multi_scale_deform_attn.MultiScaleDeformableAttnFunction.apply(*args, 64),
        }, (0, 3, 4))  # fmt: skip


def deform_conv2d() -> Iterator[Case]:
    def layer(channels: int, shape: tuple[int, int, int, int], masked: bool, dtype: torch.dtype) -> tuple[Any, ...]:
        return convolution(shape, channels, masked=masked, bias=masked)(dtype)[: 5 if masked else 3]

    for channels, batch, height, width, dtypes in (
        (16, 1, 12, 16, (torch.float32,)), (64, 1, 25, 38, (torch.float32,)),
        (256, 2, 50, 76, (torch.float32, torch.float16)), (256, 2, 100, 152, (torch.float32,)),
    ):  # fmt: skip
        words, shape = f"{channels}to{channels} {batch}x{height}x{width}", (batch, channels, height, width)
        yield _modulated(f"v2 {words}", partial(layer, channels, shape, True, torch.float32))
        yield Case(f"deform_conv2d v1 {words}", partial(layer, channels, shape, False, torch.float32), {
            "triops": lambda i, o, w: triops.deform_conv2d(i, o, w, padding=1),
            "mmcv": lambda i, o, w: mmcv.deform_conv2d(i, o, w, 1, 1),
        }, (0, 1, 2))  # fmt: skip
        for dtype in dtypes[1:]:
            yield _modulated(f"v2 {words} fp16", partial(layer, channels, shape, True, dtype))


def _modulated(words: str, make: Callable[[], tuple[Any, ...]]) -> Case:
    return Case(f"deform_conv2d {words}", make, {
        "triops": lambda i, o, w, m, b: triops.deform_conv2d(i, o, w, b, padding=1, mask=m),
        "mmcv": lambda i, o, w, m, b: mmcv.modulated_deform_conv2d(i, o, m, w, b, 1, 1, 1, 1, 1),
        "torchvision": lambda i, o, w, m, b: torchvision.deform_conv2d(i, o, w, b, padding=1, mask=m),
    }, (0, 1, 2, 3, 4))  # fmt: skip


def neighbors() -> Iterator[Case]:
    for batch, points, centers in ((1, 512, 128), (1, 4096, 1024), (8, 16_384, 4096)):
        yield Case(f"ball_query {batch}x{points}p {centers} centers", partial(lidar_clouds, batch, points, centers), {
            "triops": lambda p, c: triops.ball_query(p, c, 0.8, 32),
            "mmcv": lambda p, c: mmcv.ball_query(0, 0.8, 32, p, c),
        })  # fmt: skip
    for batch, points, queries in ((1, 512, 128), (1, 4096, 1024), (4, 16_384, 4096)):
        yield Case(f"knn {batch}x{points}p {queries} queries k16", partial(lidar_clouds, batch, points, queries), {
            "triops": lambda p, q: triops.knn(p, q, 16),
            "mmcv": lambda p, q: mmcv.knn(16, p, q),
        })  # fmt: skip


def interpolation() -> Iterator[Case]:
    def neighbors(batch: int, points: int, places: int) -> tuple[Any, ...]:
        weights = torch.rand(batch, places, 3)
        return (
            torch.randn(batch, 64, points), torch.randint(points, (batch, places, 3), dtype=torch.int32),
            weights / weights.sum(2, keepdim=True),
        )  # fmt: skip

    for batch, points, places in ((1, 128, 512), (1, 1024, 4096), (4, 4096, 16_384)):
        yield Case(f"three_nn {batch}x{points}p {places} queries", partial(lidar_clouds, batch, places, points), {
            "triops": lambda q, p: triops.three_nn(q, p),
            "mmcv": lambda q, p: mmcv.three_nn(q, p),
        })  # fmt: skip
        words = f"{batch}x64x{points} {places} places"
        yield Case(f"three_interpolate {words}", partial(neighbors, batch, points, places), {
            "triops": lambda f, i, w: triops.three_interpolate(f, i, w),
            "mmcv": lambda f, i, w: mmcv.three_interpolate(f, i, w),
        }, (0,))  # fmt: skip


def sampling() -> Iterator[Case]:
    def features(batch: int, points: int, *chosen: int) -> tuple[Any, ...]:
        return torch.randn(batch, 64, points), torch.randint(points, (batch, *chosen), dtype=torch.int32)

    for batch, points, count in ((1, 512, 128), (1, 4096, 1024), (8, 16_384, 4096)):
        name = f"furthest_point_sample {batch}x{points} to {count}"
        yield Case(name, partial(lidar_clouds, batch, points, count), {
            "triops": lambda p, some: triops.furthest_point_sample(p, some.shape[1]),
            "mmcv": lambda p, some: mmcv.furthest_point_sample(p, some.shape[1]),
        })  # fmt: skip
        yield Case(f"gather_points {batch}x64x{points} {count}", partial(features, batch, points, count), {
            "triops": lambda f, i: triops.gather_points(f, i),
            "mmcv": lambda f, i: mmcv.gather_points(f, i),
        }, (0,))  # fmt: skip
        yield Case(f"group_points {batch}x64x{points} {count}x16", partial(features, batch, points, count, 16), {
            "triops": lambda f, i: triops.group_points(f, i),
            "mmcv": lambda f, i: mmcv.grouping_operation(f, i),
        }, (0,))  # fmt: skip


def roiaware_pool3d() -> Iterator[Case]:
    def few() -> tuple[Any, ...]:
        rois = boxes3d(8)
        points = rois[:, :3].repeat(125, 1) + (torch.rand(1000, 3) - 0.5) * torch.tensor([4.0, 4.0, 2.0])
        return rois, points, torch.randn(1000, 16)

    def stored() -> tuple[Any, ...]:
        return sample("roiaware_pool3d_forward", "128 RoIs, 16000 points, max")[:3]

    inputs = {
        "8b 1000p avg": few, "8b 1000p max": few, "128 RoIs, 16000p, max": stored, "128 RoIs, 16000p, avg": stored,
    }  # fmt: skip
    for words, make in inputs.items():
        yield Case(f"roiaware_pool3d {words}", make, {
            "triops": lambda r, p, f, mode=words[-3:]: triops.roiaware_pool3d(r, p, f, 12, 128, mode),
            "mmcv": lambda r, p, f, mode=words[-3:]: mmcv.RoIAwarePool3d(12, 128, mode)(r, p, f),
        }, (2,))  # fmt: skip


def all_cases() -> list[Case]:
    groups = (
        points_in_boxes, bbox_overlaps, border_align, voxelize, dynamic_scatter, rotated_overlaps, sigmoid_focal_loss,
        nms, roi_pooling, ms_deform_attn, deform_conv2d, neighbors, interpolation, sampling, roiaware_pool3d,
    )  # fmt: skip
    return [case for group in groups for case in group()]


def import_peers(folder: Path | None) -> dict[str, str]:
    """Makes `mmcv` and `torchvision` what they are here; their versions."""
    global mmcv, torchvision
    if folder is not None:
        sys.path.insert(0, str(folder))
    versions = {}
    for name in PEERS:
        try:
            globals()[name] = importlib.import_module(f"{name}.ops")
        except Exception as error:  # a compiled peer may fail in any way while it loads
            print(f"no {name} here ({type(error).__name__}: {error})")
            continue
        versions[name] = importlib.import_module(name).__version__.partition("+")[0]
    if _sample.compiled_mmcv() is None:  # the operators that triops lends it are no peer
        mmcv = None
        versions.pop("mmcv", None)
    return versions
