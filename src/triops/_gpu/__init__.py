"""What GPU kernels share: launches, arithmetic, products, loads, scans across blocks, the site hash, pinned memory."""

from triops._gpu.launch import (
    INTERPRETED,
    Kernel,
    bits_of,
    block,
    cdiv,
    compile_once,
    compiling,
    kernel,
    next_power_of_2,
)

__all__ = [
    "INTERPRETED",
    "Kernel",
    "bits_of",
    "block",
    "cdiv",
    "compile_once",
    "compiling",
    "kernel",
    "next_power_of_2",
]
