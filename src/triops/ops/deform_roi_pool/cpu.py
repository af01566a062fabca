"""deform_roi_pool on CPU: the samples of a box become pixels with weights ("taps") once and serve all channels.

Taps are found into a buffer of fixed size, so that a box of any size fits; samples that cannot be on the map are not
visited. Gradient of the map: a thread takes channels of one image, so that no two add to one pixel, and walks the boxes
in order. Gradient of the offsets: sums over the channels of each sample's four pixels, which lie side by side.
"""

from typing import NamedTuple

import numpy as np
import torch

from triops._cpu.jit import jit
from triops._cpu.memory import as_numpy, flat, in_huge_pages, zeros
from triops._cpu.rois import (
    MOST_TAPS,
    add_taps,
    cut_box,
    empty_taps,
    gather,
    neighbors,
    samples_within,
    scatter,
)
from triops._cpu.threads import run
from triops._dtypes import compute_dtype
from triops._rois import check_images, empty_like_format, format_of
from triops.ops.deform_roi_pool.reference import empty_gradients

VALUES_PER_THREAD = 100_000  # channels times taps worth a thread
BLOCK = 32  # planes per work item; of the backward of a channels-last map twice as many channels


class Rules(NamedTuple):
    channels: int
    height: int
    width: int
    rows: int  # of bins
    columns: int
    ratio: int
    channels_last: bool


class Frame(NamedTuple):
    """A box on the map: where it begins, what an offset of 1 moves a bin by, and how it is cut."""

    start_y: float
    start_x: float
    reach_y: float
    reach_x: float
    length_y: float  # of a bin
    length_x: float
    samples_y: int
    samples_x: int


