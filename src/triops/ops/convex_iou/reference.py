"""The specification of convex_iou."""

from torch import Tensor

from triops._geometry.polygon.reference import make_polygons, overlap


def convex_iou(pointsets: Tensor, polygons: Tensor, mode: str, aligned: bool) -> Tensor:
    """pointsets [N, 2K], polygons [M, 2L] -> [N, M], or [N] when aligned."""
    first, second = make_polygons(pointsets), make_polygons(polygons)
    return overlap(first if aligned else first.rows(), second, mode).to(pointsets.dtype)
