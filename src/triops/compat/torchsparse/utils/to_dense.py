"""Rows of features to a dense grid."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

import triops

__all__ = ["to_dense"]


def to_dense(feats: Tensor, coords: Tensor, spatial_range: Sequence[int]) -> Tensor:
    """[B, X, Y, Z, C], zeros where there is no site. Differentiable.

    Args:
        feats: [N, C].
        coords: integers [N, 4]: batch, x, y, z. Sites outside the grid are left out, of equal ones the first stays.
        spatial_range: B, X, Y, Z.
    """
    rows = triops.site_rows(coords.int(), spatial_range[0], list(spatial_range[1:]))
    return triops.sparse_to_dense(feats, rows, channels_first=False)
