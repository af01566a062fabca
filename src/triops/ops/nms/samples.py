"""Inputs of nms, nms_rotated, nms_quadri and soft_nms."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from triops._check import FLOATS
from triops._dtypes import compute_dtype
from triops._op import OPERATORS
from triops._sample import BadCall, Sample, Sized, Standard, Work, compiled_mmcv
from triops.ops.box_iou_rotated.samples import not_finite_boxes, special_boxes
from triops.ops.nms import batched_nms, nms, nms3d, nms3d_normal, nms_quadri, nms_rotated, soft_nms
from triops.ops.nms.reference import by_score

_Make = Callable[[torch.dtype], tuple[Any, ...]]


def predictions(count: int, objects: int, extent: float = 140.0, seed: int = 0) -> tuple[Tensor, Tensor]:
    """What a detector gives: many rectangles around few objects, the better ones closer. Boxes [N, 5], scores [N]."""
    g = torch.Generator().manual_seed(seed)
    kind = torch.randint(3, (objects,), generator=g)
    size = torch.tensor([[4.6, 1.9], [0.8, 0.7], [1.8, 0.6]])[kind]
    centre = torch.rand(objects, 2, generator=g) * extent - extent / 2
    target = torch.cat([centre, size, torch.rand(objects, 1, generator=g) * 6.3 - 3.1], 1)
    chosen = target[torch.randint(max(objects, 1), (count,), generator=g)] if objects else target
    scores = torch.rand(count, generator=g)
    spread = torch.tensor([0.15, 0.15, 0.1, 0.1, 0.2]) * (1.2 - scores)[:, None]
    boxes = chosen + torch.randn(count, 5, generator=g) * spread * torch.cat([chosen[:, 2:4], torch.ones(count, 3)], 1)
    boxes[:, 2:4] = boxes[:, 2:4].abs() + 0.05
    return boxes, scores


def upright(boxes: Tensor) -> Tensor:
    """x1, y1, x2, y2 of rectangles, without their angle."""
    return torch.cat([boxes[:, :2] - boxes[:, 2:4] / 2, boxes[:, :2] + boxes[:, 2:4] / 2], 1)


def _plain(
    count: int, objects: int, threshold: float = 0.5, offset: int = 0, seed: int = 0, labels: int = 0
) -> _Make:  # fmt: skip
    def make(dtype: torch.dtype) -> tuple[Any, ...]:
        boxes, scores = predictions(count, objects, seed=seed)
        label = _labels(count, labels, seed) if labels else None
        return upright(boxes).to(dtype), scores.to(dtype), label, threshold, offset

    return make


def _labels(count: int, kinds: int, seed: int) -> Tensor:
    return torch.randint(kinds, (count,), generator=torch.Generator().manual_seed(seed))


def _rotated(
    count: int, objects: int, threshold: float = 0.2, labelled: bool = False, clockwise: bool = True,
    margin: float = 0.0, seed: int = 0,
) -> _Make:  # fmt: skip
    def make(dtype: torch.dtype) -> tuple[Any, ...]:
        boxes, scores = predictions(count, objects, seed=seed)
        labels = _labels(count, 3, seed) if labelled else None
        return boxes.to(dtype), scores.to(dtype), labels, threshold, clockwise, margin

    return make


def corners(boxes: Tensor) -> Tensor:
    """x1, y1, ..., x4, y4 of rectangles with an angle."""
    cos, sin = boxes[:, 4:].cos(), boxes[:, 4:].sin()
    x = boxes[:, 2:3] / 2 * torch.tensor([-1.0, 1, 1, -1])
    y = boxes[:, 3:4] / 2 * torch.tensor([-1.0, -1, 1, 1])
    return (boxes[:, None, :2] + torch.stack([x * cos - y * sin, x * sin + y * cos], -1)).flatten(1)


def _quadri(count: int, objects: int, threshold: float = 0.2, labelled: bool = False, seed: int = 0) -> _Make:
    def make(dtype: torch.dtype) -> tuple[Any, ...]:
        boxes, scores = predictions(count, objects, seed=seed)
        g = torch.Generator().manual_seed(seed)
        labels = torch.randint(3, (count,), generator=g) if labelled else None
        quads = corners(boxes) + torch.rand(count, 8, generator=g) * 0.1
        return quads.to(dtype), scores.to(dtype), labels, threshold

    return make


def _odd_quads(boxes: Tensor, scores: Tensor) -> tuple[Tensor, Tensor]:
    odd = corners(torch.cat([not_finite_boxes()[::3], special_boxes()[::6]]))
    return odd, torch.arange(len(odd)).flip(0) % 11 / 11


def _soft(count: int, objects: int, method: str, offset: int = 0, seed: int = 0, sigma: float = 0.5) -> _Make:
    def make(dtype: torch.dtype) -> tuple[Any, ...]:
        boxes, scores = predictions(count, objects, seed=seed)
        return upright(boxes).to(dtype), scores.to(dtype), 0.3, sigma, 0.05, method, offset

    return make


def _with(change: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]], make: _Make) -> _Make:
    """The same call with other boxes and scores."""

    def changed(dtype: torch.dtype) -> tuple[Any, ...]:
        boxes, scores, *rest = make(dtype)
        boxes, scores = change(boxes.float(), scores.float())
        return boxes.to(dtype), scores.to(dtype), *rest

    return changed


def _ties(boxes: Tensor, scores: Tensor) -> tuple[Tensor, Tensor]:
    """Few distinct scores, of both signs of 0 too, and every box twice."""
    scores = (scores * 4).round() / 4
    scores[::3] *= -0.0
    half = len(boxes) // 2
    return torch.cat([boxes[:half], boxes[: len(boxes) - half]]), scores


def _odd_scores(boxes: Tensor, scores: Tensor) -> tuple[Tensor, Tensor]:
    scores[::7], scores[1::7], scores[2::7] = math.inf, -math.inf, math.nan
    return boxes, scores


def _odd_boxes(columns: int) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Not finite, of no size, equal and touching."""

    def change(boxes: Tensor, scores: Tensor) -> tuple[Tensor, Tensor]:
        odd = torch.cat([not_finite_boxes(), special_boxes()])
        odd = upright(odd) if columns == 4 else odd
        return odd, torch.arange(len(odd)).flip(0) % 11 / 11

    return change


