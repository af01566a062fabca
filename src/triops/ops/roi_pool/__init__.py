"""roi_pool: the highest value of each channel in each bin of each box (Fast R-CNN)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from triops import _check, _op
from triops._rois import as_bins, as_boxes, check_bins, check_maps, check_sizes, empty_in_format, format_of
from triops.ops.roi_pool import reference


def roi_pool(
    input: Tensor, boxes: Tensor | Sequence[Tensor], output_size: int | Sequence[int], spatial_scale: float = 1.0
) -> Tensor:
    """Maximum over the pixels of each bin of each box. Differentiable in the input.

    A box reaches from its first corner to one unit behind its second, and is cut into `output_size` equal bins. A bin
    holds the pixels that its extent touches: neighboring bins may share some.

    Args:
        input: float tensor [N, C, H, W]. Contiguous and channels_last are read as they lie.
        boxes: tensor [K, 5] of (image, x1, y1, x2, y2), or a list with one tensor [L, 4] per image, of the input's
            dtype, or float32 for an input of half precision.
        output_size: rows and columns of bins, one integer or two.
        spatial_scale: pixels of the map per unit of the boxes.

    Returns:
        Tensor [K, C, *output_size] of the input's dtype, which lies in memory as the input does. A bin without pixels
        is 0; so are all bins of a box whose extent is not positive or not finite. Empty when K or C is 0.

    Raises:
        ValueError, TypeError: on a wrong shape, dtype, device or size.
        IndexError: when a box names an image that is not there. On a GPU such a box gives zeros, unless TRIOPS_CHECK=1
            asks for the error there too.

    >>> import torch, triops
    >>> ramp = torch.arange(12.0).view(1, 1, 3, 4)
    >>> triops.roi_pool(ramp, torch.tensor([[0.0, 0.0, 0.0, 3.0, 1.0]]), 2)
    tensor([[[[1., 3.],
              [5., 7.]]]])
    """
    height, width = as_bins("roi_pool", output_size)
    boxes = as_boxes("roi_pool", input, boxes)
    return _roi_pool_forward(input, boxes, height, width, spatial_scale)[0]  # type: ignore[no-any-return]


def roi_pool_forward(
    input: Tensor, boxes: Tensor, pooled_height: int, pooled_width: int, spatial_scale: float
) -> tuple[Tensor, Tensor]:
    """`roi_pool` and the pixel that each output comes from.

    Returns:
        The output of `roi_pool`, and int32 [K, C, PH, PW]: `row * W + column` of the first of equal maxima, -1 where
        the output is no pixel.
    """
    return _roi_pool_forward(  # type: ignore[no-any-return]
        input, boxes, pooled_height, pooled_width, spatial_scale
    )


def roi_pool_backward(
    grad_output: Tensor, boxes: Tensor, argmax: Tensor, batch: int, height: int, width: int,
    channels_last: bool = False,
) -> Tensor:  # fmt: skip
    """Gradient [batch, C, height, width] of the input of `roi_pool`; called by autograd, and public.

    grad_output: [K, C, PH, PW]. boxes, argmax: as given to and returned by `roi_pool_forward`; a pixel that is not on
    the map takes nothing. channels_last: how the gradient is to lie in memory. Errors as of the forward.
    The same bits on every run on a CPU, and on a GPU under `torch.use_deterministic_algorithms(True)`.
    """
    return _roi_pool_backward(  # type: ignore[no-any-return]
        grad_output, boxes, argmax, batch, height, width, channels_last
    )


def _check_forward(input: Tensor, boxes: Tensor, pooled_height: int, pooled_width: int, spatial_scale: float) -> None:
    c = _check.Checker("roi_pool")
    check_maps(c, "input", input, boxes, "N", "C", "H", "W")
    _check_plane(c, input.shape[2], input.shape[3])
    check_bins(c, pooled_height, pooled_width)
    c.finite("spatial_scale", spatial_scale)


def _check_backward(
    grad_output: Tensor, boxes: Tensor, argmax: Tensor, batch: int, height: int, width: int, channels_last: bool
) -> None:
    c = _check.Checker("roi_pool_backward")
    check_maps(c, "grad_output", grad_output, boxes, "K", "C", "PH", "PW")
    c.shape("argmax", argmax, "K", "C", "PH", "PW")
    c.dtype("argmax", argmax, (torch.int32,))
    c.same_device(grad_output=grad_output, argmax=argmax)
    check_sizes(c, batch=batch, height=height, width=width)
    _check_plane(c, height, width)


def _check_plane(c: _check.Checker, height: int, width: int) -> None:
    if _check.too_many(height * width):
        c.fail(f"a map must have at most 2**30 pixels, got {height} x {width}")


def _fake_forward(
    input: Tensor, boxes: Tensor, pooled_height: int, pooled_width: int, spatial_scale: float
) -> tuple[Tensor, Tensor]:
    return reference.empty_outputs(input, boxes, pooled_height, pooled_width)


def _fake_backward(
    grad_output: Tensor, boxes: Tensor, argmax: Tensor, batch: int, height: int, width: int, channels_last: bool
) -> Tensor:
    shape = (batch, grad_output.shape[1], height, width)
    return empty_in_format(shape, grad_output.dtype, grad_output.device, channels_last)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    input, boxes = inputs[:2]
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(boxes, output[1])
    ctx.sizes = input.shape[0], input.shape[2], input.shape[3]
    ctx.channels_last = format_of(input) == torch.channels_last


def _backward(ctx: Any, grad_output: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    grad = _roi_pool_backward.of_backward(grad_output, *ctx.saved_tensors, *ctx.sizes, ctx.channels_last)
    return grad, None, None, None, None


_roi_pool_backward = _op.define(
    reference.roi_pool_backward, check=_check_backward, fake=_fake_backward, backward=_op.no_second_derivative
)
_roi_pool_forward = _op.define(
    reference.roi_pool_forward, check=_check_forward, fake=_fake_forward, setup_context=_setup_context,
    backward=_backward,
)  # fmt: skip

__all__ = ["roi_pool", "roi_pool_backward", "roi_pool_forward"]
