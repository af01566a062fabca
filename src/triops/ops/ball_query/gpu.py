"""ball_query on GPU: points sorted into chunks with bounding boxes; a warp per center visits those its ball touches."""

import torch

from triops import _check
from triops._clouds import check_ascending
from triops._gpu import neighbors


def ball_query(points, centers, radius, k, min_radius, offsets, center_offsets):
    if _check.strict() and offsets is not None:
        check_ascending("ball_query", "offsets", offsets, points.shape[0])
        check_ascending("ball_query", "center_offsets", center_offsets, centers.shape[0])
    out = torch.empty((*centers.shape[:-1], k), dtype=torch.int32, device=centers.device)
    neighbors.search(
        neighbors.BALL, neighbors.Clouds.of(points, offsets), neighbors.Clouds.of(centers, center_offsets), k, out,
        near=min_radius, far=radius, none=0 if points.dim() == 3 else -1,
    )  # fmt: skip
    return out
