"""Names of `spconv.pytorch.core`."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import _symbolic_trace
from torch.fx._symbolic_trace import ProxyableClassMeta

from triops import nn
from triops.nn.sparse_tensor import IndiceData
from triops.spconv.errors import RefusedType, RefusedValue

ImplicitGemmIndiceData = IndiceData  # there is one form of rulebook here


def _warn_now(logger: logging.Logger) -> None:
    """torch's metaclass asks a function that warns its callers, once in a process: here, where nobody listens."""
    before, logger.disabled = logger.disabled, True
    _symbolic_trace.is_fx_tracing()
    logger.disabled = before


_warn_now(logging.getLogger(_symbolic_trace.__name__))


class SparseConvTensor(nn.SparseConvTensor, metaclass=ProxyableClassMeta):
    """See `triops.nn.SparseConvTensor`; indices must be int32, and what is refused is an AssertionError too.

    >>> import torch
    >>> SparseConvTensor(torch.rand(2, 3), torch.tensor([[0, 1], [0, 4]]).int(), [5], 1)
    SparseConvTensor[shape=torch.Size([2, 3])]
    """

    def __init__(
        self, features: Tensor, indices: Tensor, spatial_shape: Sequence[int], batch_size: int,
        grid: Tensor | None = None, voxel_num: Tensor | None = None, indice_dict: dict[str, Any] | None = None,
        benchmark: bool = False, permanent_thrust_allocator: bool = False, enable_timer: bool = False,
        force_algo: Any = None,
    ) -> None:  # fmt: skip
        if isinstance(indices, Tensor) and indices.dtype != torch.int32:
            raise RefusedType(f"SparseConvTensor: indices must be int32, got {indices.dtype}")
        try:
            super().__init__(
                features, indices, spatial_shape, batch_size, grid, voxel_num, indice_dict, benchmark,
                permanent_thrust_allocator, enable_timer, force_algo,
            )  # fmt: skip
        except ValueError as error:
            raise RefusedValue(str(error)) from None
        except TypeError as error:
            raise RefusedType(str(error)) from None

    def select_by_index(self, valid_indices: Tensor) -> SparseConvTensor:
        """Raises ValueError, as in spconv, whose own function assigns features and so never returns."""
        raise ValueError(
            "SparseConvTensor.select_by_index: features cannot be assigned; write SparseConvTensor(x.features[rows], "
            "x.indices[rows], x.spatial_shape, x.batch_size)"
        )

    def __repr__(self) -> str:
        return f"SparseConvTensor[shape={self._features.shape}]"


class ThrustSortAllocator:
    """The scratch memory that spconv keeps for sorting. Layers here take theirs from torch."""

    def __init__(self, device: torch.device) -> None:
        self.device = device


def scatter_nd(indices: Tensor, updates: Tensor, shape: Sequence[int]) -> Tensor:
    """Zeros of `shape` with `updates` [N, ...] at `indices` [N, D]."""
    out = updates.new_zeros(list(shape))
    rows = indices.reshape(-1, indices.shape[-1]).long()
    out[tuple(rows.unbind(1))] = updates.reshape(rows.shape[0], *shape[indices.shape[-1] :])
    return out


def expand_nd(ndim: int, val: Any) -> list[int]:
    """One integer for each axis."""
    values = [val] * ndim if isinstance(val, int) else [int(v) for v in val]
    if len(values) != ndim:
        raise ValueError(f"expand_nd: expected an integer or {ndim} integers, got {values}")
    return values


__all__ = [
    "ImplicitGemmIndiceData",
    "IndiceData",
    "SparseConvTensor",
    "ThrustSortAllocator",
    "expand_nd",
    "scatter_nd",
]
