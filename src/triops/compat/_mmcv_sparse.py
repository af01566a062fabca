"""The sparse convolutions of `mmcv._ext`: lists of pairs [K, 2, L] on the outside, neighbour tables inside."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

import triops
from triops import _check
from triops.ops.rulebook import sparse_neighbors, submanifold_neighbors

Ints = Sequence[int]
operators = torch.ops.triops


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
    geometry = (indices, int(batchSize), shape, kernel)  # some callers have it as a tensor
    made = triops.get_indice_pairs(*geometry, step, pad, gap, extra, subm, transpose)
    if subm:
        gather = submanifold_neighbors(*geometry, gap)
        remember(made[1], Tables(gather, gather.flip(0)))
    else:
        remember(made[1], Tables(*sparse_neighbors(*geometry, step, pad, gap, extra, transpose)[1:]))
    return list(made)


def get_indice_pairs_backward(indices: Tensor, gridOut: Tensor, *args: Any, axes: int, **kwargs: Any) -> list[Tensor]:
    """As the forward: `gridOut` is scratch memory of mmcv, which triops does not need."""
    return get_indice_pairs_forward(indices, *args, axes=axes, **kwargs)


class Tables(NamedTuple):
    gather: Tensor  # int32 [K, outputs]: the input row, or -1
    scatter: Tensor  # int32 [K, inputs]: the output row, or -1

    @property
    def outputs(self) -> int:
        return self.gather.shape[1]

    @property
    def inputs(self) -> int:
        return self.scatter.shape[1]


# The tables behind a list of pairs. Convolutions read these; the list itself is read only where it came from elsewhere.
# All layers that share an indice_key, and their backward passes, hand in the same tensor.
_known: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def remember(indice_pairs: Tensor, made: Tables) -> Tables:
    _known[indice_pairs] = (_version(indice_pairs), made)
    return made


def tables(indice_pairs: Tensor, indice_num: Tensor, inputs: int, outputs: int, inverse: int) -> Tables:
    """The neighbour tables behind a list of pairs; an inverse convolution swaps inputs and outputs."""
    if inverse:
        return Tables(*reversed(tables(indice_pairs, indice_num, outputs, inputs, 0)))
    version, found = _known.get(indice_pairs, (None, None))
    if found is None or (version, found.outputs, found.inputs) != (_version(indice_pairs), outputs, inputs):
        found = remember(indice_pairs, _make_tables(indice_pairs, indice_num, inputs, outputs))
    made: Tables = found
    return made


def _version(tensor: Tensor) -> int:
    """Changes when the tensor is written to; tensors of inference mode do not count."""
    return 0 if tensor.is_inference() else tensor._version


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

    return Tables(table(rows_out, rows_in, outputs), table(rows_in, rows_out, inputs))


def _check_pairs(indice_pairs: Tensor, indice_num: Tensor) -> None:
    if indice_pairs.dim() != 3 or indice_pairs.shape[1] != 2 or indice_pairs.dtype != torch.int32:
        raise ValueError(
            f"indicePairs must be int32 of shape [K, 2, L], got {indice_pairs.dtype} {list(indice_pairs.shape)}"
        )
    if list(indice_num.shape) != [indice_pairs.shape[0]]:
        raise ValueError(f"indiceNum must have shape [{indice_pairs.shape[0]}], got {list(indice_num.shape)}")


def _taps(filters: Tensor) -> Tensor:
    """mmcv's [*kernel, Cin, Cout] as [Cout, K, Cin], without a copy."""
    return filters.flatten(0, -3).permute(2, 0, 1)


def indice_conv_forward(
    features: Tensor, filters: Tensor, indicePairs: Tensor, indiceNum: Tensor, numActOut: int, _inverse: int,
    _subM: int,
) -> Tensor:  # fmt: skip
    return fused_indice_conv_forward(features, filters, None, indicePairs, indiceNum, numActOut, _inverse, _subM)


def fused_indice_conv_forward(
    features: Tensor, filters: Tensor, bias: Tensor | None, indicePairs: Tensor, indiceNum: Tensor, numActOut: int,
    _inverse: int, _subM: int,
) -> Tensor:  # fmt: skip
    gather, scatter = tables(indicePairs, indiceNum, features.shape[0], int(numActOut), _inverse)
    out: Tensor = operators.sparse_conv(features, _taps(filters), bias, gather, scatter, False, False)
    return out


def indice_conv_backward(
    features: Tensor, filters: Tensor, outGrad: Tensor, indicePairs: Tensor, indiceNum: Tensor, _inverse: int,
    _subM: int,
) -> list[Tensor]:  # fmt: skip
    gather, scatter = tables(indicePairs, indiceNum, features.shape[0], outGrad.shape[0], _inverse)
    # the gradient of the features is the convolution with the tables exchanged
    grad_features = operators.sparse_conv(outGrad, _taps(filters).permute(2, 1, 0), None, scatter, gather, False, False)
    grad_taps = operators.sparse_conv_backward_weight(features, outGrad, gather, scatter, False, False)
    return [grad_features, grad_taps.permute(1, 2, 0).contiguous().view(filters.shape)]


def indice_maxpool_forward(features: Tensor, indicePairs: Tensor, indiceNum: Tensor, numAct: int) -> Tensor:
    """mmcv's maximum starts at 0, as if every window held an empty site."""
    gather, scatter = tables(indicePairs, indiceNum, features.shape[0], int(numAct), 0)
    best: Tensor = operators.sparse_max_pool(features, gather, scatter)[0]
    return best.clamp_(min=0)


def indice_maxpool_backward(
    features: Tensor, outFeatures: Tensor, outGrad: Tensor, indicePairs: Tensor, indiceNum: Tensor
) -> Tensor:
    """Every input that equals the maximum of its window gets the gradient, in mmcv: so no operator of triops fits."""
    _, scatter = tables(indicePairs, indiceNum, features.shape[0], outFeatures.shape[0], 0)
    grad = torch.zeros_like(features, dtype=torch.promote_types(features.dtype, torch.float32))
    for rows in scatter:
        output = rows.clamp(min=0)
        wins = (rows >= 0)[:, None] & (outFeatures[output] == features)
        grad += torch.where(wins, outGrad[output], 0)
    return grad.to(features.dtype)


FUNCTIONS: dict[str, Callable[..., Any]] = {
    function.__name__: function
    for function in (
        indice_conv_forward, indice_conv_backward, fused_indice_conv_forward, indice_maxpool_forward,
        indice_maxpool_backward,
    )
}  # fmt: skip
FUNCTIONS |= {f"get_indice_pairs_{d}d_forward": partial(get_indice_pairs_forward, axes=d) for d in (2, 3, 4)}
FUNCTIONS |= {f"get_indice_pairs_{d}d_backward": partial(get_indice_pairs_backward, axes=d) for d in (2, 3)}
