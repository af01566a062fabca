"""Settings that torchsparse 2.1 has beside the configuration of a convolution. They are kept and change nothing."""

from __future__ import annotations

from enum import Enum

_settings = {"kmap_mode": "hashmap_on_the_fly", "downsample_mode": "spconv"}
_CHOICES = {"kmap_mode": ("hashmap_on_the_fly", "hashmap"), "downsample_mode": ("spconv", "minkowski")}


class ConvMode(Enum):
    mode0 = 0
    mode1 = 1
    mode2 = 2


_mode = ConvMode.mode0


def get_conv_mode() -> ConvMode:
    return _mode


def set_conv_mode(conv_mode: int | ConvMode) -> None:
    global _mode
    _mode = ConvMode(conv_mode)


def get_kmap_mode() -> str:
    return _settings["kmap_mode"]


def set_kmap_mode(kmap_mode: str) -> None:
    _set("kmap_mode", kmap_mode)


def get_downsample_mode() -> str:
    return _settings["downsample_mode"]


def set_downsample_mode(downsample_mode: str) -> None:
    _set("downsample_mode", downsample_mode)


def _set(name: str, value: str) -> None:
    if value not in _CHOICES[name]:
        raise ValueError(f"set_{name}: {name} must be one of {', '.join(_CHOICES[name])}, got {value!r}")
    _settings[name] = value
