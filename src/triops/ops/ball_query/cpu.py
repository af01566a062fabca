"""ball_query on CPU: one tree of bounding boxes per cloud, of which a search visits the boxes that a ball touches."""

import torch

from triops._cpu import neighbors
from triops._cpu.jit import jit
from triops._cpu.memory import as_numpy
from triops._dtypes import compute_dtype
from triops._neighbors import bounds_of


def ball_query(points, centers, radius, k, min_radius, offsets, center_offsets):
    padded, real = points.dim() == 3, compute_dtype(points.dtype)
    begins = bounds_of("ball_query", "offsets", points, offsets)
    own = bounds_of("ball_query", "center_offsets", centers, center_offsets)
    rows, queries = (as_numpy(t, real).reshape(-1, 3) for t in (points, centers))
    near, far = torch.tensor([min_radius, radius], dtype=real).square().numpy()
    out = torch.empty((len(queries), k), dtype=torch.int32)
    indices = out.numpy()
    for b in range(len(begins) - 1):
        tree = neighbors.build(rows[begins[b] : begins[b + 1]], 0 if padded else begins[b])
        mine = slice(own[b], own[b + 1])
        neighbors.in_ball(tree, queries[mine], near, far, indices[mine])
    _fill(indices, 0 if padded else -1)
    return out.view(*centers.shape[:-1], k)


@jit
def _fill(indices, none):
    """With the first of each row; rows without one with `none`."""
    for q in range(indices.shape[0]):
        first = indices[q, 0] if indices[q, 0] >= 0 else none
        for slot in range(indices.shape[1]):
            if indices[q, slot] < 0:
                indices[q, slot] = first
