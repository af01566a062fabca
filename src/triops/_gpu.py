"""What GPU launchers share. Imports neither torch nor Triton."""

from __future__ import annotations

import os
import struct

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def block(size: int, *, interpreted: int) -> int:
    """A block size, and the one for Triton's interpreter, which pays by the program and not by the element."""
    return interpreted if INTERPRETED else size


def bits_of(value: float) -> int:
    """A float64 as an integer argument: Triton would round a float argument to float32."""
    bits: int = struct.unpack("q", struct.pack("d", value))[0]
    return 0 if bits == 1 else bits  # Triton turns an argument of 1 into a constant without a dtype; 5e-324 is 0
