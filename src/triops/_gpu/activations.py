"""Activations of Triton kernels, numbered as in `triops._activations`."""

import triton
import triton.language as tl


@triton.jit
def activate(z, alpha, ACTIVATION: tl.constexpr):
    """ACTIVATION counts as ACTIVATIONS."""
    if ACTIVATION == 1:
        z = tl.where(z < 0, 0.0, z)  # NaN stays
    elif ACTIVATION == 2:
        z = 1 / (1 + tl.exp(-z))
    elif ACTIVATION == 3:
        z = tl.where(z < 0, z * alpha, z)
    elif ACTIVATION == 4:
        z = z * 0.5 * (1 + tl.erf(z * 0.7071067811865476))
    elif ACTIVATION == 5:
        z = z / (1 + tl.exp(-z))
    return z


@triton.jit
def slope(z, alpha, ACTIVATION: tl.constexpr):
    """The derivative of `activate` at z."""
    found = tl.full(z.shape, 1.0, z.dtype)
    if ACTIVATION == 1:
        found = tl.where(z <= 0, 0.0, 1.0).to(z.dtype)
    elif ACTIVATION == 2:
        s = 1 / (1 + tl.exp(-z))
        found = s * (1 - s)
    elif ACTIVATION == 3:
        found = tl.where(z <= 0, alpha, 1.0)
    elif ACTIVATION == 4:
        bell = tl.exp(-0.5 * z * z) * 0.3989422804014327
        found = 0.5 * (1 + tl.erf(z * 0.7071067811865476)) + z * bell
    elif ACTIVATION == 5:
        s = 1 / (1 + tl.exp(-z))
        found = s * (1 + z * (1 - s))
    return found
