"""Every variable of the environment that triops reads, each read and checked here. docs/environment.md describes them.

A value that is not understood, and a name that starts with TRIOPS_ and is none of these, is one warning; the variable
then counts as not set. So a misspelt variable never goes unnoticed and never stops a program.
"""

from __future__ import annotations

import logging
import os
import re
import warnings

VARIABLES = (
    "TRIOPS_BACKEND", "TRIOPS_CHECK", "TRIOPS_LOG", "TRIOPS_RECORD", "TRIOPS_RECORD_LIMIT", "TRIOPS_RECORD_MODE",
    "TRIOPS_TORCHSPARSE",
)  # fmt: skip

LEVELS = ("debug", "info", "warning", "error", "critical")
_SWITCH = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}

DEFAULT_RECORD_LIMIT = 1000, 10**9  # cases, bytes
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9}

# Every call on a GPU asks for this one, and os.environ.get would take a tenth of its host time.
_NAMES = getattr(os.environ, "_data", os.environ)
_CHECK = "TRIOPS_CHECK" if _NAMES is os.environ else os.environ.encodekey("TRIOPS_CHECK")

_warned: set[str] = set()


def warn_of_unknown_names() -> None:
    for name in sorted(os.environ):
        if name.startswith("TRIOPS_") and name not in VARIABLES:
            _warn(f"{name} is not a variable of triops; there are {', '.join(VARIABLES)}")


def reference_forced() -> bool:
    """TRIOPS_BACKEND=reference: every operator of the process runs its reference."""
    value = _value("TRIOPS_BACKEND")
    if value not in ("", "reference"):
        _warn_of_value("TRIOPS_BACKEND", "reference")
    return value == "reference"


def check_values() -> bool:
    """TRIOPS_CHECK=1: index tensors on a GPU are checked by value, too, which waits for the GPU."""
    if _CHECK not in _NAMES:
        return False
    value = _value("TRIOPS_CHECK")
    if value in ("", "0"):
        return False
    switch = _SWITCH.get(value)
    if switch is None:
        _warn_of_value("TRIOPS_CHECK", "1 or 0")
    return bool(switch)


def log_level() -> int | None:
    """TRIOPS_LOG=debug: the level of the logger "triops"; 1 means debug. None: left as it is."""
    value = _value("TRIOPS_LOG")
    switch = _SWITCH.get(value)
    if switch is not None:
        return logging.DEBUG if switch else None
    if value and value not in LEVELS:
        _warn_of_value("TRIOPS_LOG", f"{', '.join(LEVELS)} or 1")
    return getattr(logging, value.upper()) if value in LEVELS else None


def record_folder() -> str | None:
    """TRIOPS_RECORD=DIR: where every operator call is written to."""
    return os.environ.get("TRIOPS_RECORD") or None


def record_shapes_only() -> bool:
    """TRIOPS_RECORD_MODE=shapes: of tensors, shape, dtype, strides, value ranges and a seed are written, no data."""
    value = _value("TRIOPS_RECORD_MODE")
    if value not in ("", "data", "shapes"):
        _warn_of_value("TRIOPS_RECORD_MODE", "data or shapes")
    return value == "shapes"


def record_limit() -> tuple[int, int]:
    """TRIOPS_RECORD_LIMIT=COUNT or COUNT,BYTES: cases and bytes after which a recording ends."""
    text = os.environ.get("TRIOPS_RECORD_LIMIT", "")
    found = parse_limit(text) if text.strip() else DEFAULT_RECORD_LIMIT
    if found is None:
        _warn_of_value("TRIOPS_RECORD_LIMIT", "COUNT or COUNT,BYTES such as 200,500MB")
    return found or DEFAULT_RECORD_LIMIT


def torchsparse_generation() -> str | None:
    """TRIOPS_TORCHSPARSE=1.4 or 2.1: the interface of torchsparse that programs were written for."""
    value = _value("TRIOPS_TORCHSPARSE")
    if value not in ("", "1.4", "2.1"):
        _warn_of_value("TRIOPS_TORCHSPARSE", "1.4 or 2.1")
    return value if value in ("1.4", "2.1") else None


def parse_limit(text: str) -> tuple[int, int] | None:
    """
    >>> parse_limit("50"), parse_limit("200,1.5 GB"), parse_limit("many")
    ((50, 1000000000), (200, 1500000000), None)
    """
    found = re.fullmatch(r"\s*(\d+)\s*(?:,\s*(\d+(?:\.\d+)?)\s*([KMG]?)B?)?\s*", text.upper())
    if found is None:
        return None
    size = DEFAULT_RECORD_LIMIT[1] if found[2] is None else int(float(found[2]) * _UNITS[found[3]])
    return int(found[1]), size


def apply_log_level(log: logging.Logger) -> None:
    """Set the level that TRIOPS_LOG asks for, and print what nobody else would: a library leaves logging alone."""
    level = log_level()
    if level is not None:
        log.setLevel(level)
        if not log.handlers:
            log.addHandler(_PrintUnlessHandled())


class _PrintUnlessHandled(logging.StreamHandler):  # type: ignore[type-arg]
    """Prints to stderr for as long as the program has no logging of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.setFormatter(logging.Formatter(logging.BASIC_FORMAT))

    def emit(self, record: logging.LogRecord) -> None:
        if not logging.getLogger().handlers:
            super().emit(record)


def _value(name: str) -> str:
    return os.environ.get(name, "").strip().lower()


def _warn_of_value(name: str, expected: str) -> None:
    _warn(f"{name} must be {expected}, got {os.environ[name]!r}; it counts as not set")


def _warn(message: str) -> None:
    if message not in _warned:
        _warned.add(message)
        warnings.warn(f"triops: {message}", RuntimeWarning, stacklevel=3)
