"""furthest_point_sample on CPU: boxes around groups of points tell what a new sample cannot change.

Points are sorted along a space-filling curve; 64 in a row are a group, 64 groups a block. Each group and block knows
its bounding box, its largest distance to the nearest sample and where that is. A new sample whose distance to a box is
not below that largest distance changes nothing inside, so most blocks are not visited. Rounding is monotone, so the
distance to a box, computed like one to a point, is a lower bound of the computed distances inside: no index changes.
"""

import numpy as np
import torch

from triops._clouds import check_ascending
from triops._cpu.intrinsics import maximum, minimum
from triops._cpu.jit import inline, jit
from triops._cpu.memory import as_numpy
from triops._cpu.sort import radix_sort_between
from triops._cpu.threads import run
from triops._dtypes import compute_dtype

GROUP = 64  # points of a group, and groups of a block
CURVE_BITS = 11  # per axis
NO_ROW = np.int32(2**31 - 1)


def furthest_point_sample(points, offsets, sample_offsets, count, longest, within):
    check_ascending("furthest_point_sample", "offsets", offsets, points.shape[0])
    check_ascending("furthest_point_sample", "sample_offsets", sample_offsets, count)
    out = torch.empty(count, dtype=torch.int32)
    rows = as_numpy(points, compute_dtype(points.dtype))
    bits = np.empty(0, f"i{rows.itemsize}")
    run(_sample_clouds, offsets.shape[0] - 1, 1, rows, as_numpy(offsets.long()), as_numpy(sample_offsets.long()),
        within, bits, out.numpy())  # fmt: skip
    return out


def furthest_point_sample_with_dist(distances, count):
    batch, length = distances.shape[:2]
    out = torch.zeros((batch, count), dtype=torch.int32)
    if length:
        rows = as_numpy(distances, compute_dtype(distances.dtype))
        run(_sample_by_distances, batch, 1, rows, out.numpy())
    return out


@jit
def _sample_clouds(first, last, points, offsets, sample_offsets, within, bits, out):
    for cloud in range(first, last):
        begin, end = offsets[cloud], offsets[cloud + 1]
        samples = out[sample_offsets[cloud] : sample_offsets[cloud + 1]]
        if begin == end:
            samples[:] = 0 if within else -1
        elif samples.shape[0]:
            _sample(points[begin:end], bits, samples)
            if not within:
                samples += np.int32(begin)


