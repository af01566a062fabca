"""ms_deform_attn on CPU. A thread takes queries; in the backward it takes heads, so that no two add to one pixel."""

import numpy as np
import torch

from triops._cpu.half import as_bits, narrow, widen
from triops._cpu.jit import jit
from triops._cpu.memory import as_numpy, in_huge_pages
from triops._cpu.threads import run
from triops._dtypes import compute_dtype
from triops.ops.ms_deform_attn.reference import check_levels

NUMBERS = 50_000  # products, worth a thread
LANES = 16  # partial sums of a scalar product, so that it is vectorised


def ms_deform_attn(value, spatial_shapes, level_start_index, sampling_locations, attention_weights):
    check_levels("ms_deform_attn", spatial_shapes, level_start_index, value.shape[1])
    batch, queries, heads, levels, points = attention_weights.shape
    channels = value.shape[3]
    out = torch.empty((batch, queries, heads * channels), dtype=value.dtype)
    in_huge_pages(out)
    grain = max(1, NUMBERS // max(4 * heads * levels * points * channels, 1))
    run(
        _attend, batch * queries, grain, as_bits(value), as_numpy(spatial_shapes), as_numpy(level_start_index),
        as_bits(sampling_locations), as_bits(attention_weights), _like(value),
        as_bits(out).reshape(batch, queries, heads, channels),
    )  # fmt: skip
    return out


def ms_deform_attn_backward(grad, value, spatial_shapes, level_start_index, sampling_locations, attention_weights):
    check_levels("ms_deform_attn_backward", spatial_shapes, level_start_index, value.shape[1])
    batch, _, heads, channels = value.shape
    queries = grad.shape[1]
    real = compute_dtype(value.dtype)
    grad_value = torch.empty(value.shape, dtype=real)
    in_huge_pages(grad_value)
    grad_locations = torch.empty(sampling_locations.shape, dtype=sampling_locations.dtype)
    grad_weights = torch.empty(attention_weights.shape, dtype=attention_weights.dtype)
    work = max(8 * queries * attention_weights.shape[3] * attention_weights.shape[4] * channels, value.shape[1], 1)
    run(
        _give_back, batch * heads, max(1, NUMBERS // work), as_bits(grad).reshape(batch, queries, heads, channels),
        as_bits(value), as_numpy(spatial_shapes), as_numpy(level_start_index), as_bits(sampling_locations),
        as_bits(attention_weights), grad_value.numpy(), as_bits(grad_locations), as_bits(grad_weights),
    )  # fmt: skip
    return grad_value.to(value.dtype), grad_locations, grad_weights


def _like(value):
    """An array whose dtype is what a kernel computes in."""
    return np.empty(0, np.float64 if value.dtype == torch.float64 else np.float32)


@jit
def _position(location, size, like):
    """Where a location lies among the centres of `size` pixels. -> the pixel below, the share of the one above"""
    real = like.dtype.type
    at = real(widen(location)) * real(size) - real(0.5)
    if not (at > real(-1) and at < real(size)):  # true for NaN
        return -2, real(0)
    below = np.floor(at)
    return np.int64(below), at - below


@jit
def _product(above, values, lanes):
    """The sum of the products of two rows."""
    whole = above.shape[0] // LANES * LANES
    lanes[:] = 0
    for first in range(0, whole, LANES):
        for c in range(LANES):
            lanes[c] += above[first + c] * widen(values[first + c])
    total = above.dtype.type(0)
    for c in range(LANES):
        total += lanes[c]
    for c in range(whole, above.shape[0]):
        total += above[c] * widen(values[c])
    return total


@jit
def _attend(begin, end, value, shapes, starts, locations, weights, like, out):
    queries, heads, levels, points = weights.shape[1:]
    channels = np.uint64(value.shape[3])
    real = like.dtype.type
    total = np.empty(value.shape[3], like.dtype)
    for row in range(begin, end):
        b, q = row // queries, row % queries
        for h in range(heads):
            total[:] = 0
            for level in range(levels):
                height, width, start = np.int64(shapes[level, 0]), np.int64(shapes[level, 1]), np.int64(starts[level])
                for p in range(points):
                    left, fx = _position(locations[b, q, h, level, p, 0], width, like)
                    top, fy = _position(locations[b, q, h, level, p, 1], height, like)
                    if left == -2 or top == -2:
                        continue
                    weight = real(widen(weights[b, q, h, level, p]))
                    upper, lower = (real(1) - fy) * weight, fy * weight
                    at = start + top * width + left
                    if top >= 0 and left >= 0 and top + 1 < height and left + 1 < width:
                        w0, w1, w2, w3 = upper * (real(1) - fx), upper * fx, lower * (real(1) - fx), lower * fx
                        for c in range(channels):
                            total[c] += (w0 * widen(value[b, at, h, c]) + w1 * widen(value[b, at + 1, h, c])) + (
                                w2 * widen(value[b, at + width, h, c]) + w3 * widen(value[b, at + width + 1, h, c])
                            )
                        continue
                    for down in range(2):
                        for right in range(2):
                            if 0 <= top + down < height and 0 <= left + right < width:
                                w = (lower if down else upper) * (fx if right else real(1) - fx)
                                corner = at + down * width + right
                                for c in range(channels):
                                    total[c] += w * widen(value[b, corner, h, c])
            for c in range(channels):
                out[b, q, h, c] = narrow(total[c], out)


@jit
def _give_back(begin, end, grad, value, shapes, starts, locations, weights, grad_value, grad_locations, grad_weights):
    queries, heads, levels, points = weights.shape[1:]
    channels = np.uint64(value.shape[3])
    real = grad_value.dtype.type
    above, lanes = np.empty(value.shape[3], grad_value.dtype), np.empty(LANES, grad_value.dtype)
    for item in range(begin, end):
        b, h = item // heads, item % heads
        for s in range(value.shape[1]):
            for c in range(channels):
                grad_value[b, s, h, c] = 0
        for q in range(queries):
            for c in range(channels):
                above[c] = widen(grad[b, q, h, c])
            for level in range(levels):
                height, width, start = np.int64(shapes[level, 0]), np.int64(shapes[level, 1]), np.int64(starts[level])
                for p in range(points):
                    left, fx = _position(locations[b, q, h, level, p, 0], width, above)
                    top, fy = _position(locations[b, q, h, level, p, 1], height, above)
                    weight = real(widen(weights[b, q, h, level, p]))
                    along_x, along_y, along_weight = real(0), real(0), real(0)
                    found = False
                    if left != -2 and top != -2:
                        for down in range(2):
                            for right in range(2):
                                if 0 <= top + down < height and 0 <= left + right < width:
                                    found = True
                                    wy = fy if down else real(1) - fy
                                    wx = fx if right else real(1) - fx
                                    at = start + (top + down) * width + left + right
                                    share, product = wy * wx * weight, _product(above, value[b, at, h], lanes)
                                    for c in range(channels):
                                        grad_value[b, at, h, c] += share * above[c]
                                    along_weight += wy * wx * product
                                    along_x += (wy if right else -wy) * product
                                    along_y += (wx if down else -wx) * product
                    grad_weights[b, q, h, level, p] = narrow(along_weight, grad_weights)
                    if not found:  # off the map nothing counts, not even a NaN
                        weight = real(0)
                    grad_locations[b, q, h, level, p, 0] = narrow(along_x * weight * real(width), grad_locations)
                    grad_locations[b, q, h, level, p, 1] = narrow(along_y * weight * real(height), grad_locations)
