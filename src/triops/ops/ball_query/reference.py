"""The specification of ball_query."""

import torch
from torch import Tensor

from triops._dtypes import compute_dtype
from triops._neighbors import bounds_of, squared_distances


def ball_query(
    points: Tensor, centers: Tensor, radius: float, k: int, min_radius: float, offsets: Tensor | None,
    center_offsets: Tensor | None,
) -> Tensor:  # fmt: skip
    """points [B, N, 3], centers [B, M, 3] -> int32 [B, M, k], indices within the cloud; or [N, 3], [M, 3] -> [M, k],
    rows of points."""
    padded = points.dim() == 3
    begins = bounds_of("ball_query", "offsets", points, offsets)
    own = bounds_of("ball_query", "center_offsets", centers, center_offsets)
    rows, queries = points.reshape(-1, 3), centers.reshape(-1, 3)
    near, far = torch.tensor([min_radius, radius], dtype=compute_dtype(points.dtype), device=points.device).square()
    out = queries.new_full((queries.shape[0], k), 0 if padded else -1, dtype=torch.int32)
    for b in range(len(begins) - 1):
        cloud, mine = rows[begins[b] : begins[b + 1]], queries[own[b] : own[b + 1]]
        count = cloud.shape[0]
        if count == 0:
            continue
        number = torch.arange(count, device=points.device)
        for first, distance in squared_distances(cloud, mine):
            inside = (distance == 0) | ((distance >= near) & (distance < far))
            lowest = torch.where(inside, number, count).topk(min(k, count), largest=False, sorted=True).values
            lowest = torch.nn.functional.pad(lowest, (0, k - lowest.shape[1]), value=count)
            filled = torch.where(lowest < count, lowest, lowest[:, :1])  # with the first
            found = out[own[b] + first : own[b] + first + distance.shape[0]]
            found.copy_(torch.where(filled < count, filled + (0 if padded else begins[b]), found))
    return out.view(*centers.shape[:-1], k)
