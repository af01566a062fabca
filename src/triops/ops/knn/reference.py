"""The specification of knn and three_nn."""

import torch
from torch import Tensor

from triops._dtypes import compute_dtype
from triops._neighbors import bounds_of, squared_distances


def knn(
    points: Tensor, queries: Tensor, k: int, squared: bool, offsets: Tensor | None, query_offsets: Tensor | None
) -> tuple[Tensor, Tensor]:
    """points [B, N, 3], queries [B, M, 3] -> int32 and float [B, M, k], indices within the cloud; or [N, 3], [M, 3] ->
    [M, k], rows of points. -1 and inf where there are no more."""
    return _nearest("knn", points, queries, k, squared, offsets, query_offsets)


def three_nn(
    queries: Tensor, points: Tensor, squared: bool, offsets: Tensor | None, query_offsets: Tensor | None
) -> tuple[Tensor, Tensor]:
    """As `knn` for k = 3, distances first, and the first point of the cloud where there are no more."""
    indices, distances = _nearest("three_nn", points, queries, 3, squared, offsets, query_offsets)
    first = torch.zeros_like(indices)
    if points.dim() == 2:
        begins = bounds_of("three_nn", "offsets", points, offsets)
        own = bounds_of("three_nn", "query_offsets", queries, query_offsets)
        for b in range(len(begins) - 1):
            first[own[b] : own[b + 1]] = begins[b]
    return distances, torch.where(indices < 0, first, indices)


def _nearest(
    operator: str, points: Tensor, queries: Tensor, k: int, squared: bool, offsets: Tensor | None,
    query_offsets: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    begins = bounds_of(operator, "offsets", points, offsets)
    own = bounds_of(operator, "query_offsets", queries, query_offsets)
    rows, others = points.reshape(-1, 3), queries.reshape(-1, 3)
    indices = others.new_full((others.shape[0], k), -1, dtype=torch.int32)
    distances = others.new_full((others.shape[0], k), torch.inf, dtype=compute_dtype(points.dtype))
    for b in range(len(begins) - 1):
        cloud, mine = rows[begins[b] : begins[b + 1]], others[own[b] : own[b + 1]]
        for first, distance in squared_distances(cloud, mine):
            # Stable: of equal distances the lower index is nearer.
            near, index = torch.where(distance.isfinite(), distance, torch.inf).sort(dim=1, stable=True)
            near, index = near[:, :k], index[:, :k] + (0 if points.dim() == 3 else begins[b])
            place = slice(own[b] + first, own[b] + first + distance.shape[0])
            indices[place, : near.shape[1]] = torch.where(near.isfinite(), index, -1).int()
            distances[place, : near.shape[1]] = near
    shape = (*queries.shape[:-1], k)
    return indices.view(shape), (distances if squared else distances.sqrt()).view(shape)
