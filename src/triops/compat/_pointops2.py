"""`pointops2_cuda` of Stratified Transformer, which Pointcept carries too. It fills the tensors that it is given.

Tables are [L, heads, channels, 3]. What the compiled functions take to size their launches is not needed here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from triops._clouds import ends_to_offsets
from triops.compat import pointops
from triops.compat._pair_attention import (
    Points,
    Source,
    Table,
    queries_of,
    scores,
    scores_backward,
    sums,
    sums_backward,
)


def knnquery_cuda(
    m: int, nsample: int, xyz: Tensor, new_xyz: Tensor, offset: Tensor, new_offset: Tensor, idx: Tensor, dist2: Tensor
) -> None:
    """Where a cloud has too few points its first one stands for those that are missing, far away."""
    pointops.knn_query_cuda(m, nsample, xyz, new_xyz, offset, new_offset, idx, dist2)
    begins = ends_to_offsets(offset)[:-1].to(idx.dtype)
    first = begins.repeat_interleave(ends_to_offsets(new_offset).diff().long())
    idx.copy_(torch.where(dist2 < pointops.FAR, idx, first[:, None]))


def attention_step1_forward_cuda(
    N: int, M: int, h: int, C: int, q: Tensor, k: Tensor, index0: Tensor, index1: Tensor, attn: Tensor
) -> None:
    """q [N, h, d], k [N, h, d] -> attn [M, h]."""
    scores([(Points(q, index0), Points(k, index1))], attn)


def attention_step1_backward_cuda(
    N: int, M: int, h: int, C: int, grad_out: Tensor, index0: Tensor, index1: Tensor, q: Tensor, k: Tensor,
    grad_q: Tensor, grad_k: Tensor,
) -> None:  # fmt: skip
    scores_backward([(Points(q, index0), Points(k, index1))], grad_out, [(grad_q, grad_k)])


def attention_step1_forward_cuda_v2(
    N: int, M: int, h: int, C: int, n_max: int, q: Tensor, k: Tensor, index0_offsets: Tensor, index1: Tensor,
    attn: Tensor,
) -> None:  # fmt: skip
    attention_step1_forward_cuda(N, M, h, C, q, k, queries_of(index0_offsets, index1), index1, attn)


def attention_step1_backward_cuda_v2(
    N: int, M: int, h: int, C: int, n_max: int, grad_out: Tensor, index0_offsets: Tensor, index1: Tensor, q: Tensor,
    k: Tensor, grad_q: Tensor, grad_k: Tensor,
) -> None:  # fmt: skip
    index0 = queries_of(index0_offsets, index1)
    attention_step1_backward_cuda(N, M, h, C, grad_out, index0, index1, q, k, grad_q, grad_k)


def attention_step2_forward_cuda(
    N: int, M: int, h: int, C: int, attn: Tensor, v: Tensor, index0: Tensor, index1: Tensor, output: Tensor
) -> None:
    """attn [M, h], v [N, h, d] -> output [N, h, d]."""
    sums(attn, index0, [Points(v, index1)], output)


def attention_step2_backward_cuda(
    N: int, M: int, h: int, C: int, grad_out: Tensor, index0: Tensor, index1: Tensor, attn: Tensor, v: Tensor,
    grad_attn: Tensor, grad_v: Tensor,
) -> None:  # fmt: skip
    sums_backward(attn, index0, [Points(v, index1)], grad_out, grad_attn, [grad_v])


def dot_prod_with_idx_forward_cuda(
    N: int, M: int, h: int, hdim: int, q: Tensor, index: Tensor, table: Tensor, rel_idx: Tensor, output: Tensor
) -> None:
    scores([(Points(q, index), _table(table, rel_idx))], output)


def dot_prod_with_idx_backward_cuda(
    N: int, M: int, h: int, hdim: int, grad_out: Tensor, q: Tensor, index: Tensor, table: Tensor, rel_idx: Tensor,
    grad_q: Tensor, grad_table: Tensor,
) -> None:  # fmt: skip
    scores_backward([(Points(q, index), _table(table, rel_idx))], grad_out, [(grad_q, _by_axis(grad_table))])


def dot_prod_with_idx_forward_cuda_v2(
    N: int, M: int, h: int, hdim: int, n_max: int, T: int, q: Tensor, index_q: Tensor, k: Tensor, index_k: Tensor,
    table_q: Tensor, table_k: Tensor, rel_idx: Tensor, rel_idx_offsets: Tensor, sort_indices: Tensor, output: Tensor,
) -> None:  # fmt: skip
    queries, keys = (Points(q, index_q), _table(table_q, rel_idx)), (Points(k, index_k), _table(table_k, rel_idx))
    scores([queries, keys], output)


def dot_prod_with_idx_backward_cuda_v2(
    N: int, M: int, h: int, hdim: int, n_max: int, T: int, grad_out: Tensor, q: Tensor, index_q: Tensor, k: Tensor,
    index_k: Tensor, table_q: Tensor, table_k: Tensor, rel_idx: Tensor, rel_idx_offsets: Tensor, sort_indices: Tensor,
    grad_q: Tensor, grad_k: Tensor, grad_table_q: Tensor, grad_table_k: Tensor,
) -> None:  # fmt: skip
    queries, keys = (Points(q, index_q), _table(table_q, rel_idx)), (Points(k, index_k), _table(table_k, rel_idx))
    totals = [(grad_q, _by_axis(grad_table_q)), (grad_k, _by_axis(grad_table_k))]
    scores_backward([queries, keys], grad_out, totals)


def dot_prod_with_idx_forward_cuda_v3(
    N: int, M: int, h: int, hdim: int, n_max: int, q: Tensor, index_q_offsets: Tensor, k: Tensor, index_k: Tensor,
    table_q: Tensor, table_k: Tensor, rel_idx: Tensor, output: Tensor,
) -> None:  # fmt: skip
    index_q = queries_of(index_q_offsets, index_k)
    dot_prod_with_idx_forward_cuda_v2(
        N, M, h, hdim, n_max, 0, q, index_q, k, index_k, table_q, table_k, rel_idx, index_q, index_q, output
    )  # fmt: skip


def dot_prod_with_idx_backward_cuda_v3(
    N: int, M: int, h: int, hdim: int, n_max: int, grad_out: Tensor, q: Tensor, index_q_offsets: Tensor, k: Tensor,
    index_k: Tensor, table_q: Tensor, table_k: Tensor, rel_idx: Tensor, grad_q: Tensor, grad_k: Tensor,
    grad_table_q: Tensor, grad_table_k: Tensor,
) -> None:  # fmt: skip
    index_q = queries_of(index_q_offsets, index_k)
    dot_prod_with_idx_backward_cuda_v2(
        N, M, h, hdim, n_max, 0, grad_out, q, index_q, k, index_k, table_q, table_k, rel_idx, index_q, index_q, grad_q,
        grad_k, grad_table_q, grad_table_k,
    )  # fmt: skip


def attention_step2_with_rel_pos_value_forward_cuda(
    N: int, M: int, h: int, hdim: int, attn: Tensor, v: Tensor, index0: Tensor, index1: Tensor, table: Tensor,
    rel_idx: Tensor, output: Tensor,
) -> None:  # fmt: skip
    sums(attn, index0, [Points(v, index1), _table(table, rel_idx)], output)


def attention_step2_with_rel_pos_value_backward_cuda(
    N: int, M: int, h: int, hdim: int, grad_out: Tensor, index0: Tensor, index1: Tensor, attn: Tensor, v: Tensor,
    table: Tensor, rel_idx: Tensor, grad_attn: Tensor, grad_v: Tensor, grad_table: Tensor,
) -> None:  # fmt: skip
    sources: list[Source] = [Points(v, index1), _table(table, rel_idx)]
    sums_backward(attn, index0, sources, grad_out, grad_attn, [grad_v, _by_axis(grad_table)])


def attention_step2_with_rel_pos_value_forward_cuda_v2(
    N: int, M: int, h: int, hdim: int, n_max: int, attn: Tensor, v: Tensor, index0_offsets: Tensor, index1: Tensor,
    table: Tensor, rel_idx: Tensor, output: Tensor,
) -> None:  # fmt: skip
    index0 = queries_of(index0_offsets, index1)
    attention_step2_with_rel_pos_value_forward_cuda(N, M, h, hdim, attn, v, index0, index1, table, rel_idx, output)


def attention_step2_with_rel_pos_value_backward_cuda_v2(
    N: int, M: int, h: int, hdim: int, n_max: int, grad_out: Tensor, index0_offsets: Tensor, index1: Tensor,
    attn: Tensor, v: Tensor, table: Tensor, rel_idx: Tensor, grad_attn: Tensor, grad_v: Tensor, grad_table: Tensor,
) -> None:  # fmt: skip
    attention_step2_with_rel_pos_value_backward_cuda(
        N, M, h, hdim, grad_out, queries_of(index0_offsets, index1), index1, attn, v, table, rel_idx, grad_attn, grad_v,
        grad_table,
    )  # fmt: skip


def _table(table: Tensor, rel_idx: Tensor) -> Table:
    return Table(_by_axis(table), rel_idx)


def _by_axis(table: Tensor) -> Tensor:
    return table.permute(0, 3, 1, 2)


FUNCTIONS: dict[str, Callable[..., Any]] = {
    function.__name__: function
    for function in (
        knnquery_cuda, attention_step1_forward_cuda, attention_step1_backward_cuda, attention_step1_forward_cuda_v2,
        attention_step1_backward_cuda_v2, attention_step2_forward_cuda, attention_step2_backward_cuda,
        dot_prod_with_idx_forward_cuda, dot_prod_with_idx_backward_cuda, dot_prod_with_idx_forward_cuda_v2,
        dot_prod_with_idx_backward_cuda_v2, dot_prod_with_idx_forward_cuda_v3, dot_prod_with_idx_backward_cuda_v3,
        attention_step2_with_rel_pos_value_forward_cuda, attention_step2_with_rel_pos_value_backward_cuda,
        attention_step2_with_rel_pos_value_forward_cuda_v2, attention_step2_with_rel_pos_value_backward_cuda_v2,
        pointops.grouping_forward_cuda, pointops.grouping_backward_cuda, pointops.interpolation_forward_cuda,
        pointops.interpolation_backward_cuda, pointops.subtraction_forward_cuda, pointops.subtraction_backward_cuda,
        pointops.aggregation_forward_cuda, pointops.aggregation_backward_cuda,
    )
} | {
    "furthestsampling_cuda": pointops.farthest_point_sampling_cuda,
    "attention_step2_forward_cuda_v2": attention_step2_forward_cuda,
    "attention_step2_backward_cuda_v2": attention_step2_backward_cuda,
}  # fmt: skip
