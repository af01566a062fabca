"""ball_query: the points around each center, lowest indices first (PointNet++)."""

from __future__ import annotations

import torch
from torch import Tensor

from triops import _check, _op
from triops._neighbors import check_clouds, check_k
from triops.ops.ball_query import reference


def ball_query(
    points: Tensor, centers: Tensor, radius: float, k: int, *, min_radius: float = 0.0, offsets: Tensor | None = None,
    center_offsets: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Indices of up to k points within a radius of each center: the lowest indices, ascending, filled with the first.

    A point is within when its squared distance d2 is 0 or `min_radius**2 <= d2 < radius**2`, in float32 (float64 for
    float64). A point or a center that is not finite has no neighbors.

    Args:
        points: float tensor [B, N, 3], or ragged [N, 3]: clouds behind one another.
        centers: tensor [B, M, 3] or [M, 3] of the same dtype.
        radius: of the balls, more than 0.
        k: indices per center, 1 to 4096.
        min_radius: leaves out points nearer than this, except those at the center itself.
        offsets: int32 or int64 tensor [B + 1], for ragged points: cloud b is rows offsets[b] to offsets[b + 1] - 1.
            Without it [N, 3] is one cloud.
        center_offsets: likewise for the centers.

    Returns:
        int32 tensor [B, M, k] of indices within the cloud, or for ragged points [M, k] of rows of `points`.
        A center without neighbors has k zeros in a padded batch and k times -1 in a ragged one.

    Raises:
        ValueError, TypeError: on a wrong shape, dtype, device, radius or k.
        IndexError: when offsets do not ascend from 0 to the number of rows. On a GPU they are clamped instead, unless
            TRIOPS_CHECK=1 asks for the error there too.

    >>> import torch, triops
    >>> points = torch.tensor([[[0.0, 0, 0], [5, 0, 0], [0.5, 0, 0]]])
    >>> triops.ball_query(points, points[:, :2], radius=1.0, k=3)
    tensor([[[0, 2, 0],
             [1, 1, 1]]], dtype=torch.int32)
    """
    return _ball_query(  # type: ignore[no-any-return]
        points, centers, radius, k, min_radius, offsets, center_offsets
    )


def _check_call(
    points: Tensor, centers: Tensor, radius: float, k: int, min_radius: float, offsets: Tensor | None,
    center_offsets: Tensor | None,
) -> None:  # fmt: skip
    c = _check.Checker("ball_query")
    check_clouds(c, ("points", "centers"), points, centers, offsets, center_offsets, ("offsets", "center_offsets"))
    c.finite("radius", radius)
    if not radius > 0:
        c.fail(f"radius must be more than 0, got {radius}")
    if not 0 <= min_radius <= radius:
        c.fail(f"min_radius must be from 0 to the radius, {radius}, got {min_radius}")
    check_k(c, k)


def _fake(
    points: Tensor, centers: Tensor, radius: float, k: int, min_radius: float, offsets: Tensor | None,
    center_offsets: Tensor | None,
) -> Tensor:  # fmt: skip
    return centers.new_empty((*centers.shape[:-1], k), dtype=torch.int32)


_ball_query = _op.define(reference.ball_query, check=_check_call, fake=_fake)
