"""get_indice_pairs: which input site meets which output site of a sparse convolution, as lists of pairs."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from triops import _check, _op
from triops.ops.get_indice_pairs import reference
from triops.ops.rulebook import new_size
from triops.ops.rulebook.geometry import Ints, as_lists, check_convolution, checker, dimensions, output_shape


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
    lists = as_lists(
        "get_indice_pairs", dimensions(indices), spatial_shape, kernel_size, stride, padding, dilation, out_padding
    )
    return _get_indice_pairs(indices, batch_size, *lists, subm, transpose)  # type: ignore[no-any-return]


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
    if not 1 <= axes <= 4:
        raise ValueError(f"{name}: spatial_shape and kernel_size must have from 1 to 4 entries, got {axes}")
    lists = as_lists(name, axes, spatial_shape, kernel_size, stride, padding, dilation, out_padding)
    shape, kernel, step, pad, gap, extra = lists
    check = _check.Checker(name)
    subm, transpose = check.flag("subm", subm), check.flag("transpose", transpose)
    sites = torch.empty((0, 1 + axes), dtype=torch.int32)
    check_convolution(name, sites, 1, shape, kernel, step, pad, gap, extra, subm, transpose)
    return output_shape(shape, kernel, step, pad, gap, extra, subm, transpose)


def _fake_pairs(
    indices: Tensor, batch_size: int, spatial_shape: list[int], kernel_size: list[int], stride: list[int],
    padding: list[int], dilation: list[int], out_padding: list[int], subm: bool, transpose: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    volume = math.prod(kernel_size)
    outputs = indices.shape[0] if subm else new_size()
    return (
        indices.new_empty((outputs, indices.shape[1])),
        indices.new_empty((volume, 2, indices.shape[0]), dtype=torch.int32),
        indices.new_empty((volume,), dtype=torch.int32),
    )


_get_indice_pairs = _op.define(reference.get_indice_pairs, check=checker("get_indice_pairs"), fake=_fake_pairs)
_get_indice_pairs.dynamic_output = True
