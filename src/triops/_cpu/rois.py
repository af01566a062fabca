"""Pooling from feature maps on CPU."""

import numpy as np

from triops._cpu.addresses import array_at
from triops._cpu.jit import inline, jit
from triops._cpu.row_products import put_average, spread_products
from triops._cpu.vectors import LANES, transpose
from triops._rois import FEW_SAMPLES, MOST_SAMPLES

FIELDS = 5  # of a box


@jit
def on_images(boxes, total, batch, like):
    """Whether all boxes [total, 5] at an address name images that are there: `check_images` in one pass.

    torch would take five calls. What is raised where they do not is `triops._rois.no_image`.
    """
    rows, found = array_at(boxes, total * FIELDS, like), True
    for k in range(total):
        image = rows[k * FIELDS]
        found &= image > -1 and image < batch  # false for NaN
    return found


@inline
def as_arrays(maps, boxes, bins, total, scale, like, rules):
    """Maps [N * C * H * W], boxes [total, 5] and bins [total * C * PH * PW] at addresses, and the scale, as arrays."""
    size = rules.batch * rules.channels * rules.height * rules.width
    number = total * rules.channels * rules.rows * rules.columns
    rows = array_at(boxes, total * FIELDS, like).reshape((total, FIELDS))
    return array_at(maps, size, like), rows, array_at(bins, number, like), np.full(1, like.dtype.type(scale))


@jit
def cut_box(low, high, scale, aligned, pooled, ratio):
    """Start of a box (x1, y1, x2, y2) along an axis, length and samples of a bin, and whether the box is finite."""
    real = scale.dtype.type
    offset = real(0.5) if aligned else real(0)
    start = low * scale[0] - offset
    extent = (high * scale[0] - offset) - start
    if not (np.isfinite(start) and np.isfinite(extent)):
        return real(0), real(0), np.int64(0), False
    if not aligned:
        extent = max(extent, real(1))
    length, samples = bins_of(extent, pooled, ratio, scale)
    return start, length, samples, True


@jit
def bins_of(extent, pooled, ratio, like):
    """Length of a bin, and its samples along this axis; adaptive where `ratio` is 0."""
    length = extent / like.dtype.type(pooled)
    samples = np.int64(ratio)
    if ratio == 0:
        wanted = np.ceil(np.float32(length))
        samples = np.int64(min(max(wanted, np.float32(0)), np.float32(MOST_SAMPLES)))
    return length, samples


@jit
def samples_within(base, length, samples, low, high, ratio):
    """Samples [begin, end) of a bin, among which are all those from `low` to `high`."""
    if ratio > 0 or samples <= FEW_SAMPLES:
        return np.int64(0), samples
    step = np.float64(length) / samples  # about a pixel or more
    begin = np.floor((low - np.float64(base)) / step - 0.5) - 1
    end = np.ceil((high - np.float64(base)) / step - 0.5) + 2
    begin = np.int64(min(max(begin, 0.0), np.float64(samples)))
    return begin, max(begin, np.int64(min(max(end, 0.0), np.float64(samples))))


@jit
def neighbors(position, size, like):
    """Whether a position is on an axis of the map, the two pixels around it, and the share of the second."""
    real = like.dtype.type
    if not (position >= real(-1) and position <= real(size)):
        return False, np.int64(0), np.int64(0), real(0)
    position = min(max(position, real(0)), real(size - 1))
    low = min(np.int64(position), size - 1)
    return True, low, min(low + 1, size - 1), position - real(low)


# Taps: pixels with weights, of which a bin is the sum. Run r of them, [firsts[r], firsts[r + 1]), belongs to bin
# places[r]; a bin may have several runs. Taps come in fours, the neighbors of one sample.

MOST_TAPS = 8192  # of a buffer, a multiple of 4
TAPS_IN_A_SUM = 256  # thousands of terms one after the other would lose digits


@inline
def empty_taps(like):
    return (
        np.empty(MOST_TAPS, np.int64), np.empty(MOST_TAPS + 1, np.int64), np.empty(MOST_TAPS, np.int64),
        np.empty(MOST_TAPS, like.dtype),
    )  # fmt: skip


@inline
def add_taps(y, x, height, width, count, pixels, weights):
    """Append the neighbors of a position -> the number of taps then. None where it is off the map."""
    on_y, low_y, high_y, part_y = neighbors(y, height, weights)
    on_x, low_x, high_x, part_x = neighbors(x, width, weights)
    if on_y and on_x:
        rest_y, rest_x = weights.dtype.type(1) - part_y, weights.dtype.type(1) - part_x
        pixels[count], weights[count] = low_y * width + low_x, rest_y * rest_x
        pixels[count + 1], weights[count + 1] = low_y * width + high_x, rest_y * part_x
        pixels[count + 2], weights[count + 2] = high_y * width + low_x, part_y * rest_x
        pixels[count + 3], weights[count + 3] = high_y * width + high_x, part_y * part_x
        count += 4
    return count


