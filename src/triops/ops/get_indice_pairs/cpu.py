"""The rulebook on CPU. `submanifold/cpu.py` and `strided/cpu.py` find the pairs; here they are laid out."""

import math

import numpy as np
import torch

from triops._launch import as_numpy, in_huge_pages, jit, minus_ones, run
from triops.ops.get_indice_pairs.geometry import output_shape, refuse_outside_sites
from triops.ops.get_indice_pairs.strided.cpu import Candidates
from triops.ops.get_indice_pairs.submanifold.cpu import Sweep

SCRATCH = 1 << 28  # int32 places; a wider [K, 2, L] is not taken as scratch, the pairs are counted first instead


def get_indice_pairs(
    indices, batch_size, spatial_shape, kernel_size, stride, padding, dilation, out_padding, subm, transpose
):
    found = _find(
        indices, batch_size, spatial_shape, kernel_size, stride, padding, dilation, out_padding, subm, transpose
    )
    volume, count = math.prod(kernel_size), indices.shape[0]
    pairs = torch.empty((volume, 2, count), dtype=torch.int32)
    in_huge_pages(pairs)
    start = np.arange(volume) * 2 * count
    flat = pairs.numpy().reshape(-1)
    if subm:
        out_indices, num = _copy(indices), found.write(start, start + count, flat)
    else:
        num = found.count().astype(np.int32)
        out_indices = torch.from_numpy(found.write(start, start + count, flat))
    run(_fill_tails, volume, max(1, 200_000 // max(count, 1)), num, flat, count)
    return out_indices, pairs, torch.from_numpy(num)


def compact_indice_pairs(
    indices, batch_size, spatial_shape, kernel_size, stride, padding, dilation, out_padding, subm, transpose
):
    found = _find(
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
        return _copy(indices), pairs, torch.from_numpy(offsets)
    offsets = _offsets(found.count())
    pairs = _pairs(offsets)
    written = found.write(offsets[:-1], offsets[:-1] + offsets[-1], pairs.numpy().reshape(-1))
    out_indices = _copy(indices) if subm else torch.from_numpy(written)
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


def _find(indices, batch_size, spatial_shape, kernel_size, stride, padding, dilation, out_padding, subm, transpose):
    refuse_outside_sites("get_indice_pairs", indices, batch_size, spatial_shape)
    sites = as_numpy(indices)
    if subm:
        return Sweep(sites, batch_size, spatial_shape, kernel_size, dilation)
    shape = output_shape(spatial_shape, kernel_size, stride, padding, dilation, out_padding, subm, transpose)
    return Candidates(
        sites, batch_size, spatial_shape, kernel_size, stride, padding, dilation, shape, transpose
    )  # fmt: skip


def _copy(indices):
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
def _fill_tails(begin, end, num, flat, count):
    for k in range(begin, end):
        flat[2 * k * count + num[k] : (2 * k + 1) * count] = -1
        flat[(2 * k + 1) * count + num[k] : (2 * k + 2) * count] = -1


@jit
def _scatter(begin, end, places, values, offsets, table):
    for k in range(begin, end):
        for j in range(offsets[k], offsets[k + 1]):
            table[k, places[j]] = values[j]
