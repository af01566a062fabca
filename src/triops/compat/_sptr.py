"""`sptr_cuda` of SparseTransformer, on which SphereFormer stands. It fills the tensors that it is given.

Points of a window attend to each other. The compiled functions read some operands transposed, points last.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

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


def precompute_all_cuda(
    N: int, n: int, n_max: int, counts: Tensor, offsets: Tensor, sq_offsets: Tensor, index_0_offsets: Tensor,
    index_1_offsets: Tensor, index_0: Tensor, index_1: Tensor,
) -> None:  # fmt: skip
    """All pairs of points of each of n windows, whose points are in a row: counts [n], where their points begin and
    where their pairs begin -> the first pair of each point as query and as key, [N], and the points of each pair."""
    length = counts.long().repeat_interleave(counts.long())  # of each point's window
    window = torch.arange(len(counts), device=counts.device).repeat_interleave(counts.long())
    begin, first = offsets[window].long(), sq_offsets[window].long()
    place = torch.arange(len(window), device=counts.device) - begin
    index_0_offsets[: len(window)] = first + length * place
    index_1_offsets[: len(window)] = first + place
    query = torch.arange(len(window), device=counts.device).repeat_interleave(length)
    index_0[: len(query)] = query
    index_1[: len(query)] = torch.arange(len(query), device=counts.device) - (first + length * place - begin)[query]


def attention_step1_forward_cuda(
    N_q: int, N_k: int, M: int, h: int, hdim: int, n_max: int, q: Tensor, k: Tensor, index0: Tensor, index1: Tensor,
    attn: Tensor,
) -> None:  # fmt: skip
    """q [h, d, N], k [h, d, N] -> attn [h, M]."""
    scores([(Points(_rows(q), index0), Points(_rows(k), index1))], attn.t())


def attention_step1_backward_cuda(
    N: int, M: int, h: int, hdim: int, n_max: int, grad_out: Tensor, index0: Tensor, index0_offsets: Tensor,
    index1: Tensor, index1_offsets: Tensor, q: Tensor, k: Tensor, grad_q: Tensor, grad_k: Tensor,
) -> None:  # fmt: skip
    """grad_out [M, h], q [N, h, d], k [N, h, d]."""
    scores_backward([(Points(q, index0), Points(k, index1))], grad_out, [(grad_q, grad_k)])


def attention_step2_forward_cuda(
    N: int, M: int, h: int, hdim: int, n_max: int, attn: Tensor, v: Tensor, index0_offsets: Tensor, index1: Tensor,
    output: Tensor,
) -> None:  # fmt: skip
    """attn [M, h], v [N, h, d] -> output [N, h, d]."""
    sums(attn, queries_of(index0_offsets, index1), [Points(v, index1)], output)


def attention_step2_backward_cuda(
    N: int, M: int, h: int, hdim: int, n_max: int, grad_out: Tensor, index0: Tensor, index0_offsets: Tensor,
    index1: Tensor, index1_offsets: Tensor, attn: Tensor, v: Tensor, grad_attn: Tensor, grad_v: Tensor,
) -> None:  # fmt: skip
    """grad_out [N, h, d], v [h, d, N]. The compiled function reads grad_out as if points were last, and writes
    grad_attn [M, h] as [h, M]; here it is the gradient."""
    sums_backward(attn, index0, [Points(_rows(v), index1)], grad_out, grad_attn, [grad_v])


def dot_prod_with_idx_forward_cuda(
    N: int, M: int, h: int, hdim: int, n_max: int, L: int, q: Tensor, index_q: Tensor, index_q_offsets: Tensor,
    k: Tensor, index_k: Tensor, table_q: Tensor, table_k: Tensor, rel_idx: Tensor, output: Tensor,
) -> None:  # fmt: skip
    """q [h, d, N], k [h, d, N], tables [h, d, 3, L], rel_idx [3, M] -> output [h, M]."""
    queries, keys = Points(_rows(q), index_q), Points(_rows(k), index_k)
    tables = _table(table_q, rel_idx), _table(table_k, rel_idx)
    scores([(queries, tables[0]), (keys, tables[1])], output.t())


def dot_prod_with_idx_all_forward_cuda(
    N: int, M: int, h: int, hdim: int, n_max: int, L: int, q: Tensor, index_q: Tensor, index_q_offsets: Tensor,
    k: Tensor, index_k: Tensor, table_q: Tensor, table_k: Tensor, rel_idx: Tensor, output: Tensor,
) -> None:  # fmt: skip
    """As above, and queries times keys."""
    queries, keys = Points(_rows(q), index_q), Points(_rows(k), index_k)
    tables = _table(table_q, rel_idx), _table(table_k, rel_idx)
    scores([(queries, keys), (queries, tables[0]), (keys, tables[1])], output.t())


def dot_prod_with_idx_backward_cuda(
    N: int, M: int, h: int, hdim: int, n_max: int, L: int, grad_out: Tensor, q: Tensor, index_q_offsets: Tensor,
    k: Tensor, index_k_offsets: Tensor, index_k: Tensor, table_q: Tensor, table_k: Tensor, rel_idx: Tensor,
    grad_q: Tensor, grad_k: Tensor, grad_table_q: Tensor, grad_table_k: Tensor,
) -> None:  # fmt: skip
    """grad_out [M, h], q [N, h, d], k [N, h, d], tables [L, 3, h, d], rel_idx [M, 3]."""
    queries, keys = Points(q, queries_of(index_q_offsets, index_k)), Points(k, index_k)
    products = [(queries, Table(table_q, rel_idx)), (keys, Table(table_k, rel_idx))]
    scores_backward(products, grad_out, [(grad_q, grad_table_q), (grad_k, grad_table_k)])


def attention_step2_with_rel_pos_value_forward_cuda(
    N: int, M: int, h: int, hdim: int, n_max: int, attn: Tensor, v: Tensor, index0_offsets: Tensor, index1: Tensor,
    table: Tensor, rel_idx: Tensor, output: Tensor,
) -> None:  # fmt: skip
    """attn [M, h], v [N, h, d], table [L, 3, h, d], rel_idx [M, 3] -> output [N, h, d]."""
    sums(attn, queries_of(index0_offsets, index1), [Points(v, index1), Table(table, rel_idx)], output)


def attention_step2_with_rel_pos_value_backward_cuda(
    N: int, M: int, h: int, hdim: int, L: int, n_max: int, grad_out: Tensor, index0: Tensor, index0_offsets: Tensor,
    index1: Tensor, index1_offsets: Tensor, attn: Tensor, v: Tensor, table: Tensor, rel_idx: Tensor, grad_attn: Tensor,
    grad_v: Tensor, grad_table: Tensor,
) -> None:  # fmt: skip
    """grad_out [N, h, d], v [h, d, N], table [h, d, 3, L], rel_idx [3, M]; grad_table [L, 3, h, d]."""
    sources: list[Source] = [Points(_rows(v), index1), _table(table, rel_idx)]
    sums_backward(attn, index0, sources, grad_out, grad_attn, [grad_v, grad_table])


def _rows(transposed: Tensor) -> Tensor:
    return transposed.permute(2, 0, 1).contiguous()


def _table(transposed: Tensor, rel_idx: Tensor) -> Table:
    return Table(transposed.permute(3, 2, 0, 1).contiguous(), rel_idx.t())


FUNCTIONS: dict[str, Callable[..., Any]] = {
    function.__name__: function
    for function in (
        precompute_all_cuda, attention_step1_forward_cuda, attention_step1_backward_cuda, attention_step2_forward_cuda,
        attention_step2_backward_cuda, dot_prod_with_idx_forward_cuda, dot_prod_with_idx_all_forward_cuda,
        dot_prod_with_idx_backward_cuda, attention_step2_with_rel_pos_value_forward_cuda,
        attention_step2_with_rel_pos_value_backward_cuda,
    )
}  # fmt: skip
