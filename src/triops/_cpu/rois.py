"""Pooling from feature maps on CPU."""

import numpy as np

from triops._cpu.jit import jit


@jit
def neighbors(position, size, like):
    """Whether a position is on an axis of the map, the two pixels around it, and the share of the second."""
    real = like.dtype.type
    if not (position >= real(-1) and position <= real(size)):
        return False, np.int64(0), np.int64(0), real(0)
    position = min(max(position, real(0)), real(size - 1))
    low = min(np.int64(position), size - 1)
    return True, low, min(low + 1, size - 1), position - real(low)
