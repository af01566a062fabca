"""roi_align: the features under each box, read bilinearly into a small grid (Mask R-CNN)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from triops import _check, _op
from triops._dtypes import compute_dtype
from triops._rois import as_bins, as_boxes, check_bins, check_maps, check_ratio, check_sizes, empty_in_format, format_of
from triops.ops.roi_align import reference

Mode = Literal["avg", "max"]
MODES: tuple[Mode, ...] = get_args(Mode)


def roi_align(
    input: Tensor, boxes: Tensor | Sequence[Tensor], output_size: int | Sequence[int], spatial_scale: float = 1.0,
    sampling_ratio: int = -1, aligned: bool = False, mode: Mode = "avg",
) -> Tensor:  # fmt: skip
    """Mean or maximum of bilinear samples in each bin of each box. Differentiable in the input.

    A box is cut into `output_size` bins and a bin is read at `sampling_ratio` x `sampling_ratio` samples, evenly
    spaced. A sample more than one pixel off the map is 0, and counts.

    Args:
        input: float tensor [N, C, H, W]. Contiguous and channels_last are read as they lie.
        boxes: tensor [K, 5] of (image, x1, y1, x2, y2), or a list with one tensor [L, 4] per image, of the input's
            dtype, or float32 for an input of half precision. A box with a field that is not finite lies off the map.
        output_size: rows and columns of bins, one integer or two.
        spatial_scale: pixels of the map per unit of the boxes.
        sampling_ratio: samples of a bin along each axis, at most 1024; 0 or less: as many as the bin is pixels long,
            rounded up (at most 2**20).
        aligned: shift by half a pixel, so that pixel centres lie at .5; without it boxes have at least one pixel.
        mode: "avg" or "max".

    Returns:
        Tensor [K, C, *output_size] of the input's dtype, which lies in memory as the input does. Half types are
        computed in float32 and rounded once. Empty when K or C is 0; all 0 when H or W is 0.

    Raises:
        ValueError, TypeError: on a wrong shape, dtype, device, size, ratio or mode.
        IndexError: when a box names an image that is not there. On a GPU such a box gives zeros, unless TRIOPS_CHECK=1
            asks for the error there too.

    >>> import torch, triops
    >>> ramp = torch.arange(12.0).view(1, 1, 3, 4)
    >>> triops.roi_align(ramp, torch.tensor([[0.0, 0.0, 0.0, 2.0, 2.0]]), 2, sampling_ratio=1)
    tensor([[[[2.5000, 3.5000],
              [6.5000, 7.5000]]]])
    """
    height, width = as_bins("roi_align", output_size)
    boxes = as_boxes("roi_align", input, boxes)
    return _roi_align_forward(  # type: ignore[no-any-return]
        input, boxes, height, width, spatial_scale, sampling_ratio, aligned, mode
    )[0]


def roi_align_forward(
    input: Tensor, boxes: Tensor, pooled_height: int, pooled_width: int, spatial_scale: float, sampling_ratio: int,
    aligned: bool, mode: str,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """`roi_align` and, in mode "max", where each output comes from.

    Returns:
        The output of `roi_align`, and y and x [K, C, PH, PW] of the sample that each of them is, in pixels of the map
        and of dtype float32 or float64; the first of equal maxima wins. -2 where it is no sample on the map. In mode
        "avg" these two are empty.
    """
    return _roi_align_forward(  # type: ignore[no-any-return]
        input, boxes, pooled_height, pooled_width, spatial_scale, sampling_ratio, aligned, mode
    )


def roi_align_backward(
    grad_output: Tensor, boxes: Tensor, argmax_y: Tensor, argmax_x: Tensor, batch: int, height: int, width: int,
    spatial_scale: float, sampling_ratio: int, aligned: bool, mode: str, channels_last: bool = False,
) -> Tensor:  # fmt: skip
    """Gradient [batch, C, height, width] of the input of `roi_align`; called by autograd, and public.

    grad_output: [K, C, PH, PW]. argmax_y, argmax_x: from `roi_align_forward`; in mode "avg" two empty tensors of the
    same dtype. channels_last: how the gradient is to lie in memory. The rest as given to the forward, errors too.
    The same bits on every run on a CPU, and on a GPU under `torch.use_deterministic_algorithms(True)`.
    """
    return _roi_align_backward(  # type: ignore[no-any-return]
        grad_output, boxes, argmax_y, argmax_x, batch, height, width, spatial_scale, sampling_ratio, aligned, mode,
        channels_last,
    )  # fmt: skip


def _check_forward(
    input: Tensor, boxes: Tensor, pooled_height: int, pooled_width: int, spatial_scale: float, sampling_ratio: int,
    aligned: bool, mode: str,
) -> None:  # fmt: skip
    c = _check.Checker("roi_align")
    check_maps(c, "input", input, boxes, "N", "C", "H", "W")
    check_bins(c, pooled_height, pooled_width)
    _check_rules(c, spatial_scale, sampling_ratio, mode)


def _check_backward(
    grad_output: Tensor, boxes: Tensor, argmax_y: Tensor, argmax_x: Tensor, batch: int, height: int, width: int,
    spatial_scale: float, sampling_ratio: int, aligned: bool, mode: str, channels_last: bool,
) -> None:  # fmt: skip
    c = _check.Checker("roi_align_backward")
    check_maps(c, "grad_output", grad_output, boxes, "K", "C", "PH", "PW")
    _check_rules(c, spatial_scale, sampling_ratio, mode)
    for name, position in (("argmax_y", argmax_y), ("argmax_x", argmax_x)):
        if mode == "avg":
            c.shape(name, position, 0)
        else:
            c.shape(name, position, "K", "C", "PH", "PW")
        c.dtype(name, position, (compute_dtype(grad_output.dtype),))
    c.same_device(grad_output=grad_output, argmax_y=argmax_y, argmax_x=argmax_x)
    check_sizes(c, batch=batch, height=height, width=width)


def _check_rules(c: _check.Checker, spatial_scale: float, sampling_ratio: int, mode: str) -> None:
    c.finite("spatial_scale", spatial_scale)
    check_ratio(c, "sampling_ratio", sampling_ratio)
    c.choice("mode", mode, MODES)


def _fake_forward(
    input: Tensor, boxes: Tensor, pooled_height: int, pooled_width: int, spatial_scale: float, sampling_ratio: int,
    aligned: bool, mode: str,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    return reference.empty_outputs(input, boxes, pooled_height, pooled_width, mode)


def _fake_backward(
    grad_output: Tensor, boxes: Tensor, argmax_y: Tensor, argmax_x: Tensor, batch: int, height: int, width: int,
    spatial_scale: float, sampling_ratio: int, aligned: bool, mode: str, channels_last: bool,
) -> Tensor:  # fmt: skip
    shape = (batch, grad_output.shape[1], height, width)
    return empty_in_format(shape, grad_output.dtype, grad_output.device, channels_last)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    input, boxes, _, _, *ctx.rules = inputs
    ctx.mark_non_differentiable(*output[1:])
    ctx.save_for_backward(boxes, *output[1:])
    ctx.sizes = input.shape[0], input.shape[2], input.shape[3]
    ctx.channels_last = format_of(input) == torch.channels_last


def _backward(ctx: Any, grad_output: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    grad = _roi_align_backward.of_backward(grad_output, *ctx.saved_tensors, *ctx.sizes, *ctx.rules, ctx.channels_last)
    return grad, None, None, None, None, None, None, None


_roi_align_backward = _op.define(
    reference.roi_align_backward, check=_check_backward, fake=_fake_backward, backward=_op.no_second_derivative
)
_roi_align_forward = _op.define(
    reference.roi_align_forward, check=_check_forward, fake=_fake_forward, setup_context=_setup_context,
    backward=_backward,
)  # fmt: skip

__all__ = ["roi_align", "roi_align_backward", "roi_align_forward"]
