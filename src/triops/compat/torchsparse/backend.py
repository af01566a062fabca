"""The compiled functions of torchsparse that programs call. The others import, and raise when they are called."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import triops
from triops.compat.torchsparse import _sites
from triops.compat.torchsparse.nn.functional.count import spcount
from triops.compat.torchsparse.nn.functional.devoxelize import spdevoxelize
from triops.compat.torchsparse.nn.functional.hash import sphash
from triops.compat.torchsparse.nn.functional.query import sphashquery
from triops.compat.torchsparse.nn.functional.voxelize import spvoxelize
from triops.compat.torchsparse.utils.to_dense import to_dense
from triops.spconv.missing import missing

_PADDED = 128  # rows of a look-up are filled up to a multiple of this

hash_cpu = hash_cuda = kernel_hash_cpu = kernel_hash_cuda = sphash
count_cpu = count_cuda = spcount


def hash_query_cpu(hash_query: Tensor, hash_target: Tensor, idx_target: Tensor) -> Tensor:
    """int64, of the shape of `hash_query`: one more than the number in `idx_target` of each, 0 where there is none."""
    place = sphashquery(hash_query, hash_target)
    numbers = torch.nn.functional.pad(idx_target.long() + 1, (0, 1))  # the last answers for -1
    return numbers[place]


hash_query_cuda = hash_query_cpu


@torch.no_grad()
def voxelize_forward_cpu(inputs: Tensor, idx: Tensor, counts: Tensor) -> Tensor:
    return spvoxelize(inputs, idx, counts)


@torch.no_grad()
def voxelize_backward_cpu(top_grad: Tensor, idx: Tensor, counts: Tensor, N: int) -> Tensor:
    """[N, C]: the gradient of the points' features."""
    row = idx.long()
    known = (row >= 0) & (row < counts.shape[0])
    row = torch.where(known, row, 0)
    count = counts[row]
    share = torch.where(known & (count > 0), 1 / count.clamp(min=1).to(top_grad.dtype), 0)
    return top_grad[row] * share[:, None]


@torch.no_grad()
def devoxelize_forward_cpu(feat: Tensor, indices: Tensor, weight: Tensor) -> Tensor:
    return spdevoxelize(feat, indices, weight)


@torch.no_grad()
def devoxelize_backward_cpu(top_grad: Tensor, indices: Tensor, weight: Tensor, n: int) -> Tensor:
    """[n, C]: the gradient of the voxels' features."""
    row = torch.where(indices >= 0, indices, n).long()
    made = top_grad.new_zeros((n + 1, top_grad.shape[1]))
    for corner in range(row.shape[1]):
        made.index_add_(0, row[:, corner], top_grad * weight[:, corner, None].to(top_grad.dtype))
    return made[:n]


voxelize_forward_cuda, voxelize_backward_cuda = voxelize_forward_cpu, voxelize_backward_cpu
devoxelize_forward_cuda, devoxelize_backward_cuda = devoxelize_forward_cpu, devoxelize_backward_cpu


@torch.no_grad()
def to_dense_forward_cuda(feats: Tensor, coords: Tensor, spatial_range: Tensor, outputs: Tensor) -> None:
    """Fills `outputs` [B, X, Y, Z, C]."""
    outputs.copy_(to_dense(feats, coords, spatial_range.tolist()))


@torch.no_grad()
def to_dense_backward_cuda(grad: Tensor, coords: Tensor, spatial_range: Tensor, grad_feats: Tensor) -> None:
    """Fills `grad_feats` [N, C]."""
    grad_feats.copy_(grad[tuple(coords.long().T)])


class GPUHashTable:
    """Numbers, or sites as x, y, z, batch, and their rows. A new table is empty whatever `keys` holds."""

    def __init__(self, keys: Tensor | int, vals: Tensor | None = None) -> None:
        self._keys: Tensor | None = None
        self._sites: Tensor | None = None

    def insert_vals(self, keys: Tensor) -> None:
        self._keys = keys

    def lookup_vals(self, keys: Tensor) -> Tensor:
        """int32: one more than the row of each key, 0 where there is none, and zeros up to a multiple of 128."""
        if self._keys is None:
            raise ValueError("GPUHashTable.lookup_vals: insert_vals must come first")
        return _padded(sphashquery(keys, self._keys).int() + 1)

    def insert_coords(self, coords: Tensor) -> None:
        self._sites = coords[:, [3, 0, 1, 2]].contiguous()

    def lookup_coords(self, coords: Tensor, kernel_sizes: Tensor, strides: Tensor, kernel_volume: int) -> Tensor:
        """int32 [A, K]: one more than the row of each site of a kernel at `strides` times each place, 0 where there is
        none, in the order of `get_kernel_offsets`, and rows of zeros up to a multiple of 128."""
        from triops.compat.torchsparse.nn.utils.kernel import get_kernel_offsets

        if self._sites is None:
            raise ValueError("GPUHashTable.lookup_coords: insert_coords must come first")
        sites = coords[:, [3, 0, 1, 2]].clone()
        sites[:, 1:] *= strides
        offsets = get_kernel_offsets(kernel_sizes, device=coords.device).to(sites.dtype)
        return _padded(triops.site_neighbors(self._sites.to(sites.dtype), sites, offsets).T + 1)


GPUHashTable32 = GPUHashTable


def _padded(rows: Tensor) -> Tensor:
    made = rows.new_zeros((-(-rows.shape[0] // _PADDED) * _PADDED, *rows.shape[1:]))
    made[: rows.shape[0]] = rows
    return made


@torch.no_grad()
def downsample_cuda(
    in_coords: Tensor, coords_max: Tensor, coords_min: Tensor, kernel_sizes: Tensor, stride: Tensor, padding: Tensor
) -> Tensor:
    """The sites [A, 4], batch first, that a strided convolution reaches, of those from `coords_min` to `coords_max`."""
    begin = tuple(-p for p in padding.tolist())
    offsets = _sites.kernel_offsets(tuple(kernel_sizes.tolist()), begin, (1, 1, 1), in_coords.device)
    return _sites.reached_sites(in_coords, offsets, tuple(stride.tolist()), coords_min[1:], coords_max[1:])


_MISSING = (
    "build_kernel_map_downsample_hashmap", "build_kernel_map_downsample_hashmap_int32",
    "build_kernel_map_subm_hashmap", "build_kernel_map_subm_hashmap_int32", "build_mask_from_kmap",
    "conv_backward_gather_scatter_cpu", "conv_backward_gather_scatter_cuda", "conv_backward_wgrad_implicit_gemm_cuda",
    "conv_backward_wgrad_implicit_gemm_sorted_cuda", "conv_forward_fetch_on_demand_cuda",
    "conv_forward_fetch_on_demand_no_fusion_cuda", "conv_forward_gather_scatter_cpu",
    "conv_forward_gather_scatter_cuda", "conv_forward_implicit_gemm_cuda", "conv_forward_implicit_gemm_sorted_cuda",
    "convert_transposed_out_in_map", "convolution_backward_cpu", "convolution_backward_cuda",
    "convolution_forward_cpu", "convolution_forward_cuda", "derive_bitmask_from_out_in_map",
    "exclusive_scan_quantified_wrapper", "reduce_bitmask_cuda", "reorder_out_in_map_cuda",
)  # fmt: skip


def __getattr__(name: str) -> Callable[..., Any]:
    if name not in _MISSING:
        raise AttributeError(f"module 'torchsparse.backend' has no attribute {name!r}")
    return missing("torchsparse.backend", name, "It is a part of torchsparse's own convolutions.")