@jit
def gather(input, image, plane, channels, first, last, channels_last, runs, taps, bins, output, to):
    """Add runs of taps of one box to channels [first, last) of its outputs, which begin at output[to].

    Its image begins at input[image]. On a channels-last map first is 0 and last is `channels`.
    """
    places, firsts, pixels, weights = taps
    real = output.dtype.type
    if channels_last:
        total = np.empty(channels, output.dtype)
        for r in range(runs):
            total[:] = 0
            for t in range(firsts[r], firsts[r + 1], 4):
                v0, v1 = input[image + pixels[t] * channels :], input[image + pixels[t + 1] * channels :]
                v2, v3 = input[image + pixels[t + 2] * channels :], input[image + pixels[t + 3] * channels :]
                w0, w1, w2, w3 = weights[t], weights[t + 1], weights[t + 2], weights[t + 3]
                for c in range(np.uint64(channels)):
                    total[c] += w0 * v0[c] + w1 * v1[c] + w2 * v2[c] + w3 * v3[c]
            target = output[to + places[r] * channels :]
            for c in range(np.uint64(channels)):
                target[c] += total[c]
        return
    for c in range(first, last, 4):
        # Four planes share the loads of taps; the last stands for those behind it.
        p0, p1 = image + c * plane, image + min(c + 1, last - 1) * plane
        p2, p3 = image + min(c + 2, last - 1) * plane, image + min(c + 3, last - 1) * plane
        for r in range(runs):
            target = to + c * bins + places[r]
            for begin in range(firsts[r], firsts[r + 1], TAPS_IN_A_SUM):
                s0, s1, s2, s3 = real(0), real(0), real(0), real(0)
                for t in range(begin, min(begin + TAPS_IN_A_SUM, firsts[r + 1])):
                    weight, pixel = weights[t], pixels[t]
                    s0 += weight * input[p0 + pixel]
                    s1 += weight * input[p1 + pixel]
                    s2 += weight * input[p2 + pixel]
                    s3 += weight * input[p3 + pixel]
                output[target] += s0
                if c + 1 < last:
                    output[target + bins] += s1
                if c + 2 < last:
                    output[target + 2 * bins] += s2
                if c + 3 < last:
                    output[target + 3 * bins] += s3


@jit
def scatter(given, read, first, last, image, plane, channels, channels_last, runs, taps, bins, share, grad):
    """Add runs of taps, times the gradient of their bins, to channels [first, last) of the image at grad[image].

    The gradients of the box begin at given[read] and are multiplied by `share`.
    """
    places, firsts, pixels, weights = taps
    if channels_last:
        for r in range(runs):
            source = given[read + places[r] * channels + first :]
            for t in range(firsts[r], firsts[r + 1]):
                target, weight = grad[image + pixels[t] * channels + first :], weights[t] * share
                for c in range(np.uint64(last - first)):
                    target[c] += weight * source[c]
        return
    for c in range(first, last):
        target, source = image + c * plane, read + c * bins
        for r in range(runs):
            value = given[source + places[r]] * share
            for t in range(firsts[r], firsts[r + 1]):
                grad[target + pixels[t]] += weights[t] * value


# Separable taps: (firsts_y, pixels_y, weights_y, firsts_x, pixels_x, weights_x). The rows of a bin at place p along y,
# with weights, are [firsts_y[p], firsts_y[p + 1]), columns likewise, and the weight of a pixel is the product.


@jit
def average(input, image, taps, rules, count, output, to):
    """The sums over the bins of one box, divided by `count`. Its image begins at input[image]."""
    if rules.channels_last:
        _average_vectors(input, image, taps, rules, count, output, to)
        return
    plane = rules.height * rules.width
    c = 0
    while c + 4 <= rules.channels:
        _average_planes(input, image + c * plane, plane, taps, rules, count, output, to, c)
        c += 4
    while c < rules.channels:
        _average_planes(input, image + c * plane, 0, taps, rules, count, output, to, c)
        c += 1


@jit
def _average_planes(input, first, plane, taps, rules, count, output, to, c):
    """Four planes from input[first] on, or with plane = 0 one of them four times."""
    real = output.dtype.type
    firsts_y, pixels_y, weights_y, firsts_x, pixels_x, weights_x = taps
    bins = rules.rows * rules.columns
    to += c * bins
    step = bins if plane > 0 else 0
    for p in range(rules.rows):
        for q in range(rules.columns):
            s0, s1, s2, s3 = real(0), real(0), real(0), real(0)
            for i in range(firsts_y[p], firsts_y[p + 1]):
                row = first + pixels_y[i] * rules.width
                r0, r1, r2, r3 = real(0), real(0), real(0), real(0)
                for j in range(firsts_x[q], firsts_x[q + 1]):
                    at, weight = row + pixels_x[j], weights_x[j]
                    r0 += weight * input[at]
                    r1 += weight * input[at + plane]
                    r2 += weight * input[at + 2 * plane]
                    r3 += weight * input[at + 3 * plane]
                weight = weights_y[i]
                s0 += weight * r0
                s1 += weight * r1
                s2 += weight * r2
                s3 += weight * r3
            output[to] = s0 / count
            output[to + step] = s1 / count
            output[to + 2 * step] = s2 / count
            output[to + 3 * step] = s3 / count
            to += 1


