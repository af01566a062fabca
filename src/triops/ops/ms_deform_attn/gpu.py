"""ms_deform_attn on GPU: a program takes a few queries of one head, channels across its lanes.

Coordinates are worked out once per query and point and shared by the channels. The gradient of `value` is added up by
atomics in float32; where deterministic algorithms are asked for, the reference adds it up in order.
"""

import torch
import triton
import triton.language as tl

from triops import _check, _gpu
from triops.ops.ms_deform_attn import reference

# Channels times queries of a program of one warp: loads of 16 bytes, by the bytes of an element.
FORWARD = {2: 256, 4: 128, 8: 128}
BACKWARD = 128
WIDEST = 1024  # channels of a head that a program takes at once


def ms_deform_attn(value, spatial_shapes, level_start_index, sampling_locations, attention_weights):
    _check_levels("ms_deform_attn", value, spatial_shapes, level_start_index)
    batch, queries, heads, levels, points = attention_weights.shape
    pixels, channels = value.shape[1], value.shape[3]
    out = torch.empty((batch, queries, heads * channels), dtype=value.dtype, device=value.device)
    if out.numel():
        width, block = _tile(channels, FORWARD[value.element_size()])
        programs = _gpu.cdiv(queries, block)
        _attend_kernel[(programs * heads * batch, _gpu.cdiv(channels, width))](
            value.contiguous(), sampling_locations.contiguous(), attention_weights.contiguous(),
            spatial_shapes.contiguous(), level_start_index.contiguous(), out,
            pixels, queries, programs, heads, channels, levels, points,
            QUERIES=block, CHANNELS=width, WHOLE=channels % width == 0, num_warps=max(1, width // 256),
            enable_fp_fusion=False,
        )  # fmt: skip
    return out


def ms_deform_attn_backward(grad, value, spatial_shapes, level_start_index, sampling_locations, attention_weights):
    _check_levels("ms_deform_attn_backward", value, spatial_shapes, level_start_index)
    operands = grad, value, spatial_shapes, level_start_index, sampling_locations, attention_weights
    channels = value.shape[3]
    if torch.are_deterministic_algorithms_enabled():
        return reference.ms_deform_attn_backward(*operands)
    batch, queries, heads, levels, points = attention_weights.shape
    real = torch.float64 if value.dtype == torch.float64 else torch.float32
    grad_value = torch.zeros(value.shape, dtype=real, device=value.device)
    grad_locations = torch.empty(sampling_locations.shape, dtype=sampling_locations.dtype, device=value.device)
    grad_weights = torch.empty(attention_weights.shape, dtype=attention_weights.dtype, device=value.device)
    if channels == 0:
        return grad_value.to(value.dtype), grad_locations.zero_(), grad_weights.zero_()
    if grad_weights.numel():
        width, block = _tile(channels, BACKWARD)
        programs = _gpu.cdiv(queries, block)
        _give_back_kernel[(programs * heads * batch,)](
            grad.contiguous(), value.contiguous(), sampling_locations.contiguous(), attention_weights.contiguous(),
            spatial_shapes.contiguous(), level_start_index.contiguous(), grad_value, grad_locations, grad_weights,
            value.shape[1], queries, programs, heads, channels, levels, points,
            QUERIES=block, CHANNELS=width, WHOLE=channels % width == 0, ONCE=channels <= width,
            num_warps=max(1, width // 256), enable_fp_fusion=False,
        )  # fmt: skip
    return grad_value.to(value.dtype), grad_locations, grad_weights


def _check_levels(operator, value, spatial_shapes, level_start_index):
    if _check.strict():
        reference.check_levels(operator, spatial_shapes, level_start_index, value.shape[1])


def _tile(channels, numbers):
    """-> channels and queries of a program, powers of two."""
    width = min(_gpu.next_power_of_2(channels), WIDEST)
    return width, max(_gpu.block(numbers, interpreted=8192) // width, 1)


@triton.jit
def _level(shapes, starts, level, pixels):
    """-> height, width and start of a level; nothing of one that does not lie within the pixels. Sizes are data."""
    height = tl.load(shapes + 2 * level).to(tl.int64)
    width = tl.load(shapes + 2 * level + 1).to(tl.int64)
    start = tl.load(starts + level).to(tl.int64)
    small = (height >= 0) & (width >= 0) & (height <= pixels) & (width <= pixels) & (start >= 0) & (start <= pixels)
    within = small & (start + height * width <= pixels)
    height = tl.where(within, height, 0).to(tl.int32)
    return height, tl.where(within, width, 0).to(tl.int32), tl.where(within, start, 0).to(tl.int32)


@triton.jit
def _position(locations, place, valid, size, REAL: tl.constexpr, CLEAN: tl.constexpr):
    """Where a location lies among the centres of `size` pixels. -> on the map, the pixel below, the share above it

    Off the map the last two are anything; CLEAN: numbers.
    """
    at = tl.load(locations + place, mask=valid, other=-9.0).to(REAL) * size.to(REAL) - 0.5
    inside = (at > -1) & (at < size.to(REAL))
    if CLEAN:
        at = tl.where(inside, at, 0.0)
    below = tl.floor(at)
    return inside & valid, below.to(tl.int32), at - below


@triton.jit
def _corner(inside, row, column, height, width):
    return inside & (row >= 0) & (row < height) & (column >= 0) & (column < width)


@triton.jit
def _across(exists, channel, channels, WHOLE: tl.constexpr):
    """A mask over queries as one over queries and channels."""
    if WHOLE:
        return exists[:, None]
    else:
        return exists[:, None] & (channel < channels)[None, :]


@_gpu.kernel(specialize=("heads", "channels"))
def _attend_kernel(
    value, locations, weights, shapes, starts, out, pixels, queries, programs, heads, channels, levels, points,
    QUERIES: tl.constexpr, CHANNELS: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    REAL: tl.constexpr = tl.float64 if value.dtype.element_ty == tl.float64 else tl.float32
    head = tl.program_id(0) // programs % heads
    image = tl.cast(tl.program_id(0) // programs // heads, tl.int64)
    query = tl.program_id(0) % programs * QUERIES + tl.arange(0, QUERIES)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    valid = query < queries
    item = (image * queries + query) * heads + head
    stride = heads * channels
    own = value + image * pixels * stride + tl.cast(head, tl.int64) * channels + channel[None, :]
    total = tl.zeros([QUERIES, CHANNELS], REAL)
    for level in range(levels):
        height, width, start = _level(shapes, starts, level, pixels)
        for point in range(points):
            place = (item * levels + level) * points + point
            inside_x, left, fx = _position(locations, 2 * place, valid, width, REAL, False)
            inside_y, top, fy = _position(locations, 2 * place + 1, valid, height, REAL, False)
            inside = inside_x & inside_y
            weight = tl.load(weights + place, mask=inside, other=0.0).to(REAL)
            at = own + ((start + top * width + left).to(tl.int64) * stride)[:, None]
            for down in tl.static_range(2):
                for right in tl.static_range(2):
                    exists = _corner(inside, top + down, left + right, height, width)
                    mask = _across(exists, channel, channels, WHOLE)
                    # Off the map nothing counts: a weight or a place that is not finite would, times 0.
                    share = tl.where(exists, (fy if down else 1 - fy) * (fx if right else 1 - fx) * weight, 0.0)
                    step = (down * width + right).to(tl.int64) * stride
                    found = tl.load(at + step, mask=mask, other=0.0).to(REAL)
                    total = tl.fma(tl.broadcast_to(share[:, None], (QUERIES, CHANNELS)), found, total)
    own_mask = valid[:, None] & (channel < channels)[None, :]
    tl.store(out + (item * channels)[:, None] + channel[None, :], total.to(out.dtype.element_ty), mask=own_mask)


@triton.jit
def _give_back_point(
    above, first, value, grad_value, inside, left, top, fx, fy, height, width, weight, stride, channel, channels,
    WHOLE: tl.constexpr,
):  # fmt: skip
    """What `above` gives to the four pixels around a point, and through them. -> the gradients of the weight and, but
    for the weight and the size of the map, of x and y; whether any of the pixels exists."""
    found_any = inside & (height < 0)
    along_weight = tl.zeros_like(fx)
    along_x = tl.zeros_like(fx)
    along_y = tl.zeros_like(fx)
    for down in tl.static_range(2):
        for right in tl.static_range(2):
            exists = _corner(inside, top + down, left + right, height, width)
            mask = _across(exists, channel, channels, WHOLE)
            found_any = found_any | exists
            wy = fy if down else 1 - fy
            wx = fx if right else 1 - fx
            corner = first + (down * width + right).to(tl.int64) * stride
            found = tl.load(value + corner, mask=mask, other=0.0).to(fx.dtype)
            product = tl.where(exists, tl.sum(found * above, 1), 0.0)
            along_weight += wy * wx * product
            along_x += (wy if right else -wy) * product
            along_y += (wx if down else -wx) * product
            share = (wy * wx * weight)[:, None] * above
            tl.atomic_add(grad_value + corner, share, mask=mask, sem="relaxed")
    return along_weight, along_x, along_y, found_any


@_gpu.kernel(specialize=("heads", "channels"))
def _give_back_kernel(
    grad, value, locations, weights, shapes, starts, grad_value, grad_locations, grad_weights,
    pixels, queries, programs, heads, channels, levels, points,
    QUERIES: tl.constexpr, CHANNELS: tl.constexpr, WHOLE: tl.constexpr, ONCE: tl.constexpr,
):  # fmt: skip
    REAL: tl.constexpr = tl.float64 if value.dtype.element_ty == tl.float64 else tl.float32
    head = tl.program_id(0) // programs % heads
    image = tl.cast(tl.program_id(0) // programs // heads, tl.int64)
    query = tl.program_id(0) % programs * QUERIES + tl.arange(0, QUERIES)
    channel = tl.arange(0, CHANNELS)
    valid = query < queries
    item = (image * queries + query) * heads + head
    stride = heads * channels
    own = image * pixels * stride + tl.cast(head, tl.int64) * channels + channel[None, :]
    out = (item * channels)[:, None] + channel[None, :]
    own_mask = valid[:, None] & (channel < channels)[None, :]
    if ONCE:
        above = tl.load(grad + out, mask=own_mask, other=0.0).to(REAL)
    for level in range(levels):
        height, width, start = _level(shapes, starts, level, pixels)
        for point in range(points):
            place = (item * levels + level) * points + point
            inside_x, left, fx = _position(locations, 2 * place, valid, width, REAL, True)
            inside_y, top, fy = _position(locations, 2 * place + 1, valid, height, REAL, True)
            inside = inside_x & inside_y
            weight = tl.load(weights + place, mask=inside, other=0.0).to(REAL)
            first = own + ((start + top * width + left).to(tl.int64) * stride)[:, None]
            if ONCE:
                along_weight, along_x, along_y, found_any = _give_back_point(
                    above, first, value, grad_value, inside, left, top, fx, fy, height, width, weight, stride, channel,
                    channels, WHOLE,
                )  # fmt: skip
            else:
                found_any = inside & (height < 0)
                along_weight = tl.zeros([QUERIES], REAL)
                along_x = tl.zeros([QUERIES], REAL)
                along_y = tl.zeros([QUERIES], REAL)
                for begin in range(0, channels, CHANNELS):
                    mask = valid[:, None] & (channel < channels - begin)[None, :]
                    part = tl.load(grad + out + begin, mask=mask, other=0.0).to(REAL)
                    of_weight, of_x, of_y, found_any = _give_back_point(
                        part, first + begin, value, grad_value, inside, left, top, fx, fy, height, width, weight,
                        stride, channel, channels - begin, WHOLE,
                    )  # fmt: skip
                    along_weight += of_weight
                    along_x += of_x
                    along_y += of_y
            tl.store(grad_weights + place, along_weight.to(grad_weights.dtype.element_ty), mask=valid)
            weight = tl.where(found_any, weight, 0.0)  # off the map nothing counts, not even a NaN
            element = grad_locations.dtype.element_ty
            tl.store(grad_locations + 2 * place, (along_x * weight * width.to(REAL)).to(element), mask=valid)
            tl.store(grad_locations + 2 * place + 1, (along_y * weight * height.to(REAL)).to(element), mask=valid)
