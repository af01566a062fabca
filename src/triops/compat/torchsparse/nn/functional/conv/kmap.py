"""Kernel maps: the output sites of a convolution, and which input each meets under which offset."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from triops import Rulebook
from triops.compat.torchsparse import _generation, _sites
from triops.compat.torchsparse.nn.functional.conv.conv_config import kmap_modes
from triops.compat.torchsparse.nn.functional.downsample import new_sites, old_sites, reached_of_padding
from triops.compat.torchsparse.tensor import SparseTensor, get_allow_negative_coordinates
from triops.compat.torchsparse.utils.utils import make_ntuple
from triops.spconv.missing import missing

__all__ = ["build_kernel_map", "convert_transposed_out_in_map", "spupsample_generative", "transpose_kernel_map"]

Three = tuple[int, ...]
_HERE = (1, 1, 1)
_WHY = "It prepares tables for torchsparse's CUDA kernels; convolutions do not need it here."

convert_transposed_out_in_map = missing("torchsparse.nn.functional", "convert_transposed_out_in_map", _WHY)
transpose_kernel_map = missing("torchsparse.nn.functional", "transpose_kernel_map", _WHY)


class KernelMap:
    """The rulebook of a convolution, from the sites of a tensor to `coords`.

    Its offsets go x slowest, z fastest, whatever the order of the weights.
    """

    def __init__(self, rulebook: Rulebook, coords: Tensor, spatial_range: Three | None = None) -> None:
        self.rulebook = rulebook
        self.coords = coords
        self.spatial_range = spatial_range
        self.made_for: Any = None  # what of a convolution changes its map, beside kernel and stride
        self._inverse: Rulebook | None = None

    def forward(self, backward: bool, tile: int) -> Rulebook:
        self.rulebook = self.rulebook.prepared(backward=backward, tile=tile)
        return self.rulebook

    def transposed(self, backward: bool, tile: int) -> Rulebook:
        """Of the way back, prepared once."""
        if self._inverse is None:
            self._inverse = self.rulebook.inverse()
        self._inverse = self._inverse.prepared(backward=backward, tile=tile)
        return self._inverse


def kernel_map(
    input: SparseTensor, kernel: Three, stride: Three, padding: Three, config: Any, generative: bool = False
) -> KernelMap:
    """The kernel map from the sites of a tensor."""
    _generation.look_at_columns(input.coords, input.generation)
    sites = input.coords.int()
    if input.generation == _generation.OLD:
        return _of_old(sites[:, [3, 0, 1, 2]], input.coords, kernel, stride, input.stride)
    modes = kmap_modes(config)
    if generative:
        return _generative(sites, kernel, stride, padding, input.spatial_range)
    return _of_new(sites, input.coords, kernel, stride, padding, input.spatial_range, *modes)


def _of_old(sites: Tensor, coords: Tensor, kernel: Three, stride: Three, scale: Three) -> KernelMap:
    first, unit = _sites.centered(kernel, scale), sites.new_tensor([1, *scale])
    numbers = torch.div(sites, unit, rounding_mode="floor")
    whole = scale == _HERE or bool((numbers * unit == sites).all())  # else sites lie between those of their stride
    if max(stride) == 1:
        if whole:
            return KernelMap(_sites.submanifold(numbers, kernel, _HERE, _sites.centered(kernel, _HERE)), coords)
        return KernelMap(_sites.submanifold(sites, kernel, scale, first), coords)
    made = _sites.by_cells(numbers, kernel) if whole and kernel == stride and max(kernel) <= 2 else None
    if made is not None:
        outputs = made[1] * sites.new_tensor([1, *stride]) * unit
        return KernelMap(made[0], outputs[:, [1, 2, 3, 0]].to(coords.dtype))
    outputs = old_sites(sites, stride, kernel, scale)
    rulebook = _sites.between(sites, outputs, kernel, scale, first)
    return KernelMap(rulebook, outputs[:, [1, 2, 3, 0]].to(coords.dtype))


def _of_new(
    sites: Tensor, coords: Tensor, kernel: Three, stride: Three, padding: Three, range_in: Three | None,
    kmap_mode: str, downsample_mode: str,
) -> KernelMap:  # fmt: skip
    range_out = _range_of_outputs(range_in, kernel, stride, padding)
    on_the_fly = kmap_mode == "hashmap_on_the_fly"
    first = _sites.centered(kernel, _HERE)
    if max(stride) == 1:
        if on_the_fly and any(k % 2 == 0 for k in kernel):
            first = (0, 0, 0)
        return KernelMap(_sites.submanifold(sites, kernel, _HERE, first), coords, range_out)
    if not on_the_fly:
        outputs = new_sites(sites, stride, kernel, padding, range_out, downsample_mode)
        scaled = outputs * torch.tensor([1, *stride], dtype=sites.dtype, device=sites.device)
        rulebook = _sites.between(sites, scaled, kernel, _HERE, first)
        return KernelMap(rulebook, outputs.to(coords.dtype), range_out)
    grid = _sites.Grid.of(sites)
    shape = [h + 1 for h in grid.high[1:]] if range_in is None else list(range_in[1:])
    enough = all(s + 2 * p >= k for s, p, k in zip(shape, padding, kernel, strict=True))
    if min(grid.low) >= 0 and enough and not get_allow_negative_coordinates():
        rulebook = Rulebook.sparse(sites, grid.high[0] + 1, shape, list(kernel), list(stride), list(padding))
        return KernelMap(rulebook, rulebook.out_indices.to(coords.dtype), range_out)
    outputs = reached_of_padding(sites, stride, kernel, padding, range_out)
    begin = tuple(-p for p in padding)
    scaled = outputs * torch.tensor([1, *stride], dtype=sites.dtype, device=sites.device)
    return KernelMap(_sites.between(sites, scaled, kernel, _HERE, begin), outputs.to(coords.dtype), range_out)


def _generative(sites: Tensor, kernel: Three, stride: Three, padding: Three, range_in: Three | None) -> KernelMap:
    range_out = _range_of_outputs(range_in, kernel, stride, padding)
    outputs = spupsample_generative(sites, stride, kernel, padding, range_out)
    scaled = sites * torch.tensor([1, *stride], dtype=sites.dtype, device=sites.device)
    rulebook = _sites.between(scaled, outputs, kernel, _HERE, _sites.centered(kernel, _HERE))
    return KernelMap(rulebook, outputs, range_out)


def _range_of_outputs(range_in: Three | None, kernel: Three, stride: Three, padding: Three) -> Three | None:
    if range_in is None:
        return None
    axes = zip(range_in[1:], kernel, stride, padding, strict=True)
    return (range_in[0], *((size + 2 * p - k) // s + 1 for size, k, s, p in axes))


def spupsample_generative(
    _coords: Tensor, stride: Any = 2, kernel_size: Any = 2, padding: Any = 0,
    spatial_range: Sequence[int] | None = None,
) -> Tensor:  # fmt: skip
    """The sites [A, 4] of a kernel at `stride` times each site, held within the range; 2.1. `padding` is not used."""
    if spatial_range is None:
        raise ValueError("spupsample_generative: spatial_range must be given, got None")
    kernel = make_ntuple(kernel_size, ndim=3)
    step = torch.tensor(make_ntuple(stride, ndim=3), dtype=_coords.dtype, device=_coords.device)
    offsets = _sites.kernel_offsets(kernel, _sites.centered(kernel, _HERE), _HERE, _coords.device)
    place = (_coords[:, None, 1:] * step + offsets).reshape(-1, 3)
    last = torch.tensor([size - 1 for size in spatial_range[1:]], dtype=place.dtype, device=place.device)
    place = torch.minimum(place.clamp(min=0), last)
    batch = _coords[:, :1].expand(-1, offsets.shape[0]).reshape(-1, 1)
    return _sites.unique_sites(torch.cat([batch, place], 1))


def build_kernel_map(
    _coords: Tensor, input_node_num: int, kernel_size: Any = 2, stride: Any = 2, padding: Any = 0,
    hashmap_keys: Any = None, hashmap_vals: Any = None, spatial_range: Sequence[int] | None = None,
    mode: str = "hashmap", dataflow: Any = None, downsample_mode: str = "spconv", training: bool = False,
    ifsort: bool = False, generative: bool = False, split_mask_num: int = 1, split_mask_num_bwd: int = 1,
) -> dict[str, Any]:  # fmt: skip
    """The kernel map of a convolution of 2.1 as tensors: "coords" of the outputs; "out_in_map" int32 [A, K], the row of
    the input that each meets, or -1, in the order of the weights; "nbmaps" int32 [P, 2], the pairs of input and output
    row, offset by offset; "nbsizes" [K], how many each offset has; "sizes", the numbers of inputs and outputs;
    "spatial_range" of the outputs. Tables for CUDA kernels are not among them."""
    kernel, step = make_ntuple(kernel_size, ndim=3), make_ntuple(stride, ndim=3)
    pad = make_ntuple(padding, ndim=3)
    range_in = None if spatial_range is None else tuple(spatial_range)
    if generative:
        made = _generative(_coords, kernel, step, pad, range_in)
    else:
        modes = kmap_modes({"kmap_mode": mode, "downsample_mode": downsample_mode})
        made = _of_new(_coords, _coords, kernel, step, pad, range_in, *modes)
    table = in_order_of_weights(made.rulebook.gather.T, kernel)
    offset, output = (table.T >= 0).nonzero(as_tuple=True)
    return {
        "coords": made.coords,
        "out_in_map": table,
        "nbmaps": torch.stack([table[output, offset], output.int()], 1),
        "nbsizes": (table >= 0).sum(0),
        "sizes": (input_node_num, made.coords.shape[0]),
        "spatial_range": made.spatial_range,
    }


def in_order_of_weights(table: Tensor, kernel: Three) -> Tensor:
    """[A, K] with x slowest to the order of weights, where x goes fastest if K is odd."""
    if table.shape[-1] % 2 == 0:
        return table
    return table.reshape(-1, *kernel).permute(0, 3, 2, 1).flatten(1)
