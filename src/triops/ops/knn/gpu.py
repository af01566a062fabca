"""knn and three_nn on GPU: points sorted into chunks with bounding boxes; a warp per query visits the nearest first."""

import torch

from triops import _check
from triops._clouds import check_ascending
from triops._dtypes import compute_dtype
from triops._gpu import neighbors


def knn(points, queries, k, squared, offsets, query_offsets):
    return _nearest("knn", neighbors.NEAREST, points, queries, k, squared, offsets, query_offsets)


def three_nn(queries, points, squared, offsets, query_offsets):
    indices, distances = _nearest("three_nn", neighbors.THREE, points, queries, 3, squared, offsets, query_offsets)
    return distances, indices


def _nearest(operator, kind, points, queries, k, squared, offsets, query_offsets):
    if _check.strict() and offsets is not None:
        check_ascending(operator, "offsets", offsets, points.shape[0])
        check_ascending(operator, "query_offsets", query_offsets, queries.shape[0])
    shape = (*queries.shape[:-1], k)
    indices = torch.empty(shape, dtype=torch.int32, device=queries.device)
    distances = torch.empty(shape, dtype=compute_dtype(queries.dtype), device=queries.device)
    neighbors.search(
        kind, neighbors.Clouds.of(points, offsets), neighbors.Clouds.of(queries, query_offsets), k, indices, distances,
        root=not squared,
    )  # fmt: skip
    return indices, distances
