"""The specification of the sparse convolution and of its weight gradient, over the tables of a rulebook."""

import torch
from torch import Tensor

from triops._activations import activate
from triops._dtypes import compute_dtype
from triops.ops.rulebook.tables import valid_rows


def sparse_conv(
    features: Tensor, weight: Tensor, bias: Tensor | None, gather: Tensor, scatter: Tensor | None, mirrored: bool,
    flip: bool, tile: int, tiles: Tensor | None, transposed_tiles: Tensor | None, pairs: Tensor | None,
    transposed_pairs: Tensor | None,
) -> Tensor:  # fmt: skip
    """features [N, Cin], weight [Cout, *K, Cin], bias [Cout], gather int32 [K, A] -> [A, Cout].

    `out[o] = bias + sum over k of weight[:, k] @ features[gather[k, o]]`, where gather is not -1. With `flip` offset k
    meets `weight[:, K - 1 - k]`. A weight of another dtype is rounded to that of the features. Only the gradient reads
    `scatter` [K, N], the transposed table (output row of input row i) or None, where it works it out, and `mirrored`:
    the transposed table is `gather.flip(0)`.
    The plans (`tiles` and `pairs` of gather, the others of scatter) say the same as the tables; kernels read them.
    """
    weight = weight.flatten(1, -2).to(features.dtype)
    return _sums("sparse_conv", features, weight, bias, gather, flip).to(features.dtype)


def sparse_conv_fused(
    features: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, gather: Tensor, tile: int,
    tiles: Tensor | None, pairs: Tensor | None, activation: str, alpha: float,
) -> Tensor:  # fmt: skip
    """-> activation(sparse_conv(...) + residual [A, Cout]), rounded once to the dtype of the features. No gradient."""
    sums = _sums("sparse_conv_fused", features, weight, bias, gather, False)
    if residual is not None:
        sums += residual.to(sums.dtype)
    return activate(sums, activation, alpha).to(features.dtype)


def _sums(operator: str, features: Tensor, weight: Tensor, bias: Tensor | None, gather: Tensor, flip: bool) -> Tensor:
    """The convolution in the dtype that it is computed in."""
    real = compute_dtype(features.dtype)
    out = torch.zeros(gather.shape[1], weight.shape[0], dtype=real, device=features.device)
    tables = valid_rows(operator, "gather", gather, features.shape[0])
    for rows, matrix in zip(tables, _matrices(weight, flip), strict=True):
        outputs = (rows >= 0).nonzero()[:, 0]
        out[outputs] += features[rows[outputs]].to(real) @ matrix.to(real).t()
    return out if bias is None else out + bias.to(real)


def sparse_conv_backward_weight(
    features: Tensor, grad_output: Tensor, gather: Tensor, scatter: Tensor | None, mirrored: bool, flip: bool,
    pairs: Tensor | None, wide: bool,
) -> Tensor:  # fmt: skip
    """features [N, Cin], grad_output [A, Cout] -> gradient of the weight [Cout, K, Cin] of `sparse_conv`.

    wide: in the dtype that it is summed up in, instead of that of the features.
    """
    real = compute_dtype(features.dtype)
    grad = torch.zeros(grad_output.shape[1], gather.shape[0], features.shape[1], dtype=real, device=features.device)
    tables = valid_rows("sparse_conv_backward_weight", "gather", gather, features.shape[0])
    for rows, matrix in zip(tables, _matrices(grad, flip), strict=True):
        outputs = (rows >= 0).nonzero()[:, 0]
        matrix += grad_output[outputs].to(real).t() @ features[rows[outputs]].to(real)
    return grad if wide else grad.to(features.dtype)


def _matrices(weight: Tensor, flip: bool) -> list[Tensor]:
    """The views [Cout, Cin] of a weight, in the order in which the offsets meet them."""
    matrices = list(weight.unbind(1))
    return matrices[::-1] if flip else matrices
