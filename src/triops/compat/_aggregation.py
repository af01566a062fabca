"""`deformable_aggregation_ext`, which Sparse4D, SparseDrive and GaussianFormer compile.

Every anchor takes the sum over its points, the cameras and the scales of the feature at a place in the camera's image,
by weights of groups of channels: deformable attention with a level for each camera and scale.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

import triops


def deformable_aggregation_forward(
    mc_ms_feat: Tensor, spatial_shape: Tensor, scale_start_index: Tensor, sampling_location: Tensor, weights: Tensor
) -> Tensor:
    """Features [B, cells, C], sizes [cameras, scales, 2] and their first cells [cameras, scales], places (x, y) from 0
    to 1 [B, anchors, points, cameras, 2], weights [B, anchors, points, cameras, scales, groups] -> [B, anchors, C]."""
    return triops.ms_deform_attn(
        *_as_attention(mc_ms_feat, spatial_shape, scale_start_index, sampling_location, weights)
    )


def deformable_aggregation_backward(
    mc_ms_feat: Tensor, spatial_shape: Tensor, scale_start_index: Tensor, sampling_location: Tensor, weights: Tensor,
    grad_output: Tensor, grad_mc_ms_feat: Tensor, grad_sampling_location: Tensor, grad_weights: Tensor,
) -> None:  # fmt: skip
    """The gradients are added to those that are given."""
    batch, anchors, points, cameras, scales, groups = weights.shape
    of_value, of_places, of_weights = triops.ms_deform_attn_backward(
        grad_output.contiguous(),
        *_as_attention(mc_ms_feat, spatial_shape, scale_start_index, sampling_location, weights),
    )
    grad_mc_ms_feat += of_value.reshape(mc_ms_feat.shape)
    seen = _seen(sampling_location)
    by_scale = of_places.view(batch, anchors, groups, cameras, scales, points, 2).sum((2, 4))
    grad_sampling_location += by_scale.transpose(2, 3) * seen
    of_each = of_weights.view(batch, anchors, groups, cameras, scales, points).permute(0, 1, 5, 3, 4, 2)
    grad_weights += of_each * seen[..., None]


def _as_attention(
    features: Tensor, sizes: Tensor, starts: Tensor, places: Tensor, weights: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Value, shapes, starts, locations and weights as deformable attention has them: groups are its heads."""
    batch, anchors, points, cameras, scales, groups = weights.shape
    value = features.reshape(batch, features.shape[1], groups, -1)
    seen = _seen(places)
    levels = batch, anchors, groups, cameras * scales, points
    by_camera = places.where(seen, 0).transpose(2, 3)[:, :, None, :, None]  # [B, A, 1, cameras, 1, points, 2]
    locations = by_camera.expand(batch, anchors, groups, cameras, scales, points, 2).reshape(*levels, 2)
    counted = weights.where(seen[..., None], 0).permute(0, 1, 5, 3, 4, 2).reshape(levels)
    return value, sizes.reshape(-1, 2).long(), starts.reshape(-1).long(), locations, counted


def _seen(places: Tensor) -> Tensor:
    """Whether a place lies within the image; one on its edge does not. [..., 1]"""
    return ((places > 0) & (places < 1)).all(-1, keepdim=True)


FUNCTIONS: dict[str, Callable[..., Any]] = {
    function.__name__: function for function in (deformable_aggregation_forward, deformable_aggregation_backward)
}
