"""Inputs of bbox_overlaps and of its backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from triops._op import OPERATORS
from triops._sample import BadCall, Sample, Sized, Standard, Work
from triops.ops.bbox_overlaps import bbox_overlaps

_Make = Callable[[torch.dtype], tuple[Any, ...]]


def _boxes(shape: tuple[int, ...], generator: torch.Generator, extent: float = 1000.0) -> Tensor:
    """Detections in an image: corners anywhere, sides of up to a fifth of it."""
    corner = torch.rand(*shape, 2, generator=generator) * extent
    return torch.cat([corner, corner + torch.rand(*shape, 2, generator=generator) * (extent / 5)], -1)


def _random(
    shape1: tuple[int, ...], shape2: tuple[int, ...], mode: str = "iou", aligned: bool = False, offset: int = 0,
    seed: int = 0, extent: float = 1000.0,
) -> _Make:  # fmt: skip
    def make(dtype: torch.dtype) -> tuple[Any, ...]:
        g = torch.Generator().manual_seed(seed)
        first, second = _boxes(shape1, g, extent), _boxes(shape2, g, extent)
        if aligned and first.shape == second.shape:  # as in a loss: predictions near their targets
            second = first + (second - first) * 0.02
        return first.to(dtype), second.to(dtype), mode, aligned, offset

    return make


def _degenerate(mode: str, aligned: bool, offset: int) -> _Make:
    """Points, lines, inverted, equal, touching, nested and one-pixel boxes, each against each."""

    def make(dtype: torch.dtype) -> tuple[Any, ...]:
        boxes = torch.tensor(
            [
                [0.0, 0, 0, 0], [5, 5, 5, 5], [5, 5, 5, 9], [5, 5, 9, 5], [9, 9, 5, 5], [9, 5, 5, 9], [5, 9, 9, 5],
                [5, 5, 9, 9], [5, 5, 9, 9], [9, 9, 12, 12], [6, 6, 7, 7], [0, 0, 1, 1], [5.5, 5, 5, 9],
                [-3, -3, -1, -1], [8, 8, 7.5, 7.5],
            ]
        )  # fmt: skip
        first, second = (
            (boxes.repeat_interleave(len(boxes), 0), boxes.repeat(len(boxes), 1)) if aligned else (boxes, boxes)
        )
        return first.to(dtype), second.to(dtype), mode, aligned, offset

    return make


def _not_finite(aligned: bool) -> _Make:
    """Every field is NaN or infinite once."""

    def make(dtype: torch.dtype) -> tuple[Any, ...]:
        inf, nan = float("inf"), float("nan")
        boxes = torch.tensor([1.0, 2, 8, 9]).repeat(15, 1)
        for i, value in enumerate((inf, -inf, nan)):
            for field in range(4):
                boxes[i * 4 + field, field] = value
        boxes[13] = torch.tensor([-inf, -inf, inf, inf])
        return boxes.to(dtype), boxes.flip(0).to(dtype), "iou", aligned, 0

    return make


def _huge(mode: str, offset: int) -> _Make:
    """Areas and sides beyond the largest float, beside boxes that fit."""

    def make(dtype: torch.dtype) -> tuple[Any, ...]:
        big = 6e4 if dtype == torch.float16 else 3e38
        boxes = torch.tensor(
            [
                [0.0, 0, big, big], [-big, -big, big, big], [0, 0, big / 3, 0], [-big, 0, big, 0], [big, big, big, big],
                [0, 0, big / 3, 0.5], [0, 0, 1e4, 1e4], [-big, 0, -big * 0.9, 1],
            ]
        )  # fmt: skip
        return boxes.to(dtype), boxes.to(dtype), mode, False, offset

    return make


_SHAPES = (
    # M, N: at and around the sizes of blocks, and odd ones
    (1, 1), (1, 2049), (33, 1), (5, 255), (5, 256), (5, 257), (17, 513), (127, 31), (128, 33), (129, 1023), (3, 1025),
)  # fmt: skip

_FORWARD = [
    Sample("bbox_overlaps", "2000 x 2000", _random((2000,), (2000,)), "network", demo=True),
    Sample("bbox_overlaps", "10000 x 200", _random((10_000,), (200,)), "network"),
    Sample("bbox_overlaps", "20000 x 2000", _random((20_000,), (2000,)), "network"),
    Sample("bbox_overlaps", "100000 x 200", _random((100_000,), (200,)), "network"),
    Sample("bbox_overlaps", "20000 x 20000", _random((20_000,), (20_000,)), "network", gpu_only=True),
    Sample("bbox_overlaps", "100000 aligned", _random((100_000,), (100_000,), aligned=True), "network"),
    Sample("bbox_overlaps", "3 x 4", _random((3,), (4,), extent=10), gradcheck=True),
    Sample("bbox_overlaps", "57 x 300", _random((57,), (300,), seed=1)),
    Sample("bbox_overlaps", "57 x 300 iof", _random((57,), (300,), "iof", seed=2)),
    Sample("bbox_overlaps", "57 x 300 offset 1", _random((57,), (300,), offset=1, seed=3, extent=50)),
    Sample("bbox_overlaps", "57 x 300 iof offset 1", _random((57,), (300,), "iof", offset=1, seed=4, extent=50)),
    Sample("bbox_overlaps", "77 aligned", _random((77,), (77,), aligned=True, seed=5)),
    Sample("bbox_overlaps", "77 aligned iof offset 1", _random((77,), (77,), "iof", True, 1, seed=6)),
    Sample("bbox_overlaps", "2 batches", _random((2, 20), (2, 30), seed=7)),
    Sample("bbox_overlaps", "3 batches share bboxes2", _random((3, 20), (30,), "iof", seed=8)),
    Sample("bbox_overlaps", "2 x 3 batches by broadcasting", _random((2, 1, 6), (3, 9), seed=9)),
    Sample("bbox_overlaps", "2 x 3 batches aligned by broadcasting", _random((2, 1, 6), (3, 6), "iof", True, seed=10)),
    Sample("bbox_overlaps", "iof", _random((3,), (4,), "iof", extent=10, seed=11), gradcheck=True),
    Sample("bbox_overlaps", "offset 1", _random((3,), (4,), offset=1, extent=10, seed=12), gradcheck=True),
    Sample("bbox_overlaps", "aligned", _random((5,), (5,), aligned=True, seed=13), gradcheck=True),
    Sample("bbox_overlaps", "broadcast", _random((2, 1, 3), (2, 2), seed=14, extent=10), gradcheck=True),
    Sample("bbox_overlaps", "aligned broadcast", _random((2, 1, 3), (2, 3), "iof", True, extent=10), gradcheck=True),
    *(Sample("bbox_overlaps", f"{m} x {n}", _random((m,), (n,), seed=m + n), "boundary") for m, n in _SHAPES),
    Sample("bbox_overlaps", "0 x 5", _random((0,), (5,)), "boundary"),
    Sample("bbox_overlaps", "5 x 0", _random((5,), (0,)), "boundary"),
    Sample("bbox_overlaps", "0 x 0", _random((0,), (0,)), "boundary"),
    Sample("bbox_overlaps", "0 batches", _random((0, 5), (3,)), "boundary"),
    Sample("bbox_overlaps", "0 aligned", _random((0,), (0,), aligned=True), "boundary"),
    Sample("bbox_overlaps", "1 aligned", _random((1,), (1,), aligned=True), "boundary"),
    Sample("bbox_overlaps", "255 aligned", _random((255,), (255,), aligned=True), "boundary"),
    Sample("bbox_overlaps", "257 aligned", _random((257,), (257,), aligned=True), "boundary"),
    *(
        Sample("bbox_overlaps", f"degenerate {mode} offset {o}", _degenerate(mode, False, o), "boundary")
        for mode in ("iou", "iof") for o in (0, 1)
    ),
    Sample("bbox_overlaps", "degenerate aligned", _degenerate("iou", True, 0), "boundary"),
    Sample("bbox_overlaps", "not finite", _not_finite(False), "boundary"),
    Sample("bbox_overlaps", "not finite aligned", _not_finite(True), "boundary"),
    *(
        Sample("bbox_overlaps", f"huge {mode} offset {o}", _huge(mode, o), "boundary")
        for mode in ("iou", "iof") for o in (0, 1)
    ),
]  # fmt: skip


def _with_gradient(sample: Sample) -> Sample:
    """The same boxes for the backward, with a gradient as a loss would send it: small, of both signs."""

    def make(dtype: torch.dtype) -> tuple[Any, ...]:
        args = sample.make(dtype)
        overlaps = OPERATORS["bbox_overlaps"].fake(*args)
        grad = torch.randn(overlaps.shape, generator=torch.Generator().manual_seed(99)) / max(
            overlaps.shape[-1:] or (1,)
        )
        return grad.to(dtype), *args

    return Sample("bbox_overlaps_backward", sample.name, make, sample.scale, sample.dtypes, demo=sample.demo)


_BACKWARD_NETWORK = ("2000 x 2000", "10000 x 200", "100000 aligned")
SAMPLES = [
    *_FORWARD,
    *(_with_gradient(s) for s in _FORWARD if s.scale != "network" or s.name in _BACKWARD_NETWORK),
]


SIZED = [
    Sized("bbox_overlaps", "batches", lambda draw: _random((draw(3), draw(1500)), (1, draw(1500)))),
    Sized("bbox_overlaps", "aligned", lambda draw: _random((n := draw(9000),), (n,), "iof", aligned=True)),
    Sized("bbox_overlaps_backward", "batches", lambda draw: _with_gradient(
        Sample("", "", _random((draw(3), draw(900)), (draw(900),)))).make),
    Sized("bbox_overlaps_backward", "aligned", lambda draw: _with_gradient(
        Sample("", "", _random((n := draw(9000),), (n,), aligned=True))).make),
]  # fmt: skip


def _bad(what: str, error: type[Exception], match: str, *args: Any, **options: Any) -> BadCall:
    return BadCall(f"bbox_overlaps: {what}", lambda: bbox_overlaps(*args, **options), error, match)


def _bad_backward(what: str, error: type[Exception], match: str, grad: Tensor) -> BadCall:
    boxes = torch.zeros(3, 4)
    call = lambda: OPERATORS["bbox_overlaps_backward"](grad, boxes, boxes, "iou", False, 0)  # noqa: E731
    return BadCall(f"bbox_overlaps_backward: {what}", call, error, match)


_ONE, _TWO = torch.zeros(3, 4), torch.zeros(5, 4)
BAD_CALLS = [
    _bad("unknown mode", ValueError, "mode must be 'iou' or 'iof', got 'giou'", _ONE, _TWO, mode="giou"),
    _bad("mode as a number", TypeError, "mode must be a string, got int", _ONE, _TWO, mode=0),
    _bad("offset 2", ValueError, "offset must be 0 or 1, got 2", _ONE, _TWO, offset=2),
    _bad("offset -1", ValueError, "offset must be 0 or 1, got -1", _ONE, _TWO, offset=-1),
    _bad("offset 0.5", TypeError, "offset must be an integer, got float", _ONE, _TWO, offset=0.5),
    _bad("aligned of another type", TypeError, "aligned must be a bool, got int", _ONE, _TWO, aligned=1),
    _bad("5 columns", ValueError, r"bboxes1 must have shape \[..., M, 4\], got \[3, 5\]", torch.zeros(3, 5), _TWO),
    _bad("3 columns", ValueError, r"bboxes2 must have shape \[..., N, 4\], got \[5, 3\]", _ONE, torch.zeros(5, 3)),
    _bad("one box without rows", ValueError, r"bboxes1 must have shape .*got \[4\]", _ONE[0], _TWO),
    _bad("a scalar", ValueError, r"bboxes2 must have shape .*got \[\]", _ONE, torch.tensor(1.0)),
    _bad("no boxes of 5 columns", ValueError, r"got \[0, 5\]", torch.zeros(0, 5), _TWO),
    _bad("unequal rows aligned", ValueError, "aligned needs as many bboxes2 as bboxes1, got 5 and 3", _ONE, _TWO,
         aligned=True),
    _bad("leading dimensions that do not broadcast", ValueError, "do not broadcast", torch.zeros(2, 3, 4),
         torch.zeros(3, 5, 4)),
    _bad("integer boxes", TypeError, "bboxes1 must be float32.*got int64", _ONE.long(), _TWO.long()),
    _bad("complex boxes", TypeError, "bboxes1 must be float32.*got complex64", _ONE + 0j, _TWO + 0j),
    _bad("unequal dtypes", TypeError, "bboxes1 float32, bboxes2 float16", _ONE, _TWO.half()),
    _bad("unequal devices", ValueError, "bboxes2 on meta", _ONE, _TWO.to("meta")),
    _bad("a list", TypeError, "bboxes1 must be a Tensor, got list", [[0.0, 0, 1, 1]], _TWO),
    _bad("None", TypeError, "bboxes2 must be a Tensor, got NoneType", _ONE, None),
    _bad_backward("gradient of another shape", ValueError, r"the overlaps \[3, 3\], got \[3\]", torch.zeros(3)),
    _bad_backward("gradient of another dtype", TypeError, "grad float64, bboxes1 float32", torch.zeros(3, 3).double()),
    _bad_backward("gradient on another device", ValueError, "grad on meta", torch.zeros(3, 3, device="meta")),
]  # fmt: skip

STANDARD = {
    "bbox_overlaps": Standard(
        "static", float32=1e-5, half=3e-3, why_slower="a division, minima and conversions for each value that is stored"
    ),
    "bbox_overlaps_backward": Standard(
        error_scale="row", why_slower="a pair costs divisions and adds to eight sums, which are kept in a fixed order"
    ),
}


def work(operator: str, args: tuple[Any, ...]) -> Work:
    first, second = args[-5], args[-4]
    pairs = OPERATORS["bbox_overlaps"].fake(*(a.to("meta") if isinstance(a, Tensor) else a for a in args[-5:])).numel()
    boxes, size = first.numel() + second.numel(), first.element_size()
    if operator == "bbox_overlaps_backward":  # the gradient comes in, the boxes' gradients go out
        return Work((pairs + 2 * boxes) * size, 40 * pairs)
    return Work((pairs + boxes) * size, 13 * pairs)


def baselines(operator: str) -> dict[str, Callable[..., Any]]:
    if operator == "bbox_overlaps_backward":
        return {"torch": _autograd}
    return {"torch": _torchvision}


def _torchvision(bboxes1: Tensor, bboxes2: Tensor, mode: str, aligned: bool, offset: int) -> Tensor:
    """The formula of torchvision.ops.box_iou, with mode, aligned and offset added."""

    def upcast(t: Tensor) -> Tensor:
        return t if t.dtype in (torch.float32, torch.float64) else t.float()

    def area(boxes: Tensor) -> Tensor:
        boxes = upcast(boxes)
        return (boxes[..., 2] - boxes[..., 0] + offset) * (boxes[..., 3] - boxes[..., 1] + offset)

    area1, area2 = area(bboxes1), area(bboxes2)
    if not aligned:
        bboxes1, bboxes2 = bboxes1[..., :, None, :], bboxes2[..., None, :, :]
        area1, area2 = area1[..., :, None], area2[..., None, :]
    low = torch.max(bboxes1[..., :2], bboxes2[..., :2])
    high = torch.min(bboxes1[..., 2:], bboxes2[..., 2:])
    side = upcast(high - low + offset).clamp(min=0)
    inter = side[..., 0] * side[..., 1]
    return inter / (area1 + area2 - inter if mode == "iou" else area1)


def _autograd(
    grad: Tensor, bboxes1: Tensor, bboxes2: Tensor, mode: str, aligned: bool, offset: int
) -> tuple[Tensor, ...]:
    bboxes1, bboxes2 = bboxes1.detach().requires_grad_(), bboxes2.detach().requires_grad_()
    with torch.enable_grad():
        overlaps = _torchvision(bboxes1, bboxes2, mode, aligned, offset)
    return torch.autograd.grad(overlaps, (bboxes1, bboxes2), grad.to(overlaps.dtype))
