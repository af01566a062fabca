"""What the machine has: `MinkowskiEngine.diagnostics`."""

from __future__ import annotations

import platform
import sys

import torch

import triops


def is_cuda_available() -> bool:
    return torch.cuda.is_available()


def cuda_version() -> int:
    """As 12060 for 12.6; -1 without."""
    if torch.version.cuda is None:
        return -1
    major, minor = torch.version.cuda.split(".")[:2]
    return 1000 * int(major) + 10 * int(minor)


cudart_version = cuda_version


def get_gpu_memory_info() -> tuple[int, int]:
    """Bytes that are free, and all of them."""
    return torch.cuda.mem_get_info() if torch.cuda.is_available() else (0, 0)


def print_diagnostics() -> None:
    print(platform.platform())
    print(sys.version)
    print(f"torch {torch.__version__}, CUDA {torch.version.cuda}, available: {torch.cuda.is_available()}")
    print(f"MinkowskiEngine is supplied by triops {triops.__version__}")


__all__ = ["cuda_version", "cudart_version", "get_gpu_memory_info", "is_cuda_available", "print_diagnostics"]
