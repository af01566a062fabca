"""The specification of a rulebook's tables: which input site meets which output site under which kernel offset."""

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from triops.ops.rulebook.geometry import bitmap_words, output_shape, refuse_outside_sites, submanifold_padding
from triops.ops.rulebook.plans import Pairs, Tiles, offset_order, pairs_size, tiles_size
from triops.ops.rulebook.tables import valid_rows


def compact_indice_pairs(
    indices: Tensor, batch_size: int, spatial_shape: list[int], kernel_size: list[int], stride: list[int],
    padding: list[int], dilation: list[int], out_padding: list[int], subm: bool, transpose: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """-> out_indices [A, 1 + D], pairs int32 [2, P], offsets int64 [K + 1]: where the pairs of each offset begin."""
    out_indices, pairs = find_pairs(
        indices, batch_size, spatial_shape, kernel_size, stride, padding, dilation, out_padding, subm, transpose
    )
    packed = torch.stack([torch.cat([p[side] for p in pairs]) for side in (0, 1)]).int()
    offsets = torch.tensor([0, *(len(inputs) for inputs, _ in pairs)], device=indices.device).cumsum(0)
    return out_indices, packed, offsets


def submanifold_neighbors(
    indices: Tensor, batch_size: int, spatial_shape: list[int], kernel_size: list[int], dilation: list[int],
    index: Tensor | None,
) -> Tensor:  # fmt: skip
    """-> int32 [K, L]: the input row that meets output row o under offset k, or -1.

    The index, a ranked bitmap as `sparse_neighbors` makes it, says the same as the sites; kernels read it.
    """
    one, zero = [1] * len(spatial_shape), [0] * len(spatial_shape)
    _, pairs = find_pairs(indices, batch_size, spatial_shape, kernel_size, one, zero, dilation, zero, True, False)
    return _table([(outputs, inputs) for inputs, outputs in pairs], len(indices), indices)


def sparse_neighbors(
    indices: Tensor, batch_size: int, spatial_shape: list[int], kernel_size: list[int], stride: list[int],
    padding: list[int], dilation: list[int], out_padding: list[int], transpose: bool, owners: Tensor | None,
    indexed: bool, both: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """-> out_indices [A, 1 + D], inputs int32 [K, A] (the input row of an output row, or -1), outputs int32 [K, L], and
    with `indexed` the ranked bitmap of the outputs, int64 [words]: see `ranked_bitmap`. Without `both` there are no
    `outputs`: int32 [K, 0].

    The owners int32 [L] (the row that stands for each row's site, or -1) say the same as the sites; kernels read them.
    """
    out_indices, pairs = find_pairs(
        indices, batch_size, spatial_shape, kernel_size, stride, padding, dilation, out_padding, False, transpose
    )
    inputs_of = _table([(outputs, inputs) for inputs, outputs in pairs], len(out_indices), indices)
    shape = output_shape(spatial_shape, kernel_size, stride, padding, dilation, out_padding, False, transpose)
    index = ranked_bitmap(out_indices, batch_size, shape, indexed)
    outputs_of = _table(pairs, len(indices), indices) if both else inputs_of.new_empty((len(pairs), 0))
    return out_indices, inputs_of, outputs_of, index


def ranked_bitmap(sites: Tensor, batch_size: int, shape: list[int], indexed: bool = True) -> Tensor:
    """Ascending sites [A, 1 + D] of a grid -> int64 [words]: of every 32 places, active ones before << 32 | bits.

    Empty where no index is wanted, or the grid is too large for one.
    """
    words = bitmap_words(batch_size, shape) if indexed else 0
    ranks = torch.zeros(words, dtype=torch.int64, device=sites.device)
    if words == 0:
        return ranks
    keys = _flatten(sites[:, 0].long(), sites[:, 1:].long(), shape)
    ranks.scatter_add_(0, keys >> 5, 1 << (keys & 31))
    active = torch.zeros_like(ranks).scatter_add_(0, keys >> 5, torch.ones_like(keys))
    return ((active.cumsum(0) - active) << 32) | ranks


def capped_neighbors(
    indices: Tensor, batch_size: int, spatial_shape: list[int], kernel_size: list[int], stride: list[int],
    padding: list[int], dilation: list[int], out_padding: list[int], transpose: bool, capacity: int,
    owners: Tensor | None, indexed: bool, both: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """`sparse_neighbors` with exactly `capacity` output rows -> out_indices [capacity, 1 + D], inputs int32
    [K, capacity], outputs int32 [K, L], the true number of outputs int32 [1], and the index, of all of them."""
    *tables, index = sparse_neighbors(
        indices, batch_size, spatial_shape, kernel_size, stride, padding, dilation, out_padding, transpose, owners,
        indexed, both,
    )  # fmt: skip
    return *cap(tables, capacity), index


def cap(tables: Sequence[Tensor], capacity: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Rows behind the true number are inactive: -1 everywhere; outputs behind the capacity are left out."""
    out_indices, inputs, outputs = tables
    kept = min(out_indices.shape[0], capacity)
    sites = out_indices.new_full((capacity, out_indices.shape[1]), -1)
    sites[:kept] = out_indices[:kept]
    gather = inputs.new_full((inputs.shape[0], capacity), -1)
    gather[:, :kept] = inputs[:, :kept]
    count = outputs.new_full((1,), out_indices.shape[0])
    return sites, gather, torch.where(outputs < capacity, outputs, -1), count


def packed_pairs(table: Tensor, rows: int) -> Tensor:
    """table int32 [K, A] whose entries are rows of `rows` or -1 -> its plan of pairs; see `plans.py`."""
    offsets, columns = table.shape
    plan = table.new_full((pairs_size(table),), -1)
    packed, counts = Pairs.of(plan, offsets, columns)
    entries = valid_rows("packed_pairs", "table", table, rows)
    for k, line in enumerate(entries):
        found = (line >= 0).nonzero()[:, 0]
        packed[k, 0, : len(found)] = found.int()
        packed[k, 1, : len(found)] = line[found]
        counts[k] = len(found)
    return plan


def row_tiles(table: Tensor, rows: int, tile: int) -> Tensor:
    """table int32 [K, A] whose entries are rows of `rows` or -1 -> its plan of tiles; see `plans.py`.

    Columns are sorted, stably, by the codes of which offsets they have: see `_sorted_columns`.
    """
    offsets, columns = table.shape
    plan = table.new_full((tiles_size(table, tile),), -1)
    neighbors, order, visited, counts = Tiles.of(plan, offsets, columns, tile)
    entries = valid_rows("row_tiles", "table", table, rows)
    order.view(-1)[:columns] = _sorted_columns(_codes(entries >= 0)).int()
    padded = torch.cat([entries, entries.new_full((offsets, 1), -1)], 1)  # column -1 has no offset
    tiled = padded[:, order.long()].transpose(0, 1)  # [T, K, R]
    used = (tiled >= 0).any(2)
    counts.copy_(used.sum(1))
    visit = used.cumsum(1) - 1
    t, k = used.nonzero(as_tuple=True)
    visited[t, visit[t, k]] = k.int()
    neighbors[t, visit[t, k]] = tiled[t, k]
    return plan


def _sorted_columns(codes: Tensor) -> Tensor:
    """int32 [A] -> [A]: by the high eight bits, then within chunks of the result by all of them, both stably.

    A full sort would take a second pass over all columns, for 3 to 13 % fewer visits in SECOND's encoder.
    """
    order = (codes // (CODES // DIGITS)).sort(stable=True).indices
    chunk = torch.arange(codes.shape[0], device=codes.device) // CHUNK
    return order[(chunk * CODES + codes[order]).sort(stable=True).indices]


def _codes(has: Tensor) -> Tensor:
    """has bool [K, A] -> int32 [A]: 16 bits of a column's place among all masks of offsets.

    Masks are ordered by their rank as a Gray code, the offset farthest from the centre on top, so that neighbors differ
    in one offset. The code is the share of columns that come before, as if every offset occurred in ODDS of them,
    independently of the others: common masks get codes of their own, rare ones share theirs. All arithmetic is
    float32, step by step, so that every backend gets the same codes.
    """
    before = torch.zeros(has.shape[1], device=has.device)
    share = torch.ones_like(before)
    parity = torch.zeros(has.shape[1], dtype=torch.bool, device=has.device)
    for k in offset_order(has.shape[0]):
        first = torch.where(parity, ODDS, 1 - ODDS)  # the share of those whose bit of the rank is 0
        parity = parity ^ has[k]
        before = before + torch.where(parity, share * first, 0.0)
        share = share * torch.where(has[k], ODDS, 1 - ODDS)
    return (before * CODES).clamp(max=CODES - 1).int()


ODDS = 0.1875  # counted: from 0.12 to 0.2 makes no difference in sum, 0.3 up to a third more visits
CODES = 1 << 16
DIGITS = 1 << 8
CHUNK = 256  # columns, a multiple of every tile


def find_pairs(
    indices: Tensor, batch_size: int, spatial_shape: list[int], kernel_size: list[int], stride: list[int],
    padding: list[int], dilation: list[int], out_padding: list[int], subm: bool, transpose: bool,
) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:  # fmt: skip
    """-> out_indices, and for every kernel offset its input rows, ascending, with their output rows."""
    refuse_outside_sites("get_indice_pairs", indices, batch_size, spatial_shape)
    rows = _active_rows(indices.long(), batch_size, spatial_shape)
    sites = indices.long()[rows]
    if subm:
        padding = submanifold_padding(kernel_size, dilation)
    shape = output_shape(spatial_shape, kernel_size, stride, padding, dilation, out_padding, subm, transpose)
    step, pad, gap, limit = (indices.new_tensor(v, dtype=torch.int64) for v in (stride, padding, dilation, shape))

    candidates = []  # for every offset: input rows, and the flat index of the output site
    for offset in itertools.product(*map(range, kernel_size)):
        shift = indices.new_tensor(offset, dtype=torch.int64) * gap
        if transpose:
            target = sites[:, 1:] * step - pad + shift
            valid = (target >= 0) & (target < limit)
        else:
            scaled = sites[:, 1:] + pad - shift
            target = scaled.div(step, rounding_mode="floor")
            valid = (target * step == scaled) & (target >= 0) & (target < limit)
        keep = valid.all(1)
        candidates.append((rows[keep], _flatten(sites[keep, 0], target[keep], shape)))

    if subm:
        keys, order = _flatten(sites[:, 0], sites[:, 1:], shape).sort()
        pairs = []
        for inputs, target in candidates:
            place = torch.searchsorted(keys, target).clamp(max=len(keys) - 1)
            found = keys[place] == target
            pairs.append((inputs[found], rows[order[place[found]]]))
        return indices.clone(), pairs
    keys = torch.cat([target for _, target in candidates]).unique()
    out_indices = _unflatten(keys, shape).to(indices.dtype)
    return out_indices, [(inputs, torch.searchsorted(keys, target)) for inputs, target in candidates]


def _active_rows(sites: Tensor, batch_size: int, spatial_shape: list[int]) -> Tensor:
    """Rows inside the grid; of several rows at one site only the lowest."""
    limit = sites.new_tensor([batch_size, *spatial_shape])
    rows = ((sites >= 0) & (sites < limit)).all(1).nonzero()[:, 0]
    keys, order = _flatten(sites[rows, 0], sites[rows, 1:], spatial_shape).sort(stable=True)
    first = torch.ones_like(keys, dtype=torch.bool)
    first[1:] = keys[1:] != keys[:-1]
    return rows[order[first]].sort().values


def _flatten(batch: Tensor, position: Tensor, shape: list[int]) -> Tensor:
    for axis, size in enumerate(shape):
        batch = batch * size + position[:, axis]
    return batch


def _unflatten(keys: Tensor, shape: list[int]) -> Tensor:
    columns = []
    for size in reversed(shape):
        columns.append(keys % size)
        keys = keys.div(size, rounding_mode="floor")
    return torch.stack([keys, *reversed(columns)], 1)


def _table(pairs: list[tuple[Tensor, Tensor]], length: int, like: Tensor) -> Tensor:
    """[K, length]: for every offset the second row of a pair, at the place of the first."""
    table = like.new_full((len(pairs), length), -1, dtype=torch.int32)
    for k, (places, values) in enumerate(pairs):
        table[k, places] = values.int()
    return table
