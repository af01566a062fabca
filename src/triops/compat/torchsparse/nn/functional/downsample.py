"""The output sites of strided convolutions."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from triops.compat.torchsparse import _generation, _sites
from triops.compat.torchsparse._arguments import named_arguments
from triops.compat.torchsparse.utils.utils import make_ntuple

__all__ = ["spdownsample"]

_ORDER = {_generation.OLD: ("tensor_stride",), _generation.NEW: ("padding", "spatial_range", "downsample_mode")}


def spdownsample(coords: Tensor, stride: Any = 2, kernel_size: Any = 2, *args: Any, **kwargs: Any) -> Tensor:
    """The sites [A, 4] that a convolution with this stride leaves, in ascending order, in the columns of `coords`.

    What follows is `tensor_stride` in torchsparse 1.4, and `padding`, `spatial_range` (of the outputs) and
    `downsample_mode` in 2.1.
    """
    old = "tensor_stride" in kwargs or (_generation.of_caller() == _generation.OLD and not kwargs)
    generation = _generation.OLD if old else _generation.NEW
    more = named_arguments("spdownsample", _ORDER[generation], args, kwargs)
    step, kernel = make_ntuple(stride, ndim=3), make_ntuple(kernel_size, ndim=3)
    if old:
        sites = coords[:, [3, 0, 1, 2]]
        return old_sites(sites, step, kernel, make_ntuple(more.get("tensor_stride", 1), ndim=3))[:, [1, 2, 3, 0]]
    return new_sites(
        coords, step, kernel, make_ntuple(more.get("padding", 0), ndim=3), more.get("spatial_range"),
        more.get("downsample_mode", "spconv"),
    )  # fmt: skip


def old_sites(sites: Tensor, stride: tuple[int, ...], kernel: tuple[int, ...], scale: tuple[int, ...]) -> Tensor:
    """Of 1.4: cells, by their lowest corner, where the kernel has their size; else all that it reaches from a site,
    but none before the first site of any axis. scale: the stride of the sites."""
    step = tuple(s * t for s, t in zip(stride, scale, strict=True))
    if whole_cells(stride, kernel):
        return _sites.coarse_sites(sites, step, scaled=False)
    if sites.shape[0] == 0:
        return sites
    offsets = -_sites.kernel_offsets(kernel, _sites.centered(kernel, scale), scale, sites.device)
    lowest = sites[:, 1:].amin(0)
    cell = torch.tensor(step, dtype=sites.dtype, device=sites.device)
    found = _sites.reached_sites(sites, offsets, step, -torch.div(-lowest, cell, rounding_mode="floor"), None)
    return found * torch.tensor([1, *step], dtype=sites.dtype, device=sites.device)


def new_sites(
    sites: Tensor, stride: tuple[int, ...], kernel: tuple[int, ...], padding: tuple[int, ...],
    spatial_range: tuple[int, ...] | None, mode: str,
) -> Tensor:  # fmt: skip
    """Of 2.1 in kmap_mode "hashmap": cells where the kernel has their size or the mode is "minkowski", else all that
    the kernel reaches. spatial_range: of the outputs."""
    if mode not in ("spconv", "minkowski"):
        raise ValueError(f"spdownsample: downsample_mode must be 'spconv' or 'minkowski', got {mode!r}")
    if whole_cells(stride, kernel) or mode == "minkowski":
        return _sites.coarse_sites(sites, stride, scaled=True)
    return reached_of_padding(sites, stride, kernel, padding, spatial_range)


def reached_of_padding(
    sites: Tensor, stride: tuple[int, ...], kernel: tuple[int, ...], padding: tuple[int, ...],
    spatial_range: tuple[int, ...] | None,
) -> Tensor:  # fmt: skip
    """All o with o * stride - padding + j = site for some offset j of the kernel, within the range of the outputs, or
    without one up to the last whose kernel ends by the last site."""
    if sites.shape[0] == 0:
        return sites
    from triops.compat.torchsparse.tensor import get_allow_negative_coordinates

    extent = torch.tensor([k - 1 for k in kernel], dtype=sites.dtype, device=sites.device)
    pad = torch.tensor(padding, dtype=sites.dtype, device=sites.device)
    step = torch.tensor(stride, dtype=sites.dtype, device=sites.device)
    low = torch.zeros_like(step)
    if get_allow_negative_coordinates():
        low = torch.div(sites[:, 1:].amin(0) - 2 * pad + extent, step, rounding_mode="trunc")
    if spatial_range is None:
        high = torch.div(sites[:, 1:].amax(0) + 2 * pad - extent, step, rounding_mode="floor")
    else:
        high = torch.tensor([size - 1 for size in spatial_range[1:]], dtype=sites.dtype, device=sites.device)
    offsets = _sites.kernel_offsets(kernel, tuple(-p for p in padding), (1, 1, 1), sites.device)
    return _sites.reached_sites(sites, offsets, stride, low, high)


def whole_cells(stride: tuple[int, ...], kernel: tuple[int, ...]) -> bool:
    return all(s in (1, k) for s, k in zip(stride, kernel, strict=True))
