"""A rulebook's tables and plans on GPU. `submanifold_gpu.py`, `strided_gpu.py` and `plans_gpu.py` hold the kernels."""

import math

import torch

from triops.ops.rulebook.capped_gpu import cap
from triops.ops.rulebook.geometry import refuse_outside_sites
from triops.ops.rulebook.pairs_gpu import padded_pairs, trimmed
from triops.ops.rulebook.plans_gpu import packed_pairs, row_tiles
from triops.ops.rulebook.strided_gpu import invert_table, plan, sparse_table
from triops.ops.rulebook.submanifold_gpu import submanifold_table

__all__ = [
    "capped_neighbors", "compact_indice_pairs", "packed_pairs", "row_tiles", "sparse_neighbors",
    "submanifold_neighbors",
]  # fmt: skip


def compact_indice_pairs(
    indices, batch_size, spatial_shape, kernel_size, stride, padding, dilation, out_padding, subm, transpose
):
    out_indices, pairs, num = padded_pairs(
        indices, batch_size, spatial_shape, kernel_size, stride, padding, dilation, out_padding, subm, transpose
    )
    offsets = torch.zeros(num.shape[0] + 1, dtype=torch.int64, device=num.device)
    torch.cumsum(num, 0, out=offsets[1:])
    return out_indices, pairs.transpose(0, 1)[:, pairs[:, 0] >= 0], offsets


def submanifold_neighbors(indices, batch_size, spatial_shape, kernel_size, dilation):
    refuse_outside_sites("submanifold_neighbors", indices, batch_size, spatial_shape)
    if indices.shape[0] == 0:
        return indices.new_empty((math.prod(kernel_size), 0), dtype=torch.int32)
    return submanifold_table(indices.contiguous(), batch_size, spatial_shape, kernel_size, dilation)[0]


def sparse_neighbors(
    indices, batch_size, spatial_shape, kernel_size, stride, padding, dilation, out_padding, transpose
):
    refuse_outside_sites("sparse_neighbors", indices, batch_size, spatial_shape)
    indices = indices.contiguous()
    if indices.shape[0] == 0:
        nothing = indices.new_empty((math.prod(kernel_size), 0), dtype=torch.int32)
        return torch.empty_like(indices), nothing, nothing.clone()
    lists = spatial_shape, kernel_size, stride, padding, dilation, out_padding
    convolution = plan(batch_size, *map(tuple, lists), transpose)
    sites, total, outputs, *_ = sparse_table(indices, convolution)
    out_indices = trimmed(sites, total.wait())
    return out_indices, invert_table(outputs, out_indices.shape[0]), outputs


def capped_neighbors(
    indices, batch_size, spatial_shape, kernel_size, stride, padding, dilation, out_padding, transpose, capacity
):
    refuse_outside_sites("capped_neighbors", indices, batch_size, spatial_shape)
    indices = indices.contiguous()
    if indices.shape[0] == 0:
        tables = torch.full((math.prod(kernel_size), capacity), -1, dtype=torch.int32, device=indices.device)
        sites = indices.new_full((capacity, indices.shape[1]), -1)
        return sites, tables, tables[:, :0].clone(), tables.new_zeros(1)
    lists = spatial_shape, kernel_size, stride, padding, dilation, out_padding
    convolution = plan(batch_size, *map(tuple, lists), transpose)
    count = torch.empty(1, dtype=torch.int32, device=indices.device)
    sites, _, outputs, *_ = sparse_table(indices, convolution, total=count)
    out_indices, gather = cap(sites, outputs, count, capacity)
    return out_indices, gather, outputs, count
