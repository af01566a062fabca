"""Box frames and the inside test for Triton kernels. The arithmetic is that of `reference.py`, step by step.

Kernels that use these must be launched with `enable_fp_fusion=False`: a fused multiply-add rounds once
where the reference rounds twice.
"""

import triton
import triton.language as tl

from triops._gpu.arithmetic import divide, from_bits


@triton.jit
def cos_sin(angle):
    """Cosine and sine of a float64 block."""
    angle = angle - tl.floor(angle * 6.071111190474593e-07 + 0.5) * 1647099.3291652855
    n = tl.floor(angle * 0.6366197723675814 + 0.5)
    r = ((angle - n * 1.5707963267341256) - n * 6.077100506303966e-11) - n * 2.0222662487111665e-21
    z = r * r
    sin = 1.58969099521155010221e-10 * z - 2.50507602534068634195e-08
    sin = ((sin * z + 2.75573137070700676789e-06) * z - 1.98412698298579493134e-04) * z
    sin = ((sin + 8.33333333332248946124e-03) * z - 1.66666666666666324348e-01) * z * r + r
    cos = -1.13596475577881948265e-11 * z + 2.08757232129817482790e-09
    cos = ((cos * z - 2.75573143513906633035e-07) * z + 2.48015872894767294178e-05) * z
    cos = (((cos - 1.38888888888741095749e-03) * z + 4.16666666666666019037e-02) * z - 0.5) * z + 1.0
    quadrant = n - 4.0 * tl.floor(n * 0.25)
    odd = (quadrant == 1) | (quadrant == 3)
    rotated_cos = tl.where(odd, sin, cos)
    rotated_sin = tl.where(odd, cos, sin)
    rotated_cos = tl.where((quadrant == 1) | (quadrant == 2), -rotated_cos, rotated_cos)
    rotated_sin = tl.where(quadrant >= 2, -rotated_sin, rotated_sin)
    return rotated_cos, rotated_sin


@triton.jit
def make_frame(boxes, index, mask, margin_bits, BOTTOM: tl.constexpr, REAL: tl.constexpr):
    """Frames of boxes [*, 7] at `index`, in dtype REAL; where masked off, a box that holds nothing."""
    field = boxes + index.to(tl.int64) * 7
    cx = tl.load(field, mask, 0.0).to(REAL)
    cy = tl.load(field + 1, mask, 0.0).to(REAL)
    cz = tl.load(field + 2, mask, 0.0).to(REAL)
    dx = tl.load(field + 3, mask, 0.0).to(REAL)
    dy = tl.load(field + 4, mask, 0.0).to(REAL)
    dz = tl.load(field + 5, mask, 0.0).to(REAL)
    heading = tl.load(field + 6, mask, 0.0).to(REAL)
    margin = from_bits(margin_bits, REAL)
    finite = (cx * 0 + cy * 0 + cz * 0 + dx * 0 + dy * 0 + dz * 0 + heading * 0) == 0
    half_x = tl.where(mask & finite, dx * 0.5 + margin, -1.0)
    half_y = dy * 0.5 + margin
    half_z = dz * 0.5
    if BOTTOM:
        cz = cz + half_z
    cos, sin = cos_sin(heading.to(tl.float64))
    return cx, cy, cz, half_x, half_y, half_z, cos.to(REAL), sin.to(REAL)


@triton.jit
def store_frame(frames, index, mask, cx, cy, cz, half_x, half_y, half_z, cos, sin):
    """Write frames [*, 8] at `index`."""
    field = frames + index.to(tl.int64) * 8
    tl.store(field, cx, mask)
    tl.store(field + 1, cy, mask)
    tl.store(field + 2, cz, mask)
    tl.store(field + 3, half_x, mask)
    tl.store(field + 4, half_y, mask)
    tl.store(field + 5, half_z, mask)
    tl.store(field + 6, cos, mask)
    tl.store(field + 7, sin, mask)


@triton.jit
def load_frame(frames, index, mask):
    """Read frames [*, 8] at `index`; where masked off, a box that holds nothing."""
    field = frames + index.to(tl.int64) * 8
    cx = tl.load(field, mask, 0.0)
    cy = tl.load(field + 1, mask, 0.0)
    cz = tl.load(field + 2, mask, 0.0)
    half_x = tl.load(field + 3, mask, -1.0)
    half_y = tl.load(field + 4, mask, 0.0)
    half_z = tl.load(field + 5, mask, 0.0)
    cos = tl.load(field + 6, mask, 0.0)
    sin = tl.load(field + 7, mask, 0.0)
    return cx, cy, cz, half_x, half_y, half_z, cos, sin


@triton.jit
def local_xy(x, y, cx, cy, cos, sin):
    """Points in the axes of a box, seen from above."""
    shift_x = x - cx
    shift_y = y - cy
    return shift_x * cos + shift_y * sin, shift_y * cos - shift_x * sin


@triton.jit
def inside(x, y, z, cx, cy, cz, half_x, half_y, half_z, cos, sin):
    """Whether points lie in a box: z inclusive, x and y strict."""
    local_x, local_y = local_xy(x, y, cx, cy, cos, sin)
    return (tl.abs(z - cz) <= half_z) & (tl.abs(local_x) < half_x) & (tl.abs(local_y) < half_y)


@triton.jit
def _cell(position, size, count, REAL: tl.constexpr):
    position = divide(position, divide(size, count.to(REAL)))
    last = (count - 1).to(REAL)
    position = tl.where(position > 0, position, 0.0)  # also for NaN, where a box has no size
    position = tl.where(position < last, position, last)
    return tl.minimum(position.to(tl.int64), count - 1)


@triton.jit
def cell(
    x, y, z, boxes, index, cx, cy, cos, sin, grid_x, grid_y, grid_z, BOTTOM: tl.constexpr, REAL: tl.constexpr
):  # fmt: skip
    """The cells of points inside one box of boxes [*, 7], divided into a grid, z fastest; the margin plays no part."""
    field = boxes + index.to(tl.int64) * 7
    low_z = tl.load(field + 2).to(REAL)
    dx = tl.load(field + 3).to(REAL)
    dy = tl.load(field + 4).to(REAL)
    dz = tl.load(field + 5).to(REAL)
    if not BOTTOM:
        low_z = low_z - dz * 0.5
    local_x, local_y = local_xy(x, y, cx, cy, cos, sin)
    flat = _cell(local_x + dx * 0.5, dx, grid_x, REAL)
    flat = flat * grid_y + _cell(local_y + dy * 0.5, dy, grid_y, REAL)
    return flat * grid_z + _cell(z - low_z, dz, grid_z, REAL)
