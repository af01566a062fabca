"""Inputs of diff_iou_rotated and of its backward."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from triops._sample import BadCall, Sample, Sized, Standard, Work, bytes_of
from triops.ops.box_iou_rotated.samples import clipped_polygons, not_finite_boxes, special_boxes
from triops.ops.diff_iou_rotated import (
    diff_iou_rotated,
    diff_iou_rotated_2d,
    diff_iou_rotated_3d,
    diff_iou_rotated_backward,
)

_Make = Callable[[torch.dtype], tuple[Any, ...]]
_F, _B = "diff_iou_rotated", "diff_iou_rotated_backward"


def pairs(shape: tuple[int, ...], fields: int, mode: str = "iou", *, spread: float = 1.0, seed: int = 0) -> _Make:
    """Boxes of cars and people, and predictions of them that are off by up to `spread` metres, a quarter each way."""

    def make(dtype: torch.dtype) -> tuple[Any, ...]:
        g = torch.Generator().manual_seed(seed)
        kind = torch.randint(3, shape, generator=g)
        size = torch.tensor([[4.6, 1.9, 1.7], [0.8, 0.7, 1.8], [1.8, 0.6, 1.7]])[kind]
        size = size * (0.8 + 0.4 * torch.rand(*shape, 3, generator=g))
        centre = torch.rand(*shape, 3, generator=g) * torch.tensor([12.0, 12.0, 2.0]) - 6
        angle = torch.rand(*shape, 1, generator=g) * 2 * math.pi - math.pi
        targets = torch.cat([centre, size, angle], -1)
        change = torch.rand(*shape, 7, generator=g) - 0.5
        predicted = targets.clone()
        predicted[..., :3] += change[..., :3] * (2 * spread)
        predicted[..., 3:6] *= 1 + 0.5 * change[..., 3:6]
        predicted[..., 6] += change[..., 6] * spread
        return _of(predicted, fields).to(dtype), _of(targets, fields).to(dtype), mode

    return make


def _of(boxes: Tensor, fields: int) -> Tensor:
    return boxes if fields == 7 else boxes[..., [0, 1, 3, 4, 6]]


def _all_pairs(boxes: Tensor, fields: int, mode: str) -> _Make:
    """Every rectangle with every other one; as boxes, those before others stand on, in or under them."""

    def make(dtype: torch.dtype) -> tuple[Any, ...]:
        first, second = boxes.repeat_interleave(len(boxes), 0), boxes.repeat(len(boxes), 1)
        if fields == 7:
            step = torch.arange(len(first))
            first, second = (
                torch.cat([b[:, :2], z[:, None], b[:, 2:4], dz[:, None], b[:, 4:]], 1)
                for b, z, dz in (
                    (first, torch.zeros(len(step)), torch.full((len(step),), 2.0)),
                    (second, (step % 5 - 2).float(), (step % 3 + 1).float()),
                )
            )
        return first.to(dtype), second.to(dtype), mode

    return make


def _extreme(fields: int, mode: str) -> _Make:
    """Sizes, distances and areas near the largest and the smallest float."""
    boxes = torch.tensor(
        [[0.0, 0, 3e38, 3e38, 0.5], [0, 0, 3e38, 1, 1.0], [3e38, 3e38, 3e38, 3e38, 2.0], [0, 0, 1e-38, 1e-38, 0.5],
         [0, 0, 1e-45, 1, 0.0], [0, 0, 1, 1, 1e5], [0, 0, 2, 1, -1e30], [1e4, 1e4, 1, 1, 0.1], [0, 0, 1e-20, 1e20, 0]]
    )  # fmt: skip
    return _all_pairs(boxes, fields, mode)


def _backward(make: _Make) -> _Make:
    def made(dtype: torch.dtype) -> tuple[Any, ...]:
        boxes1, boxes2, mode = make(dtype)
        grad = torch.randn(boxes1.shape[:-1], generator=torch.Generator().manual_seed(9))
        return grad.to(dtype), boxes1, boxes2, mode

    return made


_CASES: list[tuple[str, _Make, Any]] = [
    ("10,000 pairs of rectangles", pairs((1, 10_000), 5), "network"),
    ("10,000 pairs of boxes", pairs((1, 10_000), 7), "network"),
    ("10,000 pairs of boxes, giou", pairs((1, 10_000), 7, "giou"), "network"),
    ("12 boxes, giou", pairs((3, 4), 7, "giou", spread=1.5, seed=1), "general"),
    ("10 rectangles", pairs((10,), 5), "general"),
    ("9 rectangles, diou", pairs((9,), 5, "diou", spread=2.0, seed=4), "general"),
    *((f"special, {mode}", _all_pairs(special_boxes()[::2], 7, mode), "boundary") for mode in ("iou", "giou", "diou")),
    ("special rectangles, giou", _all_pairs(special_boxes()[::2], 5, "giou"), "boundary"),
    ("not finite, giou", _all_pairs(not_finite_boxes(), 7, "giou"), "boundary"),
    ("extreme, giou", _extreme(7, "giou"), "boundary"),
    ("extreme rectangles, diou", _extreme(5, "diou"), "boundary"),
    *((f"{n} rectangles", pairs((n,), 5, seed=n), "boundary") for n in (0, 1, 63, 65)),
    ("none, of two dimensions", pairs((0, 3), 7), "boundary"),
    ("a single box", pairs((), 7), "boundary"),
]
SAMPLES = [
    Sample(op, name, make(case), scale, (torch.float32,) if scale == "boundary" else Sample.dtypes,
           gradcheck=op == _F and scale == "general", demo=op == _F and name == "10,000 pairs of boxes")
    for op, make in ((_F, lambda case: case), (_B, _backward))
    for name, case, scale in _CASES
]  # fmt: skip

SIZED = [
    Sized(op, "boxes", lambda draw, make=make: make(pairs((draw(9000),), 7, "giou")))  # type: ignore[misc]
    for op, make in ((_F, lambda case: case), (_B, _backward))
]


def _bad_calls() -> list[BadCall]:
    flat, boxes = torch.ones(2, 3, 5), torch.ones(4, 7)

    def bad(what: str, error: type[Exception], match: str, *args: Any, call: Any = diff_iou_rotated) -> BadCall:
        return BadCall(f"{call.__name__}: {what}", lambda: call(*args), error, match)

    return [
        bad("6 columns", ValueError, r"boxes1 must have shape \[..., 5\] or \[..., 7\], got \[4, 6\]",
            boxes[:, :6], boxes[:, :6]),
        bad("a number", ValueError, r"boxes1 must have shape .*got \[\]", torch.tensor(1.0), torch.tensor(1.0)),
        bad("rectangles and boxes", ValueError, r"boxes2 must have shape \[2, 3, 5\], got \[2, 3, 7\]",
            flat, torch.ones(2, 3, 7)),
        bad("unequal counts", ValueError, r"boxes2 must have shape \[4, 7\], got \[3, 7\]", boxes, boxes[:3]),
        bad("integer boxes", TypeError, "boxes1 must be float32.*got int64", boxes.long(), boxes.long()),
        bad("unequal dtypes", TypeError, "boxes1 float32, boxes2 float64", boxes, boxes.double()),
        bad("unequal devices", ValueError, "boxes2 on meta", boxes, boxes.to("meta")),
        bad("a list", TypeError, "boxes1 must be a Tensor, got list", [[0.0] * 5], flat),
        bad("another mode", ValueError, "mode must be 'iou', 'giou' or 'diou', got 'ciou'", boxes, boxes, "ciou"),
        bad("a mode that is a number", TypeError, "mode must be a string, got int", boxes, boxes, 1),
        bad("boxes", ValueError, r"diff_iou_rotated_2d: box1 must have shape \[..., 5\], got \[4, 7\]", boxes, boxes,
            call=diff_iou_rotated_2d),
        bad("rectangles", ValueError, r"box3d1 must have shape \[..., 7\], got \[2, 3, 5\]", flat, flat,
            call=diff_iou_rotated_3d),
        bad("None", TypeError, "box3d1 must be a Tensor, got NoneType", None, boxes, call=diff_iou_rotated_3d),
        bad("a gradient for other boxes", ValueError, r"grad_output must have shape \[4\], got \[3\]",
            torch.ones(3), boxes, boxes, call=diff_iou_rotated_backward),
        bad("a gradient of another dtype", TypeError, "grad_output float64",
            torch.ones(4).double(), boxes, boxes, call=diff_iou_rotated_backward),
    ]  # fmt: skip


BAD_CALLS = _bad_calls()

_WHY = "some hundred dependent operations per pair"
STANDARD = {_F: Standard(why_slower=_WHY), _B: Standard(error_scale="row", why_slower=_WHY)}


def work(operator: str, args: tuple[Any, ...]) -> Work:
    boxes1 = args[operator == _B]
    count = boxes1.numel() // boxes1.shape[-1]
    out = count if operator == _F else 2 * boxes1.numel()
    return Work(bytes_of(args) + out * boxes1.element_size(), (200 if operator == _F else 600) * count)


def baselines(operator: str) -> dict[str, Callable[..., Any]]:
    return {"torch": composed} if operator == _F else {}


def composed(boxes1: Tensor, boxes2: Tensor, mode: str) -> Tensor:
    """What one writes in torch, and lets autograd differentiate: crossings and corners, sorted by angle."""
    solid = boxes1.shape[-1] == 7
    flat1, flat2 = (b[..., [0, 1, 3, 4, 6]] if solid else b for b in (boxes1, boxes2))
    volume1, volume2 = flat1[..., 2] * flat1[..., 3], flat2[..., 2] * flat2[..., 3]
    shared = clipped_polygons(flat1, flat2, "area", True, True, 0.0)
    depth = torch.zeros_like(shared)
    if solid:
        tops, bottoms = (torch.stack([b[..., 2] + s * b[..., 5] for b in (boxes1, boxes2)]) for s in (0.5, -0.5))
        shared = shared * (tops.amin(0) - bottoms.amax(0)).clamp(min=0)
        depth = tops.amax(0) - bottoms.amin(0)
        volume1, volume2 = volume1 * boxes1[..., 5], volume2 * boxes2[..., 5]
    union = volume1 + volume2 - shared
    if mode == "iou":
        return shared / union
    around = [_around(flat1, flat2), _around(flat2, flat1)]
    smaller = around[1].prod(-1, keepdim=True) < around[0].prod(-1, keepdim=True)
    sizes = torch.where(smaller, around[1], around[0])
    if mode == "giou":
        enclosing = sizes.prod(-1) * depth if solid else sizes.prod(-1)
        return shared / union - (enclosing - union) / enclosing
    centres = 3 if solid else 2
    distance = (boxes1[..., :centres] - boxes2[..., :centres]).square().sum(-1)
    return shared / union - distance / (sizes.square().sum(-1) + depth.square())


def _around(inner: Tensor, outer: Tensor) -> Tensor:
    """Sizes [..., 2] of the rectangle with the axes of `outer` around both."""
    cos, sin = outer[..., 4].cos(), outer[..., 4].sin()
    shift, turn = inner[..., :2] - outer[..., :2], inner[..., 4] - outer[..., 4]
    centre = torch.stack([shift[..., 0] * cos + shift[..., 1] * sin, shift[..., 1] * cos - shift[..., 0] * sin], -1)
    cos, sin = turn.cos().abs()[..., None], turn.sin().abs()[..., None]
    reach = (inner[..., 2:4] * cos + inner[..., 2:4].flip(-1) * sin) / 2
    return torch.maximum(reach + centre, outer[..., 2:4] / 2) + torch.maximum(reach - centre, outer[..., 2:4] / 2)
