"""Box frames and the inside test for Numba kernels. The arithmetic is that of `reference.py`, step by step."""

import math

import numpy as np

from triops._cpu.jit import jit


@jit
def cos_sin(angle):
    """Cosine and sine of one float64 number."""
    angle = angle - np.floor(angle * 6.071111190474593e-07 + 0.5) * 1647099.3291652855
    n = np.floor(angle * 0.6366197723675814 + 0.5)
    r = ((angle - n * 1.5707963267341256) - n * 6.077100506303966e-11) - n * 2.0222662487111665e-21
    z = r * r
    sin = 1.58969099521155010221e-10 * z - 2.50507602534068634195e-08
    sin = ((sin * z + 2.75573137070700676789e-06) * z - 1.98412698298579493134e-04) * z
    sin = ((sin + 8.33333333332248946124e-03) * z - 1.66666666666666324348e-01) * z * r + r
    cos = -1.13596475577881948265e-11 * z + 2.08757232129817482790e-09
    cos = ((cos * z - 2.75573143513906633035e-07) * z + 2.48015872894767294178e-05) * z
    cos = (((cos - 1.38888888888741095749e-03) * z + 4.16666666666666019037e-02) * z - 0.5) * z + 1.0
    quadrant = n - 4.0 * np.floor(n * 0.25)
    if quadrant == 1 or quadrant == 3:
        cos, sin = sin, cos
    if quadrant == 1 or quadrant == 2:
        cos = -cos
    if quadrant >= 2:
        sin = -sin
    return cos, sin


@jit
def frames(boxes, bottom, margin):
    """boxes [T, 7] -> [T, 8] of their dtype: cx, cy, cz, half x, half y, half z, cos, sin."""
    out = np.empty((boxes.shape[0], 8), boxes.dtype)
    real = boxes.dtype.type
    half, grow = real(0.5), real(margin)
    for t in range(boxes.shape[0]):
        half_z = boxes[t, 5] * half
        out[t, 0] = boxes[t, 0]
        out[t, 1] = boxes[t, 1]
        out[t, 2] = boxes[t, 2] + half_z if bottom else boxes[t, 2]
        finite = True
        for field in range(7):
            finite &= math.isfinite(boxes[t, field])
        out[t, 3] = boxes[t, 3] * half + grow if finite else real(-1)
        out[t, 4] = boxes[t, 4] * half + grow
        out[t, 5] = half_z
        cos, sin = cos_sin(float(boxes[t, 6]))
        out[t, 6] = cos
        out[t, 7] = sin
    return out


@jit
def local_xy(x, y, frame):
    """A point in the axes of a box, seen from above."""
    shift_x, shift_y = x - frame[0], y - frame[1]
    return shift_x * frame[6] + shift_y * frame[7], shift_y * frame[6] - shift_x * frame[7]


@jit
def inside(x, y, z, frame):
    """Whether a point lies in the box: z inclusive, x and y strict."""
    local_x, local_y = local_xy(x, y, frame)
    return (abs(z - frame[2]) <= frame[5]) & (abs(local_x) < frame[3]) & (abs(local_y) < frame[4])


@jit
def _cell(position, size, count):
    real = type(size)
    position = position / (size / real(count))
    position = position if position > real(0) else real(0)  # also for NaN, where a box has no size
    position = position if position < real(count - 1) else real(count - 1)
    return min(np.int64(position), np.int64(count - 1))


@jit
def cell(x, y, z, box, frame, bottom, grid_x, grid_y, grid_z):
    """The cell of a point inside a box [7] that is divided into a grid, z fastest; the margin plays no part."""
    half = type(box[0])(0.5)
    local_x, local_y = local_xy(x, y, frame)
    low_z = box[2] if bottom else box[2] - box[5] * half
    flat = _cell(local_x + box[3] * half, box[3], grid_x)
    flat = flat * grid_y + _cell(local_y + box[4] * half, box[4], grid_y)
    return flat * grid_z + _cell(z - low_z, box[5], grid_z)


@jit
def bounds(frame):
    """Lower and upper x, y, z that enclose every point `inside` can accept, rounding included.

    The slack is far above the few units in the last place by which the test can err.
    A box that holds nothing has an empty range.
    """
    half_x, half_y, half_z = float(frame[3]), float(frame[4]), float(frame[5])
    if not (half_x > 0 and half_y > 0 and half_z >= 0):
        return np.inf, -np.inf, np.inf, -np.inf, np.inf, -np.inf
    cos, sin = abs(float(frame[6])), abs(float(frame[7]))
    cx, cy, cz = float(frame[0]), float(frame[1]), float(frame[2])
    reach_x = (cos * half_x + sin * half_y) * 1.0001 + 1e-5 * abs(cx)
    reach_y = (sin * half_x + cos * half_y) * 1.0001 + 1e-5 * abs(cy)
    reach_z = half_z * 1.0001 + 1e-5 * abs(cz)
    return cx - reach_x, cx + reach_x, cy - reach_y, cy + reach_y, cz - reach_z, cz + reach_z
