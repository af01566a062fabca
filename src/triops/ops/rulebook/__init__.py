"""The rulebook of a sparse convolution: its geometry, its tables, its preparation for kernels, and `Rulebook`.

get_indice_pairs, sparse_conv, sparse_pool, the layers of `triops.nn` and the compat layers all stand on this package.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from triops import _check, _op
from triops.ops.rulebook import geometry, reference
from triops.ops.rulebook.geometry import Ints, as_lists, checker, dimensions
from triops.ops.rulebook.plans import LARGEST_TILE, TILE, pairs_size, tiles_size


def compact_indice_pairs(
    indices: Tensor, batch_size: int, spatial_shape: Ints, kernel_size: Ints, stride: Ints = 1, padding: Ints = 0,
    dilation: Ints = 1, out_padding: Ints = 0, subm: bool = False, transpose: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The pairs of `get_indice_pairs` without the filling: what a convolution on CPU gathers and scatters by.

    Returns:
        out_indices [A, 1 + D], pairs int32 [2, P], offsets int64 [K + 1]. Offset k has
        `pairs[:, offsets[k]:offsets[k + 1]]`, in the order of `get_indice_pairs`. On a GPU this waits for the counts.

    >>> import torch
    >>> from triops.ops.rulebook import compact_indice_pairs
    >>> sites = torch.tensor([[0, 2], [0, 3]], dtype=torch.int32)
    >>> _, pairs, offsets = compact_indice_pairs(sites, 1, 8, 3, subm=True)
    >>> pairs.tolist(), offsets.tolist()
    ([[0, 0, 1, 1], [1, 0, 1, 0]], [0, 1, 3, 4])
    """
    lists = as_lists(
        "compact_indice_pairs", dimensions(indices), spatial_shape, kernel_size, stride, padding, dilation, out_padding
    )
    return _compact_indice_pairs(indices, batch_size, *lists, subm, transpose)  # type: ignore[no-any-return]


