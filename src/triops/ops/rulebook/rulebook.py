"""Rulebook: which input row meets which output row under which kernel offset, and the plans that kernels read."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from triops import _check
from triops.ops.rulebook import (
    indexed_neighbors,
    packed_pairs,
    row_tiles,
    submanifold_neighbors,
)
from triops.ops.rulebook.geometry import Ints, as_list, as_lists, dimensions, output_shape
from triops.ops.rulebook.plans import TILE
from triops.ops.site_neighbors import site_neighbors


class Tables(NamedTuple):
    """What the operators take of a rulebook. The tensors belong together: none may be changed in place.

    A plan is a table prepared for the kernels of one device. It may be missing: then every call prepares its own.
    """

    gather: Tensor  # int32 [K, A]: the input row that meets output row o under offset k, or -1
    inputs: int  # N, how many input rows there are
    scatter: Tensor | None = None  # int32 [K, N]: the output row that input row i meets, or -1; see `scatter_of`
    mirrored: bool = False  # scatter would be gather.flip(0), and is None
    tile: int = TILE  # rows per tile
    tiles: Tensor | None = None  # plan of gather: a convolution on GPU
    transposed_tiles: Tensor | None = None  # plan of scatter: its gradient
    pairs: Tensor | None = None  # plan of gather: a convolution on CPU, the weight gradient on both
    transposed_pairs: Tensor | None = None  # plan of scatter

    def inverse(self) -> Tables:
        """Of the inverse convolution: inputs and outputs exchanged, plans too."""
        if self.mirrored:
            return Tables(self.gather.flip(0), self.inputs, self.gather)
        return Tables(
            scatter_of(self), self.gather.shape[1], self.gather, False, self.tile, self.transposed_tiles, self.tiles,
            self.transposed_pairs, self.pairs,
        )  # fmt: skip


class Rulebook:
    """Sites and neighbor tables that convolutions and poolings share; make one and use it for every layer it fits.

    A rulebook is a value: nothing is worked out behind its back and kept. Where several convolutions share one, call
    `rulebook = rulebook.prepared()` once, which works out what their kernels need beside the tables; without it every
    convolution does that by itself. The layers of `triops.nn` pass prepared rulebooks on.

    Attributes:
        in_indices: [N, 1 + D], batch and position of each input site.
        out_indices: [A, 1 + D], the same of each output site.
        in_shape: the spatial shape that the input sites live in; empty where that is no grid, as for `between`.
        out_shape: that of the output sites.
        batch_size: how many grids there are; 0 where there is none.
        kernel_size: the axes of a weight between its channels, one integer per axis of a grid.
        gather: int32 [K, A], the input row that meets output row o under offset k, or -1. A copy: changing it changes
            nothing here. `copy_` and `Rulebook(...)` are the ways to other tables.
        scatter: int32 [K, N], the output row that input row i meets, or -1. A copy too.
        mirrored: True where `scatter` is `gather.flip(0)`, as in every submanifold convolution.
        tables: what the operators take: both tables and, in a prepared rulebook, the plans of their kernels.
        in_count: int32 [1], how many input sites are active where a capacity fixed the number of rows; None where all
            rows count.
        out_count: int32 [1], the same of the output sites.
        out_index: int64 [words], the ranked bitmap of the output sites, which `sparse` makes on a GPU for the look-ups
            of `submanifold` on them; else None.
    """

    in_indices: Tensor
    out_indices: Tensor
    in_shape: list[int]
    out_shape: list[int]
    batch_size: int
    kernel_size: list[int]
    tables: Tables

    in_count: Tensor | None = None
    out_count: Tensor | None = None
    out_index: Tensor | None = None

    def __init__(
        self, in_indices: Tensor, out_indices: Tensor, in_shape: list[int], out_shape: list[int], batch_size: int,
        kernel_size: list[int], gather: Tensor, scatter: Tensor | None,
    ) -> None:  # fmt: skip
        """Make a rulebook from tables made by hand, which are copied; see the attributes.

        Without `scatter` the rulebook is mirrored: its inputs are its outputs.
        """
        gather = gather.clone()
        scatter = None if scatter is None else scatter.clone()
        tables = Tables(gather, (gather if scatter is None else scatter).shape[1], scatter, scatter is None)
        self._set(in_indices, out_indices, in_shape, out_shape, batch_size, kernel_size, tables)

    def _set(
        self, in_indices: Tensor, out_indices: Tensor, in_shape: list[int], out_shape: list[int], batch_size: int,
        kernel_size: list[int], tables: Tables,
    ) -> Rulebook:  # fmt: skip
        self.in_indices, self.out_indices = in_indices, out_indices
        self.in_shape, self.out_shape = in_shape, out_shape
        self.batch_size, self.kernel_size = batch_size, kernel_size
        self.tables = tables
        return self

    @classmethod
    def submanifold(
        cls, indices: Tensor, batch_size: int, spatial_shape: Ints, kernel_size: Ints, dilation: Ints = 1,
        index: Tensor | None = None,
    ) -> Rulebook:  # fmt: skip
        """The rulebook of a submanifold convolution: the outputs are the inputs.

        Args:
            indices: int32 or int64 tensor [N, 1 + D], batch and position of each site, as in `triops.get_indice_pairs`.
            batch_size: how many grids there are.
            spatial_shape: their D sizes.
            kernel_size: one integer, or one for each axis; odd.
            dilation: one integer, or one for each axis.
            index: `out_index` of the rulebook whose `out_indices` these sites are, if it has one.

        >>> import torch
        >>> from triops import Rulebook
        >>> Rulebook.submanifold(torch.tensor([[0, 2], [0, 3]]), 1, 8, 3).gather.tolist()
        [[-1, 0], [0, 1], [1, -1]]
        """
        gather = submanifold_neighbors(indices, batch_size, spatial_shape, kernel_size, dilation, index)
        axes = indices.shape[1] - 1
        shape = as_list("Rulebook", "spatial_shape", spatial_shape, axes)
        kernel = as_list("Rulebook", "kernel_size", kernel_size, axes)
        tables = Tables(gather, indices.shape[0], None, True)
        made = cls.__new__(cls)._set(indices, indices, shape, shape, batch_size, kernel, tables)
        made.out_index = index
        return made

    @classmethod
    def sparse(
        cls, indices: Tensor, batch_size: int, spatial_shape: Ints, kernel_size: Ints, stride: Ints = 1,
        padding: Ints = 0, dilation: Ints = 1, out_padding: Ints = 0, transpose: bool = False,
        capacity: int | None = None, owners: Tensor | None = None, both: bool = True,
    ) -> Rulebook:  # fmt: skip
        """The rulebook of a strided or transposed convolution, or pooling: sites that an input reaches are outputs.

        On a GPU this waits once, for the number of outputs, unless `capacity` fixes it.

        Args:
            indices: int32 or int64 tensor [N, 1 + D], batch and position of each site, as in `triops.get_indice_pairs`.
            batch_size: how many grids there are.
            spatial_shape: the D sizes of the grids of the inputs.
            kernel_size, stride, padding, dilation, out_padding: one integer, or one for each axis; `out_padding`
                belongs to `transpose`.
            transpose: the sites of a transposed convolution.
            capacity: the number of output rows. Those behind the true number, which is `out_count`, are inactive (-1),
                and no host waits.
            owners: `owners` of a rulebook of the same input sites, if there is one.
            both: whether to make `scatter` too, which gradients and inverse convolutions read; without, it is worked
                out when it is asked for.

        >>> import torch
        >>> from triops import Rulebook
        >>> Rulebook.sparse(torch.tensor([[0, 2], [0, 3]]), 1, 8, 3, stride=2).gather.tolist()
        [[-1, 0], [-1, 1], [0, -1]]
        """
        lists = as_lists(
            "Rulebook", dimensions(indices), spatial_shape, kernel_size, stride, padding, dilation, out_padding
        )
        indexed = isinstance(indices, Tensor) and indices.device.type != "cpu"  # no CPU kernel reads it
        out_indices, gather, scatter, count, index = indexed_neighbors(
            indices, batch_size, lists, transpose, capacity, owners, indexed, both
        )
        shape, kernel, step, pad, gap, extra = lists
        out_shape = output_shape(shape, kernel, step, pad, gap, extra, False, transpose)
        tables = Tables(gather, indices.shape[0], scatter if both else None)
        made = cls.__new__(cls)._set(indices, out_indices, shape, out_shape, batch_size, kernel, tables)
        made.out_count = count
        made.out_index = index if index.shape[0] else None
        return made

    @classmethod
    def between(
        cls, indices: Tensor, centers: Tensor, offsets: Tensor, kernel_size: Ints | None = None, *,
        distinct: bool = False,
    ) -> Rulebook:  # fmt: skip
        """The rulebook from any input sites to any output sites: see `triops.site_neighbors`.

        `scatter` is worked out when it is asked for. Sites need no grid: `in_shape` and `out_shape` are empty and
        `batch_size` is 0, so that layers of `triops.nn`, which live in grids, do not take it for one of theirs.

        Args:
            indices: int32 or int64 [N, 1 + D], batch and position of each input site. Of equal ones the lowest row
                stands for the site.
            centers: [A, 1 + D] of the same dtype, batch and position of each output site. Of equal ones the lowest row
                stands for the site; the others meet nothing.
            offsets: [K, D] of the same dtype: under offset k an output site meets the input site at its position plus
                `offsets[k]`.
            kernel_size: the axes of a weight that belong to the offsets, K places in all: a list of integers, or one
                for every axis of the sites. None takes one axis, for weights [Cout, K, Cin].
            distinct: that no two centers are equal, which spares looking for them, a second search. Where two are,
                gradients are wrong.

        >>> import torch
        >>> from triops import Rulebook
        >>> sites, centers = torch.tensor([[0, -2], [0, 3]]), torch.tensor([[0, 2], [0, -1]])
        >>> Rulebook.between(sites, centers, torch.tensor([[-1], [0], [1]])).gather.tolist()
        [[-1, 0], [-1, -1], [1, -1]]
        """
        gather = site_neighbors(indices, centers, offsets)
        kernel = [count := offsets.shape[0]]
        if kernel_size is not None:
            kernel = as_list("Rulebook", "kernel_size", kernel_size, offsets.shape[1])
            if math.prod(kernel) != count or any(k < 1 for k in kernel):
                raise ValueError(
                    f"Rulebook: kernel_size must have as many places as there are offsets, {count}, got {kernel}"
                )
        if not _check.Checker("Rulebook").flag("distinct", distinct):
            lowest = site_neighbors(centers, centers, offsets.new_zeros((1, offsets.shape[1])))[0]
            rows = torch.arange(centers.shape[0], dtype=lowest.dtype, device=lowest.device)
            gather = torch.where(lowest == rows, gather, -1)
        tables = Tables(gather, indices.shape[0])
        return cls.__new__(cls)._set(indices, centers, [], [], 0, kernel, tables)

    @property
    def owners(self) -> Tensor | None:
        """int32 [N]: the row that stands for each input row's site, -1 outside the grid; None where not known."""
        return self.tables.gather[self.tables.gather.shape[0] // 2] if self.mirrored else None

    @property
    def mirrored(self) -> bool:
        return self.tables.mirrored

    @property
    def gather(self) -> Tensor:
        return self.tables.gather.clone()

    @property
    def scatter(self) -> Tensor:
        return scatter_of(self.tables).clone()

    def prepared(self, *, backward: bool = False, tile: int | None = None) -> Rulebook:
        """This rulebook with what convolutions on its device need beside the tables; itself where nothing is missing.

        Args:
            backward: also for the gradients.
            tile: rows per tile of the GPU kernel, where this rulebook has no tiles yet; None takes 64.

        >>> import torch
        >>> from triops import Rulebook
        >>> rulebook = Rulebook.submanifold(torch.tensor([[0, 2], [0, 3]]), 1, 8, 3)
        >>> rulebook = rulebook.prepared()
        >>> rulebook.prepared() is rulebook
        True
        """
        tables = _prepared(self.tables, backward, TILE if tile is None else tile)
        return self if tables is None else self._with(tables)

    def copy_(self, other: Rulebook) -> Rulebook:
        """Take over another rulebook's sites, tables and plans in place, where captured CUDA graphs read them.

        Both must have the same shapes: sites, kernel and grid.
        """
        check_rulebook("Rulebook.copy_", other)
        described = [
            (r.in_shape, r.out_shape, r.batch_size, r.kernel_size, r.tables.gather.shape, r.tables.inputs)
            for r in (self, other)
        ]
        if described[0] != described[1] or self.mirrored != other.mirrored:
            raise ValueError(f"Rulebook.copy_: other must have the same shapes: {self} and {other}")
        tables = other.tables
        if self.tables.tiles is not None or self.tables.transposed_tiles is not None:
            tables = tables._replace(tiles=None, transposed_tiles=None)  # of this rulebook's tile
        if self.tables.scatter is not None and tables.scatter is None:
            tables = tables._replace(scatter=scatter_of(tables))
        tables = _planned(tables, self.tables) or tables
        for mine, theirs in zip(self.tables, tables, strict=True):
            if isinstance(mine, Tensor) and isinstance(theirs, Tensor):
                mine.copy_(theirs)
        self.in_indices.copy_(other.in_indices)
        self.out_indices.copy_(other.out_indices)
        if self.out_index is not None and other.out_index is not None:
            self.out_index.copy_(other.out_index)
        return self

    def inverse(self) -> Rulebook:
        """The rulebook of the inverse convolution, from the outputs back to the inputs. Shares all tensors.

        >>> import torch
        >>> from triops import Rulebook
        >>> down = Rulebook.sparse(torch.tensor([[0, 2], [0, 3]]), 1, 8, 3, stride=2)
        >>> down.inverse().out_indices.tolist()
        [[0, 2], [0, 3]]
        """
        made = Rulebook.__new__(Rulebook)._set(
            self.out_indices, self.in_indices, self.out_shape, self.in_shape, self.batch_size, self.kernel_size,
            self.tables.inverse(),
        )  # fmt: skip
        made.in_count, made.out_count = self.out_count, self.in_count
        return made

    def _with(self, tables: Tables) -> Rulebook:
        made = Rulebook.__new__(Rulebook)._set(
            self.in_indices, self.out_indices, self.in_shape, self.out_shape, self.batch_size, self.kernel_size, tables
        )
        made.in_count, made.out_count, made.out_index = self.in_count, self.out_count, self.out_index
        return made

    def __repr__(self) -> str:
        kind = "submanifold" if self.mirrored else "sparse"
        inside, outside = (f" in {shape}" if shape else "" for shape in (self.in_shape, self.out_shape))
        return (
            f"<{kind} rulebook, kernel {self.kernel_size}, {self.in_indices.shape[0]} sites{inside} -> "
            f"{self.out_indices.shape[0]}{outside}>"
        )


def _prepared(tables: Tables, backward: bool, tile: int) -> Tables | None:
    """The tables with the plans that their device's kernels read: pairs on CPU, tiles and (backward) pairs on GPU.

    None where nothing is missing: Dynamo of torch 2.8 and 2.9 does not trace a comparison of tuples by identity.
    """
    gather = tables.gather
    on_cpu, both = gather.device.type == "cpu", backward and not tables.mirrored
    if not on_cpu and tables.tiles is not None:
        transposed = not both or tables.transposed_tiles is not None
        if not backward or (transposed and tables.pairs is not None):
            return None  # spares layers that share a rulebook the rest
    tiled = tables.tiles is not None or tables.transposed_tiles is not None
    wanted = Tables(
        gather, tables.inputs, tables.scatter, tables.mirrored,
        tile=tables.tile if tiled else tile,
        tiles=None if on_cpu else gather,
        transposed_tiles=gather if both and not on_cpu else None,
        pairs=gather if on_cpu or backward else None,
        transposed_pairs=gather if both and on_cpu else None,
    )  # fmt: skip
    return _planned(tables, wanted)


def _planned(tables: Tables, wanted: Tables) -> Tables | None:
    """The tables with every plan that `wanted` has, made where it is missing; None where none is."""
    gather, inputs, scatter, mirrored, _, tiles, transposed_tiles, pairs, transposed_pairs = tables
    outputs = gather.shape[1]
    complete = True
    if tiles is None and wanted.tiles is not None:
        tiles, complete = row_tiles(gather, inputs, wanted.tile), False
    if transposed_tiles is None and wanted.transposed_tiles is not None:
        scatter = scatter_of(tables)
        transposed_tiles, complete = row_tiles(scatter, outputs, wanted.tile), False
    if pairs is None and wanted.pairs is not None:
        pairs, complete = packed_pairs(gather, inputs), False
    if transposed_pairs is None and wanted.transposed_pairs is not None:
        scatter = scatter_of(tables)
        transposed_pairs, complete = packed_pairs(scatter, outputs), False
    if complete:
        return None
    # Not _replace, which Dynamo of torch 2.8 does not trace.
    return Tables(gather, inputs, scatter, mirrored, wanted.tile, tiles, transposed_tiles, pairs, transposed_pairs)


def scatter_of(tables: Tables) -> Tensor:
    """The transposed table, worked out where a rulebook does not hold it."""
    if tables.mirrored:
        return tables.gather.flip(0)
    if tables.scatter is not None:
        return tables.scatter
    gather, inputs = tables.gather, tables.inputs
    columns = torch.arange(gather.shape[1], dtype=torch.int32, device=gather.device).expand_as(gather)
    found = gather.new_full((gather.shape[0], inputs + 1), -1)  # one column more, for entries that are no row
    exists = (gather >= 0) & (gather < inputs)  # torch would end the GPU's context over another index
    return found.scatter_(1, torch.where(exists, gather, inputs).long(), columns)[:, :-1].contiguous()


def check_rulebook(operator: str, rulebook: object) -> None:
    if not isinstance(rulebook, Rulebook):
        raise TypeError(f"{operator}: rulebook must be a Rulebook, got {type(rulebook).__name__}")


__all__ = ["Rulebook", "Tables", "check_rulebook", "scatter_of"]
