"""A rulebook's tables on CPU. `submanifold_cpu.py` and `strided_cpu.py` find the pairs; here they are laid out."""

import math

import numpy as np
import torch

from triops._cpu.jit import jit
from triops._cpu.memory import as_numpy, in_huge_pages, minus_ones
from triops._cpu.threads import run
from triops.ops.rulebook.geometry import output_shape, refuse_outside_sites
from triops.ops.rulebook.strided_cpu import Candidates
from triops.ops.rulebook.submanifold_cpu import Sweep

SCRATCH = 1 << 28  # int32 places; a wider [K, 2, L] is not taken as scratch, the pairs are counted first instead


def compact_indice_pairs(
    indices, batch_size, spatial_shape, kernel_size, stride, padding, dilation, out_padding, subm, transpose
):
    found = find_pairs(
        indices, batch_size, spatial_shape, kernel_size, stride, padding, dilation, out_padding, subm, transpose
    )
    centre, count = math.prod(kernel_size) // 2, indices.shape[0]
    if subm and centre * 2 * count <= SCRATCH:
        # Memory that is never touched costs nothing: one sweep into the wide form, without counting first.
        start = np.arange(centre) * 2 * count
        swept = start, start + count, np.empty(centre * 2 * count, np.int32)
        offsets = _offsets(found.sweep(*swept))
        pairs = _pairs(offsets)
        found.finish(swept, (offsets[:-1], offsets[:-1] + offsets[-1], pairs.numpy().reshape(-1)))
        return copy_sites(indices), pairs, torch.from_numpy(offsets)
    offsets = _offsets(found.count())
    pairs = _pairs(offsets)
    written = found.write(offsets[:-1], offsets[:-1] + offsets[-1], pairs.numpy().reshape(-1))
    out_indices = copy_sites(indices) if subm else torch.from_numpy(written)
    return out_indices, pairs, torch.from_numpy(offsets)


def _pairs(offsets):
    pairs = torch.empty((2, int(offsets[-1])), dtype=torch.int32)
    in_huge_pages(pairs)
    return pairs


def submanifold_neighbors(indices, batch_size, spatial_shape, kernel_size, dilation):
    one, zero = [1] * len(spatial_shape), [0] * len(spatial_shape)
    _, pairs, offsets = compact_indice_pairs(
        indices, batch_size, spatial_shape, kernel_size, one, zero, dilation, zero, True, False
    )
    return _table(pairs[1], pairs[0], offsets, indices.shape[0])


def sparse_neighbors(
    indices, batch_size, spatial_shape, kernel_size, stride, padding, dilation, out_padding, transpose
):
    out_indices, pairs, offsets = compact_indice_pairs(
        indices, batch_size, spatial_shape, kernel_size, stride, padding, dilation, out_padding, False, transpose
    )
    inputs = _table(pairs[1], pairs[0], offsets, out_indices.shape[0])
    return out_indices, inputs, _table(pairs[0], pairs[1], offsets, indices.shape[0])


def find_pairs(
    indices, batch_size, spatial_shape, kernel_size, stride, padding, dilation, out_padding, subm, transpose
):
    """-> a Sweep or Candidates: `count()` and `write(...)` its pairs."""
    refuse_outside_sites("get_indice_pairs", indices, batch_size, spatial_shape)
    sites = as_numpy(indices)
    if subm:
        return Sweep(sites, batch_size, spatial_shape, kernel_size, dilation)
    shape = output_shape(spatial_shape, kernel_size, stride, padding, dilation, out_padding, subm, transpose)
    return Candidates(
        sites, batch_size, spatial_shape, kernel_size, stride, padding, dilation, shape, transpose
    )  # fmt: skip


def copy_sites(indices):
    return torch.from_numpy(indices.numpy().copy())  # on one thread: see `zeros`


def _offsets(num):
    offsets = np.zeros(len(num) + 1, np.int64)
    np.cumsum(num, out=offsets[1:])
    return offsets


def _table(places, values, offsets, length):
    table = minus_ones(offsets.shape[0] - 1, length)
    grain = max(1, table.shape[0] * 50_000 // max(places.shape[0], 1))
    run(_scatter, table.shape[0], grain, places.numpy(), values.numpy(), offsets.numpy(), table.numpy())
    return table


@jit
def _scatter(begin, end, places, values, offsets, table):
    for k in range(begin, end):
        for j in range(offsets[k], offsets[k + 1]):
            table[k, places[j]] = values[j]
