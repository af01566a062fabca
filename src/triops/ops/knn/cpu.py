"""knn and three_nn on CPU: one tree of bounding boxes per cloud, searched from the nearest box on."""

import numpy as np
import torch

from triops._cpu import neighbors
from triops._cpu.memory import as_numpy
from triops._dtypes import compute_dtype
from triops._neighbors import bounds_of


def knn(points, queries, k, squared, offsets, query_offsets):
    return _nearest("knn", points, queries, k, squared, offsets, query_offsets)


def three_nn(queries, points, squared, offsets, query_offsets):
    indices, distances = _nearest(
        "three_nn", points, queries, 3, squared, offsets, query_offsets, first_for_missing=True
    )
    return distances, indices


def _nearest(operator, points, queries, k, squared, offsets, query_offsets, first_for_missing=False):
    padded, real = points.dim() == 3, compute_dtype(points.dtype)
    begins = bounds_of(operator, "offsets", points, offsets)
    own = bounds_of(operator, "query_offsets", queries, query_offsets)
    rows, others = (as_numpy(t, real).reshape(-1, 3) for t in (points, queries))
    shape = (*queries.shape[:-1], k)
    indices, distances = torch.empty(shape, dtype=torch.int32), torch.empty(shape, dtype=real)
    found, apart = indices.numpy().reshape(-1, k), distances.numpy().reshape(-1, k)
    for b in range(len(begins) - 1):
        first = 0 if padded else begins[b]
        tree = neighbors.build(rows[begins[b] : begins[b + 1]], first)
        mine = slice(own[b], own[b + 1])
        neighbors.nearest(tree, others[mine], found[mine], apart[mine])
        if first_for_missing:
            np.maximum(found[mine], first, out=found[mine])  # -1 is below every index
    if not squared:
        np.sqrt(apart, out=apart)
    return indices, distances
