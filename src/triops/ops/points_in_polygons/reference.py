"""The specification of points_in_polygons."""

import torch
from torch import Tensor

from triops._dtypes import compute_dtype


def points_in_polygons(points: Tensor, polygons: Tensor) -> Tensor:
    """points [N, 2], polygons [M, 8] -> bool [N, M]."""
    real = compute_dtype(points.dtype)
    px, py = points.to(real).unsqueeze(1).unbind(2)  # [N, 1]
    x, y = polygons.to(real).view(-1, 4, 2).unbind(2)  # [M, 4]
    crossings = torch.zeros((points.shape[0], polygons.shape[0]), dtype=torch.int32, device=points.device)
    done = torch.zeros_like(crossings, dtype=torch.bool)  # on a vertex or an edge: later edges do not count
    for i in range(4):
        j = (i + 3) % 4
        sx, sy, tx, ty = x[:, i], y[:, i], x[:, j], y[:, j]
        beside = (py >= torch.minimum(sy, ty)) & (py <= torch.maximum(sy, ty))
        vertex = ((sx == px) & (sy == py)) | ((tx == px) & (ty == py))
        crosses = ((sy < py) & (ty >= py)) | ((sy >= py) & (ty < py))
        at = sx + (py - sy) * (tx - sx) / (ty - sy)
        done |= beside & (vertex | (crosses & (at == px)))
        crossings += beside & ~done & crosses & (at > px)
    finite = points.isfinite().all(1)[:, None] & polygons.isfinite().all(1)
    return finite & (crossings % 2 == 1)
