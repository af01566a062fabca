"""The specification of ms_deform_attn and ms_deform_attn_backward.

A level of the pyramid is `height * width` rows of `value`, from its start on. A location (x, y) of 0..1 lies at
(x * width - 0.5, y * height - 0.5) among the centres of its pixels, and is read bilinearly. Pixels off the map count
for nothing, whatever their weight.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from triops import _check
from triops._dtypes import compute_dtype


def ms_deform_attn(
    value: Tensor, spatial_shapes: Tensor, level_start_index: Tensor, sampling_locations: Tensor,
    attention_weights: Tensor,
) -> Tensor:  # fmt: skip
    """value [B, S, H, D], spatial_shapes [L, 2], level_start_index [L], sampling_locations [B, Q, H, L, P, 2],
    attention_weights [B, Q, H, L, P] -> [B, Q, H * D]"""
    if value.device.type == "cpu" or _check.strict():
        check_levels("ms_deform_attn", spatial_shapes, level_start_index, value.shape[1])
    batch, queries, heads, levels, points = attention_weights.shape
    real = compute_dtype(value.dtype)
    out = torch.zeros((batch, queries, heads, value.shape[3]), dtype=real, device=value.device)
    for level in range(levels):
        for point in range(points):
            weight = attention_weights[..., level, point].to(real)
            for rows, valid, wy, wx, _, _ in _corners(
                spatial_shapes, level_start_index, sampling_locations, level, point, value.shape[1]
            ):
                out += torch.where(valid, wy * wx * weight, 0)[..., None] * _read(value, rows, valid)
    return out.flatten(2).to(value.dtype)


def ms_deform_attn_backward(
    grad: Tensor, value: Tensor, spatial_shapes: Tensor, level_start_index: Tensor, sampling_locations: Tensor,
    attention_weights: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """grad [B, Q, H * D] -> the gradients of value, sampling_locations and attention_weights."""
    if value.device.type == "cpu" or _check.strict():
        check_levels("ms_deform_attn_backward", spatial_shapes, level_start_index, value.shape[1])
    batch, queries, heads, levels, points = attention_weights.shape
    real = compute_dtype(value.dtype)
    above = grad.view(batch, queries, heads, value.shape[3]).to(real)
    grad_value = torch.zeros(value.shape, dtype=real, device=value.device)
    grad_locations = torch.zeros(sampling_locations.shape, dtype=real, device=value.device)
    grad_weights = torch.zeros(attention_weights.shape, dtype=real, device=value.device)
    image = torch.arange(batch, device=value.device)[:, None, None].expand(batch, queries, heads)
    head = torch.arange(heads, device=value.device).expand(batch, queries, heads)
    for level in range(levels):
        height, width = spatial_shapes[level].to(real)
        for point in range(points):
            weight = attention_weights[..., level, point].to(real)
            slope_x, slope_y = torch.zeros_like(weight), torch.zeros_like(weight)
            on_map = torch.zeros_like(weight, dtype=torch.bool)
            for rows, valid, wy, wx, sign_y, sign_x in _corners(
                spatial_shapes, level_start_index, sampling_locations, level, point, value.shape[1]
            ):
                product = (above * _read(value, rows, valid)).sum(-1)
                grad_weights[..., level, point] += torch.where(valid, wy * wx * product, 0)
                slope_x += torch.where(valid, sign_x * wy * product, 0)
                slope_y += torch.where(valid, sign_y * wx * product, 0)
                on_map = on_map | valid
                share = (wy * wx * weight)[..., None] * above
                grad_value.index_put_((image[valid], rows[valid], head[valid]), share[valid], accumulate=True)
            grad_locations[..., level, point, 0] = torch.where(on_map, slope_x * weight * width, 0)
            grad_locations[..., level, point, 1] = torch.where(on_map, slope_y * weight * height, 0)
    return (
        grad_value.to(value.dtype),
        grad_locations.to(sampling_locations.dtype),
        grad_weights.to(attention_weights.dtype),
    )


def _corners(
    spatial_shapes: Tensor, level_start_index: Tensor, locations: Tensor, level: int, point: int, size: int
) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor, int, int]]:
    """The four pixels around a location: rows of `value` [B, Q, H], whether they exist, the weights along y and x,
    and the signs of their derivatives."""
    exact = compute_dtype(locations.dtype)
    (height, width), start = spatial_shapes[level], level_start_index[level]
    within = (height >= 0) & (width >= 0) & (start >= 0) & (start + height * width <= size)
    x = locations[..., level, point, 0].to(exact) * width - 0.5
    y = locations[..., level, point, 1].to(exact) * height - 0.5
    inside = (x > -1) & (y > -1) & (x < width) & (y < height)  # false for NaN
    x, y = torch.where(inside, x, 0), torch.where(inside, y, 0)
    left, top = x.floor(), y.floor()
    for row, wy, sign_y in ((top.long(), 1 - (y - top), -1), (top.long() + 1, y - top, 1)):
        for column, wx, sign_x in ((left.long(), 1 - (x - left), -1), (left.long() + 1, x - left, 1)):
            valid = within & inside & (row >= 0) & (row < height) & (column >= 0) & (column < width)
            yield torch.where(valid, start + row * width + column, 0), valid, wy, wx, sign_y, sign_x


def _read(value: Tensor, rows: Tensor, valid: Tensor) -> Tensor:
    """value [B, S, H, D], rows [B, Q, H] -> [B, Q, H, D], 0 where not valid."""
    batch, _, heads, channels = value.shape
    if value.shape[1] == 0:
        return value.new_zeros((*rows.shape, channels), dtype=compute_dtype(value.dtype))
    found = value.gather(1, rows[..., None].expand(batch, rows.shape[1], heads, channels))
    return torch.where(valid[..., None], found.to(compute_dtype(value.dtype)), 0)


def check_levels(operator: str, spatial_shapes: Tensor, level_start_index: Tensor, size: int) -> None:
    """Raise IndexError where a level does not lie within the rows of `value`."""
    for level, ((height, width), start) in enumerate(
        zip(spatial_shapes.tolist(), level_start_index.tolist(), strict=True)
    ):
        if height < 0 or width < 0 or start < 0 or start + height * width > size:
            raise IndexError(
                f"{operator}: level {level} must lie within the {size} rows of value, got {height} x {width} "
                f"from row {start} on"
            )