@jit
def _sample(points, bits, out):
    total, width = points.shape
    keys, rows = np.empty(total, np.int64), np.empty(total, np.int32)
    valid = _curve(points, keys, rows)
    if valid == 0:
        out[:] = 0
        return
    out[0] = rows[0]
    other_keys, other_rows = np.empty(valid, np.int64), np.empty(valid, np.int32)
    if radix_sort_between(keys, rows[:valid], other_keys, other_rows):
        rows = other_rows

    blocks = -(-valid // (GROUP * GROUP))
    shape = (blocks, GROUP, GROUP)
    row = np.full(shape, NO_ROW, np.int32)
    place = np.zeros((blocks, GROUP, width, GROUP), points.dtype)
    nearest = np.full(shape, -1, points.dtype)  # behind the last point: below every distance
    group_low = np.full((blocks, width, GROUP), np.inf, points.dtype)
    group_high = np.full((blocks, width, GROUP), -np.inf, points.dtype)
    block_low = np.full((width, blocks), np.inf, points.dtype)
    block_high = np.full((width, blocks), -np.inf, points.dtype)
    for i in range(valid):
        b, g, p = i // (GROUP * GROUP), i // GROUP % GROUP, i % GROUP
        row[b, g, p] = rows[i]
        nearest[b, g, p] = np.inf
        for d in range(width):
            x = points[rows[i], d]
            place[b, g, d, p] = x
            group_low[b, d, g], group_high[b, d, g] = minimum(group_low[b, d, g], x), maximum(group_high[b, d, g], x)
            block_low[d, b], block_high[d, b] = minimum(block_low[d, b], x), maximum(block_high[d, b], x)

    # The largest distance to the nearest sample, and the lowest row that has it, of groups and of blocks.
    group_most, group_row = np.full((blocks, GROUP), -1, points.dtype), np.full((blocks, GROUP), NO_ROW, np.int32)
    block_most, block_row = np.full(blocks, np.inf, points.dtype), np.full(blocks, NO_ROW, np.int32)
    for i in range(valid):  # of those that every sample so far is infinitely far from, too: they are not visited
        b, g = i // (GROUP * GROUP), i // GROUP % GROUP
        group_most[b, g], group_row[b, g] = np.inf, minimum(group_row[b, g], rows[i])
        block_row[b] = minimum(block_row[b], rows[i])
    # Distances are not negative, and such floats are ordered as their bits are: LLVM vectorises a maximum of integers.
    nearest_bits, group_bits = nearest.view(bits.dtype), group_most.view(bits.dtype)
    block_bound, group_bound = np.empty(blocks, points.dtype), np.empty(GROUP, points.dtype)
    distance = np.empty(GROUP, points.dtype)
    for k in range(1, out.shape[0]):
        sample = points[out[k - 1]]
        _to_boxes(sample, block_low, block_high, block_bound)
        for b in range(blocks):
            if block_bound[b] < block_most[b]:
                _to_boxes(sample, group_low[b], group_high[b], group_bound)
                for g in range(GROUP):
                    if group_bound[g] < group_most[b, g]:
                        _to_points(sample, place[b, g], distance)
                        for p in range(GROUP):
                            nearest[b, g, p] = minimum(distance[p], nearest[b, g, p])
                        group_bits[b, g], group_row[b, g] = _largest(nearest_bits[b, g], row[b, g])
                _, block_row[b] = _largest(group_bits[b], group_row[b])
                block_most[b] = -1
                for g in range(GROUP):
                    block_most[b] = maximum(block_most[b], group_most[b, g])
        best = 0
        for b in range(1, blocks):
            if block_most[b] > block_most[best] or (
                block_most[b] == block_most[best] and block_row[b] < block_row[best]
            ):
                best = b
        out[k] = block_row[best]


@jit
def _curve(points, keys, rows):
    """Rows of finite points, and their keys along a Morton curve through up to three columns. -> how many"""
    total, width = points.shape
    axes = minimum(width, 3)
    low, scale = np.empty(axes), np.empty(axes)
    valid = 0
    for i in range(total):
        finite = True
        for d in range(width):
            finite &= np.isfinite(points[i, d])
        rows[valid] = i
        valid += finite
    for d in range(axes):
        lowest, highest = np.inf, -np.inf
        for i in range(valid):
            x = np.float64(points[rows[i], d])
            lowest, highest = minimum(lowest, x), maximum(highest, x)
        low[d] = lowest
        scale[d] = (1 << CURVE_BITS) * 0.999 / (highest - lowest) if highest - lowest > 0 else 0.0
    for i in range(valid):
        key = np.int64(0)
        for d in range(axes):
            key |= _spread(np.int64((np.float64(points[rows[i], d]) - low[d]) * scale[d])) << d
        keys[i] = key
    return valid


@inline
def _spread(x):
    """Two zeros between the bits of a number below 2 ** 16."""
    x = (x | (x << 16)) & 0x0000FF0000FF
    x = (x | (x << 8)) & 0x00F00F00F00F
    x = (x | (x << 4)) & 0x0C30C30C30C3
    return (x | (x << 2)) & 0x249249249249


@inline
def _to_boxes(point, low, high, bound):
    """Squared distances from a point to boxes low [D, N] and high [D, N]."""
    zero = point.dtype.type(0)
    bound[:] = zero
    for d in range(low.shape[0]):
        for i in range(bound.shape[0]):
            gap = maximum(maximum(low[d, i] - point[d], point[d] - high[d, i]), zero)
            bound[i] += gap * gap


@inline
def _to_points(point, place, distance):
    """Squared distances from a point to points [D, GROUP]."""
    if place.shape[0] == 3:
        for p in range(GROUP):
            dx, dy, dz = place[0, p] - point[0], place[1, p] - point[1], place[2, p] - point[2]
            distance[p] = (dx * dx + dy * dy) + dz * dz
    else:
        distance[:] = 0
        for d in range(place.shape[0]):
            for p in range(GROUP):
                dx = place[d, p] - point[d]
                distance[p] += dx * dx


@inline
def _largest(values, rows):
    """The largest of GROUP integers, and the lowest of the rows that have it."""
    most = values[0]
    for p in range(1, GROUP):
        most = maximum(values[p], most)
    lowest = NO_ROW
    for p in range(GROUP):
        lowest = minimum(rows[p] if values[p] == most else NO_ROW, lowest)
    return most, lowest


@jit
def _sample_by_distances(first, last, distances, out):
    length = distances.shape[1]
    nearest = np.empty(length, distances.dtype)
    for cloud in range(first, last):
        for i in range(length):
            nearest[i] = np.inf if np.isfinite(distances[cloud, i, i]) else -np.inf
        best = np.argmax(nearest)
        for k in range(out.shape[1]):
            out[cloud, k] = best
            row = distances[cloud, best]
            best, most = 0, nearest.dtype.type(-np.inf)
            for begin in range(0, length, GROUP):
                end = minimum(begin + GROUP, length)
                higher = False
                for i in range(begin, end):
                    nearest[i] = row[i] if row[i] < nearest[i] else nearest[i]
                    higher |= nearest[i] > most
                if higher:  # only now and then
                    for i in range(begin, end):
                        if nearest[i] > most:
                            best, most = i, nearest[i]
