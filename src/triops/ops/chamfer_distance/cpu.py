"""chamfer_distance on CPU: a tree of bounding boxes per set, searched for the nearest point of each of the other's.

Backward: a thread takes whole sets, so that no two add to one point, and walks their points in order.
"""

import torch

from triops._cpu import neighbors
from triops._cpu.jit import jit
from triops._cpu.memory import as_numpy, zeros
from triops._cpu.threads import run
from triops._dtypes import compute_dtype
from triops.ops.chamfer_distance.reference import check_indices, in_space

POINTS_PER_THREAD = 20_000


def chamfer_distance(xyz1, xyz2):
    real = compute_dtype(xyz1.dtype)
    one, two = (as_numpy(in_space(t.to(real))) for t in (xyz1, xyz2))
    distances = [torch.empty(t.shape[:2], dtype=real) for t in (xyz1, xyz2)]
    indices = [torch.empty(t.shape[:2], dtype=torch.int32) for t in (xyz1, xyz2)]
    for points, queries, index, distance in zip((two, one), (one, two), indices, distances, strict=True):
        for b in range(len(points)):
            tree = neighbors.build(points[b], 0)
            neighbors.nearest(tree, queries[b], *(t[b].numpy().reshape(-1, 1) for t in (index, distance)))
    return *distances, *indices


def chamfer_distance_backward(xyz1, xyz2, idx1, idx2, grad_dist1, grad_dist2):
    check_indices(idx1, xyz2.shape[1])
    check_indices(idx2, xyz1.shape[1])
    real = compute_dtype(xyz1.dtype)
    one, two = (as_numpy(t, real) for t in (xyz1, xyz2))
    grads = [zeros(*t.shape, dtype=real) for t in (xyz1, xyz2)]
    grad1, grad2 = (g.numpy() for g in grads)
    grain = max(1, POINTS_PER_THREAD // max(one.shape[1] + two.shape[1], 1))
    run(_give_back, len(one), grain, one, two, as_numpy(idx1), as_numpy(grad_dist1), grad1, grad2)
    run(_give_back, len(one), grain, two, one, as_numpy(idx2), as_numpy(grad_dist2), grad2, grad1)
    return grads[0].to(xyz1.dtype), grads[1].to(xyz2.dtype)


@jit
def _give_back(begin, end, points, others, index, grad, own, other):
    two = points.dtype.type(2)
    for b in range(begin, end):
        for i in range(points.shape[1]):
            j = index[b, i]
            if j < 0:
                continue
            for axis in range(points.shape[2]):
                pull = two * grad[b, i] * (points[b, i, axis] - others[b, j, axis])
                own[b, i, axis] += pull
                other[b, j, axis] -= pull
