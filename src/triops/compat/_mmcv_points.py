"""Sampling, grouping and interpolation of point sets of `mmcv._ext`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

import triops


def furthest_point_sampling_forward(
    points_tensor: Tensor, temp_tensor: Tensor, idx_tensor: Tensor, b: int, n: int, m: int
) -> None:
    idx_tensor.copy_(triops.furthest_point_sample(points_tensor, m))


def furthest_point_sampling_with_dist_forward(
    points_tensor: Tensor, temp_tensor: Tensor, idx_tensor: Tensor, b: int, n: int, m: int
) -> None:
    idx_tensor.copy_(triops.furthest_point_sample_with_dist(points_tensor, m))


FUNCTIONS: dict[str, Callable[..., Any]] = {
    function.__name__: function
    for function in (furthest_point_sampling_forward, furthest_point_sampling_with_dist_forward)
}
