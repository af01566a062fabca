"""get_indice_pairs: the rulebook of a sparse convolution, and the compact forms that the convolution reads."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from triops import _op
from triops.ops.get_indice_pairs import geometry, reference

Ints = int | Sequence[int]


def get_indice_pairs(
    indices: Tensor, batch_size: int, spatial_shape: Ints, kernel_size: Ints, stride: Ints = 1, padding: Ints = 0,
    dilation: Ints = 1, out_padding: Ints = 0, subm: bool = False, transpose: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Which input site meets which output site of a sparse convolution, for every kernel offset.

    An input site `i` and a kernel offset `k` meet the output site `o` with `o * stride = i + padding - k * dilation`
    on every axis, or `o = i * stride - padding + k * dilation` with `transpose`, where `o` lies in the output grid.
    With `subm` (a submanifold convolution) the outputs are the inputs, the padding is `kernel_size // 2 * dilation`
    whatever is passed, and a pair is kept only where its output site is active.
    The answer is one and the same on every backend and every run.

    Args:
        indices: int32 or int64 [L, 1 + D], D from 1 to 4: batch and position of the active sites, in any order.
            A site outside the grid or the batch is dropped (an IndexError with TRIOPS_CHECK=1); of several rows
            at one site the lowest stands for it and the others meet nothing.
        batch_size: number of grids.
        spatial_shape, kernel_size, stride, padding, dilation, out_padding: one integer, or one for each axis.
            `out_padding` belongs to `transpose`. `subm` needs odd kernels and stride 1.

    Returns:
        out_indices [A, 1 + D], of the dtype of indices: the output sites, ascending by batch and position; with
            `subm` the rows of `indices` as they are.
        indice_pairs int32 [K, 2, L], K the number of kernel offsets, the last axis fastest: `[k, 0]` holds input rows
            in ascending order, `[k, 1]` the output rows they meet, -1 behind.
        indice_num int32 [K]: how many pairs each offset has.
        L = 0 gives no outputs and no pairs.

    Raises:
        ValueError, TypeError: on a wrong shape, dtype, length or value of a parameter, or an empty output grid.

    Two neighbours on a line, and a kernel of three:

    >>> import torch, triops
    >>> sites = torch.tensor([[0, 2], [0, 3]], dtype=torch.int32)
    >>> out, pairs, num = triops.get_indice_pairs(sites, 1, 8, kernel_size=3, padding=1)
    >>> out.tolist()
    [[0, 1], [0, 2], [0, 3], [0, 4]]
    >>> pairs.tolist()
    [[[0, 1], [2, 3]], [[0, 1], [1, 2]], [[0, 1], [0, 1]]]
    >>> triops.get_indice_pairs(sites, 1, 8, kernel_size=3, subm=True)[2]
    tensor([1, 2, 1], dtype=torch.int32)
    """
    return _call(  # type: ignore[return-value]
        _get_indice_pairs, indices, batch_size, spatial_shape, kernel_size, stride, padding, dilation, out_padding,
        subm, transpose,
    )  # fmt: skip


