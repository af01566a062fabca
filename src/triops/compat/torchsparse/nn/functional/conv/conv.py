"""The convolution."""

from __future__ import annotations

import math
import warnings
from typing import Any

import torch
from torch import Tensor

import triops
from triops._dtypes import autocast_dtype
from triops.compat.torchsparse import _generation
from triops.compat.torchsparse._arguments import named_arguments
from triops.compat.torchsparse.nn.functional.conv.conv_config import kmap_modes
from triops.compat.torchsparse.nn.functional.conv.kmap import KernelMap, kernel_map
from triops.compat.torchsparse.tensor import SparseTensor
from triops.compat.torchsparse.utils.utils import make_ntuple
from triops.ops.sparse_conv import preferred_tile

__all__ = ["conv3d"]

ORDER = {
    _generation.OLD: ("dilation", "transposed"),
    _generation.NEW: ("padding", "dilation", "config", "transposed", "generative", "training"),
}
_ALL = set(ORDER[_generation.NEW])
_ONE = (1, 1, 1)


def conv3d(
    input: SparseTensor, weight: Tensor, kernel_size: Any, bias: Tensor | None = None, stride: Any = 1, *args: Any,
    **kwargs: Any,
) -> SparseTensor:  # fmt: skip
    """A convolution, strided, transposed or generative. Differentiable.

    Args:
        weight: [K, Cin, Cout] in the order of `get_kernel_offsets`, or [Cin, Cout] where K is 1.
        bias: [Cout].
        stride: of the outputs over the inputs; with `transposed` of the inputs over the outputs.

    What follows is `dilation`, `transposed` in torchsparse 1.4, and `padding`, `dilation`, `config`, `transposed`,
    `generative`, `training` in 2.1; the input tells which of the two it is. Submanifold convolutions (stride 1) have no
    use for a padding. `dilation` is ignored, as torchsparse ignores it. A transposed convolution goes back to the sites
    that the convolution with the same kernel, stride and dilation came from.
    """
    more = named_arguments("conv3d", ORDER[input.generation], args, kwargs)
    if not more.keys() <= _ALL:
        raise TypeError(f"conv3d: unexpected arguments {', '.join(sorted(more.keys() - _ALL))}")
    kernel, step = make_ntuple(kernel_size, ndim=3), make_ntuple(stride, ndim=3)
    dilation = make_ntuple(more.get("dilation", 1), ndim=3)
    if dilation != _ONE and math.prod(kernel) > 1:
        _warn_of_dilation()
    if kernel == _ONE and step == _ONE:
        feats = input.feats.matmul(weight if weight.dim() == 2 else weight[0])
        return input.like(feats if bias is None else feats + bias.to(feats.dtype))
    if weight.dim() == 2:
        weight = weight[None]
    if weight.dim() != 3 or weight.shape[0] != math.prod(kernel):
        raise ValueError(f"conv3d: weight must have shape [{math.prod(kernel)}, Cin, Cout], got {list(weight.shape)}")
    if more.get("transposed", False):
        return _transposed(input, weight, bias, kernel, step, dilation, more)
    padding = make_ntuple(more.get("padding", 0), ndim=3)
    found = _cached(input, kernel, step, padding, dilation, more.get("config"))
    if max(step) == 1:
        return _with_sites(input, input.like(_compute(input.feats, weight, bias, kernel, found, False)))
    coarse = tuple(a * b for a, b in zip(input.stride, step, strict=True))
    feats = _compute(input.feats, weight, bias, kernel, found, False)
    return _with_sites(input, input.like(feats, found.coords, coarse, found.spatial_range))


