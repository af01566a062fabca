"""torchvision without its compiled operators: importing this module supplies them where they cannot be loaded.

A torchvision that was built for another PyTorch stops at its import: "operator torchvision::nms does not exist". Its
Python files need nothing compiled but these operators, which are registered here under their own names, as soon as
torchvision finds that it has none. One that loads its own is left alone.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from importlib.util import find_spec
from math import pi
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from triops._dtypes import compute_dtype
from triops.compat import _finder, _torchvision_pools
from triops.ops import box_iou_rotated as rotated
from triops.ops import deform_conv2d as deformable
from triops.ops import nms as suppression
from triops.ops.roi_align import roi_align_backward as align_backward
from triops.ops.roi_align import roi_align_forward as align_forward

LIBRARY = torch.library.Library("torchvision", "FRAGMENT")


class RefusedValue(ValueError, RuntimeError):
    """A ValueError that is a RuntimeError as well, which torchvision raises."""


class RefusedType(TypeError, RuntimeError):
    """A TypeError that is a RuntimeError as well."""


class RefusedIndex(IndexError, RuntimeError):
    """An IndexError that is a RuntimeError as well."""


REFUSALS = {ValueError: RefusedValue, TypeError: RefusedType, IndexError: RefusedIndex}


def nms(dets: Tensor, scores: Tensor, iou_threshold: float) -> Tensor:
    return suppression.nms(dets, scores, iou_threshold)


def roi_align(
    input: Tensor, rois: Tensor, spatial_scale: float, pooled_height: int, pooled_width: int, sampling_ratio: int,
    aligned: bool,
) -> Tensor:  # fmt: skip
    return align_forward(input, rois, pooled_height, pooled_width, spatial_scale, sampling_ratio, aligned, "avg")[0]


def roi_align_backward(
    grad: Tensor, rois: Tensor, spatial_scale: float, pooled_height: int, pooled_width: int, batch_size: int,
    channels: int, height: int, width: int, sampling_ratio: int, aligned: bool,
) -> Tensor:  # fmt: skip
    none = grad.new_empty(0, dtype=compute_dtype(grad.dtype))
    return align_backward(
        grad, rois, none, none, batch_size, height, width, spatial_scale, sampling_ratio, aligned, "avg"
    )


def deform_conv2d(
    input: Tensor, weight: Tensor, offset: Tensor, mask: Tensor, bias: Tensor, stride_h: int, stride_w: int, pad_h: int,
    pad_w: int, dilation_h: int, dilation_w: int, groups: int, offset_groups: int, use_mask: bool,
) -> Tensor:  # fmt: skip
    stride, padding, dilation = (stride_h, stride_w), (pad_h, pad_w), (dilation_h, dilation_w)
    return deformable.deform_conv2d(input, offset, weight, bias, stride, padding, dilation, mask if use_mask else None)


def deform_conv2d_backward(
    grad: Tensor, input: Tensor, weight: Tensor, offset: Tensor, mask: Tensor, bias: Tensor, stride_h: int,
    stride_w: int, pad_h: int, pad_w: int, dilation_h: int, dilation_w: int, groups: int, offset_groups: int,
    use_mask: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    stride, padding, dilation = (stride_h, stride_w), (pad_h, pad_w), (dilation_h, dilation_w)
    of_input, of_offset, of_mask, of_weight = deformable.deform_conv2d_backward(
        grad, input, offset, weight, mask if use_mask else None, stride, padding, dilation
    )
    return of_input, of_weight, of_offset, of_mask if use_mask else torch.zeros_like(mask), grad.sum((0, 2, 3))


def box_iou_rotated(boxes1: Tensor, boxes2: Tensor) -> Tensor:
    """With angles in degrees; float32 of whatever boxes."""
    first, second = (torch.cat((b[:, :4], b[:, 4:] * (pi / 180)), 1) for b in (boxes1, boxes2))
    return rotated.box_iou_rotated(first, second).float()


def qnms(dets: Tensor, scores: Tensor, iou_threshold: float) -> Tensor:
    """Of the integers that stand for boxes and scores: neither scale nor zero point changes an overlap."""
    return suppression.nms(dets.double(), scores.double(), iou_threshold)


def qroi_align(
    input: Tensor, rois: Tensor, input_scale: float, input_zero_point: int, rois_scale: float, rois_zero_point: int,
    spatial_scale: float, pooled_height: int, pooled_width: int, sampling_ratio: int, aligned: bool,
) -> Tensor:  # fmt: skip
    """Of the integers that stand for one image and its boxes, whose first column is not read."""
    if input.shape[0] != 1:
        raise ValueError(f"Only one image per batch is allowed in qroi_align, got {input.shape[0]}")
    boxes = (rois.float() - rois_zero_point) * rois_scale
    boxes[:, 0] = 0
    means = roi_align(
        input.float() - input_zero_point, boxes, spatial_scale, pooled_height, pooled_width, sampling_ratio, aligned
    )
    bounds = torch.iinfo(input.dtype)
    return (means.round() + input_zero_point).clamp(bounds.min, bounds.max).to(input.dtype)


def cuda_version() -> int:
    return -1


OPERATORS: dict[str, Callable[..., Any]] = {
    "nms": nms,
    "roi_align": roi_align,
    "_roi_align_backward": roi_align_backward,
    "roi_pool": _torchvision_pools.roi_pool,
    "_roi_pool_backward": _torchvision_pools.roi_pool_backward,
    "ps_roi_align": _torchvision_pools.ps_roi_align,
    "_ps_roi_align_backward": _torchvision_pools.ps_roi_align_backward,
    "ps_roi_pool": _torchvision_pools.ps_roi_pool,
    "_ps_roi_pool_backward": _torchvision_pools.ps_roi_pool_backward,
    "deform_conv2d": deform_conv2d,
    "_deform_conv2d_backward": deform_conv2d_backward,
    "box_iou_rotated": box_iou_rotated,
    "qnms": qnms,
    "qroi_align": qroi_align,
    "_cuda_version": cuda_version,
}
ON_CPU = ("qnms", "qroi_align", "_cuda_version")


def has_ops() -> bool:
    """In place of torchvision's function of that name; torch.jit.script reads it."""
    return True


