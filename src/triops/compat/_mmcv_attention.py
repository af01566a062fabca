"""Multi-scale deformable attention of `mmcv._ext`, and of the module that Deformable DETR and its kin compile."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import triops


def ms_deform_attn_forward(
    value: Tensor, value_spatial_shapes: Tensor, value_level_start_index: Tensor, sampling_locations: Tensor,
    attention_weights: Tensor, im2col_step: int,
) -> Tensor:  # fmt: skip
    """`im2col_step`, how many images peers take at a time, is not needed here."""
    return triops.ms_deform_attn(
        value, value_spatial_shapes, value_level_start_index, _fitting(sampling_locations, value),
        _fitting(attention_weights, value),
    )  # fmt: skip


def ms_deform_attn_backward(
    value: Tensor, value_spatial_shapes: Tensor, value_level_start_index: Tensor, sampling_locations: Tensor,
    attention_weights: Tensor, grad_output: Tensor, grad_value: Tensor, grad_sampling_loc: Tensor,
    grad_attn_weight: Tensor, im2col_step: int,
) -> None:  # fmt: skip
    found = gradients(
        value, value_spatial_shapes, value_level_start_index, sampling_locations, attention_weights, grad_output
    )
    for given, made in zip((grad_value, grad_sampling_loc, grad_attn_weight), found, strict=True):
        given.copy_(made)


def gradients(
    value: Tensor, spatial_shapes: Tensor, level_start_index: Tensor, sampling_locations: Tensor,
    attention_weights: Tensor, grad_output: Tensor, im2col_step: int = 1,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The backward of the module `MultiScaleDeformableAttention`, which returns what mmcv's fills."""
    return triops.ms_deform_attn_backward(
        grad_output.to(value.dtype), value, spatial_shapes, level_start_index, _fitting(sampling_locations, value),
        _fitting(attention_weights, value),
    )  # fmt: skip


def _fitting(tensor: Tensor, value: Tensor) -> Tensor:
    """Autocast mixes dtypes; float32 coordinates and weights of half features stay as they are."""
    half = value.dtype in (torch.float16, torch.bfloat16)
    return tensor if half and tensor.dtype == torch.float32 else tensor.to(value.dtype)


FUNCTIONS: dict[str, Callable[..., Any]] = {
    function.__name__: function for function in (ms_deform_attn_forward, ms_deform_attn_backward)
}
