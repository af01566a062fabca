"""detectron2 without a compiler: importing this module supplies `detectron2._C`, unless a compiled one is there.

With `detectron2._C` come the operators that a compiled one registers, `torch.ops.detectron2`. Angles are in degrees
and counter-clockwise as seen in the image.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import triops
from triops._dtypes import compute_dtype
from triops.compat import _coco, _finder, _mmcv_deform
from triops.compat._extension import Extension
from triops.ops.roi_align_rotated import roi_align_rotated_backward as rotated_backward


def get_compiler_version() -> str:
    return f"none, triops {triops.__version__}"


def get_cuda_version() -> str:
    if torch.version.hip:
        return f"HIP {torch.version.hip}"
    return f"CUDA {torch.version.cuda}" if torch.version.cuda else "not available"


def has_cuda() -> bool:
    """False, as nothing was compiled: detectron2 asks before it looks for GPU architectures in the file of the module,
    and there is no file."""
    return False


def box_iou_rotated(boxes1: Tensor, boxes2: Tensor) -> Tensor:
    """boxes1 [N, 5], boxes2 [M, 5] of (x, y, width, height, degrees) -> float32 [N, M]."""
    return triops.box_iou_rotated(_in_radians(boxes1), _in_radians(boxes2), clockwise=False).float()


def nms_rotated(dets: Tensor, scores: Tensor, iou_threshold: float) -> Tensor:
    """dets [N, 5], scores [N] -> int64 [K], best first. Dropped is what overlaps a better box by more than the
    threshold, as on a GPU and in detectron2's words; its C++ drops what overlaps by just as much, too."""
    return triops.nms_rotated(_in_radians(dets), scores, iou_threshold, clockwise=False)


def roi_align_rotated_forward(
    input: Tensor, rois: Tensor, spatial_scale: float, pooled_height: int, pooled_width: int, sampling_ratio: int
) -> Tensor:
    """input [N, C, H, W], rois [K, 6] of (image, x, y, width, height, degrees) -> [K, C, PH, PW]."""
    size = pooled_height, pooled_width
    return triops.roi_align_rotated(input, _fitting(rois, input), size, spatial_scale, sampling_ratio, True, False)


def roi_align_rotated_backward(
    grad: Tensor, rois: Tensor, spatial_scale: float, pooled_height: int, pooled_width: int, batch_size: int,
    channels: int, height: int, width: int, sampling_ratio: int,
) -> Tensor:  # fmt: skip
    return rotated_backward(
        grad, _fitting(rois, grad), batch_size, height, width, spatial_scale, sampling_ratio, True, False
    )


def _in_radians(boxes: Tensor) -> Tensor:
    """Whole turns are taken off first, which loses no digits."""
    return torch.cat([boxes[:, :-1], torch.deg2rad(torch.fmod(boxes[:, -1:], 360))], 1)


def _fitting(rois: Tensor, features: Tensor) -> Tensor:
    """Autocast mixes dtypes, and half types have no digits for degrees."""
    return _in_radians(rois.to(compute_dtype(features.dtype)))


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "get_compiler_version": get_compiler_version,
    "get_cuda_version": get_cuda_version,
    "has_cuda": has_cuda,
    "deform_conv_backward_filter": _mmcv_deform.deform_conv_backward_parameters,
    **{
        function.__name__: function
        for function in (
            _mmcv_deform.deform_conv_forward, _mmcv_deform.deform_conv_backward_input,
            _mmcv_deform.modulated_deform_conv_forward, _mmcv_deform.modulated_deform_conv_backward,
        )
    },
    **_coco.FUNCTIONS,
}  # fmt: skip

OPERATORS: dict[Callable[..., Tensor], str] = {
    box_iou_rotated: "(Tensor boxes1, Tensor boxes2) -> Tensor",
    nms_rotated: "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    roi_align_rotated_forward: "(Tensor input, Tensor rois, float spatial_scale, int pooled_height, "
    "int pooled_width, int sampling_ratio) -> Tensor",
    roi_align_rotated_backward: "(Tensor grad, Tensor rois, float spatial_scale, int pooled_height, "
    "int pooled_width, int batch_size, int channels, int height, int width, int sampling_ratio) -> Tensor",
}


@functools.cache
def _register() -> torch.library.Library:
    """`torch.ops.detectron2`, once a process, for as long as what this returns is held."""
    library = torch.library.Library("detectron2", "FRAGMENT")
    for function, schema in OPERATORS.items():
        if not hasattr(torch.ops.detectron2, function.__name__):
            library.define(function.__name__ + schema)
            library.impl(function.__name__, function, "CompositeImplicitAutograd")
    return library


def extension(name: str) -> Extension:
    _register()
    return Extension(name, FUNCTIONS)


_finder.install("detectron2")
