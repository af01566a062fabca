"""Inputs of sigmoid_focal_loss and of its backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from triops._check import FLOATS
from triops._sample import BadCall, Sample, Sized, Work, bytes_of, compiled_mmcv
from triops.ops.sigmoid_focal_loss import sigmoid_focal_loss

Make = Callable[[torch.dtype], tuple[Any, ...]]
_NAMES = ("sigmoid_focal_loss", "sigmoid_focal_loss_backward")
_EDGES = torch.tensor(
    [0.0, -0.0, 1e-6, -1e-6, 20.0, -20.0, 90.0, -90.0, 1e30, -1e30, float("inf"), -float("inf"), float("nan")]
)


def _random(
    operator: str, rows: int, classes: int, gamma: float = 2.0, alpha: float = 0.25, *, weighted: bool = False,
    background: float = 0.9,
) -> Make:  # fmt: skip
    """Scores of an untrained head; `background` is the share of rows without a class, on either side of the range."""

    def make(dtype: torch.dtype) -> tuple[Any, ...]:
        g = torch.Generator().manual_seed(rows + classes)
        scores = (torch.randn(rows, classes, generator=g) * 2 - 2).to(dtype)
        target = torch.randint(0, max(classes, 1), (rows,), generator=g)
        outside = torch.rand(rows, generator=g)
        target = torch.where(outside < background, classes, target)
        target = torch.where(outside < background / 10, -1, target)
        weight = (torch.rand(classes, generator=g) + 0.5).to(dtype) if weighted else None
        return _arguments(operator, scores, target, weight, gamma, alpha)

    return make


def _edges(operator: str, gamma: float) -> Make:
    def make(dtype: torch.dtype) -> tuple[Any, ...]:
        scores = _EDGES.clamp(-6e4, 6e4) if dtype == torch.float16 else _EDGES  # 1e30 is infinite there
        scores = torch.where(_EDGES.isinf(), _EDGES, scores)[:, None].repeat(1, 2).to(dtype)
        target = torch.zeros(len(scores), dtype=torch.int64)
        return _arguments(operator, scores, target, None, gamma, 0.25)

    return make


def _arguments(operator: str, scores: Tensor, *rest: Any) -> tuple[Any, ...]:
    if not operator.endswith("backward"):
        return scores, *rest
    grad = torch.randn(scores.shape, generator=torch.Generator().manual_seed(1)).to(scores.dtype)
    return grad, scores, *rest


SAMPLES = []
for _name in _NAMES:
    _forward = _name == "sigmoid_focal_loss"
    SAMPLES += [
        Sample(_name, "10 rows of 3 classes", _random(_name, 10, 3, background=0.3), gradcheck=_forward),
        Sample(_name, "weighted", _random(_name, 9, 4, 1.5, 0.6, weighted=True, background=0.3)),
        Sample(_name, "gamma 0", _random(_name, 33, 5, 0.0, 0.4), gradcheck=_forward),
        Sample(_name, "80 classes", _random(_name, 70, 80, 2.5)),
        *(Sample(_name, f"{rows} x {classes}", _random(_name, rows, classes), "boundary", FLOATS[:2])
          for rows, classes in ((0, 3), (3, 0), (1, 1), (1025, 1), (341, 3), (342, 3), (1, 1024), (2, 4097))),
        Sample(_name, "edges", _edges(_name, 2.0), "boundary"),
        Sample(_name, "edges, gamma 0", _edges(_name, 0.0), "boundary"),
        # anchors of PointPillars and SECOND on KITTI, of one image of RetinaNet on COCO
        Sample(_name, "321408 anchors, 3 classes", _random(_name, 321_408, 3, background=0.999), "network",
               FLOATS[:3], demo=_forward),
        Sample(_name, "182400 anchors, 80 classes", _random(_name, 182_400, 80, background=0.999), "network",
               FLOATS[:3], gpu_only=True),
    ]  # fmt: skip


SIZED = [
    Sized(operator, "80 classes", lambda draw, operator=operator: _random(operator, draw(9000), 80))  # type: ignore[misc]
    for operator in _NAMES
]


def _bad(what: str, error: type[Exception], match: str, *args: Any, **options: Any) -> BadCall:
    return BadCall(f"sigmoid_focal_loss: {what}", lambda: sigmoid_focal_loss(*args, **options), error, match)


_SCORES, _TARGET = torch.zeros(4, 3), torch.zeros(4, dtype=torch.int64)
BAD_CALLS = [
    _bad("scores of rank 1", ValueError, r"input must have shape \[N, C\], got \[4\]", _SCORES[:, 0], _TARGET),
    _bad("too many targets", ValueError, r"N = 4 as in input, got \[8\]", _SCORES, _TARGET.repeat(2)),
    _bad("integer scores", TypeError, "input must be float32.*got int64", _SCORES.long(), _TARGET),
    _bad("float targets", TypeError, "target must be int64, got float32", _SCORES, _TARGET.float()),
    _bad("targets elsewhere", ValueError, "target on meta", _SCORES, _TARGET.to("meta")),
    _bad("a weight for each row", ValueError, r"C = 3 as in input, got \[4\]", _SCORES, _TARGET, weight=torch.ones(4)),
    _bad("weight of another dtype", TypeError, "weight float64", _SCORES, _TARGET, weight=torch.ones(3).double()),
    _bad("weight as a list", TypeError, "weight must be a Tensor or None", _SCORES, _TARGET, weight=[1.0, 1, 1]),
    _bad("a list", TypeError, "input must be a Tensor, got list", [[0.0]], _TARGET),
    _bad("negative gamma", ValueError, "gamma must be at least 0, got -1", _SCORES, _TARGET, -1.0),
    _bad("gamma NaN", ValueError, "gamma must be finite", _SCORES, _TARGET, float("nan")),
    _bad("alpha of another type", TypeError, "alpha must be a number", _SCORES, _TARGET, 2.0, "0.25"),
    _bad("unknown reduction", ValueError, "reduction must be 'mean', 'sum' or 'none'", _SCORES, _TARGET,
         reduction="max"),
    _bad("reduction of another type", TypeError, "reduction must be a string, got int", _SCORES, _TARGET, reduction=1),
]  # fmt: skip


def work(operator: str, args: tuple[Any, ...]) -> Work:
    scores = args[operator.endswith("backward")]
    return Work(bytes_of(args) + bytes_of(scores), 20 * scores.numel())


def baselines(operator: str) -> dict[str, Callable[..., Any]]:
    if operator.endswith("backward"):
        return {}
    found: dict[str, Callable[..., Any]] = {"torch": _composed}
    ext = compiled_mmcv()
    if ext is None:
        return found

    def mmcv(input: Tensor, target: Tensor, weight: Tensor | None, gamma: float, alpha: float) -> Tensor:
        out = torch.zeros_like(input)
        ext.sigmoid_focal_loss_forward(
            input, target, input.new_empty(0) if weight is None else weight, out, gamma=gamma, alpha=alpha
        )
        return out

    return {**found, "mmcv": mmcv}


def _composed(input: Tensor, target: Tensor, weight: Tensor | None, gamma: float, alpha: float) -> Tensor:
    """The plain formulation in torch, which libraries fall back to."""
    classes = input.shape[1]
    inside = (target >= 0) & (target < classes)
    hit = functional.one_hot(torch.where(inside, target, classes), classes + 1)[:, :classes].to(input.dtype)
    p = input.sigmoid()
    missing = (1 - p) * hit + p * (1 - hit)
    balance = alpha * hit + (1 - alpha) * (1 - hit)
    loss = functional.binary_cross_entropy_with_logits(input, hit, reduction="none") * balance * missing.pow(gamma)
    if weight is not None:
        loss = loss * torch.where(inside, weight[torch.where(inside, target, 0)], 1.0)[:, None].to(input.dtype)
    return loss
