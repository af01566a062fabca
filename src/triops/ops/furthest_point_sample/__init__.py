"""furthest_point_sample: points of a cloud that lie as far from each other as a greedy choice makes them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from triops import _check, _op
from triops._clouds import check_offsets, even_offsets
from triops.ops.furthest_point_sample import reference


def furthest_point_sample(points: Tensor, count: int | Sequence[int], *, offsets: Tensor | None = None) -> Tensor:
    """Indices of points, each the furthest from all that were sampled before it.

    Begins with point 0; of equally far points the lowest index is taken. The same indices on every backend: squared
    distances are float32 `(dx*dx + dy*dy) + dz*dz` (float64 for float64 points), columns beyond z likewise in order.

    Args:
        points: float tensor [B, N, D], or [N, D] with `offsets`. D is 3, or any width to sample by features and
            coordinates together (F-FPS).
        count: samples per cloud; with `offsets` also a sequence of B integers.
        offsets: int32 or int64 tensor [B + 1], ascending from 0 to N: cloud b is rows offsets[b] to offsets[b + 1] - 1.

    Returns:
        int32 tensor [B, count] of indices within the cloud. With `offsets`, int32 [samples of all clouds] of rows of
        `points`, cloud after cloud.
        A cloud with fewer points than samples repeats its first sample. A point with a coordinate that is not finite is
        not sampled, and sampling begins with the first finite one; a cloud that has none gives its point 0. An empty
        cloud gives 0, with `offsets` -1.

    Raises:
        ValueError, TypeError: on a wrong rank, dtype, device or count.
        IndexError: when offsets do not ascend from 0 to N. On a GPU they are clamped to that range, unless
            TRIOPS_CHECK=1 asks for the error there too.

    >>> import torch, triops
    >>> line = torch.tensor([[0.0, 0, 0], [1, 0, 0], [5, 0, 0], [2, 0, 0]])
    >>> triops.furthest_point_sample(line[None], 3)
    tensor([[0, 2, 3]], dtype=torch.int32)
    >>> triops.furthest_point_sample(line, [1, 2], offsets=torch.tensor([0, 1, 4]))
    tensor([0, 1, 2], dtype=torch.int32)
    """
    if not isinstance(points, Tensor):
        raise TypeError(f"furthest_point_sample: points must be a Tensor, got {type(points).__name__}")
    c = _check.Checker("furthest_point_sample")
    if offsets is None:
        c.shape("points", points, "B", "N", "D")
        batch, length, width = points.shape
        each = c.integer("count", count, 0, _check.MAX_COUNT)
        found = _furthest_point_sample(
            points.reshape(batch * length, width), even_offsets(batch, length, points.device),
            even_offsets(batch, each, points.device), batch * each, length, True,
        )  # fmt: skip
        return found.view(batch, each)  # type: ignore[no-any-return]
    if not isinstance(offsets, Tensor):
        c.fail(f"offsets must be a Tensor, got {type(offsets).__name__}", TypeError)
    check_offsets(c, "offsets", offsets)
    batch = offsets.shape[0] - 1
    one = _check.as_integer(count)
    if one is not None:
        each = c.integer("count", one, 0, _check.MAX_COUNT)
        total, sample_offsets = batch * each, even_offsets(batch, each, offsets.device)
    else:
        counts = [c.integer("count", n, 0, _check.MAX_COUNT) for n in c.integers("count", count)]
        if len(counts) != batch:
            c.fail(f"count must be one integer or {batch}, one per cloud, got {len(counts)}")
        total = sum(counts)
        sample_offsets = torch.tensor([0, *counts]).cumsum(0).to(offsets.device)
    return furthest_point_sample_rows(points, offsets, sample_offsets, total)


def furthest_point_sample_rows(points: Tensor, offsets: Tensor, sample_offsets: Tensor, count: int) -> Tensor:
    """As `furthest_point_sample` with `offsets`, where only the device knows the samples of each cloud.

    sample_offsets: int32 or int64 tensor [B + 1], ascending from 0 to `count`: the samples of cloud b are
    sample_offsets[b] to sample_offsets[b + 1] - 1. Errors as for `offsets`.
    """
    longest = points.shape[0] if isinstance(points, Tensor) and points.dim() else 0
    return _furthest_point_sample(  # type: ignore[no-any-return]
        points, offsets, sample_offsets, count, longest, False
    )


def furthest_point_sample_with_dist(distances: Tensor, count: int) -> Tensor:
    """As `furthest_point_sample`, by the distances between all points.

    Args:
        distances: float tensor [B, N, N]: row i holds the distances from point i. They may be negative; a NaN is passed
            over. A point whose distance to itself is not finite is not sampled, as one that is not finite itself.
        count: samples per cloud.

    Returns:
        int32 tensor [B, count].

    Raises:
        ValueError, TypeError: on a wrong rank, dtype or count.

    >>> import torch, triops
    >>> line = torch.tensor([0.0, 1, 5, 2])
    >>> triops.furthest_point_sample_with_dist((line[:, None] - line).square()[None], 3)
    tensor([[0, 2, 3]], dtype=torch.int32)
    """
    return _furthest_point_sample_with_dist(distances, count)  # type: ignore[no-any-return]


def _check_points(
    points: Tensor, offsets: Tensor, sample_offsets: Tensor, count: int, longest: int, within: bool
) -> None:
    c = _check.Checker("furthest_point_sample")
    c.shape("points", points, "N", "D")
    c.dtype("points", points, _check.FLOATS)
    if points.shape[1] < 1:
        c.fail(f"points must have at least one column, got {list(points.shape)}")
    check_offsets(c, "offsets", offsets)
    check_offsets(c, "sample_offsets", sample_offsets)
    c.shape("sample_offsets", sample_offsets, offsets.shape[0])
    c.same_device(points=points, offsets=offsets, sample_offsets=sample_offsets)
    c.at_least("count", count, 0)
    c.at_least("longest", longest, 0)
    for name, size in (("points", points.shape[0]), ("count", count)):
        if _check.too_many(size):
            c.fail(f"{name} must be at most 2**30, since indices are int32, got {size}")


def _check_distances(distances: Tensor, count: int) -> None:
    c = _check.Checker("furthest_point_sample_with_dist")
    c.shape("distances", distances, "B", "N", "N")
    c.dtype("distances", distances, _check.FLOATS)
    c.at_least("count", count, 0)
    for name, size in (("N", distances.shape[1]), ("count", count)):
        if _check.too_many(size):
            c.fail(f"{name} must be at most 2**30, since indices are int32, got {size}")


def _fake_points(
    points: Tensor, offsets: Tensor, sample_offsets: Tensor, count: int, longest: int, within: bool
) -> Tensor:
    return points.new_empty((count,), dtype=torch.int32)


def _fake_distances(distances: Tensor, count: int) -> Tensor:
    return distances.new_empty((distances.shape[0], count), dtype=torch.int32)


_furthest_point_sample = _op.define(reference.furthest_point_sample, check=_check_points, fake=_fake_points)
_furthest_point_sample_with_dist = _op.define(
    reference.furthest_point_sample_with_dist, check=_check_distances, fake=_fake_distances
)

__all__ = ["furthest_point_sample", "furthest_point_sample_rows", "furthest_point_sample_with_dist"]