def complete(extension: ModuleType) -> None:
    """Given `torchvision.extension` as executed: register the operators that it has not loaded, and say so."""
    if extension._has_ops():
        _complete_for_gpus()
        return
    for name, function in OPERATORS.items():
        if not hasattr(torch.ops.torchvision, name):
            LIBRARY.define(name + torch.library.infer_schema(function, mutates_args=()))
            LIBRARY.impl(name, _refusing(function), "CompositeExplicitAutograd")
    if find_spec("torchvision._autograd_registrations") is None:  # before 0.28 that was compiled, too
        from triops.compat import _torchvision_autograd

        _torchvision_autograd.register(LIBRARY)
    extension._has_ops = has_ops  # type: ignore[attr-defined]
    extension._HAS_OPS = True  # type: ignore[attr-defined]


def _complete_for_gpus() -> None:
    """Operators that were compiled for the CPU alone, beside a torch that was not, get their part for GPUs."""
    known = torch._C._dispatch_has_kernel_for_dispatch_key
    for name, function in OPERATORS.items():
        there = hasattr(torch.ops.torchvision, name) and name not in ON_CPU
        if there and not known(f"torchvision::{name}", "CUDA"):
            LIBRARY.impl(name, _refusing(function), "CUDA")


def _refusing(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, whose refusals are RuntimeErrors too."""

    @wraps(function)
    def call(*args: Any) -> Any:
        try:
            return function(*args)
        except (ValueError, TypeError, IndexError) as error:
            if type(error) not in REFUSALS:
                raise
            raise REFUSALS[type(error)](*error.args) from None

    return call


_finder.install("torchvision")
