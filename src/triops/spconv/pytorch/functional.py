"""Names of `spconv.pytorch.functional`: sums of tensors with different sites, and convolutions by lists of pairs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from triops.nn.activation import Activation
from triops.nn.sparse_tensor import SparseConvTensor
from triops.spconv.pytorch import ops
from triops.spconv.pytorch.ops import (
    implicit_gemm,
    indice_avgpool_implicit_gemm,
    indice_maxpool_implicit_gemm,
)


def sparse_add(*tens: SparseConvTensor) -> SparseConvTensor:
    """The sum of sparse tensors of one grid whose sites may differ: a site of any of them is one of the sum.

    Where one of the tensors has all the sites, the sum has them in its order and keeps its rulebooks. Else they ascend
    and no rulebook is known. Rows outside the grid or the batch are left out. Differentiable.

    >>> import torch
    >>> from triops.nn import SparseConvTensor
    >>> a, b = (SparseConvTensor(torch.ones(2, 1), torch.tensor([[0, x], [0, 3]]).int(), [5], 1) for x in (1, 2))
    >>> total = sparse_add(a, b)
    >>> total.indices.tolist(), total.features.tolist()
    ([[0, 1], [0, 2], [0, 3]], [[1.0], [1.0], [2.0]])
    """
    if not tens:
        raise ValueError("sparse_add: expected at least one SparseConvTensor, got none")
    first = tens[0]
    for x in tens[1:]:
        for what in ("spatial_shape", "batch_size"):
            if getattr(x, what) != getattr(first, what):
                raise ValueError(
                    f"sparse_add: tensors must have one {what}, got {getattr(first, what)} and {getattr(x, what)}"
                )
        if x.features.shape[1] != first.features.shape[1]:
            raise ValueError(
                f"sparse_add: tensors must have as many channels, got {first.features.shape[1]} and "
                f"{x.features.shape[1]}"
            )
    sites = torch.cat([x.indices for x in tens])
    features = torch.cat([x.features for x in tens])
    size = torch.tensor([first.batch_size, *first.spatial_shape], device=sites.device)
    inside = ((sites >= 0) & (sites < size)).all(1).nonzero()[:, 0]
    union, place = sites[inside].unique(dim=0, return_inverse=True)
    total = features.new_zeros((union.shape[0], features.shape[1])).index_add(0, place, features[inside])
    begin = 0
    for x in tens:
        rows = (inside >= begin) & (inside < begin + x.indices.shape[0])
        begin += x.indices.shape[0]
        mine = place[rows]
        if len(mine) == len(union) == x.indices.shape[0] and len(mine.unique()) == len(union):
            return x.replace_feature(total[mine])
    return first._with(total, union.to(first.indices.dtype), first.spatial_shape, {})


sparse_add_hash_based = sparse_add


def indice_conv(
    features: Tensor, filters: Tensor, indice_pairs: Tensor, indice_pair_num: Tensor, num_activate_out: int,
    algo: Any = None, timer: Any = None, bias: Tensor | None = None, act_alpha: float = 0.0, act_beta: float = 0.0,
    act_type: Any = Activation.None_,
) -> Tensor:  # fmt: skip
    """See `spconv.pytorch.ops.indice_conv`."""
    return ops.indice_conv(
        features, filters, indice_pairs, indice_pair_num, num_activate_out, bias=bias, act_alpha=act_alpha,
        act_type=act_type,
    )  # fmt: skip


def indice_subm_conv(
    features: Tensor, filters: Tensor, indice_pairs: Tensor, indice_pair_num: Tensor, num_activate_out: int,
    algo: Any = None, timer: Any = None, bias: Tensor | None = None, act_alpha: float = 0.0, act_beta: float = 0.0,
    act_type: Any = Activation.None_,
) -> Tensor:  # fmt: skip
    """See `spconv.pytorch.ops.indice_conv`, with its `subm`."""
    return ops.indice_conv(
        features, filters, indice_pairs, indice_pair_num, num_activate_out, subm=True, bias=bias, act_alpha=act_alpha,
        act_type=act_type,
    )  # fmt: skip


def indice_inverse_conv(
    features: Tensor, filters: Tensor, indice_pairs: Tensor, indice_pair_num: Tensor, num_activate_out: int,
    algo: Any = None, timer: Any = None, bias: Tensor | None = None, act_alpha: float = 0.0, act_beta: float = 0.0,
    act_type: Any = Activation.None_,
) -> Tensor:  # fmt: skip
    """See `spconv.pytorch.ops.indice_conv`, with the pairs read from output to input."""
    return ops.indice_conv(
        features, filters, indice_pairs, indice_pair_num, num_activate_out, inverse=True, bias=bias,
        act_alpha=act_alpha, act_type=act_type,
    )  # fmt: skip


class _MaxPool(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, features: Tensor, indice_pairs: Tensor, indice_pair_num: Tensor, count: int) -> Tensor:
        out = ops.indice_maxpool(features, indice_pairs, indice_pair_num, count)
        ctx.save_for_backward(features, out, indice_pairs, indice_pair_num)
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        features, out, indice_pairs, indice_pair_num = ctx.saved_tensors
        return ops.indice_maxpool_backward(features, out, grad, indice_pairs, indice_pair_num), None, None, None


def indice_maxpool(features: Tensor, indice_pairs: Tensor, indice_pair_num: Tensor, num_activate_out: int) -> Tensor:
    """See `spconv.pytorch.ops.indice_maxpool`; differentiable in features."""
    out: Tensor = _MaxPool.apply(features, indice_pairs, indice_pair_num, num_activate_out)  # type: ignore[no-untyped-call]
    return out


__all__ = [
    "implicit_gemm",
    "indice_avgpool_implicit_gemm",
    "indice_conv",
    "indice_inverse_conv",
    "indice_maxpool",
    "indice_maxpool_implicit_gemm",
    "indice_subm_conv",
    "sparse_add",
    "sparse_add_hash_based",
]
