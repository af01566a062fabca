"""Names of `spconv.pytorch.ops`: the shapes of outputs, lists of pairs and what is computed by them.

The layers do not go this way: they read rulebooks, and have kernels. These functions serve programs that handle lists
of pairs themselves, and are plain torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from triops.nn.activation import Activation
from triops.ops.get_indice_pairs import get_indice_pairs as _get_indice_pairs
from triops.ops.get_indice_pairs import sparse_output_shape
from triops.spconv.constants import (
    ALL_WEIGHT_IS_KRSC,
    FILTER_HWIO,
    SPCONV_DO_SORT,
    SPCONV_USE_DIRECT_TABLE,
    AllocKeys,
)
from triops.spconv.core import AlgoHint, ConvAlgo
from triops.spconv.cppconstants import CPU_ONLY_BUILD
from triops.spconv.missing import missing
from triops.spconv.pytorch.cppcore import get_current_stream

INT32_MAX = 2**31 - 1
DEBUG = DEBUG_INT64_HASH_K = False


def get_conv_output_size(
    input_size: Sequence[int], kernel_size: Sequence[int], stride: Sequence[int], padding: Sequence[int],
    dilation: Sequence[int],
) -> list[int]:  # fmt: skip
    """See `triops.sparse_output_shape`; a kernel of -1 covers its axis."""
    if not isinstance(kernel_size, Sequence):  # one number, or what is refused there
        return sparse_output_shape(input_size, kernel_size, stride, padding, dilation)
    covers = [size == -1 for size in kernel_size]
    sizes = [1 if whole else size for whole, size in zip(covers, kernel_size, strict=True)]
    shape = sparse_output_shape(input_size, sizes, stride, padding, dilation)
    return [1 if whole else size for whole, size in zip(covers, shape, strict=True)]


def get_deconv_output_size(
    input_size: Sequence[int], kernel_size: Sequence[int], stride: Sequence[int], padding: Sequence[int],
    dilation: Sequence[int], output_padding: Sequence[int],
) -> list[int]:  # fmt: skip
    """See `triops.sparse_output_shape` with `transpose=True`."""
    return sparse_output_shape(input_size, kernel_size, stride, padding, dilation, output_padding, transpose=True)


def get_indice_pairs(
    indices: Tensor, batch_size: int, spatial_shape: Sequence[int], algo: ConvAlgo, ksize: Sequence[int],
    stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int], out_padding: Sequence[int],
    subm: bool = False, transpose: bool = False, num_out_act_bound: int = -1,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Output sites int32 [A, 1 + D], pairs int32 [2, K, L] (inputs, outputs), their number for each offset int32 [K].

    See `triops.get_indice_pairs`, which has the first two axes of the pairs the other way round. With `subm` the
    numbers are those of spconv: 0 from the centre on. The offsets behind it have pairs too, as many as those that
    mirror them.
    """
    if subm:  # which fixes them, whatever the caller passes
        stride, padding, out_padding = ([n] * len(spatial_shape) for n in (1, 0, 0))
    sites, pairs, numbers = _get_indice_pairs(
        indices, batch_size, spatial_shape, ksize, stride, padding, dilation, out_padding, subm, transpose
    )
    if subm:
        sites, numbers = indices, numbers.clone()
        numbers[len(numbers) // 2 :] = 0
    return sites, pairs.transpose(0, 1).contiguous(), numbers


def indice_conv(
    features: Tensor, filters: Tensor, indice_pairs: Tensor, indice_pair_num: Tensor, num_activate_out: int,
    inverse: bool = False, subm: bool = False, algo: ConvAlgo = ConvAlgo.Native, timer: Any = None,
    bias: Tensor | None = None, act_alpha: float = 0.0, act_beta: float = 0.0, act_type: Any = Activation.None_,
) -> Tensor:  # fmt: skip
    """Convolution by a list of pairs: features [N, in], filters [out, *kernel, in] -> [num_activate_out, out].

    With `inverse` the pairs are read from output to input. With `subm` every row meets itself at the centre, and the
    numbers of the offsets behind it are read from those that mirror them, as `get_indice_pairs` has them.
    Differentiable in features, filters and bias; half types are summed in float32.
    """
    real = torch.float64 if features.dtype == torch.float64 else torch.float32
    taps = filters.flatten(1, -2).to(real)
    out = torch.zeros((num_activate_out, filters.shape[0]), dtype=real, device=features.device)
    if subm:
        if taps.shape[1] % 2 == 0:
            raise ValueError(f"indice_conv: with subm filters must have an odd kernel, got {list(filters.shape)}")
        if num_activate_out != features.shape[0]:
            raise ValueError(
                f"indice_conv: with subm num_activate_out must be the number of features, {features.shape[0]}, "
                f"got {num_activate_out}"
            )
        before = indice_pair_num[: taps.shape[1] // 2]
        indice_pair_num = torch.cat([before, before.new_zeros(1), before.flip(0)])
        out = features.to(real) @ taps[:, taps.shape[1] // 2].t()
    for offset, inputs, outputs in _pairs(indice_pairs, indice_pair_num, inverse):
        out = out.index_add(0, outputs, features[inputs].to(real) @ taps[:, offset].t())
    if bias is not None:
        out = out + bias
    return Activation.of(act_type)(out.to(features.dtype), act_alpha)


def indice_conv_backward(
    features: Tensor, filters: Tensor, out_bp: Tensor, indice_pairs: Tensor, indice_pair_num: Tensor,
    inverse: bool = False, subm: bool = False, algo: ConvAlgo = ConvAlgo.Native, timer: Any = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The gradients of `indice_conv` with respect to features and filters."""
    with torch.enable_grad():
        leaves = features.detach().requires_grad_(), filters.detach().requires_grad_()
        out = indice_conv(*leaves, indice_pairs, indice_pair_num, out_bp.shape[0], inverse, subm)
        grad_features, grad_filters = torch.autograd.grad(out, leaves, out_bp)
    return grad_features, grad_filters


def indice_maxpool(features: Tensor, indice_pairs: Tensor, indice_pair_num: Tensor, num_activate_out: int) -> Tensor:
    """The largest feature of the inputs of each output, and at least 0, as in spconv."""
    out = features.new_zeros((num_activate_out, features.shape[1]))
    for _, inputs, outputs in _pairs(indice_pairs, indice_pair_num):
        out.scatter_reduce_(0, outputs[:, None].expand(-1, features.shape[1]), features[inputs], "amax")
    return out


def indice_maxpool_backward(
    features: Tensor, out_features: Tensor, out_bp: Tensor, indice_pairs: Tensor, indice_pair_num: Tensor
) -> Tensor:
    """Every input that equals the maximum gets the gradient, as in spconv."""
    grad = torch.zeros_like(features)
    for _, inputs, outputs in _pairs(indice_pairs, indice_pair_num):
        grad.index_add_(0, inputs, out_bp[outputs] * (features[inputs] == out_features[outputs]))
    return grad


def _pairs(
    indice_pairs: Tensor, indice_pair_num: Tensor, inverse: bool = False
) -> Iterator[tuple[int, Tensor, Tensor]]:
    """For each offset that has pairs, its number, the rows of the inputs and those of the outputs."""
    for offset, count in enumerate(indice_pair_num.tolist()):
        if count:
            inputs, outputs = indice_pairs[:, offset, :count].long()
            yield (offset, outputs, inputs) if inverse else (offset, inputs, outputs)


def maximum_value_int_(ten: Tensor, value: int) -> None:
    """Raise the entries of an integer tensor to at least `value`, in place."""
    ten.clamp_(min=value)


def global_pool_rearrange(coords: Tensor, batch_size: int) -> tuple[Tensor, Tensor]:
    """The rows of each element of the batch, ascending, int32 [B, N] with zeros behind, and their numbers int32 [B]."""
    element = coords[:, 0].long()
    counts = torch.zeros(batch_size, dtype=torch.int32, device=coords.device)
    counts.index_add_(0, element, torch.ones_like(element, dtype=torch.int32))
    rows = torch.zeros((batch_size, coords.shape[0]), dtype=torch.int32, device=coords.device)
    for index in range(batch_size):
        found = (element == index).nonzero()[:, 0]
        rows[index, : len(found)] = found.int()
    return rows, counts


_missing = partial(
    missing,
    "spconv.pytorch.ops",
    why="spconv uses it inside its CUDA layers, which are there: see docs/dropin/spconv.md.",
)
get_indice_pairs_implicit_gemm = _missing("get_indice_pairs_implicit_gemm")
implicit_gemm = _missing("implicit_gemm")
implicit_gemm_backward = _missing("implicit_gemm_backward")
indice_maxpool_implicit_gemm = _missing("indice_maxpool_implicit_gemm")
indice_maxpool_implicit_gemm_backward = _missing("indice_maxpool_implicit_gemm_backward")
indice_avgpool_implicit_gemm = _missing("indice_avgpool_implicit_gemm")
indice_avgpool_implicit_gemm_backward = _missing("indice_avgpool_implicit_gemm_backward")
fused_indice_conv = _missing("fused_indice_conv")

__all__ = [
    "ALL_WEIGHT_IS_KRSC",
    "CPU_ONLY_BUILD",
    "DEBUG",
    "DEBUG_INT64_HASH_K",
    "FILTER_HWIO",
    "INT32_MAX",
    "SPCONV_DO_SORT",
    "SPCONV_USE_DIRECT_TABLE",
    "AlgoHint",
    "AllocKeys",
    "ConvAlgo",
    "fused_indice_conv",
    "get_conv_output_size",
    "get_current_stream",
    "get_deconv_output_size",
    "get_indice_pairs",
    "get_indice_pairs_implicit_gemm",
    "global_pool_rearrange",
    "implicit_gemm",
    "implicit_gemm_backward",
    "indice_avgpool_implicit_gemm",
    "indice_avgpool_implicit_gemm_backward",
    "indice_conv",
    "indice_conv_backward",
    "indice_maxpool",
    "indice_maxpool_backward",
    "indice_maxpool_implicit_gemm",
    "indice_maxpool_implicit_gemm_backward",
    "maximum_value_int_",
    "nullcontext",
]