def _chain(boxes: Tensor, scores: Tensor) -> tuple[Tensor, Tensor]:
    """Each box overlaps only its neighbours: every second one stays, decided one after the other."""
    count = len(boxes)
    place = torch.arange(count).float()
    fields = [place, torch.zeros(count), torch.full((count,), 2.2), torch.ones(count), torch.zeros(count)]
    chain = torch.stack(fields, 1)
    return (upright(chain) if boxes.shape[1] == 4 else chain), 1 - place / count


_SIZES = (0, 1, 2, 63, 64, 65, 127, 129, 193)

SAMPLES = [
    Sample("nms", "1000 boxes", _plain(1000, 40), "network"),
    Sample("nms", "4096 boxes", _plain(4096, 100), "network", demo=True),
    Sample("nms", "20000 boxes", _plain(20_000, 300), "network"),
    Sample("nms", "4096 boxes 80 labels", _plain(4096, 100, labels=80), "network"),
    Sample("nms", "9 boxes", _plain(9, 3)),
    Sample("nms", "300 boxes", _plain(300, 20, 0.3, seed=1)),
    Sample("nms", "300 boxes offset 1", _plain(300, 20, 0.3, 1, seed=2)),
    Sample("nms", "300 boxes threshold 0", _plain(300, 20, 0.0, seed=3)),
    Sample("nms", "300 boxes labels", _plain(300, 20, 0.3, seed=5, labels=3)),
    Sample("nms", "300 boxes ties", _with(_ties, _plain(300, 30, seed=4))),
    *(Sample("nms", f"{n} boxes", _plain(n, max(n // 9, 1), seed=n), "boundary") for n in _SIZES),
    Sample("nms", "odd scores", _with(_odd_scores, _plain(100, 20)), "boundary"),
    Sample("nms", "odd boxes", _with(_odd_boxes(4), _plain(100, 20)), "boundary"),
    Sample("nms", "a chain", _with(_chain, _plain(200, 20, 0.2)), "boundary"),
    Sample("nms_rotated", "1000 boxes", _rotated(1000, 40), "network"),
    Sample("nms_rotated", "4096 boxes", _rotated(4096, 100), "network", demo=True),
    Sample("nms_rotated", "9000 boxes", _rotated(9000, 150), "network"),
    Sample("nms_rotated", "4096 boxes margin", _rotated(4096, 100, margin=0.01), "network"),
    Sample("nms_rotated", "9 boxes", _rotated(9, 3)),
    Sample("nms_rotated", "300 boxes", _rotated(300, 20, 0.3, seed=1)),
    Sample("nms_rotated", "300 boxes labels", _rotated(300, 20, 0.3, True, seed=2)),
    Sample("nms_rotated", "300 boxes counter-clockwise", _rotated(300, 20, 0.0, False, False, seed=3)),
    Sample("nms_rotated", "200 boxes margin", _rotated(200, 20, 0.3, margin=0.01, seed=4)),
    Sample("nms_rotated", "300 boxes ties", _with(_ties, _rotated(300, 30, 0.3, True, seed=5))),
    *(Sample("nms_rotated", f"{n} boxes", _rotated(n, max(n // 9, 1), seed=n), "boundary") for n in _SIZES),
    Sample("nms_rotated", "odd scores", _with(_odd_scores, _rotated(100, 20)), "boundary"),
    Sample("nms_rotated", "odd boxes", _with(_odd_boxes(5), _rotated(100, 20)), "boundary"),
    Sample("nms_rotated", "a chain", _with(_chain, _rotated(200, 20)), "boundary"),
    Sample("nms_quadri", "300 boxes", _quadri(300, 20), "network", demo=True),
    Sample("nms_quadri", "4096 boxes", _quadri(4096, 100), "network", gpu_only=True),
    Sample("nms_quadri", "9 boxes", _quadri(9, 3)),
    Sample("nms_quadri", "30 boxes labels", _quadri(30, 5, 0.3, True, seed=1)),
    *(Sample("nms_quadri", f"{n} boxes", _quadri(n, 60, seed=n), "boundary", FLOATS[:1]) for n in (0, 1, 65)),
    Sample("nms_quadri", "odd boxes", _with(_odd_quads, _quadri(9, 3)), "boundary", FLOATS[:1]),
    Sample("soft_nms", "1000 boxes", _soft(1000, 40, "linear"), "network", demo=True),
    Sample("soft_nms", "1000 boxes gaussian", _soft(1000, 40, "gaussian"), "network"),
    Sample("soft_nms", "9 boxes", _soft(9, 3, "linear")),
    *(Sample("soft_nms", f"60 boxes {m}", _soft(60, 9, m, seed=1)) for m in ("naive", "linear", "gaussian")),
    Sample("soft_nms", "60 boxes offset 1", _soft(60, 9, "linear", 1, seed=2)),
    Sample("soft_nms", "60 boxes small sigma", _soft(60, 9, "gaussian", sigma=0.01, seed=3)),
    *(Sample("soft_nms", f"{n} boxes", _soft(n, max(n // 9, 1), "linear", seed=n), "boundary") for n in (0, 1, 2, 65)),
    Sample("soft_nms", "odd scores", _with(_odd_scores, _soft(50, 9, "linear")), "boundary"),
    Sample("soft_nms", "odd boxes", _with(_odd_boxes(4), _soft(50, 9, "gaussian")), "boundary"),
]

_BOXES, _ROTATED, _SCORES = torch.zeros(3, 4), torch.zeros(3, 5), torch.zeros(3)


SIZED = [
    Sized("nms", "boxes", lambda draw: _plain(draw(6000), 40)),
    Sized("nms", "labels", lambda draw: _plain(draw(6000), 40, labels=3)),
    Sized("nms_rotated", "boxes", lambda draw: _rotated(draw(6000), 40)),
    Sized("nms_rotated", "labels and a margin", lambda draw: _rotated(draw(6000), 40, labelled=True, margin=0.01)),
    Sized("nms_quadri", "boxes", lambda draw: _quadri(draw(6000), 40)),
    Sized("soft_nms", "boxes", lambda draw: _soft(draw(6000), 40, "gaussian")),
]


def _bad(
    function: Callable[..., Any], what: str, error: type[Exception], match: str, *args: Any, **options: Any
) -> BadCall:
    return BadCall(f"{function.__name__}: {what}", lambda: function(*args, **options), error, match)


BAD_CALLS = [
    _bad(nms, "5 columns", ValueError, r"nms: boxes must have shape \[N, 4\], got \[3, 5\]", _ROTATED, _SCORES, 0.5),
    _bad(nms, "fewer scores", ValueError, r"scores must have shape \[N\] with N = 3 as in boxes, got \[2\]", _BOXES,
         _SCORES[:2], 0.5),
    _bad(nms, "scores of rank 2", ValueError, r"scores must have shape .*got \[3, 1\]", _BOXES, _SCORES[:, None], 0.5),
    _bad(nms, "integer boxes", TypeError, "boxes must be float32.*got int64", _BOXES.long(), _SCORES, 0.5),
    _bad(nms, "integer scores", TypeError, "scores must be float32.*got int32", _BOXES, _SCORES.int(), 0.5),
    _bad(nms, "unequal devices", ValueError, "scores on meta", _BOXES, _SCORES.to("meta"), 0.5),
    _bad(nms, "threshold NaN", ValueError, "iou_threshold must be finite, got nan", _BOXES, _SCORES, math.nan),
    _bad(nms, "negative threshold", ValueError, "iou_threshold must be at least 0", _BOXES, _SCORES, -0.5),
    _bad(nms, "threshold of another type", TypeError, "iou_threshold must be a number, got str", _BOXES, _SCORES, "1"),
    _bad(nms, "offset 2", ValueError, "offset must be 0 or 1, got 2", _BOXES, _SCORES, 0.5, 2),
    _bad(nms, "float labels", TypeError, "nms: labels must be int32 or int64, got float32", _BOXES, _SCORES, 0.5,
         labels=_SCORES),
    _bad(batched_nms, "fewer categories", ValueError, r"batched_nms: idxs must have shape .*N = 3 as in boxes, got \[2",
         _BOXES, _SCORES, torch.zeros(2).long(), 0.5),
    _bad(batched_nms, "no categories", TypeError, "batched_nms: idxs must be a Tensor, got NoneType", _BOXES, _SCORES,
         None, 0.5),
    _bad(nms, "None", TypeError, "boxes must be a Tensor, got NoneType", None, _SCORES, 0.5),
    _bad(nms_rotated, "4 columns", ValueError, r"boxes must have shape \[N, 5\], got \[3, 4\]", _BOXES, _SCORES, 0.5),
    _bad(nms_rotated, "float labels", TypeError, "labels must be int32 or int64, got float32", _ROTATED, _SCORES, 0.5,
         _SCORES),
    _bad(nms_rotated, "fewer labels", ValueError, r"labels must have shape .*N = 3 as in boxes, got \[2\]", _ROTATED,
         _SCORES, 0.5, torch.zeros(2).long()),
    _bad(nms_rotated, "labels as a list", TypeError, "labels must be a Tensor or None, got list", _ROTATED, _SCORES,
         0.5, [0, 1, 2]),
    _bad(nms_rotated, "negative margin", ValueError, "margin must be at least 0", _ROTATED, _SCORES, 0.5, margin=-1.0),
    _bad(nms_rotated, "clockwise of another type", TypeError, "clockwise must be a bool", _ROTATED, _SCORES, 0.5,
         None, 1),
    _bad(nms_quadri, "5 columns", ValueError, r"nms_quadri: boxes must have shape \[N, 8\], got \[3, 5\]", _ROTATED,
         _SCORES, 0.5),
    _bad(nms_quadri, "fewer labels", ValueError, r"labels must have shape .*N = 3 as in boxes, got \[2\]",
         torch.zeros(3, 8), _SCORES, 0.5, torch.zeros(2).long()),
    _bad(nms3d, "5 columns", ValueError, r"nms3d: boxes must have shape \[N, 7\], got \[3, 5\]", _ROTATED, _SCORES,
         0.5),
    _bad(nms3d_normal, "a list", TypeError, "nms3d_normal: boxes must be a Tensor, got list", [], _SCORES, 0.5),
    _bad(soft_nms, "unknown method", ValueError, "method must be 'naive', 'linear' or 'gaussian', got 'cubic'", _BOXES,
         _SCORES, method="cubic"),
    _bad(soft_nms, "sigma 0", ValueError, "sigma must be above 0, got 0", _BOXES, _SCORES, sigma=0.0),
    _bad(soft_nms, "min_score NaN", ValueError, "min_score must be finite", _BOXES, _SCORES, min_score=math.nan),
    _bad(soft_nms, "method as a number", TypeError, "method must be a string, got int", _BOXES, _SCORES, method=1),
]  # fmt: skip

STANDARD = {
    **{
        name: Standard(why_slower="boxes are decided one after the other, 64 at a time")
        for name in ("nms", "nms_rotated", "nms_quadri")
    },
    "soft_nms": Standard("static", float32=1e-5, half=3e-3, why_slower="every box chosen changes the scores of all"),
}


def work(operator: str, args: tuple[Any, ...]) -> Work:
    """A kept box must meet every box behind it that is kept too."""
    boxes, scores = args[0], args[1]
    kept = OPERATORS[operator](*(a.cpu() if isinstance(a, Tensor) else a for a in args))
    number = len(kept[0] if isinstance(kept, tuple) else kept)
    read = boxes.numel() * boxes.element_size() + scores.numel() * scores.element_size()
    return Work(read + 8 * number, 6 * number * number // 2)


def baselines(operator: str) -> dict[str, Callable[..., Any]]:
    if operator != "nms":
        return {}
    found: dict[str, Callable[..., Any]] = {"torch": _one_by_one}
    try:
        from torchvision import ops  # type: ignore[import-not-found, unused-ignore]

        found["torchvision"] = lambda boxes, scores, labels, threshold, offset: (
            ops.nms(boxes, scores, threshold) if labels is None else ops.batched_nms(boxes, scores, labels, threshold)
        )
    except ImportError:
        pass
    _ext = compiled_mmcv()
    if _ext is not None:
        found["mmcv"] = lambda boxes, scores, labels, threshold, offset: _ext.nms(
            boxes if labels is None else _apart(boxes, labels), scores, iou_threshold=threshold, offset=offset
        )
    return found


def _apart(boxes: Tensor, labels: Tensor) -> Tensor:
    """Boxes of different labels so far from each other that none overlap, as mmcv does: this rounds coordinates."""
    return boxes + (labels.to(boxes) * (boxes.max() - boxes.min() + 1))[:, None]


def _one_by_one(boxes: Tensor, scores: Tensor, labels: Tensor | None, iou_threshold: float, offset: int) -> Tensor:
    """What one writes in torch: take the best, drop what it overlaps, go on with the rest."""
    order = by_score(scores)
    boxes = boxes.to(compute_dtype(boxes.dtype))
    if labels is not None:
        boxes = _apart(boxes.double(), labels)
    area = (boxes[:, 2:] - boxes[:, :2] + offset).prod(1)
    kept = []
    while len(order):
        best, order = order[0], order[1:]
        kept.append(best)
        rest = boxes[order]
        side = torch.minimum(rest[:, 2:], boxes[best, 2:]) - torch.maximum(rest[:, :2], boxes[best, :2]) + offset
        shared = side.clamp(min=0).prod(1)
        order = order[shared / (area[order] + area[best] - shared) <= iou_threshold]
    return torch.stack(kept) if kept else order
