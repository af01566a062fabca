"""Normalisations: `MinkowskiEngine.MinkowskiNormalization`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from triops.compat.minkowski_engine.broadcast import spread
from triops.compat.minkowski_engine.common import MinkowskiModuleBase
from triops.compat.minkowski_engine.functional import _wrap_tensor
from triops.compat.minkowski_engine.keys import CoordinateMapKey, PoolingMode
from triops.compat.minkowski_engine.manager import CoordinateManager
from triops.compat.minkowski_engine.pooling import globally_pooled
from triops.compat.minkowski_engine.sparse_tensor import SparseTensor

MEAN = PoolingMode.GLOBAL_AVG_POOLING_KERNEL


class MinkowskiBatchNorm(nn.Module):
    """torch's BatchNorm1d, `bn`, over the sites of all clouds."""

    def __init__(
        self, num_features: int, eps: float = 1e-5, momentum: float = 0.1, affine: bool = True,
        track_running_stats: bool = True,
    ) -> None:  # fmt: skip
        super().__init__()
        self.bn: nn.Module = nn.BatchNorm1d(num_features, eps, momentum, affine, track_running_stats)

    def forward(self, input: Any) -> Any:
        return _wrap_tensor(input, self.bn(input.F))

    def __repr__(self) -> str:
        bn = self.bn
        return (
            f"{type(self).__name__}({bn.num_features}, eps={bn.eps}, momentum={bn.momentum}, affine={bn.affine}, "
            f"track_running_stats={bn.track_running_stats})"
        )


class MinkowskiSyncBatchNorm(MinkowskiBatchNorm):
    """torch's SyncBatchNorm in its place."""

    def __init__(
        self, num_features: int, eps: float = 1e-5, momentum: float = 0.1, affine: bool = True,
        track_running_stats: bool = True, process_group: Any = None,
    ) -> None:  # fmt: skip
        nn.Module.__init__(self)
        self.bn = nn.SyncBatchNorm(num_features, eps, momentum, affine, track_running_stats, process_group)

    @classmethod
    def convert_sync_batchnorm(cls, module: nn.Module, process_group: Any = None) -> nn.Module:
        """The module with every MinkowskiBatchNorm replaced; parameters and statistics are the same tensors."""
        if isinstance(module, MinkowskiBatchNorm):
            made = MinkowskiSyncBatchNorm.__new__(MinkowskiSyncBatchNorm)
            nn.Module.__init__(made)
            made.bn = nn.SyncBatchNorm.convert_sync_batchnorm(module.bn, process_group)
            return made.train(module.training)
        for name, child in list(module.named_children()):
            module.add_module(name, cls.convert_sync_batchnorm(child, process_group))
        return module


def normalised(features: Tensor, key: CoordinateMapKey, manager: CoordinateManager, eps: float) -> Tensor:
    """[N, C]: every cloud and channel with mean 0 and variance 1."""
    numbers = manager.batches(key)
    centered = features - spread(globally_pooled(features, MEAN, numbers), key, manager)
    variance = globally_pooled(centered.square(), MEAN, numbers)
    return centered * spread((variance + eps).rsqrt(), key, manager)


class MinkowskiInstanceNormFunction:
    @staticmethod
    def apply(
        in_feat: Tensor, in_coords_key: CoordinateMapKey, glob_coords_key: CoordinateMapKey | None = None,
        coords_manager: CoordinateManager | None = None, gpooling_mode: PoolingMode = MEAN,
    ) -> Tensor:  # fmt: skip
        if coords_manager is None:
            raise TypeError("MinkowskiInstanceNormFunction: coords_manager must be given")
        return normalised(in_feat, in_coords_key, coords_manager, 1e-8)


class _InstanceNorm(MinkowskiModuleBase):
    EPS: float

    def __init__(self, num_features: int) -> None:
        super().__init__()
        self.num_features = num_features
        self.eps = self.EPS
        self.weight = nn.Parameter(torch.ones(1, num_features))
        self.bias = nn.Parameter(torch.zeros(1, num_features))

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)
        nn.init.zeros_(self.bias)

    def forward(self, input: SparseTensor) -> SparseTensor:
        if not isinstance(input, SparseTensor):
            raise TypeError(f"{type(self).__name__}: input must be a SparseTensor, got {type(input).__name__}")
        found = normalised(input.F, input.coordinate_map_key, input.coordinate_manager, self.eps)
        return input._like(found * self.weight + self.bias)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(nchannels={self.num_features})"


class MinkowskiInstanceNorm(_InstanceNorm):
    """Every cloud and channel by itself, then `weight` and `bias`, [1, C]."""

    EPS = 1e-8


class MinkowskiStableInstanceNorm(_InstanceNorm):
    """The same with a larger epsilon."""

    EPS = 1e-6


__all__ = [
    "MinkowskiBatchNorm", "MinkowskiInstanceNorm", "MinkowskiInstanceNormFunction", "MinkowskiStableInstanceNorm",
    "MinkowskiSyncBatchNorm",
]  # fmt: skip
