"""The specification of site_rows, sparse_to_dense and sparse_from_dense."""

import math

import torch
from torch import Tensor


def site_rows(indices: Tensor, batch_size: int, spatial_shape: list[int]) -> Tensor:
    """indices [N, 1 + D] -> int32 [batch_size, *spatial_shape]: the lowest row that names a site, or -1."""
    sizes = [batch_size, *spatial_shape]
    sites = math.prod(sizes)
    flat = torch.zeros(indices.shape[0], dtype=torch.int64, device=indices.device)
    inside = torch.ones_like(flat, dtype=torch.bool)
    for axis, size in enumerate(sizes):
        place = indices[:, axis].long()
        inside &= (place >= 0) & (place < size)
        flat = flat * size + place
    numbers = torch.arange(len(flat), device=flat.device)[inside]
    none = len(flat)
    lowest = torch.full((sites,), none, device=flat.device).scatter_reduce(0, flat[inside], numbers, "amin")
    return torch.where(lowest == none, -1, lowest).int().view(sizes)


def sparse_to_dense(features: Tensor, rows: Tensor, channels_first: bool) -> Tensor:
    """features [N, C], rows [B, *spatial] -> [B, C, *spatial], or [B, *spatial, C]."""
    named = (rows >= 0) & (rows < features.shape[0])
    dense = features.new_zeros((*rows.shape, features.shape[1]))
    dense[named] = features[rows[named].long()]
    return dense.movedim(-1, 1).contiguous() if channels_first else dense


def sparse_from_dense(dense: Tensor, rows: Tensor, count: int, channels_first: bool) -> Tensor:
    """dense [B, C, *spatial] or [B, *spatial, C], rows [B, *spatial] -> [count, C]: zeros where a row has no site."""
    values = dense.movedim(1, -1) if channels_first else dense
    named = (rows >= 0) & (rows < count)
    features = dense.new_zeros((count, values.shape[-1]))
    features[rows[named].long()] = values[named]
    return features