def _transposed(
    input: SparseTensor, weight: Tensor, bias: Tensor | None, kernel: tuple[int, ...], stride: tuple[int, ...],
    dilation: tuple[int, ...], more: dict[str, Any],
) -> SparseTensor:  # fmt: skip
    fine = tuple(a // b for a, b in zip(input.stride, stride, strict=True))
    caches = input._caches
    if more.get("generative", False):
        padding = make_ntuple(more.get("padding", 0), ndim=3)
        found = kernel_map(input, kernel, stride, padding, more.get("config"), generative=True)
        feats = _compute(input.feats, weight, bias, kernel, found, False)
        caches.kmaps, caches.hashmaps = {}, {}
        caches.cmaps[fine] = found.coords, found.spatial_range
        return input.like(feats, found.coords, fine, found.spatial_range)
    key = fine, kernel, stride, dilation
    if key not in caches.kmaps or fine not in caches.cmaps:
        raise ValueError(
            f"conv3d: a transposed convolution needs one before it that came from stride {fine} with kernel size "
            f"{kernel}, stride {stride} and dilation {dilation}; of this tensor there is none"
        )
    sites = caches.cmaps[fine]
    coords, spatial_range = sites if isinstance(sites, tuple) else (sites, None)
    feats = _compute(input.feats, weight, bias, kernel, caches.kmaps[key], True)
    return input.like(feats, coords, fine, spatial_range)


def _cached(
    input: SparseTensor, kernel: tuple[int, ...], stride: tuple[int, ...], padding: tuple[int, ...],
    dilation: tuple[int, ...], config: Any,
) -> KernelMap:  # fmt: skip
    """The kernel map that earlier convolutions of these sites have left, or a new one. The first of each kernel and
    stride is the one that transposed convolutions find."""
    kmaps = input._caches.kmaps
    key: tuple[Any, ...] = (input.stride, kernel, stride, dilation)
    wanted = (padding if max(stride) > 1 else None, kmap_modes(config))
    made: KernelMap | None = kmaps.get(key)
    if made is not None and made.made_for != wanted:
        key = (*key, *wanted)
        made = kmaps.get(key)
    if made is None:
        made = kmaps[key] = kernel_map(input, kernel, stride, padding, config)
        made.made_for = wanted
    return made


def _compute(
    feats: Tensor, weight: Tensor, bias: Tensor | None, kernel: tuple[int, ...], found: KernelMap, transposed: bool
) -> Tensor:
    trained = torch.is_grad_enabled() and (feats.requires_grad or weight.requires_grad)
    if weight.dtype != feats.dtype and weight.dtype != torch.float32:
        feats = feats.to(weight.dtype)
    if bias is not None:
        bias = bias.to(feats.dtype)
    tile = preferred_tile(autocast_dtype(feats), weight.shape[1], weight.shape[2])
    rulebook = found.transposed(trained, tile) if transposed else found.forward(trained, tile)
    return triops.sparse_conv(feats, _of_rulebook(weight, kernel), rulebook, bias)


def _of_rulebook(weight: Tensor, kernel: tuple[int, ...]) -> Tensor:
    """[K, Cin, Cout] -> [Cout, *kernel, Cin], a view."""
    if weight.shape[0] % 2 == 0:
        return weight.view(*kernel, *weight.shape[1:]).permute(4, 0, 1, 2, 3)
    return weight.view(*kernel[::-1], *weight.shape[1:]).permute(4, 2, 1, 0, 3)


def _with_sites(input: SparseTensor, output: SparseTensor) -> SparseTensor:
    """The output, with the sites of both noted for the way back."""
    for tensor in (input, output):
        old = tensor.generation == _generation.OLD
        tensor._caches.cmaps.setdefault(tensor.stride, tensor.coords if old else (tensor.coords, tensor.spatial_range))
    return output


_warned = False


def _warn_of_dilation() -> None:
    global _warned
    if not _warned:
        _warned = True
        warnings.warn(
            "torchsparse: dilation is ignored, as torchsparse ignores it: kernels always lie on adjacent sites, and "
            "checkpoints were trained with that",
            RuntimeWarning,
            stacklevel=4,
        )
