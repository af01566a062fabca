"""The sparse convolutions of `mmcv._ext`: lists of pairs [K, 2, L] on the outside, neighbour tables inside."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

import triops
from triops import _check
from triops.compat._extension import in_mode_of_caller
from triops.ops.rulebook import Rulebook, packed_pairs
from triops.ops.rulebook.plans import Pairs
from triops.ops.rulebook.rulebook import Tables, scatter_of
from triops.ops.sparse_conv import convolution, features_gradient, weight_gradient

Ints = Sequence[int]


def get_indice_pairs_forward(
    indices: Tensor, batchSize: int, outSpatialShape: Ints, spatialShape: Ints, kernelSize: Ints, stride: Ints,
    padding: Ints, dilation: Ints, outPadding: Ints, _subM: int, _transpose: int, *, axes: int,
) -> list[Tensor]:  # fmt: skip
    if indices.dim() != 2 or indices.shape[1] != 1 + axes:
        raise ValueError(
            f"get_indice_pairs_{axes}d: indices must have shape [L, {1 + axes}], got {list(indices.shape)}"
        )
    shape, kernel, step, pad, gap, extra = (
        [int(size) for size in sizes] for sizes in (spatialShape, kernelSize, stride, padding, dilation, outPadding)
    )
    subm, transpose = bool(_subM), bool(_transpose)
    if subm:  # mmcv takes these as given, whatever its caller passes
        step, pad, extra, transpose = [1] * axes, [0] * axes, [0] * axes, False
    elif not transpose:
        extra = [0] * axes
    grid = triops.sparse_output_shape(shape, kernel, step, pad, gap, extra, subm, transpose)
    if list(grid) != [int(size) for size in outSpatialShape]:
        raise ValueError(
            f"get_indice_pairs_{axes}d: outSpatialShape must be {list(grid)} for these parameters, "
            f"got {list(outSpatialShape)}"
        )
    sites = indices, int(batchSize), shape, kernel  # some callers have the batch size as a tensor
    if subm:
        return [indices.clone(), *_list_of(Rulebook.submanifold(*sites, gap))]
    rulebook = Rulebook.sparse(*sites, step, pad, gap, extra, transpose)
    return [rulebook.out_indices, *_list_of(rulebook)]


def get_indice_pairs_backward(indices: Tensor, gridOut: Tensor, *args: Any, axes: int, **kwargs: Any) -> list[Tensor]:
    """As the forward: `gridOut` is scratch memory of mmcv, which triops does not need."""
    return get_indice_pairs_forward(indices, *args, axes=axes, **kwargs)


# mmcv hands a list of pairs from layer to layer and nothing else, so the list carries its rulebook with it, and the
# plans that its layers need; in training those of gradients, too, since mmcv gives the same list to the backward.
RULEBOOK = "triops_rulebook"


def _list_of(rulebook: Rulebook) -> tuple[Tensor, Tensor]:
    """-> indicePairs int32 [K, 2, L], -1 behind the pairs, and indiceNum int32 [K]."""
    training = torch.is_grad_enabled()
    with torch.inference_mode(False):  # a tensor of inference mode would not tell that it was written to
        scatter, outputs = scatter_of(rulebook.tables), rulebook.tables.gather.shape[1]
        plan = packed_pairs(scatter, outputs)
        indice_pairs, num = Pairs.of(plan, *scatter.shape)
        slots = torch.arange(scatter.shape[1], dtype=torch.int32, device=num.device)
        indice_pairs.masked_fill_((slots >= num[:, None])[:, None], -1)
        num = num.clone()  # who writes to it does not write to the plan
    if not rulebook.mirrored:
        rulebook.tables = rulebook.tables._replace(scatter=scatter, transposed_pairs=plan)
    versions = _version(indice_pairs), _version(num)
    setattr(indice_pairs, RULEBOOK, (versions, num, rulebook.prepared(backward=training).tables))
    return indice_pairs, num


def tables(indice_pairs: Tensor, indice_num: Tensor, inputs: int, outputs: int, inverse: int) -> Tables:
    """The tables behind a list of pairs; an inverse convolution swaps inputs and outputs.

    Read from the list where it came from elsewhere, it or its counts were written to, or other numbers of rows or other
    counts are asked for. On a GPU counts of another tensor are taken for the same: to look would wait for it.
    """
    if inverse:
        return tables(indice_pairs, indice_num, outputs, inputs, 0).inverse()
    known: tuple[tuple[int, int], Tensor, Tables] | None = getattr(indice_pairs, RULEBOOK, None)
    if known is not None:
        versions, num, found = known
        rows = found.gather.shape[1], found.inputs
        same = (versions, rows) == ((_version(indice_pairs), _version(num)), (outputs, inputs))
        if same and (
            indice_num is num or not indice_num.is_cpu or not num.is_cpu or torch.equal(indice_num.to(num.dtype), num)
        ):
            return found
    return _make_tables(indice_pairs, indice_num, inputs, outputs)


def _version(tensor: Tensor) -> int:
    """Changes when the tensor is written to."""
    return -1 if tensor.is_inference() else tensor._version


def _make_tables(indice_pairs: Tensor, indice_num: Tensor, inputs: int, outputs: int) -> Tables:
    """A pair with a row that does not exist is dropped on a GPU and refused on a CPU."""
    _check_pairs(indice_pairs, indice_num)
    slots = torch.arange(indice_pairs.shape[2], dtype=torch.int32, device=indice_pairs.device)
    # most slots are empty, so everything below goes over the pairs and not over the list
    offset, slot = (slots < indice_num.to(indice_pairs.device)[:, None]).nonzero(as_tuple=True)
    rows_in, rows_out = indice_pairs[offset, 0, slot], indice_pairs[offset, 1, slot]
    valid = (rows_in >= 0) & (rows_in < inputs) & (rows_out >= 0) & (rows_out < outputs)
    if (indice_pairs.device.type == "cpu" or _check.strict()) and not bool(valid.all()):
        raise IndexError(f"indicePairs holds a pair outside of {inputs} inputs and {outputs} outputs")
    offsets = indice_pairs.shape[0]

    def table(rows: Tensor, values: Tensor, count: int) -> Tensor:
        """[K, count] with `values` at `rows` where valid, and -1 elsewhere."""
        spare = offsets * count  # one cell behind the table takes what is not valid
        cells = values.new_full((spare + 1,), -1)
        cells[torch.where(valid, offset * count + rows, spare)] = values
        return cells[:-1].view(offsets, count)

    return Tables(table(rows_out, rows_in, outputs), inputs, table(rows_in, rows_out, inputs))


def _check_pairs(indice_pairs: Tensor, indice_num: Tensor) -> None:
    if indice_pairs.dim() != 3 or indice_pairs.shape[1] != 2 or indice_pairs.dtype != torch.int32:
        raise ValueError(
            f"indicePairs must be int32 of shape [K, 2, L], got {indice_pairs.dtype} {list(indice_pairs.shape)}"
        )
    if list(indice_num.shape) != [indice_pairs.shape[0]]:
        raise ValueError(f"indiceNum must have shape [{indice_pairs.shape[0]}], got {list(indice_num.shape)}")


def _matrices(filters: Tensor, offsets: int) -> Tensor:
    """mmcv's [*kernel, Cin, Cout] as [Cout, K, Cin], without a copy.

    mmcv goes through the pairs that there are, and some networks (Cylinder3D) share the list of a smaller kernel: then
    the first filters are used and the others are not.
    """
    matrices = filters.flatten(0, -3).permute(2, 0, 1)
    if matrices.shape[1] < offsets:
        raise ValueError(
            f"indicePairs has {offsets} kernel offsets, and filters of shape {list(filters.shape)} only "
            f"{matrices.shape[1]}"
        )
    return matrices[:, :offsets]


def indice_conv_forward(
    features: Tensor, filters: Tensor, indicePairs: Tensor, indiceNum: Tensor, numActOut: int, _inverse: int,
    _subM: int,
) -> Tensor:  # fmt: skip
    return fused_indice_conv_forward(features, filters, None, indicePairs, indiceNum, numActOut, _inverse, _subM)


def fused_indice_conv_forward(
    features: Tensor, filters: Tensor, bias: Tensor | None, indicePairs: Tensor, indiceNum: Tensor, numActOut: int,
    _inverse: int, _subM: int,
) -> Tensor:  # fmt: skip
    found = tables(indicePairs, indiceNum, features.shape[0], int(numActOut), _inverse)
    return convolution(features, _matrices(filters, indicePairs.shape[0]), bias, found)


def indice_conv_backward(
    features: Tensor, filters: Tensor, outGrad: Tensor, indicePairs: Tensor, indiceNum: Tensor, _inverse: int,
    _subM: int,
) -> list[Tensor]:  # fmt: skip
    found = tables(indicePairs, indiceNum, features.shape[0], outGrad.shape[0], _inverse)
    grad_features = features_gradient(outGrad, _matrices(filters, indicePairs.shape[0]), found)
    grad = weight_gradient(features, outGrad, found).permute(1, 2, 0)
    grad_filters = torch.zeros_like(filters, memory_format=torch.contiguous_format)
    grad_filters.flatten(0, -3)[: grad.shape[0]] = grad
    return [grad_features, grad_filters]


def indice_maxpool_forward(features: Tensor, indicePairs: Tensor, indiceNum: Tensor, numAct: int) -> Tensor:
    found = tables(indicePairs, indiceNum, features.shape[0], int(numAct), 0)
    best: Tensor = torch.ops.triops.sparse_max_pool_from_zero(features, found.gather, scatter_of(found))
    return best


def indice_maxpool_backward(
    features: Tensor, outFeatures: Tensor, outGrad: Tensor, indicePairs: Tensor, indiceNum: Tensor
) -> Tensor:
    scatter = scatter_of(tables(indicePairs, indiceNum, features.shape[0], outFeatures.shape[0], 0))
    grad: Tensor = torch.ops.triops.sparse_max_pool_from_zero_backward(outGrad, features, outFeatures, scatter)
    return grad


FUNCTIONS: dict[str, Callable[..., Any]] = {
    function.__name__: function
    for function in (
        indice_conv_forward, indice_conv_backward, fused_indice_conv_forward, indice_maxpool_forward,
        indice_maxpool_backward,
    )
}  # fmt: skip
for _axes in (2, 3, 4):
    FUNCTIONS[f"get_indice_pairs_{_axes}d_forward"] = in_mode_of_caller(partial(get_indice_pairs_forward, axes=_axes))
for _axes in (2, 3):
    FUNCTIONS[f"get_indice_pairs_{_axes}d_backward"] = in_mode_of_caller(partial(get_indice_pairs_backward, axes=_axes))
