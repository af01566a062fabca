"""The specification of maximum and average pooling over the tables of a rulebook."""

import torch
from torch import Tensor

from triops._dtypes import compute_dtype
from triops.ops.rulebook.tables import valid_rows


def sparse_max_pool(features: Tensor, gather: Tensor, scatter: Tensor) -> tuple[Tensor, Tensor]:
    """features [N, C], gather int32 [K, A] -> maximum [A, C], and the offset that it comes from, int32 [A, C].

    The first of equal maxima wins, NaN counts as the largest value. An output that meets no input is 0, from -1.
    Only the gradient reads `scatter` [K, N].
    """
    best = features.new_zeros(gather.shape[1], features.shape[1])
    argmax = torch.full_like(best, -1, dtype=torch.int32)
    for k, rows in enumerate(valid_rows("sparse_max_pool", "gather", gather, features.shape[0])):
        outputs = (rows >= 0).nonzero()[:, 0]
        value, before = features[rows[outputs]], best[outputs]
        wins = (argmax[outputs] < 0) | (value > before) | (value.isnan() & ~before.isnan())
        best[outputs] = torch.where(wins, value, before)
        argmax[outputs] = torch.where(wins, k, argmax[outputs])
    return best, argmax


def sparse_max_pool_backward(grad_output: Tensor, argmax: Tensor, scatter: Tensor) -> Tensor:
    """grad_output [A, C], argmax int32 [A, C], scatter int32 [K, N] -> [N, C]: each gradient goes where its maximum
    came from. An argmax that is no offset gives nothing."""
    wide = compute_dtype(grad_output.dtype)
    grad = torch.zeros(scatter.shape[1], grad_output.shape[1], dtype=wide, device=grad_output.device)
    for k, rows in enumerate(valid_rows("sparse_max_pool_backward", "scatter", scatter, grad_output.shape[0])):
        inputs = (rows >= 0).nonzero()[:, 0]
        outputs = rows[inputs]
        grad[inputs] += torch.where(argmax[outputs] == k, grad_output[outputs].to(wide), 0)
    return grad.to(grad_output.dtype)


def sparse_max_pool_from_zero(features: Tensor, gather: Tensor, scatter: Tensor) -> Tensor:
    """features [N, C], gather int32 [K, A] -> the maximum, but at least 0 [A, C]. Only the gradient reads `scatter`."""
    return sparse_max_pool(features, gather, scatter)[0].clamp(min=0)


def sparse_max_pool_from_zero_backward(
    grad_output: Tensor, features: Tensor, output: Tensor, scatter: Tensor
) -> Tensor:
    """grad_output [A, C], features [N, C], output [A, C], scatter int32 [K, N] -> [N, C]: every input that equals the
    output gets its gradient."""
    wide = compute_dtype(grad_output.dtype)
    grad = torch.zeros(scatter.shape[1], grad_output.shape[1], dtype=wide, device=grad_output.device)
    name = "sparse_max_pool_from_zero_backward"
    for rows in valid_rows(name, "scatter", scatter, grad_output.shape[0]):
        inputs = (rows >= 0).nonzero()[:, 0]
        outputs = rows[inputs]
        grad[inputs] += torch.where(output[outputs] == features[inputs], grad_output[outputs].to(wide), 0)
    return grad.to(grad_output.dtype)


def sparse_avg_pool(features: Tensor, gather: Tensor, scatter: Tensor) -> tuple[Tensor, Tensor]:
    """features [N, C], gather int32 [K, A] -> mean over the inputs that an output meets [A, C], and their number,
    int32 [A]. An output that meets no input is 0. Only the gradient reads `scatter` [K, N]."""
    wide = compute_dtype(features.dtype)
    total = torch.zeros(gather.shape[1], features.shape[1], dtype=wide, device=features.device)
    rows_of = valid_rows("sparse_avg_pool", "gather", gather, features.shape[0])
    for rows in rows_of:
        outputs = (rows >= 0).nonzero()[:, 0]
        total[outputs] += features[rows[outputs]].to(wide)
    count = (rows_of >= 0).sum(0, dtype=torch.int32)
    return (total / count.clamp(min=1)[:, None]).to(features.dtype), count


def sparse_avg_pool_backward(grad_output: Tensor, count: Tensor, scatter: Tensor) -> Tensor:
    """grad_output [A, C], count int32 [A], scatter int32 [K, N] -> [N, C]."""
    wide = compute_dtype(grad_output.dtype)
    share = grad_output.to(wide) / count.clamp(min=1)[:, None]
    grad = torch.zeros(scatter.shape[1], grad_output.shape[1], dtype=wide, device=grad_output.device)
    for rows in valid_rows("sparse_avg_pool_backward", "scatter", scatter, grad_output.shape[0]):
        inputs = (rows >= 0).nonzero()[:, 0]
        grad[inputs] += share[rows[inputs]]
    return grad.to(grad_output.dtype)


def sparse_avg_pool_times_count(features: Tensor, gather: Tensor, scatter: Tensor) -> tuple[Tensor, Tensor]:
    """As `sparse_avg_pool`. The gradient is multiplied by the number where that of the mean is divided by it."""
    return sparse_avg_pool(features, gather, scatter)
