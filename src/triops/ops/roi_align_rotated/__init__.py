"""roi_align_rotated and riroi_align_rotated: the features under rotated boxes, read bilinearly into a small grid."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from triops import _check, _op
from triops._rois import (
    as_bins,
    check_bins,
    check_maps,
    check_ratio,
    check_sizes,
    empty_in_format,
    empty_like_format,
    format_of,
)
from triops.ops.roi_align_rotated import reference

MOST_ORIENTATIONS = 4096


def roi_align_rotated(
    input: Tensor, boxes: Tensor, output_size: int | Sequence[int], spatial_scale: float = 1.0,
    sampling_ratio: int = 0, aligned: bool = True, clockwise: bool = False,
) -> Tensor:  # fmt: skip
    """Mean of bilinear samples in each bin of each rotated box. Differentiable in the input.

    A box is cut into `output_size` bins along its own axes and a bin is read at `sampling_ratio` x `sampling_ratio`
    samples, evenly spaced. A sample more than one pixel off the map is 0, and counts.

    Args:
        input: float tensor [N, C, H, W]. Contiguous and channels_last are read as they lie.
        boxes: tensor [K, 6] of (image, centre x, centre y, width, height, angle in radians), of the input's dtype, or
            float32 for an input of half precision. A box with a field that is not finite lies off the map.
        output_size: rows and columns of bins, one integer or two.
        spatial_scale: pixels of the map per unit of the boxes.
        sampling_ratio: samples of a bin along each axis, at most 1024; 0 or less: as many as the bin is pixels long,
            rounded up (at most 2**20).
        aligned: shift by half a pixel, so that pixel centres lie at .5; without it boxes have at least one pixel.
        clockwise: whether angles grow clockwise as seen in the image, where y points down.

    Returns:
        Tensor [K, C, *output_size] of the input's dtype, which lies in memory as the input does. Half types are
        computed in float32 and rounded once. Empty when K or C is 0; all 0 when H or W is 0.

    Raises:
        ValueError, TypeError: on a wrong shape, dtype, device, size or ratio.
        IndexError: when a box names an image that is not there. On a GPU such a box gives zeros, unless TRIOPS_CHECK=1
            asks for the error there too.

    >>> import torch, triops
    >>> ramp = torch.arange(12.0).view(1, 1, 3, 4)  # value 4 y + x
    >>> quarter = torch.tensor([[0.0, 2.0, 1.5, 2.0, 2.0, torch.pi / 2]])
    >>> triops.roi_align_rotated(ramp, quarter, 2, sampling_ratio=1)
    tensor([[[[7., 3.],
              [8., 4.]]]])
    """
    height, width = as_bins("roi_align_rotated", output_size)
    return _roi_align_rotated(  # type: ignore[no-any-return]
        input, boxes, height, width, spatial_scale, sampling_ratio, aligned, clockwise, 1
    )


def riroi_align_rotated(
    input: Tensor, boxes: Tensor, output_size: int | Sequence[int], spatial_scale: float = 1.0, num_samples: int = 0,
    num_orientations: int = 8, clockwise: bool = False,
) -> Tensor:  # fmt: skip
    """Rotation-invariant `roi_align_rotated`, of a map with oriented channels (ReDet). Differentiable in the input.

    Each group of `num_orientations` neighboring channels holds the responses to one pattern at as many angles. They
    are read like `roi_align_rotated` with `aligned=False`, and turned with the box: output o is input
    `o - angle * num_orientations / (2 * pi)` of its group, between two channels linearly.

    Args:
        input: float tensor [N, C, H, W] with C a multiple of `num_orientations`.
        num_samples: the `sampling_ratio` of `roi_align_rotated`.
        clockwise: turns the box the other way, but not its channels, as in mmcv.
        The rest, result and errors as of `roi_align_rotated`.

    >>> import torch, triops
    >>> ramp = torch.arange(4.0).view(1, 4, 1, 1).expand(1, 4, 3, 3)  # channel o holds o
    >>> quarter = torch.tensor([[0.0, 1.0, 1.0, 2.0, 2.0, torch.pi / 2]])
    >>> triops.riroi_align_rotated(ramp, quarter, 1, num_orientations=4).flatten()
    tensor([3., 0., 1., 2.])
    """
    c = _check.Checker("riroi_align_rotated")
    height, width = as_bins("riroi_align_rotated", output_size)
    num_orientations = c.integer("num_orientations", num_orientations, 1, MOST_ORIENTATIONS)
    check_ratio(c, "num_samples", c.integer("num_samples", num_samples))
    return _roi_align_rotated(  # type: ignore[no-any-return]
        input, boxes, height, width, spatial_scale, num_samples, False, clockwise, num_orientations
    )


def roi_align_rotated_backward(
    grad_output: Tensor, boxes: Tensor, batch: int, height: int, width: int, spatial_scale: float, sampling_ratio: int,
    aligned: bool, clockwise: bool, orientations: int = 1, channels_last: bool = False,
) -> Tensor:  # fmt: skip
    """Gradient [batch, C, height, width] of the input of `roi_align_rotated`; called by autograd, and public.

    grad_output: [K, C, PH, PW]. orientations: those of `riroi_align_rotated`. channels_last: how the gradient is to lie
    in memory. The rest as given to the forward, errors too. The same bits on every run on a CPU, and on a GPU under
    `torch.use_deterministic_algorithms(True)`.
    """
    return _roi_align_rotated_backward(  # type: ignore[no-any-return]
        grad_output, boxes, batch, height, width, spatial_scale, sampling_ratio, aligned, clockwise, orientations,
        channels_last,
    )  # fmt: skip


def _check_forward(
    input: Tensor, boxes: Tensor, pooled_height: int, pooled_width: int, spatial_scale: float, sampling_ratio: int,
    aligned: bool, clockwise: bool, orientations: int,
) -> None:  # fmt: skip
    c = _check.Checker("roi_align_rotated")
    check_maps(c, "input", input, boxes, "N", "C", "H", "W", fields=6)
    check_bins(c, pooled_height, pooled_width)
    _check_rules(c, input.shape[1], spatial_scale, sampling_ratio, orientations)


def _check_backward(
    grad_output: Tensor, boxes: Tensor, batch: int, height: int, width: int, spatial_scale: float, sampling_ratio: int,
    aligned: bool, clockwise: bool, orientations: int, channels_last: bool,
) -> None:  # fmt: skip
    c = _check.Checker("roi_align_rotated_backward")
    check_maps(c, "grad_output", grad_output, boxes, "K", "C", "PH", "PW", fields=6)
    check_sizes(c, batch=batch, height=height, width=width)
    _check_rules(c, grad_output.shape[1], spatial_scale, sampling_ratio, orientations)


def _check_rules(
    c: _check.Checker, channels: int, spatial_scale: float, sampling_ratio: int, orientations: int
) -> None:
    c.finite("spatial_scale", spatial_scale)
    check_ratio(c, "sampling_ratio", sampling_ratio)
    c.integer("orientations", orientations, 1, MOST_ORIENTATIONS)
    if not isinstance(channels, torch.SymInt) and channels % orientations:
        c.fail(f"channels must be a multiple of the {orientations} orientations, got {channels}")


def _fake_forward(
    input: Tensor, boxes: Tensor, pooled_height: int, pooled_width: int, spatial_scale: float, sampling_ratio: int,
    aligned: bool, clockwise: bool, orientations: int,
) -> Tensor:  # fmt: skip
    return empty_like_format((boxes.shape[0], input.shape[1], pooled_height, pooled_width), input.dtype, input)


def _fake_backward(
    grad_output: Tensor, boxes: Tensor, batch: int, height: int, width: int, spatial_scale: float, sampling_ratio: int,
    aligned: bool, clockwise: bool, orientations: int, channels_last: bool,
) -> Tensor:  # fmt: skip
    shape = (batch, grad_output.shape[1], height, width)
    return empty_in_format(shape, grad_output.dtype, grad_output.device, channels_last)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    input, boxes, _, _, *ctx.rules = inputs
    ctx.save_for_backward(boxes)
    ctx.sizes = input.shape[0], input.shape[2], input.shape[3]
    ctx.channels_last = format_of(input) == torch.channels_last


def _backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
    grad = _roi_align_rotated_backward(grad_output, *ctx.saved_tensors, *ctx.sizes, *ctx.rules, ctx.channels_last)
    return grad, None, None, None, None, None, None, None, None


_roi_align_rotated_backward = _op.define(
    reference.roi_align_rotated_backward, check=_check_backward, fake=_fake_backward,
    backward=_op.no_second_derivative,
)  # fmt: skip
_roi_align_rotated = _op.define(
    reference.roi_align_rotated, check=_check_forward, fake=_fake_forward, setup_context=_setup_context,
    backward=_backward,
)  # fmt: skip

__all__ = ["riroi_align_rotated", "roi_align_rotated", "roi_align_rotated_backward"]
