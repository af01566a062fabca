"""roi_align_rotated on CPU: the samples of a box become pixels with weights ("taps") once and serve all channels.

Taps are found into a buffer of fixed size, so that a box of any size fits; samples that cannot be on the map are not
visited. Backward: a thread takes channels of one image, so that no two add to one pixel, and walks the boxes in order.
"""

from typing import NamedTuple

import numpy as np
import torch

from triops._cpu.jit import jit
from triops._cpu.memory import as_numpy, clear, flat, in_huge_pages
from triops._cpu.rois import MOST_TAPS, add_taps, bins_of, empty_taps, gather, samples_within, scatter
from triops._cpu.threads import run
from triops._dtypes import compute_dtype
from triops._geometry.box.cpu import cos_sin
from triops._rois import check_images, empty_in_format, empty_like_format, format_of
from triops.ops.roi_align_rotated.reference import FAR, MOST_ANGLE, turned

VALUES_PER_THREAD = 100_000  # channels times taps worth a thread
BLOCK = 32  # planes per work item; of the backward of a channels-last map twice as many channels


class Rules(NamedTuple):
    channels: int
    height: int
    width: int
    rows: int  # of bins
    columns: int
    ratio: int
    aligned: bool
    clockwise: bool
    channels_last: bool


class Frame(NamedTuple):
    """A box on the map: where it lies, how it is cut, and from where to where along its axes the map can be."""

    y: float
    x: float
    cos: float
    sin: float
    start_y: float
    start_x: float
    length_y: float  # of a bin
    length_x: float
    samples_y: int
    samples_x: int
    low_y: float
    high_y: float
    low_x: float
    high_x: float


