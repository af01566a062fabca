"""What tensors share: their sites at each stride, and the neighbor tables of convolutions."""

from __future__ import annotations

from enum import Enum
from typing import Any


class TensorCacheMode(Enum):
    SEPARATE_TENSOR_CACHE = 0
    GLOBAL_TENSOR_CACHE = 1


class TensorCache:
    """The caches of a tensor and of all tensors made of it."""

    def __init__(self) -> None:
        self.cmaps: dict[Any, Any] = {}
        self.kmaps: dict[Any, Any] = {}
        self.hashmaps: dict[Any, Any] = {}

    def changed(self, **parts: dict[Any, Any]) -> TensorCache:
        """Another one, with some parts exchanged."""
        made = TensorCache()
        made.__dict__.update(self.__dict__ | parts)
        return made


_mode = TensorCacheMode.SEPARATE_TENSOR_CACHE
_global: TensorCache | None = None


def set_tensor_cache_mode(mode: TensorCacheMode) -> None:
    """With GLOBAL_TENSOR_CACHE all new tensors share one cache; clear it after every step."""
    global _mode
    if not isinstance(mode, TensorCacheMode):
        raise TypeError(f"set_tensor_cache_mode: mode must be a TensorCacheMode, got {mode!r}")
    _mode = mode


def get_tensor_cache_mode() -> TensorCacheMode:
    return _mode


def get_global_tensor_cache() -> TensorCache | None:
    return _global


def set_global_tensor_cache(tensor_cache: TensorCache | None) -> None:
    global _global
    _global = tensor_cache


def clear_global_tensor_cache() -> None:
    set_global_tensor_cache(None)


def cache_of_new_tensor() -> TensorCache:
    if _mode is TensorCacheMode.SEPARATE_TENSOR_CACHE:
        return TensorCache()
    if _global is None:
        set_global_tensor_cache(TensorCache())
    assert _global is not None
    return _global
