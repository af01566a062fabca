"""A rulebook's tables and plans on GPU. `submanifold_gpu.py`, `strided_gpu.py` and `plans_gpu.py` hold the kernels."""

import math

import torch

from triops.ops.rulebook.geometry import index_words, refuse_outside_sites
from triops.ops.rulebook.pairs_gpu import padded_pairs
from triops.ops.rulebook.plans_gpu import packed_pairs, row_tiles
from triops.ops.rulebook.strided_gpu import neighbor_tables, output_sites, plan
from triops.ops.rulebook.submanifold_gpu import ranked_table, submanifold_table

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


def submanifold_neighbors(indices, batch_size, spatial_shape, kernel_size, dilation, index):
    refuse_outside_sites("submanifold_neighbors", indices, batch_size, spatial_shape)
    if indices.shape[0] == 0:
        return indices.new_empty((math.prod(kernel_size), 0), dtype=torch.int32)
    sites = indices.contiguous(), batch_size, spatial_shape
    if index is not None and index.numel() > 0:
        return ranked_table(*sites, kernel_size, dilation, index.contiguous())
    return submanifold_table(*sites, kernel_size, dilation)[0]


def sparse_neighbors(
    indices, batch_size, spatial_shape, kernel_size, stride, padding, dilation, out_padding, transpose, owners, indexed,
    both,
):  # fmt: skip
    lists = spatial_shape, kernel_size, stride, padding, dilation, out_padding
    found = _output_sites("sparse_neighbors", indices, batch_size, lists, transpose, owners)
    sites, inputs, outputs, _, index = _tables(found, indices, batch_size, lists, transpose, None, indexed, both)
    return sites, inputs, outputs, index


def capped_neighbors(
    indices, batch_size, spatial_shape, kernel_size, stride, padding, dilation, out_padding, transpose, capacity,
    owners, indexed, both,
):  # fmt: skip
    lists = spatial_shape, kernel_size, stride, padding, dilation, out_padding
    found = _output_sites("capped_neighbors", indices, batch_size, lists, transpose, owners)
    return _tables(found, indices, batch_size, lists, transpose, capacity, indexed, both)


def _output_sites(operator, indices, batch_size, lists, transpose, owners):
    """None where there are no input sites."""
    refuse_outside_sites(operator, indices, batch_size, lists[0])
    if indices.shape[0] == 0:
        return None
    return output_sites(indices.contiguous(), plan(batch_size, *map(tuple, lists), transpose), owners)


def _tables(found, indices, batch_size, lists, transpose, capacity, indexed, both):
    """-> sites, inputs, outputs, their true number, index. Without a capacity this waits for the number of outputs."""
    words = index_words(batch_size, lists, transpose) if indexed else 0
    if found is None:
        volume, rows = math.prod(lists[1]), capacity or 0
        inputs = torch.full((volume, rows), -1, dtype=torch.int32, device=indices.device)
        outputs = inputs.new_empty((volume, 0))
        sites = indices.new_full((rows, indices.shape[1]), -1)
        return sites, inputs, outputs, inputs.new_zeros(1), inputs.new_zeros(words, dtype=torch.int64)
    total = torch.empty(1, dtype=torch.int32, device=indices.device)
    sites, inputs, outputs = neighbor_tables(found, found.count() if capacity is None else capacity, total, both)
    index = found.index if words else torch.empty(0, dtype=torch.int64, device=indices.device)
    return sites, inputs, outputs, total, index
