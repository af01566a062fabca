"""knn: the nearest points of each query, and three_nn: the three that features are interpolated from."""

from __future__ import annotations

import torch
from torch import Tensor

from triops import _check, _op
from triops._dtypes import compute_dtype
from triops._neighbors import check_clouds, check_k
from triops.ops.knn import reference


def knn(
    points: Tensor, queries: Tensor, k: int, *, squared: bool = False, offsets: Tensor | None = None,
    query_offsets: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Indices of the k points nearest to each query, and their distances, nearest first.

    Of equal squared distances, in float32 (float64 for float64), the lower index is nearer. A point or a query that is
    not finite has no neighbors.

    Args:
        points: float tensor [B, N, 3], or ragged [N, 3]: clouds behind one another.
        queries: tensor [B, M, 3] or [M, 3] of the same dtype.
        k: neighbors per query, 1 to 4096.
        squared: give squared distances.
        offsets: int32 or int64 tensor [B + 1], for ragged points: cloud b is rows offsets[b] to offsets[b + 1] - 1.
            Without it [N, 3] is one cloud.
        query_offsets: likewise for the queries.

    Returns:
        int32 tensor [B, M, k] of indices within the cloud, or for ragged points [M, k] of rows of `points`; and their
        distances, float32, or float64 for float64. Where there are fewer than k points: -1 and inf.

    Raises:
        ValueError, TypeError: on a wrong shape, dtype, device or k.
        IndexError: when offsets do not ascend from 0 to the number of rows. On a GPU they are clamped instead, unless
            TRIOPS_CHECK=1 asks for the error there too.

    >>> import torch, triops
    >>> points = torch.tensor([[0.0, 0, 0], [5, 0, 0], [2, 0, 0]])
    >>> indices, distances = triops.knn(points, points[:1], k=2)
    >>> indices, distances
    (tensor([[0, 2]], dtype=torch.int32), tensor([[0., 2.]]))
    """
    return _knn(points, queries, k, squared, offsets, query_offsets)  # type: ignore[no-any-return]


def three_nn(
    queries: Tensor, points: Tensor, *, squared: bool = False, offsets: Tensor | None = None,
    query_offsets: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Distances of the three points nearest to each query, and their indices, nearest first.

    What `three_interpolate` takes, so every index is one of the cloud's: where it has fewer than three points, the
    first of them stands in, at distance inf. The rest as in `knn`.

    Args:
        queries: float tensor [B, M, 3] or [M, 3].
        points: tensor [B, N, 3] or [N, 3] of the same dtype.
        squared: give squared distances.
        offsets, query_offsets: of ragged points and queries, as in `knn`.

    Returns:
        Distances [B, M, 3] or [M, 3], float32, or float64 for float64; and int32 indices of the same shape.

    >>> import torch, triops
    >>> points = torch.tensor([[[0.0, 0, 0], [5, 0, 0], [2, 0, 0], [1, 0, 0]]])
    >>> triops.three_nn(points[:, :1], points)
    (tensor([[[0., 1., 2.]]]), tensor([[[0, 3, 2]]], dtype=torch.int32))
    """
    return _three_nn(queries, points, squared, offsets, query_offsets)  # type: ignore[no-any-return]


def _check_knn(
    points: Tensor, queries: Tensor, k: int, squared: bool, offsets: Tensor | None, query_offsets: Tensor | None
) -> None:
    c = _check.Checker("knn")
    check_clouds(c, ("points", "queries"), points, queries, offsets, query_offsets, ("offsets", "query_offsets"))
    check_k(c, k)


def _check_three_nn(
    queries: Tensor, points: Tensor, squared: bool, offsets: Tensor | None, query_offsets: Tensor | None
) -> None:
    c = _check.Checker("three_nn")
    check_clouds(c, ("points", "queries"), points, queries, offsets, query_offsets, ("offsets", "query_offsets"))


def _fake_knn(
    points: Tensor, queries: Tensor, k: int, squared: bool, offsets: Tensor | None, query_offsets: Tensor | None
) -> tuple[Tensor, Tensor]:
    shape = (*queries.shape[:-1], k)
    indices = queries.new_empty(shape, dtype=torch.int32)
    return indices, queries.new_empty(shape, dtype=compute_dtype(queries.dtype))


def _fake_three_nn(
    queries: Tensor, points: Tensor, squared: bool, offsets: Tensor | None, query_offsets: Tensor | None
) -> tuple[Tensor, Tensor]:
    indices, distances = _fake_knn(points, queries, 3, squared, offsets, query_offsets)
    return distances, indices


_knn = _op.define(reference.knn, check=_check_knn, fake=_fake_knn)
_three_nn = _op.define(reference.three_nn, check=_check_three_nn, fake=_fake_three_nn)
