"""Box frames and the inside test in plain torch."""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from triops._dtypes import compute_dtype

ZOrigin = Literal["center", "bottom"]
Z_ORIGINS: tuple[ZOrigin, ...] = get_args(ZOrigin)


def cos_sin(angle: Tensor) -> tuple[Tensor, Tensor]:
    """Cosine and sine of a float64 tensor, within 2e-16 up to 800,000 radians and deterministic everywhere.

    Cody-Waite reduction to [-pi/4, pi/4] and the classic minimax polynomials, in adds and multiplies
    alone: the result has the same bits on every device.
    """
    angle = angle - torch.floor(angle * 6.071111190474593e-07 + 0.5) * 1647099.3291652855  # 2**20 * pi / 2
    n = torch.floor(angle * 0.6366197723675814 + 0.5)
    r = ((angle - n * 1.5707963267341256) - n * 6.077100506303966e-11) - n * 2.0222662487111665e-21
    z = r * r
    sin = 1.58969099521155010221e-10 * z - 2.50507602534068634195e-08
    sin = ((sin * z + 2.75573137070700676789e-06) * z - 1.98412698298579493134e-04) * z
    sin = ((sin + 8.33333333332248946124e-03) * z - 1.66666666666666324348e-01) * z * r + r
    cos = -1.13596475577881948265e-11 * z + 2.08757232129817482790e-09
    cos = ((cos * z - 2.75573143513906633035e-07) * z + 2.48015872894767294178e-05) * z
    cos = (((cos - 1.38888888888741095749e-03) * z + 4.16666666666666019037e-02) * z - 0.5) * z + 1.0
    quadrant = n - 4.0 * torch.floor(n * 0.25)
    odd = (quadrant == 1) | (quadrant == 3)
    cos, sin = torch.where(odd, sin, cos), torch.where(odd, cos, sin)
    cos = torch.where((quadrant == 1) | (quadrant == 2), -cos, cos)
    sin = torch.where(quadrant >= 2, -sin, sin)
    return cos, sin


def frames(boxes: Tensor, z_origin: str, margin: float) -> Tensor:
    """boxes [..., 7] -> [..., 8]: cx, cy, cz, half x, half y, half z, cos, sin. Non-finite boxes hold nothing."""
    boxes = boxes.to(compute_dtype(boxes.dtype))
    cx, cy, cz, dx, dy, dz, heading = boxes.unbind(-1)
    half_z = dz * 0.5
    if z_origin == "bottom":
        cz = cz + half_z
    grow = torch.full_like(dx, margin)
    half_x = torch.where(boxes.isfinite().all(-1), dx * 0.5 + grow, -1.0)
    cos, sin = (v.to(boxes.dtype) for v in cos_sin(heading.double()))
    return torch.stack([cx, cy, cz, half_x, dy * 0.5 + grow, half_z, cos, sin], -1)


def local_xy(points: Tensor, frame: Tensor) -> tuple[Tensor, Tensor]:
    """points [..., 3] in the axes of a box, seen from above."""
    shift_x, shift_y = points[..., 0] - frame[..., 0], points[..., 1] - frame[..., 1]
    cos, sin = frame[..., 6], frame[..., 7]
    return shift_x * cos + shift_y * sin, shift_y * cos - shift_x * sin


def inside(points: Tensor, frame: Tensor) -> Tensor:
    """Whether points [..., 3] lie in boxes [..., 8]: z inclusive, x and y strict."""
    local_x, local_y = local_xy(points, frame)
    near_z = (points[..., 2] - frame[..., 2]).abs() <= frame[..., 5]
    return near_z & (local_x.abs() < frame[..., 3]) & (local_y.abs() < frame[..., 4])


def cells(points: Tensor, box: Tensor, frame: Tensor, z_origin: str, grid: tuple[int, int, int]) -> Tensor:
    """The cell of each point [N, 3] inside one box [7] that is divided into a grid, z fastest: int64 [N].

    `trunc((l + d / 2) / (d / cells))` along each axis, clamped to the grid; the margin plays no part.
    """
    local_x, local_y = local_xy(points, frame)
    size, half = box[3:6], box[3:6] * 0.5
    bottom = box[2] if z_origin == "bottom" else box[2] - half[2]
    from_corner = (local_x + half[0], local_y + half[1], points[..., 2] - bottom)
    flat = torch.zeros_like(local_x, dtype=torch.int64)
    for axis, (position, count) in enumerate(zip(from_corner, grid, strict=True)):
        position = position / (size[axis] / torch.full_like(size[axis], count))
        position = torch.where(position > 0, position, 0.0)  # also for NaN, where a box has no size
        last = torch.full_like(position, count - 1)
        position = torch.where(position < last, position, last)
        flat = flat * count + position.long().clamp(max=count - 1)
    return flat
