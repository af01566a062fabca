"""Arithmetic of Triton kernels that several operators share."""

import triton
import triton.language as tl

from triops._gpu.launch import INTERPRETED as _INTERPRETED

INTERPRETED = tl.constexpr(_INTERPRETED)


@triton.jit
def divide(a, b):
    """The IEEE quotient: a plain `/` on float32 is approximate on a GPU."""
    if a.dtype == tl.float64:
        return a / b
    else:
        return tl.div_rn(a, b)


@triton.jit
def finite(x):
    """Whether it is neither infinite nor NaN."""
    return (x - x) == 0


@triton.jit
def from_bits(bits, REAL: tl.constexpr):
    """A float64 argument, passed as an integer by `bits_of`, in dtype REAL."""
    return bits.to(tl.int64).to(tl.float64, bitcast=True).to(REAL)


@triton.jit
def as_mask(condition, like):
    """A scalar condition as a mask of the shape of `like`.

    `mask & condition` is an integer in Triton's interpreter, which Triton 3.9 refuses as a mask.
    """
    return (tl.zeros(like.shape, tl.int32) + condition.to(tl.int32)) != 0


@triton.jit
def popcount(x):
    """Bits set in a 32-bit integer."""
    x = x.to(tl.uint32)
    x = x - ((x >> 1) & 0x55555555)
    x = (x & 0x33333333) + ((x >> 2) & 0x33333333)
    x = (x + (x >> 4)) & 0x0F0F0F0F
    return ((x * 0x01010101) >> 24).to(tl.int32)


@triton.jit
def ascending(keys):
    """A block of distinct int32 keys, sorted."""
    if INTERPRETED:  # which takes tl.sort element by element, a second for a block of 1,024
        lane = tl.arange(0, keys.shape[0])
        rank = tl.sum((keys[None, :] < keys[:, None]).to(tl.int32), 1)
        return tl.sum(tl.where(rank[:, None] == lane[None, :], keys[:, None], 0), 0)
    else:
        return tl.sort(keys)
