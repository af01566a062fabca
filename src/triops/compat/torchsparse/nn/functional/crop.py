"""Sites within a box."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from triops.compat.torchsparse.tensor import SparseTensor
from triops.compat.torchsparse.utils.tensor_cache import cache_of_new_tensor

__all__ = ["spcrop"]


def spcrop(
    input: SparseTensor, coords_min: Sequence[int] | None = None, coords_max: Sequence[int] | None = None
) -> SparseTensor:
    """The sites whose x, y and z are at least `coords_min` and below `coords_max`."""
    place = input.coords[:, input.axes]
    kept = torch.ones(place.shape[0], dtype=torch.bool, device=place.device)
    if coords_min is not None:
        kept &= (place >= torch.tensor(list(coords_min), device=place.device)).all(1)
    if coords_max is not None:
        kept &= (place < torch.tensor(list(coords_max), device=place.device)).all(1)
    made = input.like(input.feats[kept], input.coords[kept])
    made._caches = cache_of_new_tensor()
    return made
