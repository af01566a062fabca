"""The specification of furthest_point_sample and furthest_point_sample_with_dist.

Sampling begins with the first valid point. Each further sample is the point whose distance to the nearest sample so far
is largest, of equal ones the lowest. A sampled point stays at distance 0, so that a cloud without further points
repeats its first one.
"""

from __future__ import annotations

import torch
from torch import Tensor

from triops import _check
from triops._clouds import check_ascending
from triops._dtypes import compute_dtype


def furthest_point_sample(
    points: Tensor, offsets: Tensor, sample_offsets: Tensor, count: int, longest: int, within: bool
) -> Tensor:
    """points [N, D], offsets [B + 1], sample_offsets [B + 1] -> int32 [count]: rows, or places within the cloud.

    longest: an upper bound of the points of a cloud, which kernels may use to choose a form.
    """
    if points.device.type == "cpu" or _check.strict():
        check_ascending("furthest_point_sample", "offsets", offsets, len(points))
        check_ascending("furthest_point_sample", "sample_offsets", sample_offsets, count)
    out = torch.zeros(count, dtype=torch.int32, device=points.device)
    begins, ends = (o.clamp(0, len(points)).tolist() for o in (offsets[:-1], offsets[1:]))
    firsts, lasts = (o.clamp(0, count).tolist() for o in (sample_offsets[:-1], sample_offsets[1:]))
    for begin, end, first, last in zip(begins, ends, firsts, lasts, strict=True):
        cloud = points[begin:end].to(compute_dtype(points.dtype))
        if len(cloud) == 0:
            out[first:last] = 0 if within else -1
            continue
        nearest = _nothing_sampled(cloud.isfinite().all(1), cloud)
        for k in range(first, last):
            sample = nearest.argmax()  # the first of equal ones
            out[k] = sample + (0 if within else begin)
            nearest = torch.minimum(nearest, _square_distances(cloud, cloud[sample]))
    return out


def furthest_point_sample_with_dist(distances: Tensor, count: int) -> Tensor:
    """distances [B, N, N] -> int32 [B, count]. A point is valid whose distance to itself is finite."""
    out = torch.zeros((distances.shape[0], count), dtype=torch.int32, device=distances.device)
    if distances.shape[1] == 0:
        return out
    for cloud, samples in zip(distances.to(compute_dtype(distances.dtype)), out, strict=True):
        nearest = _nothing_sampled(cloud.diagonal().isfinite(), cloud)
        for k in range(count):
            sample = nearest.argmax()
            samples[k] = sample
            nearest = torch.where(cloud[sample] < nearest, cloud[sample], nearest)  # false for NaN
    return out


def _nothing_sampled(valid: Tensor, like: Tensor) -> Tensor:
    """The distance of each point to the nearest sample before there is one; the lowest of all for points to leave."""
    return torch.where(valid, torch.inf, -torch.inf).to(like.dtype)


def _square_distances(cloud: Tensor, point: Tensor) -> Tensor:
    """Squares are added column by column, in one order on every backend; infinite for a point that is not finite."""
    squares = (cloud - point).square()
    distances = squares[:, 0]
    for column in range(1, cloud.shape[1]):
        distances = distances + squares[:, column]
    return distances.nan_to_num(nan=torch.inf, posinf=torch.inf)
