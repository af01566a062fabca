"""What `triops info` tells: versions, devices, which backend serves each operator, and what to do about a gap."""

from __future__ import annotations

import os
import platform
from importlib import metadata
from importlib.util import find_spec

import torch

from triops import __version__
from triops._op import OPERATORS, REQUIREMENTS, why_unusable


def versions() -> dict[str, str]:
    found = {"triops": __version__, "python": platform.python_version(), "torch": torch.__version__}
    for package in ("numba", "triton", "numpy"):
        found[package] = _version(package)
    return found


def _version(package: str) -> str:
    if find_spec(package) is None:
        return "not installed"
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:  # a folder on the path that nobody installed
        return "unknown"


def devices() -> list[str]:
    found = [f"cpu: {torch.get_num_threads()} of {os.cpu_count()} threads"]
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            name, (major, minor) = torch.cuda.get_device_name(index), torch.cuda.get_device_capability(index)
            found.append(f"cuda:{index}: {name}, compute capability {major}.{minor}")
    return found


def serving() -> dict[str, dict[str, str]]:
    """For each operator, which backend a call on a CPU and on a GPU takes."""
    table = {}
    for operator in OPERATORS.values():
        table[operator.name] = {
            backend: package if backend in operator.backends and not why_unusable(backend) else "reference"
            for backend, (package, _) in REQUIREMENTS.items()
        }
    return table


def serving_together() -> dict[str, list[str]]:
    """From "on CPU numba, on GPU triton" to the operators that this is true of."""
    found: dict[str, list[str]] = {}
    for name, by in serving().items():
        found.setdefault(f"on CPU {by['cpu']}, on GPU {by['gpu']}", []).append(name)
    return found


def cache_directory() -> str:
    if why_unusable("cpu"):
        return "none, without numba"
    from triops._cpu.cache import cache_directory

    return cache_directory() or "none writable: kernels are compiled anew in every process"


def dropin() -> list[str]:
    """Whether modules of other libraries are supplied, and whose are in use."""
    from triops.compat import _startup

    return _startup.status()


def remedies() -> list[str]:
    """One line for each thing that is missing and matters here."""
    found = []
    for backend in ("cpu", "gpu") if torch.cuda.is_available() else ("cpu",):
        if reason := why_unusable(backend):
            found.append(f"{backend.upper()} calls use the slow reference: {reason}")
    if not torch.cuda.is_available():
        found.append("No GPU that torch can use: everything runs on the CPU.")
    if find_spec("matplotlib") is None:
        found.append("`triops demo` draws no picture. Remedy: pip install 'triops[viz]'")
    return found