@jit
def _average_vectors(input, image, taps, rules, count, output, to):
    firsts_y, pixels_y, weights_y, firsts_x, pixels_x, weights_x = taps
    channels = np.uint64(rules.channels)
    total = np.empty(rules.channels, output.dtype)
    for p in range(rules.rows):
        for q in range(rules.columns):
            total[:] = 0
            for i in range(firsts_y[p], firsts_y[p + 1]):
                row = image + pixels_y[i] * rules.width * rules.channels
                j, last = firsts_x[q], firsts_x[q + 1]
                while j + 2 <= last:
                    left = input[row + pixels_x[j] * rules.channels :]
                    right = input[row + pixels_x[j + 1] * rules.channels :]
                    u, v = weights_y[i] * weights_x[j], weights_y[i] * weights_x[j + 1]
                    for c in range(channels):
                        total[c] += u * left[c] + v * right[c]
                    j += 2
                if j < last:
                    left = input[row + pixels_x[j] * rules.channels :]
                    u = weights_y[i] * weights_x[j]
                    for c in range(channels):
                        total[c] += u * left[c]
            for c in range(channels):
                output[to + np.int64(c)] = total[c] / count
            to += rules.channels


@jit
def give_back_average(given, k, n, first, channels, taps, rules, count, share, grad):
    """Add the gradients of box k to channels [first, first + channels) of image n. `share` holds that many numbers."""
    firsts_y, pixels_y, weights_y, firsts_x, pixels_x, weights_x = taps
    bins, plane = rules.rows * rules.columns, rules.height * rules.width
    if rules.channels_last:
        for b in range(bins):
            p, q = b // rules.columns, b % rules.columns
            read = (k * bins + b) * rules.channels + first
            for c in range(channels):
                share[c] = given[read + c] / count
            for i in range(firsts_y[p], firsts_y[p + 1]):
                for j in range(firsts_x[q], firsts_x[q + 1]):
                    pixel = pixels_y[i] * rules.width + pixels_x[j]
                    target = grad[(n * plane + pixel) * rules.channels + first :]
                    weight = weights_y[i] * weights_x[j]
                    for c in range(np.uint64(channels)):
                        target[c] += weight * share[c]
        return
    for c in range(channels):
        read, to = (k * rules.channels + first + c) * bins, (n * rules.channels + first + c) * plane
        for p in range(rules.rows):
            for i in range(firsts_y[p], firsts_y[p + 1]):
                row, weight = to + pixels_y[i] * rules.width, weights_y[i]
                for q in range(rules.columns):
                    value = weight * (given[read + p * rules.columns + q] / count)
                    for j in range(firsts_x[q], firsts_x[q + 1]):
                        grad[row + pixels_x[j]] += value * weights_x[j]


# Tiles: LANES planes of an NCHW image with their channels side by side, so that one load reads a pixel of all of them.


def worth_tiles(reads, batch, height, width):
    """Whether boxes read so much of a map that copying it to tiles pays. reads: of pixels, in one channel."""
    return reads >= batch * height * width


@inline
def empty_lists(most, like):
    """Room for pixels and weights of the taps of one bin."""
    return np.empty(most, np.int32), np.empty(most, like.dtype)


@jit
def _list_taps(p, q, taps, width, pixels, weights):
    """Pixels of bin (p, q) and their weights, one after the other -> their number"""
    firsts_y, pixels_y, weights_y, firsts_x, pixels_x, weights_x = taps
    count = np.int64(0)
    for i in range(firsts_y[p], firsts_y[p + 1]):
        row, weight = np.int32(pixels_y[i] * width), weights_y[i]
        for j in range(firsts_x[q], firsts_x[q + 1]):
            pixels[count] = row + np.int32(pixels_x[j])
            weights[count] = weight * weights_x[j]
            count += 1
    return count


@jit
def average_tile(tile, taps, rules, count, sums, channels, output, to):
    """As `average`, of the `channels` channels of a tile [H * W, LANES], into output[to] on. sums: [bins, LANES]."""
    firsts_y, pixels_y, weights_y, firsts_x, pixels_x, weights_x = taps
    for p in range(rules.rows):
        y = pixels_y, weights_y, firsts_y[p], firsts_y[p + 1]
        for q in range(rules.columns):
            x = pixels_x, weights_x, firsts_x[q], firsts_x[q + 1]
            put_average(sums, p * rules.columns + q, tile, *y, *x, rules.width, count)
    bins = rules.rows * rules.columns
    transpose(bins, channels, sums.reshape(-1), 0, LANES, output, to, bins)


@jit
def give_back_tile(given, read, taps, rules, count, lists, shares, channels, tile):
    """Add the gradients of a box, which begin at given[read], to a tile. shares: [bins, LANES]."""
    pixels, weights = lists
    bins = rules.rows * rules.columns
    transpose(channels, bins, given, read, bins, shares.reshape(-1), 0, LANES)
    for b in range(bins):
        number = _list_taps(b // rules.columns, b % rules.columns, taps, rules.width, pixels, weights)
        for c in range(LANES):
            shares[b, c] /= count
        spread_products(tile, pixels, weights, 0, number, shares, b, 0)
