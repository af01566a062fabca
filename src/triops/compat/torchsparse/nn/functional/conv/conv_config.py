"""The configuration of a convolution of 2.1: `kmap_mode` and `downsample_mode` say which sites there are and where
kernels lie, all else how a GPU of torchsparse's computes, and is without effect here."""

from __future__ import annotations

from enum import Enum
from typing import Any

from triops.compat.torchsparse.nn.functional.conv.conv_mode import ConvMode


class Dataflow(Enum):
    ImplicitGEMM = 0
    GatherScatter = 1
    FetchOnDemand = 2
    CodedCSR = 3


class ConvConfig(dict[str, Any]):
    """A dict whose entries are attributes, too."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"ConvConfig has no attribute {name!r}") from None

    def __setattr__(self, name: str, value: Any) -> None:
        self[name] = value

    def copy(self) -> ConvConfig:
        return ConvConfig(self)


DEFAULTS = {
    "dataflow": Dataflow.ImplicitGEMM,
    "ifsort": False,
    "kmap_mode": "hashmap_on_the_fly",
    "downsample_mode": "spconv",
    "split_mask_num": 1,
    "split_mask_num_bwd": 3,
    "epsilon": 0.0,
    "mm_thresh": 0,
    "FOD_fusion": True,
}

_default = ConvConfig(DEFAULTS)
_global: Any = None


def get_global_conv_config() -> Any:
    return _global


def set_global_conv_config(conv_config: Any) -> None:
    """Use this configuration for convolutions without one of their own. Missing entries are filled in, in place."""
    global _global
    for name, value in DEFAULTS.items():
        conv_config.setdefault(name, value)
    _global = conv_config


def clear_global_conv_config() -> None:
    global _global
    _global = None


def get_default_conv_config(conv_mode: ConvMode = ConvMode.mode0, training: bool = False) -> ConvConfig:
    """The configuration of convolutions that have no other: the object itself, as in torchsparse, not a copy."""
    return _default


def kmap_modes(config: Any) -> tuple[str, str]:
    """`kmap_mode` and `downsample_mode` of a configuration, of the global or of the default one."""
    found = _global if config is None else config
    found = DEFAULTS | dict(_default if found is None else found)
    kmap, downsample = found["kmap_mode"], found["downsample_mode"]
    if kmap not in ("hashmap_on_the_fly", "hashmap") or downsample not in ("spconv", "minkowski"):
        raise ValueError(
            "conv3d: kmap_mode must be 'hashmap_on_the_fly' or 'hashmap' and downsample_mode 'spconv' or 'minkowski', "
            f"got {kmap!r} and {downsample!r}"
        )
    return kmap, downsample
