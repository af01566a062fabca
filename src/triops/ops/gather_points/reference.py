"""The specification of gather_points and gather_points_backward."""

from __future__ import annotations

import torch
from torch import Tensor

from triops._clouds import check_indices
from triops._dtypes import compute_dtype


def gather_points(features: Tensor, indices: Tensor, channels_last: bool) -> Tensor:
    """features [B, C, N], indices [B, M] -> [B, C, M]; channels_last: [B, N, C] -> [B, M, C]. 0 for index -1."""
    rows = features if channels_last else features.mT
    count = rows.shape[1]
    check_indices("gather_points", indices, count)
    valid = (indices >= 0) & (indices < count)
    if count == 0:
        found = rows.new_zeros((*indices.shape, rows.shape[2]))
    else:
        batch = torch.arange(len(rows), device=rows.device)[:, None]
        found = torch.where(valid[:, :, None], rows[batch, torch.where(valid, indices, 0).long()], 0)
    return found if channels_last else found.mT.contiguous()


def gather_points_backward(grad_output: Tensor, indices: Tensor, count: int, channels_last: bool) -> Tensor:
    """grad_output as the output, indices [B, M] -> the gradient of features with `count` points, summed in order."""
    check_indices("gather_points_backward", indices, count)
    rows = (grad_output if channels_last else grad_output.mT).to(compute_dtype(grad_output.dtype))
    grad = rows.new_zeros((rows.shape[0], count, rows.shape[2]))
    valid = (indices >= 0) & (indices < count)
    for cloud, own, index, used in zip(grad, rows, indices, valid, strict=True):
        cloud.index_add_(0, index[used].long(), own[used])
    grad = grad.to(grad_output.dtype)
    return grad if channels_last else grad.mT.contiguous()