def roi_align_rotated(
    input, boxes, pooled_height, pooled_width, spatial_scale, sampling_ratio, aligned, clockwise, orientations
):
    check_images("roi_align_rotated", boxes, input.shape[0])
    _, channels, height, width = input.shape
    output = empty_like_format((boxes.shape[0], channels, pooled_height, pooled_width), input.dtype, input)
    if input.numel() == 0 or output.numel() == 0:
        return output.zero_()
    real, layout = compute_dtype(input.dtype), format_of(input)
    values = output if output.dtype == real else torch.empty_like(output, dtype=real)
    in_huge_pages(values)
    rules = Rules(channels, height, width, pooled_height, pooled_width, max(sampling_ratio, 0), bool(aligned),
                  bool(clockwise), layout == torch.channels_last)  # fmt: skip
    block = channels if rules.channels_last else BLOCK
    grain = max(1, VALUES_PER_THREAD // (16 * min(block, channels) * pooled_height * pooled_width))
    scale = as_numpy(torch.tensor([spatial_scale], dtype=real))
    run(_average, len(boxes) * -(-channels // block), grain, flat(input, layout, real), as_numpy(boxes, real),
        scale, rules, block, flat(values, layout))  # fmt: skip
    if orientations == 1 and values is output:
        return output
    return output.copy_(turned(values, boxes, orientations))


def roi_align_rotated_backward(
    grad_output, boxes, batch, height, width, spatial_scale, sampling_ratio, aligned, clockwise, orientations,
    channels_last,
):  # fmt: skip
    check_images("roi_align_rotated_backward", boxes, batch)
    total, channels, rows, columns = grad_output.shape
    real = compute_dtype(grad_output.dtype)
    sums = clear(empty_in_format((batch, channels, height, width), real, grad_output.device, channels_last))
    if sums.numel() == 0 or grad_output.numel() == 0:
        return sums.to(grad_output.dtype)
    layout = torch.channels_last if channels_last else torch.contiguous_format
    given = turned(grad_output.to(real), boxes, orientations, back=True)
    rules = Rules(channels, height, width, rows, columns, max(sampling_ratio, 0), bool(aligned), bool(clockwise),
                  channels_last)  # fmt: skip
    block = 2 * BLOCK if channels_last else BLOCK
    grain = max(1, VALUES_PER_THREAD // (16 * min(block, channels) * rows * columns * -(-total // batch)))
    scale = as_numpy(torch.tensor([spatial_scale], dtype=real))
    run(_give_back, batch * -(-channels // block), grain, flat(given, layout), as_numpy(boxes, real), scale, rules,
        block, flat(sums, layout))  # fmt: skip
    return sums.to(grad_output.dtype)


@jit
def _frame(box, scale, rules):
    """-> the frame of a box, and whether it is finite."""
    real = scale.dtype.type
    offset = real(0.5) if rules.aligned else real(0)
    x, y = box[1] * scale[0] - offset, box[2] * scale[0] - offset
    wide, tall = box[3] * scale[0], box[4] * scale[0]
    far = real(FAR)
    finite = abs(x) < far and abs(y) < far and abs(wide) < far and abs(tall) < far and abs(box[5]) < real(MOST_ANGLE)
    if not finite:
        x, y, wide, tall = real(0), real(0), real(0), real(0)
    if not rules.aligned:
        wide, tall = max(wide, real(1)), max(tall, real(1))
    cosine, sine = cos_sin(np.float64(-box[5] if rules.clockwise else box[5]) if finite else 0.0)
    cosine, sine = np.float64(real(cosine)), np.float64(real(sine))
    length_y, samples_y = bins_of(tall, rules.rows, rules.ratio, scale)
    length_x, samples_x = bins_of(wide, rules.columns, rules.ratio, scale)
    # The corners of the map along the axes of the box
    left, right = -1 - np.float64(x), rules.width - np.float64(x)
    top, bottom = -1 - np.float64(y), rules.height - np.float64(y)
    reach = max(abs(left), abs(right)) + max(abs(top), abs(bottom)) + abs(np.float64(wide)) + abs(np.float64(tall))
    margin = 2 + 1e-6 * reach  # more than positions are rounded by
    low_y = min(left * sine, right * sine) + min(top * cosine, bottom * cosine)
    high_y = max(left * sine, right * sine) + max(top * cosine, bottom * cosine)
    low_x = min(left * cosine, right * cosine) - max(top * sine, bottom * sine)
    high_x = max(left * cosine, right * cosine) - min(top * sine, bottom * sine)
    frame = Frame(
        y, x, real(cosine), real(sine), -tall / real(2), -wide / real(2), length_y, length_x, samples_y, samples_x,
        low_y - margin, high_y + margin, low_x - margin, high_x + margin,
    )  # fmt: skip
    return frame, finite


@jit
def _find_taps(frame, rules, done, taps):
    """Fill the buffer with the next taps of a box -> runs of taps, 0 when there are none left.

    done: the bin and its samples that are behind, which this function counts on.
    """
    places, firsts, pixels, weights = taps
    real = weights.dtype.type
    runs, count = 0, 0
    firsts[0] = 0
    while done[0] < rules.rows * rules.columns:
        p, q = done[0] // rules.columns, done[0] % rules.columns
        base_y = frame.start_y + real(p) * frame.length_y
        base_x = frame.start_x + real(q) * frame.length_x
        begin_y, end_y = samples_within(base_y, frame.length_y, frame.samples_y, frame.low_y, frame.high_y, rules.ratio)
        begin_x, end_x = samples_within(base_x, frame.length_x, frame.samples_x, frame.low_x, frame.high_x, rules.ratio)
        while done[1] < (end_y - begin_y) * (end_x - begin_x) and count + 4 <= MOST_TAPS:
            i, j = begin_y + done[1] // (end_x - begin_x), begin_x + done[1] % (end_x - begin_x)
            yy = base_y + (real(i) + real(0.5)) * frame.length_y / real(frame.samples_y)
            xx = base_x + (real(j) + real(0.5)) * frame.length_x / real(frame.samples_x)
            y = (yy * frame.cos - xx * frame.sin) + frame.y
            x = (yy * frame.sin + xx * frame.cos) + frame.x
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
def _average(begin, end, input, boxes, scale, rules, block, output):
    """An item is a block of channels of a box. Boxes come one after the other for each block, whose planes so stay in
    the cache."""
    real = output.dtype.type
    bins, plane = rules.rows * rules.columns, rules.height * rules.width
    taps, done = empty_taps(output), np.empty(2, np.int64)
    for item in range(begin, end):
        k, first = item % boxes.shape[0], item // boxes.shape[0] * block
        last = min(first + block, rules.channels)
        to = k * rules.channels * bins
        own = output[to + first * bins : to + last * bins]
        own[:] = 0
        frame, finite = _frame(boxes[k], scale, rules)
        if not finite:
            continue
        image = np.int64(boxes[k, 0]) * rules.channels * plane
        done[:] = 0
        while True:
            runs = _find_taps(frame, rules, done, taps)
            if runs == 0:
                break
            gather(input, image, plane, rules.channels, first, last, rules.channels_last, runs, taps, bins, output, to)
        count = max(real(frame.samples_y) * real(frame.samples_x), real(1))
        for i in range(own.shape[0]):
            own[i] /= count


@jit
def _give_back(begin, end, given, boxes, scale, rules, block, grad):
    real = grad.dtype.type
    blocks, bins, plane = -(-rules.channels // block), rules.rows * rules.columns, rules.height * rules.width
    taps, done = empty_taps(grad), np.empty(2, np.int64)
    for item in range(begin, end):
        n, first = item // blocks, item % blocks * block
        last = min(first + block, rules.channels)
        for k in range(boxes.shape[0]):
            if np.int64(boxes[k, 0]) != n:
                continue
            frame, finite = _frame(boxes[k], scale, rules)
            if not finite:
                continue
            share = real(1) / max(real(frame.samples_y) * real(frame.samples_x), real(1))
            done[:] = 0
            while True:
                runs = _find_taps(frame, rules, done, taps)
                if runs == 0:
                    break
                scatter(
                    given, k * rules.channels * bins, first, last, n * rules.channels * plane, plane, rules.channels,
                    rules.channels_last, runs, taps, bins, share, grad,
                )  # fmt: skip
