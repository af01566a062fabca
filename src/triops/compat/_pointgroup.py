"""`pointgroup_ops`: how PointGroup makes instances of points that it has moved to where it thinks their centers are.

The compiled functions leave the order of the balls to chance; here it is that of the points.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

import triops

MOST = 1000  # points of a ball, as in the compiled function
AT_ONCE = 2**24  # neighbors in memory


def ballquery_batch_p(
    coords: Tensor, batch_idxs: Tensor, batch_offsets: Tensor, radius: float, meanActive: int
) -> tuple[Tensor, Tensor]:
    """coords [n, 3], batch_offsets [b + 1] -> the points of all balls, int32 [m], and of each ball where its points
    begin and how many there are, int32 [n, 2].

    A ball has the points of the same cloud that are nearer than the radius, the center among them, in ascending
    order: the first 1,000. `batch_idxs` says again what `batch_offsets` says, and `meanActive` sizes the memory of the
    compiled function.
    """
    return balls(coords, coords, batch_offsets, batch_offsets, radius)


def balls(
    points: Tensor, centers: Tensor, offsets: Tensor, center_offsets: Tensor, radius: float
) -> tuple[Tensor, Tensor]:
    """As above, of other points about each center; the offsets [b + 1] say where clouds begin."""
    parts, counts = [points.new_empty(0, dtype=torch.int32)], [points.new_empty(0, dtype=torch.int32)]
    for begin in range(0, len(centers), AT_ONCE // MOST):
        some = centers[begin : begin + AT_ONCE // MOST]
        ends = (center_offsets.long() - begin).clamp(0, len(some))
        found = triops.ball_query(points, some, radius, MOST, offsets=offsets, center_offsets=ends)
        valid = torch.cat([found[:, :1] >= 0, found[:, 1:] > found[:, :-1]], 1)  # behind them is the first again
        parts.append(found[valid])
        counts.append(valid.sum(1, dtype=torch.int32))
    count = torch.cat(counts)
    return torch.cat(parts), torch.stack([count.cumsum(0, dtype=torch.int32) - count, count], 1)


def bfs_cluster(
    semantic_label: Tensor, ball_query_idxs: Tensor, start_len: Tensor, threshold: float
) -> tuple[Tensor, Tensor]:
    """Labels [n] and balls as `ballquery_batch_p` gives them -> (cluster, point), int32 [m, 2], and where the clusters
    begin, int32 [c + 1].

    A cluster grows from its lowest point by the balls of its points, through points of one label, nearest in steps
    first. Those of fewer than `threshold` points are left out.
    """
    label, neighbors = semantic_label.cpu().numpy(), ball_query_idxs.cpu().numpy()
    start, length = start_len.cpu().numpy().astype(np.int64).T
    # Neighbors of other labels never count. Without them, and without itself, most points that lie alone have none.
    center = np.repeat(np.arange(len(label)), length)
    place = np.arange(len(center)) + np.repeat(start - (length.cumsum() - length), length)
    neighbors = neighbors[place]
    kept = (label[neighbors] == label[center]) & (neighbors != center)
    neighbors, length = neighbors[kept], np.bincount(center[kept], minlength=len(label))
    start = length.cumsum() - length

    visited = np.zeros(len(label), dtype=bool)
    clusters = []
    for seed in range(len(label)):
        if visited[seed]:
            continue
        visited[seed] = True
        if length[seed] == 0 and threshold > 1:
            continue
        steps = [np.array([seed])]
        while len(front := steps[-1]):
            count = length[front]
            reached = neighbors[np.arange(count.sum()) + np.repeat(start[front] - (count.cumsum() - count), count)]
            reached = reached[~visited[reached]]
            _, first = np.unique(reached, return_index=True)
            steps.append(reached[np.sort(first)])
            visited[steps[-1]] = True
        cluster = np.concatenate(steps)
        if len(cluster) >= threshold:
            clusters.append(cluster)
    sizes = np.array([len(cluster) for cluster in clusters], dtype=np.int64)
    points = np.concatenate([np.empty(0, dtype=np.int64), *clusters])
    pairs = np.stack([np.repeat(np.arange(len(clusters)), sizes), points], 1)
    offsets = np.concatenate([np.zeros(1, dtype=np.int64), sizes.cumsum()])
    return torch.from_numpy(pairs.astype(np.int32)), torch.from_numpy(offsets.astype(np.int32))