def deform_roi_pool(input, boxes, offset, pooled_height, pooled_width, spatial_scale, sampling_ratio, gamma):
    check_images("deform_roi_pool", boxes, input.shape[0])
    _, channels, height, width = input.shape
    output = empty_like_format((boxes.shape[0], channels, pooled_height, pooled_width), input.dtype, input)
    if input.numel() == 0 or output.numel() == 0:
        return output.zero_()
    real, layout = compute_dtype(input.dtype), format_of(input)
    values = output if output.dtype == real else torch.empty_like(output, dtype=real)
    in_huge_pages(values)
    rules = Rules(channels, height, width, pooled_height, pooled_width, max(sampling_ratio, 0),
                  layout == torch.channels_last)  # fmt: skip
    block = channels if rules.channels_last else BLOCK
    grain = max(1, VALUES_PER_THREAD // (16 * min(block, channels) * pooled_height * pooled_width))
    run(_average, len(boxes) * -(-channels // block), grain, flat(input, layout, real), as_numpy(boxes, real),
        _moves(boxes, offset, rules, real), _factors(spatial_scale, gamma, real), rules, block,
        flat(values, layout))  # fmt: skip
    return output if values is output else output.copy_(values)


def deform_roi_pool_backward(
    grad_output, input, boxes, offset, spatial_scale, sampling_ratio, gamma, of_input, of_offset
):
    check_images("deform_roi_pool_backward", boxes, input.shape[0])
    to_input, to_offset = empty_gradients(input, offset, of_input, of_offset)
    if input.numel() == 0 or grad_output.numel() == 0:
        return to_input.zero_(), to_offset.zero_()
    real, layout = compute_dtype(input.dtype), format_of(input)
    total, channels, rows, columns = grad_output.shape
    batch, _, height, width = input.shape
    rules = Rules(channels, height, width, rows, columns, max(sampling_ratio, 0), layout == torch.channels_last)
    rows_of_boxes, factors = as_numpy(boxes, real), _factors(spatial_scale, gamma, real)
    moves = _moves(boxes, offset, rules, real)
    if to_offset.numel():
        last = torch.channels_last
        found = torch.empty(offset.shape, dtype=real)
        grain = max(1, VALUES_PER_THREAD // (16 * channels * rows * columns))
        run(_slopes, total, grain, flat(grad_output, last, real), flat(input, last, real), rows_of_boxes, moves,
            factors, rules, as_numpy(found))  # fmt: skip
        to_offset.copy_(found)
    if of_input:
        sums = zeros(input.numel(), dtype=real)
        block = 2 * BLOCK if rules.channels_last else BLOCK
        grain = max(1, VALUES_PER_THREAD // (16 * min(block, channels) * rows * columns * -(-total // batch)))
        run(_give_back, batch * -(-channels // block), grain, flat(grad_output, layout, real), rows_of_boxes, moves,
            factors, rules, block, as_numpy(sums))  # fmt: skip
        if rules.channels_last:
            to_input.copy_(sums.view(batch, height, width, channels).permute(0, 3, 1, 2))
        else:
            to_input.copy_(sums.view(input.shape))
    return to_input, to_offset


def _moves(boxes, offset, rules, real):
    """Offsets [K, 2, bins]; without any, of no bins."""
    if offset is None:
        return np.empty((boxes.shape[0], 2, 0), as_numpy(torch.empty(0, dtype=real)).dtype)
    return as_numpy(offset, real).reshape(-1, 2, rules.rows * rules.columns)


def _factors(spatial_scale, gamma, real):
    return as_numpy(torch.tensor([spatial_scale, gamma], dtype=real))


@jit
def _frame(box, factors, rules):
    """-> the frame of a box, and whether it is finite."""
    y, length_y, samples_y, finite_y = cut_box(box[2], box[4], factors, True, rules.rows, rules.ratio)
    x, length_x, samples_x, finite_x = cut_box(box[1], box[3], factors, True, rules.columns, rules.ratio)
    half = factors.dtype.type(0.5)
    tall = (box[4] * factors[0] - half) - y
    wide = (box[3] * factors[0] - half) - x
    frame = Frame(y, x, factors[1] * tall, factors[1] * wide, length_y, length_x, samples_y, samples_x)
    return frame, finite_y and finite_x


@jit
def _bin(frame, rules, moves, number):
    """-> where a bin begins, samples [begin, end) along y and x that may be on the map."""
    real = moves.dtype.type
    y, x = frame.start_y, frame.start_x
    if moves.shape[1]:
        y, x = y + frame.reach_y * moves[1, number], x + frame.reach_x * moves[0, number]
    if not (np.isfinite(y) and np.isfinite(x)):
        return y, x, np.int64(0), np.int64(0), np.int64(0), np.int64(0)
    y += real(number // rules.columns) * frame.length_y
    x += real(number % rules.columns) * frame.length_x
    begin_y, end_y = samples_within(y, frame.length_y, frame.samples_y, -1.0, np.float64(rules.height), rules.ratio)
    begin_x, end_x = samples_within(x, frame.length_x, frame.samples_x, -1.0, np.float64(rules.width), rules.ratio)
    return y, x, begin_y, end_y, begin_x, end_x


@jit
def _sample(base, length, samples, number, like):
    real = like.dtype.type
    return base + (real(number) + real(0.5)) * length / real(samples)


@jit
def _find_taps(frame, rules, moves, done, taps):
    """Fill the buffer with the next taps of a box -> runs of taps, 0 when there are none left.

    done: the bin and its samples that are behind, which this function counts on.
    """
    places, firsts, pixels, weights = taps
    runs, count = 0, 0
    firsts[0] = 0
    while done[0] < rules.rows * rules.columns:
        base_y, base_x, begin_y, end_y, begin_x, end_x = _bin(frame, rules, moves, done[0])
        while done[1] < (end_y - begin_y) * (end_x - begin_x) and count + 4 <= MOST_TAPS:
            i, j = begin_y + done[1] // (end_x - begin_x), begin_x + done[1] % (end_x - begin_x)
            y = _sample(base_y, frame.length_y, frame.samples_y, i, weights)
            x = _sample(base_x, frame.length_x, frame.samples_x, j, weights)
            count = add_taps(y, x, rules.height, rules.width, count, pixels, weights)
            done[1] += 1
        if count > firsts[runs]:
            places[runs] = done[0]
            runs += 1
            firsts[runs] = count
        if count + 4 > MOST_TAPS:
            break
        done[0] += 1
        done[1] = 0
    return runs


@jit
def _count(frame, like):
    """Samples of a bin, at least 1."""
    real = like.dtype.type
    return max(real(frame.samples_y) * real(frame.samples_x), real(1))


@jit
def _average(begin, end, input, boxes, moves, factors, rules, block, output):
    """An item is a block of channels of a box. Boxes come one after the other for each block, whose planes so stay in
    the cache."""
    bins, plane = rules.rows * rules.columns, rules.height * rules.width
    taps, done = empty_taps(output), np.empty(2, np.int64)
    for item in range(begin, end):
        k, first = item % boxes.shape[0], item // boxes.shape[0] * block
        last = min(first + block, rules.channels)
        to = k * rules.channels * bins
        own = output[to + first * bins : to + last * bins]
        own[:] = 0
        frame, finite = _frame(boxes[k], factors, rules)
        if not finite:
            continue
        image = np.int64(boxes[k, 0]) * rules.channels * plane
        done[:] = 0
        while True:
            runs = _find_taps(frame, rules, moves[k], done, taps)
            if runs == 0:
                break
            gather(input, image, plane, rules.channels, first, last, rules.channels_last, runs, taps, bins, output, to)
        count = _count(frame, output)
        for i in range(own.shape[0]):
            own[i] /= count


@jit
def _give_back(begin, end, given, boxes, moves, factors, rules, block, grad):
    real = grad.dtype.type
    blocks, bins, plane = -(-rules.channels // block), rules.rows * rules.columns, rules.height * rules.width
    taps, done = empty_taps(grad), np.empty(2, np.int64)
    for item in range(begin, end):
        n, first = item // blocks, item % blocks * block
        last = min(first + block, rules.channels)
        for k in range(boxes.shape[0]):
            if np.int64(boxes[k, 0]) != n:
                continue
            frame, finite = _frame(boxes[k], factors, rules)
            if not finite:
                continue
            share = real(1) / _count(frame, grad)
            done[:] = 0
            while True:
                runs = _find_taps(frame, rules, moves[k], done, taps)
                if runs == 0:
                    break
                scatter(
                    given, k * rules.channels * bins, first, last, n * rules.channels * plane, plane, rules.channels,
                    rules.channels_last, runs, taps, bins, share, grad,
                )  # fmt: skip


@jit
def _slopes(begin, end, given, input, boxes, moves, factors, rules, grad):
    """Gradients of the offsets of boxes [begin, end); given and input are channels-last."""
    real = grad.dtype.type
    channels, bins = rules.channels, rules.rows * rules.columns
    for k in range(begin, end):
        along = grad[k].reshape(2, bins)
        along[:] = 0
        frame, finite = _frame(boxes[k], factors, rules)
        if not finite:
            continue
        image = np.int64(boxes[k, 0]) * rules.height * rules.width
        for number in range(bins):
            source = given[(k * bins + number) * channels :]
            base_y, base_x, begin_y, end_y, begin_x, end_x = _bin(frame, rules, moves[k], number)
            total_y, total_x = real(0), real(0)
            for i in range(begin_y, end_y):
                y = _sample(base_y, frame.length_y, frame.samples_y, i, grad)
                on_y, low_y, high_y, part_y = neighbors(y, rules.height, grad)
                if not on_y:
                    continue
                moves_y = y >= real(0) and y <= real(rules.height - 1)
                line_y, line_x = real(0), real(0)  # thousands of samples one by one would lose digits
                for j in range(begin_x, end_x):
                    x = _sample(base_x, frame.length_x, frame.samples_x, j, grad)
                    on_x, low_x, high_x, part_x = neighbors(x, rules.width, grad)
                    if not on_x:
                        continue
                    upper, lower = image + low_y * rules.width, image + high_y * rules.width
                    v0, v1 = input[(upper + low_x) * channels :], input[(upper + high_x) * channels :]
                    v2, v3 = input[(lower + low_x) * channels :], input[(lower + high_x) * channels :]
                    d0, d1, d2, d3 = real(0), real(0), real(0), real(0)
                    for c in range(np.uint64(channels)):
                        d0 += source[c] * v0[c]
                        d1 += source[c] * v1[c]
                        d2 += source[c] * v2[c]
                        d3 += source[c] * v3[c]
                    if x >= real(0) and x <= real(rules.width - 1):
                        line_x += (real(1) - part_y) * (d1 - d0) + part_y * (d3 - d2)
                    if moves_y:
                        line_y += (real(1) - part_x) * (d2 - d0) + part_x * (d3 - d1)
                total_y += line_y
                total_x += line_x
            count = _count(frame, grad)
            along[0, number] = frame.reach_x * (total_x / count)
            along[1, number] = frame.reach_y * (total_y / count)
