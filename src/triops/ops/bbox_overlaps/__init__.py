"""bbox_overlaps: intersection over union, or over the first box, of 2D boxes; differentiable."""

from __future__ import annotations

from typing import Any, Literal, get_args

import torch
from torch import Tensor

from triops import _check, _op
from triops.ops.bbox_overlaps import reference

Mode = Literal["iou", "iof"]
MODES: tuple[Mode, ...] = get_args(Mode)


def bbox_overlaps(
    bboxes1: Tensor, bboxes2: Tensor, mode: Mode = "iou", aligned: bool = False, offset: int = 0
) -> Tensor:
    """How much boxes overlap: of every pair, or of each row with its own.

    A box is `(x1, y1, x2, y2)`. With `inter` the area of the common part, the overlap is
    `inter / (area1 + area2 - inter)` for "iou" and `inter / area1` for "iof"; both denominators are clamped
    to at least `offset`. 0 / 0 is 0, so empty and inverted boxes overlap nothing and no result is NaN.
    Half types are computed in float32 and rounded once.

    The result is differentiable with respect to both sets of boxes. Where the derivative jumps, two
    equal coordinates get half each and boxes that touch count as overlapping, as in torch's autograd.

    Args:
        bboxes1: float tensor [..., M, 4]. A box with a non-finite coordinate overlaps nothing.
        bboxes2: tensor [..., N, 4] of the same dtype. Leading dimensions broadcast against those of bboxes1.
        mode: "iou" or "iof" (intersection over the area of the first box).
        aligned: compare row with row; then M and N must be equal.
        offset: 0, or 1 for boxes whose last pixel is inside: added to every width and height.

    Returns:
        tensor [..., M, N] of the boxes' dtype, or [..., M] when aligned. A tensor of shape (0,) counts as
        zero boxes; no boxes on either side give an empty result.

    Raises:
        ValueError, TypeError: on a wrong shape, dtype, device or option, or unequal rows when aligned.

    >>> import torch, triops
    >>> bboxes1 = torch.tensor([[0.0, 0, 10, 10], [10, 10, 20, 20], [32, 32, 38, 42]])
    >>> bboxes2 = torch.tensor([[0.0, 0, 10, 20], [0, 10, 10, 19], [10, 10, 20, 20]])
    >>> triops.bbox_overlaps(bboxes1, bboxes2)
    tensor([[0.5000, 0.0000, 0.0000],
            [0.0000, 0.0000, 1.0000],
            [0.0000, 0.0000, 0.0000]])
    >>> triops.bbox_overlaps(bboxes1, bboxes2, mode="iof", aligned=True)
    tensor([1., 0., 0.])
    """
    return _bbox_overlaps(_rows(bboxes1), _rows(bboxes2), mode, aligned, offset)  # type: ignore[no-any-return]


def _rows(bboxes: Tensor) -> Tensor:
    """`torch.tensor([])`, which code without boxes passes, means zero boxes."""
    return bboxes.reshape(0, 4) if getattr(bboxes, "shape", None) == (0,) else bboxes


def output_shape(bboxes1: Tensor, bboxes2: Tensor, aligned: bool) -> tuple[int, ...]:
    if bboxes1.dim() == bboxes2.dim() == 2:
        return (bboxes1.shape[0],) if aligned else (bboxes1.shape[0], bboxes2.shape[0])
    lead = bboxes1.shape[:-2]
    if lead != bboxes2.shape[:-2]:
        lead = torch.broadcast_shapes(lead, bboxes2.shape[:-2])
    rows = bboxes1.shape[-2]
    return (*lead, rows) if aligned else (*lead, rows, bboxes2.shape[-2])


def batches(bboxes: Tensor, lead: torch.Size | tuple[int, ...]) -> Tensor:
    """[..., rows, 4] -> [B, rows, 4] with one batch for each of `lead`, or with B = 1 where all share one."""
    if bboxes.dim() == 2:
        return bboxes[None]
    rows = bboxes.shape[-2]
    if bboxes.shape[:-2].numel() == 1:
        return bboxes.reshape(1, rows, 4)
    return bboxes.expand(*lead, rows, 4).reshape(-1, rows, 4)


def _check_boxes(
    c: _check.Checker, bboxes1: Tensor, bboxes2: Tensor, mode: str, aligned: bool, offset: int
) -> tuple[int, ...]:
    """Raises, or returns the shape of the overlaps."""
    c.choice("mode", mode, MODES)
    c.choice("offset", offset, (0, 1))
    for name, bboxes, letter in (("bboxes1", bboxes1, "M"), ("bboxes2", bboxes2, "N")):
        if bboxes.dim() < 2 or bboxes.shape[-1] != 4:
            c.fail(f"{name} must have shape [..., {letter}, 4], got {list(bboxes.shape)}")
    c.dtype("bboxes1", bboxes1, _check.FLOATS)
    if bboxes1.dtype != bboxes2.dtype:
        c.same_dtype(bboxes1=bboxes1, bboxes2=bboxes2)
    if bboxes1.device != bboxes2.device:
        c.same_device(bboxes1=bboxes1, bboxes2=bboxes2)
    if aligned and bboxes1.shape[-2] != bboxes2.shape[-2]:
        c.fail(f"aligned needs as many bboxes2 as bboxes1, got {bboxes2.shape[-2]} and {bboxes1.shape[-2]}")
    try:
        return output_shape(bboxes1, bboxes2, aligned)
    except RuntimeError:
        c.fail(
            f"leading dimensions of bboxes1 {list(bboxes1.shape)} and bboxes2 {list(bboxes2.shape)} do not broadcast"
        )
        raise


def _check_forward(bboxes1: Tensor, bboxes2: Tensor, mode: str, aligned: bool, offset: int) -> None:
    _check_boxes(_check.Checker("bbox_overlaps"), bboxes1, bboxes2, mode, aligned, offset)


def _check_backward(
    grad: Tensor, bboxes1: Tensor, bboxes2: Tensor, mode: str, aligned: bool, offset: int
) -> None:  # fmt: skip
    c = _check.Checker("bbox_overlaps_backward")
    shape = _check_boxes(c, bboxes1, bboxes2, mode, aligned, offset)
    if tuple(grad.shape) != shape:
        c.fail(f"grad must have the shape of the overlaps {list(shape)}, got {list(grad.shape)}")
    c.same_dtype(grad=grad, bboxes1=bboxes1)
    c.same_device(grad=grad, bboxes1=bboxes1)


def _fake_forward(bboxes1: Tensor, bboxes2: Tensor, mode: str, aligned: bool, offset: int) -> Tensor:
    return bboxes1.new_empty(output_shape(bboxes1, bboxes2, aligned))


def _fake_backward(
    grad: Tensor, bboxes1: Tensor, bboxes2: Tensor, mode: str, aligned: bool, offset: int
) -> tuple[Tensor, Tensor]:
    return bboxes1.new_empty(bboxes1.shape), bboxes2.new_empty(bboxes2.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    bboxes1, bboxes2, *ctx.options = inputs
    ctx.save_for_backward(bboxes1, bboxes2)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return *_bbox_overlaps_backward(grad, *ctx.saved_tensors, *ctx.options), None, None, None


_bbox_overlaps = _op.define(
    reference.bbox_overlaps, check=_check_forward, fake=_fake_forward, setup_context=_save, backward=_backward
)
_bbox_overlaps_backward = _op.define(
    reference.bbox_overlaps_backward, check=_check_backward, fake=_fake_backward, backward=_op.no_second_derivative
)
