"""The specification of three_interpolate and three_interpolate_backward.

An index that is no point counts for nothing, whatever its weight and the gradient.
"""

from __future__ import annotations

import torch
from torch import Tensor

from triops._clouds import check_indices
from triops._dtypes import compute_dtype


def three_interpolate(features: Tensor, indices: Tensor, weights: Tensor, channels_last: bool) -> Tensor:
    """features [B, C, M], indices and weights [B, N, K] -> [B, C, N]; channels_last: [B, M, C] -> [B, N, C]."""
    check_indices("three_interpolate", indices, features.shape[1 if channels_last else 2])
    found, valid = _found(features if channels_last else features.mT, indices)
    out = found.new_zeros((*indices.shape[:2], found.shape[3]))
    for k in range(indices.shape[2]):
        share = torch.where(valid[:, :, k], weights[:, :, k].to(found.dtype), 0)
        out = out + share[..., None] * found[:, :, k]
    out = out.to(features.dtype)
    return out if channels_last else out.mT.contiguous()


def three_interpolate_backward(
    grad_output: Tensor, features: Tensor, indices: Tensor, weights: Tensor, channels_last: bool, of_weights: bool
) -> tuple[Tensor, Tensor]:
    """The gradients of features and of weights; the latter [0] unless `of_weights`, which alone reads features."""
    rows, grad = (t if channels_last else t.mT for t in (features, grad_output))
    check_indices("three_interpolate_backward", indices, rows.shape[1])
    real = compute_dtype(features.dtype)
    (found, valid), grad = _found(rows, indices), grad.to(real)
    grad_rows = torch.zeros_like(rows, dtype=real, memory_format=torch.contiguous_format)
    for cloud, own, index, weight, used in zip(grad_rows, grad, indices, weights, valid, strict=True):
        place, k = used.nonzero(as_tuple=True)
        cloud.index_add_(0, index[used].long(), weight[place, k, None].to(real) * own[place])
    grad_weights = weights.new_empty(0)
    if of_weights:
        grad_weights = torch.where(valid, (found * grad[:, :, None]).sum(3), 0).to(weights.dtype)
    grad_rows = grad_rows.to(features.dtype)
    return grad_rows if channels_last else grad_rows.mT.contiguous(), grad_weights


def _found(rows: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
    """rows [B, M, C], indices [B, N, K] -> [B, N, K, C] in the compute dtype, 0 for an index that is no point; and
    whether it is one"""
    rows = rows.to(compute_dtype(rows.dtype))
    valid = (indices >= 0) & (indices < rows.shape[1])
    if rows.shape[1] == 0:
        return rows.new_zeros((*indices.shape, rows.shape[2])), valid
    batch = torch.arange(len(rows), device=rows.device)[:, None, None]
    return torch.where(valid[..., None], rows[batch, torch.where(valid, indices, 0).long()], 0), valid
