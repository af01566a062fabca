"""RoI pooling of `mmcv._ext`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from triops._dtypes import compute_dtype
from triops._plain import gradients, wide
from triops._plain.rotated_feature_align import rotated_feature_align
from triops._rois import HALVES, format_of
from triops.ops.deform_roi_pool import deform_roi_pool
from triops.ops.deform_roi_pool import deform_roi_pool_backward as _deform_backward
from triops.ops.prroi_pool import prroi_pool, prroi_pool_boxes_backward
from triops.ops.prroi_pool import prroi_pool_backward as _prroi_backward
from triops.ops.roi_align import roi_align_backward as _align_backward
from triops.ops.roi_align import roi_align_forward as _align_forward
from triops.ops.roi_align_rotated import riroi_align_rotated, roi_align_rotated
from triops.ops.roi_align_rotated import roi_align_rotated_backward as _rotated_backward
from triops.ops.roi_pool import roi_pool_backward as _pool_backward
from triops.ops.roi_pool import roi_pool_forward as _pool_forward

POOL_MODES = ("max", "avg")


def roi_align_forward(
    input: Tensor, rois: Tensor, output: Tensor, argmax_y: Tensor, argmax_x: Tensor, aligned_height: int,
    aligned_width: int, spatial_scale: float, sampling_ratio: int, pool_mode: int, aligned: bool,
) -> None:  # fmt: skip
    pooled, y, x = _align_forward(
        input, _fitting(rois, input), aligned_height, aligned_width, spatial_scale, sampling_ratio, bool(aligned),
        POOL_MODES[pool_mode],
    )  # fmt: skip
    output.copy_(pooled)
    if POOL_MODES[pool_mode] == "max":  # a mean has no position: mmcv passes two empty tensors
        argmax_y.copy_(y)
        argmax_x.copy_(x)


def roi_align_backward(
    grad_output: Tensor, rois: Tensor, argmax_y: Tensor, argmax_x: Tensor, grad_input: Tensor, aligned_height: int,
    aligned_width: int, spatial_scale: float, sampling_ratio: int, pool_mode: int, aligned: bool,
) -> None:  # fmt: skip
    real, (batch, _, height, width) = compute_dtype(grad_output.dtype), grad_input.shape
    grad_input += _align_backward(
        grad_output, _fitting(rois, grad_output), argmax_y.to(real), argmax_x.to(real), batch, height, width,
        spatial_scale, sampling_ratio, bool(aligned), POOL_MODES[pool_mode],
        format_of(grad_input) == torch.channels_last,
    )  # fmt: skip


def roi_pool_forward(
    input: Tensor, rois: Tensor, output: Tensor, argmax: Tensor, pooled_height: int, pooled_width: int,
    spatial_scale: float,
) -> None:  # fmt: skip
    pooled, pixels = _pool_forward(input, _fitting(rois, input), pooled_height, pooled_width, spatial_scale)
    output.copy_(pooled)
    argmax.copy_(pixels)


def roi_pool_backward(
    grad_output: Tensor, rois: Tensor, argmax: Tensor, grad_input: Tensor, pooled_height: int, pooled_width: int,
    spatial_scale: float,
) -> None:  # fmt: skip
    batch, _, height, width = grad_input.shape
    channels_last = format_of(grad_input) == torch.channels_last
    rois = _fitting(rois, grad_output)
    grad_input += _pool_backward(grad_output, rois, argmax, batch, height, width, channels_last)


def roi_align_rotated_forward(
    input: Tensor, rois: Tensor, output: Tensor, pooled_height: int, pooled_width: int, spatial_scale: float,
    sampling_ratio: int, aligned: bool, clockwise: bool,
) -> None:  # fmt: skip
    rois = _fitting(rois, input)
    output.copy_(
        roi_align_rotated(
            input, rois, (pooled_height, pooled_width), spatial_scale, sampling_ratio, bool(aligned), bool(clockwise)
        )
    )


def roi_align_rotated_backward(
    rois: Tensor, grad_input: Tensor, grad_output: Tensor, pooled_height: int, pooled_width: int,
    spatial_scale: float, sampling_ratio: int, aligned: bool, clockwise: bool,
) -> None:  # fmt: skip
    """mmcv takes (grad_output, rois, grad_input) and passes them by place; its binding names them like this."""
    grad_output, rois, grad_input = rois, grad_input, grad_output
    batch, _, height, width = grad_input.shape
    grad_input += _rotated_backward(
        grad_output, _fitting(rois, grad_output), batch, height, width, spatial_scale, sampling_ratio, bool(aligned),
        bool(clockwise), 1, format_of(grad_input) == torch.channels_last,
    )  # fmt: skip


def riroi_align_rotated_forward(
    features: Tensor, rois: Tensor, output: Tensor, pooled_height: int, pooled_width: int, spatial_scale: float,
    num_samples: int, num_orientations: int, clockwise: bool,
) -> None:  # fmt: skip
    rois = _fitting(rois, features)
    output.copy_(
        riroi_align_rotated(
            features, rois, (pooled_height, pooled_width), spatial_scale, num_samples, num_orientations, bool(clockwise)
        )
    )


def riroi_align_rotated_backward(
    top_grad: Tensor, rois: Tensor, bottom_grad: Tensor, pooled_height: int, pooled_width: int, spatial_scale: float,
    num_samples: int, num_orientations: int, clockwise: bool,
) -> None:  # fmt: skip
    batch, _, height, width = bottom_grad.shape
    bottom_grad += _rotated_backward(
        top_grad, _fitting(rois, top_grad), batch, height, width, spatial_scale, num_samples, False, bool(clockwise),
        num_orientations, format_of(bottom_grad) == torch.channels_last,
    )  # fmt: skip


def deform_roi_pool_forward(
    input: Tensor, rois: Tensor, offset: Tensor, output: Tensor, pooled_height: int, pooled_width: int,
    spatial_scale: float, sampling_ratio: int, gamma: float,
) -> None:  # fmt: skip
    size = pooled_height, pooled_width
    pooled = deform_roi_pool(
        input.detach(), _fitting(rois, input), _moves(offset, input), size, spatial_scale, sampling_ratio, gamma
    )
    output.copy_(pooled)


def deform_roi_pool_backward(
    grad_output: Tensor, input: Tensor, rois: Tensor, offset: Tensor, grad_input: Tensor, grad_offset: Tensor,
    pooled_height: int, pooled_width: int, spatial_scale: float, sampling_ratio: int, gamma: float,
) -> None:  # fmt: skip
    to_input, to_offset = _deform_backward(
        grad_output.to(input.dtype),
        input,
        _fitting(rois, input),
        _moves(offset, input),
        spatial_scale,
        sampling_ratio,
        gamma,
    )
    grad_input += to_input
    if offset.numel():
        grad_offset += to_offset


def _moves(offset: Tensor, input: Tensor) -> Tensor | None:
    """mmcv passes an empty tensor for no offset."""
    return _fitting(offset, input).detach() if offset.numel() else None


def prroi_pool_forward(
    input: Tensor, rois: Tensor, output: Tensor, pooled_height: int, pooled_width: int, spatial_scale: float
) -> None:
    output.copy_(
        prroi_pool(input.detach(), _fitting(rois, input).detach(), (pooled_height, pooled_width), spatial_scale)
    )


def prroi_pool_backward(
    grad_output: Tensor, rois: Tensor, grad_input: Tensor, pooled_height: int, pooled_width: int, spatial_scale: float
) -> None:
    batch, _, height, width = grad_input.shape
    grad_input += _prroi_backward(
        grad_output, _fitting(rois, grad_output), batch, height, width, spatial_scale,
        format_of(grad_input) == torch.channels_last,
    )  # fmt: skip


def prroi_pool_coor_backward(
    output: Tensor, grad_output: Tensor, input: Tensor, rois: Tensor, grad_rois: Tensor, pooled_height: int,
    pooled_width: int, spatial_scale: float,
) -> None:  # fmt: skip
    grad_rois += prroi_pool_boxes_backward(grad_output, input, _fitting(rois, input), spatial_scale)


def rotated_feature_align_forward(
    features: Tensor, best_bboxes: Tensor, output: Tensor, spatial_scale: float, points: int
) -> None:
    output.copy_(rotated_feature_align(features.detach(), _box_per_pixel(best_bboxes, features), spatial_scale, points))


def rotated_feature_align_backward(
    top_grad: Tensor, best_bboxes: Tensor, bottom_grad: Tensor, spatial_scale: float, points: int
) -> None:
    boxes = _box_per_pixel(best_bboxes, top_grad)

    def aligned(features: Tensor) -> Tensor:
        return rotated_feature_align(features, boxes, spatial_scale, points)

    # The features themselves play no part in their gradient.
    bottom_grad += gradients(aligned, [wide(top_grad)], top_grad)[0].to(bottom_grad.dtype)


def _box_per_pixel(boxes: Tensor, features: Tensor) -> Tensor:
    """As [N, H, W, 5]: mmrotate gives the rows of all pixels, [N * H * W, 5]."""
    return boxes.reshape(features.shape[0], *features.shape[2:], 5)


def _fitting(rois: Tensor, features: Tensor) -> Tensor:
    """Autocast mixes dtypes; float32 boxes of half features stay as they are."""
    return rois if features.dtype in HALVES and rois.dtype == torch.float32 else rois.to(features.dtype)


FUNCTIONS: dict[str, Callable[..., Any]] = {
    function.__name__: function
    for function in (
        roi_align_forward, roi_align_backward, roi_pool_forward, roi_pool_backward, roi_align_rotated_forward,
        roi_align_rotated_backward, riroi_align_rotated_forward, riroi_align_rotated_backward,
        rotated_feature_align_forward, rotated_feature_align_backward, prroi_pool_forward, prroi_pool_backward,
        prroi_pool_coor_backward, deform_roi_pool_forward, deform_roi_pool_backward,
    )
}  # fmt: skip
