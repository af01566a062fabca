"""The specification of a rulebook's tables: which input site meets which output site under which kernel offset."""

import itertools

import torch
from torch import Tensor

from triops.ops.rulebook.geometry import output_shape, refuse_outside_sites, submanifold_padding


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
    indices: Tensor, batch_size: int, spatial_shape: list[int], kernel_size: list[int], dilation: list[int]
) -> Tensor:
    """-> int32 [K, L]: the input row that meets output row o under offset k, or -1."""
    one, zero = [1] * len(spatial_shape), [0] * len(spatial_shape)
    _, pairs = find_pairs(indices, batch_size, spatial_shape, kernel_size, one, zero, dilation, zero, True, False)
    return _table([(outputs, inputs) for inputs, outputs in pairs], len(indices), indices)


def sparse_neighbors(
    indices: Tensor, batch_size: int, spatial_shape: list[int], kernel_size: list[int], stride: list[int],
    padding: list[int], dilation: list[int], out_padding: list[int], transpose: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """-> out_indices [A, 1 + D], inputs int32 [K, A] (the input row of an output row, or -1), outputs int32 [K, L]."""
    out_indices, pairs = find_pairs(
        indices, batch_size, spatial_shape, kernel_size, stride, padding, dilation, out_padding, False, transpose
    )
    inputs_of = _table([(outputs, inputs) for inputs, outputs in pairs], len(out_indices), indices)
    return out_indices, inputs_of, _table(pairs, len(indices), indices)


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
