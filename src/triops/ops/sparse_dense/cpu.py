"""Between rows and grids on CPU. Values are copied as bits, so that kernels exist by size of an element alone."""

import numpy as np
import torch

from triops._cpu.intrinsics import prefetch
from triops._cpu.jit import jit
from triops._cpu.memory import as_numpy, in_huge_pages, minus_ones, zeros
from triops._cpu.threads import run
from triops.ops.sparse_dense import as_three, dense_shape

TILE = 256  # sites of so many planes lie in the first-level cache
PLANES = 16  # a line of a row of float32
AHEAD = 16  # rows to prefetch
BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def site_rows(indices, batch_size, spatial_shape):
    rows = minus_ones(batch_size, *spatial_shape, dtype=torch.int32)
    _claim(as_numpy(indices), np.array([batch_size, *spatial_shape], np.int64), rows.view(-1).numpy())
    return rows


def sparse_to_dense(features, rows, channels_first):
    out = torch.empty(dense_shape(rows, features.shape[1], channels_first), dtype=features.dtype)
    in_huge_pages(out)
    batch, sites, channels = as_three(out, rows, channels_first)
    kernel = _to_first if channels_first else _to_last
    shape = (batch, channels, sites) if channels_first else (batch, sites, channels)
    _run(kernel, channels, _bits(features), as_numpy(rows).reshape(batch, sites), _bits(out).reshape(shape))
    return out


def sparse_from_dense(dense, rows, count, channels_first):
    batch, sites, channels = as_three(dense, rows, channels_first)
    out = zeros(count, channels, dtype=dense.dtype)
    kernel = _from_first if channels_first else _from_last
    shape = (batch, channels, sites) if channels_first else (batch, sites, channels)
    _run(kernel, channels, _bits(out), as_numpy(rows).reshape(batch, sites), _bits(dense).reshape(shape))
    return out


def _bits(tensor):
    return as_numpy(tensor.detach().contiguous().view(BITS[tensor.element_size()]))


def _run(kernel, channels, features, rows, dense):
    tiles = rows.shape[0] * -(-rows.shape[1] // TILE)
    run(kernel, tiles, max(1, 100_000 // (TILE * max(channels, 1))), features, rows, dense)


@jit
def _claim(indices, sizes, rows):
    for i in range(indices.shape[0] - 1, -1, -1):  # backwards: the lowest row is the last to write
        flat = np.int64(0)
        inside = True
        for axis in range(sizes.shape[0]):
            place = np.int64(indices[i, axis])
            inside = inside and 0 <= place < sizes[axis]
            flat = flat * sizes[axis] + place
        if inside:
            rows[flat] = i


@jit
def _to_first(begin, end, features, rows, dense):
    tiles = (rows.shape[1] + TILE - 1) // TILE
    sites, sources = np.empty(TILE, np.int64), np.zeros(TILE + AHEAD, np.int64)
    flat, channels = features.reshape(features.size), np.uint64(features.shape[1])
    for tile in range(begin, end):
        b = tile // tiles
        first = (tile % tiles) * TILE
        last = min(first + TILE, rows.shape[1])
        count = _filled(rows[b], first, last, features.shape[0], sites, sources)
        for c in range(0, dense.shape[1], PLANES):
            for k in range(c, min(c + PLANES, dense.shape[1])):
                dense[b, k, first:last] = 0
            if c + PLANES <= dense.shape[1]:
                for i in range(count):
                    prefetch(flat, np.uint64(sources[i + AHEAD]) * channels + np.uint64(c))
                    for k in range(PLANES):
                        dense[b, c + k, sites[i]] = features[sources[i], c + k]
            else:
                for i in range(count):
                    for k in range(c, dense.shape[1]):
                        dense[b, k, sites[i]] = features[sources[i], k]


@jit
def _filled(rows, first, last, count, sites, sources):
    """Which sites of a tile have a row, and which: without a branch, since none could be foreseen."""
    filled = 0
    for site in range(first, last):
        row = rows[site]
        sites[filled], sources[filled] = site, row
        filled += 0 <= row < count
    return filled


@jit
def _to_last(begin, end, features, rows, dense):
    tiles = (rows.shape[1] + TILE - 1) // TILE
    for tile in range(begin, end):
        b = tile // tiles
        first = (tile % tiles) * TILE
        for s in range(first, min(first + TILE, rows.shape[1])):
            row = rows[b, s]
            if 0 <= row < features.shape[0]:
                for c in range(dense.shape[2]):
                    dense[b, s, c] = features[row, c]
            else:
                for c in range(dense.shape[2]):
                    dense[b, s, c] = 0


@jit
def _from_first(begin, end, features, rows, dense):
    tiles = (rows.shape[1] + TILE - 1) // TILE
    sites, sources = np.empty(TILE, np.int64), np.empty(TILE, np.int64)
    for tile in range(begin, end):
        b = tile // tiles
        first = (tile % tiles) * TILE
        last = min(first + TILE, rows.shape[1])
        count = _filled(rows[b], first, last, features.shape[0], sites, sources)
        for c in range(0, dense.shape[1], PLANES):
            if c + PLANES <= dense.shape[1]:
                for i in range(count):
                    for k in range(PLANES):
                        features[sources[i], c + k] = dense[b, c + k, sites[i]]
            else:
                for i in range(count):
                    for k in range(c, dense.shape[1]):
                        features[sources[i], k] = dense[b, k, sites[i]]


@jit
def _from_last(begin, end, features, rows, dense):
    tiles = (rows.shape[1] + TILE - 1) // TILE
    for tile in range(begin, end):
        b = tile // tiles
        first = (tile % tiles) * TILE
        for s in range(first, min(first + TILE, rows.shape[1])):
            row = rows[b, s]
            if 0 <= row < features.shape[0]:
                for c in range(dense.shape[2]):
                    features[row, c] = dense[b, s, c]
