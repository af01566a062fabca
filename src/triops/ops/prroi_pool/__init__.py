"""prroi_pool: the exact mean of a bilinear surface in each bin of each box (Precise RoI Pooling)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from triops import _check, _op
from triops._rois import (
    as_bins,
    as_boxes,
    check_bins,
    check_maps,
    check_sizes,
    empty_in_format,
    empty_like_format,
    format_of,
)
from triops.ops.prroi_pool import reference


def prroi_pool(
    input: Tensor, boxes: Tensor | Sequence[Tensor], output_size: int | Sequence[int], spatial_scale: float = 1.0
) -> Tensor:
    """Mean of the bilinear surface over each bin of each box. Differentiable in the input and in the boxes.

    The surface is bilinear between the pixels, which lie at whole coordinates, and falls to 0 within one pixel off the
    map. It is integrated exactly, without samples, so that the result changes smoothly with the boxes.

    Args:
        input: float tensor [N, C, H, W]. Contiguous and channels_last are read as they lie.
        boxes: tensor [K, 5] of (image, x1, y1, x2, y2), or a list with one tensor [L, 4] per image, of the input's
            dtype, or float32 for an input of half precision.
        output_size: rows and columns of bins, one integer or two.
        spatial_scale: pixels of the map per unit of the boxes.

    Returns:
        Tensor [K, C, *output_size] of the input's dtype, which lies in memory as the input does. Half types are
        computed in float32 and rounded once. 0 for a box without area or one that is not finite. Empty when K or C is
        0.

    Raises:
        ValueError, TypeError: on a wrong shape, dtype, device or size.
        IndexError: when a box names an image that is not there. On a GPU such a box gives zeros, unless TRIOPS_CHECK=1
            asks for the error there too.

    >>> import torch, triops
    >>> ramp = torch.arange(12.0).view(1, 1, 3, 4)  # value 4 y + x
    >>> triops.prroi_pool(ramp, torch.tensor([[0.0, 0.0, 0.0, 2.0, 2.0]]), 2)
    tensor([[[[2.5000, 3.5000],
              [6.5000, 7.5000]]]])
    """
    height, width = as_bins("prroi_pool", output_size)
    boxes = as_boxes("prroi_pool", input, boxes)
    return _prroi_pool(input, boxes, height, width, spatial_scale)  # type: ignore[no-any-return]


def prroi_pool_backward(
    grad_output: Tensor, boxes: Tensor, batch: int, height: int, width: int, spatial_scale: float,
    channels_last: bool = False,
) -> Tensor:  # fmt: skip
    """Gradient [batch, C, height, width] of the input of `prroi_pool`; called by autograd, and public.

    grad_output: [K, C, PH, PW]. channels_last: how the gradient is to lie in memory. The rest as given to the forward,
    errors too. The same bits on every run on a CPU, and on a GPU under `torch.use_deterministic_algorithms(True)`.
    """
    return _prroi_pool_backward(  # type: ignore[no-any-return]
        grad_output, boxes, batch, height, width, spatial_scale, channels_last
    )


def prroi_pool_boxes_backward(grad_output: Tensor, input: Tensor, boxes: Tensor, spatial_scale: float) -> Tensor:
    """Gradient [K, 5] of the boxes of `prroi_pool`, that of the image 0; called by autograd, and public.

    grad_output: [K, C, PH, PW]. The rest as given to the forward, errors too. The same bits on every run.
    """
    return _prroi_pool_boxes_backward(grad_output, input, boxes, spatial_scale)  # type: ignore[no-any-return]


def _check_forward(input: Tensor, boxes: Tensor, pooled_height: int, pooled_width: int, spatial_scale: float) -> None:
    c = _check.Checker("prroi_pool")
    check_maps(c, "input", input, boxes, "N", "C", "H", "W")
    check_bins(c, pooled_height, pooled_width)
    c.finite("spatial_scale", spatial_scale)


def _check_backward(
    grad_output: Tensor, boxes: Tensor, batch: int, height: int, width: int, spatial_scale: float, channels_last: bool
) -> None:
    c = _check.Checker("prroi_pool_backward")
    check_maps(c, "grad_output", grad_output, boxes, "K", "C", "PH", "PW")
    check_sizes(c, batch=batch, height=height, width=width)
    c.finite("spatial_scale", spatial_scale)


def _check_boxes_backward(grad_output: Tensor, input: Tensor, boxes: Tensor, spatial_scale: float) -> None:
    c = _check.Checker("prroi_pool_boxes_backward")
    check_maps(c, "input", input, boxes, "N", "C", "H", "W")
    c.shape("grad_output", grad_output, "K", "C", "PH", "PW")
    c.same_dtype(input=input, grad_output=grad_output)
    c.same_device(input=input, grad_output=grad_output)
    c.finite("spatial_scale", spatial_scale)


def _fake_forward(input: Tensor, boxes: Tensor, pooled_height: int, pooled_width: int, spatial_scale: float) -> Tensor:
    return empty_like_format((boxes.shape[0], input.shape[1], pooled_height, pooled_width), input.dtype, input)


def _fake_backward(
    grad_output: Tensor, boxes: Tensor, batch: int, height: int, width: int, spatial_scale: float, channels_last: bool
) -> Tensor:
    shape = (batch, grad_output.shape[1], height, width)
    return empty_in_format(shape, grad_output.dtype, grad_output.device, channels_last)


def _fake_boxes_backward(grad_output: Tensor, input: Tensor, boxes: Tensor, spatial_scale: float) -> Tensor:
    return boxes.new_empty(boxes.shape)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    input, boxes, _, _, ctx.scale = inputs
    ctx.save_for_backward(boxes, *([input] if ctx.needs_input_grad[1] else []))
    ctx.sizes = input.shape[0], input.shape[2], input.shape[3]
    ctx.channels_last = format_of(input) == torch.channels_last


def _backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
    boxes, *rest = ctx.saved_tensors
    to_input = to_boxes = None
    if ctx.needs_input_grad[0]:
        to_input = _prroi_pool_backward(grad_output, boxes, *ctx.sizes, ctx.scale, ctx.channels_last)
    if ctx.needs_input_grad[1]:
        to_boxes = _prroi_pool_boxes_backward(grad_output, rest[0], boxes, ctx.scale)
    return to_input, to_boxes, None, None, None


_prroi_pool_backward = _op.define(
    reference.prroi_pool_backward, check=_check_backward, fake=_fake_backward, backward=_op.no_second_derivative
)
_prroi_pool_boxes_backward = _op.define(
    reference.prroi_pool_boxes_backward, check=_check_boxes_backward, fake=_fake_boxes_backward,
    backward=_op.no_second_derivative,
)  # fmt: skip
_prroi_pool = _op.define(
    reference.prroi_pool, check=_check_forward, fake=_fake_forward, setup_context=_setup_context, backward=_backward
)

__all__ = ["prroi_pool", "prroi_pool_backward", "prroi_pool_boxes_backward"]
