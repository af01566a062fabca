"""diff_iou_rotated: overlap of rotated boxes, pair by pair, with gradients to both; of rectangles and of 3D boxes."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from triops import _check, _op
from triops.ops.diff_iou_rotated import reference
from triops.ops.diff_iou_rotated.reference import MODES, Mode


def diff_iou_rotated(boxes1: Tensor, boxes2: Tensor, mode: Mode = "iou") -> Tensor:
    """Overlap of each box of `boxes1` with the one in its place in `boxes2`. Differentiable in both.

    Args:
        boxes1: float tensor [..., 5] of rectangles `(x, y, width, height, angle)` or [..., 7] of 3D boxes
            `(x, y, z, dx, dy, dz, heading)`, whose z is that of the centre. Angles run from x towards y, in radians.
        boxes2: tensor of the same shape and dtype.
        mode: "iou", intersection over union; "giou", less the share of the enclosing box that is in neither; "diou",
            less the squared distance of the centres over the squared diagonal of the enclosing box. The enclosing box
            has the axes of one of the two boxes, whichever gives the smaller one.

    Returns:
        tensor [...] of the boxes' dtype. Half types are computed in float32. A box is 1 with itself; boxes that touch
        or lie apart have an "iou" of 0, which then has no gradient. A pair with a field that is not finite, or with a
        size that is not above 0, gives 0 and no gradient.

    The gradient is finite everywhere. Where the value has a corner, as where a side lies on a side of the other box, it
    is the mean of the derivatives from both hands: at two equal boxes, the maximum, 0.

    Raises:
        ValueError, TypeError: on a wrong shape, dtype, device or mode.

    >>> import torch, triops
    >>> predicted = torch.tensor([[1.0, 0.0, 2.0, 2.0, 0.0]], requires_grad=True)
    >>> iou = triops.diff_iou_rotated(predicted, torch.tensor([[0.0, 0.0, 2.0, 2.0, 0.0]]))
    >>> iou.detach()
    tensor([0.3333])
    >>> iou.sum().backward()
    >>> predicted.grad[0, 0]  # closer is better
    tensor(-0.4444)
    """
    return _diff_iou_rotated(boxes1, boxes2, mode)  # type: ignore[no-any-return]


def diff_iou_rotated_2d(box1: Tensor, box2: Tensor) -> Tensor:
    """Intersection over union of rectangles, pair by pair, as `mmcv.ops.diff_iou_rotated_2d`: [B, N, 5] -> [B, N].

    >>> import torch, triops
    >>> square = torch.tensor([[[0.0, 0.0, 2.0, 2.0, 0.0]]])
    >>> triops.diff_iou_rotated_2d(square, square + torch.tensor([0, 0, 0, 0, torch.pi / 4]))
    tensor([[0.7071]])
    """
    return diff_iou_rotated(_of_columns("diff_iou_rotated_2d", "box1", box1, 5), box2)


def diff_iou_rotated_3d(box3d1: Tensor, box3d2: Tensor) -> Tensor:
    """Intersection over union of 3D boxes, pair by pair, as `mmcv.ops.diff_iou_rotated_3d`: [B, N, 7] -> [B, N].

    >>> import torch, triops
    >>> cube = torch.tensor([[[0.0, 0.0, 0.0, 2.0, 2.0, 2.0, 0.0]]])
    >>> triops.diff_iou_rotated_3d(cube, cube + torch.tensor([0, 0, 1.0, 0, 0, 0, 0]))
    tensor([[0.3333]])
    """
    return diff_iou_rotated(_of_columns("diff_iou_rotated_3d", "box3d1", box3d1, 7), box3d2)


def diff_iou_rotated_backward(
    grad_output: Tensor, boxes1: Tensor, boxes2: Tensor, mode: Mode = "iou"
) -> tuple[Tensor, Tensor]:
    """Gradients of boxes1 and boxes2 for that of the output of `diff_iou_rotated`; called by autograd, and public.

    grad_output: [...], of the boxes' dtype. The rest as given to the forward, errors too.
    """
    return _diff_iou_rotated_backward(grad_output, boxes1, boxes2, mode)  # type: ignore[no-any-return]


def _of_columns(function: str, name: str, boxes: Tensor, columns: int) -> Tensor:
    if not isinstance(boxes, Tensor):
        raise TypeError(f"{function}: {name} must be a Tensor, got {type(boxes).__name__}")
    if boxes.dim() == 0 or boxes.shape[-1] != columns:
        raise ValueError(f"{function}: {name} must have shape [..., {columns}], got {list(boxes.shape)}")
    return boxes


def _check_boxes(c: _check.Checker, boxes1: Tensor, boxes2: Tensor, mode: str) -> None:
    if boxes1.dim() == 0 or boxes1.shape[-1] not in (5, 7):
        c.fail(f"boxes1 must have shape [..., 5] or [..., 7], got {list(boxes1.shape)}")
    c.shape("boxes2", boxes2, *boxes1.shape)
    c.dtype("boxes1", boxes1, _check.FLOATS)
    c.same_dtype(boxes1=boxes1, boxes2=boxes2)
    c.same_device(boxes1=boxes1, boxes2=boxes2)
    if _check.too_many(boxes1.numel() // boxes1.shape[-1]):
        c.fail("boxes1 must be at most 2**30 boxes")
    c.choice("mode", mode, MODES)


def _check_forward(boxes1: Tensor, boxes2: Tensor, mode: str) -> None:
    _check_boxes(_check.Checker("diff_iou_rotated"), boxes1, boxes2, mode)


def _check_backward(grad_output: Tensor, boxes1: Tensor, boxes2: Tensor, mode: str) -> None:
    c = _check.Checker("diff_iou_rotated_backward")
    _check_boxes(c, boxes1, boxes2, mode)
    c.shape("grad_output", grad_output, *boxes1.shape[:-1])
    c.same_dtype(boxes1=boxes1, grad_output=grad_output)
    c.same_device(boxes1=boxes1, grad_output=grad_output)


def _fake_forward(boxes1: Tensor, boxes2: Tensor, mode: str) -> Tensor:
    return boxes1.new_empty(boxes1.shape[:-1])


def _fake_backward(grad_output: Tensor, boxes1: Tensor, boxes2: Tensor, mode: str) -> tuple[Tensor, Tensor]:
    return boxes1.new_empty(boxes1.shape), boxes2.new_empty(boxes2.shape)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    boxes1, boxes2, ctx.mode = inputs
    ctx.save_for_backward(boxes1, boxes2)


def _backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
    return *_diff_iou_rotated_backward(grad_output, *ctx.saved_tensors, ctx.mode), None


_diff_iou_rotated_backward = _op.define(
    reference.diff_iou_rotated_backward, check=_check_backward, fake=_fake_backward, backward=_op.no_second_derivative
)
_diff_iou_rotated = _op.define(
    reference.diff_iou_rotated, check=_check_forward, fake=_fake_forward, setup_context=_setup_context,
    backward=_backward,
)  # fmt: skip

__all__ = ["diff_iou_rotated", "diff_iou_rotated_2d", "diff_iou_rotated_3d", "diff_iou_rotated_backward"]