def submanifold_neighbors(
    indices: Tensor, batch_size: int, spatial_shape: Ints, kernel_size: Ints, dilation: Ints = 1,
    index: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """The neighbour table of a submanifold convolution: int32 [K, L].

    `table[k, o]` is the input row that output row `o` meets under offset `k`, or -1: what a forward pass gathers
    (the row of the site at `o + (k - kernel_size // 2) * dilation`). `table.flip(0)` is
    the same for the backward pass: its `[k, i]` is the output row that input row `i` meets.

    `index` is the ranked bitmap of these sites that the convolution which made them left: see `Rulebook.sparse`. GPU
    kernels look neighbors up there. With that of other sites the table holds wrong rows, but never one outside.

    >>> import torch
    >>> from triops.ops.rulebook import submanifold_neighbors
    >>> submanifold_neighbors(torch.tensor([[0, 2], [0, 3]], dtype=torch.int32), 1, 8, 3)
    tensor([[-1,  0],
            [ 0,  1],
            [ 1, -1]], dtype=torch.int32)
    """
    name = "submanifold_neighbors"
    axes = dimensions(indices)
    lists = [
        geometry.as_list(name, key, value, axes)
        for key, value in (("spatial_shape", spatial_shape), ("kernel_size", kernel_size), ("dilation", dilation))
    ]
    return _submanifold_neighbors(indices, batch_size, *lists, index)  # type: ignore[no-any-return]


def sparse_neighbors(
    indices: Tensor, batch_size: int, spatial_shape: Ints, kernel_size: Ints, stride: Ints = 1, padding: Ints = 0,
    dilation: Ints = 1, out_padding: Ints = 0, transpose: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The two neighbour tables of a sparse or transposed convolution.

    Returns:
        out_indices [A, 1 + D] as in `get_indice_pairs`;
        inputs int32 [K, A]: the input row that output row `o` meets under offset `k`, or -1: a forward pass gathers it;
        outputs int32 [K, L]: the output row that input row `i` meets, or -1: the backward pass, and the forward
            pass of the inverse convolution.

    >>> import torch
    >>> from triops.ops.rulebook import sparse_neighbors
    >>> out, inputs, outputs = sparse_neighbors(torch.tensor([[0, 2], [0, 3]], dtype=torch.int32), 1, 8, 3, stride=2)
    >>> out.tolist(), inputs.tolist(), outputs.tolist()
    ([[0, 0], [0, 1]], [[-1, 0], [-1, 1], [0, -1]], [[1, -1], [-1, 1], [0, -1]])
    """
    name = "sparse_neighbors"
    axes = dimensions(indices)
    lists = as_lists(name, axes, spatial_shape, kernel_size, stride, padding, dilation, out_padding)
    return _sparse_neighbors(indices, batch_size, *lists, transpose, None, False, True)[:3]  # type: ignore[no-any-return]


def capped_neighbors(
    indices: Tensor, batch_size: int, spatial_shape: Ints, kernel_size: Ints, stride: Ints = 1, padding: Ints = 0,
    dilation: Ints = 1, out_padding: Ints = 0, transpose: bool = False, *, capacity: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """`sparse_neighbors` with a fixed number of output rows, so that no host waits for the number of outputs.

    Returns:
        out_indices [capacity, 1 + D], inputs int32 [K, capacity], outputs int32 [K, L], and int32 [1]: the true number
        of outputs. Rows behind it are inactive: -1 everywhere, which every operator here leaves out. If it exceeds the
        capacity, the last outputs, in ascending order, are missing, and whoever reads the results has to look.

    >>> import torch
    >>> from triops.ops.rulebook import capped_neighbors
    >>> sites = torch.tensor([[0, 2], [0, 3]], dtype=torch.int32)
    >>> out, inputs, outputs, count = capped_neighbors(sites, 1, 8, 3, stride=2, capacity=3)
    >>> out.tolist(), inputs.tolist(), count.tolist()
    ([[0, 0], [0, 1], [-1, -1]], [[-1, 0, -1], [-1, 1, -1], [0, -1, -1]], [2])
    """
    lists = as_lists(
        "capped_neighbors", dimensions(indices), spatial_shape, kernel_size, stride, padding, dilation, out_padding
    )
    return _capped_neighbors(  # type: ignore[no-any-return]
        indices, batch_size, *lists, transpose, capacity, None, False, True
    )[:4]


def indexed_neighbors(
    indices: Tensor, batch_size: int, lists: list[list[int]], transpose: bool, capacity: int | None,
    owners: Tensor | None, indexed: bool, both: bool = True,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor]:  # fmt: skip
    """`sparse_neighbors`, or with a capacity `capped_neighbors`, with an index of the outputs.

    lists: spatial shape, kernel size, stride, padding, dilation and out_padding.
    owners: int32 [L], the row that stands for each input row's site, where it is known: the middle row of a submanifold
        table of the same sites. A GPU kernel then need not find out which sites come twice.
    indexed: whether to make the index.
    both: whether to make `outputs`, which has no columns else.

    Returns:
        out_indices, inputs, outputs, the true number of outputs (None without a capacity), and int64 [words]: the
        ranked bitmap of the output sites, empty where none is wanted or the grid has more than 2**28 places.
    """
    if capacity is None:
        sites, inputs, outputs, index = _sparse_neighbors(indices, batch_size, *lists, transpose, owners, indexed, both)
        return sites, inputs, outputs, None, index
    return _capped_neighbors(  # type: ignore[no-any-return]
        indices, batch_size, *lists, transpose, capacity, owners, indexed, both
    )


def packed_pairs(table: Tensor, rows: int) -> Tensor:
    """The pairs of a table, packed offset by offset: int32 of the layout of `plans.Pairs`.

    Args:
        table: int32 [K, A], an entry is a row of `rows` or -1.
        rows: how many rows the entries count. On a CPU an entry outside raises IndexError; on a GPU it counts as -1.

    >>> import torch
    >>> from triops.ops.rulebook import packed_pairs
    >>> from triops.ops.rulebook.plans import Pairs
    >>> pairs, counts = Pairs.of(packed_pairs(torch.tensor([[-1, 4, 2]], dtype=torch.int32), 5), 1, 3)
    >>> pairs[0, :, : counts[0]].tolist()
    [[1, 2], [4, 2]]
    """
    return _packed_pairs(table, rows)  # type: ignore[no-any-return]


def row_tiles(table: Tensor, rows: int, tile: int = TILE) -> Tensor:
    """The columns of a table in tiles that share offsets: int32 of the layout of `plans.Tiles`.

    Args:
        table, rows: as in `packed_pairs`.
        tile: columns per tile, a power of two from 16 to 256.

    >>> import torch
    >>> from triops.ops.rulebook import row_tiles
    >>> from triops.ops.rulebook.plans import Tiles
    >>> tiles = Tiles.of(row_tiles(torch.tensor([[-1, 4, 2], [1, -1, 0]], dtype=torch.int32), 5, 16), 2, 3, 16)
    >>> tiles.counts.tolist(), tiles.offsets.tolist()
    ([2], [[0, 1]])
    """
    return _row_tiles(table, rows, tile)  # type: ignore[no-any-return]


def _check_capped(
    indices: Tensor, batch_size: int, spatial_shape: list[int], kernel_size: list[int], stride: list[int],
    padding: list[int], dilation: list[int], out_padding: list[int], transpose: bool, capacity: int,
    owners: Tensor | None, indexed: bool, both: bool,
) -> None:  # fmt: skip
    geometry.check_convolution(
        "capped_neighbors", indices, batch_size, spatial_shape, kernel_size, stride, padding, dilation, out_padding,
        False, transpose,
    )  # fmt: skip
    c = _check.Checker("capped_neighbors")
    c.at_least("capacity", capacity, 0)
    if _check.too_many(capacity):
        c.fail(f"capacity must be at most 2**30, since rows are int32, got {capacity}")
    _check_owners(c, indices, owners)


def _check_owners(c: _check.Checker, indices: Tensor, owners: Tensor | None) -> None:
    if owners is not None:
        c.shape("indices", indices, "L", indices.shape[1])
        c.shape("owners", owners, "L")
        c.dtype("owners", owners, (torch.int32,))
        c.same_device(indices=indices, owners=owners)


def _fake_capped(
    indices: Tensor, batch_size: int, spatial_shape: list[int], kernel_size: list[int], stride: list[int],
    padding: list[int], dilation: list[int], out_padding: list[int], transpose: bool, capacity: int,
    owners: Tensor | None, indexed: bool, both: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    volume = math.prod(kernel_size)
    lists = spatial_shape, kernel_size, stride, padding, dilation, out_padding
    return (
        indices.new_empty((capacity, indices.shape[1])),
        indices.new_empty((volume, capacity), dtype=torch.int32),
        indices.new_empty((volume, indices.shape[0] if both else 0), dtype=torch.int32),
        indices.new_empty((1,), dtype=torch.int32),
        _fake_index(indices, batch_size, lists, transpose, indexed),
    )


def _fake_index(indices: Tensor, batch_size: int, lists: Sequence[list[int]], transpose: bool, indexed: bool) -> Tensor:
    words = geometry.index_words(batch_size, lists, transpose) if indexed else 0
    return indices.new_empty((words,), dtype=torch.int64)


def _check_table(operator: str, table: Tensor, rows: int) -> _check.Checker:
    c = _check.Checker(operator)
    c.shape("table", table, "K", "A")
    c.dtype("table", table, (torch.int32,))
    c.at_least("rows", rows, 0)
    if _check.too_many(rows):
        c.fail(f"rows must be at most 2**30, since entries are int32, got {rows}")
    return c


def _check_packed(table: Tensor, rows: int) -> None:
    _check_table("packed_pairs", table, rows)


def _check_tiles(table: Tensor, rows: int, tile: int) -> None:
    check_tile(_check_table("row_tiles", table, rows), tile)


def check_tile(c: _check.Checker, tile: int) -> None:
    if not 16 <= tile <= LARGEST_TILE or tile & (tile - 1):
        c.fail(f"tile must be a power of two from 16 to {LARGEST_TILE}, got {tile}")


def _fake_packed(table: Tensor, rows: int) -> Tensor:
    return table.new_empty((pairs_size(table),))


def _fake_tiles(table: Tensor, rows: int, tile: int) -> Tensor:
    return table.new_empty((tiles_size(table, tile),))


def _check_submanifold(
    indices: Tensor, batch_size: int, spatial_shape: list[int], kernel_size: list[int], dilation: list[int],
    index: Tensor | None,
) -> None:  # fmt: skip
    one, zero = [1] * len(spatial_shape), [0] * len(spatial_shape)
    geometry.check_convolution(
        "submanifold_neighbors", indices, batch_size, spatial_shape, kernel_size, one, zero, dilation, zero, True, False
    )
    if index is not None:
        c = _check.Checker("submanifold_neighbors")
        c.shape("index", index, geometry.bitmap_words(batch_size, spatial_shape))
        c.dtype("index", index, (torch.int64,))
        c.same_device(indices=indices, index=index)


def _check_sparse(
    indices: Tensor, batch_size: int, spatial_shape: list[int], kernel_size: list[int], stride: list[int],
    padding: list[int], dilation: list[int], out_padding: list[int], transpose: bool, owners: Tensor | None,
    indexed: bool, both: bool,
) -> None:  # fmt: skip
    geometry.check_convolution(
        "sparse_neighbors", indices, batch_size, spatial_shape, kernel_size, stride, padding, dilation, out_padding,
        False, transpose,
    )  # fmt: skip
    _check_owners(_check.Checker("sparse_neighbors"), indices, owners)


def new_size() -> int:
    return torch.library.get_ctx().new_dynamic_size()  # type: ignore[return-value]


def _fake_compact(
    indices: Tensor, batch_size: int, spatial_shape: list[int], kernel_size: list[int], stride: list[int],
    padding: list[int], dilation: list[int], out_padding: list[int], subm: bool, transpose: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    outputs = indices.shape[0] if subm else new_size()
    return (
        indices.new_empty((outputs, indices.shape[1])),
        indices.new_empty((2, new_size()), dtype=torch.int32),
        indices.new_empty((math.prod(kernel_size) + 1,), dtype=torch.int64),
    )


def _fake_submanifold(
    indices: Tensor, batch_size: int, spatial_shape: list[int], kernel_size: list[int], dilation: list[int],
    index: Tensor | None,
) -> Tensor:  # fmt: skip
    return indices.new_empty((math.prod(kernel_size), indices.shape[0]), dtype=torch.int32)


def _fake_sparse(
    indices: Tensor, batch_size: int, spatial_shape: list[int], kernel_size: list[int], stride: list[int],
    padding: list[int], dilation: list[int], out_padding: list[int], transpose: bool, owners: Tensor | None,
    indexed: bool, both: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    volume, outputs = math.prod(kernel_size), new_size()
    lists = spatial_shape, kernel_size, stride, padding, dilation, out_padding
    return (
        indices.new_empty((outputs, indices.shape[1])),
        indices.new_empty((volume, outputs), dtype=torch.int32),
        indices.new_empty((volume, indices.shape[0] if both else 0), dtype=torch.int32),
        _fake_index(indices, batch_size, lists, transpose, indexed),
    )


_compact_indice_pairs = _op.define(
    reference.compact_indice_pairs, check=checker("compact_indice_pairs"), fake=_fake_compact
)
_submanifold_neighbors = _op.define(reference.submanifold_neighbors, check=_check_submanifold, fake=_fake_submanifold)
_sparse_neighbors = _op.define(reference.sparse_neighbors, check=_check_sparse, fake=_fake_sparse)
_capped_neighbors = _op.define(reference.capped_neighbors, check=_check_capped, fake=_fake_capped)
_packed_pairs = _op.define(reference.packed_pairs, check=_check_packed, fake=_fake_packed)
_row_tiles = _op.define(reference.row_tiles, check=_check_tiles, fake=_fake_tiles)
for _operator in (_compact_indice_pairs, _sparse_neighbors):
    _operator.dynamic_output = True

from triops.ops.rulebook.rulebook import Rulebook, check_rulebook  # noqa: E402 - stands on the operators above

__all__ = [
    "Rulebook", "capped_neighbors", "check_rulebook", "compact_indice_pairs", "packed_pairs", "row_tiles",
    "sparse_neighbors", "submanifold_neighbors",
]  # fmt: skip
