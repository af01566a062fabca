"""A rulebook's tables on CPU. `submanifold_cpu.py` and `strided_cpu.py` find the pairs; here they are laid out."""

import math

import numpy as np
import torch

from triops._cpu.jit import jit
from triops._cpu.memory import as_numpy, in_huge_pages, minus_ones
from triops._cpu.threads import run
from triops.ops.rulebook.geometry import output_shape, refuse_outside_sites
from triops.ops.rulebook.plans import Pairs, pairs_size
from triops.ops.rulebook.reference import cap, ranked_bitmap, row_tiles  # no CPU kernel reads tiles
from triops.ops.rulebook.strided_cpu import Candidates
from triops.ops.rulebook.submanifold_cpu import Sweep
from triops.ops.rulebook.tables import refuse_rows_outside

__all__ = [
    "capped_neighbors", "compact_indice_pairs", "packed_pairs", "row_tiles", "sparse_neighbors",
    "submanifold_neighbors",
]  # fmt: skip

PACKED = 200_000  # entries of a table, worth a thread
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


def submanifold_neighbors(indices, batch_size, spatial_shape, kernel_size, dilation, index):
    one, zero = [1] * len(spatial_shape), [0] * len(spatial_shape)
    _, pairs, offsets = compact_indice_pairs(
        indices, batch_size, spatial_shape, kernel_size, one, zero, dilation, zero, True, False
    )
    return _table(pairs[1], pairs[0], offsets, indices.shape[0])


def sparse_neighbors(
    indices, batch_size, spatial_shape, kernel_size, stride, padding, dilation, out_padding, transpose, owners, indexed,
    both,
):  # fmt: skip
    out_indices, pairs, offsets = compact_indice_pairs(
        indices, batch_size, spatial_shape, kernel_size, stride, padding, dilation, out_padding, False, transpose
    )
    inputs = _table(pairs[1], pairs[0], offsets, out_indices.shape[0])
    shape = output_shape(spatial_shape, kernel_size, stride, padding, dilation, out_padding, False, transpose)
    index = ranked_bitmap(out_indices, batch_size, shape, indexed)  # for other devices: no CPU kernel reads it
    outputs = _table(pairs[0], pairs[1], offsets, indices.shape[0]) if both else inputs.new_empty((len(inputs), 0))
    return out_indices, inputs, outputs, index


def capped_neighbors(
    indices, batch_size, spatial_shape, kernel_size, stride, padding, dilation, out_padding, transpose, capacity,
    owners, indexed, both,
):  # fmt: skip
    *tables, index = sparse_neighbors(
        indices, batch_size, spatial_shape, kernel_size, stride, padding, dilation, out_padding, transpose, owners,
        indexed, both,
    )  # fmt: skip
    return *cap(tables, capacity), index


def packed_pairs(table, rows):
    return pack("packed_pairs", "table", table, rows)


def pack(operator, name, table, rows):
    """The plan of pairs, for an operator that knows the table by another name."""
    offsets, columns = table.shape
    plan = torch.empty(pairs_size(table), dtype=torch.int32)  # memory that is never touched costs nothing
    in_huge_pages(plan)
    packed, counts = Pairs.of(plan, offsets, columns)
    outside = np.zeros(1, np.uint8)
    grain = max(1, PACKED // max(columns, 1))
    run(_pack, offsets, grain, as_numpy(table), rows, packed.numpy(), counts.numpy(), outside)
    if outside[0]:
        refuse_rows_outside(operator, name, table, rows)
    return plan


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


@jit
def _pack(begin, end, table, rows, packed, counts, outside):
    """The pairs of offsets [begin, end). Without a branch: an entry of -1 is written behind the last pair, and
    overwritten by the next."""
    columns = table.shape[1]
    last = max(columns - 1, 0)
    for k in range(begin, end):
        n, bad = 0, False
        entries, to_columns, to_entries = table[k], packed[k, 0], packed[k, 1]
        for column in range(columns):
            entry = entries[column]
            to_columns[min(n, last)], to_entries[min(n, last)] = column, entry
            n += entry >= 0
            bad |= (entry < -1) | (entry >= rows)
        counts[k] = n
        if bad:
            outside[0] = 1
