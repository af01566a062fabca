"""Inputs of box_iou_rotated."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from triops._geometry.rotated.arguments import rectangles
from triops._sample import BadCall, Sample, Sized, Standard, Work, compiled_mmcv
from triops.ops.box_iou_rotated import box_iou_rotated, boxes_iou_bev, boxes_overlap_bev

_Make = Callable[[torch.dtype], tuple[Any, ...]]
_Options = tuple[str, bool, bool, float]
PLAIN: _Options = ("iou", False, True, 0.0)


def rotated_boxes(count: int, generator: torch.Generator, extent: float, size: float = 4.0) -> Tensor:
    """Rectangles of every angle, anywhere, with sides of up to `size`."""
    fields = torch.rand(count, 5, generator=generator)
    return fields * torch.tensor([extent, extent, size, size, 14.0]) + torch.tensor([0.0, 0, 0.1, 0.1, -7])


def _random(rows: int, columns: int, options: _Options = PLAIN, extent: float = 20.0, seed: int = 0) -> _Make:
    def make(dtype: torch.dtype) -> tuple[Any, ...]:
        g = torch.Generator().manual_seed(seed)
        first, second = rotated_boxes(rows, g, extent), rotated_boxes(columns, g, extent)
        if options[1]:  # as in a loss: predictions near their targets
            second = first + (second - first) * 0.02
        return first.to(dtype), second.to(dtype), *options

    return make


def _scene(rows: int, columns: int, extent: float = 140.0) -> _Make:
    """Cars and people seen from above, as a detector compares its anchors or predictions with the boxes of a scene."""

    def make(dtype: torch.dtype) -> tuple[Any, ...]:
        g = torch.Generator().manual_seed(rows + columns)

        def boxes(count: int) -> Tensor:
            kind = torch.randint(3, (count,), generator=g)
            size = torch.tensor([[4.6, 1.9], [0.8, 0.7], [1.8, 0.6]])[kind]
            centre = torch.rand(count, 2, generator=g) * extent - extent / 2
            angle = torch.rand(count, 1, generator=g) * 2 * math.pi - math.pi
            return torch.cat([centre, size * (0.8 + 0.4 * torch.rand(count, 2, generator=g)), angle], 1)

        return boxes(rows).to(dtype), boxes(columns).to(dtype), *PLAIN

    return make


def special_boxes() -> Tensor:
    """Equal, touching, nested and crossing rectangles, at multiples of an eighth of a turn; lines and points."""
    angles = torch.arange(-4, 5) * (math.pi / 4)
    shapes = torch.tensor(
        [[0.0, 0, 2, 2], [0, 0, 4, 1], [2, 0, 2, 2], [2, 2, 2, 2], [0.5, 0.25, 0.5, 0.5], [0, 0, 0, 2], [0, 0, 0, 0],
         [0, 0, -2, 2], [3, 0, 4, 0.001], [1000, 1000, 2, 2]]
    )  # fmt: skip
    boxes = torch.cat([shapes.repeat_interleave(len(angles), 0), angles.repeat(len(shapes))[:, None]], 1)
    return boxes


def _special(options: _Options) -> _Make:
    def make(dtype: torch.dtype) -> tuple[Any, ...]:
        boxes = special_boxes()
        first, second = (
            (boxes.repeat_interleave(len(boxes), 0), boxes.repeat(len(boxes), 1)) if options[1] else (boxes, boxes)
        )
        return first.to(dtype), second.to(dtype), *options

    return make


def not_finite_boxes() -> Tensor:
    """Every field is NaN or infinite once, beside one rectangle that is not."""
    boxes = torch.tensor([1.0, 2, 3, 4, 0.3]).repeat(16, 1)
    for i, value in enumerate((math.inf, -math.inf, math.nan)):
        for field in range(5):
            boxes[i * 5 + field, field] = value
    return boxes


def _not_finite(options: _Options) -> _Make:
    def make(dtype: torch.dtype) -> tuple[Any, ...]:
        boxes = not_finite_boxes()
        return boxes.to(dtype), boxes.flip(0).to(dtype), *options

    return make


def _extreme(options: _Options) -> _Make:
    """Sizes and areas near the largest and the smallest float."""

    def make(dtype: torch.dtype) -> tuple[Any, ...]:
        big, tiny = (6e4, 1e-7) if dtype == torch.float16 else (3e38, 1e-38)
        boxes = torch.tensor(
            [[0.0, 0, big, big, 0.5], [0, 0, big, 1, 1.0], [big, big, big, big, 2.0], [0, 0, tiny, tiny, 0.5],
             [0, 0, tiny, 1, 0.0], [0, 0, 1, 1, 1e5], [0, 0, 2, 1, -1e30], [1e4, 1e4, 1, 1, 0.1]]
        )  # fmt: skip
        return boxes.to(dtype), boxes.to(dtype), *options

    return make


def _seen_from_above(make: _Make) -> _Make:
    """The same rectangles as 3D boxes, at heights that nobody may look at."""

    def made(dtype: torch.dtype) -> tuple[Any, ...]:
        first, second, *options = make(dtype)
        nowhere = torch.tensor([math.nan, math.inf], dtype=dtype)

        def boxes(flat: Tensor) -> Tensor:
            z, dz = nowhere.expand(len(flat), 2).split(1, 1)
            return torch.cat([flat[:, :2], z, flat[:, 2:4], dz, flat[:, 4:]], 1)

        return boxes(first), boxes(second), *options

    return made


SAMPLES = [
    Sample("box_iou_rotated", "2000 x 2000", _scene(2000, 2000), "network", demo=True),
    Sample("box_iou_rotated", "10000 x 200", _scene(10_000, 200), "network"),
    Sample("box_iou_rotated", "2000 x 2000 crowded", _random(2000, 2000), "network"),
    Sample("box_iou_rotated", "3 x 4", _random(3, 4, extent=4.0)),
    Sample("box_iou_rotated", "57 x 300", _random(57, 300, seed=1)),
    Sample("box_iou_rotated", "57 x 300 iof", _random(57, 300, ("iof", False, False, 0.0), seed=2)),
    Sample("box_iou_rotated", "57 x 300 area", _random(57, 300, ("area", False, True, 0.0), seed=3)),
    Sample("box_iou_rotated", "30 x 70 margin", _random(30, 70, ("iou", False, True, 0.01), seed=4)),
    Sample("box_iou_rotated", "30 x 70 iof margin", _random(30, 70, ("iof", False, True, 0.5), seed=5)),
    Sample("box_iou_rotated", "30 x 70 area margin", _random(30, 70, ("area", False, False, 0.01), seed=6)),
    Sample("box_iou_rotated", "77 aligned", _random(77, 77, ("iou", True, True, 0.0), seed=7)),
    Sample("box_iou_rotated", "77 aligned area margin", _random(77, 77, ("area", True, True, 0.01), seed=8)),
    *(
        Sample("box_iou_rotated", f"{name} seen from above", _seen_from_above(make))
        for name, make in (
            ("57 x 300 area", _random(57, 300, ("area", False, True, 0.0), seed=9)),
            ("30 x 70 margin", _random(30, 70, ("iou", False, True, 0.01), seed=10)),
            ("77 aligned", _random(77, 77, ("iou", True, True, 0.0), seed=11)),
        )
    ),
    *(
        Sample("box_iou_rotated", f"{n} x {m}", _random(n, m, seed=n + m), "boundary")
        for n, m in ((1, 1), (1, 1025), (7, 63), (8, 64), (9, 65), (65, 1023), (0, 5), (5, 0), (0, 0))
    ),
    *(
        Sample("box_iou_rotated", f"{n} aligned", _random(n, n, ("iof", True, False, 0.0), seed=n), "boundary")
        for n in (0, 1, 127, 129)
    ),
    *(
        Sample("box_iou_rotated", f"special {mode}", _special((mode, mode == "iof", True, 0.0)), "boundary")
        for mode in ("iou", "iof", "area")
    ),
    Sample("box_iou_rotated", "special margin", _special(("iou", False, True, 0.01)), "boundary"),
    Sample("box_iou_rotated", "not finite", _not_finite(PLAIN), "boundary"),
    Sample("box_iou_rotated", "not finite margin", _not_finite(("area", False, True, 0.01)), "boundary"),
    Sample("box_iou_rotated", "extreme iou", _extreme(PLAIN), "boundary"),
    Sample("box_iou_rotated", "extreme iof", _extreme(("iof", False, True, 0.0)), "boundary"),
]

_ONE, _TWO = torch.zeros(3, 5), torch.zeros(4, 5)


SIZED = [
    Sized("box_iou_rotated", "pairs", lambda draw: _random(draw(1500), draw(1500))),
    Sized("box_iou_rotated", "aligned", lambda draw: _random(n := draw(9000), n, ("iou", True, True, 0.01))),
]


def _bad(what: str, error: type[Exception], match: str, *args: Any, **options: Any) -> BadCall:
    return BadCall(f"box_iou_rotated: {what}", lambda: box_iou_rotated(*args, **options), error, match)


BAD_CALLS = [
    _bad("4 columns", ValueError, r"bboxes1 must have shape \[N, 5\], got \[3, 4\]", _ONE[:, :4], _TWO),
    _bad("6 columns", ValueError, r"bboxes2 must have shape \[M, 5\], got \[4, 6\]", _ONE, torch.zeros(4, 6)),
    _bad("3D boxes", ValueError, r"bboxes1 must have shape \[N, 5\], got \[4, 7\]", *torch.zeros(2, 4, 7)),
    _bad("rank 1", ValueError, r"bboxes1 must have shape .*got \[5\]", _ONE[0], _TWO),
    _bad("rank 3", ValueError, r"bboxes2 must have shape .*got \[1, 4, 5\]", _ONE, _TWO[None]),
    _bad("unequal rows aligned", ValueError, r"N = 3 as in bboxes1, got \[4, 5\]", _ONE, _TWO, aligned=True),
    _bad("unknown mode", ValueError, "mode must be 'iou', 'iof' or 'area', got 'giou'", _ONE, _TWO, mode="giou"),
    _bad("mode as a number", TypeError, "mode must be a string, got int", _ONE, _TWO, mode=0),
    _bad("aligned of another type", TypeError, "aligned must be a bool, got int", _ONE, _TWO, aligned=1),
    _bad("clockwise of another type", TypeError, "clockwise must be a bool, got NoneType", _ONE, _TWO, clockwise=None),
    _bad("negative margin", ValueError, "margin must be at least 0, got -0.1", _ONE, _TWO, margin=-0.1),
    _bad("margin NaN", ValueError, "margin must be finite, got nan", _ONE, _TWO, margin=math.nan),
    _bad("integer boxes", TypeError, "bboxes1 must be float32.*got int64", _ONE.long(), _TWO.long()),
    _bad("unequal dtypes", TypeError, "bboxes1 float32, bboxes2 float64", _ONE, _TWO.double()),
    _bad("unequal devices", ValueError, "bboxes2 on meta", _ONE, _TWO.to("meta")),
    _bad("a list", TypeError, "bboxes1 must be a Tensor, got list", [[0.0, 0, 1, 1, 0]], _TWO),
    BadCall("boxes_overlap_bev: 5 columns", lambda: boxes_overlap_bev(torch.zeros(2, 7), torch.zeros(2, 5)),
            ValueError, r"boxes_overlap_bev: boxes_b must have shape \[N, 7\], got \[2, 5\]"),
    BadCall("boxes_iou_bev: None", lambda: boxes_iou_bev(None, torch.zeros(2, 7)),  # type: ignore[arg-type]
            TypeError, "boxes_iou_bev: boxes_a must be a Tensor, got NoneType"),
]  # fmt: skip

STANDARD = {
    "box_iou_rotated": Standard(
        "static", float32=1e-5, half=3e-3, why_slower="pairs that are near cost some 200 operations each, others few"
    )
}


def work(operator: str, args: tuple[Any, ...]) -> Work:
    first, second, aligned = args[0], args[1], args[3]
    pairs = first.shape[0] if aligned else first.shape[0] * second.shape[0]
    return Work((first.numel() + second.numel() + pairs) * first.element_size(), 6 * pairs)


def baselines(operator: str) -> dict[str, Callable[..., Any]]:
    found: dict[str, Callable[..., Any]] = {"torch": clipped_polygons}
    _ext = compiled_mmcv()
    if _ext is None:
        return found

    def mmcv(
        bboxes1: Tensor, bboxes2: Tensor, mode: str, aligned: bool, clockwise: bool, margin: float
    ) -> Tensor:  # fmt: skip
        shape = (bboxes1.shape[0],) if aligned else (bboxes1.shape[0], bboxes2.shape[0])
        out = bboxes1.new_zeros(math.prod(shape))
        bboxes1, bboxes2 = rectangles(bboxes1), rectangles(bboxes2)
        _ext.box_iou_rotated(bboxes1, bboxes2, out, mode_flag=int(mode == "iof"), aligned=aligned)
        return out.view(shape)

    return {**found, "mmcv": mmcv}


def clipped_polygons(
    bboxes1: Tensor, bboxes2: Tensor, mode: str, aligned: bool, clockwise: bool, margin: float
) -> Tensor:
    """The plain formulation in torch: all crossings and inner corners, sorted by angle, then the shoelace formula."""
    bboxes1, bboxes2 = rectangles(bboxes1), rectangles(bboxes2)
    if not aligned:
        bboxes1, bboxes2 = bboxes1[:, None], bboxes2[None]
    bboxes1, bboxes2 = torch.broadcast_tensors(bboxes1, bboxes2)
    sign = 1.0 if clockwise else -1.0
    reach = max(margin, 1e-4)

    def corners(boxes: Tensor) -> Tensor:
        cos, sin = boxes[..., 4:].cos(), boxes[..., 4:].sin() * sign
        x = boxes[..., 2:3] / 2 * boxes.new_tensor([-1.0, 1, 1, -1])
        y = boxes[..., 3:4] / 2 * boxes.new_tensor([-1.0, -1, 1, 1])
        return boxes[..., None, :2] + torch.stack([x * cos - y * sin, x * sin + y * cos], -1)

    def inside(points: Tensor, boxes: Tensor) -> Tensor:
        shift = points - boxes[..., None, :2]
        cos, sin = boxes[..., 4:].cos(), boxes[..., 4:].sin() * sign
        x = shift[..., 0] * cos + shift[..., 1] * sin
        y = shift[..., 1] * cos - shift[..., 0] * sin
        return (x.abs() < boxes[..., 2:3] / 2 + reach) & (y.abs() < boxes[..., 3:4] / 2 + reach)

    def cross(a: Tensor, b: Tensor) -> Tensor:
        return a[..., 0] * b[..., 1] - a[..., 1] * b[..., 0]

    first, second = corners(bboxes1), corners(bboxes2)
    edges1, edges2 = first.roll(-1, -2) - first, second.roll(-1, -2) - second
    apart = second[..., None, :, :] - first[..., :, None, :]
    area = cross(edges1[..., :, None, :], edges2[..., None, :, :])
    t = cross(apart, edges2[..., None, :, :]) / area
    u = cross(apart, edges1[..., :, None, :]) / area
    crossing = (t > 0) & (t < 1) & (u > 0) & (u < 1)
    at = first[..., :, None, :] + t.nan_to_num(0, 0, 0)[..., None] * edges1[..., :, None, :]
    points = torch.cat([at.flatten(-3, -2), first, second], -2)
    counted = torch.cat([crossing.flatten(-2), inside(first, bboxes2), inside(second, bboxes1)], -1)
    number = counted.sum(-1)
    points = torch.where(counted[..., None], points, 0)
    points = points - (points.sum(-2) / number.clamp(min=1)[..., None])[..., None, :]
    angle = torch.where(counted, torch.atan2(points[..., 1], points[..., 0]), 9.0)
    order = angle.sort(dim=-1).indices
    points = points.gather(-2, order[..., None].expand(points.shape))
    points = torch.where(counted.gather(-1, order)[..., None], points, points[..., :1, :])
    shared = cross(points, points.roll(-1, -2)).sum(-1).abs() / 2 * (number > 2)
    if mode == "area":
        return shared
    area1, area2 = bboxes1[..., 2] * bboxes1[..., 3], bboxes2[..., 2] * bboxes2[..., 3]
    return shared / (area1 + area2 - shared if mode == "iou" else area1)