def compact_indice_pairs(
    indices: Tensor, batch_size: int, spatial_shape: Ints, kernel_size: Ints, stride: Ints = 1, padding: Ints = 0,
    dilation: Ints = 1, out_padding: Ints = 0, subm: bool = False, transpose: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The pairs of `get_indice_pairs` without the filling: what a convolution on CPU gathers and scatters by.

    Returns:
        out_indices [A, 1 + D], pairs int32 [2, P], offsets int64 [K + 1]. Offset k has
        `pairs[:, offsets[k]:offsets[k + 1]]`, in the order of `get_indice_pairs`. On a GPU this waits for the counts.

    >>> import torch
    >>> from triops.ops.get_indice_pairs import compact_indice_pairs
    >>> sites = torch.tensor([[0, 2], [0, 3]], dtype=torch.int32)
    >>> _, pairs, offsets = compact_indice_pairs(sites, 1, 8, 3, subm=True)
    >>> pairs.tolist(), offsets.tolist()
    ([[0, 0, 1, 1], [1, 0, 1, 0]], [0, 1, 3, 4])
    """
    return _call(  # type: ignore[return-value]
        _compact_indice_pairs, indices, batch_size, spatial_shape, kernel_size, stride, padding, dilation, out_padding,
        subm, transpose,
    )  # fmt: skip


def submanifold_neighbors(
    indices: Tensor, batch_size: int, spatial_shape: Ints, kernel_size: Ints, dilation: Ints = 1
) -> Tensor:
    """The neighbour table of a submanifold convolution: int32 [K, L].

    `table[k, o]` is the input row that output row `o` meets under offset `k`, or -1: what a forward pass gathers
    (the row of the site at `o + (k - kernel_size // 2) * dilation`). `table.flip(0)` is
    the same for the backward pass: its `[k, i]` is the output row that input row `i` meets.

    >>> import torch
    >>> from triops.ops.get_indice_pairs import submanifold_neighbors
    >>> submanifold_neighbors(torch.tensor([[0, 2], [0, 3]], dtype=torch.int32), 1, 8, 3)
    tensor([[-1,  0],
            [ 0,  1],
            [ 1, -1]], dtype=torch.int32)
    """
    name = "submanifold_neighbors"
    axes = _dimensions(indices)
    lists = [
        geometry.as_list(name, key, value, axes)
        for key, value in (("spatial_shape", spatial_shape), ("kernel_size", kernel_size), ("dilation", dilation))
    ]
    return _submanifold_neighbors(indices, batch_size, *lists)  # type: ignore[no-any-return]


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
    >>> from triops.ops.get_indice_pairs import sparse_neighbors
    >>> out, inputs, outputs = sparse_neighbors(torch.tensor([[0, 2], [0, 3]], dtype=torch.int32), 1, 8, 3, stride=2)
    >>> out.tolist(), inputs.tolist(), outputs.tolist()
    ([[0, 0], [0, 1]], [[-1, 0], [-1, 1], [0, -1]], [[1, -1], [-1, 1], [0, -1]])
    """
    name = "sparse_neighbors"
    axes = _dimensions(indices)
    lists = _lists(name, axes, spatial_shape, kernel_size, stride, padding, dilation, out_padding)
    return _sparse_neighbors(indices, batch_size, *lists, transpose)  # type: ignore[no-any-return]


def sparse_output_shape(
    spatial_shape: Ints, kernel_size: Ints, stride: Ints = 1, padding: Ints = 0, dilation: Ints = 1,
    out_padding: Ints = 0, subm: bool = False, transpose: bool = False,
) -> list[int]:  # fmt: skip
    """The spatial shape that a convolution's output sites live in.

    >>> sparse_output_shape([11, 360, 360], kernel_size=3, stride=2, padding=[0, 1, 1])
    [5, 180, 180]
    >>> sparse_output_shape([5, 180, 180], 3, stride=2, padding=[0, 1, 1], out_padding=[0, 1, 1], transpose=True)
    [11, 360, 360]
    """
    axes = max((len(v) for v in (spatial_shape, kernel_size) if isinstance(v, Sequence)), default=1)
    name = "sparse_output_shape"
    lists = _lists(name, axes, spatial_shape, kernel_size, stride, padding, dilation, out_padding)
    shape, kernel, step, pad, gap, extra = lists
    sites = torch.empty((0, 1 + axes), dtype=torch.int32)
    geometry.check_convolution(name, sites, 1, shape, kernel, step, pad, gap, extra, subm, transpose)
    return geometry.output_shape(shape, kernel, step, pad, gap, extra, subm, transpose)


def _call(
    operator: _op.Operator, indices: Tensor, batch_size: int, spatial_shape: Ints, kernel_size: Ints, stride: Ints,
    padding: Ints, dilation: Ints, out_padding: Ints, subm: bool, transpose: bool,
) -> object:  # fmt: skip
    axes = _dimensions(indices)
    lists = _lists(operator.name, axes, spatial_shape, kernel_size, stride, padding, dilation, out_padding)
    return operator(indices, batch_size, *lists, subm, transpose)


def _dimensions(indices: Tensor) -> int:
    """D, or 1 where indices is malformed, which the operator's own check will say."""
    return indices.shape[1] - 1 if isinstance(indices, Tensor) and indices.dim() == 2 else 1


def _lists(
    operator: str, axes: int, spatial_shape: Ints, kernel_size: Ints, stride: Ints, padding: Ints, dilation: Ints,
    out_padding: Ints,
) -> list[list[int]]:  # fmt: skip
    return [
        geometry.as_list(operator, "spatial_shape", spatial_shape, axes),
        geometry.as_list(operator, "kernel_size", kernel_size, axes),
        geometry.as_list(operator, "stride", stride, axes),
        geometry.as_list(operator, "padding", padding, axes),
        geometry.as_list(operator, "dilation", dilation, axes),
        geometry.as_list(operator, "out_padding", out_padding, axes),
    ]


def _checker(operator: str) -> Callable[..., None]:
    def check(
        indices: Tensor, batch_size: int, spatial_shape: list[int], kernel_size: list[int], stride: list[int],
        padding: list[int], dilation: list[int], out_padding: list[int], subm: bool, transpose: bool,
    ) -> None:  # fmt: skip
        geometry.check_convolution(
            operator, indices, batch_size, spatial_shape, kernel_size, stride, padding, dilation, out_padding, subm,
            transpose,
        )  # fmt: skip

    return check


def _check_submanifold(
    indices: Tensor, batch_size: int, spatial_shape: list[int], kernel_size: list[int], dilation: list[int]
) -> None:
    one, zero = [1] * len(spatial_shape), [0] * len(spatial_shape)
    geometry.check_convolution(
        "submanifold_neighbors", indices, batch_size, spatial_shape, kernel_size, one, zero, dilation, zero, True, False
    )


def _check_sparse(
    indices: Tensor, batch_size: int, spatial_shape: list[int], kernel_size: list[int], stride: list[int],
    padding: list[int], dilation: list[int], out_padding: list[int], transpose: bool,
) -> None:  # fmt: skip
    geometry.check_convolution(
        "sparse_neighbors", indices, batch_size, spatial_shape, kernel_size, stride, padding, dilation, out_padding,
        False, transpose,
    )  # fmt: skip


def _new_size() -> int:
    return torch.library.get_ctx().new_dynamic_size()  # type: ignore[return-value]


def _fake_pairs(
    indices: Tensor, batch_size: int, spatial_shape: list[int], kernel_size: list[int], stride: list[int],
    padding: list[int], dilation: list[int], out_padding: list[int], subm: bool, transpose: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    volume = math.prod(kernel_size)
    outputs = indices.shape[0] if subm else _new_size()
    return (
        indices.new_empty((outputs, indices.shape[1])),
        indices.new_empty((volume, 2, indices.shape[0]), dtype=torch.int32),
        indices.new_empty((volume,), dtype=torch.int32),
    )


def _fake_compact(
    indices: Tensor, batch_size: int, spatial_shape: list[int], kernel_size: list[int], stride: list[int],
    padding: list[int], dilation: list[int], out_padding: list[int], subm: bool, transpose: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    outputs = indices.shape[0] if subm else _new_size()
    return (
        indices.new_empty((outputs, indices.shape[1])),
        indices.new_empty((2, _new_size()), dtype=torch.int32),
        indices.new_empty((math.prod(kernel_size) + 1,), dtype=torch.int64),
    )


def _fake_submanifold(
    indices: Tensor, batch_size: int, spatial_shape: list[int], kernel_size: list[int], dilation: list[int]
) -> Tensor:
    return indices.new_empty((math.prod(kernel_size), indices.shape[0]), dtype=torch.int32)


def _fake_sparse(
    indices: Tensor, batch_size: int, spatial_shape: list[int], kernel_size: list[int], stride: list[int],
    padding: list[int], dilation: list[int], out_padding: list[int], transpose: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    volume, outputs = math.prod(kernel_size), _new_size()
    return (
        indices.new_empty((outputs, indices.shape[1])),
        indices.new_empty((volume, outputs), dtype=torch.int32),
        indices.new_empty((volume, indices.shape[0]), dtype=torch.int32),
    )


_get_indice_pairs = _op.define(reference.get_indice_pairs, check=_checker("get_indice_pairs"), fake=_fake_pairs)
_compact_indice_pairs = _op.define(
    reference.compact_indice_pairs, check=_checker("compact_indice_pairs"), fake=_fake_compact
)
_submanifold_neighbors = _op.define(reference.submanifold_neighbors, check=_check_submanifold, fake=_fake_submanifold)
_sparse_neighbors = _op.define(reference.sparse_neighbors, check=_check_sparse, fake=_fake_sparse)
for _operator in (_get_indice_pairs, _compact_indice_pairs, _sparse_neighbors):
    _operator.dynamic_output = True
