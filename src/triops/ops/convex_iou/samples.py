"""Inputs of convex_iou."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from triops._sample import BadCall, Sample, Sized, Standard, Work, bytes_of, compiled_mmcv
from triops.ops.convex_iou import box_iou_quadri, convex_iou

_Make = Callable[[torch.dtype], tuple[Any, ...]]


def quadrilaterals(count: int, generator: torch.Generator, extent: float) -> Tensor:
    """Rectangles of every angle whose corners are moved a little, in either direction around: [N, 8]."""
    angle = torch.rand(count, 1, generator=generator) * 2 * math.pi
    half = torch.rand(count, 2, 1, generator=generator) * 2 + 0.2
    x, y = half[:, 0] * torch.tensor([-1.0, 1, 1, -1]), half[:, 1] * torch.tensor([-1.0, -1, 1, 1])
    corners = torch.stack([x * angle.cos() - y * angle.sin(), x * angle.sin() + y * angle.cos()], -1)
    corners = corners + torch.rand(count, 4, 2, generator=generator) * 0.1
    corners = corners + torch.rand(count, 1, 2, generator=generator) * extent
    turned = torch.rand(count, 1, 1, generator=generator) < 0.5
    return torch.where(turned, corners.flip(1), corners).reshape(count, 8)


def sets(
    rows: int, columns: int, points: int = 9, mode: str = "iou", aligned: bool = False, *, extent: float = 20.0,
    seed: int = 0,
) -> _Make:  # fmt: skip
    """Sets of points around, or of 4 that are quadrilaterals too, against quadrilaterals."""

    def make(dtype: torch.dtype) -> tuple[Any, ...]:
        g = torch.Generator().manual_seed(seed)
        second = quadrilaterals(columns, g, extent)
        if points == 4:
            first = quadrilaterals(rows, g, extent)
        else:
            centre = torch.rand(rows, 1, 2, generator=g) * extent
            first = (centre + torch.randn(rows, points, 2, generator=g)).flatten(1)
        return first.to(dtype), second.to(dtype), mode, aligned

    return make


def _special(mode: str, aligned: bool) -> _Make:
    """Squares that are equal, touch, contain each other; points in line, equal points, corners in any order."""
    square = torch.tensor([[0.0, 0], [1, 0], [1, 1], [0, 1]])
    shapes = [
        square, square * 2, square + 0.5, square + torch.tensor([1.0, 0]), square + 1, square[[0, 2, 1, 3]],
        square * torch.tensor([1.0, 0]), square * 0, torch.tensor([[0.0, 0], [1, 0], [1, 1], [0.5, 0.25]]),
        torch.tensor([[0.5, -0.5], [1.5, 0.5], [0.5, 1.5], [-0.5, 0.5]]), square * 1e-6, square * 1e6 - 5e5,
        square * math.inf, square + math.nan, square * 3e38, square * 1e-30,
    ]  # fmt: skip

    def make(dtype: torch.dtype) -> tuple[Any, ...]:
        rows = torch.stack(shapes).flatten(1).to(dtype)
        count = len(rows)
        if aligned:
            return rows.repeat_interleave(count, 0), rows.repeat(count, 1), mode, True
        return rows, rows, mode, False

    return make


SAMPLES = [
    Sample("convex_iou", "20000 sets of 9 points, 100 polygons", sets(20_000, 100, extent=200.0), "network",
           gpu_only=True),
    Sample("convex_iou", "500 sets of 9 points, 50 polygons", sets(500, 50, extent=60.0), "network", demo=True),
    Sample("convex_iou", "2000 x 2000 quadrilaterals", sets(2000, 2000, 4, extent=140.0), "network", gpu_only=True),
    Sample("convex_iou", "7 x 5", sets(7, 5, extent=3.0)),
    Sample("convex_iou", "20 x 30 quadrilaterals, iof", sets(20, 30, 4, "iof", extent=6.0, seed=1)),
    Sample("convex_iou", "33 aligned", sets(33, 33, 6, aligned=True, extent=1.0, seed=2)),
    *(
        Sample("convex_iou", f"{n} x {m}", sets(n, m, k, extent=4.0, seed=n + m), "boundary", (torch.float32,))
        for n, m, k in ((1, 1, 1), (5, 33, 3), (4, 31, 10), (0, 3, 4), (3, 0, 4))
    ),
    Sample("convex_iou", "special", _special("iou", False), "boundary", (torch.float32, torch.float64)),
    Sample("convex_iou", "special aligned", _special("iof", True), "boundary", (torch.float32,)),
]  # fmt: skip

SIZED = [Sized("convex_iou", "pairs", lambda draw: sets(draw(400), draw(300)))]

_POINTS, _QUADS = torch.zeros(3, 18), torch.zeros(4, 8)


def _bad(what: str, error: type[Exception], match: str, *args: Any, **options: Any) -> BadCall:
    return BadCall(f"convex_iou: {what}", lambda: convex_iou(*args, **options), error, match)


BAD_CALLS = [
    _bad("17 columns", ValueError, "pointsets must have 2 to 32 columns.*got 17", _POINTS[:, 1:], _QUADS),
    _bad("no columns", ValueError, "polygons must have 2 to 32 columns.*got 0", _POINTS, _QUADS[:, :0]),
    _bad("rank 3", ValueError, r"pointsets must have shape \[N, 2K\]", _POINTS[None], _QUADS),
    _bad("unequal rows aligned", ValueError, r"N = 3 as in pointsets", _POINTS, _QUADS, aligned=True),
    _bad("another mode", ValueError, "mode must be 'iou' or 'iof', got 'giou'", _POINTS, _QUADS, "giou"),
    _bad("integers", TypeError, "pointsets must be float32.*got int64", _POINTS.long(), _QUADS.long()),
    _bad("unequal dtypes", TypeError, "polygons float64", _POINTS, _QUADS.double()),
    _bad("unequal devices", ValueError, "polygons on meta", _POINTS, _QUADS.to("meta")),
    _bad("a list", TypeError, "pointsets must be a Tensor, got list", [[0.0] * 8], _QUADS),
    BadCall("box_iou_quadri: 18 columns", lambda: box_iou_quadri(_POINTS, _QUADS), ValueError,
            r"box_iou_quadri: bboxes1 must have shape \[N, 8\], got \[3, 18\]"),
    BadCall("box_iou_quadri: None", lambda: box_iou_quadri(_QUADS, None),  # type: ignore[arg-type]
            TypeError, "box_iou_quadri: bboxes2 must be a Tensor, got NoneType"),
]  # fmt: skip

STANDARD = {
    "convex_iou": Standard(
        "static",
        float32=1e-5,
        half=3e-3,
        why_slower="pairs that are near cost some hundred operations each, others few",
    )
}


def work(operator: str, args: tuple[Any, ...]) -> Work:
    first, second, _, aligned = args
    pairs = len(first) if aligned else len(first) * len(second)
    return Work(bytes_of(args) + pairs * first.element_size(), 6 * pairs)


def baselines(operator: str) -> dict[str, Callable[..., Any]]:
    ext = compiled_mmcv()
    if ext is None or not torch.cuda.is_available():
        return {}

    def mmcv(pointsets: Tensor, polygons: Tensor, mode: str, aligned: bool) -> Tensor:
        ious = pointsets.new_zeros(len(pointsets), len(polygons))
        ext.convex_iou(pointsets, polygons, ious)
        return ious

    return {"mmcv": mmcv}
